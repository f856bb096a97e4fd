# SPDX-License-Identifier: Apache-2.0
"""Connections between the metaserver and the engines as pairs of queues with a delay, and calls of its handler."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

import httptools

from simulation.front.clock import VirtualLoop
from vllm_ascend_pd.router.intake import CallerRequest

Headers = list[tuple[bytes, bytes]]


class FrontListener(Protocol):
    """A listener at an address."""

    async def accept(self) -> bool:
        """Return whether it accepts a connection, perhaps after a delay."""

    def cuts(self) -> float:
        """Return the probability that a connection breaks at some byte."""

    def was_cut(self) -> None: ...

    def connected(self, connection: EngineConnection) -> None: ...


class SimulatedTransport(asyncio.Transport):
    """One end. Written bytes arrive at the other end in order, later."""

    def __init__(self, loop: VirtualLoop, delay: Callable[[], float]) -> None:
        super().__init__()
        self.loop, self._delay = loop, delay
        self.protocol: Any = None
        self.other: SimulatedTransport | None = None
        self.closed = self._paused = False
        self.left: int | None = None  # bytes until the network breaks; None: it does not
        self.when_cut: Callable[[], None] = lambda: None
        self._waiting: list[bytes] = []
        self._last = 0.0

    def _later(self, act: Callable[..., None], *args: Any) -> None:
        self._last = max(self._last + 1e-9, self.loop.now + self._delay())  # events at one moment have no order
        self.loop.call_at(self._last, act, *args)

    def write(self, data: Any) -> None:
        if self.closed or self.other is None:
            return
        self._later(self.other.arrived, bytes(data[: self.left]))
        if self.left is not None:
            self.left -= len(data)
            if self.left <= 0:
                self.when_cut()
                self.abort()

    def arrived(self, data: bytes) -> None:
        if self._paused:
            self._waiting.append(data)
        elif not self.closed:
            self.protocol.data_received(data)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.arrived(data)

    def close(self) -> None:
        self._cut(None)

    def abort(self) -> None:
        self._cut(ConnectionResetError("reset"))

    def _cut(self, problem: Exception | None) -> None:
        if self.closed:
            return
        self.closed = True
        self.loop.call_soon(self.protocol.connection_lost, None)
        if self.other is not None:
            self._later(self.other.lost, problem)

    def lost(self, problem: Exception | None) -> None:
        if not self.closed:
            self.closed = True
            self.protocol.connection_lost(problem)

    def is_closing(self) -> bool:
        return self.closed


class FrontNetwork:
    """Listeners by address. A new connection takes a round trip."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, slowest_s: float, cuts: random.Random) -> None:
        self.loop, self._rng, self._slowest, self._cuts = loop, rng, slowest_s, cuts
        self.servers: dict[int, FrontListener] = {}
        loop.connect = self.connect

    def delay(self) -> float:
        return self._rng.random() * self._slowest

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[SimulatedTransport, Any]:
        await asyncio.sleep(self.delay())
        server = self.servers[port]
        if not await server.accept():
            raise ConnectionRefusedError(111, "Connection refused")
        await asyncio.sleep(self.delay())
        near, far = SimulatedTransport(self.loop, self.delay), SimulatedTransport(self.loop, self.delay)
        near.other, far.other = far, near
        if self._cuts.random() < server.cuts():
            side = self._cuts.choice((near, far, far))
            side.left, side.when_cut = int(10 ** self._cuts.uniform(0.0, 4.0)), server.was_cut
        near.protocol = protocol = factory()
        far.protocol = connection = EngineConnection(far)
        protocol.connection_made(near)
        server.connected(connection)
        return near, protocol


class EngineRequest:
    """A request to an engine, and its answer."""

    def __init__(self, connection: EngineConnection, path: str, headers: dict[str, str], body: bytes) -> None:
        self.connection = connection
        self.path, self.headers, self.body = path, headers, body

    def whole(self, status: int, body: bytes, kind: bytes = b"application/json") -> None:
        self.connection.write(_head(status, kind, b"content-length: %d" % len(body)) + body)

    def begin(self) -> None:
        self.connection.write(_head(200, b"text/event-stream", b"transfer-encoding: chunked"))

    def piece(self, data: bytes) -> None:
        if data:  # an empty chunk is the end
            self.connection.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.connection.write(b"0\r\n\r\n")

    def tear(self, after: bytes = b"") -> None:
        """Break the connection, perhaps in the middle of an answer."""
        self.connection.write(after)
        self.connection.transport.abort()


def _head(status: int, kind: bytes, length: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: %b\r\n%b\r\n\r\n" % (status, kind, length)


class EngineConnection(asyncio.Protocol):
    """An engine's end of a connection: parses requests and runs a task for each, until the caller disconnects."""

    def __init__(self, transport: SimulatedTransport) -> None:
        self.transport = transport
        self.handle: Callable[[EngineRequest], Any] | None = None
        self.task: asyncio.Task[None] | None = None
        self.gone: Callable[[EngineConnection], object] = lambda connection: None
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._headers, self._body = b"", {}, b""  # type: bytes, dict[str, str], bytes

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, problem: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()
        self.gone(self)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, piece: bytes) -> None:
        self._body += piece

    def on_message_complete(self) -> None:
        request = EngineRequest(self, self._url.decode(), self._headers, self._body)
        self._url, self._headers, self._body = b"", {}, b""
        if self.handle is not None:
            self.task = self.transport.loop.create_task(self.handle(request), name="engine's request")


# ---- callers of the metaserver


class ClientCall:
    """A caller's request to the handler of all connections. `leave` closes its connection."""

    total_bytes = 0  # as of a body

    def __init__(self, app: Any, path: str, body: bytes, headers: Headers, method: str = "POST") -> None:
        self._app, self._body = app, body
        this: Any = self  # it is the body and the connection too
        self.asked = CallerRequest(method, path, path.encode(), headers, "127.0.0.1", this, this)
        self.status, self.body, self.done = 0, b"", False
        self.heard = asyncio.Event()  # set by any news
        self.left = False
        self._when_gone: Callable[[], None] | None = None
        self.task: asyncio.Task[None] | None = None

    def watch(self, when_gone: Callable[[], None]) -> None:
        """Watch the connection as `CallerConnection` does."""
        self._when_gone = when_gone
        if self.left:
            when_gone()

    def unwatch(self, when_gone: Callable[[], None]) -> None:
        self._when_gone = None

    @property
    def gone(self) -> bool:
        return self.left

    def is_eof(self) -> bool:
        return True

    def at_eof(self) -> bool:
        return True

    def read_nowait(self) -> bytes:
        return self._body

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self.left:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += bytes(message.get("body", b""))
            self.done = not message.get("more_body", False)
        self.heard.set()

    def start(self) -> ClientCall:
        self.task = asyncio.get_running_loop().create_task(self._run(), name="caller's request")
        return self

    async def _run(self) -> None:
        await self._app(self.asked, self.send)
        if not self.done and not self.left:
            raise AssertionError(f"{self.asked.path}: the service returned in the middle of its answer")

    def leave(self) -> None:
        if not self.left and not self.done:
            self.left = True
            if self._when_gone is not None:
                self._when_gone()

    async def more(self) -> None:
        """Wait for news."""
        self.heard.clear()
        if not self.done:
            await self.heard.wait()
