# SPDX-License-Identifier: Apache-2.0
"""The side channel between two cooperating ends: messages arrive, connections are reused, losses are repaired."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from unit.channel.kit import FAST, LOOPBACK, ROOT, AnsweringListener, RawConnection, RecordingDialer, message, until
from unit.kits.names import NameServer
from unit.kits.refusing import no_more_threads
from vllm_ascend_pd import secret_files
from vllm_ascend_pd.channel.connection import Ending
from vllm_ascend_pd.channel.limits import ChannelLimits
from vllm_ascend_pd.config import ChannelConfig
from vllm_ascend_pd.errors import ConfigError, PdError
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.messages import Begin
from vllm_ascend_pd.secret_files import load_secrets
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.exposure import check_exposure, is_loopback

OLD, NEW = b"o" * 32, b"n" * 32
SECRETS = [None, Secrets(NEW)]


@pytest.mark.parametrize("secrets", SECRETS, ids=["plain", "signed"])
async def test_messages_and_answers_arrive_in_order(secrets: Secrets | None) -> None:
    async with AnsweringListener(secrets) as answering, RecordingDialer(secrets=secrets) as dialing:
        for seq in range(200):
            assert dialing.say(answering.endpoint, seq)
        await until(lambda: len(dialing.answers) == 200)
        assert answering.heard == [("p-1", seq) for seq in range(200)]
        assert dialing.answers == list(range(200))


async def test_a_name_that_no_thread_can_look_up_is_tried_again() -> None:
    async with AnsweringListener() as answering, RecordingDialer() as dialing:
        named = Endpoint("localhost", answering.endpoint.port)
        with no_more_threads("name localhost") as refused:
            dialing.say(named)
            await until(lambda: len(refused) > 1 and dialing.unreachable)
        assert dialing.unreachable[0] == "no thread to look a name up"
        await until(lambda: dialing.answers)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer(monkeypatch)
    yield server
    server.gate.set()


async def test_names_that_are_looked_up_slowly_delay_no_other_peer(names: NameServer) -> None:
    names.slow = {f"slow-{i}.test" for i in range(40)}  # more than the loop's own threads
    limits = replace(FAST, greeting_s=60.0, max_per_incarnation=64)
    async with AnsweringListener(limits=limits) as answering, RecordingDialer(limits=limits) as dialing:
        for name in names.slow:
            dialing.say(Endpoint(name, answering.endpoint.port))
        await until(lambda: all(names.asked[name] for name in names.slow))
        dialing.say(Endpoint("quick.test", answering.endpoint.port), seq=7)
        await until(lambda: dialing.answers == [7])
        names.gate.set()
        await until(lambda: len(dialing.answers) == 41)


async def test_a_peer_is_dialled_where_its_name_points_now_and_where_it_pointed_if_the_look_up_takes_long(
    names: NameServer,
) -> None:
    limits = replace(FAST, name_s=0.1)
    async with AnsweringListener() as answering, RecordingDialer(limits=limits) as dialing:
        named = Endpoint("moved.test", answering.endpoint.port)
        names.addresses = ["127.0.0.9"]
        dialing.say(named)
        await until(lambda: dialing.unreachable)
        names.addresses = [LOOPBACK]
        await until(lambda: dialing.answers == [0])
        names.slow = {"moved.test"}
        asked = names.asked["moved.test"]
        for connection in list(answering.listener.callers):
            connection.abort()
        await until(lambda: answering.accepted == 2 and names.asked["moved.test"] > asked)
        dialing.say(named, seq=1)
        await until(lambda: dialing.answers == [0, 1])


@pytest.mark.parametrize("secrets", SECRETS, ids=["plain", "signed"])
async def test_a_link_that_a_wrong_answer_led_elsewhere_is_made_anew_once_it_is_doubted_and_the_name_is_right(
    names: NameServer, secrets: Secrets | None
) -> None:
    async with AnsweringListener(secrets) as wanted, RecordingDialer(secrets=secrets) as dialing:
        port = wanted.endpoint.port
        async with AnsweringListener(secrets, port=port, host="127.0.0.2") as other:
            named, names.addresses = Endpoint("d.test", port), ["127.0.0.2"]
            dialing.say(named)
            await until(lambda: other.heard)
            asked = names.asked["d.test"]
            dialing.dialer.doubt(named)
            await until(lambda: names.asked["d.test"] > asked)
            await asyncio.sleep(0.1)
            assert other.accepted == 1 and dialing.dialer.up(named), "the name still leads there"
            names.addresses = [LOOPBACK]
            dialing.say(named, seq=1)
            await until(lambda: len(other.heard) == 2)
            dialing.dialer.doubt(named)
            await until(lambda: wanted.accepted)
            dialing.say(named, seq=2)
            await until(lambda: dialing.answers == [0, 1, 2])
            assert wanted.heard == [("p-1", 2)] and not other.events, "leaving is no evidence that this process is gone"


def test_the_end_of_a_process_waits_for_no_name() -> None:
    code = """
