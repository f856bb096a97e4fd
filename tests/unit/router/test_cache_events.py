# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV events at the metaserver: encoded as by vLLM, over a socket like vLLM's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from tools.support.checks import front_counter
from unit.router.cluster import HEAD, FakeCluster, cluster, until
from vllm_ascend_pd.cli.__main__ import parser
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router import cache_events, instance_tasks
from vllm_ascend_pd.router.cache_events import Cache, parse_ports
from vllm_ascend_pd.router.command import settings_of
from vllm_ascend_pd.router.core.decisions import CircuitPolicy, Role
from vllm_ascend_pd.router.fleet import Fleet, Instance, parse_spec


def stored(*blocks: int, size: int = 16, **more: Any) -> BlockStored:
    facts = {"parent_block_hash": None, "token_ids": [0] * size * len(blocks), "lora_id": None, "lora_name": None}
    return BlockStored(block_hashes=list(blocks), block_size=size, **{**facts, "medium": "GPU", **more})


def removed(*blocks: int, **more: Any) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(blocks), **{"medium": "GPU", **more})


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=list(events)))


def array(*events: list[Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, events, 0])


# ---- one cache


def test_tokens_that_came_and_left_are_counted() -> None:
    cache = Cache()
    assert cache.apply(0, batch(stored(1, 2, 3))) == (48, False) and cache.tokens == 48
    assert cache.apply(1, batch(stored(3, 4), removed(1))) == (16, True) and cache.tokens == 48
    assert cache.apply(2, batch(removed(1, 9))) == (0, False), "neither is there"
    assert cache.apply(3, batch(removed(2, 3, 4))) == (0, True) and cache.tokens == 0


def test_a_number_other_than_0_is_a_beginning_too() -> None:
    assert Cache().apply(700, batch(stored(1))) == (16, False)


@pytest.mark.parametrize("number", [0, 4, 6, 2])
def test_after_missed_and_new_beginnings_only_what_comes_is_known(number: int) -> None:
    cache = Cache()
    assert cache.apply(4, batch(stored(1))) == (16, False)
    assert cache.apply(number, batch(stored(2))) == (16, True) and cache.tokens == 16
    assert cache.apply(number + 1, batch(removed(1), stored(3))) == (16, False) and cache.tokens == 32


def test_a_cleared_cache_has_what_comes_after() -> None:
    cache = Cache()
    assert cache.apply(0, batch(stored(1, 2))) == (32, False)
    assert cache.apply(1, batch(AllBlocksCleared(), stored(7))) == (16, True) and cache.tokens == 16
    assert cache.apply(2, batch(removed(1), stored(1))) == (16, False)


def test_the_largest_group_counts() -> None:
    cache = Cache()
    assert cache.apply(0, batch(stored(1, 2, group_idx=0), stored(1, 2, group_idx=1))) == (32, False)
    assert cache.apply(1, batch(removed(1, group_idx=0))) == (0, False), "a window has gone on"
    assert cache.apply(2, batch(removed(1, 2, group_idx=1))) == (0, True) and cache.tokens == 16


def test_what_is_not_in_the_engines_own_cache_does_not_count() -> None:
    cache = Cache()
    assert cache.apply(0, batch(stored(1, medium="CPU"), removed(2, medium="STORAGE"))) == (0, False)
    assert cache.apply(1, batch(stored(), removed())) == (0, False), "of a step whose blocks are all null"
    assert cache.apply(2, msgspec.msgpack.encode([1.0, [{"type": "Another", "block_hashes": [1]}]])) == (0, False)


