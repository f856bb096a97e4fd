# SPDX-License-Identifier: Apache-2.0
"""Tests of the devices and their caches."""
