# SPDX-License-Identifier: Apache-2.0
"""The production metaserver on a simulated clock and network: from its ASGI entry to the bytes sent to engines.

aiohttp's client runs as it ships: the loop's `create_connection` and the clocks are replaced. Left out are sockets,
look-ups of names, TLS and the HTTP server in front (tests/unit/router).
"""