def test_arrays_as_vllm_0_23_sends_them() -> None:
    cache = Cache()
    both = [["BlockStored", [b"a", b"b"], None, [0] * 32, 16, None, "GPU", None, None, group] for group in (0, 1)]
    assert cache.apply(0, array(*both)) == (32, False)
    assert cache.apply(1, array(["BlockRemoved", [b"a"], "GPU", 0])) == (0, False)
    assert cache.apply(2, array(["BlockRemoved", [b"a"], "GPU", 1])) == (0, True)
    assert cache.apply(3, array(["AllBlocksCleared"])) == (0, True) and cache.tokens == 0
    assert cache.apply(4, array(["BlockStored", [b"a"], None, [], 16, None, "GPU"])) == (16, False), "shorter ones too"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 3000,
        msgspec.msgpack.encode([1.0, [[]]]),
        array(["x", *(b"",) * 3]) + b"\x91",
        b"\x92\xcb" + bytes(8) + b"\x91" + b"\x91" * 3000,
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, 7]),
        msgspec.msgpack.encode([1.0, [7]]),
        array(["BlockStored", 7, None, [], 16, None, "GPU"]),
        array(["BlockStored", [1], None, [], "x", None, "GPU"]),
        array(["BlockStored", [[1]], None, [], 16, None, "GPU"]),
        msgspec.msgpack.encode([1.0, [{}]]),
    ],
)
def test_after_what_is_no_batch_nothing_is_known(payload: bytes) -> None:
    cache = Cache()
    cache.apply(0, batch(stored(1)))
    with pytest.raises(ValueError):
        cache.apply(1, payload)
    assert cache.tokens == 0
    assert cache.apply(2, batch(stored(1))) == (16, False)


def test_no_more_blocks_are_known_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "MAX_BLOCKS", 3)
    cache = Cache()
    assert cache.apply(0, batch(stored(1, 2))) == (32, False)
    assert cache.apply(1, batch(stored(3)))[1] and cache.tokens == 0
    assert cache.apply(2, batch(stored(4))) == (16, False)
    assert cache.apply(3, batch(*(stored(group_idx=group) for group in range(4))))[1], "groups count as well"


# ---- ports


def test_ports_of_all_and_of_some() -> None:
    assert parse_ports(["5557"]) == {"": (5557,)}
    assert parse_ports(["5557+2", "http://h:8100=6000", "h:9100+2=7000+2", "[fd00::1]:1=2"]) == {
        "": (5557, 5558),
        "h:8100": (6000,),
        "h:9100": (7000,),
        "h:9101": (7001,),
        "[fd00::1]:1": (2,),
    }
    assert parse_ports(["h:8100=6000+2"]) == {"h:8100": (6000, 6001)}


@pytest.mark.parametrize(
    "text", ["", "0", "x", "5557+", "5557+0", "65535+2", "h:8100=", "h:9100+3=7000+2", "h:0=5", "5+2000"]
)
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_ports([text])


# ---- in the service


class Publisher:
    """Publisher like vLLM's: a topic, a number, a batch."""

    def __init__(self, port: int = 0) -> None:
        # XPUB reports subscriptions, so no test needs to sleep.
        self.socket = zmq.Context.instance().socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # reports every subscription, not only the first of a topic
        self.socket.setsockopt(zmq.LINGER, 0)
        self.number = -1
        if port:
            self.port = port
            self.socket.bind(f"tcp://127.0.0.1:{port}")
        else:
            self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def subscribed(self) -> None:
        assert self.socket.poll(10_000), "the metaserver did not subscribe"
        self.socket.recv()

    def say(self, payload: bytes) -> None:
        self.number += 1
        self.socket.send_multipart([b"", self.number.to_bytes(8, "big"), payload])


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.socket.close()


def test_what_an_engine_has_lost_is_not_thought_to_be_there(publisher: Publisher) -> None:
    with cluster(prefill=1, kv_events=(str(publisher.port),)) as c:
        publisher.subscribed()
        publisher.subscribed()  # D has the same host here: two subscriptions
        before = counted(c)
        c.complete(HEAD)
        instance = c.worker.fleet.get(c.prefill[0].address)
        assert instance is not None and instance.prompts.tokens > 0 and not instance.prompts.reported
        publisher.say(batch(stored(*range(100))))
        until(lambda: instance.prompts.reported)
        assert instance.prompts.tokens > 0
        assert {i["name"]: i["kv_events"] for i in c.http.get("/status").json()["instances"]}[instance.name]
        publisher.say(batch(stored(*range(100, 200)), removed(*range(100))))
        until(lambda: not instance.prompts.tokens)
        until(lambda: counted(c) == before + 4)  # from both engines


