# SPDX-License-Identifier: Apache-2.0
"""Limits of what callers send, before anything is done with it: in size, in time and all together.

The HTTP server has no limits of its own for the head of a request. A head that never ends would be kept in memory, and
one that never comes would keep its connection for ever.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm_ascend_pd.http.gathered import Gathered
from vllm_ascend_pd.http.within import within
from vllm_ascend_pd.metaserver.service.faults import Answer, known

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

CONNECTION = "vllm_ascend_pd.connection"  # key of the `Protocol` below among the extensions of a request's scope
HEAD_S = 20.0  # from the first byte of a request, or from the connection, to the end of the head
HEAD_BYTES = 256 << 10  # of a head: bytes read since the last complete head or piece of a body
BODY_S = 120.0  # of a body: from the head, or the first piece if that came with the head, to the last piece
BODIES_BYTES = 512 << 20  # of all bodies together, until their exchanges end
CONNECTIONS = 8192  # of callers, busy and idle, at most; fewer where the process may open few files


class NotTaken(Exception):
    """A request that is not taken; `answer` says why."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class CallerLeft(Exception):
    """A caller that left before its body was complete."""


class Body:
    """One request's body, counted until it is released, at the latest when its exchange ends."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._size = 0

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Stop counting the body, which is not needed any more. Idempotent."""
        self._intake.held -= self._size
        self._size = 0

    async def read(self, scope: Scope, receive: Receive, max_bytes: int) -> bytes | memoryview:
        """Return the whole body. Raise NotTaken or CallerLeft."""
        first, more = b"", True
        connection: Protocol = scope["extensions"][CONNECTION]
        if connection.body_began:  # the usual case: a time limit takes a task, a tenth of the cost of a relay
            first, more = self._take(await receive(), max_bytes)
            if not more:
                return first
        try:
            return await within(self._intake.body_s, self._rest(first, receive, max_bytes))
        except asyncio.TimeoutError as problem:
            raise _refused(408, "PD-META-014", seconds=f"{self._intake.body_s:g}") from problem

    async def _rest(self, first: bytes, receive: Receive, max_bytes: int) -> bytes | memoryview:
        gathered, piece, more = Gathered(max_bytes), first, True
        try:
            gathered.add(piece)
            while more:
                piece, more = self._take(await receive(), max_bytes)
                gathered.add(piece)
        except OSError as problem:
            raise _refused(429, "PD-META-015", retry_after_s=2) from problem
        return gathered.whole()

    def _take(self, message: MutableMapping[str, Any], max_bytes: int) -> tuple[bytes, bool]:
        """Return a piece, and whether there are more. Raise NotTaken or CallerLeft."""
        if message["type"] == "http.disconnect":
            raise CallerLeft
        piece: bytes = message.get("body", b"")
        self._size += len(piece)
        self._intake.held += len(piece)
        if self._size > max_bytes:
            raise _refused(413, "PD-META-013", max=max_bytes)
        if self._intake.held > self._intake.max_bytes:
            raise _refused(429, "PD-META-015", retry_after_s=2)
        return piece, message.get("more_body", False)


class Intake:
    """The bodies of one worker."""

    def __init__(self, body_s: float = BODY_S, max_bytes: int = BODIES_BYTES) -> None:
        self.body_s, self.max_bytes = body_s, max_bytes
        self.held = 0  # bytes of all bodies that are read or in use

    def body(self) -> Body:
        return Body(self)


def max_connections() -> int:
    """Return how many callers may connect: half of the files that may be open, as engines, logs and lines need some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if soft == resource.RLIM_INFINITY else max(16, min(CONNECTIONS, soft // 2))


def _refused(status: int, code: str, retry_after_s: float | None = None, **values: object) -> NotTaken:
    """Return a refusal that closes the connection: the rest of the body would be taken for the next request."""
    answer = known(status, code, retry_after_s, **values)
    answer.headers.append((b"connection", b"close"))
    return NotTaken(answer)


class HeadWithBody:
    """A transport that sends the head of an answer with the first piece of its body, as ASGI allows.

    uvicorn writes them one after the other: a system call and a packet more for each answer.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100 "):
            self._head = data
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Send the head alone: no body follows."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits for the head of a request and a callback when the caller is gone.

    To wait for that in ASGI's way takes a task for each request, a tenth of the cost of its relay.
    """

    max_connections = CONNECTIONS
    body_began = False  # something of the last request's body has come, or its end: it can be read without waiting
    _gone = False
    _when_gone: Callable[[], None] | None = None

    def watch(self, when_gone: Callable[[], None]) -> None:
        """Call `when_gone` once if the caller of the request in progress leaves, or has left."""
        self._when_gone = when_gone
        if self._gone:
            when_gone()

    def unwatch(self, when_gone: Callable[[], None]) -> None:
        if self._when_gone is when_gone:  # else the next request of this connection has begun
            self._when_gone = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.max_connections:
            self._make_room()
        self._unread = 0
        self._idle_since = self.loop.time()
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self.transport = HeadWithBody(transport)  # type: ignore[assignment]  # what uvicorn uses of one
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        self._gone = True
        if self._when_gone is not None:
            self._when_gone()

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > HEAD_BYTES:  # trailers too
            self.transport.abort()
        elif self._in_head and self._head_timer is None:
            self._wait_for_head()

    def _make_room(self) -> None:
        """Close the connection that is idle for longest; it could not be distinguished from an attacker's."""
        idle = [c for c in self.connections if isinstance(c, Protocol) and c.idle]
        if idle:
            min(idle, key=lambda c: c._idle_since).transport.abort()

    @property
    def idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        self.transport.flush()  # type: ignore[attr-defined]  # ours
        super().on_response_complete()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]  # ours is no dictionary

    def on_headers_complete(self) -> None:
        self._in_head, self.body_began, self._unread = False, False, 0
        self._stop_waiting()
        super().on_headers_complete()
        self.headers = []  # trailers go there, and are no headers of the request that is being answered

    def on_body(self, body: bytes) -> None:
        self._unread, self.body_began = 0, True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.body_began = True
        super().on_message_complete()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
