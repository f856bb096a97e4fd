# SPDX-License-Identifier: Apache-2.0
"""Memory for bodies: what one caller holds keeps no other caller out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import TransferEncodingError
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.router import intake
from vllm_ascend_pd.router.intake import SHORT, Body, CallerLeft, CallerRequest, Intake, NotTaken

KIB, MIB = 1 << 10, 1 << 20
PIECE = 256 * KIB
MOST = 64 * MIB


class BodySender:
    """A caller that sends a body piece by piece, as aiohttp's server receives it."""

    gone = False

    def __init__(
        self, taken: Intake, caller: str = "somebody", of_engine: bool = False, length: int | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        connected = BaseProtocol(loop)
        connected.connection_made(asyncio.Transport())
        self._body = StreamReader(connected, 2**26, loop=loop)
        headers = [] if length is None else [(b"content-length", b"%d" % length)]
        asked = CallerRequest("POST", "/", b"/", headers, caller, self._body, self)
        self.upload = Body(taken, asked, of_engine)

    def watch(self, when_gone: Callable[[], None]) -> None: ...
    def unwatch(self, when_gone: Callable[[], None]) -> None: ...
    def go_on(self) -> None: ...

    def begin(self) -> BodySender:
        self.reading: asyncio.Task[bytes | memoryview] = asyncio.ensure_future(self.upload.read(MOST))
        return self

    async def send(self, size: int) -> BodySender:
        for at in range(0, size, PIECE):
            self._body.feed_data(b"x" * min(PIECE, size - at))
            await settled()
        return self

    async def end(self) -> BodySender:
        self._body.feed_eof()
        await settled()
        return self

    def fail(self, problem: Exception) -> None:
        self._body.set_exception(problem)

    async def whole(self, size: int) -> int:
        """Send a body at once; return the length of what was read."""
        self._body.feed_data(b"x" * size)
        self._body.feed_eof()
        return len(await self.upload.read(MOST))


async def settled() -> None:
    """Let everything run that can."""
    for _ in range(6):
        await asyncio.sleep(0)


async def refusal(reading: Awaitable[Any]) -> tuple[int, str]:
    with pytest.raises(NotTaken) as refused:
        await reading
    answer = refused.value.answer
    assert (b"connection", b"close") in answer.headers  # the rest of the body is no request
    return answer.status, json.loads(answer.body)["error"]["code"]


@pytest.mark.parametrize("problem", [web.RequestPayloadError("torn"), TransferEncodingError("b'zz'")])
async def test_a_body_that_cannot_be_parsed_is_refused(problem: Exception) -> None:
    sender = await BodySender(Intake()).begin().send(1)
    sender.fail(problem)
    assert await refusal(sender.reading) == (400, "PD-META-040")


async def test_a_body_is_counted_until_it_is_released() -> None:
    taken = Intake()
    for size in (0, 5, SHORT, SHORT + 1, 3 * MIB):
        sender = BodySender(taken)
        with sender.upload:
            assert await sender.whole(size) == size
            assert taken.held_bytes == size
        assert taken.held_bytes == 0


SAID = pytest.mark.parametrize("said", [True, False], ids=["with a length", "in chunks"])


@SAID
async def test_stalled_bodies_keep_neither_short_ones_out_nor_those_of_engines(said: bool) -> None:
    taken = Intake(long=8 * MIB, fast_s=60.0)  # no body counts as slow meanwhile: none makes room for these
    length = 4 * MIB if said else None
    stalled = [await BodySender(taken, "attacker", length=length).begin().send(MIB) for _ in range(30)]
    for _ in range(200):
        assert await BodySender(taken, length=4 * KIB).whole(4 * KIB) == 4 * KIB
    assert await BodySender(taken, of_engine=True, length=MIB).whole(MIB) == MIB
    assert taken.long.held_bytes <= 8 * MIB and not any(sender.reading.done() for sender in stalled)
    for sender in stalled:
        sender.reading.cancel()


@SAID
async def test_a_long_body_gets_through_beside_stalled_ones(said: bool) -> None:
    taken = Intake(long=8 * MIB, fast_s=0.0)
    length = 4 * MIB if said else None
    stalled = [await BodySender(taken, "attacker", length=length).begin().send(MIB) for _ in range(30)]
    honest = await BodySender(taken, "client", length=2 * MIB if said else None).begin().send(2 * MIB)
    assert len(await (await honest.end()).reading) == 2 * MIB
    ended = [sender for sender in stalled if sender.reading.done()]
    assert await refusal(ended[0].reading) == (429, "PD-META-015")
    for sender in stalled:
        sender.reading.cancel()


async def test_of_the_caller_with_the_most_the_largest_slow_body_ends_and_no_more_than_needed() -> None:
    taken = Intake(long=8 * MIB, fast_s=0.0)
    one = await BodySender(taken, "one", length=3 * MIB).begin().send(MIB)  # the largest of all
    sizes = (5 * MIB // 2, 2 * MIB)  # the second is the last that came
    large, small = [await BodySender(taken, "another", length=size).begin().send(PIECE) for size in sizes]
    last = await BodySender(taken, "a third", length=2 * MIB).begin().send(2 * MIB)
    assert len(await (await last.end()).reading) == 2 * MIB
    assert [s.reading.done() for s in (one, small, large)] == [False, False, True]
    assert await refusal(large.reading) == (429, "PD-META-015")
    for sender in (one, small):
        assert len(await (await sender.end()).reading) > 0


async def test_a_body_waits_for_those_in_use_and_nobody_is_refused() -> None:
    taken = Intake(long=8 * MIB)
    served = 0

    async def client(number: int) -> None:
        nonlocal served
        sender = BodySender(taken, f"client {number % 3}", length=MIB)
        with sender.upload:
            sender.begin()
            await sender.send(MIB)
            assert len(await (await sender.end()).reading) == MIB
            await settled()  # its request is served
            served += 1

    await asyncio.gather(*map(client, range(62)))
    assert served == 62 and taken.held_bytes == 0


async def test_who_has_the_least_in_memory_is_next() -> None:
    taken = Intake(long=4 * MIB)
    in_use = BodySender(taken, length=MIB), BodySender(taken, length=2 * MIB)
    for sender, size in zip(in_use, (MIB, 2 * MIB), strict=True):
        await sender.whole(size)
    many = [await BodySender(taken, "one with many", length=MIB).begin().send(MIB) for _ in range(3)]
    other = await BodySender(taken, "another", length=MIB).begin().send(MIB)
    assert list(taken.long.waiting) == [many[1].upload, many[2].upload, other.upload]
    in_use[0].upload.release()
    await settled()
    assert list(taken.long.waiting) == [many[1].upload, many[2].upload]
    for sender in (*many, other):
        sender.reading.cancel()


async def test_bodies_of_unsaid_length_that_only_wait_for_each_other_make_room() -> None:
    taken = Intake(long=2 * MIB)
    senders = [BodySender(taken, f"client {i}").begin() for i in range(2)]
    for _ in range(5):
        for sender in senders:
            await sender.send(PIECE)
    assert len(taken.long.waiting) == 2
    refused, _ = await asyncio.wait([one.reading for one in senders], return_when=asyncio.FIRST_COMPLETED)
    assert await refusal(refused.pop()) == (429, "PD-META-015")
    (rest,) = (one for one in senders if not one.reading.done())
    assert len(await (await rest.end()).reading) == 5 * PIECE


async def test_a_body_larger_than_the_memory_comes_alone() -> None:
    taken = Intake(long=2 * MIB)
    large = await BodySender(taken, length=3 * MIB).begin().send(3 * MIB)
    other = await BodySender(taken, length=MIB).begin().send(MIB)
    assert other.upload in taken.long.waiting
    with large.upload:
        assert len(await (await large.end()).reading) == 3 * MIB
    assert len(await (await other.end()).reading) == MIB


async def test_a_body_that_finds_no_room_in_time_is_refused() -> None:
    taken = Intake(long=4 * MIB, room_s=0.0)
    in_use = [BodySender(taken) for _ in range(4)]
    for sender in in_use:
        await sender.whole(MIB)
    late = await BodySender(taken).begin().send(MIB)
    assert await refusal(late.reading) == (429, "PD-META-015")
    assert taken.held_bytes == 4 * MIB


async def test_only_so_many_bodies_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "WAITING", 3)
    taken = Intake(long=MIB)
    await BodySender(taken).whole(MIB)
    late = [await BodySender(taken, f"client {i}").begin().send(SHORT + 1) for i in range(5)]
    assert [sender.reading.done() for sender in late] == [False] * 3 + [True] * 2
    for sender in late:
        sender.reading.cancel()


async def test_a_body_that_stops_coming_is_refused() -> None:
    taken = Intake(stall_s=0.0)
    stalled = await BodySender(taken).begin().send(10)
    assert await refusal(stalled.reading) == (408, "PD-META-014")
    assert taken.held_bytes == 0


async def test_a_body_that_trickles_is_refused() -> None:
    taken = Intake(stall_s=0.1)
    slow = BodySender(taken).begin()
    while not slow.reading.done():
        await asyncio.sleep(0.01)
        await slow.send(1)
    assert await refusal(slow.reading) == (408, "PD-META-014")
    assert taken.held_bytes == 0


async def test_a_body_that_is_too_long_is_refused() -> None:
    taken = Intake()
    for sender in (BodySender(taken), BodySender(taken, of_engine=True), BodySender(taken, length=MOST + 1)):
        with sender.upload:
            assert await refusal(sender.whole(MOST + 1)) == (413, "PD-META-013")
        assert taken.held_bytes == 0


async def test_a_caller_that_leaves_frees_its_memory() -> None:
    taken = Intake()
    sender = await BodySender(taken).begin().send(MIB)
    sender._body.set_exception(ConnectionResetError("Connection lost"))  # as aiohttp does
    with pytest.raises(CallerLeft), sender.upload:
        await sender.reading
    assert taken.held_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, KIB, SHORT, PIECE, MIB, 0, -1])), max_size=60))
