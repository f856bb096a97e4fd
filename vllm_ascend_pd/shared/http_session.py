# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 of D and the router: aiohttp's client, its connections made here, its errors as what became of a request.

aiohttp sends requests, parses answers and keeps connections. Here is what it does not do, or does wrong for calls of
which each may compute for minutes (docs/decisions/http-client.md): connections are made with our look-ups of names, few
at a time, and TLS files are read again; `HttpWire` repairs what its connections lack. No redirects, cookies,
decompression, proxies or other headers than the caller's.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import string
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote_from_bytes

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError
from yarl import URL

from vllm_ascend_pd.shared.core.failures import DECLINED, NOT_EXECUTED, HttpFailure, UpstreamError
from vllm_ascend_pd.shared.core.gathered import Payload, cut, length
from vllm_ascend_pd.shared.resolver import Hosts, Resolver, reach
from vllm_ascend_pd.shared.tls_files import TlsFiles
from vllm_ascend_pd.shared.within import within

Headers = list[tuple[bytes, bytes]]

IDLE_S = 4.0  # below the engines' own 5 s, so that a connection they are closing is not taken
_AHEAD_BYTES = 256 << 10  # read ahead of the caller at most
_HEAD_BYTES = 64 << 10
_UNREAD_BYTES = 1 << 20  # most that may come without a head or a piece of the body
_AT_ONCE_BYTES = 64 << 10  # of a request that are written in one turn
_SHORT_TARGET = 64  # bytes: the routes that most requests have; their URLs are kept
_IN_A_TARGET = string.ascii_letters + string.digits + string.punctuation
_AUTOMATIC = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # headers that aiohttp would add

