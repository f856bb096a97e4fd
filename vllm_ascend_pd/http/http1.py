# SPDX-License-Identifier: Apache-2.0
"""An HTTP/1.1 client: keep-alive connections, answers passed on as the bytes arrive, time limits without timers.

It is a small client on httptools, because the libraries spend several times the relay's own work on each request
(the measurement is in docs/decisions.md). The metaserver calls engines with it, and D's httpx client has it as its
transport. It does what they need and no more: no redirects, no cookies, no decompression, no proxies. One sweep twice
a second checks all deadlines, so that a piece of a stream needs no timer. Reading pauses while the client is slower
than the engine.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import ssl
from collections import deque
from types import TracebackType
from typing import NamedTuple

import httptools

from vllm_ascend_pd.http.core.failures import HttpFailure
from vllm_ascend_pd.http.core.gathered import Gathered, Payload, cut, length
from vllm_ascend_pd.http.tls_files import TlsFiles
from vllm_ascend_pd.http.within import within
from vllm_ascend_pd.shared.resolver import Hosts, Resolver, reach

Headers = list[tuple[bytes, bytes]]

_IDLE_S = 4.0  # below the engines' own 5 s, so that a connection they are closing is not taken
_SWEEP_S = 0.5
_AHEAD_BYTES = 256 << 10  # read ahead of the client at most
_HEAD_BYTES = 64 << 10
_UNREAD_BYTES = 1 << 20  # most that the parser may keep before it returns a header or a piece of the body


class Origin(NamedTuple):
    """Address that an engine listens on."""

    scheme: str
    host: str
    port: int

    @property
    def netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


# This process has no file handle, memory or port left: that says nothing about the engine.
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


def _broken_and_not_replaced(problem: UpstreamError) -> UpstreamError:
    """Return the error for a request whose connection closed without an answer and could not be replaced.

    This does not count as a failure to connect: the engine may have read the request, and begun.
    """
    return UpstreamError(HttpFailure.BROKEN, f"it closed the connection, and then: {problem.why}")


def listed(value: bytes) -> list[bytes]:
    """Return the words of a header that lists some. They have no case."""
    return [word.strip().lower() for word in value.split(b",")]


class UpstreamError(Exception):
    """A failed HTTP call; `failure` says how far it may have got."""

    def __init__(self, failure: HttpFailure, why: str) -> None:
        super().__init__(why)
        self.failure = failure
        self.why = why


class _Stale(Exception):
    """A kept connection that the engine had closed before a byte of the answer came."""


class Reply:
    """An engine's answer: the head is there, the body is read piece by piece."""

    __slots__ = (
        "_connection",
        "_ended",
        "_error",
        "_idle_s",
        "_loop",
        "_pieces",
        "_size",
        "_waiter",
        "headers",
        "status",
    )

    def __init__(self, connection: _Connection, status: int, headers: Headers, idle_s: float) -> None:
        self.status = status
        self.headers = headers
        self._connection: _Connection | None = connection
        self._loop = connection.loop
        self._idle_s = idle_s
        self._pieces: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def at_end(self) -> bool:
        """True if the next read is known to return the regular end."""
        return self._ended and self._error is None and not self._pieces

    async def read(self, timeout_s: float | None = None) -> bytes:
        """Return what has come since the last read, b"" at the regular end. Raise UpstreamError if it broke off."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            if self._connection is not None:
                self._connection.limit_silence(timeout_s or self._idle_s)
            self._waiter = self._loop.create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        if self._size > _AHEAD_BYTES and self._connection is not None:
            self._connection.resume()
        self._size = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def rest(self, max_bytes: int, timeout_s: float | None = None) -> bytes:
        """Return the rest of the body. Raise UpstreamError if it broke off or is longer than `max_bytes`."""
        return bytes(await self.whole(max_bytes, timeout_s))

    async def whole(self, max_bytes: int, timeout_s: float | None = None) -> bytes | memoryview:
        """Return the rest of a body that may be long, without copying it as a whole. Raise as `rest` does."""
        gathered = Gathered(max_bytes)
        while piece := await self.read(timeout_s):
            try:
                gathered.add(piece)
            except ValueError:
                raise UpstreamError(HttpFailure.BROKEN, "its answer is too large") from None
            except OSError as problem:
                raise UpstreamError(HttpFailure.OURS, f"no memory for its answer: {problem}") from problem
        return gathered.whole()

    def close(self) -> None:
        """Cut the connection, unless the answer has ended. The engine sees its client disconnect."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    # -- from the connection

    def feed(self, piece: bytes) -> bool:
        """Take a piece of the body. Return False if enough is waiting and reading must pause."""
        self._pieces.append(piece)
        self._size += len(piece)
        self._wake()
        return self._size <= _AHEAD_BYTES

    def end(self, error: UpstreamError | None = None) -> None:
        self._ended, self._error, self._connection = True, error, None
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection to one engine: idle in its pool, or busy with one request."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: _Pool, idle_s: float) -> None:
        self.loop = loop
        self._due, self._suspect_by = 0.0, math.inf
        self.idle_since = 0.0
        self._pool = pool
        self._idle_s = self._silence_s = idle_s
        self._transport: asyncio.Transport | None = None
        self._head: asyncio.Future[Reply] | None = None
        self._reply: Reply | None = None
        self._answer_began = False
        self._unread = 0
        self._used = False
        self._paused = False
        self._unsent: deque[bytes | memoryview] = deque()
        self._full = False  # the transport's buffer takes no more
        self._sending: asyncio.Handle | None = None
        self._until_close = False
        self._headers: Headers = []

    def request(self, data: list[bytes | memoryview], bodiless: bool, timeout_s: float) -> asyncio.Future[Reply]:
        """Send a request. The future is done when the answer's head is there."""
        if self._transport is None or self._transport.is_closing():
            raise _Stale
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._head_size = [], 0
        self._bodiless, self._answer_began, self._until_close, self._unread = bodiless, False, False, 0
        self._due, self._suspect_by = self.loop.time() + timeout_s, math.inf
        self._head = self.loop.create_future()
        self._pool.busy[self] = None
        self._unsent.extend(data)
        self._send_on()
        return self._head

    def _send_on(self) -> None:
        """Send one piece, and the next one in the loop's next turn, as soon as the engine reads."""
        self._sending = None
        if self._unsent and not self._full and self._transport is not None:
            self._transport.write(self._unsent.popleft())
            if self._unsent and not self._full:
                self._sending = self.loop.call_soon(self._send_on)

    def limit_silence(self, silence_s: float) -> None:
        """Fail from now on after a silence of this length."""
        self._silence_s = silence_s
        self._due = self.loop.time() + silence_s

    @property
    def deadline(self) -> float:
        """Time at which the connection fails: never while reading is paused, as nothing of the engine is read then."""
        return math.inf if self._paused else min(self._due, self._suspect_by)

    def suspect(self, silence_s: float) -> None:
        """Fail after a silence of this length, until something arrives or `trust_again` is called."""
        self._suspect_by = min(self._suspect_by, self.loop.time() + silence_s)

    def trust_again(self) -> None:
        self._suspect_by = math.inf

    def resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused, self._due = False, self.loop.time() + self._silence_s
            self._suspect_by = math.inf  # nothing was read meanwhile, so it was not silent
            self._transport.resume_reading()

    def abort(self) -> None:
        self._pool.busy.pop(self, None)
        self._unsent.clear()
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        waited = "no answer in time" if self._reply is None else "no data in time"
        self._fail(UpstreamError(HttpFailure.TIMEOUT, waited))

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream's transport is an asyncio.Transport

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._sending is None:
            self._send_on()

    def data_received(self, data: bytes) -> None:
        if self._head is None:
            self.abort()  # nothing was asked: these bytes must not be taken for the next answer
            return
        self._answer_began = True
        self._suspect_by = math.inf
        if self._reply is not None:
            self._due = self.loop.time() + self._silence_s
        self._unread += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as problem:
            self._fail(UpstreamError(HttpFailure.BROKEN, f"not HTTP: {problem}"))
        if self._unread > _UNREAD_BYTES and self._head is not None:
            self._fail(UpstreamError(HttpFailure.BROKEN, "a header of its answer does not end"))

    def connection_lost(self, problem: Exception | None) -> None:
        if self._reply is not None and self._until_close and problem is None:
            self._finish(keep=False)
        elif self._head is not None:
            self._fail(
                UpstreamError(
                    HttpFailure.BROKEN,
                    f"it closed the connection ({problem})" if problem else "it closed the connection",
                )
            )
        self._pool.forget(self)

    # -- httptools

    def on_message_begin(self) -> None:
        if self._head is None:
            self.abort()  # a second answer right behind the one that was asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        self._unread = 0
        self._headers.append((name.lower(), value))
        self._head_size += len(name) + len(value)
        if self._head_size > _HEAD_BYTES:
            self._fail(UpstreamError(HttpFailure.BROKEN, "its headers are too large"))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = []
            return
        if self._head is None or self._head.done():
            return
        names = {name for name, _ in self._headers}
        empty = self._bodiless or status in (204, 304)
        self._until_close = not empty and not names & {b"content-length", b"transfer-encoding"}
        self._reply = Reply(self, status, self._headers, self._idle_s)
        self._head.set_result(self._reply)
        if self._bodiless:
            self._finish(keep=False)

    def on_body(self, piece: bytes) -> None:
        self._unread = 0
        if self._reply is not None and not self._reply.feed(piece) and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._reply is not None:
            self._finish(keep=self._parser.should_keep_alive())

    # -- ends

    def _finish(self, keep: bool) -> None:
        reply, self._reply, self._head = self._reply, None, None
        self._used = True
        self.resume()
        if reply is not None:
            reply.end()
        if keep and not self._unsent and self._transport is not None and not self._transport.is_closing():
            self._pool.keep(self)
        else:
            self.abort()

    def _fail(self, error: UpstreamError) -> None:
        reply, self._reply = self._reply, None
        head, self._head = self._head, None
        if reply is not None:
            reply.end(error)
        elif head is not None and not head.done():
            stale = self._used and not self._answer_began and error.failure is HttpFailure.BROKEN
            head.set_exception(_Stale() if stale else error)
        self.abort()


