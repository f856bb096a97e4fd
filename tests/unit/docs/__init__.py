# SPDX-License-Identifier: Apache-2.0
"""Tests of the pages, the examples and the dashboard."""
