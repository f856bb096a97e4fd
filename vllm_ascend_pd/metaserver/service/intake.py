# SPDX-License-Identifier: Apache-2.0
"""What callers send, bounded in size, in time and all together, before anything is done about it.

The HTTP server has no limits of its own for the head of a request: one that never ends would be kept in memory, one that
never comes would keep its connection for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm_ascend_pd.metaserver.service.faults import Answer, known
from vllm_ascend_pd.metaserver.within import within

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

HEAD_S = 20.0  # from the first byte of a request, or from the connection, to the end of the head
HEAD_BYTES = 256 << 10  # of a head, counted by what was read and led to nothing
BODY_S = 120.0  # from the first piece of a body to its last
READING_BYTES = 1 << 30  # of all bodies together that are not complete yet


class Refused(Exception):
    """What came in is not taken; `answer` says why."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Intake:
    """Reads the bodies of one worker."""

    def __init__(self, body_s: float = BODY_S, reading_bytes: int = READING_BYTES) -> None:
        self._body_s, self._most = body_s, reading_bytes
        self.reading = 0  # bytes of bodies that are not complete yet

    async def body(self, receive: Receive, most: int) -> bytes:
        """A request's body. Raises Refused."""
        message = await receive()
        first: bytes = message.get("body", b"")
        if len(first) > most:
            raise _refused(413, "PD-META-013", most=most)
        if not message.get("more_body", False):
            return first
        try:
            return await within(self._body_s, self._rest(receive, first, most))
        except asyncio.TimeoutError as problem:
            raise _refused(408, "PD-META-014", seconds=f"{self._body_s:g}") from problem

    async def _rest(self, receive: Receive, first: bytes, most: int) -> bytes:
        pieces, size, more = [first], len(first), True
        self.reading += size
        try:
            while more:
                if size > most:
                    raise _refused(413, "PD-META-013", most=most)
                if self.reading > self._most:
                    raise _refused(429, "PD-META-015", retry_after_s=2)
                message = await receive()
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                self.reading += len(pieces[-1])
                more = message.get("more_body", False)
            if size > most:
                raise _refused(413, "PD-META-013", most=most)
            return b"".join(pieces)
        finally:
            self.reading -= size


def _refused(status: int, code: str, retry_after_s: float | None = None, **values: object) -> Refused:
    """The rest of the body would be taken for the next request's, so the connection goes."""
    answer = known(status, code, retry_after_s, **values)
    answer.headers.append((b"connection", b"close"))
    return Refused(answer)


class Protocol(HttpToolsProtocol):
    """uvicorn's, with limits for the head of a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._unread = 0
        self._in_head = True
        self._patience: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > HEAD_BYTES:  # trailers too
            self.transport.abort()
        elif self._in_head and self._patience is None:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._unread = False, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def _wait_for_head(self) -> None:
        self._patience = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
