# SPDX-License-Identifier: Apache-2.0
"""Simulated clock and events, randomness by seed, and processes that can be stopped and killed, with their timers."""

from __future__ import annotations

import heapq
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

# What varies in a reason: numbers (except those of codes), names, and details in brackets.
_VARIABLE = re.compile(r"(?<![-\w])[0-9.]+( s)?|\b[PD][0-9]+[.:/@]\S*|\bpush[0-9]+|\[.*")
MAX_DRIFT = 0.001


class Violation(Exception):
    """A promise of the protocol was broken."""


class World:
    """Events in the order of their time. All randomness follows from the seed, so a run can be repeated exactly."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.now = 0.0
        self._seed = seed
        self.rng = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.stats: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()  # reasons for pushes given up and transfers fenced
        self.tracing = tracing
        self.trace: list[str] = []
        self._heap: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._names = 0

    def dice(self, name: str) -> random.Random:
        """Return a separate random stream: its use leaves the rest of the world unchanged."""
        return random.Random(f"{name}/{self._seed}")

    def at(self, when: float, fn: Callable[..., None], *args: Any) -> None:
        self.push(when, None, fn, args)

    def after(self, delay: float, fn: Callable[..., None], *args: Any) -> None:
        self.push(self.now + delay, None, fn, args)

    def push(self, when: float, process: Process | None, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Schedule an event. `process` is where it happens, None for the world itself."""
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, process, fn, args))

    def run(self, until: float) -> None:
        """Handle events up to `until`, or until none is left."""
        heap, pop, handled = self._heap, heapq.heappop, 0
        try:
            while heap and heap[0][0] <= until:
                self.now, _, process, fn, args = pop(heap)
                handled += 1
                if process is None or (process.alive and not process.paused):
                    fn(*args)
                else:
                    process.run(fn, *args)
        finally:
            self.stats["events"] += handled

    @property
    def idle(self) -> bool:
        return not self._heap

    def name(self, prefix: str) -> str:
        """Return a fresh name. Like a uuid, but readable in a trace."""
        self._names += 1
        return f"{prefix}{self._names}"

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1

    def gave_up(self, side: str, why: str) -> None:
        """Count a reason in the protocol's words, without its numbers and names."""
        self.reasons[f"{side}: {_VARIABLE.sub('', why)[:60].strip(' :')}"] += 1

    def chance(self, p: float) -> bool:
        return p > 0 and self.rng.random() < p

    def log(self, name: str, event: str, *facts: object) -> None:
        if self.tracing:
            self.trace.append(f"{self.now:12.6f}  {name:<10} {event} {' '.join(map(str, facts))}".rstrip())


class Process:
    """One incarnation of a process, with its own clock. Its events wait while it is stopped."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.incarnation = world.name(f"{name}#")
        self.alive = True
        self.paused = False
        self.partitioned_until = -1.0  # until then its side channel is cut off
        self.disturbed = -1e9  # time of its last stop, kill or cut: the checks excuse silence around it
        self.stopped_s = 0.0  # total time for which it was stopped
        self._paused_at = 0.0
        drift = world.rng.choice((-MAX_DRIFT, MAX_DRIFT, world.rng.uniform(-MAX_DRIFT, MAX_DRIFT)))
        world.faults["clock drifts"] += 1
        self._rate = 1.0 + drift
        self._offset = world.rng.uniform(0, 1e6)
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def clock(self) -> float:
        """Return this process's monotonic clock."""
        return self._offset + self.world.now * self._rate

    def ran_s(self) -> float:
        """Return the time for which it has run, without stops."""
        return (self._paused_at if self.paused else self.world.now) - self.stopped_s

    def when(self, local: float) -> float:
        """Return the true time at which its clock shows `local`."""
        return (local - self._offset) / self._rate

    def post(self, delay: float, fn: Callable[..., None], *args: Any) -> None:
        """Run `fn` in this process after `delay`, or when it continues; never if it is dead by then."""
        self.world.push(self.world.now + delay, self, fn, args)

    def run(self, fn: Callable[..., None], *args: Any) -> None:
        if not self.alive:
            return
        if self.paused:
            self._backlog.append((fn, args))
        else:
            fn(*args)

    def pause(self, duration: float) -> None:
        if self.alive and not self.paused:
            self.paused = True
            self.disturbed = self._paused_at = self.world.now
            self.world.log(self.name, "STOPPED", f"for {duration:.3f} s")
            self.world.after(duration, self.resume)

    def resume(self) -> None:
        if not self.alive or not self.paused:
            return
        self.paused = False
        self.disturbed = self.world.now
        self.stopped_s += self.world.now - self._paused_at
        self.world.log(self.name, "CONTINUED")
        backlog, self._backlog = self._backlog, []
        for index, (fn, args) in enumerate(backlog):
            if self.paused or not self.alive:
                self._backlog = backlog[index:] + self._backlog
                return
            fn(*args)

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self.disturbed = self.world.now
            self.world.log(self.name, "KILLED")


class Alarm:
    """Timer that calls `ring` in a process when its machine needs a tick."""

    def __init__(self, process: Process, wake: Callable[[], float | None], ring: Callable[[], None]) -> None:
        self._process = process
        self._wake = wake
        self._ring = ring
        self._armed = float("inf")

    def set(self) -> None:
        wake = self._wake()
        if wake is None:
            return
        when = self._process.when(wake) + 1e-9
        if when < self._armed:
            world = self._process.world
            self._armed = when = max(when, world.now)
            world.push(when, self._process, self._rang, (when,))

    def _rang(self, when: float) -> None:
        """Handle the timer, whose time may have been changed or cancelled since."""
        if when != self._armed:
            return
        self._armed = float("inf")
        wake = self._wake()
        if wake is not None and self._process.when(wake) <= self._process.world.now:
            self._ring()
        else:
            self.set()
