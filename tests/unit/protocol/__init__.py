# SPDX-License-Identifier: Apache-2.0
"""Tests of the protocol's rules and of its form on the wire."""
