# SPDX-License-Identifier: Apache-2.0
"""Named stage events of a transfer, and their subscribers.

`emit` costs one attribute read without a subscriber. With `trace_dir` set, each process writes JSON lines into a
bounded ring of two files: when the newer one is full it takes the older one's place. A process goes on with the ring of
an ended one of its pid. A thread writes them, so that a disk that hangs stops neither pushes nor leases. Tests of real
faults subscribe to stop a process at a stage. Times are of this process's monotonic clock. `clock` lines have the wall
clock beside it, so that the files of several processes can be merged (clocks.py).
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
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from vllm_ascend_pd.shared.threads import started

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # of one process, both files together
MAX_WAITING = 1 << 16  # lines that the disk has not taken; further ones are dropped
WRITE_S = 0.25  # interval at which they are written
CLOSE_S = 5.0
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
    """Subscriber that appends events to `<dir>/<role>-<pid>.jsonl`, on a thread of its own.

    While a process of another container writes there, with the same pid, the file is `<role>-<pid>.2.jsonl`. How many
    events were dropped because the disk did not take them in time stands in the file, as stage `dropped`.
    """

    def __init__(self, directory: str, role: str, max_bytes: int = MAX_BYTES) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._role, self._half = role, max_bytes // 2
        self._path, self._file = _free_file(Path(directory), f"{role}-{os.getpid()}")
        self._written = _end_last_line(self._file)
        self._waiting: deque[str] = deque([_line("clock", {"wall": time.time(), "role": role})])
        self._lock = threading.Lock()
        self._dropped = self._said = 0
        self._closing = threading.Event()
        self._thread = started(f"pd-trace-{role}", self._run)
        self._unsubscribe = subscribe(self) if self._thread is not None else lambda: None
        atexit.register(self.close)

    def __call__(self, stage: str, facts: Mapping[str, Any]) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(_line(stage, facts))
            return
        with self._lock:
            self._dropped += 1
            first = self._dropped == 1
        if first:
            log.error("%s lacks events from here on: its disk does not take them in time", self)

    def _run(self) -> None:
        try:
            while not self._closing.wait(WRITE_S):
                self._write()
            self._write()
        except Exception:  # the disk is full or gone, or a fact cannot be written: the transfers go on
            if not self._closing.is_set():
                log.exception("the trace ends here: %s failed; restart the process to trace again", self)
            _drop(self)
        finally:
            with contextlib.suppress(OSError):  # a full disk may not take what is left
                self._file.close()

    def _write(self) -> None:
        while self._waiting:
            if self._written > self._half:
                self._turn()
            self._written += self._file.write(self._waiting.popleft())
        if self._dropped > self._said:
            self._said, lines = self._dropped, self._dropped - self._said
            self._written += self._file.write(_line("dropped", {"lines": lines}))
        self._file.flush()

    def _turn(self) -> None:
        """Let the full file take the older one's place, and open a new one."""
        self._file.close()
        self._path.replace(self._path.with_suffix(OLDER + ".jsonl"))
        self._file = _opened(self._path)
        _locked(self._file)
        self._written = self._file.write(_line("clock", {"wall": time.time(), "role": self._role}))

    def close(self) -> None:
        self._unsubscribe()
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.error("thread %s did not end within %.0f s: the disk of %s hangs", self._thread.name, CLOSE_S, self)

    def __repr__(self) -> str:
        return f"TraceFile({str(self._path)!r})"


def _line(stage: str, facts: Mapping[str, Any]) -> str:
    return json.dumps({"t": round(time.monotonic(), 6), "stage": stage, **facts}, default=str) + "\n"


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