# This process has no file handle, memory or port left: that says nothing about the engine.
OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class Origin(NamedTuple):
    """Address that a server listens on."""

    scheme: str
    host: str
    port: int

    @property
    def netloc(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Lost(aiohttp.ClientError):
    """A connection that ended before the head of an answer. `stale`: it was a kept one, and nothing of it came.

    aiohttp repeats some requests after its own errors of this kind. It does not know this one.
    """

    def __init__(self, why: str, stale: bool) -> None:
        super().__init__(why)
        self.stale = stale


class HttpWire(ResponseHandler):
    """A connection of aiohttp's client: cut where aiohttp would flush it, and what comes on it belongs to a request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._requests = 0
        self._answer: aiohttp.StreamReader | None = None  # to the last request; None: its head has not come
        self._came = self._unread = self._seen = 0  # bytes: since the request, since progress, of the body
        self._silence_s, self._heard, self._caller_is_slow = 0.0, 0.0, False
        self._look: asyncio.TimerHandle | None = None  # at the silence, before it can be too long

    def limit_silence(self, seconds: float) -> None:
        """Fail from now on after a silence of this length, unless reading is paused."""
        self._silence_s, self._heard = seconds, self._loop.time()
        if self._look is None or self._look.when() > self._heard + seconds:
            self._listen()

    def _listen(self) -> None:
        """Fail if the silence is too long, else look when it can be. To set a timer costs more than to read a piece."""
        now, at_end = self._loop.time(), self._answer is not None and self._answer.is_eof()
        left = (now if self._caller_is_slow else self._heard) + self._silence_s - now
        if self._look is not None:
            self._look.cancel()
        self._look = self._loop.call_later(left, self._listen) if left > 0 and not at_end else None
        if self._look is None and not at_end:
            late = f"no {'answer' if self._answer is None else 'data'} in time"
            self.set_exception(UpstreamError(HttpFailure.TIMEOUT, late))

    def set_response_params(self, **params: Any) -> None:
        """Begin a request. Its head has all of `read_timeout` from now on, and interim answers do not put that off."""
        self._requests += 1
        self._answer, self._came, self._unread, self._seen = None, 0, 0, 0
        self.limit_silence(params.pop("read_timeout"))
        super().set_response_params(read_timeout=None, **params)

    def feed_data(self, data: Any, size: int = 0) -> None:
        self._answer = data[1] if data[0].code >= 200 else None  # an interim answer is none
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        if data and (not self._requests or (self._answer is not None and self._answer.is_eof())):
            self.abort()  # nothing was asked: these bytes must not be taken for the next answer
            return
        self._came += len(data)
        self._unread += len(data)
        super().data_received(data)
        if seen := self._answer.total_bytes + 1 if self._answer is not None else 0:
            self._heard = self._loop.time()
        if seen != self._seen:
            self._seen, self._unread = seen, 0
        elif self._unread > _UNREAD_BYTES:
            self.set_exception(UpstreamError(HttpFailure.BROKEN, "a header of its answer does not end"))

    def pause_reading(self) -> None:
        self._caller_is_slow = True
        super().pause_reading()

    def resume_reading(self, *more: Any, **named: Any) -> None:
        """Read on, if reading is paused: aiohttp calls this for every piece, and parses nothing each time."""
        if self._caller_is_slow:
            self._caller_is_slow, self._heard = False, self._loop.time()
            super().resume_reading(*more, **named)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._look is not None:
            self._look.cancel()
        if exc is not None and self._answer is not None and not self._answer.is_eof():
            self._answer.set_exception(aiohttp.ClientPayloadError(str(exc)))  # also if its end is the connection's
        super().connection_lost(exc)

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        if self._answer is None and isinstance(exc, aiohttp.ClientOSError | aiohttp.ServerDisconnectedError):
            exc = Lost("" if isinstance(exc, aiohttp.ServerDisconnectedError) else str(exc), self._stale)
        elif self._answer is not None and not self._answer.is_eof() and self._answer.exception() is None:
            self._answer.set_exception(exc)  # else who reads it would wait for ever, if a chunk cannot be read
        super().set_exception(exc, *cause)

    @property
    def _stale(self) -> bool:
        return self._requests > 1 and not self._came

    def close(self) -> None:
        """Cut it. What waits to be sent would hold it as long as the other side does not read."""
        self.abort()


class HttpConnector(aiohttp.BaseConnector):
    """Connections that are kept by aiohttp and made here. What cannot be reached is an UpstreamError."""

    def __init__(self, connect_s: float, resolver: Resolver, max_connecting: int) -> None:
        super().__init__(limit=0, keepalive_timeout=IDLE_S)
        self._connect_s, self._resolver = connect_s, resolver
        self._turns = asyncio.Semaphore(max_connecting)

    async def _create_connection(self, req: aiohttp.ClientRequest, traces: Any, timeout: Any) -> ResponseHandler:
        loop = asyncio.get_running_loop()
        host, port = req.url.raw_host or "", req.url.port or 0
        tls: dict[str, Any] = {"ssl": req.ssl, "server_hostname": host} if req.is_ssl() else {}

        async def connect(address: str) -> HttpWire:
            _, wire = await loop.create_connection(lambda: HttpWire(loop), address, port, **tls)
            return wire

        try:
            hosts = self._resolver.known(host) or await self._look_up(host)
            async with self._turns:
                return await within(self._connect_s, reach(hosts, connect), HttpWire.abort)
        except asyncio.TimeoutError as problem:
            raise UpstreamError(HttpFailure.CONNECT, f"no connection within {self._connect_s:g} s") from problem
        except OSError as cause:
            failure = HttpFailure.OURS if cause.errno in OURS else HttpFailure.CONNECT
            raise UpstreamError(failure, str(cause) or type(cause).__name__) from cause

    async def _look_up(self, host: str) -> Hosts:
        """Return a server's addresses. It is not to blame if its name is not known yet for want of a name server."""
        failure = HttpFailure.CONNECT if self._resolver.met(host) else HttpFailure.OURS
        try:
            addresses = await within(self._connect_s, self._resolver.resolve(host))
        except asyncio.TimeoutError as problem:
            raise UpstreamError(failure, "its name is still being looked up") from problem
        except OSError as problem:
            if problem.errno in OURS:  # no thread or file handle to look it up with
                raise UpstreamError(HttpFailure.OURS, f"its name cannot be looked up: {problem}") from problem
            unanswered = isinstance(problem, socket.gaierror) and problem.errno == socket.EAI_AGAIN
            why = f"its name has no address: {problem}"
            raise UpstreamError(failure if unanswered else HttpFailure.CONNECT, why) from problem
        return [(address["family"], address["host"]) for address in addresses]


class HttpSession:
    """The connections of one loop to all servers.

    `max_connecting`: most connections that are being made at once; others wait, so that a burst does not time out.
    """

    def __init__(self, connect_s: float, tls: TlsFiles | None = None, max_connecting: int = 1 << 20) -> None:
        self.resolver = Resolver()
        self._connect_s, self._max_connecting = connect_s, max_connecting
        self._tls = tls or TlsFiles(ssl.create_default_context)
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self,
        origin: Origin,
        method: str,
        target: bytes,
        headers: Headers,
        body: Payload,
        silence_s: float,
        repeatable: bool,
    ) -> aiohttp.ClientResponse:
        """Send a request and wait for the head of its answer, and for no longer than `silence_s` of silence.

        Raise UpstreamError. `repeatable`: if a kept connection turns out to be closed, send it again on another one.
        The server may then read it twice.
        """
        session = self._session or self._open()
        named = [(name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in headers]
        size, sent = length(body), False
        url = (_short_url if len(target) <= _SHORT_TARGET else _url)(origin, target)
        if size or method in ("POST", "PUT", "PATCH"):
            named.append(("content-length", str(size)))
        arguments: dict[str, Any] = {
            "headers": named,
            "ssl": self._tls.context() if origin.scheme == "https" else True,
            "timeout": aiohttp.ClientTimeout(total=None, sock_read=silence_s),
            "allow_redirects": False,
        }
        while True:
            data = body if size <= _AT_ONCE_BYTES and isinstance(body, bytes) else _pieces(body)
            try:
                response = await session.request(method, url, data=data if size else None, **arguments)
            except Lost as lost:
                if not (lost.stale and repeatable):
                    raise failed(lost) from lost
                sent = True
                continue
            except UpstreamError as problem:
                if not sent or problem.failure not in NOT_EXECUTED:
                    raise
                # It does not count as a failure to connect: the server may have read the request, and begun.
                why = f"it closed the connection, and then: {problem.why}"
                raise UpstreamError(HttpFailure.BROKEN, why) from problem.__cause__
            except aiohttp.ClientError as problem:
                raise failed(problem) from problem
            if response.status == 101:
                response.close()
                raise UpstreamError(HttpFailure.BROKEN, "it changes the protocol")
            if sent and response.status in DECLINED:  # as above: only the second time it surely was not executed
                response.close()
                raise UpstreamError(HttpFailure.BROKEN, f"it closed the connection, and then: {response.status}")
            return response

    def _open(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=HttpConnector(self._connect_s, self.resolver, self._max_connecting),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_AUTOMATIC,
            read_bufsize=_AHEAD_BYTES // 2,  # aiohttp reads twice that ahead
            max_line_size=_HEAD_BYTES,
            max_field_size=_HEAD_BYTES,
        )
        return self._session

    async def close(self) -> None:
        await self.resolver.close()
        if self._session is not None:
            await self._session.close()


async def read_piece(response: aiohttp.ClientResponse) -> bytes:
    """Return what of the body has come since the last piece, b"" at the regular end.

    Raise UpstreamError if it broke off, once all is returned that had come before: aiohttp would drop that.
    """
    content = response.content
    try:
        return await content.readany()
    except (aiohttp.ClientError, HttpProcessingError, UpstreamError) as problem:
        content.set_exception(None)  # type: ignore[arg-type]
        came = content.read_nowait()
        content.set_exception(problem)
        if came:
            return came
        raise failed(problem) from problem


def failed(problem: Exception) -> UpstreamError:
    """Return what became of a request that had a connection. It may have been executed."""
    if isinstance(problem, UpstreamError):
        return problem
    if isinstance(problem, aiohttp.ClientResponseError | HttpProcessingError):
        return UpstreamError(HttpFailure.BROKEN, f"not HTTP: {problem.message}")
    why = str(problem)
    return UpstreamError(HttpFailure.BROKEN, f"it closed the connection ({why})" if why else "it closed the connection")


def _url(origin: Origin, target: bytes) -> URL:
    """Return a URL whose path and query are sent as they came. What is no printable ASCII must be escaped there."""
    path, _, query = quote_from_bytes(target, safe=_IN_A_TARGET).partition("?")
    host = origin.host if origin.host.isascii() else origin.host.encode("idna").decode()
    host = f"[{host}]" if ":" in host else host
    return URL.build(scheme=origin.scheme, host=host, port=origin.port, path=path, query_string=query, encoded=True)


_short_url = lru_cache(maxsize=1024)(_url)


async def _pieces(body: Payload) -> AsyncIterator[bytes | memoryview]:
    for piece in cut(body):
        yield piece
