# SPDX-License-Identifier: Apache-2.0
"""The side channel with unknown peers: refused with a readable reason, counted, bounded, and without effect on
others."""

from __future__ import annotations

import asyncio
import pickle
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unit.channel.kit import (
    FAST,
    IMPATIENT,
    LOOPBACK,
    AnsweringListener,
    RawConnection,
    RecordingDialer,
    message,
    still_works,
    until,
)
from vllm_ascend_pd.channel.frames import (
    CLEAR,
    FRAME_BYTES,
    GREETING_BYTES,
    GUARDED,
    Goodbye,
    Hello,
    Proof,
    Splitter,
    Unguarded,
    clear_frame,
    decode_clear,
    decode_guarded,
    guarded_frame,
)
from vllm_ascend_pd.errors import LocalProtocolError, RemoteProtocolError
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Endpoint
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES
from vllm_ascend_pd.protocol.versions import Release

SECRET = Secrets(b"s" * 32)
HELLO = Hello(PROTOCOL_VERSION, "p-x", b"n" * 32, False)


async def test_another_version_is_refused_in_words_on_both_sides() -> None:
    async with AnsweringListener() as answering:
        async with RawConnection(answering) as raw:
            future = msgspec.msgpack.encode(
                {"type": "hello", "version": 7, "incarnation": "p", "nonce": b"n" * 32, "guarded": False, "more": [1]}
            )
            raw.send(struct.pack(">IB", len(future) + 1, CLEAR) + future)
            refusal = await raw.goodbye()
        assert refusal.code == "PD-CTRL-003"
        assert "Protocol version 7 of the peer is not 2" in refusal.detail and "Install" in refusal.detail
        async with RecordingDialer(release=Release(4, 3)) as dialing:
            dialing.say(answering.endpoint)
            await until(lambda: dialing.unreachable)
            assert dialing.unreachable[0].startswith("PD-CTRL-003") and "version 3 to 4" in dialing.unreachable[0]
        assert not answering.events and not answering.heard
        await still_works(answering)


@pytest.mark.parametrize(
    "ours, theirs", [(Secrets(b"w" * 32), SECRET), (None, SECRET), (SECRET, None)], ids=["wrong", "none", "needless"]
)
async def test_a_wrong_secret_gets_nothing_but_a_refusal(ours: Secrets | None, theirs: Secrets | None) -> None:
    async with AnsweringListener(theirs) as answering, RecordingDialer("p-bad", ours) as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.unreachable)
        assert "PD-SEC-003" in dialing.unreachable[0] and "secret_file" in dialing.unreachable[0]
        assert not answering.heard and not answering.events and not answering.connected_to("p-bad")
        assert not dialing.dialer.up(answering.endpoint)
        await still_works(answering, theirs)


async def test_a_peer_that_only_claims_an_incarnation_cannot_end_it() -> None:
    """Only connections with the key count as evidence: neither "gone" nor "back" can be forged."""
    async with AnsweringListener(SECRET) as answering, RecordingDialer("p-1", SECRET) as dialing:
        dialing.say(answering.endpoint, 1)
        await until(lambda: dialing.answers)
        for _ in range(3):
            async with RawConnection(answering) as raw:
                raw.send(clear_frame(replace_hello(incarnation="p-1", guarded=True)))
                await raw.frame()
                raw.send(guarded_frame(Unguarded(), Proof()))
                assert (await raw.goodbye()).code == "PD-SEC-003"
        await asyncio.sleep(0.05)
        assert not answering.events and answering.connected_to("p-1")