import asyncio, socket, threading
from unit.channel.kit import Endpoint, RecordingDialer
asked = threading.Event()

def silent(*arguments, **more):
    asked.set()
    threading.Event().wait()

async def main():
    async with RecordingDialer() as dialing:
        dialing.say(Endpoint("silent.test", 1))
        while not asked.is_set():
            await asyncio.sleep(0.001)

socket.getaddrinfo = silent
asyncio.new_event_loop().run_until_complete(main())
"""
    environ = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    subprocess.run([sys.executable, "-c", code], env=environ, cwd=ROOT, check=True, timeout=60)


async def test_one_connection_per_endpoint_is_made_and_reused() -> None:
    async with AnsweringListener() as one, AnsweringListener() as two, RecordingDialer() as dialing:
        for seq in range(5):
            for answering in (one, two):
                dialing.say(answering.endpoint, seq)
                await until(lambda answering=answering, seq=seq: ("p-1", seq) in answering.heard)
        assert one.accepted == two.accepted == 1
        assert dialing.dialer.up(one.endpoint) and dialing.stats()["links_up"] == 2


@pytest.mark.parametrize("secrets", SECRETS, ids=["plain", "signed"])
async def test_large_messages_pass_once_the_peer_is_proven(secrets: Secrets | None) -> None:
    from vllm_ascend_pd.protocol.messages import Memory, Ready

    addresses = Memory("s", (1,), tuple(tuple(2**40 + n + at for at in range(10)) for n in range(4096)))
    ready = Ready(
        **{name: getattr(message(3), name) for name in Ready.__struct_fields__ if hasattr(message(), name)},
        lease_s=1.0,
        memory="x",
        addresses=addresses,
    )
    async with AnsweringListener(secrets) as answering, RecordingDialer(secrets=secrets) as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.got)
        assert answering.listener.send("p-1", ready)
        await until(lambda: len(dialing.got) == 2)
        assert dialing.got[1] == ready


async def test_a_lost_connection_is_made_again_without_being_asked() -> None:
    """The fence observes the connection, so it is restored without a message to send."""
    async with AnsweringListener() as answering, RecordingDialer() as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.answers)
        for connection in list(answering.listener.callers):
            connection.abort()
        await until(lambda: answering.accepted == 2 and answering.connected_to("p-1"))
        assert not dialing.unreachable and not answering.events
        assert answering.connected_to("p-1")


async def test_a_listener_that_comes_back_is_found_again() -> None:
    async with RecordingDialer() as dialing:
        async with AnsweringListener() as answering:
            dialing.say(answering.endpoint, 1)
            await until(lambda: dialing.answers == [1])
            endpoint = answering.endpoint
        await until(lambda: dialing.unreachable)
        async with AnsweringListener(port=endpoint.port) as restarted:
            for seq in range(2, 400):
                dialing.say(endpoint, seq)
                await asyncio.sleep(0.005)
                if restarted.heard:
                    break
            await until(lambda: len(dialing.answers) > 1)


async def test_a_refused_connection_is_reported_for_every_attempt_and_attempts_become_rarer() -> None:
    limits = ChannelLimits(backoff_first_s=0.1, backoff_max_s=50.0, message_ttl_s=1.5, sweep_s=0.02)
    async with RecordingDialer(limits=limits) as dialing:
        endpoint = Endpoint(LOOPBACK, 1)
        dialing.say(endpoint)
        await until(lambda: dialing.stats().get("dropped_expired") == 1)
        attempts = dialing.stats()["unreachable"]
        assert 3 <= attempts <= 7  # 75, 150, 300, 600, 1200 ms
        assert "refused" in dialing.unreachable[0].lower()
        await asyncio.sleep(0.5)
        assert dialing.stats()["unreachable"] == len(dialing.unreachable) <= attempts + 1, (
            "nothing to say: no address is dialled"
        )


async def test_a_name_that_no_look_up_takes_is_unreachable() -> None:
    async with RecordingDialer() as dialing:
        dialing.say(Endpoint("x" * 70 + ".d", 1))
        await until(lambda: dialing.unreachable)
        assert "label" in dialing.unreachable[0]


async def test_a_host_that_no_socket_takes_is_unreachable_and_its_link_is_forgotten() -> None:
    limits = replace(FAST, max_links=1, idle_link_s=0.1, message_ttl_s=0.05)
    async with RecordingDialer(limits=limits) as dialing:
        dialing.say(Endpoint("a\0b", 1))
        await until(lambda: dialing.unreachable)
        assert "null character" in dialing.unreachable[0]
        await until(lambda: dialing.stats()["links"] == 0)
        assert dialing.say(Endpoint(LOOPBACK, 1))


async def test_what_waits_for_a_link_is_bounded_and_the_newest_survives() -> None:
    async with AnsweringListener() as answering, RecordingDialer() as dialing:
        for seq in range(FAST.max_queued + 50):
            dialing.say(answering.endpoint, seq)
        await until(lambda: len(answering.heard) == FAST.max_queued)
        assert answering.heard[-1] == ("p-1", FAST.max_queued + 49)
        assert dialing.stats()["dropped_queue_full"] == 50


async def test_links_are_bounded_and_forgotten() -> None:
    limits = ChannelLimits(max_links=3, idle_link_s=0.1, message_ttl_s=0.05, sweep_s=0.02, backoff_first_s=0.02)
    async with RecordingDialer(limits=limits) as dialing:
        sent = [dialing.say(Endpoint(LOOPBACK, port)) for port in (1, 2, 3, 4)]
        assert sent == [True, True, True, False]
        await until(lambda: dialing.stats()["links"] == 0)
        assert dialing.stats()["dropped_too_many_links"] == 1


async def test_a_peer_that_does_not_read_costs_a_bounded_buffer() -> None:
    limits = ChannelLimits(send_buffer_bytes=100_000)
    async with AnsweringListener(limits=limits) as answering, RecordingDialer() as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.answers)
        link = dialing.dialer.links[answering.endpoint]
        link.connection.transport.pause_reading()
        sent = 0
        while answering.listener.send("p-1", message(text="x" * 1000)):
            sent += 1
            assert sent < 100_000
            await asyncio.sleep(0)
        assert answering.stats()["dropped_buffer_full"] == 1
        link.connection.transport.resume_reading()
        await until(lambda: len(dialing.answers) == sent + 1)


async def test_the_buffer_of_a_peer_that_does_not_read_is_filled_to_its_last_byte() -> None:
    """It holds what its limit says: the largest messages are sent in one piece, so none may be cut off by one byte."""
    async with AnsweringListener() as answering, RecordingDialer() as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.answers)
        (theirs,) = answering.listener.callers
        link = dialing.dialer.links[answering.endpoint]
        assert link.connection is not None
        transport = theirs.transport
        assert transport is not None
        link.connection.transport.pause_reading()  # type: ignore[union-attr]
        while not transport.get_write_buffer_size():
            transport.write(bytes(1 << 20))
        left = FAST.send_buffer_bytes - transport.get_write_buffer_size()
        assert not theirs.send(bytes(left + 1)) and theirs.send(bytes(left)) and not theirs.send(b"1")
        theirs.abort()


async def test_a_peer_that_ends_its_half_is_answered_with_the_end_of_ours() -> None:
    """The end comes at once, and not when the sweep gives up waiting."""
    patient = replace(FAST, linger_s=3600.0, greeting_s=3600.0)
    async with AnsweringListener(limits=patient) as answering, RawConnection(answering) as raw:
        await until(lambda: answering.accepted)
        (ours,) = answering.listener.callers
        raw.writer.write_eof()
        try:
            await raw.end()
            await until(lambda: answering.endings == [Ending.PEER])
        finally:
            ours.abort()


async def test_the_first_attempt_after_a_refusal_waits_as_long_as_the_first_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The delay doubles with each failure, and no failure precedes the first."""
    waits: list[float] = []

    class NotedBackoff(Backoff):
        def delay(self, failures: int, rand: float) -> float:
            waits.append(super().delay(failures, rand))
            return waits[-1]

    monkeypatch.setattr("vllm_ascend_pd.channel.link.Backoff", NotedBackoff)
    async with RecordingDialer(limits=replace(FAST, backoff_first_s=0.04, backoff_max_s=0.08)) as dialing:
        dialing.say(Endpoint(LOOPBACK, 1))
        await until(lambda: len(waits) > 2)
    assert waits[:3] == [0.03, 0.06, 0.06]


