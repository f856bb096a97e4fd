# SPDX-License-Identifier: Apache-2.0
"""What an engine and the router say of themselves: metrics and traces."""