def replace_hello(**changes: object) -> Hello:
    return msgspec.structs.replace(HELLO, **changes)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(64),
    "an-endless-frame": struct.pack(">I", 0xFFFFFFFF) + b"x",
    "a-frame-too-long-for-a-greeting": struct.pack(">IB", GREETING_BYTES + 1, CLEAR) + bytes(GREETING_BYTES),
    "an-empty-frame": struct.pack(">I", 0),
    "no-msgpack": struct.pack(">IB", 4, CLEAR) + b"\xc1\xc1\xc1",
    "a-guarded-frame-first": struct.pack(">IB", 2, GUARDED) + b"\x80",
    "a-goodbye-first": clear_frame(Goodbye("x", "y")),
    "a-short-nonce": clear_frame(Hello(PROTOCOL_VERSION, "p", b"n", False)),
    "a-long-incarnation": clear_frame(Hello(PROTOCOL_VERSION, "p" * 65, b"n" * 32, False)),
    "two-greetings": clear_frame(HELLO) + clear_frame(HELLO),
    "a-message-before-the-proof": clear_frame(HELLO) + guarded_frame(Unguarded(), message()),
    "two-proofs": clear_frame(HELLO) + 2 * guarded_frame(Unguarded(), Proof()),
    "an-unguarded-frame-after-the-proof": clear_frame(HELLO) + guarded_frame(Unguarded(), Proof()) + clear_frame(HELLO),
    "no-message": clear_frame(HELLO)
    + guarded_frame(Unguarded(), Proof())
    + struct.pack(">IB", 3, GUARDED)
    + b"\x81\xa1",
    "deep-nesting": struct.pack(">IB", 2001, CLEAR) + b"\x91" * 2000,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_ends_its_own_connection_and_no_other(data: bytes) -> None:
    async with AnsweringListener() as answering, RecordingDialer() as dialing:
        dialing.say(answering.endpoint, 1)
        await until(lambda: dialing.answers)
        async with RawConnection(answering) as raw:
            raw.send(data)
            assert (await raw.goodbye()).code == "PD-CTRL-002"
        dialing.say(answering.endpoint, 2)
        await until(lambda: dialing.answers == [1, 2])
        await until(lambda: answering.stats()["connections"] == 1)
        assert answering.stats()["PD-CTRL-002"] == 1


async def test_a_recorded_conversation_is_worth_nothing() -> None:
    """Everything a dialer sent, sent again to the same listener."""
    recorded = bytearray()
    async with AnsweringListener(SECRET) as answering:

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up_reader, up_writer = await asyncio.open_connection(LOOPBACK, answering.endpoint.port)

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, tape: bytearray) -> None:
                while data := await source.read(65536):
                    tape.extend(data)
                    sink.write(data)
                sink.close()

            await asyncio.gather(pump(reader, up_writer, recorded), pump(up_reader, writer, bytearray()))

        server = await asyncio.start_server(relay, LOOPBACK, 0)
        between = Endpoint(LOOPBACK, server.sockets[0].getsockname()[1])
        async with RecordingDialer("p-1", SECRET) as dialing:
            dialing.say(between, 1)
            await until(lambda: dialing.answers == [1])
        server.close()
        await until(lambda: not answering.connected_to("p-1"))
        heard, events = list(answering.heard), list(answering.events)
        async with RawConnection(answering) as raw:
            raw.send(bytes(recorded))
            assert (await raw.goodbye()).code == "PD-SEC-003"
        assert (answering.heard, answering.events) == (heard, events)


