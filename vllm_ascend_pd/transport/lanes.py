# SPDX-License-Identifier: Apache-2.0
"""Writes in flight through the engine's blocking batch call, made on a few threads of our own.

For links where one call must carry the whole batch (Ascend). One call at a time per peer, so a peer that stalls costs
one thread until its timeout and delays nobody else while a thread is free.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.engine import Engine
from vllm_ascend_pd.transport.spans import Bytes

log = logging.getLogger(__name__)

THREADS = 4  # a blocked call spins
JOIN_S = 5.0


@dataclass(slots=True, eq=False)
class _Job:
    engine: Engine
    address: str
    calls: deque[tuple[list[int], list[int], list[int]]]  # what is not issued yet
    deadline: float
    out: bool = False  # a thread is in the engine with it
    failed: bool = False


class Lanes:
    """`submit` and `poll` never wait; threads start with the first submissions and end in `close`."""

    def __init__(
        self, cap: int, timeout_s: float, attach_thread: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._cap, self._timeout_s, self._attach_thread, self._clock = cap, timeout_s, attach_thread, clock
        self._handles = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._changed = threading.Condition()
        self._lanes: dict[str, deque[_Job]] = {}  # by peer; the first job may be out
        self._ready: deque[str] = deque()  # lanes whose first job is not out
        self._out = 0
        self._stop = False
        self._threads: list[threading.Thread] = []

    def submit(self, engine: Engine, address: str, src: Bytes, dst: Bytes, size: Bytes) -> int:
        handle = next(self._handles)
        cuts = [slice(at, at + self._cap) for at in range(0, len(size), self._cap)]
        calls = deque((src[cut].tolist(), dst[cut].tolist(), size[cut].tolist()) for cut in cuts)
        job = _Job(engine, address, calls, self._clock() + self._timeout_s)
        with self._changed:
            self._jobs[handle] = job
            if calls:
                lane = self._lanes.setdefault(address, deque())
                lane.append(job)
                if len(lane) == 1:
                    self._ready.append(address)
                    self._changed.notify()
            if len(self._threads) < THREADS and not self._stop:
                self._start_thread()
        return handle

    def alive(self, handle: int) -> bool:
        with self._changed:
            return not self._jobs[handle].failed

    def poll(self, handle: int) -> WriteState:
        """FAILED only when no thread is in the engine with it any more."""
        with self._changed:
            job = self._jobs[handle]
            if (job.calls or job.out) and self._clock() >= job.deadline:
                self._fail(job)
            if job.calls or job.out:
                return WriteState.PENDING
            del self._jobs[handle]
            return WriteState.FAILED if job.failed else WriteState.LANDED

    def drop_all(self) -> None:
        """Waits for the calls that are out: an engine must not be closed under them."""
        with self._changed:
            for job in self._jobs.values():
                self._fail(job)
            if not self._changed.wait_for(lambda: self._out == 0, self._timeout_s + JOIN_S):
                log.error("a transfer did not return within %.0f s", self._timeout_s + JOIN_S)

    def close(self) -> None:
        """Idempotent. Waits like `drop_all`."""
        self.drop_all()
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                log.error("thread %s did not end within %.0f s", thread.name, JOIN_S)

    def _fail(self, job: _Job) -> None:
        """Nothing more of it is issued. Under the lock."""
        if job.calls or job.out:
            job.failed = True
            job.calls.clear()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"pd-wire-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        self._attach_thread()
        while (job := self._take()) is not None:
            landed = False
            try:
                landed = self._issue(job)
            finally:
                self._give_back(job, landed)

    def _take(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._stop)
            if self._stop:
                return None
            job = self._lanes[self._ready.popleft()][0]
            job.out = True
            self._out += 1
            return job

    def _issue(self, job: _Job) -> bool:
        """One call's worth of the job; False if that failed."""
        with self._changed:
            if not job.calls:
                return not job.failed
            src, dst, size = job.calls.popleft()
        return job.engine.write(job.address, src, dst, size)

    def _give_back(self, job: _Job, landed: bool) -> None:
        with self._changed:
            if not landed:
                self._fail(job)
            job.out = False
            self._out -= 1
            lane = self._lanes[job.address]
            if not job.calls:
                lane.popleft()
            if lane:
                self._ready.append(job.address)
            else:
                del self._lanes[job.address]
            self._changed.notify_all()
