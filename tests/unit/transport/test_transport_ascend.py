# SPDX-License-Identifier: Apache-2.0
"""One engine that peers write to and that this process writes with: effects of a revocation on the writes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from unit.kits.watching import listening, until
from vllm_ascend_pd.errors import ConfigError, LocalProtocolError
from vllm_ascend_pd.transport.ascend import AscendEngine
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.blocking_writes import BlockingWrites
from vllm_ascend_pd.transport.engine import can_ask
from vllm_ascend_pd.transport.target import MAX_REGISTERED, MooncakeTarget
from vllm_ascend_pd.transport.wire import MooncakeWire

SIZE = 4096


@dataclass
class EngineCalls:
    """Calls of one engine, in an object apart, so that the engine itself can be collected."""

    engine: weakref.ref[Any]
    registered: list[tuple[int, int]] = field(default_factory=list)
    writes: int = 0


class FakeAscendEngine:
    """Methods of a TransferEngine that the package uses. A write waits for `gate`; a probe for `answering`."""

    opened: list[EngineCalls]
    gate: threading.Event
    answering: threading.Event
    probed: threading.Event
    written: threading.Event

    def __init__(self) -> None:
        self.seen = EngineCalls(weakref.ref(self))
        self.opened.append(self.seen)

    def initialize(self, *_: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1  # a port without a listener

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        pair = addresses[0], lengths[0]
        if pair in self.seen.registered:
            return -1
        self.seen.registered.append(pair)
        return 0

    def send_probe(self, session: str) -> int:
        self.probed.set()
        return 0 if self.answering.wait(20) else -1

    def batch_transfer_sync_write(self, *_: Any) -> int:
        self.written.set()
        self.gate.wait(20)
        self.seen.writes += 1
        return 0


@pytest.fixture
def kind() -> type[FakeAscendEngine]:
    return type(
        "OneRaw",
        (FakeAscendEngine,),
        {"opened": [], **{name: threading.Event() for name in ("gate", "answering", "probed", "written")}},
    )


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros(SIZE, dtype=np.uint8)


@pytest.fixture
def writes() -> BlockingWrites:
    return BlockingWrites(10, 5.0, lambda: None, time.monotonic)


@pytest.fixture
def both(kind: Any, memory: np.ndarray, writes: BlockingWrites) -> Iterator[tuple[MooncakeTarget, MooncakeWire]]:
    """Both sides of one process, which register the same cache."""
    target = MooncakeTarget(kind, "127.0.0.1", "ascend")
    wire = MooncakeWire(AscendEngine(target, writes), can_ask=can_ask(kind), wait_s=5.0)
    for end in (target, wire):
        end.register([(memory.ctypes.data, SIZE)])
    yield target, wire
    kind.gate.set()
    kind.answering.set()
    wire.close()
    target.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("pd-wire", "pd-probe"))]


def poller(wire: MooncakeWire, memory: np.ndarray, address: str = "127.0.0.1:1") -> Callable[[], WriteState]:
    handle = wire.submit(f"{address}/tag", [memory.ctypes.data], [SIZE], [16])
    return lambda: wire.poll(handle)


def ended(poll: Callable[[], WriteState]) -> WriteState:
    states = [WriteState.PENDING]
    until(lambda: states.append(poll()) or states[-1] is not WriteState.PENDING, "the write's end")
    return states[-1]


def test_one_engine_serves_both_sides_and_knows_the_cache_once(kind: Any, both: Any, memory: np.ndarray) -> None:
    target, wire = both
    session = target.session
    kind.gate.set()
    kind.answering.set()
    assert ended(poller(wire, memory)) is WriteState.LANDED
    (engine,) = kind.opened
    assert len(engine.registered) == 1 and target.session == session


def test_more_regions_than_a_process_can_register_are_refused_with_their_number(kind: Any) -> None:
    """Regions of caches and staging together; adjacent ones count once. None is registered before all are counted."""
    target = MooncakeTarget(kind, "127.0.0.1", "ascend")
    apart = [(SIZE * (2 * n + 1), SIZE) for n in range(MAX_REGISTERED + 1)]
    with pytest.raises(
        ConfigError, match=f"{MAX_REGISTERED + 1} separate regions .* can register {MAX_REGISTERED}"
    ) as caught:
        target.register(apart)
    assert caught.value.code == "PD-WIRE-006" and not kind.opened
    target.register([*apart[:-2], (apart[0][0] + SIZE, SIZE // 2)])
    target.register(apart[:1])  # the writing side registers the same again
    target.register(apart[-2:-1])
    assert len(kind.opened[0].registered) == MAX_REGISTERED
    with pytest.raises(ConfigError, match="257 separate regions"):
        target.register(apart[-1:])
    assert len(kind.opened[0].registered) == MAX_REGISTERED
    target.close()


def test_a_revocation_waits_for_the_call_that_is_out_and_peers_are_met_again(
    kind: Any, both: Any, writes: BlockingWrites, memory: np.ndarray
) -> None:
    target, wire = both
    kind.answering.set()
    poll = poller(wire, memory)
    until(lambda: poll() is WriteState.PENDING and kind.written.is_set(), "the call")
    revoking = threading.Thread(target=target.revoke, name="revoke")
    revoking.start()
    until(lambda: not writes.alive(1), "the revocation")
    kind.gate.set()
    revoking.join(20)
    assert len(kind.opened) == 2 and kind.opened[0].writes == 1
    assert ended(poll) is WriteState.FAILED, "what is out when the engine goes counts as cut"
    kind.written.clear()
    assert ended(poller(wire, memory)) is WriteState.LANDED
    assert kind.written.is_set() and (kind.opened[0].writes, kind.opened[1].writes) == (1, 1)


def test_what_waited_for_the_engine_that_went_was_never_issued(
    kind: Any, both: Any, writes: BlockingWrites, memory: np.ndarray
) -> None:
    target, wire = both
    kind.answering.set()
    kind.gate.set()
    assert ended(poller(wire, memory)) is WriteState.LANDED
    with writes.exclusive():
        poll = poller(wire, memory)
        target.opened.close()
    assert ended(poll) is WriteState.UNISSUED
    target.revoke()
    assert ended(poller(wire, memory)) is WriteState.LANDED and kind.opened[1].writes == 1


def test_an_engine_that_a_thread_is_in_is_not_taken_for_closed_however_often_it_is_revoked(
    kind: Any, both: Any
) -> None:
    target, _ = both
    engine = target.opened
    inside = threading.Thread(target=engine.answers, args=("127.0.0.1:1",), name="inside")
    inside.start()
    assert kind.probed.wait(20)
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="another thread is in it"):
            target.revoke()
        assert len(kind.opened) == 1, "peers can write to the first one still"
        with pytest.raises(LocalProtocolError, match="is closed"):
            engine.answers("127.0.0.1:1")
    kind.answering.set()
    inside.join(20)
    target.revoke()
    assert kind.opened[0].engine() is None and len(kind.opened) == 2


def test_a_peer_that_does_not_answer_a_probe_holds_up_no_revocation(kind: Any, both: Any, memory: np.ndarray) -> None:
    """The engine cannot be closed while a thread is in it: the connection is cut, which ends Mooncake's probe."""
    target, wire = both
    with listening() as silent:
        host, port = silent.getsockname()
        poll = poller(wire, memory, f"{host}:{port}")
        until(lambda: poll() is WriteState.PENDING and kind.probed.is_set(), "the probe")
        hung_up = threading.Thread(target=lambda: (time.sleep(0.05), kind.answering.set()), name="hang-up")
        hung_up.start()
        target.revoke()
        hung_up.join()
    assert len(kind.opened) == 2
    kind.gate.set()
    assert ended(poll) in (WriteState.LANDED, WriteState.UNISSUED)