@pytest.mark.parametrize("secrets", [SECRET])
async def test_every_flipped_bit_of_a_guarded_frame_is_noticed(secrets: Secrets) -> None:
    rng = random.Random(1)
    for _ in range(25):
        async with AnsweringListener(secrets) as answering, RecordingDialer(secrets=secrets) as dialing:
            dialing.say(answering.endpoint, 1)
            await until(lambda: dialing.answers)
            connection = dialing.dialer.links[answering.endpoint].connection
            send = connection.send

            def flipped(frame: bytes, send: Callable[[bytes], bool] = send) -> bool:
                bit, changed = rng.randrange(40, len(frame) * 8), bytearray(frame)  # after length and kind
                changed[bit // 8] ^= 1 << bit % 8
                return send(bytes(changed))

            connection.send = flipped
            dialing.say(answering.endpoint, 2)
            await until(lambda: answering.stats().get("PD-SEC-003"))
            assert answering.heard == [("p-1", 1)]


# -- slowness


async def test_a_peer_that_greets_too_slowly_is_dropped() -> None:
    async with (
        AnsweringListener(limits=IMPATIENT) as answering,
        RawConnection(answering) as silent,
        RawConnection(answering) as slow,
    ):
        for byte in clear_frame(HELLO)[:20]:
            slow.send(bytes([byte]))
            await asyncio.sleep(0.03)
        await silent.end()
        await slow.end()
        assert answering.stats()["timeout_greeting"] == 2
        assert answering.stats()["connections"] == 0
        await still_works(answering)


async def test_a_frame_that_never_ends_is_dropped_even_if_it_trickles() -> None:
    async with AnsweringListener() as answering, RawConnection(answering) as raw:
        raw.send(clear_frame(HELLO) + guarded_frame(Unguarded(), Proof()))
        await until(lambda: answering.connected_to("p-x"))
        raw.send(struct.pack(">IB", 1000, GUARDED))
        for _ in range(200):
            if answering.stats().get("timeout_frame"):
                break
            raw.send(b"\x81")
            await asyncio.sleep(0.01)
        await raw.end()
        assert answering.stats()["timeout_frame"] == 1 and not answering.events


async def test_a_listener_that_does_not_answer_is_unreachable() -> None:
    async with RecordingDialer(limits=replace(FAST, greeting_s=1.0)) as dialing:
        server = await asyncio.start_server(lambda r, w: asyncio.sleep(60), LOOPBACK, 0)
        dialing.say(Endpoint(LOOPBACK, server.sockets[0].getsockname()[1]))
        await until(lambda: dialing.unreachable)
        assert "no answer to the greeting" in dialing.unreachable[0]
        server.close()


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.2\r\n", clear_frame(HELLO) * 2, struct.pack(">IB", 2, GUARDED) + b"x", b""]
)
async def test_a_listener_that_is_something_else_is_unreachable(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with RecordingDialer() as dialing:
        server = await asyncio.start_server(serve, LOOPBACK, 0)
        dialing.say(Endpoint(LOOPBACK, server.sockets[0].getsockname()[1]))
        await until(lambda: dialing.unreachable)
        assert not dialing.answers
        server.close()


async def test_a_listener_without_the_secret_gets_nothing() -> None:
    """It may forward our greeting, but cannot authenticate, so no message is sent."""
    received = bytearray()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.extend(await reader.read(65536))
        writer.write(clear_frame(replace_hello(incarnation="d-1", guarded=True)))
        while data := await reader.read(65536):
            received.extend(data)
            writer.write(guarded_frame(Unguarded(), Proof()))

    async with RecordingDialer(secrets=SECRET) as dialing:
        server = await asyncio.start_server(pretend, LOOPBACK, 0)
        endpoint = Endpoint(LOOPBACK, server.sockets[0].getsockname()[1])
        dialing.say(endpoint, 1, "confidential")
        await until(lambda: dialing.unreachable)
        assert "PD-SEC-003" in dialing.unreachable[0]
        assert b"confidential" not in received
        server.close()


# -- numbers


async def test_connections_are_bounded_and_the_peers_inside_do_not_notice() -> None:
    limits = replace(FAST, max_connections=60, max_unproven=40, greeting_s=60.0)
    async with AnsweringListener(limits=limits) as answering, RecordingDialer() as dialing:
        dialing.say(answering.endpoint, 1)
        await until(lambda: dialing.answers)
        before = len(list(Path("/proc/self/fd").iterdir()))
        flood = [await asyncio.open_connection(LOOPBACK, answering.endpoint.port) for _ in range(1000)]
        await until(lambda: answering.stats().get("refused_full", 0) >= 960, 20)
        assert answering.stats()["connections"] <= 41
        assert len(list(Path("/proc/self/fd").iterdir())) - before <= 1000 + 45
        dialing.say(answering.endpoint, 2)
        await until(lambda: dialing.answers == [1, 2])
        for _, writer in flood:
            writer.close()
        await until(lambda: answering.stats()["connections"] == 1)
        await still_works(answering)


async def test_a_crowd_at_the_door_does_not_keep_a_peer_out() -> None:
    """Silent connections take every place for new connections: a peer that connects and authenticates still gets in."""
    limits = replace(FAST, max_unproven=20, greeting_s=60.0)
    async with AnsweringListener(limits=limits) as answering:
        crowd = [await asyncio.open_connection(LOOPBACK, answering.endpoint.port) for _ in range(20)]
        await until(lambda: answering.stats()["unproven"] == 20)
        await still_works(answering)
        assert answering.stats()["refused_full"] == 1 and answering.stats()["unproven"] == 19
        for _, writer in crowd:
            writer.close()


async def test_one_incarnation_cannot_hold_many_connections() -> None:
    async with AnsweringListener() as answering:
        raws = [RawConnection(answering) for _ in range(FAST.max_per_incarnation + 4)]
        for raw in raws:
            await raw.__aenter__()
            raw.send(clear_frame(HELLO) + guarded_frame(Unguarded(), Proof()))
        await until(lambda: answering.stats().get("closed_surplus") == 4)
        await until(lambda: answering.stats()["connections"] == FAST.max_per_incarnation)
        assert not answering.events
        for raw in raws:
            raw.writer.close()
        await until(lambda: answering.events == [("gone", "p-x")])


async def test_unproven_peers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with AnsweringListener() as answering:
        for _ in range(30):
            async with RawConnection(answering) as raw:
                raw.send(b"garbage!" * 10)
                await raw.end()
        assert answering.stats()["PD-CTRL-002"] == 30
    assert len(caplog.records) == 1


async def test_secrets_are_not_in_what_is_logged_or_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with AnsweringListener(SECRET) as answering, RecordingDialer("p-1", Secrets(b"q" * 32)) as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.unreachable)
    text = caplog.text + repr(dialing.unreachable) + repr(answering.stats())
    assert "ssss" not in text and "qqqq" not in text


