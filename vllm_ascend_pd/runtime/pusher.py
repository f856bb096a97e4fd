# SPDX-License-Identifier: Apache-2.0
"""The thread that writes: takes computed layers, claims what may be written, submits batches, polls them.

One batch holds everything that goes to one D rank for one layer, all requests of the step together; a pusher that lags
puts several ready layers into one batch. Nobody else touches the transfer engine's submit and poll.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from vllm_ascend_pd.device.base import Device, Event
from vllm_ascend_pd.protocol.messages import Endpoint
from vllm_ascend_pd.runtime.batches import Batch
from vllm_ascend_pd.runtime.regrouping import Staged
from vllm_ascend_pd.transport.base import Transport, WriteState

log = logging.getLogger(__name__)

POLL_S = 0.0005
IDLE_S = 1.0
IN_FLIGHT = 2  # batches per destination: one on the wire, one behind it


@dataclass(frozen=True, slots=True)
class Computed:
    """A layer of a step is computed once `event` is done."""

    step: int
    layer: int
    event: Event


@dataclass(frozen=True, slots=True)
class Sealed:
    """Every layer of a step was announced; these pushes get nothing more."""

    step: int
    pushes: tuple[str, ...]
    behind_exchanges: bool = False


class Work(Protocol):
    """What the pusher asks of its runtime. Each call decides under the runtime's lock and acts after it."""

    def computed(self, item: Computed) -> None: ...
    def staged(self, item: Staged) -> None: ...
    def sealed(self, item: Sealed) -> None: ...
    def next_batches(self, busy: dict[Hashable, int]) -> list[Batch]: ...
    def submitted(self, batch: Batch) -> None: ...
    def finished(self, batch: Batch, state: WriteState) -> None: ...
    def heard(self, peer: Endpoint) -> float | None: ...
    def died(self, error: Exception) -> None: ...


class Pusher:
    """Owns the writer thread. `put` and `nudge` may be called from any thread; they never wait."""

    def __init__(self, name: str, work: Work, transport: Transport, device: Device) -> None:
        self._work, self._transport, self._device = work, transport, device
        self._inbox: queue.SimpleQueue[Computed | Staged | Sealed | None] = queue.SimpleQueue()
        # What is pushed directly does not wait for exchanges, which hang on other ranks.
        self._computed: deque[Computed | Staged | Sealed] = deque()
        self._exchanged: deque[Computed | Staged | Sealed] = deque()
        self._flying: list[Batch] = []
        self._stop = self._dead = False
        transport.listen(self._heard)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Computed | Staged | Sealed) -> None:
        if not self._dead:  # else nobody would take it out
            self._inbox.put(item)

    def nudge(self) -> None:
        """Something may be writable now."""
        if not self._dead:
            self._inbox.put(None)

    def stop(self, timeout: float) -> bool:
        """Idempotent; what is in flight is left to the transfer engine's own close. Whether the thread has ended."""
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
                self._take_news(POLL_S if self._flying or self._computed or self._exchanged else IDLE_S)
                self._poll()  # first: a write that came home makes room, and nobody tells of it again
                self._announce(self._computed)
                self._announce(self._exchanged)
                self._submit()
        except Exception as error:
            log.exception("the pusher thread died")
            self._dead = True
            self._work.died(error)
            for batch in self._flying:  # what is out may still land: the machine keeps it fenced
                self._work.finished(batch, WriteState.FAILED)
            self._forget_news()

    def _take_news(self, timeout: float) -> None:
        try:
            item = self._inbox.get(timeout=timeout)
            while True:
                if isinstance(item, Staged) or (isinstance(item, Sealed) and item.behind_exchanges):
                    self._exchanged.append(item)
                elif item is not None:
                    self._computed.append(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _forget_news(self) -> None:
        """They hold events of the device."""
        self._computed.clear()
        self._exchanged.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()

    def _announce(self, waiting: deque[Computed | Staged | Sealed]) -> None:
        while waiting:
            head = waiting[0]
            if isinstance(head, Sealed):
                self._work.sealed(head)
            elif not head.event.done():
                return
            elif isinstance(head, Staged):
                self._work.staged(head)
            else:
                self._work.computed(head)
            waiting.popleft()

    def _submit(self) -> None:
        busy: dict[Hashable, int] = {}
        for batch in self._flying:
            busy[batch.peer] = busy.get(batch.peer, 0) + 1
        batches = self._work.next_batches(busy)
        self._flying.extend(batches)  # claimed: they count as out even if a submission raises
        for batch in batches:
            batch.submitted_at = time.monotonic()
            batch.handle = self._transport.submit(batch.session, batch.src, batch.dst, batch.size)
            self._work.submitted(batch)

    def _poll(self) -> None:
        for batch in list(self._flying):
            state = self._transport.poll(batch.handle)
            if state is not WriteState.PENDING:
                self._flying.remove(batch)  # before it is told: each batch is told once, whatever raises
                self._work.finished(batch, state)

    def _heard(self, session: str) -> float | None:
        """Asked by the transport, on this thread: when the D rank behind a session last said anything."""
        peer = next((batch.peer for batch in self._flying if batch.session == session), None)
        return None if peer is None else self._work.heard(peer)
