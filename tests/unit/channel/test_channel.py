# SPDX-License-Identifier: Apache-2.0
"""The side channel between two cooperating ends: messages arrive, connections are reused, losses are repaired."""

from __future__ import annotations

import asyncio

import pytest

from unit.kits.channel import FAST, LOOPBACK, Ear, Mouth, message, until
from vllm_ascend_pd.channel.exposure import check_exposure, is_loopback
from vllm_ascend_pd.channel.limits import ChannelLimits
from vllm_ascend_pd.errors import ConfigError, PdError
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import Endpoint

OLD, NEW = b"o" * 32, b"n" * 32
SECRETS = [None, Secrets(NEW)]


@pytest.mark.parametrize("secrets", SECRETS, ids=["plain", "signed"])
async def test_messages_and_answers_arrive_in_order(secrets: Secrets | None) -> None:
    async with Ear(secrets) as ear, Mouth(secrets=secrets) as mouth:
        for seq in range(200):
            assert mouth.say(ear.endpoint, seq)
        await until(lambda: len(mouth.answers) == 200)
        assert ear.heard == [("p-1", seq) for seq in range(200)]
        assert mouth.answers == list(range(200))


async def test_one_connection_per_endpoint_is_made_and_reused() -> None:
    async with Ear() as one, Ear() as two, Mouth() as mouth:
        for seq in range(5):
            for ear in (one, two):
                mouth.say(ear.endpoint, seq)
                await until(lambda ear=ear, seq=seq: ("p-1", seq) in ear.heard)
        assert one.accepted == two.accepted == 1
        assert mouth.dialer.up(one.endpoint) and mouth.stats()["links_up"] == 2


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
    got = []
    async with Ear(secrets) as ear, Mouth(secrets=secrets) as mouth:
        mouth.dialer._context.on_message = lambda _, m: got.append(m)
        mouth.say(ear.endpoint)
        await until(lambda: got)
        assert ear.listener.send("p-1", ready)
        await until(lambda: len(got) == 2)
        assert got[1] == ready


async def test_a_lost_connection_is_made_again_without_being_asked() -> None:
    """The fence observes the connection, so it is restored without a message to send."""
    async with Ear() as ear, Mouth() as mouth:
        mouth.say(ear.endpoint)
        await until(lambda: mouth.answers)
        for connection in list(ear.listener._callers):
            connection.abort()
        await until(lambda: ear.accepted == 2 and ear.connected_to("p-1"))
        assert not mouth.unreachable and not ear.events
        assert ear.connected_to("p-1")


async def test_a_listener_that_comes_back_is_found_again() -> None:
    async with Mouth() as mouth:
        async with Ear() as ear:
            mouth.say(ear.endpoint, 1)
            await until(lambda: mouth.answers == [1])
            endpoint = ear.endpoint
        await until(lambda: mouth.unreachable)
        async with Ear(port=endpoint.port) as again:
            for seq in range(2, 400):
                mouth.say(endpoint, seq)
                await asyncio.sleep(0.005)
                if again.heard:
                    break
            await until(lambda: len(mouth.answers) > 1)


async def test_a_refused_connection_is_reported_for_every_attempt_and_attempts_become_rarer() -> None:
    limits = ChannelLimits(backoff_first_s=0.1, backoff_max_s=50.0, message_ttl_s=1.5, sweep_s=0.02)
    async with Mouth(limits=limits) as mouth:
        endpoint = Endpoint(LOOPBACK, 1)
        mouth.say(endpoint)
        await until(lambda: mouth.stats().get("dropped_expired") == 1)
        attempts = mouth.stats()["unreachable"]
        assert 3 <= attempts <= 7  # 75, 150, 300, 600, 1200 ms
        assert "refused" in mouth.unreachable[0].lower()
        await asyncio.sleep(0.5)
        assert mouth.stats()["unreachable"] == len(mouth.unreachable) <= attempts + 1, (
            "nothing to say: no address is dialled"
        )


async def test_a_name_that_no_look_up_takes_is_unreachable() -> None:
    async with Mouth() as mouth:
        mouth.say(Endpoint("x" * 70 + ".d", 1))
        await until(lambda: mouth.unreachable)
        assert "label" in mouth.unreachable[0]


async def test_what_waits_for_a_link_is_bounded_and_the_newest_survives() -> None:
    async with Ear() as ear, Mouth() as mouth:
        for seq in range(FAST.max_queued + 50):
            mouth.say(ear.endpoint, seq)
        await until(lambda: len(ear.heard) == FAST.max_queued)
        assert ear.heard[-1] == ("p-1", FAST.max_queued + 49)
        assert mouth.stats()["dropped_queue_full"] == 50


async def test_links_are_bounded_and_forgotten() -> None:
    limits = ChannelLimits(max_links=3, idle_link_s=0.1, message_ttl_s=0.05, sweep_s=0.02, backoff_first_s=0.02)
    async with Mouth(limits=limits) as mouth:
        sent = [mouth.say(Endpoint(LOOPBACK, port)) for port in (1, 2, 3, 4)]
        assert sent == [True, True, True, False]
        await until(lambda: mouth.stats()["links"] == 0)
        assert mouth.stats()["dropped_too_many_links"] == 1


async def test_a_peer_that_does_not_read_costs_a_bounded_buffer() -> None:
    limits = ChannelLimits(send_buffer_bytes=100_000)
    async with Ear(limits=limits) as ear, Mouth() as mouth:
        mouth.say(ear.endpoint)
        await until(lambda: mouth.answers)
        link = mouth.dialer._links[ear.endpoint]
        link._connection._transport.pause_reading()
        sent = 0
        while ear.listener.send("p-1", message(text="x" * 1000)):
            sent += 1
            assert sent < 100_000
            await asyncio.sleep(0)
        assert ear.stats()["dropped_buffer_full"] == 1
        link._connection._transport.resume_reading()
        await until(lambda: len(mouth.answers) == sent + 1)


async def test_an_unknown_peer_is_counted() -> None:
    async with Ear() as ear:
        assert not ear.listener.send("unknown", message())
        assert ear.stats()["dropped_unknown_peer"] == 1


async def test_a_port_that_is_taken_is_named() -> None:
    async with Ear() as ear:
        with pytest.raises(PdError, match=str(ear.endpoint.port)) as caught:
            await Ear(port=ear.endpoint.port).listener.start()
        assert caught.value.code == "PD-CTRL-001"


async def test_small_frames_leave_at_once() -> None:
    import socket

    async with Ear() as ear, Mouth() as mouth:
        mouth.say(ear.endpoint)
        await until(lambda: mouth.answers)
        ends = [mouth.dialer._links[ear.endpoint]._connection, next(iter(ear.listener._callers))]
        for end in ends:
            sock = end._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_closing_leaves_no_task_and_no_timer(caplog: pytest.LogCaptureFixture) -> None:
    async with Ear() as ear:
        mouth = Mouth()
        mouth.say(ear.endpoint)
        mouth.say(Endpoint(LOOPBACK, 1))
        await until(lambda: mouth.answers and mouth.unreachable)
        await mouth.dialer.close()
        await mouth.dialer.close()
        assert not mouth.say(ear.endpoint)
    await ear.listener.close()
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not caplog.records


# -- secrets


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
    async with Ear(theirs) as ear, Mouth(secrets=ours) as mouth:
        for seq in range(500):
            mouth.say(ear.endpoint, seq)
            await asyncio.sleep(0.005)
            if mouth.answers:
                break
        assert mouth.answers


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
