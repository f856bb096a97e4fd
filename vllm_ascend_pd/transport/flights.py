# SPDX-License-Identifier: Apache-2.0
"""Writes in flight through engines that are polled: one engine transfer per descriptor, a cap per peer.

Measured over TCP (docs/decisions.md): submitting costs 2 µs per descriptor, as fast as a batch call, and waiting costs
less than half of its CPU, because a batch can only be waited for by a call that spins.

The engine's own ids are pointers: each is asked about until it has ended, once, and never again after that. A failed
flight's remaining ids are kept in `_lingering` for that purpose.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.engine import NO_TRANSFER, Engine
from vllm_ascend_pd.transport.spans import Bytes

LANDED, PENDING = 1, 0  # of transfer_check_status; -1: failed and freed, -2: timed out and not freed
REAP_EVERY_S = 0.1


@dataclass(slots=True, eq=False)
class Flight:
    """One submission: what is not issued yet, and the engine ids of what is."""

    engine: Engine
    target: str
    waiting: deque[tuple[int, int, int]]
    deadline: float
    issued: deque[int] = field(default_factory=deque)
    failed: bool = False


class Flights:
    """Only the writer thread calls this. `submit` blocks only while the engine makes first contact with a peer."""

    def __init__(self, cap: int, timeout_s: float, clock: Callable[[], float]) -> None:
        self._cap, self._timeout_s, self._clock = cap, timeout_s, clock
        self._handles = itertools.count(1)
        self._flights: dict[int, Flight] = {}
        self._refused: set[int] = set()
        self._queues: dict[tuple[int, str], deque[Flight]] = {}  # by engine and target: what still has to be issued
        self._in_engine: Counter[tuple[int, str]] = Counter()
        self._lingering: list[tuple[Engine, tuple[int, str], int]] = []
        self._reaped = 0.0

    def submit(self, engine: Engine, target: str, src: Bytes, dst: Bytes, size: Bytes) -> int:
        handle = next(self._handles)
        descriptors = deque(zip(src.tolist(), dst.tolist(), size.tolist(), strict=True))
        flight = Flight(engine, target, descriptors, self._clock() + self._timeout_s)
        self._flights[handle] = flight
        self._queues.setdefault(_key(flight), deque()).append(flight)
        self._issue(_key(flight))
        return handle

    def refused(self) -> int:
        """A handle that polls FAILED."""
        handle = next(self._handles)
        self._refused.add(handle)
        return handle

    def poll(self, handle: int) -> WriteState:
        if handle in self._refused:
            self._refused.discard(handle)
            return WriteState.FAILED
        flight = self._flights[handle]
        if not flight.failed:
            self._advance(flight)
        if not flight.failed and not flight.issued and not flight.waiting:
            del self._flights[handle]
            return WriteState.LANDED
        if not flight.failed and self._clock() < flight.deadline:
            return WriteState.PENDING
        flight.failed = True
        del self._flights[handle]
        self._abandon(flight)
        return WriteState.FAILED

    def lingering(self) -> int:
        """Descriptors of failed flights that the engine has not finished: they may land."""
        self._reap()
        return len(self._lingering)

    def fail_all(self) -> None:
        """Their engine is about to be closed, and with it every id."""
        for flight in self._flights.values():
            flight.failed = True
            flight.waiting.clear()
            flight.issued.clear()
        self._queues.clear()
        self._in_engine.clear()
        self._lingering.clear()

    def close(self) -> None:
        """Nothing of ours to end: see `fail_all`."""

    def _advance(self, flight: Flight) -> None:
        """Take note of what has ended, in order; make room for what waits."""
        key = _key(flight)
        while flight.issued:
            state = flight.engine.transfer_check_status(flight.issued[0])
            if state == PENDING:
                break
            flight.failed = flight.failed or state != LANDED
            if state == -2:
                break  # not freed by the engine: it goes to the lingering ones
            flight.issued.popleft()
            self._in_engine[key] -= 1
        if not flight.failed:
            self._issue(key)

    def _issue(self, key: tuple[int, str]) -> None:
        """Hand descriptors to the engine, oldest flight first, up to the cap of this peer."""
        queue = self._queues.get(key)
        while queue:
            flight = queue[0]
            while flight.waiting and self._in_engine[key] < self._cap and not flight.failed:
                transfer = flight.engine.transfer_submit_write(flight.target, *flight.waiting[0])
                if transfer in NO_TRANSFER:
                    flight.failed = True
                    break
                flight.waiting.popleft()
                flight.issued.append(transfer)
                self._in_engine[key] += 1
            if flight.waiting and not flight.failed:
                return
            queue.popleft()
        self._queues.pop(key, None)
        self._reap()

    def _abandon(self, flight: Flight) -> None:
        """Nothing more of it is issued; what is out is watched until it has ended."""
        key = _key(flight)
        flight.waiting.clear()
        self._lingering += [(flight.engine, key, transfer) for transfer in flight.issued]
        flight.issued.clear()
        queue = self._queues.get(key)
        if queue is not None and flight in queue:
            queue.remove(flight)
            self._issue(key)

    def _reap(self) -> None:
        now = self._clock()
        if not self._lingering or now - self._reaped < REAP_EVERY_S:
            return
        self._reaped = now
        still = []
        for engine, key, transfer in self._lingering:
            if engine.transfer_check_status(transfer) in (PENDING, -2):
                still.append((engine, key, transfer))
            else:
                self._in_engine[key] -= 1
        self._lingering = still


def _key(flight: Flight) -> tuple[int, str]:
    return id(flight.engine), flight.target
