# SPDX-License-Identifier: Apache-2.0
"""The listener as evidence for the fence: "gone" is reported once, when the peer's kernel closes, and in no other
case."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from dataclasses import replace

import pytest

from unit.channel.kit import FAST, NO_RETURN, AnsweringListener, DialingChild, RecordingDialer, until
from vllm_ascend_pd.channel.connection import Connection, Ending
from vllm_ascend_pd.errors import RemoteProtocolError


async def test_a_killed_process_is_gone_exactly_once() -> None:
    async with AnsweringListener() as answering:
        with DialingChild(answering.endpoint.port) as speaker:
            await until(lambda: len(answering.heard) > 3, 20)
            assert not answering.events
            speaker.kill()
            await until(lambda: answering.events)
        await asyncio.sleep(0.1)
        assert answering.events == [("gone", "p-1")]
        assert not answering.connected_to("p-1")


async def test_a_stopped_process_is_not_gone_until_it_is_killed() -> None:
    async with AnsweringListener() as answering:
        with DialingChild(answering.endpoint.port) as speaker:
            await until(lambda: answering.heard, 20)
            speaker.stop()
            await asyncio.sleep(1.0)  # longer than all limits of this listener
            assert not answering.events and answering.connected_to("p-1")
            speaker.wake()
            count = len(answering.heard)
            await until(lambda: len(answering.heard) > count)
            speaker.stop()
            speaker.kill()
            await until(lambda: answering.events == [("gone", "p-1")])


async def test_only_the_last_connection_counts_and_a_return_is_reported() -> None:
    async with AnsweringListener() as answering, dying() as first, dying() as second:
        first.say(answering.endpoint, 1)
        second.say(answering.endpoint, 2)
        await until(lambda: len(answering.heard) == 2)
        drop(first, answering)
        await asyncio.sleep(0.05)
        assert not answering.events, "another connection of the process stands"
        drop(second, answering)
        await until(lambda: answering.events == [("gone", "p-1")])
        async with RecordingDialer("p-1") as third, RecordingDialer("p-2") as other:
            other.say(answering.endpoint, 3)
            third.say(answering.endpoint, 4)
            await until(lambda: len(answering.heard) == 4)
            assert answering.events == [("gone", "p-1"), ("back", "p-1")]


def drop(dialing: RecordingDialer, answering: AnsweringListener) -> None:
    """Close like the kernel when a process dies: no message before, no reconnect after."""
    dialing.dialer.links[answering.endpoint].connection.transport.abort()


def dying(p: str = "p-1") -> RecordingDialer:
    return RecordingDialer(p, limits=NO_RETURN)


async def test_a_reset_is_the_kernels_word_too() -> None:
    async with AnsweringListener() as answering, dying() as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.answers)
        link = dialing.dialer.links[answering.endpoint]
        sock = link.connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.connection.transport.abort()
        await until(lambda: answering.events == [("gone", "p-1")])


async def test_what_the_listener_closes_itself_proves_nothing() -> None:
    async with AnsweringListener() as answering, dying() as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.answers)
        next(iter(answering.listener.callers)).close()
        await until(lambda: not answering.connected_to("p-1"))
        assert answering.endings == [Ending.OURS]
    assert not answering.events


async def test_a_peer_that_leaves_on_purpose_proves_nothing_unless_it_vouches_for_quiet() -> None:
    async with AnsweringListener() as answering:
        for quiet, events in ((False, []), (True, [("gone", "p-1")])):
            dialing = RecordingDialer()
            dialing.say(answering.endpoint)
            await until(lambda dialing=dialing: dialing.answers)
            await dialing.dialer.close(quiet=quiet)
            await until(lambda: not answering.connected_to("p-1"))
            await asyncio.sleep(0.02)
            assert answering.events == events


async def test_closing_the_listener_reports_no_peer_as_gone() -> None:
    async with AnsweringListener() as answering, RecordingDialer() as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.answers)
    assert not answering.events


async def test_a_process_speaks_for_itself_only() -> None:
    async with AnsweringListener() as answering, RecordingDialer("p-1") as dialing:
        dialing.p = "p-2"
        dialing.say(answering.endpoint)
        await until(lambda: answering.stats().get("dropped_foreign_incarnation"))
        assert not answering.heard


class EndingsOwner:
    """An owner that records how its connection ended."""

    def __init__(self) -> None:
        self.endings: list[Ending] = []

    def connected(self, connection: Connection) -> None: ...
    def frame(self, connection: Connection, kind: int, payload: memoryview) -> None: ...
    def offended(self, connection: Connection, error: RemoteProtocolError) -> None: ...

    def ended(self, connection: Connection, ending: Ending, detail: str) -> None:
        self.endings.append(ending)


@pytest.mark.parametrize(
    "error, ending",
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), Ending.PEER),
        (BrokenPipeError(errno.EPIPE, "pipe"), Ending.PEER),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), Ending.LOST),
        (OSError(errno.EHOSTUNREACH, "no route"), Ending.LOST),
        (None, Ending.LOST),
    ],
)
def test_only_the_peers_kernel_can_say_that_it_is_gone(error: Exception | None, ending: Ending) -> None:
    owner = EndingsOwner()
    connection = Connection(owner, lambda: 0.0, 100)
    connection.connection_lost(error)
    assert owner.endings == [ending]


def test_a_reset_that_answers_our_own_closing_is_ours() -> None:
    owner = EndingsOwner()
    connection = Connection(owner, lambda: 0.0, 100)
    connection.abort()
    connection.connection_lost(ConnectionResetError())
    assert owner.endings == [Ending.OURS]


def test_an_end_that_the_peer_began_stays_the_peers() -> None:
    owner = EndingsOwner()
    connection = Connection(owner, lambda: 0.0, 100)
    connection.eof_received()
    connection.abort()  # the peer does not read our last bytes, and we do not wait without limit
    connection.connection_lost(None)
    assert owner.endings == [Ending.PEER]


async def test_what_is_remembered_about_the_gone_is_bounded() -> None:
    async with AnsweringListener(limits=replace(FAST, remembered_gone=3)) as answering:
        for n in range(5):
            async with dying(f"p-{n}") as dialing:
                dialing.say(answering.endpoint)
                await until(lambda dialing=dialing: dialing.answers)
                drop(dialing, answering)
                await until(lambda n=n: ("gone", f"p-{n}") in answering.events)
        for n in range(5):  # the oldest come as if for the first time
            async with RecordingDialer(f"p-{n}") as redialing:
                redialing.say(answering.endpoint)
                await until(lambda redialing=redialing: redialing.answers)
        assert [peer for event, peer in answering.events if event == "back"] == ["p-2", "p-3", "p-4"]
