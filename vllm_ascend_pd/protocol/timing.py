# SPDX-License-Identifier: Apache-2.0
"""Formulas of the timers, a clock that only counts while this process runs, and an agenda of what is due.

Each engine's clock drifts from true time by up to DRIFT, so two clocks drift apart by up to twice that. A timer that
has to end after the other engine's is longer by this much; one that has to end before it is shorter.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeAlias, TypeVar

DRIFT = 0.001
OBSERVED_GAP_S = 1.0  # of a longer gap between two looks at the clock only this much is counted
WAKE_S = 0.8  # therefore the longest time between looks while something waits for the running clock
MAX_QUIET_S = 120.0  # D refuses a P whose writes may land later than this

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


def authority_until(sent: float, lease_s: float) -> float:
    """P: return until when a READY permits writes; `sent` is when the BEGIN or RENEW that it answers was sent."""
    return sent + lease_s * (1 - 2 * DRIFT)


def lapse_s(lease_s: float, margin_s: float) -> float:
    """D: return how long after a READY a silent writer counts as lost."""
    return (lease_s + margin_s) * (1 + 2 * DRIFT)


def landed_s(lease_s: float, quiet_s: float, margin_s: float) -> float:
    """D: return H, how long after a READY all writes under it have landed, if the writer followed the rules."""
    return (lease_s + quiet_s + margin_s) * (1 + 2 * DRIFT)


def settled_s(quiet_s: float) -> float:
    """Return how long after a failed write, or after the end of its process, nothing of it can land any more."""
    return quiet_s * (1 + 2 * DRIFT)


def earliest(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two times that may be unset."""
    return other if one is None else one if other is None else min(one, other)


class RunningClock:
    """Time during which this process was seen to run.

    A process that was stopped must not conclude from the clock alone that others are quiet: what they sent may
    still wait in its buffers, and what it sent itself may leave only when it goes on.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.stopped = 0.0  # the part of `seconds` that was counted for stops
        self._last: float | None = None

    def observe(self, now: float) -> bool:
        """Look at the clock. Return True if it shows that the process was stopped since the last look."""
        if self._last is None:
            self._last = now
        gap = now - self._last
        if gap <= 0.0:
            return False
        self._last = now
        if gap <= OBSERVED_GAP_S:
            self.seconds += gap
            return False
        self.seconds += OBSERVED_GAP_S
        self.stopped += OBSERVED_GAP_S
        return True

    def wake(self, due: float) -> float:
        """Return when to look next, if something is due when `seconds` reaches `due`."""
        return (self._last or 0.0) + min(max(due - self.seconds, 0.0), WAKE_S)


class Repetition:
    """Times at which an unanswered message is repeated: doubling, bounded.

    Without the chance of `shared/backoff.py`: two ends are no fleet that could return in step, and a run follows from
    its times alone.
    """

    __slots__ = ("_first", "_gap", "_max", "at")

    def __init__(self, now: float, first_s: float, max_s: float) -> None:
        self._first = self._gap = first_s
        self._max = max_s
        self.at = now
        self.sent(now)

    def sent(self, now: float) -> None:
        """Record that the message is sent now, for the first time or again."""
        self.at = now + self._gap
        self._gap = min(self._gap * 2, self._max)

    def rest(self, until: float) -> None:
        """Record that the message was answered; the next is sent at `until`."""
        self._gap = self._first
        self.at = until


class Agenda(Generic[K]):
    """One wake-up time per key; setting it again moves it."""

    def __init__(self) -> None:
        self._entries: dict[K, tuple[float, int]] = {}  # time and serial; the serial identifies the entry in the heap
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, key: K, at: float | None) -> None:
        if at is None:
            self._entries.pop(key, None)
            return
        before = self._entries.get(key)
        if before is None or before[0] != at:
            self._serial += 1
            self._entries[key] = (at, self._serial)
            heapq.heappush(self._heap, (at, self._serial, key))
            if len(self._heap) > 64 and len(self._heap) > 4 * len(self._entries):
                self._heap = [(at, serial, key) for key, (at, serial) in self._entries.items()]
                heapq.heapify(self._heap)

    def due(self, now: float) -> list[K]:
        """Remove and return the keys whose time has come, earliest first."""
        due_keys = []
        while (at := self.next()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._entries[key]
            due_keys.append(key)
        return due_keys

    def next(self) -> float | None:
        heap, entries = self._heap, self._entries
        while heap:
            at, serial, key = heap[0]
            entry = entries.get(key)
            if entry is not None and entry[1] == serial:
                return at
            heapq.heappop(heap)  # moved or removed meanwhile
        return None


Due: TypeAlias = tuple[K, float | None, float | None]  # a key, its time on the wall clock, and on the running clock


class Agendas(Generic[R, K]):
    """Times of the next look at the keys of each record: on the wall clock, and on the running clock.

    `times` yields them of a record that was touched. They are read more often than they change: only then are they
    brought up to date.
    """

    def __init__(self, clock: RunningClock, times: Callable[[R], Iterable[Due[K]]]) -> None:
        self._clock, self._times = clock, times
        self._wall, self._running = Agenda[K](), Agenda[K]()
        self._touched: dict[int, R] = {}  # by identity

    def touch(self, record: R) -> None:
        """Note that a record's times may have changed."""
        self._touched[id(record)] = record

    def wall_due(self, now: float) -> list[K]:
        self._update()
        return self._wall.due(now)

    def running_due(self) -> list[K]:
        self._update()
        return self._running.due(self._clock.seconds)

    def next(self) -> tuple[float | None, float | None]:
        """Return when to look next, by the wall clock, for either."""
        self._update()
        running = self._running.next()
        return self._wall.next(), None if running is None else self._clock.wake(running)

    def _update(self) -> None:
        if self._touched:  # usually empty
            touched, self._touched = self._touched, {}
            for record in touched.values():
                for key, wall, running in self._times(record):
                    self._wall.set(key, wall)
                    self._running.set(key, running)
