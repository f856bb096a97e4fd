# SPDX-License-Identifier: Apache-2.0
"""Blocking calls on own threads: one at a time per peer, a stalled peer costs one thread and delays no other."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from unit.kits.refusing import no_more_threads
from unit.transport.clock import ManualClock
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.blocking_writes import CALLS, SLOW_S, START_AGAIN_S, THREADS, BlockingWrites


class BlockingEngine:
    """Engine whose `write` returns when its peer's gate is open, with the peer's result."""

    closed = False

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
def writes(engine: BlockingEngine) -> Iterator[BlockingWrites]:
    opened = BlockingWrites(10, 5.0, lambda: None, time.monotonic)
    yield opened
    for gate in engine.gates.values():
        gate.set()
    opened.close()


def submit(
    writes: BlockingWrites, engine: BlockingEngine, address: str, n: int = 1, issue_by: float = float("inf")
) -> int:
    numbers = np.arange(n, dtype=np.int64)
    return writes.submit(engine, address, numbers, numbers, numbers + 1, issue_by=issue_by)


def settle(writes: BlockingWrites, handle: int) -> WriteState:
    deadline = time.monotonic() + 10
    while (state := writes.poll(handle)) is WriteState.PENDING:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return state


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def own_threads() -> int:
    return sum(thread.name.startswith("pd-wire-") for thread in threading.enumerate())


def test_batches_are_cut_at_the_cap_and_all_calls_must_succeed(writes: BlockingWrites, engine: BlockingEngine) -> None:
    assert settle(writes, submit(writes, engine, "a", 25)) is WriteState.LANDED
    assert engine.calls == [("a", 10), ("a", 10), ("a", 5)]
    engine.bad.add("a")
    engine.calls.clear()
    assert settle(writes, submit(writes, engine, "a", 25)) is WriteState.FAILED
    assert engine.calls == [("a", 10)], "nothing is issued after a failure"
    assert settle(writes, submit(writes, engine, "b", 0)) is WriteState.LANDED


def test_a_decode_engine_that_stands_still_delays_no_other_however_many_ranks_it_has(
    writes: BlockingWrites, engine: BlockingEngine
) -> None:
    stalled = [f"stalled-{n}" for n in range(CALLS * 4)]
    for name in stalled:
        engine.gates[name] = threading.Event()
    waiting = [submit(writes, engine, name) for name in stalled * 2]
    assert settle(writes, submit(writes, engine, "healthy")) is WriteState.LANDED
    assert {writes.poll(handle) for handle in waiting} == {WriteState.PENDING}
    for name in stalled:
        engine.gates[name].set()
    assert {settle(writes, handle) for handle in waiting} == {WriteState.LANDED}


def test_fast_calls_are_few_at_a_time(engine: BlockingEngine) -> None:
    """A blocked call spins: it uses a core."""
    clock = ManualClock()
    writes = BlockingWrites(10, 5.0, lambda: None, clock)
    names = [f"peer-{n}" for n in range(CALLS + 2)]
    for name in names:
        engine.gates[name] = threading.Event()
    handles = [submit(writes, engine, name) for name in names]

    def inside() -> int:
        assert {writes.poll(handle) for handle in handles} == {WriteState.PENDING}
        return len(engine.inside)

    until(lambda: inside() == CALLS)
    for _ in range(20):
        assert inside() == CALLS
        time.sleep(0.001)
    clock.now = SLOW_S
    until(lambda: inside() == len(names))
    for gate in engine.gates.values():
        gate.set()
    writes.close()


def test_a_thread_that_is_free_makes_the_next_call(writes: BlockingWrites, engine: BlockingEngine) -> None:
    for address in "abc":
        assert settle(writes, submit(writes, engine, address)) is WriteState.LANDED
        assert own_threads() == 1


def test_writes_that_find_no_thread_were_never_issued_and_later_ones_are_made(engine: BlockingEngine) -> None:
    clock = ManualClock()
    writes = BlockingWrites(10, 5.0, lambda: None, clock)
    with no_more_threads("pd-wire") as refused:
        handle = submit(writes, engine, "a", issue_by=4.0)
        assert [writes.poll(handle) for _ in range(100)] == [WriteState.PENDING] * 100
        assert len(refused) == 1, "it is not tried with every poll"
        clock.now = START_AGAIN_S
        assert writes.poll(handle) is WriteState.PENDING and len(refused) == 2
        clock.now = 4.0
        assert writes.poll(handle) is WriteState.UNISSUED and not engine.calls
    clock.now += START_AGAIN_S
    assert settle(writes, submit(writes, engine, "a")) is WriteState.LANDED
    writes.close()


def test_a_first_contact_that_no_thread_can_end_was_never_issued(
    writes: BlockingWrites, engine: BlockingEngine
) -> None:
    one = np.ones(1, dtype=np.int64)
    with no_more_threads("pd-watch"):
        handle = writes.submit(engine, "a", one, one, one, issue_by=float("inf"), first_s=1.0)
        assert settle(writes, handle) is WriteState.UNISSUED and not engine.calls
    handle = writes.submit(engine, "a", one, one, one, issue_by=float("inf"), first_s=1.0)
    assert settle(writes, handle) is WriteState.LANDED


def test_where_no_call_may_begin_no_thread_starts(writes: BlockingWrites, engine: BlockingEngine) -> None:
    gate = engine.gates["a"] = threading.Event()
    handle = submit(writes, engine, "a")
    until(lambda: engine.inside)
    assert writes.poll(handle) is WriteState.PENDING and own_threads() == 1
    gate.set()
    assert settle(writes, handle) is WriteState.LANDED


def test_threads_are_bounded_and_what_finds_none_in_time_is_never_issued(engine: BlockingEngine) -> None:
    clock = ManualClock()
    writes = BlockingWrites(10, 1000.0, lambda: None, clock)
    names = [f"stalled-{n}" for n in range(THREADS)]
    for name in names:
        engine.gates[name] = threading.Event()
    stalled = [submit(writes, engine, name) for name in names]

    def inside() -> int:
        clock.now += SLOW_S
        for handle in stalled:
            writes.poll(handle)
        return len(engine.inside)

    until(lambda: inside() == THREADS)
    other = submit(writes, engine, "other", issue_by=clock.now + 1.0)
    clock.now += 0.9
    assert writes.poll(other) is WriteState.PENDING and own_threads() == THREADS
    clock.now += 0.2
    assert writes.poll(other) is WriteState.UNISSUED
    for gate in engine.gates.values():
        gate.set()
    assert {settle(writes, handle) for handle in stalled} == {WriteState.LANDED}
    assert ("other", 1) not in engine.calls
    writes.close()


def test_a_write_that_is_out_fails_only_when_its_call_has_returned(engine: BlockingEngine) -> None:
    clock = ManualClock()
    writes = BlockingWrites(10, 5.0, lambda: None, clock)
    gate = engine.gates["a"] = threading.Event()
    out, behind = submit(writes, engine, "a"), submit(writes, engine, "a", issue_by=6.0)
    until(lambda: engine.inside)
    clock.now = 6.0
    assert writes.poll(behind) is WriteState.UNISSUED
    assert writes.poll(out) is WriteState.PENDING, "its bytes are on the wire"
    gate.set()
    assert settle(writes, out) is WriteState.FAILED
    assert len(engine.calls) == 1
    writes.close()


def test_the_time_of_a_write_runs_from_when_it_is_issued(engine: BlockingEngine) -> None:
    clock = ManualClock()
    writes = BlockingWrites(10, 5.0, lambda: None, clock)
    gate = engine.gates["a"] = threading.Event()
    first, second = submit(writes, engine, "a"), submit(writes, engine, "a")
    until(lambda: engine.inside)
    later = engine.gates["a"] = threading.Event()
    clock.now = 4.0
    gate.set()
    assert settle(writes, first) is WriteState.LANDED
    until(lambda: len(engine.calls) == 2)
    clock.now = 8.0  # longer after the submission than the timeout
    assert writes.poll(second) is WriteState.PENDING
    later.set()
    assert settle(writes, second) is WriteState.LANDED
    writes.close()


def test_what_waits_behind_a_slow_call_that_failed_is_never_issued(
    writes: BlockingWrites, engine: BlockingEngine
) -> None:
    gate = engine.gates["a"] = threading.Event()
    engine.bad.add("a")
    handles = [submit(writes, engine, "a") for _ in range(3)]
    until(lambda: engine.inside)
    threading.Timer(SLOW_S * 2, gate.set).start()
    states = [settle(writes, handle) for handle in handles]
    assert states == [WriteState.FAILED, WriteState.UNISSUED, WriteState.UNISSUED]
    assert len(engine.calls) == 1
    engine.bad.clear()
    assert settle(writes, submit(writes, engine, "a")) is WriteState.LANDED


def test_a_process_that_was_stopped_issues_nothing_late_when_it_wakes(engine: BlockingEngine) -> None:
    """No poll happened meanwhile: the thread that takes a write must check the clock itself."""
    clock = ManualClock()
    writes = BlockingWrites(10, 5.0, lambda: None, clock)
    gate = engine.gates["a"] = threading.Event()
    out, behind = submit(writes, engine, "a"), submit(writes, engine, "a", issue_by=10.0)
    until(lambda: engine.inside)
    clock.now = 100.0
    gate.set()
    until(lambda: not engine.inside)
    until(lambda: not writes.alive(behind))
    assert writes.poll(behind) is WriteState.UNISSUED
    assert settle(writes, out) in (WriteState.LANDED, WriteState.FAILED)
    assert len(engine.calls) == 1
    writes.close()


class OpeningEngine:
    """Engine that opens a peer's segment inside the first write, like Mooncake: connects and reads without a limit."""

    closed = False

    def write(self, address: str, *_: object) -> bool:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            return bool(sock.recv(1))


