# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests, from their first piece until they are not needed any more: how much of them is kept at a time.

Short bodies, long ones and the posts of decode engines have memory of their own, so that none of them keeps the others
out. A body has room for all that it says it has before it is read. If there is none it waits, unread, until others are
not needed any more: first the one whose caller has the least in memory. Bodies that come too slowly while others wait
are ended, the largest one of the caller with the most first; so are bodies of unsaid length that wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aiohttp import StreamReader, web
from aiohttp.http import HttpProcessingError

from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.router.faults import Answer, known
from vllm_ascend_pd.router.gate import caller_of
from vllm_ascend_pd.router.upstream import listed
from vllm_ascend_pd.shared.core.gathered import Gathered
from vllm_ascend_pd.shared.http_session import Headers

SHORT = 64 << 10  # bytes of the longest body that counts as short
SHORT_BYTES = 96 << 20  # of all short bodies together
LONG_BYTES = 352 << 20
POSTS_BYTES = 256 << 20  # of decode engines, with the token ids of what is being prefilled: of 40 million tokens
STALL_S = 10.0  # in which a body must have brought `STALL_BYTES`
STALL_BYTES = 10 << 10
BODY_S = 600.0  # for any body
FAST_S = 1.0  # in which a body must have brought `FAST_BYTES` where others wait for room
FAST_BYTES = 64 << 10
ROOM_S = 30.0  # until there is room
WAITING = 256  # bodies that wait for room, each with a piece that the server has read ahead
_LOOK_S = 0.5


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


class Progress:
    """Measure of a body's pace: when it last had brought enough since the time before."""

    def __init__(self, seconds: float, size: int) -> None:
        self._seconds, self._enough = seconds, size
        self._size, self._at = 0, 0.0

    def stalls(self, size: int, now: float) -> bool:
        if size - self._size >= self._enough:
            self._size, self._at = size, now
        return now - self._at > self._seconds

    def resume(self, size: int, now: float) -> None:
        """Count from now on: until now nothing was read."""
        self._size, self._at = size, now


