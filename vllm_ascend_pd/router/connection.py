# SPDX-License-Identifier: Apache-2.0
"""Callers' connections: aiohttp's HTTP/1.1 server, with limits for heads, and a callback when a caller has gone.

Where a request ends is for aiohttp's parser to say: it reads the body of a request with `Upgrade` before it takes what
follows for the next request. Only callbacks of asyncio are overridden here, and no private name of aiohttp is used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage

from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.router.answering import Answering
from vllm_ascend_pd.router.departures import Departures
from vllm_ascend_pd.router.exchange import AsgiSend
from vllm_ascend_pd.router.faults import known
from vllm_ascend_pd.router.gate import Activity, Place, Places
from vllm_ascend_pd.router.intake import CallerRequest

log = logging.getLogger(__name__)

HEAD_S = 20.0  # from the first byte of a request, or from the connection, to the end of the head
HEAD_BYTES = 256 << 10  # of one line or field of a head
UNREAD_BYTES = 1 << 20  # read since the last complete head or piece of a body: heads and trailers altogether
_KEEPALIVE_S = 75.0  # longer than a client keeps a connection idle, so that it is the client that closes
_LINGER_S = 2.0  # what comes behind an answer to a part of a request is read for so long, else the client may miss it
_LAST_HEAD_S = 0.2  # after an answer to a caller that sends no more, for a request that it sent before

Handle = Callable[[CallerRequest, AsgiSend], Awaitable[None]]


class CallerConnection(web.RequestHandler):
    """One caller's connection."""

    def __init__(self, door: FrontDoor, place: Place, **given: Any) -> None:
        super().__init__(door, loop=asyncio.get_running_loop(), **given)
        self.gone = False
        self.answering: Answering | None = None  # the answer to the last request
        self._door, self._place = door, place
        self._when_gone: Callable[[], None] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._content: StreamReader | None = None  # of the last request, until it is answered and read
        self._version = HttpVersion11
        self._busy = False
        self._unread = self._seen = 0  # bytes; `_seen`: of that content
        self._stopped_reading = False  # too much waits behind the request in progress
        self._at_end = False  # the caller sends no more
        self._watched = -1  # descriptor, while it is known whether such a caller is there only by what is sent to it

    def watch(self, when_gone: Callable[[], None]) -> None:
        self._when_gone = when_gone
        if self.gone:
            when_gone()

    def unwatch(self, when_gone: Callable[[], None]) -> None:
        if self._when_gone is when_gone:  # else the next request of this connection has begun
            self._when_gone = None

    def go_on(self) -> None:
        if self.transport is not None and self._version >= HttpVersion11 and not self._at_end:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def begin(self, head: RawRequestMessage, request: web.BaseRequest) -> None:
        """Note that the head of a request is complete.

        The parser loses what comes with the end of a request that offers another protocol, and takes a trailer for a
        header of the next request: such requests are the last of their connections.
        """
        lasting = not (head.should_close or head.upgrade or head.chunked or head.method == "CONNECT")
        self._busy, self._content, self._version = True, request.content, head.version
        self.answering = Answering(request, lasting)
        self._unread, self._seen = 0, request.content.total_bytes
        self._door.places.turn(self._place, Activity.BUSY)
        self._stop_waiting()
        if self._stopped_reading and self.transport is not None and not self.transport.is_closing():
            self._stopped_reading = False
            self.transport.resume_reading()

    def end(self) -> None:
        """Note that a request is answered."""
        self._busy = False
        if self._content is not None and self._content.is_eof():
            self._content = None
        if not self.gone:
            self._door.places.turn(self._place, Activity.IDLE)
            if self._at_end or self._unread:
                self._wait_for_head()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._place.close, self._place.served = self.abort, True
        self._door.places.turn(self._place, Activity.IDLE)
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        self._door.places.leave(self._place)
        self._door.departures.forget(self._watched)
        self.gone = True
        super().connection_lost(exc)
        if self._when_gone is not None:
            self._when_gone()

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        content = self._content
        if content is not None and content.total_bytes != self._seen:
            self._seen, self._unread = content.total_bytes, 0
        complete = content is None or content.is_eof()
        if self._unread > UNREAD_BYTES:
            # Behind a request complete heads may wait. The next begins only after the answer's end, so also in between
            # they are kept; a head that is not complete has its own deadline.
            if complete and self.answering is not None and self.transport is not None:
                self._stopped_reading = True
                self.transport.pause_reading()
                if not self._busy and self._head_timer is None:
                    self._wait_for_head()
            else:
                self.abort()
        elif self._unread and complete and not self._busy and self._head_timer is None:
            self._wait_for_head()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection: a caller that only sends no more may want its answer. With TLS it is closed here."""
        if self._at_end or self.ssl_context is not None:
            return self._at_end  # uvloop says it again whenever reading is resumed
        self._at_end = True
        asyncio.get_running_loop().call_soon(self._after_end)  # a request that came just before begins first
        return True

    def _after_end(self) -> None:
        """Tell a caller that sends no more from one that has gone: a system without its socket answers by a reset."""
        transport, content = self.transport, self._content
        if transport is None or transport.is_closing():
            return
        if content is not None and not content.is_eof():
            transport.close()
        elif not self._busy or self.answering is None:
            self._wait_for_head()
        else:
            transport.write(self.answering.sign_of_life())
            self._watched = transport.get_extra_info("socket").fileno()
            self._door.departures.watch(self._watched, self.abort)

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        delay = _LAST_HEAD_S if self._at_end else HEAD_S
        self._head_timer = asyncio.get_running_loop().call_later(delay, self._no_head)

    def _no_head(self) -> None:
        if self._at_end and self.transport is not None:
            self.transport.close()  # what is written still goes out
        else:
            self.abort()

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # -- aiohttp

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to what is no HTTP, or to a request at which we failed; the connection closes after it."""
        answer = self.answering or Answering(request)
        if status < 500:
            why = one_line((message or "").partition("\n")[0].rstrip(":"), 200)
            answer.refusal = known(status, "PD-META-040", why=why or "it cannot be parsed")
            return answer
        log.error("a request failed", exc_info=exc)
        if answer.begun:
            raise ConnectionError("a part of the answer is out")
        answer.refusal = known(status, "PD-META-041")
        return answer


