# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on layouts, shards and token ranges: the bytes that each rank holds, owns and writes. Pure code."""
