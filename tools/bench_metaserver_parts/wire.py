# SPDX-License-Identifier: Apache-2.0
"""Minimal HTTP for benchmarks: server and client protocols that cost little beside what is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import cast

import httptools


class ServerProtocol(asyncio.Protocol):
    """Server protocol that calls `handle(path, body, write)` for each request. `write` takes raw bytes."""

    def __init__(self, handle: Callable[[bytes, bytes, ServerProtocol], Awaitable[None] | None]) -> None:
        self._handle = handle
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", b""
        self._task: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        work = self._handle(self._path, self._body, self)
        if work is not None:
            self._task = asyncio.ensure_future(work)

    def connection_lost(self, problem: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)


class ClientProtocol(asyncio.Protocol):
    """One keep-alive connection, and the times and sizes of its answers."""

    def __init__(self) -> None:
        self._done: asyncio.Future[None] | None = None
        self.status = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.loop = asyncio.get_running_loop()

    async def ask(self, request: bytes) -> int:
        """Send the raw request. Return the status once the answer is complete, and set `first` and `size`."""
        self._parser = httptools.HttpResponseParser(self)
        self.first, self.size, self.tail = 0.0, 0, b""
        self._done = self.loop.create_future()
        self.transport.write(request)
        await self._done
        return self._parser.get_status_code()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, piece: bytes) -> None:
        if not self.size:
            self.first = time.perf_counter()
        self.size += len(piece)
        self.tail = piece

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, problem: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("closed"))


def post(path: str, host: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class ClientPool:
    """Keep-alive connections to one address."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[ClientProtocol] = []

    async def ask(self, request: bytes) -> ClientProtocol:
        loop = asyncio.get_running_loop()
        connection = self._idle.pop() if self._idle else None
        if connection is None or connection.transport.is_closing():
            _, connection = await loop.create_connection(ClientProtocol, self._host, self._port)
        connection.status = await connection.ask(request)
        self._idle.append(connection)
        return connection
