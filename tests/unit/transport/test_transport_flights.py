# SPDX-License-Identifier: Apache-2.0
"""Flights against an engine with given answers that checks its use: an id is polled only while it is alive, as
Mooncake's ids are pointers."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from unit.kits.refusing import no_more_threads
from unit.transport.clock import ManualClock
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.flights import LINGER_S, Flights

TIMEOUT_S = 5.0


class FakeTransferEngine:
    """Engine with given answers (`ends`); polling an id that has ended or was never given is a crash, as in
    Mooncake."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.ended: dict[int, int] = {}
        self.order: list[int] = []
        self.refuse_from: int | None = None

    def submit(self, address: str, src: int, dst: int, size: int) -> int | None:
        if self.refuse_from is not None and len(self.order) >= self.refuse_from:
            return None
        self.order.append(src)
        self.live.add(src)
        return src

    def check(self, transfer: int) -> int:
        assert transfer in self.live, "segmentation fault"
        state = self.ended.get(transfer, 0)
        if state in (1, -1):
            self.live.discard(transfer)
        return state


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def engine() -> FakeTransferEngine:
    return FakeTransferEngine()


def submit(flights: Flights, engine: FakeTransferEngine, ids: range, address: str = "peer") -> int:
    numbers = np.array(ids, dtype=np.int64)
    return flights.submit(engine, address, numbers, numbers, np.ones(len(numbers), dtype=np.int64))


def test_a_first_contact_that_no_thread_can_end_is_never_issued(clock: ManualClock, engine: FakeTransferEngine) -> None:
    flights, numbers = Flights(4, TIMEOUT_S, clock), np.arange(1, 4)
    with no_more_threads("pd-watch"):
        handle = flights.submit(engine, "peer", numbers, numbers, numbers, first_s=1.0)
    assert not flights.alive(handle) and flights.poll(handle) is WriteState.UNISSUED
    assert not engine.order
    submit(flights, engine, range(7, 9))
    assert engine.order == [7, 8]


def test_at_most_a_window_is_in_the_engine_and_it_is_kept_full(clock: ManualClock, engine: FakeTransferEngine) -> None:
    flights = Flights(4, TIMEOUT_S, clock)
    handle = submit(flights, engine, range(1, 11))
    assert engine.order == [1, 2, 3, 4]
    engine.ended |= {1: 1, 2: 1}
    assert flights.poll(handle) is WriteState.PENDING
    assert engine.order == [1, 2, 3, 4, 5, 6]
    engine.ended |= dict.fromkeys(range(3, 11), 1)
    assert [flights.poll(handle), flights.poll(handle)].count(WriteState.LANDED) == 1
    assert not engine.live


def test_the_window_is_per_peer_and_older_submissions_go_first(clock: ManualClock, engine: FakeTransferEngine) -> None:
    flights = Flights(2, TIMEOUT_S, clock)
    first, second = submit(flights, engine, range(1, 4)), submit(flights, engine, range(11, 13))
    submit(flights, engine, range(21, 23), "other")
    assert engine.order == [1, 2, 21, 22]
    engine.ended |= {1: 1, 2: 1}
    assert flights.poll(second) is WriteState.PENDING
    assert flights.poll(first) is WriteState.PENDING
    assert engine.order == [1, 2, 21, 22, 3, 11]


def test_failed_is_said_when_the_engine_has_let_go_of_everything(
    clock: ManualClock, engine: FakeTransferEngine
) -> None:
    flights = Flights(3, TIMEOUT_S, clock)
    handle = submit(flights, engine, range(1, 9))
    engine.ended[1] = -1
    assert flights.poll(handle) is WriteState.PENDING
    assert not flights.alive(handle)
    clock.now += 0.2
    assert flights.poll(handle) is WriteState.PENDING
    engine.ended |= {3: 1, 2: -1}
    assert flights.poll(handle) is WriteState.PENDING, "not looked at every time"
    clock.now += 0.2
    assert flights.poll(handle) is WriteState.FAILED
    assert engine.order == [1, 2, 3], "nothing more is issued after a failure"


