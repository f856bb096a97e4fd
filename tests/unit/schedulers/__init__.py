# SPDX-License-Identifier: Apache-2.0
"""Tests of both schedulers against each other."""
