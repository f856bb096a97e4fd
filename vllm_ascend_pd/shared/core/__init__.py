# SPDX-License-Identifier: Apache-2.0
"""The pure part of what several rooms share."""