# -- decoders


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=8), st.randoms())
def test_frames_are_cut_the_same_however_they_arrive(bodies: list[bytes], rng: random.Random) -> None:
    stream = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    splitter, got, at = Splitter(300), [], 0
    while at < len(stream):
        step = rng.randint(1, 50)
        got += [bytes([kind]) + bytes(payload) for kind, payload in splitter.feed(stream[at : at + step])]
        at += step
    assert got == bodies and not splitter.partial


@settings(max_examples=2000)
@given(st.binary(max_size=200))
def test_no_bytes_crash_a_decoder(data: bytes) -> None:
    for decode in (decode_clear, decode_guarded):
        try:
            decode(memoryview(data))
        except RemoteProtocolError:
            continue
    with suppress(RemoteProtocolError):
        list(Splitter(100).feed(data))


def test_mutated_messages_never_crash_the_decoder() -> None:
    rng = random.Random(7)
    seeds = [guarded_frame(Unguarded(), message(text="x" * 50))[5:], clear_frame(HELLO)[5:]]
    for n in range(20_000):
        data = bytearray(seeds[n % 2])
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        for decode in (decode_clear, decode_guarded):
            try:
                decode(memoryview(bytes(data)))
            except RemoteProtocolError:
                continue


def test_a_message_beyond_the_bound_is_our_own_error() -> None:
    assert MAX_MESSAGE_BYTES < FRAME_BYTES
    with pytest.raises(LocalProtocolError, match="exceeds"):
        guarded_frame(Unguarded(), message(text="x" * MAX_MESSAGE_BYTES))


def _framed(payload: bytes) -> bytes:
    return struct.pack(">IB", 1 + len(payload), CLEAR) + payload


FORGED = "x\nWARNING 11-21 05:00:00 all secrets are wrong\r\x1b[31m"


@pytest.mark.parametrize(
    "frame",
    [
        clear_frame(Hello(PROTOCOL_VERSION + 1, "p-x", b"n" * 32, False, FORGED)),
        clear_frame(Hello(PROTOCOL_VERSION, "p-x", b"n" * 32, True, FORGED)),
        clear_frame(Goodbye("x", FORGED)),
        _framed(FORGED.encode()),
        _framed(msgspec.msgpack.encode({"type": FORGED})),
        struct.pack(">IB", 60, CLEAR) + msgspec.msgpack.encode({"type": FORGED, FORGED: FORGED})[:59].ljust(59, b"\n"),
    ],
    ids=["another version", "signed", "goodbye", "no msgpack", "unknown type", "torn"],
)
async def test_no_unproven_peer_writes_lines_into_our_log(frame: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with AnsweringListener(limits=FAST) as answering, RawConnection(answering) as raw:
        raw.send(frame)
        await until(lambda: any(r.name.startswith("vllm_ascend_pd.channel") for r in caplog.records))
    for record in caplog.records:
        assert record.getMessage().isprintable(), record.getMessage()


def test_foreign_text_in_an_error_is_one_bounded_printable_line() -> None:
    error = RemoteProtocolError("PD-CTRL-002", why=FORGED + "y" * 5000)
    assert error.sentence.isprintable() and str(error).isprintable() and len(str(error)) < 1300
    assert "\\nWARNING" in error.sentence and "characters)" in error.sentence
    assert pickle.loads(pickle.dumps(error)).sentence == error.sentence
    assert RemoteProtocolError("PD-CTRL-002", why=OSError(FORGED)).sentence.isprintable()
