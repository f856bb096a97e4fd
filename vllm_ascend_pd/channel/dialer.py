# SPDX-License-Identifier: Apache-2.0
"""Dialling end of the side channel: P's workers dial D's workers, D's scheduler dials P's schedulers.

There is one connection per endpoint, which is reused. `send` connects on first use and again after a loss, with
back-off. A message that cannot leave soon is dropped, since the protocol repeats what matters. Everything here runs on
the loop thread.

When the kernel closes the connections of this process, its peers take that as proof that it is gone (docs/protocol.md,
fence). So a working connection is only closed on purpose, and then `Leaving` is sent first.
"""

from __future__ import annotations

import asyncio

from vllm_ascend_pd.channel.frames import Spoken
from vllm_ascend_pd.channel.limits import RateLimitedWarnings
from vllm_ascend_pd.channel.link import Context, Link
from vllm_ascend_pd.protocol.identity import Endpoint


class Dialer:
    """The links of one process to all endpoints that it dials."""

    def __init__(self, context: Context) -> None:
        self._context, self._limits = context, context.limits
        self.links: dict[Endpoint, Link] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    def send(self, endpoint: Endpoint, message: Spoken) -> bool:
        """Send a message, or queue it. Return False if it was dropped at once; True promises nothing."""
        if self._closed:
            return False
        link = self.links.get(endpoint)
        if link is None:
            if len(self.links) >= self._limits.max_links:
                self._context.count("dropped_too_many_links")
                return False
            link = self.links[endpoint] = self._new_link(endpoint)
        return link.send(message)

    def doubt(self, endpoint: Endpoint) -> None:
        """Handle an answer of a process that was not meant: the endpoint's name may have led, or lead, elsewhere."""
        link = self.links.get(endpoint)
        if link is not None:
            link.doubt()

    def up(self, endpoint: Endpoint) -> bool:
        """Return whether the greeting with this endpoint's process is complete and the connection stands."""
        link = self.links.get(endpoint)
        return link is not None and link.up

    async def close(self, *, quiet: bool = False) -> None:
        """Close all links. Idempotent.

        `quiet` vouches that this process's transfer engine is closed, so D may count the process as gone at once.
        Without it the closing proves nothing: D waits for other evidence, or revokes.
        """
        if self._closed:
            return
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.gather(*(link.close(quiet) for link in self.links.values()))
        await self._context.resolver.close()
        self.links.clear()

    def _new_link(self, endpoint: Endpoint) -> Link:
        if self._sweeper is None:
            loop = asyncio.get_running_loop()
            self._context.warn = RateLimitedWarnings(loop.time)
            self._sweeper = loop.call_later(self._limits.sweep_s, self._sweep)
        return Link(endpoint, self._context)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for endpoint, link in list(self.links.items()):
            link.sweep(loop.time())
            if link.forgettable(loop.time()):
                del self.links[endpoint]
        self._sweeper = loop.call_later(self._limits.sweep_s, self._sweep)
