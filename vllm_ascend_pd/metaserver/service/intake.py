# SPDX-License-Identifier: Apache-2.0
"""Requests as they are taken in: their bodies are bounded in size, in time and all together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aiohttp import StreamReader

from vllm_ascend_pd.http.gathered import Gathered
from vllm_ascend_pd.http.http1 import Headers
from vllm_ascend_pd.http.within import within
from vllm_ascend_pd.metaserver.service.faults import Answer, known

BODY_S = 120.0  # of a body: from the head to the last piece
BODIES_BYTES = 512 << 20  # of all bodies together, until their exchanges end


class Caller(Protocol):
    """The connection of a caller, as far as its requests need it."""

    gone: bool

    def watch(self, when_gone: Callable[[], None]) -> None:
        """Call `when_gone` once if the caller of the request in progress leaves, or has left."""

    def unwatch(self, when_gone: Callable[[], None]) -> None: ...

    def go_on(self) -> None:
        """Ask for the body of a request that waits for this."""


@dataclass(slots=True, eq=False)
class CallerRequest:
    """A request whose head has come."""

    method: str
    path: str  # decoded
    target: bytes  # path and query as they came, without host and fragment: decoded they could hold a line end
    headers: Headers  # with names in lower case
    peer: str  # the caller's host; empty if unknown
    content: StreamReader
    connection: Caller


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

    async def read(self, asked: CallerRequest, max_bytes: int) -> bytes | memoryview:
        """Return the whole body. Raise NotTaken or CallerLeft."""
        if asked.connection.gone:
            raise CallerLeft
        if asked.content.is_eof():  # the usual case: a time limit takes a task, a tenth of the cost of a relay
            return self._take(asked.content.read_nowait(), max_bytes)
        if (b"expect", b"100-continue") in asked.headers and not asked.content.total_bytes:
            asked.connection.go_on()
        try:
            return await within(self._intake.body_s, self._gather(asked, max_bytes))
        except asyncio.TimeoutError as problem:
            raise _refused(408, "PD-META-014", seconds=f"{self._intake.body_s:g}") from problem

    async def _gather(self, asked: CallerRequest, max_bytes: int) -> bytes | memoryview:
        gathered = Gathered(max_bytes)
        while piece := await self._piece(asked):
            try:
                gathered.add(self._take(piece, max_bytes))
            except OSError as problem:
                raise _refused(429, "PD-META-015", retry_after_s=2) from problem
        return gathered.whole()

    async def _piece(self, asked: CallerRequest) -> bytes:
        if asked.connection.gone:
            raise CallerLeft
        try:
            return await asked.content.readany()
        except OSError as problem:
            raise CallerLeft from problem

    def _take(self, piece: bytes, max_bytes: int) -> bytes:
        """Count a piece. Raise NotTaken if it is too much."""
        self._size += len(piece)
        self._intake.held += len(piece)
        if self._size > max_bytes:
            raise _refused(413, "PD-META-013", max=max_bytes)
        if self._intake.held > self._intake.max_bytes:
            raise _refused(429, "PD-META-015", retry_after_s=2)
        return piece


class Intake:
    """The bodies of one worker."""

    def __init__(self, body_s: float = BODY_S, max_bytes: int = BODIES_BYTES) -> None:
        self.body_s, self.max_bytes = body_s, max_bytes
        self.held = 0  # bytes of all bodies that are read or in use

    def body(self) -> Body:
        return Body(self)


def _refused(status: int, code: str, retry_after_s: float | None = None, **values: object) -> NotTaken:
    """Return a refusal that closes the connection, since the rest of the body is not worth its reading."""
    answer = known(status, code, retry_after_s, **values)
    answer.headers.append((b"connection", b"close"))
    return NotTaken(answer)
