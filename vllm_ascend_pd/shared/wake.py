# SPDX-License-Identifier: Apache-2.0
"""Wake-ups between processes of one engine: a worker with news makes the scheduler's process look at once.

A datagram has no content and causes at most one early step, so it needs no authentication. If one is lost, the
scheduler looks at the latest after its longest sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from vllm_ascend_pd.shared.loop import LoopThread


class Doorbell(asyncio.DatagramProtocol):
    """The scheduler's end. It calls `on_ring` on the loop thread."""

    def __init__(self, on_ring: Callable[[], None]) -> None:
        self._on_ring = on_ring
        self._transport: asyncio.BaseTransport | None = None

    def start(self, loop: LoopThread, host: str) -> tuple[str, int]:
        async def listen() -> tuple[str, int]:
            transport, _ = await loop.loop.create_datagram_endpoint(lambda: self, local_addr=(host, 0))
            self._transport = transport
            address = transport.get_extra_info("sockname")
            return address[0], address[1]

        return loop.call(listen(), timeout=5.0)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._on_ring()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Ringer:
    """A worker's end."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._address: tuple[str, int] | None = None

    def aim(self, address: tuple[str, int] | None) -> None:
        if address is None or address == self._address:
            return
        self.close()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with contextlib.suppress(OSError):  # no free descriptor: the step itself must go on
            self._socket = socket.socket(family, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
            self._address = address

    def ring(self) -> None:
        if self._socket is not None and self._address is not None:
            with contextlib.suppress(OSError):  # the scheduler looks by itself soon
                self._socket.sendto(b"\0", self._address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = self._address = None
