# SPDX-License-Identifier: Apache-2.0
"""Exchanges of one P worker: which layers of which steps are exchanged, in which order, and what could not be staged.

Everything that decides whether a rank takes part comes from the step's metadata, so all ranks call the same collectives
in the same order: steps, layers in registered order, sub-steps. What a rank knows by itself (a failed push, a
destination without a slot) only decides whether it keeps the bytes. Bytes that found no slot are missed; the scheduler
orders the same exchange again (`catch_up`) once there is room.
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
from vllm_ascend_pd.protocol.messages import Endpoint
from vllm_ascend_pd.regroup.exchange import Exchange, ExchangeRows
from vllm_ascend_pd.regroup.staging import Staging, StagingSlot
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
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    """One exchange to be made: all slots, or only those missed before."""

    event: Event
    unit: Unit
    part: SubStep
    only: frozenset[int] | None = None


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
        self._buffer_bytes = exchange.buffer_bytes
        self._lock = threading.Lock()
        self._steps: dict[int, _Step] = {}
        self._missing: dict[Unit, set[int]] = {}
        self._asked: set[Unit] = set()
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
        for cut in sub_steps(self._planner, jobs, self.staging.slot_bytes, self._buffer_bytes, step):
            rows = ExchangeRows.of(self._planner.plan(cut.jobs, cut.rotation))
            parts.append(SubStep(len(parts) + 1, rows, cut.jobs, [works[index] for index in cut.members]))
        with self._lock:
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
                self._put(_Run(ready, Unit(step, index, part.number), part))

    def catch_up(self, units: Iterable[Unit], event: Event) -> None:
        """The scheduler orders these exchanges again; this rank keeps what it missed."""
        for unit in units:
            step = self._steps.get(unit.step)
            if step is None:
                continue
            with self._lock:
                missed = frozenset(self._missing.get(unit, ()))
            self._put(_Run(event, unit, step.parts[unit.part - 1], missed))

    def forward(self, item: object) -> None:
        """To the sink, after everything that was put before."""
        self._put(item)

    def end(self, pushes: Iterable[str]) -> None:
        """The scheduler has done with these pushes; a step without pushes is forgotten."""
        ended = set(pushes)
        with self._lock:
            for step in list(self._steps.values()):
                step.pushes -= ended
                if not step.pushes:
                    del self._steps[step.number]
                    for unit in [unit for unit in self._missing if unit.step == step.number]:
                        del self._missing[unit]
                        self._asked.discard(unit)

    def wanted(self) -> list[Unit]:
        """Exchanges that were missed here and have room now; each is asked for once."""
        found: list[Unit] = []
        with self._lock:
            for unit, slots in self._missing.items():
                step = self._steps.get(unit.step)
                if step is None or unit in self._asked or len(found) >= MOST_CATCH_UPS:
                    continue
                part = step.parts[unit.part - 1]
                if all(self.staging.has_room(part.endpoint(slot)) for slot in slots):
                    self._asked.add(unit)
                    found.append(unit)
        return found

    def owes(self, push: str) -> bool:
        """Whether something of this push was missed and is still to be exchanged again."""
        with self._lock:
            for unit, slots in self._missing.items():
                step = self._steps.get(unit.step)
                if step is not None and any(
                    work.push == push for slot in slots for work in step.parts[unit.part - 1].pushes(slot)
                ):
                    return True
        return False

    def arrived(self, unit: Unit, slot: int) -> None:
        """What was missed has been staged and offered; until this the push is owed to."""
        with self._lock:
            missed = self._missing.get(unit)
            if missed is not None:
                missed.discard(slot)
                if not missed:
                    del self._missing[unit]
                    self._asked.discard(unit)

    def close(self, timeout: float) -> None:
        """Idempotent. A thread that is inside a collective leaves it by the group's timeout at the latest."""
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
        self._device.attach_thread()
        while (item := self._inbox.get()) is not None:
            if isinstance(item, _Run):
                self._make(item)
            else:
                self._sink(item)

    def _make(self, run: _Run) -> None:
        """Take slots, exchange, hand over. Slots are taken first: what finds none is missed, not waited for."""
        slots = tuple(self._slot(run, index) for index in range(len(run.part.rows.plan.slots)))
        error = self._broken
        if error is None:
            try:
                error = self._exchange.run(run.part.rows, run.unit.layer, slots)
            except RuntimeError as failed:
                # The group is unusable from here on: a rank is gone, or the collective timed out.
                log.exception("an exchange failed: every regrouped push of this worker fails from now on")
                self._broken = error = failed
        self._sink(Staged(self._device.record(), run.unit, run.part, slots, error))

    def _slot(self, run: _Run, index: int) -> StagingSlot | None:
        part, unit = run.part, run.unit
        if run.only is not None and index not in run.only:
            return None
        if not any(self._alive(work.push, unit.step) for work in part.pushes(index)):
            return None
        slot = self.staging.take(part.endpoint(index), part.rows.plan.slots[index].nbytes)
        if slot is None:
            self._miss(unit, index)
        return slot

    def _miss(self, unit: Unit, index: int) -> None:
        with self._lock:
            self._missing.setdefault(unit, set()).add(index)
            self._asked.discard(unit)