def test_memory_is_never_exceeded_and_never_lost(steps: Sequence[tuple[int, int]]) -> None:
    asyncio.run(_play(steps))


async def _play(steps: Sequence[tuple[int, int]]) -> None:
    taken = Intake(short=4 * SHORT, long=2 * MIB, posts=MIB)
    senders: dict[int, BodySender] = {}

    async def cancel(who: int) -> None:
        sender = senders.pop(who)
        sender.reading.cancel()
        with contextlib.suppress(NotTaken, asyncio.CancelledError):
            await sender.reading
        sender.upload.release()

    for who, size in steps:
        if who not in senders:
            senders[who] = BodySender(taken, f"caller {who % 2}", who == 4, MIB if who == 3 else None).begin()
        if size == -1:
            await cancel(who)
        elif size == 0:
            await senders[who].end()
        elif not senders[who]._body.is_eof():
            await senders[who].send(size)
        for memory in (taken.short, taken.long, taken.posts):
            there = [s.upload for s in senders.values() if s.upload.memory is memory]
            assert memory.held_bytes == sum(upload.size for upload in there)
            assert memory.callers.total() == sum(upload.size for upload in memory.coming) <= memory.held_bytes
            assert memory.held_bytes <= max(memory.most, max((upload.size for upload in there), default=0))
    for who in tuple(senders):
        await cancel(who)
    assert taken.held_bytes == 0