@pytest.mark.parametrize("end", ["listener", "dialer"])
async def test_a_message_of_another_channel_is_counted_and_goes_nowhere(end: str) -> None:
    less = {"accepts": (Begin,)}
    of_listener, of_dialer = (less, {}) if end == "listener" else ({}, less)
    async with AnsweringListener(**of_listener) as answering, RecordingDialer(**of_dialer) as dialing:
        dialing.say(answering.endpoint)
        owner = answering if end == "listener" else dialing
        await until(lambda: owner.stats().get("dropped_not_for_us") == 1)
        assert len(answering.heard) == (end == "dialer") and not dialing.answers


async def test_an_unknown_peer_is_counted() -> None:
    async with AnsweringListener() as answering:
        assert not answering.listener.send("unknown", message())
        assert answering.stats()["dropped_unknown_peer"] == 1


async def test_a_port_that_is_taken_is_named() -> None:
    async with AnsweringListener() as answering:
        with pytest.raises(PdError, match=str(answering.endpoint.port)) as caught:
            await AnsweringListener(port=answering.endpoint.port).listener.start()
        assert caught.value.code == "PD-CTRL-001"


async def test_small_frames_leave_at_once() -> None:
    import socket

    async with AnsweringListener() as answering, RecordingDialer() as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.answers)
        ends = [dialing.dialer.links[answering.endpoint].connection, next(iter(answering.listener.callers))]
        for end in ends:
            sock = end.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_closing_leaves_no_task_and_no_timer(caplog: pytest.LogCaptureFixture) -> None:
    async with AnsweringListener() as answering:
        dialing = RecordingDialer()
        dialing.say(answering.endpoint)
        dialing.say(Endpoint(LOOPBACK, 1))
        await until(lambda: dialing.answers and dialing.unreachable)
        await dialing.dialer.close()
        await dialing.dialer.close()
        assert not dialing.say(answering.endpoint)
    await answering.listener.close()
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not caplog.records


