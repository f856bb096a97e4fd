# SPDX-License-Identifier: Apache-2.0
"""Exchanges of one P worker: what is exchanged in which step, for which slots, and what could not be staged.

Everything that decides whether a rank takes part comes from the step's metadata, so all ranks call the same collectives
in the same order: steps, layers in registered order, sub-steps. What a rank knows by itself (a failed push, a
destination without a slot) only decides whether it keeps the bytes. Bytes that found no slot are missed; the scheduler
orders the same exchange again (`again`) once there is room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job
from vllm_ascend_pd.geometry.regroup import RegroupPlan, RegroupPlanner, Room
from vllm_ascend_pd.geometry.substeps import sub_steps
from vllm_ascend_pd.prefill.core.missed import Missed
from vllm_ascend_pd.prefill.core.push import Push, Unit
from vllm_ascend_pd.protocol.messages import Endpoint
from vllm_ascend_pd.regroup.staging import Staging, StagingSlot
from vllm_ascend_pd.shared.event import Event

MOST_CATCH_UPS = 64  # asked for in one step


@dataclass(slots=True, eq=False)
class SubStep:
    """One exchange of every layer: its plan, and the push behind each of its jobs."""

    number: int  # from 1; 0 is what is pushed directly
    plan: RegroupPlan
    jobs: list[Job]
    members: list[Push]
    rows: Any = None  # the plan, made ready for the device by whoever runs the exchange

    def endpoint(self, slot: int) -> Endpoint:
        planned = self.plan.slots[slot]
        return self.members[next(iter(planned.writes))].endpoint(planned.d_rank)

    def pushes(self, slot: int) -> list[Push]:
        return [self.members[member] for member in self.plan.slots[slot].writes]


@dataclass(frozen=True, slots=True)
class Run:
    """One exchange to be made: all slots, or only those missed before."""

    unit: Unit
    part: SubStep
    again: bool = False
    first: bool = False  # of what a step's metadata ordered: destinations are waited for anew


@dataclass(frozen=True, slots=True)
class Staged:
    """An exchange is done once `event` is: these slots hold what this rank owns of it."""

    event: Event
    run: Run
    slots: tuple[StagingSlot | None, ...]
    number: int = 0  # the tag that its bytes carry
    waited: float = 0.0  # seconds inside the collective
    error: Exception | None = None

    def strangers(self) -> list[list[int]]:
        """By slot: the ranks that did not give what they should have to it."""
        rows = self.run.part.rows.slots
        looked = self.error is None
        return [
            one.strangers(slot, self.number) if looked and slot is not None else []
            for one, slot in zip(rows, self.slots, strict=True)
        ]

    def facts(self) -> dict[str, Any]:
        """For the trace."""
        part = self.run.part
        filled = [planned for planned, slot in zip(part.plan.slots, self.slots, strict=True) if slot]
        transfers = {part.members[member].transfer for slot in filled for member in slot.writes}
        return {
            **self.run.unit._asdict(),
            "bytes": sum(slot.nbytes for slot in filled),
            "slots": len(filled),
            "transfers": sorted(transfers),
        }


@dataclass(slots=True)
class _Step:
    parts: list[SubStep]
    pushes: set[Push]  # of which some are not over


@dataclass(slots=True)
class Exchanges:
    """`room` is what slots and buffers of this engine hold."""

    planner: RegroupPlanner
    layers: int
    staging: Staging
    room: Room
    count: int = 0  # made
    missed: Missed = field(default_factory=Missed)
    _steps: dict[int, _Step] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: CacheGeometry, rank: int, layers: int, staging: Staging, room: Room) -> Exchanges:
        return cls(RegroupPlanner(engine, rank), layers, staging, room)

    def plan(self, step: int, pushes: Sequence[Push], jobs: Sequence[Job]) -> list[SubStep]:
        """Plan a step's exchanges. `pushes` and `jobs` must be the same on every rank."""
        parts: list[SubStep] = []
        for cut in sub_steps(self.planner, jobs, self.room.slot, self.room.send, step):
            plan = self.planner.plan(cut.jobs, cut.rotation)
            parts.append(SubStep(len(parts) + 1, plan, cut.jobs, [pushes[index] for index in cut.members]))
        self._steps[step] = _Step(parts, set(pushes))
        return parts

    def again(self, units: Iterable[Unit]) -> list[Run]:
        """The scheduler orders these exchanges again; this rank keeps what it missed."""
        runs: list[Run] = []
        for unit in units:
            step = self._steps.get(unit.step)
            if step is not None and 0 <= unit.layer < self.layers and 0 < unit.part <= len(step.parts):
                runs.append(Run(unit, step.parts[unit.part - 1], again=True, first=not runs))
        return runs

    def over(self, pushes: Iterable[Push]) -> None:
        """The scheduler has done with these pushes; a step without pushes is forgotten."""
        ended = set(pushes)
        for number, step in list(self._steps.items()):
            step.pushes -= ended
            if not step.pushes:
                del self._steps[number]
                self.missed.forget_step(number)

    def wanted(self) -> list[Unit]:
        """Exchanges that were missed here and have room now; each is asked for once. A thread may wait a little for the
        slots of the first ones to come back, so it asks for more."""
        ahead = 2 if self.staging.waits else 1
        return self.missed.wanted(lambda destination: ahead * self.staging.room(destination), MOST_CATCH_UPS)

    def patience(self, now: float, run: Run, index: int) -> float:
        """For how many seconds to wait before `slot` is asked."""
        return self.staging.patience(now, run.part.endpoint(index)) if self._takers(run, index) else 0.0

    def slot(self, run: Run, index: int) -> StagingSlot | None:
        """A slot for what this exchange brings, if somebody wants it. Taken first: what finds none is missed."""
        share, takers = (run.unit, index), self._takers(run, index)
        if not takers:
            if not run.again or self.missed.waits(share):
                self.missed.arrived(share)
            return None
        destination = run.part.endpoint(index)
        slot = self.staging.take(destination, run.part.plan.slots[index].nbytes)
        if slot is None:
            self.missed.miss(share, destination, takers)
        else:
            self.missed.coming(share)
        return slot

    def made(self, run: Run) -> None:
        self.count += 1
        if run.again:
            self.missed.made_again(run.unit)

    def _takers(self, run: Run, index: int) -> list[Push]:
        if run.again and not self.missed.waits((run.unit, index)):
            return []
        return [push for push in run.part.pushes(index) if push.wants(run.unit.step)]

    def stats(self) -> dict[str, int]:
        return {
            "exchanges": self.count,
            "missed": self.missed.total,
            "missing": len(self.missed),
            "steps": len(self._steps),
            "slots": self.staging.count,
            "slots_taken": self.staging.taken,
        }
