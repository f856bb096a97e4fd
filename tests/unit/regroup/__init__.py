# SPDX-License-Identifier: Apache-2.0
"""Tests of the exchange among P's ranks."""
