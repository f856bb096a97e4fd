# SPDX-License-Identifier: Apache-2.0
"""Blocking calls on own threads: one at a time per peer, a stalled peer costs one thread and nobody's time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.lanes import THREADS, Lanes


class BlockingEngine:
    """`write` returns when its peer's gate is open, with the peer's verdict."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.bad: set[str] = set()
        self.calls: list[tuple[str, int]] = []
        self.inside: list[str] = []
        self.lock = threading.Lock()

    def write(self, address: str, src: list[int], dst: list[int], size: list[int]) -> bool:
        with self.lock:
            assert address not in self.inside, "two calls at once to one peer"
            self.inside.append(address)
            self.calls.append((address, len(size)))
        assert self.gates.setdefault(address, _open()).wait(10)
        with self.lock:
            self.inside.remove(address)
        return address not in self.bad


def _open() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@pytest.fixture
def engine() -> BlockingEngine:
    return BlockingEngine()


@pytest.fixture
def lanes(engine) -> Iterator[Lanes]:
    opened = Lanes(10, 5.0, lambda: None, time.monotonic)
    yield opened
    for gate in engine.gates.values():
        gate.set()
    opened.close()


def submit(lanes: Lanes, engine: BlockingEngine, address: str, n: int = 1) -> int:
    numbers = np.arange(n, dtype=np.int64)
    return lanes.submit(engine, address, numbers, numbers, numbers + 1)


def settle(lanes: Lanes, handle: int) -> WriteState:
    deadline = time.monotonic() + 10
    while (state := lanes.poll(handle)) is WriteState.PENDING:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return state


def test_batches_are_cut_at_the_cap_and_all_calls_must_succeed(lanes, engine) -> None:
    assert settle(lanes, submit(lanes, engine, "a", 25)) is WriteState.LANDED
    assert engine.calls == [("a", 10), ("a", 10), ("a", 5)]
    engine.bad.add("a")
    engine.calls.clear()
    assert settle(lanes, submit(lanes, engine, "a", 25)) is WriteState.FAILED
    assert engine.calls == [("a", 10)], "nothing is issued after a failure"
    assert settle(lanes, submit(lanes, engine, "b", 0)) is WriteState.LANDED


def test_stalled_peers_delay_nobody_while_a_thread_is_free(lanes, engine) -> None:
    stalled = [f"stalled-{n}" for n in range(THREADS - 1)]
    for name in stalled:
        engine.gates[name] = threading.Event()
    waiting = [submit(lanes, engine, name) for name in stalled * 2]
    assert settle(lanes, submit(lanes, engine, "healthy")) is WriteState.LANDED
    assert {lanes.poll(handle) for handle in waiting} == {WriteState.PENDING}
    for name in stalled:
        engine.gates[name].set()
    assert {settle(lanes, handle) for handle in waiting} == {WriteState.LANDED}


def test_a_write_that_is_out_fails_only_when_its_call_has_returned(engine) -> None:
    now = [0.0]
    lanes = Lanes(10, 5.0, lambda: None, lambda: now[0])
    gate = engine.gates["a"] = threading.Event()
    out, behind = submit(lanes, engine, "a"), submit(lanes, engine, "a")
    while not engine.inside:
        time.sleep(0.001)
    now[0] = 6.0
    assert lanes.poll(behind) is WriteState.FAILED, "it was never issued"
    assert lanes.poll(out) is WriteState.PENDING, "its bytes are on the wire"
    gate.set()
    assert settle(lanes, out) is WriteState.FAILED
    assert len(engine.calls) == 1
    lanes.close()


def test_close_waits_for_calls_and_ends_the_threads(lanes, engine) -> None:
    gate = engine.gates["a"] = threading.Event()
    handle = submit(lanes, engine, "a", 25)
    while not engine.inside:
        time.sleep(0.001)
    threading.Timer(0.1, gate.set).start()
    lanes.close()
    assert not engine.inside and len(engine.calls) == 1
    assert lanes.poll(handle) is WriteState.FAILED
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pd-wire-")]
