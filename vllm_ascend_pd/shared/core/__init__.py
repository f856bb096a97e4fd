# SPDX-License-Identifier: Apache-2.0
"""What several rooms share and is pure."""
