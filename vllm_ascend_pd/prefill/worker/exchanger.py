# SPDX-License-Identifier: Apache-2.0
"""Maker of the exchanges that the core has planned: it takes slots, calls the collective, and hands over the result.

It runs on a thread of its own, or in the layer's hook on a side stream if the device asks for that. Even after an error
the collective is called, because other ranks wait for it (unless the group itself is broken), and the result is handed
over, because a push must not be sealed without it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.prefill.worker.core.exchanges import Run, Staged
from vllm_ascend_pd.prefill.worker.core.planning import StepPlan
from vllm_ascend_pd.prefill.worker.writer import Deciding, News
from vllm_ascend_pd.regroup.core.staging import Staging, StagingSlot
from vllm_ascend_pd.regroup.exchange import ExchangeOutcome, GroupExchange
from vllm_ascend_pd.shared.event import Event

log = logging.getLogger(__name__)


class Exchanger:
    """Owner of the exchange thread. `wait` releases the core's lock until something changes, or for so many seconds."""

    def __init__(
        self,
        name: str,
        deciding: Deciding,
        clock: Callable[[], float],
        wait: Callable[[float], object],
        exchange: GroupExchange,  # this rank's buffers and its process group
        staging: Staging,
        device: Device,
        put: Callable[[News], None],
    ) -> None:
        self._deciding, self._clock, self._wait = deciding, clock, wait
        self.exchange, self._staging, self._device, self._put = exchange, staging, device, put
        self._broken: Exception | None = None
        self._inbox: queue.SimpleQueue[tuple[Run, Event] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not device.exchanges_inline:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    # -- the engine's thread

    def prepare(self, plan: StepPlan) -> None:
        """Make a step's plans ready for this rank's buffers, once for all layers."""
        if plan.exchanges:
            with self._device.planning():
                for exchange in plan.exchanges:
                    exchange.rows = self.exchange.prepare(exchange.plan, self._staging.sample, exchange.layers[0])

    def make(self, run: Run, event: Event) -> None:
        """Make an exchange after all that were asked for before it, once `event` is done."""
        if self._thread is not None:
            self._inbox.put((run, event))
        else:
            with self._device.side_stream(event):
                self._make(run, event)

    def close(self, timeout: float) -> None:
        """Make the exchanges that are due, then end the thread. Idempotent.

        Without those exchanges other ranks would wait for this one. A thread that is still inside a collective after
        `timeout` leaves it when the group times out or its members end.
        """
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.error("thread %s is still inside a collective", self._thread.name)

    # -- the exchange's thread, or the hook's

    def _run(self) -> None:
        trouble = self._attach()
        while (item := self._inbox.get()) is not None:
            try:
                self._make(*item, trouble)
            except Exception:  # this thread ends only in `close`: other ranks wait for it
                log.exception("after an exchange")

    def _attach(self) -> Exception | None:
        try:
            self._device.attach_thread()
        except Exception as failed:
            log.exception("the exchange thread cannot use the device")
            return failed
        return None

    def _make(self, run: Run, event: Event, trouble: Exception | None = None) -> None:
        slots: list[StagingSlot | None] = [None] * len(run.exchange.plan.slots)
        trouble = trouble or self._broken or self._take_slots(run, slots)
        outcome = self._exchanged(run, slots)
        error = trouble or self._broken or outcome.error
        try:
            event = self._device.record()
        except Exception as failed:
            log.exception("no event could be recorded behind an exchange")
            error = error or failed
        with self._deciding() as core:
            core.making.made(run)
        if trace.enabled():  # before `put`, so that it precedes in the trace what follows from it
            facts = {**run.unit._asdict(), "bytes": sum(run.exchange.rows.send_splits), "waited": outcome.waited}
            trace.emit("exchanged", **facts, again=run.catch_up, ok=error is None)
        self._put(Staged(event, run, tuple(slots), outcome.number, outcome.waited, error))

    def _take_slots(self, run: Run, slots: list[StagingSlot | None]) -> Exception | None:
        try:
            if run.first:
                with self._deciding():
                    self._staging.new_step()
            for index in range(len(slots)):
                with self._deciding() as core:
                    while (left := core.making.wait_left(self._clock(), run, index)) > 0:
                        self._wait(left)
                    slots[index] = core.making.slot(run, index)
        except Exception as failed:
            log.exception("a staging slot could not be taken")
            return failed
        return None

    def _exchanged(self, run: Run, slots: Sequence[StagingSlot | None]) -> ExchangeOutcome:
        if self._broken is None:
            try:
                return self.exchange.run(run.exchange.rows, run.unit.layer, slots)
            except Exception as failed:
                # The group is of no use from here on: a rank is gone, the collective timed out, or could not be called.
                log.exception("an exchange failed: every regrouped push of this engine fails from now on")
                self._broken = failed
                self._break_off()
        return ExchangeOutcome(0, self._broken, 0.0)

    def _break_off(self) -> None:
        """Break the group off: this rank makes no further exchange, and the others must not wait for the timeout."""
        try:
            self.exchange.break_off()
        except Exception:  # whatever the backend raises, this rank's pushes must fail
            log.exception("the process group could not be broken off: other ranks may wait for its timeout")