def neighbours() -> tuple[Publisher, Publisher]:
    """Two ranks, on consecutive ports."""
    while True:
        one = Publisher()
        try:
            return one, Publisher(one.port + 1)
        except zmq.ZMQError:  # the port is taken
            one.socket.close()


def test_the_caches_of_an_instances_ranks_are_one() -> None:
    """A restarted rank has lost its blocks, the others have not."""
    ranks = neighbours()
    with cluster(prefill=1, kv_events=(f"{ranks[0].port}+2",)) as c:
        before = counted(c)
        for rank in ranks:
            rank.subscribed()
            rank.subscribed()  # D has the same host here: two subscriptions
            rank.say(batch(stored(*range(100))))
        until(lambda: counted(c) == before + 4)
        c.complete(HEAD)
        instance = c.worker.fleet.get(c.prefill[0].address)
        assert instance is not None
        for rank, there in zip(ranks, (True, False), strict=True):
            before = counted(c)
            rank.number += 5
            rank.say(batch())
            until(lambda before=before: counted(c) == before + 2)
            assert bool(instance.prompts.tokens) == there, "1,600 tokens are there still, and then none"
    for rank in ranks:
        rank.socket.close()


@pytest.mark.usefixtures("logs_reach_pytest")
def test_an_address_that_cannot_be_subscribed_to_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(prefill=1, kv_events=("1",)) as c, caplog.at_level(logging.WARNING):
        c.worker.fleet.add(parse_spec(Role.PREFILL, "a+b:1"), "here")
        until(lambda: "no KV events can be received from tcp://a+b:1" in caplog.text)
        assert c.complete(HEAD).status_code == 200


def counted(c: FakeCluster) -> float:
    return front_counter(str(c.http.base_url), "cache_events")


@pytest.mark.usefixtures("logs_reach_pytest")
def test_a_publisher_of_something_else_is_not_listened_to(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(prefill=1, kv_events=(str(publisher.port),)) as c:
        publisher.subscribed()
        publisher.subscribed()
        with caplog.at_level(logging.WARNING):
            publisher.say(b"something else")
            until(lambda: caplog.text.count("publishes messages that are not vLLM's KV events") == 2)
        assert c.complete(HEAD).status_code == 200


def test_without_a_publisher_nothing_is_lost() -> None:
    with cluster(prefill=1, kv_events=("1",)) as c:
        c.complete(HEAD)
        assert all(instance.prompts.tokens for instance in c.worker.fleet)


# ---- a task of each instance


@pytest.mark.usefixtures("logs_reach_pytest")
async def test_one_that_fails_is_begun_again_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instance_tasks, "_AGAIN_S", 0.01)
    fleet, begun = Fleet(CircuitPolicy()), list[str]()
    for port in (1, 2):
        fleet.add(parse_spec(Role.PREFILL, f"h:{port}"), "here")

    async def attend(instance: Instance) -> None:
        begun.append(instance.name)
        if instance.name == "h:1" and begun.count("h:1") < 3:
            raise RuntimeError("no")
        await asyncio.sleep(3600)

    task = asyncio.create_task(instance_tasks.attend_each(fleet, "test", attend))
    while begun.count("h:1") < 3:
        await asyncio.sleep(0.01)
    assert begun.count("h:2") == 1 and caplog.text.count("test h:1 failed, and is begun again") == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("host", ["10.0.0..5", "a" * 64])
def test_a_host_that_is_no_name_is_no_instance(host: str) -> None:
    with pytest.raises(ValueError, match="a host that is no name"):
        parse_spec(Role.PREFILL, f"http://{host}:80")


@pytest.mark.parametrize("more", [["--kv-events", "x"], ["--kv-events", "1", "--prefix-tokens", "0"]])
def test_what_cannot_be_subscribed_to_is_refused_at_start(more: list[str]) -> None:
    words = ["metaserver", "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2"]
    assert settings_of(parser().parse_args([*words, "--kv-events", "5557"])).kv_events == ("5557",)
    with pytest.raises(ConfigError, match="--kv-events"):
        settings_of(parser().parse_args([*words, *more]))
