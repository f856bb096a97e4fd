# SPDX-License-Identifier: Apache-2.0
"""Exchanges of one P worker: planned over paged blocks, ordered by a step, and made in every layer.

Everything that decides whether a rank takes part comes from the step's metadata. So all ranks call the same collectives
in the same order: by step, by layer in registered order, by sub-step. Most exchanges are ordered by the step that
computes their tokens. What only one rank knows (a failed push, a destination without a slot) only decides whether that
rank keeps the bytes. Bytes that found no slot are still owed: the scheduler orders the same exchange again once there
is room (`catch_ups`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job
from vllm_ascend_pd.geometry.regroup import RegroupPlan, RegroupPlanner, Room, Slot
from vllm_ascend_pd.geometry.substeps import sub_steps
from vllm_ascend_pd.prefill.worker.core.push import Push, Share, Unit
from vllm_ascend_pd.regroup.core.staging import Staging, StagingSlot
from vllm_ascend_pd.shared.event import Event

MAX_CATCH_UPS = 64  # asked for in one step


@dataclass(slots=True, eq=False)
class PlannedExchange:
    """One exchange, made in every layer of a kind: its plan, the push of each of its jobs, and the shares owed."""

    number: int  # from 1; 0 is what is pushed directly
    layers: tuple[int, ...]  # this worker's
    plan: RegroupPlan
    jobs: list[Job]
    members: list[Push]
    shares: list[Share]  # one for each of the plan's slots
    rows: Any = None  # the plan, prepared for the device (`Exchanger.prepare`)


@dataclass(frozen=True, slots=True)
class Run:
    """One exchange to make in one layer, for all of it that is not here yet."""

    unit: Unit
    exchange: PlannedExchange
    first: bool = False  # the first one of a step: the wait for slots starts anew
    catch_up: bool = False  # for the trace: ordered again by a later step


@dataclass(frozen=True, slots=True)
class Staged:
    """An exchange that is done once `event` is. Its slots then hold what this rank owns of it."""

    event: Event
    run: Run
    slots: tuple[StagingSlot | None, ...]
    number: int = 0  # the tag that its bytes carry
    waited: float = 0.0  # seconds inside the collective
    error: Exception | None = None

    def absent(self) -> list[list[int]]:
        """Return, by slot, the ranks that did not send their part of it."""
        rows = self.run.exchange.rows.slots
        looked = self.error is None
        return [
            one.absent(slot, self.number) if looked and slot is not None else []
            for one, slot in zip(rows, self.slots, strict=True)
        ]

    def facts(self) -> dict[str, Any]:
        """Facts for the trace."""
        exchange = self.run.exchange
        filled = [planned for planned, slot in zip(exchange.plan.slots, self.slots, strict=True) if slot]
        transfers = {str(exchange.members[member].transfer) for slot in filled for member in slot.writes}
        return {
            **self.run.unit._asdict(),
            "bytes": sum(slot.nbytes for slot in filled),
            "slots": len(filled),
            "transfers": sorted(transfers),
        }


@dataclass(slots=True)
class Missed:
    """Layers of shares for which a worker had no staging slot, until another exchange finds one for them."""

    waiting: dict[Hashable, dict[tuple[Share, int], None]] = field(default_factory=dict)  # by destination, oldest first
    _asked: set[Unit] = field(default_factory=set)

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def miss(self, share: Share, layer: int) -> None:
        """Record that there was no slot, for the first time or again."""
        self.waiting.setdefault(share.destinations[layer], {})[share, layer] = None

    def drop(self, share: Share, layer: int) -> None:
        """Remove a layer for which a slot was found, or that no push wants any more."""
        destination = share.destinations[layer]
        waiting = self.waiting.get(destination)
        if waiting is not None:
            waiting.pop((share, layer), None)
            if not waiting:
                del self.waiting[destination]

    def wanted(self, room: Callable[[Hashable], int], max_units: int) -> list[Unit]:
        """Return exchanges to ask for: of each destination with room the oldest, up to `max_units`, each once."""
        asked: dict[Unit, None] = {}
        for destination, waiting in self.waiting.items():
            left = room(destination)
            oldest = (share.unit(layer) for (share, layer), _ in zip(waiting, range(2 * max_units), strict=False))
            for unit in dict.fromkeys(oldest):
                if left <= 0 or len(asked) >= max_units:
                    break
                left -= 1
                if unit not in self._asked:
                    asked[unit] = None
        self._asked.update(asked)
        return list(asked)

    def made(self, unit: Unit) -> None:
        """Record that an exchange was made: what was missed again may be asked for again."""
        self._asked.discard(unit)

    def forget_step(self, step: int) -> None:
        self._asked = {unit for unit in self._asked if unit.step != step}


@dataclass(slots=True)
class _StepExchanges:
    exchanges: list[PlannedExchange]
    pushes: set[Push]  # that the scheduler is not done with


@dataclass(slots=True)
class Exchanges:
    """Exchanges of one worker. `room` is the capacity of this engine's slots and buffers."""

    planners: list[RegroupPlanner]  # by kind of layer
    layers: list[tuple[int, ...]]  # this worker's, of each kind
    staging: Staging
    room: Room
    count: int = 0  # of exchanges made
    missed: Missed = field(default_factory=Missed)
    steps: dict[int, _StepExchanges] = field(default_factory=dict)

    @classmethod
    def of(cls, geometry: CacheGeometry, cache: CacheGeometry, rank: int, staging: Staging, room: Room) -> Exchanges:
        place = {name: index for index, name in enumerate(cache.layers)}
        layers = [tuple(place[name] for name in kind.layers if name in place) for kind in geometry.kinds]
        return cls([RegroupPlanner(kind, rank) for kind in geometry.kinds], layers, staging, room)

    def plan(self, step: int, work: Mapping[int, Sequence[tuple[Push, Job]]]) -> list[PlannedExchange]:
        """Plan a step's exchanges, by kind of layer. `work` must be the same on every rank."""
        planned: list[PlannedExchange] = []
        for kind, some in sorted(work.items()):
            if not self.layers[kind]:
                continue  # other stages have these layers
            planner, pushes = self.planners[kind], [push for push, _ in some]
            for cut in sub_steps(planner, [job for _, job in some], self.room.slot, self.room.send, step):
                plan, number = planner.plan(cut.jobs, cut.step_number), len(planned) + 1
                members = [pushes[index] for index in cut.members]
                shares = [self._share(step, number, kind, slot, members) for slot in plan.slots]
                planned.append(PlannedExchange(number, self.layers[kind], plan, cut.jobs, members, shares))
        self.steps[step] = _StepExchanges(planned, {push for some in work.values() for push, _ in some})
        return planned

    def _share(self, step: int, sub_step: int, kind: int, slot: Slot, members: Sequence[Push]) -> Share:
        theirs = [members[member] for member in slot.writes]
        wanting = [push for push in theirs if push.live]
        one = theirs[0]  # all go to one D engine and want the same layers
        layers = {layer: False for layer in self.layers[kind] if one.wants(layer)}
        destinations = {layer: one.endpoint(one.worker(layer, slot.d_rank)) for layer in layers}
        share = Share(step, sub_step, wanting, destinations, layers)
        for push in wanting:
            push.owed.add(share)
        return share

    def catch_ups(self, units: Iterable[Unit]) -> list[Run]:
        """Return the runs of exchanges that the scheduler orders again."""
        runs: list[Run] = []
        for unit in units:
            step = self.steps.get(unit.step)
            if step is not None and 0 < unit.sub_step <= len(step.exchanges):
                exchange = step.exchanges[unit.sub_step - 1]
                if unit.layer in exchange.layers:
                    runs.append(Run(unit, exchange, first=not runs, catch_up=True))
        return runs

    def retire(self, pushes: Iterable[Push]) -> None:
        """Forget pushes that the scheduler is done with, and steps that have no push left."""
        ended = set(pushes)
        for push in ended:
            self.forget(push)
        for number, step in list(self.steps.items()):
            step.pushes -= ended
            if not step.pushes:
                del self.steps[number]
                self.missed.forget_step(number)

    def forget(self, push: Push) -> None:
        """Drop all that exchanges owe a push, which has failed or starts over."""
        for share in push.owed:
            share.pushes.remove(push)
            if not share.pushes:
                for layer in share.layers:
                    self.missed.drop(share, layer)
        push.owed.clear()

    def wanted(self) -> list[Unit]:
        """Return exchanges that were missed here and have room now; each is asked for once.

        Where an exchange can wait for slots to come back, twice as many are asked for as have room now.
        """
        ahead = 2 if self.staging.waits else 1
        return self.missed.wanted(lambda destination: ahead * self.staging.room(destination), MAX_CATCH_UPS)

    def wait_left(self, now: float, run: Run, index: int) -> float:
        """Return for how many seconds to wait before `slot` is called."""
        share, layer = run.exchange.shares[index], run.unit.layer
        return self.staging.wait_left(now, share.destinations[layer]) if share.wants(layer) else 0.0

    def slot(self, run: Run, index: int) -> StagingSlot | None:
        """Take a slot for what this exchange will bring, if a push wants it. Without a slot it counts as missed."""
        share, layer = run.exchange.shares[index], run.unit.layer
        if not share.wants(layer):
            return None
        slot = self.staging.take(share.destinations[layer], run.exchange.plan.slots[index].nbytes)
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
        """Record that a layer of a share has arrived. A share with no layer left is no longer owed."""
        del share.layers[layer]
        if not share.layers:
            for push in share.pushes:
                push.owed.discard(share)
