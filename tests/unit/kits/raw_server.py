# SPDX-License-Identifier: Apache-2.0
"""A server that reads requests and answers with raw bytes, valid or not."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

Handle = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WAIT_S = 10.0  # only where a promise is broken


class RawServer:
    """Read a request and call `handle`, which writes the answer. Count connections and requests."""

    def __init__(self, handle: Handle, greeting: bytes = b"") -> None:
        self._handle, self._greeting = handle, greeting
        self.connections = 0
        self.requests: list[bytes] = []
        self.closed = 0
        self.port = 0

    async def start(self, host: str = "127.0.0.1") -> RawServer:
        self._server = await asyncio.start_server(self._serve, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            writer.write(self._greeting)
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [h for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                self.requests.append(head + body)
                await self._handle(head + body, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()

    def stop(self) -> None:
        self._server.close()

    @property
    def stopped(self) -> bool:
        return not self._server.is_serving()


def says(*pieces: bytes, pause_s: float = 0.0, close: bool = False) -> Handle:
    """Return a handler that writes these pieces."""

    async def handle(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if close:
            writer.close()

    return handle


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a process does that dies with bytes unread: the other side gets a reset."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def until(promise: Callable[[], object]) -> None:
    end = asyncio.get_running_loop().time() + WAIT_S
    while not promise():
        assert asyncio.get_running_loop().time() < end, "it did not come true"
        await asyncio.sleep(0.01)
