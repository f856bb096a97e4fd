# SPDX-License-Identifier: Apache-2.0
"""P's side: a room for each of its two processes. What these say to each other is in metadata.py."""
