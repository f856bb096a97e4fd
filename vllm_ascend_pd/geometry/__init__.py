# SPDX-License-Identifier: Apache-2.0
"""Who owns which bytes: pure arithmetic on layouts, shards and token ranges."""
