# SPDX-License-Identifier: Apache-2.0
"""Tests of both runtimes against each other."""