def test_a_write_that_does_not_return_fails_at_its_deadline_and_its_engine_counts_as_stuck(
    clock: ManualClock, engine: FakeTransferEngine
) -> None:
    flights = Flights(3, TIMEOUT_S, clock)
    handle, healthy = submit(flights, engine, range(1, 9)), submit(flights, engine, range(20, 22), "other")
    clock.now += TIMEOUT_S - 0.1
    assert flights.poll(handle) is WriteState.PENDING and flights.alive(handle)
    clock.now += 0.2
    flights.poll(handle)
    assert not flights.alive(handle) and flights.stuck() == set()
    clock.now += LINGER_S + 0.1
    assert flights.stuck() == {engine}
    assert flights.busy(engine), "another peer's write is still under way"
    engine.ended |= {20: 1, 21: 1}
    assert flights.poll(healthy) is WriteState.LANDED
    assert not flights.busy(engine)
    flights.drop(engine)
    engine.live.clear()
    assert flights.poll(handle) is WriteState.FAILED


def test_a_refused_descriptor_fails_the_write_after_what_was_issued(
    clock: ManualClock, engine: FakeTransferEngine
) -> None:
    flights = Flights(10, TIMEOUT_S, clock)
    engine.refuse_from = 2
    handle, behind = submit(flights, engine, range(1, 6)), submit(flights, engine, range(11, 13))
    assert not flights.alive(handle) and not flights.alive(behind)
    assert flights.poll(behind) is WriteState.FAILED
    engine.ended |= {1: 1, 2: 1}
    assert flights.poll(handle) is WriteState.FAILED


def test_an_id_that_timed_out_is_not_freed_and_is_asked_about_again(
    clock: ManualClock, engine: FakeTransferEngine
) -> None:
    flights = Flights(10, TIMEOUT_S, clock)
    handle = submit(flights, engine, range(1, 3))
    engine.ended[1] = -2
    assert flights.poll(handle) is WriteState.PENDING
    clock.now += 0.2
    assert flights.poll(handle) is WriteState.PENDING
    engine.ended |= {1: -1, 2: 1}
    clock.now += 0.2
    assert flights.poll(handle) is WriteState.FAILED
    assert not engine.live


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_ends_leaves_nothing_behind(seed: int, clock: ManualClock, engine: FakeTransferEngine) -> None:
    rng = random.Random(seed)
    flights = Flights(rng.randint(1, 6), 1000.0, clock)
    open_writes: dict[int, range] = {}
    failing: set[int] = set()
    ended: deque[tuple[range, WriteState]] = deque()
    for start in range(1, 400, 10):
        ids = range(start, start + rng.randint(0, 9))
        open_writes[submit(flights, engine, ids, rng.choice("ab"))] = ids
        for transfer in sorted(engine.live):
            if transfer not in engine.ended and rng.random() < 0.5:
                engine.ended[transfer] = -1 if rng.random() < 0.05 else 1
                if engine.ended[transfer] == -1:
                    failing.add(transfer // 10)
        for handle in list(open_writes):
            state = flights.poll(handle)
            if state is not WriteState.PENDING:
                ended.append((open_writes.pop(handle), state))
        clock.now += 0.05
    while open_writes:
        engine.ended |= {t: 1 for t in engine.live if t not in engine.ended}
        clock.now += 0.11
        for handle in list(open_writes):
            state = flights.poll(handle)
            if state is not WriteState.PENDING:
                ended.append((open_writes.pop(handle), state))
    assert not engine.live and not flights._flights and not flights._queues
    assert not any(flights._in_engine.values())
    for ids, state in ended:
        if ids:
            assert (ids[0] // 10 in failing) == (state is WriteState.FAILED)
