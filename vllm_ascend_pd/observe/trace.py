# SPDX-License-Identifier: Apache-2.0
"""Named stage events of a transfer, and their subscribers.

`emit` costs one attribute read without a subscriber. With `trace_dir` set, each process writes JSON lines into a
bounded ring of two files: when the newer one is full it takes the older one's place. A process goes on with the ring
of an ended one of its pid. Tests of real faults subscribe to stop a process at a stage. Times are of this process's
monotonic clock. `clock` lines have the wall clock beside it, so that the files of several processes can be merged
(clocks.py).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # of one process, both files together
OLDER = ".before"  # suffix of the file that is not written any more; it sorts before the other

Subscriber = Callable[[str, Mapping[str, Any]], None]

_subscribers: tuple[Subscriber, ...] = ()
_lock = threading.Lock()


def emit(stage: str, **facts: Any) -> None:
    """Notify the subscribers that `stage` was reached. Facts are plain values; `transfer` names the transfer.

    Tracing never disturbs a transfer: a subscriber that raises (its disk may be full) is dropped for good.
    """
    for subscriber in _subscribers:
        _tell(subscriber, stage, facts)


def _tell(subscriber: Subscriber, stage: str, facts: Mapping[str, Any]) -> None:
    try:
        subscriber(stage, facts)
    except Exception:  # whatever it is, the transfer goes on
        _drop(subscriber)
        log.exception(
            "the trace ends here: %s failed at stage %s; restart the process to trace again", subscriber, stage
        )


def _drop(subscriber: Subscriber) -> None:
    global _subscribers
    with _lock:
        _subscribers = tuple(s for s in _subscribers if s is not subscriber)


def enabled() -> bool:
    """Return whether building an event's facts is worth it."""
    return bool(_subscribers)


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Add a subscriber; the returned function removes it. Subscribers run on the emitting thread."""
    global _subscribers
    with _lock:
        _subscribers = (*_subscribers, subscriber)

    return lambda: _drop(subscriber)


class TraceFile:
    """Subscriber that appends events to `<dir>/<role>-<pid>.jsonl`, buffered, flushed every second and at exit.

    While a process of another container writes there, with the same pid, the file is `<role>-<pid>.2.jsonl`.
    """

    def __init__(self, directory: str, role: str, max_bytes: int = MAX_BYTES) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._role, self._half = role, max_bytes // 2
        self._path, self._file = _free_file(Path(directory), f"{role}-{os.getpid()}")
        self._written = _end_last_line(self._file)
        self._flushed = 0.0
        self._unsubscribe = subscribe(self)
        _tell(self, "clock", {"wall": time.time(), "role": role})
        atexit.register(self.close)

    def __call__(self, stage: str, facts: Mapping[str, Any]) -> None:
        now = time.monotonic()
        line = json.dumps({"t": round(now, 6), "stage": stage, **facts}, default=str)
        with self._lock, contextlib.suppress(ValueError):  # closed: the process is ending
            if self._written > self._half:
                self._turn(now)
            self._written += self._file.write(line + "\n")
            if now - self._flushed > 1.0:
                self._file.flush()
                self._flushed = now

    def _turn(self, now: float) -> None:
        """Let the full file take the older one's place, and open a new one."""
        self._file.close()
        self._path.replace(self._path.with_suffix(OLDER + ".jsonl"))
        self._file = _opened(self._path)
        _locked(self._file)
        clock = {"t": round(now, 6), "stage": "clock", "wall": time.time(), "role": self._role}
        self._written = self._file.write(json.dumps(clock) + "\n")

    def close(self) -> None:
        self._unsubscribe()
        with self._lock, contextlib.suppress(OSError):  # a full disk may not take what is left
            self._file.close()

    def __repr__(self) -> str:
        return f"TraceFile({str(self._path)!r})"


def _free_file(directory: Path, name: str) -> tuple[Path, TextIO]:
    """Open the first file of this name that no process writes."""
    for number in itertools.count(1):
        path = directory / (f"{name}.jsonl" if number == 1 else f"{name}.{number}.jsonl")
        file = _opened(path)
        if _locked(file):
            break
        file.close()
    return path, file


def _opened(path: Path) -> TextIO:
    return path.open("a+", buffering=1 << 16)


def _locked(file: TextIO) -> bool:
    """Lock the file until it is closed; False if another process has. Some file systems have no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _end_last_line(file: TextIO) -> int:
    """End a line that a killed process left torn; return the file's length."""
    size = os.fstat(file.fileno()).st_size
    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        size += file.write("\n")
    return size
