# SPDX-License-Identifier: Apache-2.0
"""Tests of what is refused at the start of an engine."""