class _Pool:
    """The connections to one engine."""

    def __init__(self) -> None:
        self.idle: list[_Connection] = []
        self.busy: dict[_Connection, None] = {}  # in the order in which they were asked
        self.making = 0  # connections that are being made

    @property
    def used(self) -> bool:
        return bool(self.idle or self.busy or self.making)

    def take(self, now: float) -> _Connection | None:
        """Return the idle connection used last, the least likely to be closing; None if there is none."""
        if self.idle:
            connection = self.idle.pop()
            if now - connection.idle_since < _IDLE_S:
                return connection
            self.idle.append(connection)
        return None

    def keep(self, connection: _Connection) -> None:
        self.busy.pop(connection, None)
        connection.idle_since = connection.loop.time()
        self.idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        self.busy.pop(connection, None)
        if connection in self.idle:
            self.idle.remove(connection)

    def sweep(self, now: float) -> None:
        for connection in [c for c in self.busy if c.deadline < now]:
            connection.expire()
        old = [c for c in self.idle if now - c.idle_since >= _IDLE_S]
        self.idle = [c for c in self.idle if now - c.idle_since < _IDLE_S]
        for connection in old:
            connection.abort()


class Upstream:
    """All connections of this process to engines.

    `max_connecting`: most connections that are being made at once; others wait, so that a burst does not time out.
    """

    def __init__(
        self,
        connect_timeout_s: float,
        idle_timeout_s: float,
        tls: TlsFiles | None = None,
        max_connecting: int = 1 << 20,
    ) -> None:
        self._connecting = asyncio.Semaphore(max_connecting)
        self._connect_s = connect_timeout_s
        self._idle_s = idle_timeout_s
        self._tls = tls or TlsFiles(ssl.create_default_context)
        self.resolver = Resolver()
        self._pools: dict[Origin, _Pool] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def send(
        self,
        origin: Origin,
        method: str,
        path: bytes,
        headers: Headers,
        body: Payload,
        timeout_s: float,
        repeatable: bool = True,
    ) -> Reply:
        """Send a request and wait for the head of its answer. Raise UpstreamError. If cancelled, close the connection.

        `repeatable`: if a kept connection turns out to be closed, send the request again on another one. An engine may
        then read it twice. That is harmless for a generation (no client has seen the first answer) and for a prefill (P
        refuses a transfer that it has), but not for every request.
        """
        pool = self._pools.get(origin) or self._open(origin)
        data = _request(method, path, origin, headers, body)
        sent = False
        while True:
            connection = pool.take(asyncio.get_running_loop().time())
            fresh = connection is None
            try:
                connection = connection or await self._connect(origin, pool)
            except UpstreamError as problem:
                raise (_broken_and_not_replaced(problem) if sent else problem) from problem.__cause__
            try:
                return await self._exchange(connection, data, method == "HEAD", timeout_s)
            except _Stale:
                sent = True
                if fresh or not repeatable:
                    raise UpstreamError(HttpFailure.BROKEN, "it closed the connection") from None

    def suspect(self, origin: Origin, silence_s: float) -> None:
        """Fail requests to an engine that seems to be gone, each after a silence of this length."""
        pool = self._pools.get(origin)
        for connection in pool.busy if pool is not None else ():
            connection.suspect(silence_s)

    def trust_again(self, origin: Origin) -> None:
        """Undo `suspect`: the engine is there after all."""
        pool = self._pools.get(origin)
        for connection in pool.busy if pool is not None else ():
            connection.trust_again()

    async def _exchange(
        self, connection: _Connection, data: list[bytes | memoryview], bodiless: bool, timeout_s: float
    ) -> Reply:
        head = connection.request(data, bodiless, timeout_s)
        try:
            return await head
        except asyncio.CancelledError:
            connection.abort()
            raise

    async def _connect(self, origin: Origin, pool: _Pool) -> _Connection:
        tls = self._tls.context() if origin.scheme == "https" else None
        pool.making += 1  # a pool that is forgotten now would not be swept later
        try:
            hosts = self.resolver.known(origin.host) or await self._resolve(origin.host)
            async with self._connecting:
                making = self._reach(origin, hosts, pool, tls)
                return await within(self._connect_s, making, lambda made: made.abort())
        except asyncio.TimeoutError as problem:
            raise UpstreamError(HttpFailure.CONNECT, f"no connection within {self._connect_s:g} s") from problem
        except OSError as cause:
            failure = HttpFailure.OURS if cause.errno in _OURS else HttpFailure.CONNECT
            raise UpstreamError(failure, str(cause) or type(cause).__name__) from cause
        finally:
            pool.making -= 1

    async def _resolve(self, host: str) -> Hosts:
        """Return an engine's addresses. It is not to blame if its name is not known yet for want of a name server."""
        failure = HttpFailure.CONNECT if self.resolver.met(host) else HttpFailure.OURS
        try:
            found = await within(self._connect_s, self.resolver.resolve(host))
        except asyncio.TimeoutError as problem:
            raise UpstreamError(failure, "its name is still being looked up") from problem
        except OSError as problem:
            if problem.errno in _OURS:  # no thread or file handle to look it up with
                raise UpstreamError(HttpFailure.OURS, f"its name cannot be looked up: {problem}") from problem
            unanswered = isinstance(problem, socket.gaierror) and problem.errno == socket.EAI_AGAIN
            why = f"its name has no address: {problem}"
            raise UpstreamError(failure if unanswered else HttpFailure.CONNECT, why) from problem
        return [(address["family"], address["host"]) for address in found]

    async def _reach(self, origin: Origin, hosts: Hosts, pool: _Pool, tls: ssl.SSLContext | None) -> _Connection:
        loop = asyncio.get_running_loop()

        async def connect(host: str) -> _Connection:
            _, connection = await loop.create_connection(
                lambda: _Connection(loop, pool, self._idle_s),
                *(host, origin.port),
                ssl=tls,
                server_hostname=origin.host if tls else None,
            )
            return connection

        return await reach(hosts, connect)

    def _open(self, origin: Origin) -> _Pool:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="upstream sweep")
        return self._pools.setdefault(origin, _Pool())

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep(loop.time())

    def sweep(self, now: float) -> None:
        """End what is late, close what is idle for long, and forget engines that nothing is kept of."""
        for origin, pool in list(self._pools.items()):
            pool.sweep(now)
            if not pool.used:
                del self._pools[origin]

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.resolver.close()
        for pool in self._pools.values():
            for connection in (*pool.idle, *pool.busy):
                connection.abort()


def _request(method: str, path: bytes, origin: Origin, headers: Headers, body: Payload) -> list[bytes | memoryview]:
    lines = [method.encode(), b" ", path, b" HTTP/1.1\r\nhost: ", origin.netloc.encode(), b"\r\n"]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    if body or method in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d\r\n" % length(body))
    lines.append(b"\r\n")
    head = b"".join(lines)
    return [head + body] if isinstance(body, bytes) and len(body) < 16384 else [head, *cut(body)]
