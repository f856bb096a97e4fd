# SPDX-License-Identifier: Apache-2.0
"""The thread that writes: it takes computed layers, claims what may be written, submits batches, and polls them.

One batch holds everything that goes to one D rank for one layer, all requests of the step together; a writer that lags
puts several ready layers into one batch. Nothing else calls the transfer engine's submit and poll.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.prefill.worker.core.batches import Batch
from vllm_ascend_pd.prefill.worker.core.exchanges import Staged
from vllm_ascend_pd.prefill.worker.core.planning import StepPlan
from vllm_ascend_pd.prefill.worker.core.push import DirectWrites
from vllm_ascend_pd.prefill.worker.core.pushes import Pushes
from vllm_ascend_pd.prefill.worker.sums import PushSums
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.shared.event import Event
from vllm_ascend_pd.transport.base import Wire, WriteState

log = logging.getLogger(__name__)

POLL_S = 0.0005
IDLE_S = 1.0

Deciding: TypeAlias = Callable[[], AbstractContextManager[Pushes]]  # the core, locked; its effects come after


@dataclass(frozen=True, slots=True)
class Computed:
    """A layer of a step, which is computed once `event` is done."""

    step: StepPlan
    layer: int
    event: Event


@dataclass(frozen=True, slots=True)
class Sealed:
    """End of a step: every layer was announced. These pushes get nothing more except what exchanges still owe them."""

    step: int
    pushes: tuple[str, ...]
    announced_at: float


News: TypeAlias = Computed | Staged | Sealed


class Writer:
    """Work of the thread, turn by turn. Starts no thread, reads no clock of its own: the simulator runs it too."""

    def __init__(
        self, deciding: Deciding, wire: Wire, clock: Callable[[], float], push_sums: PushSums | None = None
    ) -> None:
        self._deciding, self._wire, self._clock, self._push_sums = deciding, wire, clock, push_sums
        # What is pushed directly does not wait for exchanges, which depend on other ranks.
        self._computed: deque[News] = deque()
        self._exchanged: deque[News] = deque()
        self.in_flight: list[Batch] = []

    def put(self, item: News) -> None:
        (self._exchanged if isinstance(item, Staged) else self._computed).append(item)

    @property
    def busy(self) -> bool:
        """True if the writer must look again soon; else only news can change anything."""
        return bool(self.in_flight or self._computed or self._exchanged)

    def turn(self) -> None:
        self._poll()  # first: a write that has ended makes room, and nothing else reports it
        self._announce(self._computed)
        self._announce(self._exchanged)
        self._submit()

    def died(self, error: Exception) -> None:
        """Fail everything after an exception. Writes in flight may still land: the machine keeps them fenced."""
        with self._deciding() as core:
            core.died(self._clock(), str(error))
        in_flight, self.in_flight = self.in_flight, []
        for batch in in_flight:
            self._finished(batch, WriteState.FAILED)
        self._computed.clear()  # they hold events of the device
        self._exchanged.clear()

    def _poll(self) -> None:
        for batch in list(self.in_flight):
            state = self._wire.poll(batch.handle)
            if state is not WriteState.PENDING:
                self.in_flight.remove(batch)  # before it is reported: each batch is reported once, whatever raises
                self._finished(batch, state)

    def _finished(self, batch: Batch, state: WriteState) -> None:
        with self._deciding() as core:
            core.claims.finished(self._clock(), batch, state)

    def _announce(self, waiting: deque[News]) -> None:
        while waiting:
            head = waiting[0]
            if not isinstance(head, Sealed) and not head.event.done():
                return
            self._tell(head)
            waiting.popleft()

    def _tell(self, item: News) -> None:
        if isinstance(item, Staged):
            absent = item.absent()
            sums = self._push_sums.staged(item) if self._push_sums is not None else [{} for _ in item.slots]
            with self._deciding() as core:
                core.offers.staged(self._clock(), item, absent, sums)
        elif isinstance(item, Computed):
            with self._deciding() as core:
                core.offers.computed(self._clock(), item.step, item.layer)
        else:
            writes = self._sum_direct(item)
            with self._deciding() as core:
                core.offers.sealed(self._clock(), item.step, item.pushes, item.announced_at, writes)

    def _sum_direct(self, item: Sealed) -> list[tuple[DirectWrites, tuple[int, ...]]]:
        """Return the checksums of all that the ending pushes push directly, if wanted. Sums without the lock."""
        if self._push_sums is None:
            return []
        with self._deciding() as core:
            writes = core.offers.direct_writes(item.step, item.pushes)
        sums = []
        for written in writes:
            try:
                sums.append((written, self._push_sums.direct(written)))
            except Exception as error:  # concerns one request's plan or memory: the others go on
                log.exception("the bytes of push %s cannot be summed", written.push)
                with self._deciding() as core:
                    why = one_line(f"summing failed: {error}")
                    core.abort(self._clock(), written.push, Failure("PD-XFER-003", why))
        return sums

    def _submit(self) -> None:
        with self._deciding() as core:
            batches = core.claims.claim(self._clock(), self.in_flight)
        self.in_flight.extend(batches)  # claimed: they count as out even if a submission raises
        for batch in batches:
            self._send(batch)

    def _send(self, batch: Batch) -> None:
        batch.submitted_at = self._clock()
        batch.handle = self._wire.submit(batch.session, batch.src, batch.dst, batch.size)
        with self._deciding() as core:
            core.claims.submitted(self._clock(), batch)


class WriterThread:
    """Owner of the thread. `put` and `nudge` may be called from any thread; they never wait."""

    def __init__(self, name: str, writer: Writer, device: Device) -> None:
        self._writer, self._device = writer, device
        self._inbox: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._stop = self._dead = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: News) -> None:
        if not self._dead:  # else no thread would take it out
            self._inbox.put(item)

    def nudge(self) -> None:
        """Wake the writer: something may be writable now."""
        if not self._dead:
            self._inbox.put(None)

    def stop(self, timeout: float) -> bool:
        """Stop the thread, and return whether it has ended. Idempotent.

        What is in flight is left to the transfer engine's own close.
        """
        self._stop = True
        self._inbox.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.error("thread %s did not end within %.1f s", self._thread.name, timeout)
            return False
        return True

    def _run(self) -> None:
        try:
            self._device.attach_thread()
            while not self._stop:
                self._take_news(POLL_S if self._writer.busy else IDLE_S)
                self._writer.turn()
        except Exception as error:
            log.exception("the writer thread died")
            self._dead = True
            self._writer.died(error)
            self._forget_news()

    def _take_news(self, timeout: float) -> None:
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=timeout)
            while True:
                if item is not None:
                    self._writer.put(item)
                item = self._inbox.get_nowait()

    def _forget_news(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()