def test_first_contact_is_hung_up_on_in_the_thread_that_makes_it(writes: BlockingWrites) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        numbers, begun = np.arange(1, dtype=np.int64), time.monotonic()
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        handle = writes.submit(OpeningEngine(), where, numbers, numbers, numbers, issue_by=float("inf"), first_s=1.0)
        assert writes.in_first_contact(), "another first contact would wait for this one"
        assert settle(writes, handle) is WriteState.FAILED
        assert time.monotonic() - begun >= 1.0 and not writes.in_first_contact()


def test_close_waits_for_calls_and_ends_the_threads(writes: BlockingWrites, engine: BlockingEngine) -> None:
    gate = engine.gates["a"] = threading.Event()
    handle, waits = submit(writes, engine, "a", 25), submit(writes, engine, "a")
    until(lambda: engine.inside)
    threading.Timer(0.5, gate.set).start()
    writes.close()
    assert not engine.inside and len(engine.calls) == 1
    assert (writes.poll(handle), writes.poll(waits)) == (WriteState.FAILED, WriteState.UNISSUED)
    assert not own_threads()


def test_a_device_that_takes_no_thread_starts_no_crowd_and_what_waits_was_never_issued(engine: BlockingEngine) -> None:
    asked: list[int] = []

    def attach() -> None:
        asked.append(1)
        raise RuntimeError("the device is gone")

    writes = BlockingWrites(10, 5.0, attach, time.monotonic)
    handles = [submit(writes, engine, f"peer-{n}") for n in range(20)]
    assert {settle(writes, handle) for handle in handles} == {WriteState.UNISSUED}
    assert settle(writes, submit(writes, engine, "later")) is WriteState.UNISSUED
    assert len(asked) <= 20 and not engine.calls
    writes.close()


def test_a_device_that_takes_some_threads_works_with_those(engine: BlockingEngine) -> None:
    slots = threading.Semaphore(1)

    def attach() -> None:
        if not slots.acquire(blocking=False):
            raise RuntimeError("no more contexts")

    writes = BlockingWrites(10, 5.0, attach, time.monotonic)
    assert settle(writes, submit(writes, engine, "first")) is WriteState.LANDED
    handles = [submit(writes, engine, f"peer-{n}") for n in range(20)]
    assert {settle(writes, handle) for handle in handles} == {WriteState.LANDED}
    writes.close()
