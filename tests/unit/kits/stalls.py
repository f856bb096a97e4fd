# SPDX-License-Identifier: Apache-2.0
"""Time in which this machine did not run a thread that was due, for tests that measure how long something waits."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TICK_S = 0.002


@dataclass(frozen=True)
class Delay:
    """The slowest of several measured things, without stalls and with them, and the places where the test was then."""

    what: str
    seconds: float
    with_stalls: float
    places: Counter[str]

    def __str__(self) -> str:
        seen = "".join(f"\n{count:6} x {where}" for where, count in self.places.most_common(5))
        return (
            f"slowest {self.what}: {self.seconds * 1e3:.0f} ms, {self.with_stalls * 1e3:.0f} ms with stalls; at{seen}"
        )


class Stalls:
    """Time for which a thread that was due did not run: the machine was busy elsewhere, or another thread kept the
    interpreter. A wait of the code under test is no stall: this thread runs meanwhile.

    Stalls are summed, as many short ones delay as much as a long one.
    """

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []  # ends and lengths of stalls
        self._seen: deque[tuple[float, str]] = deque(maxlen=20_000)  # where the creator's thread was
        self._creator = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def slowest(self, what: str, intervals: Iterable[tuple[float, float]]) -> Delay:
        """Return the longest of the intervals, without the stalls in each."""
        time.sleep(2 * TICK_S)  # a stall is noted when it is over
        late, seen = list(self._late), list(self._seen)

        def seconds(begin: float, end: float) -> float:
            return end - begin - sum(max(0.0, min(end, at) - max(begin, at - length)) for at, length in late)

        begin, end = max(intervals, key=lambda interval: seconds(*interval))
        places = Counter(where for at, where in seen if begin <= at <= end)
        return Delay(what, seconds(begin, end), end - begin, places)

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(TICK_S):
            now = time.monotonic()
            if now - before > 2 * TICK_S:
                self._late.append((now, now - before - TICK_S))
            self._seen.append((now, self._place()))
            before = now  # whatever this thread does itself belongs to the next tick

    def _place(self) -> str:
        frame = sys._current_frames().get(self._creator)
        places: list[str] = []
        while frame is not None and len(places) < 6:
            places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            frame = frame.f_back
        return " < ".join(places)