# -- secrets


async def answered(dialing: RecordingDialer, answering: AnsweringListener) -> None:
    """Say something until it is answered."""
    for seq in range(500):
        dialing.say(answering.endpoint, seq)
        await asyncio.sleep(0.005)
        if dialing.answers:
            break
    assert dialing.answers


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (Secrets(NEW, OLD), Secrets(OLD)),
        (Secrets(NEW, OLD), Secrets(OLD, NEW)),
        (Secrets(OLD), Secrets(NEW, OLD)),
        (Secrets(NEW), Secrets(NEW, OLD)),
    ],
    ids=["listener-not-yet", "both-half-way", "dialer-not-yet", "dialer-done"],
)
async def test_secrets_can_be_rotated_in_any_order(ours: Secrets, theirs: Secrets) -> None:
    async with AnsweringListener(theirs) as answering, RecordingDialer(secrets=ours) as dialing:
        await answered(dialing, answering)


async def test_a_changed_secret_file_serves_once_both_sides_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side is restarted, as where a Secret is edited and kubelet brings it to one host after the other."""
    monkeypatch.setattr(secret_files, "LOOK_S", 0.0)
    monkeypatch.setattr(secret_files, "SETTLED_S", 0.0)
    files = [tmp_path / name for name in ("p", "d")]

    def write(file: Path, secret: bytes) -> None:
        file.write_bytes(secret)
        file.chmod(0o600)

    for file in files:
        write(file, OLD)
    ours, theirs = (load_secrets(ChannelConfig(secret_file=str(file))) for file in files)
    async with AnsweringListener(theirs) as answering, RecordingDialer(secrets=ours) as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.answers)
        write(files[1], NEW)  # D's alone: connections that exist go on, a new one is refused
        dialing.say(answering.endpoint, 1)
        await until(lambda: len(dialing.answers) == 2)
    async with AnsweringListener(theirs) as answering, RecordingDialer(secrets=ours) as dialing:
        dialing.say(answering.endpoint)
        await until(lambda: dialing.unreachable)
        assert answering.stats()["PD-SEC-003"] and not dialing.answers
        write(files[0], NEW)
        await answered(dialing, answering)


# -- pure


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_loopback_needs_no_secret(host: str) -> None:
    assert is_loopback(host)
    check_exposure(host, secured=False, allow_unauthenticated=False)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "no.such.host.invalid"])
def test_other_addresses_need_a_secret_or_permission(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_exposure(host, secured=False, allow_unauthenticated=False)
    assert caught.value.code == "PD-SEC-002"
    check_exposure(host, secured=True, allow_unauthenticated=False)
    check_exposure(host, secured=False, allow_unauthenticated=True)