class BodyMemory:
    """Memory for one kind of bodies."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held_bytes = 0  # bytes of bodies that come, or are in use
        self.coming: dict[Body, None] = {}
        self.callers: Counter[str] = Counter()  # bytes of those
        self.waiting: dict[Body, asyncio.Future[None]] = {}  # those of them that wait for room

    def take(self, body: Body, count: int) -> None:
        body.size += count
        self.held_bytes += count
        self.callers[body.caller] += count

    def complete(self, body: Body) -> None:
        """Note that a body does not come any more. Idempotent."""
        if body in self.coming:
            del self.coming[body]
            self.callers[body.caller] -= body.size
            if not self.callers[body.caller]:
                del self.callers[body.caller]

    def has_room(self, count: int) -> bool:
        """Return whether so much more fits; a body that is larger than all of the memory comes alone."""
        return self.held_bytes + count <= self.most or not self.held_bytes

    def changed(self) -> None:
        """Let those go on that have room now, each in its turn."""
        room = self.most - self.held_bytes
        for body in sorted(self.waiting, key=lambda one: (self.callers[one.caller], one.began)):
            room -= body.wants
            if room < 0 and self.held_bytes:
                return
            if not (turn := self.waiting[body]).done():
                turn.set_result(None)

    def end_slow(self, now: float) -> None:
        """End bodies that keep others waiting; those that wait themselves only where nothing else can make room."""
        deadlock = self.held_bytes == sum(body.size for body in self.waiting)
        slow = [one for one in self.coming if (deadlock and one.size if one in self.waiting else one.slow(now))]
        slow.sort(key=lambda one: (self.callers[one.caller], one.size))
        while slow and not all(turn.done() for turn in self.waiting.values()):
            slow.pop().end(no_room())


class Intake:
    """The bodies of one worker."""

    def __init__(
        self,
        short: int = SHORT_BYTES,
        long: int = LONG_BYTES,
        posts: int = POSTS_BYTES,
        stall_s: float = STALL_S,
        fast_s: float = FAST_S,
        room_s: float = ROOM_S,
    ) -> None:
        self.short, self.long, self.posts = self._all = (BodyMemory(short), BodyMemory(long), BodyMemory(posts))
        self.stall_s, self.fast_s, self.room_s = stall_s, fast_s, room_s
        self._look: asyncio.TimerHandle | None = None

    def body(self, asked: CallerRequest, of_engine: bool = False) -> Body:
        return Body(self, asked, of_engine)

    @property
    def held_bytes(self) -> int:
        return sum(memory.held_bytes for memory in self._all)

    def watch(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_at_all)

    def _look_at_all(self) -> None:
        """End the bodies that stall. One timer looks at all: one for each piece would cost more than the piece."""
        now, self._look = asyncio.get_running_loop().time(), None
        for memory in self._all:
            for body in tuple(memory.coming):
                body.look(now)
            if memory.waiting:
                memory.end_slow(now)
        if any(memory.coming for memory in self._all):
            self.watch()


class Body:
    """One request's body, counted until it is released, at the latest when its exchange ends."""

    def __init__(self, intake: Intake, asked: CallerRequest, of_engine: bool = False) -> None:
        length = next((int(value) for name, value in asked.headers if name == b"content-length"), None)
        short = length is None or length <= SHORT
        self.memory = intake.posts if of_engine else intake.short if short else intake.long
        self.caller, self.size = "", 0
        self.began, self.wants = 0.0, length or 0
        self._intake, self._asked = intake, asked
        self._came, self._waits_since = 0, 0.0
        self._pace = Progress(intake.stall_s, STALL_BYTES), Progress(intake.fast_s, FAST_BYTES)
        self._ended: asyncio.Future[NotTaken] | None = None

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Stop counting the body, which is not needed any more. Idempotent."""
        self.memory.complete(self)
        self.memory.held_bytes -= self.size
        self.size = 0
        self.memory.changed()

    async def read(self, max_bytes: int) -> bytes | memoryview:
        """Return the whole body. Raise NotTaken or CallerLeft."""
        asked, memory = self._asked, self.memory
        if asked.connection.gone:
            raise CallerLeft
        if self.wants > max_bytes:
            raise refused(413, "PD-META-013", max=max_bytes)
        first = b""
        if asked.content.is_eof():  # the usual case: all of it has come with the head
            first = asked.content.read_nowait()
            if len(first) <= min(SHORT, max_bytes) and memory.has_room(len(first)):
                self.size = len(first)
                memory.held_bytes += self.size
                return first
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[NotTaken] = loop.create_future()
        self.caller = caller_of(asked.peer)  # an address takes its time to be parsed: not for each short body
        self._ended, self.began = ended, loop.time()
        memory.coming[self] = None
        self._resume()
        self._intake.watch()
        rest = loop.create_task(self._rest(first, max_bytes), name="body")
        try:
            await asyncio.wait((rest, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise ended.result()
            return rest.result()
        finally:
            rest.cancel()
            rest.add_done_callback(_was_seen)
            self.memory.complete(self)
            self.memory.changed()

    def end(self, why: NotTaken) -> None:
        """Let the reading of an incomplete body end in an error, and free its memory at once."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(why)
        self.release()

    def look(self, now: float) -> None:
        """End the body if it does not come in time."""
        if self in self.memory.waiting:
            if now - self._waits_since > self._intake.room_s:
                self.end(no_room())
        elif self._pace[0].stalls(self._came, now) or now - self.began > BODY_S:
            self.end(refused(408, "PD-META-014", size=self._came, seconds=f"{now - self.began:.0f}"))

    def slow(self, now: float) -> bool:
        """Return whether it comes too slowly to keep others waiting."""
        return self._pace[1].stalls(self._came, now)

    async def _rest(self, piece: bytes, max_bytes: int) -> bytes | memoryview:
        gathered, content = Gathered(max_bytes), self._asked.content
        await self._room(self.wants)
        if not content.total_bytes and _waits(self._asked.headers):
            self._asked.connection.go_on()
        while True:
            self._came += len(piece)
            if self._came > max_bytes:
                raise refused(413, "PD-META-013", max=max_bytes)
            await self._room(self._came - self.size)
            try:
                gathered.add(piece)
            except OSError as problem:
                raise no_room() from problem
            if content.at_eof():
                return gathered.whole()
            piece = await self._piece()

    async def _piece(self) -> bytes:
        if self._asked.connection.gone:
            raise CallerLeft
        try:
            return await self._asked.content.readany()
        except (web.RequestPayloadError, HttpProcessingError) as problem:  # by its parser in C; by that in Python
            raise refused(400, "PD-META-040", why=one_line(str(problem), 200)) from problem
        except OSError as problem:
            raise CallerLeft from problem

    async def _room(self, count: int) -> None:
        """Take room for so many bytes more, as soon as there is some. A body that turns out to be long moves."""
        if count <= 0:
            return
        if self.memory is self._intake.short and self.size + count > SHORT:
            count += self.size
            self.release()
            self.memory = self._intake.long
            self.memory.coming[self] = None
        memory, loop, self.wants = self.memory, asyncio.get_running_loop(), count
        self._waits_since = loop.time()
        while not memory.has_room(count):
            if len(memory.waiting) >= WAITING:
                raise no_room()
            memory.waiting[self] = turn = loop.create_future()
            try:
                await turn
            finally:
                memory.waiting.pop(self, None)
                self._resume()
        if self._ended is not None and self._ended.done():
            raise self._ended.result()
        memory.take(self, count)

    def _resume(self) -> None:
        """Measure its pace from now on: until now nothing was read."""
        for pace in self._pace:
            pace.resume(self._came, asyncio.get_running_loop().time())


def _waits(headers: Headers) -> bool:
    """Return whether the body is only sent once it is asked for. The words of that header have no case."""
    return any(b"100-continue" in listed(value) for name, value in headers if name == b"expect")


def _was_seen(rest: asyncio.Task[bytes | memoryview]) -> None:
    if not rest.cancelled():
        rest.exception()  # else asyncio logs that nobody has looked


def no_room() -> NotTaken:
    return refused(429, "PD-META-015", retry_after_s=2)


def refused(status: int, code: str, retry_after_s: float | None = None, **values: object) -> NotTaken:
    """Return a refusal that closes the connection: the rest of the body would be taken for the next request."""
    answer = known(status, code, retry_after_s, **values)
    answer.headers.append((b"connection", b"close"))
    return NotTaken(answer)
