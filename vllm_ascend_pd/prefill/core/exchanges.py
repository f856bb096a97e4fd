# SPDX-License-Identifier: Apache-2.0
"""Exchanges of one P worker: plans over paged blocks that are made at a step's order, in every layer.

Everything that decides whether a rank takes part comes from the step's metadata, so all ranks call the same collectives
in the same order: steps, layers in registered order, sub-steps. Most are ordered by the step that computes their tokens.
What a rank knows by itself (a failed push, a destination without a slot) only decides whether it keeps the bytes. Bytes
that found no slot are still owed: the scheduler orders the same exchange again (`again`) once there is room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job
from vllm_ascend_pd.geometry.regroup import RegroupPlan, RegroupPlanner, Room, Slot
from vllm_ascend_pd.geometry.substeps import sub_steps
from vllm_ascend_pd.prefill.core.missed import Missed
from vllm_ascend_pd.prefill.core.push import Push, Share, Unit
from vllm_ascend_pd.regroup.staging import Staging, StagingSlot
from vllm_ascend_pd.shared.event import Event

MOST_CATCH_UPS = 64  # asked for in one step


@dataclass(slots=True, eq=False)
class SubStep:
    """One exchange of every layer of a kind: its plan, the push behind each of its jobs, and what of it is owed."""

    number: int  # from 1; 0 is what is pushed directly
    layers: tuple[int, ...]  # own ones
    plan: RegroupPlan
    jobs: list[Job]
    members: list[Push]
    shares: list[Share]  # one for each of the plan's slots
    rows: Any = None  # the plan, made ready for the device by whoever runs the exchange


@dataclass(frozen=True, slots=True)
class Run:
    """One exchange to be made, for everything of it that is not here."""

    unit: Unit
    part: SubStep
    first: bool = False  # of what a step's metadata ordered: destinations are waited for anew
    again: bool = False  # for the trace: by the order of a later step


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

    planners: list[RegroupPlanner]  # by kind of layer
    layers: list[tuple[int, ...]]  # own ones of each kind
    staging: Staging
    room: Room
    count: int = 0  # made
    missed: Missed = field(default_factory=Missed)
    _steps: dict[int, _Step] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: CacheGeometry, own: CacheGeometry, rank: int, staging: Staging, room: Room) -> Exchanges:
        place = {name: index for index, name in enumerate(own.layers)}
        layers = [tuple(place[name] for name in kind.layers if name in place) for kind in engine.kinds]
        return cls([RegroupPlanner(kind, rank) for kind in engine.kinds], layers, staging, room)

    def plan(self, step: int, work: Mapping[int, Sequence[tuple[Push, Job]]]) -> list[SubStep]:
        """Plan a step's exchanges, by kind of layer. `work` must be the same on every rank."""
        parts: list[SubStep] = []
        for kind, some in sorted(work.items()):
            if not self.layers[kind]:
                continue  # other stages have them
            planner, pushes = self.planners[kind], [push for push, _ in some]
            for cut in sub_steps(planner, [job for _, job in some], self.room.slot, self.room.send, step):
                plan, number = planner.plan(cut.jobs, cut.rotation), len(parts) + 1
                members = [pushes[index] for index in cut.members]
                shares = [self._share(step, number, kind, slot, members) for slot in plan.slots]
                parts.append(SubStep(number, self.layers[kind], plan, cut.jobs, members, shares))
        self._steps[step] = _Step(parts, {push for some in work.values() for push, _ in some})
        return parts

    def _share(self, step: int, part: int, kind: int, slot: Slot, members: Sequence[Push]) -> Share:
        theirs = [members[member] for member in slot.writes]
        wanting = [push for push in theirs if push.live]
        one = theirs[0]  # they go to one D: all want the same
        layers = {layer: False for layer in self.layers[kind] if one.wants(layer)}
        destinations = {layer: one.endpoint(one.worker(layer, slot.d_rank)) for layer in layers}
        share = Share(step, part, wanting, destinations, layers)
        for push in wanting:
            push.owed.add(share)
        return share

    def again(self, units: Iterable[Unit]) -> list[Run]:
        """The scheduler orders these exchanges again."""
        runs: list[Run] = []
        for unit in units:
            step = self._steps.get(unit.step)
            if step is not None and 0 < unit.part <= len(step.parts):
                part = step.parts[unit.part - 1]
                if unit.layer in part.layers:
                    runs.append(Run(unit, part, first=not runs, again=True))
        return runs

    def over(self, pushes: Iterable[Push]) -> None:
        """The scheduler has done with these pushes; a step without pushes is forgotten."""
        ended = set(pushes)
        for push in ended:
            self.forget(push)
        for number, step in list(self._steps.items()):
            step.pushes -= ended
            if not step.pushes:
                del self._steps[number]
                self.missed.forget_step(number)

    def forget(self, push: Push) -> None:
        """Nothing that exchanges bring is wanted for it any more: it has failed, or it starts over."""
        for share in push.owed:
            share.pushes.remove(push)
            if not share.pushes:
                for layer in share.layers:
                    self.missed.drop(share, layer)
        push.owed.clear()

    def wanted(self) -> list[Unit]:
        """Exchanges that were missed here and have room now; each is asked for once. A thread may wait a little for the
        slots of the first ones to come back, so it asks for more."""
        ahead = 2 if self.staging.waits else 1
        return self.missed.wanted(lambda destination: ahead * self.staging.room(destination), MOST_CATCH_UPS)

    def patience(self, now: float, run: Run, index: int) -> float:
        """For how many seconds to wait before `slot` is asked."""
        share, layer = run.part.shares[index], run.unit.layer
        return self.staging.patience(now, share.destinations[layer]) if share.wants(layer) else 0.0

    def slot(self, run: Run, index: int) -> StagingSlot | None:
        """A slot for what this exchange brings, if somebody wants it. Taken first: what finds none is missed."""
        share, layer = run.part.shares[index], run.unit.layer
        if not share.wants(layer):
            return None
        slot = self.staging.take(share.destinations[layer], run.part.plan.slots[index].nbytes)
        if slot is None:
            self.missed.miss(share, layer)
        else:
            share.layers[layer] = True
            self.missed.drop(share, layer)
        return slot

    def made(self, run: Run) -> None:
        self.count += 1
        self.missed.made(run.unit)

    def arrived(self, share: Share, layer: int) -> None:
        """What it brought was offered."""
        del share.layers[layer]
        if not share.layers:
            for push in share.pushes:
                push.owed.discard(share)

    def stats(self) -> dict[str, int]:
        return {
            "exchanges": self.count,
            "missed": self.missed.total,
            "missing": len(self.missed),
            "steps": len(self._steps),
            "slots": self.staging.count,
            "slots_taken": self.staging.taken,
        }
