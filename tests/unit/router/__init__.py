# SPDX-License-Identifier: Apache-2.0
"""Tests of the metaserver, and fake engines for it."""
