# SPDX-License-Identifier: Apache-2.0
"""Tests of the HTTP client for engines."""
