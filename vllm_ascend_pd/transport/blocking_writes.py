# SPDX-License-Identifier: Apache-2.0
"""Writes in flight through the engine's blocking batch call, made on threads of this module.

For links where one call must carry the whole batch (Ascend). There is one call at a time per peer, and a few at a time
in all, because a blocked call spins. A slow call does not count among these few: it keeps its thread until it returns,
and another thread takes its place. So peers that do not respond delay no writes to other peers; if an engine stops,
there is one such peer for each of its ranks.

A write's timeout runs from when it is issued. A write that could not be issued in time never is, because its authority
may be over by then.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_ascend_pd.shared.threads import started
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.engine import OpenEngine
from vllm_ascend_pd.transport.peer_probes import watched
from vllm_ascend_pd.transport.spans import Ints

log = logging.getLogger(__name__)

CALLS = 4  # at a time, without slow ones
SLOW_S = 0.05  # a call that takes longer is slow
THREADS = 64  # in all: as many peers may fail to respond at once
START_AGAIN_S = 1.0  # after the system has refused a thread
JOIN_S = 5.0


@dataclass(slots=True, eq=False)
class _Job:
    engine: OpenEngine
    address: str
    calls: deque[tuple[list[int], list[int], list[int]]]  # not issued yet
    issue_by: float
    first_s: float | None  # if this may be first contact: seconds until it is cut off
    deadline: float = float("inf")  # set when it is issued
    out_since: float | None = None  # begin of the call that a thread is making for it
    failed: bool = False

    @property
    def issued(self) -> bool:
        return self.deadline < float("inf")

    def out_for(self, now: float) -> float:
        return 0.0 if self.out_since is None else now - self.out_since

    def late(self, now: float) -> bool:
        return now >= self.deadline or (bool(self.calls) and now >= self.issue_by)


class BlockingWrites:
    """Queues of writes, by peer. `submit` and `poll` never wait. Threads start on demand and end in `close`."""

    def __init__(
        self, cap: int, timeout_s: float, attach_thread: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self._cap, self._timeout_s, self._attach_thread, self._clock = cap, timeout_s, attach_thread, clock
        self._handles = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._changed = threading.Condition()
        self._queues: dict[str, deque[_Job]] = {}  # jobs without a call, by peer, in the order of their turns
        self._out: dict[str, _Job] = {}  # jobs in a call, by peer
        self._stop = self._paused = False
        self._attached = 0
        self._start_at = float("-inf")
        self._max_threads = THREADS  # lowered once the device has refused one, as it would refuse others
        self._threads: list[threading.Thread] = []

    def submit(
        self,
        engine: OpenEngine,
        address: str,
        src: Ints,
        dst: Ints,
        size: Ints,
        *,
        issue_by: float,
        first_s: float | None = None,
    ) -> int:
        handle = next(self._handles)
        cuts = [slice(at, at + self._cap) for at in range(0, len(size), self._cap)]
        calls = deque((src[cut].tolist(), dst[cut].tolist(), size[cut].tolist()) for cut in cuts)
        job = _Job(engine, address, calls, issue_by, first_s)
        with self._changed:
            self._jobs[handle] = job
            if not self._max_threads:
                calls.clear()
                job.failed = True
            if calls:
                self._queues.setdefault(address, deque()).append(job)
            self._staff()
        return handle

    def alive(self, handle: int) -> bool:
        with self._changed:
            return not self._jobs[handle].failed

    def in_first_contact(self) -> bool:
        """Return whether a first contact is in progress or queued: another one would wait for it in the engine."""
        with self._changed:
            now = self._clock()
            return any(
                job.first_s is not None and job.out_for(now) <= job.first_s
                for job in self._jobs.values()
                if job.out_since is not None or (job.calls and not job.issued)
            )

    def poll(self, handle: int) -> WriteState:
        """Return the state of a write. FAILED only when no thread is in a call for it any more."""
        with self._changed:
            job = self._jobs[handle]
            if job.late(self._clock()):
                self._fail(job)
            self._staff()
            if job.calls or job.out_since is not None:
                return WriteState.PENDING
            del self._jobs[handle]
            if not job.failed:
                return WriteState.LANDED
            return WriteState.FAILED if job.issued else WriteState.UNISSUED

    def drop_all(self) -> None:
        """Fail all writes and wait for the calls in progress: an engine must not be closed during a call."""
        with self._changed:
            for job in self._jobs.values():
                self._fail(job)
            if not self._changed.wait_for(lambda: not self._out, self._timeout_s + JOIN_S):
                log.error("a transfer did not return within %.0f s", self._timeout_s + JOIN_S)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep all threads out of the engine. Writes submitted meanwhile wait."""
        with self._changed:
            self._paused = True
        self.drop_all()
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._staff()

    def close(self) -> None:
        """Fail all writes, wait as `drop_all` does, and end the threads. Idempotent."""
        self.drop_all()
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                log.error("thread %s did not end within %.0f s", thread.name, JOIN_S)

    # -- under the lock

    def _fail(self, job: _Job) -> None:
        """Fail a write, unless all of it is over. Nothing more of it is issued."""
        if not job.calls and job.out_since is None:
            return
        job.failed = True
        job.calls.clear()
        queue = self._queues.get(job.address, deque())
        if job in queue:
            queue.remove(job)
            if not queue:
                del self._queues[job.address]

    def _turn(self) -> str | None:
        """Return the peer whose turn it is, if a call may begin now."""
        if self._paused:
            return None
        now = self._clock()
        fast_calls = sum(job.out_for(now) < SLOW_S for job in self._out.values())
        return None if fast_calls >= CALLS else next((at for at in self._queues if at not in self._out), None)

    def _staff(self) -> None:
        """Find or start a thread for a call that may begin now.

        This is also called in `poll`, because a call turns slow without any event.
        """
        if self._stop or self._turn() is None:
            return
        self._changed.notify()
        threads = sum(thread.is_alive() for thread in self._threads)
        if threads - len(self._out) < 1 and threads < self._max_threads and self._clock() >= self._start_at:
            thread = started(f"pd-wire-{len(self._threads)}", self._work)
            if thread is not None:
                self._threads.append(thread)
            else:
                self._start_at = self._clock() + START_AGAIN_S

    # -- the threads

    def _work(self) -> None:
        try:
            self._attach_thread()
        except Exception:
            log.exception("a transfer thread cannot attach to the device: no more are started")
            self._stand_down()
            return
        with self._changed:
            self._attached += 1
            self._max_threads = max(self._max_threads, self._attached)
        while (job := self._take()) is not None:
            landed = False
            try:
                landed = self._issue(job)
            finally:
                self._give_back(job, landed)

    def _stand_down(self) -> None:
        """Start no more threads: the device has refused one.

        Those that it accepted go on. If it accepted none, all writes fail without being issued.
        """
        with self._changed:
            self._max_threads = self._attached
            for job in self._jobs.values() if not self._max_threads else ():
                self._fail(job)

    def _take(self) -> _Job | None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._stop or self._turn() is not None)
                address = self._turn()
                if self._stop or address is None:
                    return None
                queue = self._queues.pop(address)
                job = queue.popleft()
                if queue:
                    self._queues[address] = queue  # its next turn comes after the others
                now = self._clock()
                if job.late(now) or job.engine.closed:  # if this process was stopped for a while, or access revoked
                    self._fail(job)
                    continue
                job.deadline = min(job.deadline, now + self._timeout_s)
                job.out_since = now
                self._out[address] = job
                return job

    def _issue(self, job: _Job) -> bool:
        """Make one call for the job. Return False if it failed."""
        with self._changed:
            if not job.calls:
                return not job.failed
            src, dst, size = job.calls.popleft()
        with watched(job.address, job.first_s) as allowed:
            if not allowed:
                job.deadline = float("inf")  # it was not issued
                return False
            return job.engine.write(job.address, src, dst, size)

    def _give_back(self, job: _Job, landed: bool) -> None:
        with self._changed:
            was_slow = job.out_for(self._clock()) >= SLOW_S
            job.out_since = job.first_s = None
            del self._out[job.address]
            if not landed:
                job.failed = True
                job.calls.clear()
                for other in list(self._queues.get(job.address, ())) if was_slow else ():
                    self._fail(other)  # the peer does not respond: its waiting writes are not tried
            if job.calls:
                self._queues.setdefault(job.address, deque()).appendleft(job)
            self._changed.notify_all()
