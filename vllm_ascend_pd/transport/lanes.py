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
    engine: Engine | None
    target: str
    spans: deque[tuple[list[int], list[int], list[int]]]  # one per call
    deadline: float
    state: WriteState = WriteState.PENDING


class Lanes:
    """`submit` and `poll` never wait; the threads start with the first submission and end in `close`."""

    def __init__(
        self, cap: int, timeout_s: float, attach_thread: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._cap, self._timeout_s, self._attach_thread, self._clock = cap, timeout_s, attach_thread, clock
        self._handles = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._changed = threading.Condition()
        self._lanes: dict[str, deque[_Job]] = {}  # by target; the first job of a lane may be at work
        self._ready: deque[str] = deque()  # lanes with a job that nobody works on
        self._working = 0
        self._stop = False
        self._threads: list[threading.Thread] = []

    def submit(self, engine: Engine, target: str, src: Bytes, dst: Bytes, size: Bytes) -> int:
        handle = next(self._handles)
        cuts = range(0, len(size), self._cap)
        spans = deque(tuple(side[at : at + self._cap].tolist() for side in (src, dst, size)) for at in cuts)
        job = _Job(engine, target, spans, self._clock() + self._timeout_s)
        self._jobs[handle] = job
        if not spans:
            job.state = WriteState.LANDED
            return handle
        with self._changed:
            lane = self._lanes.setdefault(target, deque())
            lane.append(job)
            if len(lane) == 1:
                self._ready.append(target)
                self._changed.notify()
        if len(self._threads) < THREADS:
            self._start_thread()
        return handle

    def refused(self) -> int:
        handle = next(self._handles)
        self._jobs[handle] = _Job(None, "", deque(), 0.0, WriteState.FAILED)
        return handle

    def poll(self, handle: int) -> WriteState:
        job = self._jobs[handle]
        with self._changed:
            if job.state is WriteState.PENDING and self._clock() >= job.deadline:
                job.state = WriteState.FAILED  # what is not issued yet will not be
                job.spans.clear()
            state = job.state
        if state is not WriteState.PENDING:
            del self._jobs[handle]
        return state

    def lingering(self) -> int:
        """Calls that have not returned although their write has failed."""
        with self._changed:
            return sum(1 for lane in self._lanes.values() if lane and lane[0].state is WriteState.FAILED)

    def fail_all(self) -> None:
        """Waits for the calls that are out: the engine must not be closed under them."""
        with self._changed:
            for job in self._jobs.values():
                job.spans.clear()
                if job.state is WriteState.PENDING:
                    job.state = WriteState.FAILED
            if not self._changed.wait_for(lambda: self._working == 0, self._timeout_s + JOIN_S):
                log.error("a transfer did not return within %.0f s", self._timeout_s + JOIN_S)

    def close(self) -> None:
        """Idempotent."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                log.error("thread %s did not end within %.0f s", thread.name, JOIN_S)

    def _start_thread(self) -> None:
        name = f"pd-wire-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        self._attach_thread()
        while (job := self._take()) is not None:
            rc = -1
            try:
                rc = self._write(job)
            finally:
                self._give_back(job, rc)

    def _write(self, job: _Job) -> int:
        """One call's worth of the job."""
        with self._changed:
            if job.state is not WriteState.PENDING or not job.spans or job.engine is None:
                return -1
            src, dst, size = job.spans.popleft()
        return job.engine.batch_transfer_sync_write(job.target, src, dst, size)

    def _take(self) -> _Job | None:
        with self._changed:
            while not self._ready and not self._stop:
                self._changed.wait()
            if self._stop:
                return None
            self._working += 1
            return self._lanes[self._ready.popleft()][0]

    def _give_back(self, job: _Job, rc: int) -> None:
        with self._changed:
            self._working -= 1
            if job.state is WriteState.PENDING:
                if rc != 0:
                    job.state = WriteState.FAILED
                elif not job.spans:
                    job.state = WriteState.LANDED
            lane = self._lanes[job.target]
            if job.state is not WriteState.PENDING:
                lane.popleft()
            if lane:
                self._ready.append(job.target)
            else:
                del self._lanes[job.target]
            self._changed.notify_all()
