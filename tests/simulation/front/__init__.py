# SPDX-License-Identifier: Apache-2.0
"""The metaserver as it ships, on a simulated clock and network: from its ASGI entry to the bytes that it writes to engines."""
