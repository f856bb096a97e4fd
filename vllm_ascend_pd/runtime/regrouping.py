# SPDX-License-Identifier: Apache-2.0
"""Exchanges of one P worker: which layers of which steps are exchanged, in which order, and what could not be staged.

Everything that decides whether a rank takes part comes from the step's metadata, so all ranks call the same collectives
in the same order: steps, layers in registered order, sub-steps. What a rank knows by itself (a failed push, a
destination without a slot) only decides whether it keeps the bytes. Bytes that found no slot are missed; the scheduler
orders the same exchange again (`catch_up`) once there is room.

Locks: the runtime's lock may be held when this file is called and `Missed` or `Staging` are asked, never the other way.
The exchange thread takes the runtime's lock only through `alive`, with no lock of its own held.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_pd.device.base import Device, Event
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job
from vllm_ascend_pd.geometry.regroup import RegroupPlanner
from vllm_ascend_pd.geometry.substeps import sub_steps
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.protocol.messages import Endpoint
from vllm_ascend_pd.regroup.exchange import Exchange, ExchangeRows, Outcome
from vllm_ascend_pd.regroup.staging import Staging, StagingSlot
from vllm_ascend_pd.runtime.missed import Missed
from vllm_ascend_pd.runtime.work import PushWork, Unit

log = logging.getLogger(__name__)

MOST_CATCH_UPS = 64  # asked for in one step


@dataclass(frozen=True, slots=True)
class SubStep:
    """One exchange of every layer: its tables, and the push behind each of its jobs."""

    number: int  # from 1; 0 is what is pushed directly
    rows: ExchangeRows
    jobs: list[Job]
    works: list[PushWork]

    def endpoint(self, slot: int) -> Endpoint:
        planned = self.rows.plan.slots[slot]
        return self.works[next(iter(planned.writes))].reservation.endpoints[planned.d_rank]

    def pushes(self, slot: int) -> Iterable[PushWork]:
        return (self.works[member] for member in self.rows.plan.slots[slot].writes)


@dataclass(slots=True)
class _Step:
    number: int
    parts: list[SubStep]
    pushes: set[str]  # of which some have not ended
    events: dict[int, Event] = field(default_factory=dict)
    next_layer: int = 0


@dataclass(frozen=True, slots=True)
class Staged:
    """An exchange is done once `event` is: these slots hold what this rank owns of it."""

    event: Event
    unit: Unit
    part: SubStep
    slots: tuple[StagingSlot | None, ...]
    number: int = 0  # the tag that its bytes carry
    waited: float = 0.0  # seconds inside the collective
    error: Exception | None = None

    def strangers(self, slot: int) -> list[int]:
        """The ranks that did not give what they should have to this slot."""
        staging = self.slots[slot]
        return [] if staging is None else self.part.rows.slots[slot].strangers(staging, self.number)

    def facts(self) -> dict[str, Any]:
        """For the trace."""
        filled = [planned for planned, slot in zip(self.part.rows.plan.slots, self.slots, strict=True) if slot]
        transfers = {str(self.part.works[member].reservation.transfer) for slot in filled for member in slot.writes}
        return {
            **self.unit._asdict(),
            "bytes": sum(slot.nbytes for slot in filled),
            "slots": len(filled),
            "transfers": sorted(transfers),
        }


@dataclass(frozen=True, slots=True)
class _Run:
    """One exchange to be made: all slots, or only those missed before."""

    event: Event
    unit: Unit
    part: SubStep
    again: bool = False
    first: bool = False  # of what a step's metadata ordered: destinations are waited for anew


class Regrouper:
    """Owns the exchange thread (or runs in the layer's hook, on a stream of its own, where the device says so)."""

    def __init__(
        self,
        engine: CacheGeometry,
        rank: int,
        layers: int,
        exchange: Exchange,
        staging: Staging,
        device: Device,
        sink: Callable[[Any], None],
        alive: Callable[[str, int], bool],
    ) -> None:
        self.staging = staging
        self._planner = RegroupPlanner(engine, rank)
        self._layers, self._exchange, self._device = layers, exchange, device
        self._sink, self._alive = sink, alive
        self._steps: dict[int, _Step] = {}  # only the engine's thread touches it
        self._missed = Missed()
        self._made = 0
        self._broken: Exception | None = None
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not device.exchanges_inline:
            self._thread = threading.Thread(target=self._run, name=f"pd-regroup-{rank}", daemon=True)
            self._thread.start()

    # -- the engine's thread

    def plan(self, step: int, works: Sequence[PushWork], jobs: Sequence[Job]) -> None:
        """Plan a step's exchanges. `works` and `jobs` must be the same on every rank."""
        parts: list[SubStep] = []
        slot = self.staging.sample
        for cut in sub_steps(self._planner, jobs, self.staging.slot_bytes, self._exchange.buffer_bytes, step):
            planned = self._planner.plan(cut.jobs, cut.rotation)
            with self._device.planning():
                rows = self._exchange.prepare(planned, slot)
            parts.append(SubStep(len(parts) + 1, rows, cut.jobs, [works[index] for index in cut.members]))
        self._steps[step] = _Step(step, parts, {work.push for work in works})

    def computed(self, step: int, layer: int, event: Event) -> None:
        """A layer's hook fired. Exchanges go in registered order, whatever the order of the hooks."""
        current = self._steps.get(step)
        if current is None:
            return
        current.events[layer] = event
        while current.next_layer in current.events:
            index = current.next_layer
            current.next_layer += 1
            ready = current.events.pop(index)
            for part in current.parts:
                self._put(_Run(ready, Unit(step, index, part.number), part, first=index == 0 and part.number == 1))

    def catch_up(self, units: Iterable[Unit], event: Event) -> None:
        """The scheduler orders these exchanges again; this rank keeps what it missed."""
        first = True
        for unit in units:
            step = self._steps.get(unit.step)
            if step is not None and 0 <= unit.layer < self._layers and 0 < unit.part <= len(step.parts):
                self._put(_Run(event, unit, step.parts[unit.part - 1], again=True, first=first))
                first = False

    def forward(self, item: object) -> None:
        """To the sink, after everything that was put before."""
        self._put(item)

    def end(self, pushes: Iterable[str]) -> None:
        """The scheduler has done with these pushes; a step without pushes is forgotten."""
        ended = set(pushes)
        for step in list(self._steps.values()):
            step.pushes -= ended
            if not step.pushes:
                del self._steps[step.number]
                self._missed.forget_step(step.number)

    def wanted(self) -> list[Unit]:
        """Exchanges that were missed here and have room now; each is asked for once. A thread may wait a little for the
        slots of the first ones to come back, so it asks for more."""
        ahead = 1 if self._thread is None else 2
        return self._missed.wanted(lambda destination: ahead * self.staging.room(destination), MOST_CATCH_UPS)

    # -- any thread

    def owes(self, push: str) -> bool:
        """Whether something of this push was missed and is still to be exchanged again."""
        return self._missed.owes(push)

    def arrived(self, unit: Unit, slot: int) -> None:
        """What was missed has been staged and offered; until this the push is owed to."""
        self._missed.arrived(unit, slot)

    def forget(self, push: str) -> None:
        """This push has closed or starts over: nothing of what was exchanged for it so far is wanted."""
        self._missed.forget_push(push)

    def stats(self) -> dict[str, int | float]:
        """Counts since the start, and what is held at this moment."""
        return {
            "exchanges": self._made,
            "collectives": self._exchange.collectives,
            "collective_seconds": self._exchange.seconds,
            "exchanged_bytes": self._exchange.nbytes,
            "missed": self._missed.total,
            "missing": len(self._missed),
            "steps": len(self._steps),
            "slots": self.staging.count,
            "slots_taken": self.staging.taken,
            "slots_quarantined": self.staging.quarantined,
        }

    def close(self, timeout: float) -> None:
        """Idempotent. Exchanges that are due are made first, else other ranks would wait for this one; a thread that is
        still inside a collective when the time is over leaves it when the group's timeout or its members' end comes."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.error("thread %s is still inside a collective", self._thread.name)

    # -- the exchange's thread, or the hook's

    def _put(self, item: object) -> None:
        if self._thread is not None:
            self._inbox.put(item)
        elif isinstance(item, _Run):
            with self._device.side_stream(item.event):
                self._make(item)
        else:
            self._sink(item)

    def _run(self) -> None:
        trouble = self._attach()
        while (item := self._inbox.get()) is not None:
            try:
                if isinstance(item, _Run):
                    self._make(item, trouble)
                else:
                    self._sink(item)
            except Exception:  # this thread ends only when it is told to: other ranks wait for it
                log.exception("after an exchange")

    def _attach(self) -> Exception | None:
        try:
            self._device.attach_thread()
        except Exception as failed:
            log.exception("the exchange thread cannot use the device")
            return failed
        return None

    def _make(self, run: _Run, trouble: Exception | None = None) -> None:
        """Take slots, exchange, hand over. Slots are taken first: what finds none is missed, not waited for.

        Whatever fails here, the collective is called and the result handed over, or a push would be sealed without it.
        """
        slots: list[StagingSlot | None] = [None] * len(run.part.rows.plan.slots)
        trouble = trouble or self._broken or self._take_slots(run, slots)
        outcome = self._exchanged(run, slots)
        error = trouble or self._broken or outcome.error
        event = run.event
        try:
            event = self._device.record()
        except Exception as failed:
            log.exception("no event could be recorded behind an exchange")
            error = error or failed
        self._made += 1
        if run.again:
            self._missed.made_again(run.unit)
        self._sink(Staged(event, run.unit, run.part, tuple(slots), outcome.number, outcome.waited, error))
        if trace.enabled():
            facts = {**run.unit._asdict(), "bytes": sum(run.part.rows.send_splits), "waited": outcome.waited}
            trace.emit("exchanged", **facts, again=run.again, ok=error is None)

    def _exchanged(self, run: _Run, slots: Sequence[StagingSlot | None]) -> Outcome:
        if self._broken is None:
            try:
                return self._exchange.run(run.part.rows, run.unit.layer, slots)
            except Exception as failed:
                # The group is of no use from here on: a rank is gone, the collective timed out, or could not be called.
                log.exception("an exchange failed: every regrouped push of this engine fails from now on")
                self._broken = failed
                self._break_off()
        return Outcome(0, self._broken, 0.0)

    def _break_off(self) -> None:
        """This rank comes to no exchange any more: the others must not wait for it until the group's timeout."""
        try:
            self._exchange.break_off()
        except Exception:  # whatever the backend makes of it, this rank's pushes must be failed
            log.exception("the process group could not be broken off: other ranks may wait for its timeout")

    def _take_slots(self, run: _Run, slots: list[StagingSlot | None]) -> Exception | None:
        try:
            if run.first:
                self.staging.new_step()
            for index in range(len(slots)):
                slots[index] = self._slot(run, index)
        except Exception as failed:
            log.exception("a staging slot could not be taken")
            return failed
        return None

    def _slot(self, run: _Run, index: int) -> StagingSlot | None:
        part, unit = run.part, run.unit
        if run.again and not self._missed.waits(unit, index):
            return None
        pushes = [work.push for work in part.pushes(index) if self._alive(work.push, unit.step)]
        if not pushes:
            self._missed.arrived(unit, index)
            return None
        slot = self.staging.take(part.endpoint(index), part.rows.plan.slots[index].nbytes)
        if slot is None:
            self._missed.miss(unit, index, part.endpoint(index), pushes)
        else:
            self._missed.coming(unit, index)
        return slot
