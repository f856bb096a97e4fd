# SPDX-License-Identifier: Apache-2.0
"""A clock for tests of delays: the same work, done again and again by a thread that nothing is wrong with.

A machine that is busy or stands still slows both. So how long something took is counted in pieces of that work, and
compared with how many were done in the whole time of a fault: no test of delays asserts seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

LOOK_S = 0.005


@dataclass(slots=True)
class Delay:
    """One thing that was measured."""

    begun: float
    seconds: float = 0.0
    pieces: int = 0  # of the work beside it, begun and ended meanwhile


@dataclass
class Delays:
    """Things of one kind that were measured, at least one."""

    beside: Beside
    what: str
    all: list[Delay] = field(default_factory=list)

    @contextmanager
    def one(self) -> Iterator[Delay]:
        delay, before = Delay(time.monotonic()), self.beside.pieces
        yield delay
        delay.seconds = time.monotonic() - delay.begun
        delay.pieces = self.beside.pieces - before
        self.all.append(delay)

    def share(self, pieces: float, seconds: float) -> float:
        """Return which part of a span the slowest took. The span is given by both clocks, of which the smaller part
        counts: a machine that stands still lengthens seconds, and work beside a test that waits goes faster."""
        return max(min(delay.pieces / pieces, delay.seconds / seconds) for delay in self.all)

    @property
    def slowest(self) -> Delay:
        return max(self.all, key=lambda delay: delay.pieces)

    def __str__(self) -> str:
        worst = self.slowest
        looks = self.beside.seen.copy()  # at once: the watching thread goes on
        stacks = Counter(at for when, at in looks if 0 <= when - worst.begun <= worst.seconds)
        seen = "".join(f"\n{count:6} x {where}" for where, count in stacks.most_common(3))
        took = f"{worst.seconds * 1e3:.0f} ms and {worst.pieces} pieces of {self.beside.pieces}"
        return f"slowest of {len(self.all)} {self.what}: {took}; at{seen}"


class Beside:
    """Do `work` until the end. A context manager, which fails if the work failed."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self._stopped = work, threading.Event()
        self.pieces = 0
        self.seen: deque[tuple[float, str]] = deque(maxlen=20_000)  # where the creator's thread was
        self._creator = threading.get_ident()
        self._failed: BaseException | None = None
        self._threads = [
            threading.Thread(target=run, name=f"beside-{run.__name__}", daemon=True) for run in (self._do, self._watch)
        ]

    def __enter__(self) -> Beside:
        self._work()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if self._failed is not None:
            raise self._failed

    def _do(self) -> None:
        try:
            while not self._stopped.is_set():
                self._work()
                self.pieces += 1
        except BaseException as problem:  # noqa: BLE001 - raised at the end, on the test's thread
            self._failed = problem

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_S):
            frame, stack = sys._current_frames().get(self._creator), list[str]()
            while frame is not None and len(stack) < 6:
                stack.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                frame = frame.f_back
            self.seen.append((time.monotonic(), " < ".join(stack)))