class FrontDoor(web.Server):
    """aiohttp's server. `serve` makes the protocol of a connection; `handle` answers each request."""

    def __init__(self, handle: Handle, places: Places) -> None:
        super().__init__(self._answer, request_factory=self._begin)
        self.places = places
        self.departures = Departures()
        self._handle = handle

    def serve(self, place: Place) -> CallerConnection:
        """Return the protocol of a new connection."""
        return CallerConnection(
            self,
            place,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=_KEEPALIVE_S,
            lingering_time=_LINGER_S,
            max_line_size=HEAD_BYTES,
            max_field_size=HEAD_BYTES,
        )

    def _begin(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: Any,  # a connection of ours
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        request = web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())
        protocol.begin(message, request)
        return request

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection: Any = request.protocol  # one of ours
        answering: Answering = connection.answering
        try:
            await self._handle(_asked(request, connection), answering)
        finally:
            connection.end()
        return answering


def _asked(request: web.BaseRequest, connection: CallerConnection) -> CallerRequest:
    path, query = request.rel_url.raw_path, request.rel_url.raw_query_string
    peer = connection.peername
    return CallerRequest(
        request.method,
        unquote(path) if "%" in path else path,
        (f"{path}?{query}" if query else path).encode("utf-8", "surrogateescape"),
        [(name.lower(), value) for name, value in request.raw_headers],
        peer[0] if isinstance(peer, tuple) else "",
        request.content,
        connection,
    )
