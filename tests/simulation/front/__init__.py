# SPDX-License-Identifier: Apache-2.0
"""The production metaserver on a simulated clock and network: from its ASGI entry to the bytes sent to engines."""
