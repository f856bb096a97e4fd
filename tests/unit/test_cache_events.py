# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV events at the metaserver: as vLLM encodes them, over a socket as vLLM has it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from metaserver_cluster import cluster, until
from test_metaserver_prefixes import HEAD
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from vllm_ascend_pd.metaserver.service import cache_events
from vllm_ascend_pd.metaserver.service.cache_events import Cache, parse_ports


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
    assert cache.heard(0, batch(stored(1, 2, 3))) == (48, 0)
    assert cache.heard(1, batch(stored(3, 4), removed(1))) == (16, 16)
    assert cache.heard(2, batch(removed(1, 9))) == (0, 0), "neither is there"
    assert cache.heard(3, batch(removed(2, 3, 4))) == (0, 48)


def test_a_number_other_than_0_is_a_beginning_too() -> None:
    assert Cache().heard(700, batch(stored(1))) == (16, 0)


@pytest.mark.parametrize("number", [0, 4, 6, 2])
def test_after_missed_and_new_beginnings_nothing_is_known(number: int) -> None:
    cache = Cache()
    assert cache.heard(4, batch(stored(1))) == (16, 0)
    assert cache.heard(number, batch(stored(2))) is None
    assert cache.heard(number + 1, batch(removed(1), stored(3))) == (16, 0)


def test_a_cleared_cache_has_nothing() -> None:
    cache = Cache()
    assert cache.heard(0, batch(stored(1, 2))) == (32, 0)
    assert cache.heard(1, batch(AllBlocksCleared())) is None
    assert cache.heard(2, batch(removed(1), stored(1))) == (16, 0)


def test_the_largest_group_counts() -> None:
    cache = Cache()
    assert cache.heard(0, batch(stored(1, 2, group_idx=0), stored(1, 2, group_idx=1))) == (32, 0)
    assert cache.heard(1, batch(removed(1, group_idx=0))) == (0, 0), "a window has gone on"
    assert cache.heard(2, batch(removed(1, 2, group_idx=1))) == (0, 16)


def test_other_tiers_do_not_count() -> None:
    assert Cache().heard(0, batch(stored(1, medium="CPU"), removed(2, medium="STORAGE"))) == (0, 0)


def test_arrays_as_older_versions_send_them() -> None:
    cache = Cache()
    assert cache.heard(0, array(["BlockStored", [b"a", b"b"], None, [0] * 32, 16, None, "GPU"])) == (32, 0)
    assert cache.heard(1, array(["BlockRemoved", [b"a"], "GPU"])) == (0, 16)
    assert cache.heard(2, array(["AllBlocksCleared"])) is None


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, 7]),
        msgspec.msgpack.encode([1.0, [7]]),
        msgspec.msgpack.encode([1.0, ["x"]]),
        array(["Another", 1]),
        array(["BlockStored"]),
        array(["BlockStored", 7, None, [], 16, None, "GPU"]),
        array(["BlockStored", [1], None, [], "x", None, "GPU"]),
        array(["BlockStored", [[1]], None, [], 16, None, "GPU"]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}]]),
        msgspec.msgpack.encode([1.0, [{}]]),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError):
        Cache().heard(0, payload)


def test_no_more_blocks_are_known_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "MOST_BLOCKS", 2)
    cache = Cache()
    assert cache.heard(0, batch(stored(1, 2))) == (32, 0)
    assert cache.heard(1, batch(stored(3))) is None
    assert cache.heard(2, batch(stored(4))) == (16, 0)


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
    """As vLLM has it: a topic, a number, a batch."""

    def __init__(self) -> None:
        self.socket = zmq.Context.instance().socket(
            zmq.XPUB
        )  # it hears of subscribers, so no test needs to wait by the clock
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # of each of them
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.number = -1

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
    made.socket.close(linger=0)


def test_what_an_engine_has_lost_is_not_thought_to_be_there(publisher: Publisher) -> None:
    with cluster(prefill=1, kv_events=(str(publisher.port),)) as c:
        publisher.subscribed()
        publisher.subscribed()  # D has the same host here
        c.complete(HEAD)
        instance = c.worker.fleet.get(c.prefill[0].address)
        assert instance is not None and instance.prompts.tokens > 0 and not instance.prompts.told
        publisher.say(batch(stored(*range(100))))
        until(lambda: instance.prompts.told)
        assert instance.prompts.tokens > 0
        publisher.say(batch(stored(*range(100, 200)), removed(*range(100))))
        until(lambda: not instance.prompts.tokens)
        until(lambda: counted(c) == 4)  # of both


def counted(c: Any) -> float:
    lines = c.http.get("/metrics").text.splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("ascend_pd_metaserver_cache_events_total"))


@pytest.mark.usefixtures("heard")
def test_a_publisher_of_something_else_is_not_listened_to(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster(prefill=1, kv_events=(str(publisher.port),)) as c:
        publisher.subscribed()
        publisher.subscribed()
        with caplog.at_level(logging.WARNING):
            publisher.say(b"something else")
            until(lambda: caplog.text.count("are no KV events of vLLM's and is not used") == 2)
        assert c.complete(HEAD).status_code == 200


def test_without_a_publisher_nothing_is_lost() -> None:
    with cluster(prefill=1, kv_events=("1",)) as c:
        c.complete(HEAD)
        assert all(instance.prompts.tokens for instance in c.worker.fleet)
