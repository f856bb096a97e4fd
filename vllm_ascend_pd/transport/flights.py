# SPDX-License-Identifier: Apache-2.0
"""Writes in flight through engines that are polled: one engine transfer per descriptor, few at a time per peer.

Measured over TCP (docs/decisions/mooncake-over-tcp.md): submitting costs 2 µs per descriptor and is as fast as a
batch call, and waiting costs less than half of the CPU, because a batch can only be waited for by a call that spins.
64 descriptors in the engine are as fast as 1,000, and those not in the engine can still be cancelled.

A write fails in two steps. First nothing more of it is issued. Then what was issued is waited for, because the engine
still sends it. FAILED is reported only after that, or after the engine was closed (`stuck`, `drop`). A write of which
nothing reached the engine is UNISSUED.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.engine import LANDED, PENDING, OpenEngine
from vllm_ascend_pd.transport.peer_probes import watched
from vllm_ascend_pd.transport.spans import Ints

WINDOW = 128  # descriptors in the engine per peer
LINGER_S = 2.0  # a killed peer's transfers end within 1 s of trying to reconnect; a stopped peer's do not
LOOK_AGAIN_S = 0.1


@dataclass(slots=True, eq=False)
class _Flight:
    """One submission: the descriptors not issued yet, and the engine's ids of those that are."""

    engine: OpenEngine
    address: str
    waiting: deque[tuple[int, int, int]]
    deadline: float
    issued: deque[int] = field(default_factory=deque)
    begun: bool = False  # some of it was given to the engine, even if refused
    failed_at: float | None = None
    looked_at: float = 0.0

    @property
    def peer(self) -> tuple[OpenEngine, str]:
        return self.engine, self.address


class Flights:
    """Writes in flight. Only the writer thread calls this. Nothing here waits, except for first contact with a peer."""

    def __init__(self, cap: int, timeout_s: float, clock: Callable[[], float]) -> None:
        self._window, self._timeout_s, self._clock = min(cap, WINDOW), timeout_s, clock
        self._handles = itertools.count(1)
        self._flights: dict[int, _Flight] = {}
        self._queues: dict[tuple[OpenEngine, str], deque[_Flight]] = {}  # not wholly issued, oldest first
        self._in_engine: Counter[tuple[OpenEngine, str]] = Counter()

    def submit(
        self, engine: OpenEngine, address: str, src: Ints, dst: Ints, size: Ints, *, first_s: float | None = None
    ) -> int:
        """Start a write. `first_s`: if it may be first contact, it is cut off after so many seconds."""
        handle = next(self._handles)
        descriptors = deque(zip(src.tolist(), dst.tolist(), size.tolist(), strict=True))
        flight = _Flight(engine, address, descriptors, self._clock() + self._timeout_s)
        self._flights[handle] = flight
        self._queues.setdefault(flight.peer, deque()).append(flight)
        with watched(address, first_s) as allowed:
            if not allowed:
                self._fail(flight, self._clock())
            self._issue(flight.peer)
        return handle

    def alive(self, handle: int) -> bool:
        return self._flights[handle].failed_at is None

    def poll(self, handle: int) -> WriteState:
        flight = self._flights[handle]
        now = self._clock()
        if flight.failed_at is None:
            self._advance(flight, now)
        elif now - flight.looked_at >= LOOK_AGAIN_S:
            self._sift(flight, now)
        if flight.issued or flight.waiting:
            if flight.failed_at is None and now >= flight.deadline:
                self._fail(flight, now)
            return WriteState.PENDING
        del self._flights[handle]
        if flight.failed_at is None:
            return WriteState.LANDED
        return WriteState.FAILED if flight.begun else WriteState.UNISSUED

    def stuck(self) -> set[OpenEngine]:
        """Return the engines that keep transfers of failed writes. Only closing such an engine ends these."""
        latest = self._clock() - LINGER_S
        return {f.engine for f in self._flights.values() if f.failed_at is not None and f.failed_at < latest}

    def busy(self, engine: OpenEngine) -> bool:
        """Return whether the engine has a write in flight that has not failed."""
        return any(f.engine is engine and f.failed_at is None for f in self._flights.values())

    def drop(self, engine: OpenEngine) -> None:
        """Fail the writes of an engine that is about to be closed, and forget its ids."""
        for flight in self._flights.values():
            if flight.engine is engine:
                self._fail(flight, self._clock())
                flight.issued.clear()
        for peer in [peer for peer in self._in_engine if peer[0] is engine]:
            del self._in_engine[peer]

    def _advance(self, flight: _Flight, now: float) -> None:
        """Note the descriptors that have ended, in order, and fill the window again."""
        while flight.issued:
            state = flight.engine.check(flight.issued[0])
            if state == PENDING:
                break
            if state != LANDED:
                self._fail(flight, now)
            if state == -2:
                return
            flight.issued.popleft()
            self._in_engine[flight.peer] -= 1
            if flight.failed_at is not None:
                return
        self._issue(flight.peer)

    def _sift(self, flight: _Flight, now: float) -> None:
        """Check all descriptors that a failed write still has in the engine."""
        flight.looked_at = now
        left = deque(t for t in flight.issued if flight.engine.check(t) in (PENDING, -2))
        self._in_engine[flight.peer] -= len(flight.issued) - len(left)
        flight.issued = left

    def _issue(self, peer: tuple[OpenEngine, str]) -> None:
        """Give descriptors to the engine, oldest flight first, up to the window of this peer."""
        queue = self._queues.get(peer, deque())
        while queue:
            flight = queue[0]
            while flight.waiting and self._in_engine[peer] < self._window:
                flight.begun = True
                transfer = flight.engine.submit(flight.address, *flight.waiting[0])
                if transfer is None:
                    self._fail(flight, self._clock())
                    break
                flight.waiting.popleft()
                flight.issued.append(transfer)
                self._in_engine[peer] += 1
            if flight.waiting:
                return
            if queue and queue[0] is flight:
                queue.popleft()
        self._queues.pop(peer, None)

    def _fail(self, flight: _Flight, now: float) -> None:
        """Fail a write: nothing more of it is issued."""
        if flight.failed_at is None:
            flight.failed_at = now
        queue = self._queues.get(flight.peer)
        if flight.waiting and queue is not None:
            queue.remove(flight)
            if not queue:
                del self._queues[flight.peer]
        flight.waiting.clear()
