# SPDX-License-Identifier: Apache-2.0
"""Plans of a P worker's steps: what the layers of a step will push directly, and which exchanges they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_ascend_pd.config import RegroupConfig
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, StepPlanner, push_range
from vllm_ascend_pd.geometry.regroup import Room
from vllm_ascend_pd.metadata import MissedExchange, PrefillStep, PushSlice, PushStart
from vllm_ascend_pd.prefill.worker.core.exchanges import Exchanges, PlannedExchange, Run
from vllm_ascend_pd.prefill.worker.core.orders import OrderBook
from vllm_ascend_pd.prefill.worker.core.push import Push, Unit
from vllm_ascend_pd.prefill.worker.core.register import PushRegister
from vllm_ascend_pd.protocol import actions as act
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Endpoint


@dataclass(slots=True, eq=False)
class StepPlan:
    """Plan of a step: what its layers will push, and the exchanges that are made again before them."""

    number: int
    direct: list[Push] = field(default_factory=list)  # with layers that go without an exchange
    exchanges: list[PlannedExchange] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)  # of which this step computes tokens
    final: list[Push] = field(default_factory=list)  # those of which it computes the last tokens
    catch_ups: list[Run] = field(default_factory=list)
    before: StepPlan | None = None  # for what earlier steps have computed


class PushPlans:
    """Planner of one worker's steps. `room` is the capacity for exchanges, None without them."""

    # The simulator replaces these to run without one of the rules.
    orders_type = OrderBook
    planner_type = StepPlanner

    def __init__(self, register: PushRegister, config: RegroupConfig, cache: CacheGeometry, room: Room | None) -> None:
        self._register, self._config, self._cache, self._room = register, config, cache, room
        self._orders: OrderBook | None = None
        self._planners: list[StepPlanner] = []  # by kind of layer
        self._first_layer = 0  # of this stage, counted through the whole engine

    def begin(self, now: float, step: PrefillStep) -> StepPlan:
        """Take in a step's metadata and plan what its layers will push."""
        register = self._register
        if self._orders is None and step.geometry is not None:
            self._set_geometry(step.geometry)
        for abort in step.aborts:
            register.abort(now, abort.push, abort.failure)
        for start in step.starts:
            self._start(now, start)
        before = self._plan(now, step.before, step.computed) if step.computed else None
        plan = self._plan(now, step.number, step.slices) if step.slices else StepPlan(step.number)
        plan.before = before
        retired = register.closings.retire(step.ended, step.freed)
        if register.exchanges is not None:
            register.exchanges.retire(retired)
            # Layers are numbered through the whole engine here; a stage makes only its own exchanges again.
            units = [Unit(number, layer - self._first_layer, sub_step) for number, layer, sub_step in step.catch_ups]
            plan.catch_ups = register.exchanges.catch_ups(self._due(units))
            if plan.catch_ups and register.site.contributor.rank == 0:  # one rank counts for its stage
                register.measure("exchanges_repeated", len(plan.catch_ups))
        return plan

    def take_missed(self) -> list[MissedExchange]:
        """Return exchanges that this worker wants to be made again."""
        exchanges = self._register.exchanges
        wanted = exchanges.wanted() if exchanges is not None else []
        return [(unit.step, unit.layer + self._first_layer, unit.sub_step) for unit in wanted]

    def _set_geometry(self, geometry: CacheGeometry) -> None:
        register, me = self._register, self._register.site.contributor
        self._first_layer = geometry.first_layer(me.stage)
        self._orders = self.orders_type(geometry, self._cache, me, self._config, self._room)
        self._planners = [self.planner_type(kind, me.rank) for kind in geometry.kinds]
        if register.staging is not None and self._room is not None:
            register.exchanges = Exchanges.of(geometry, self._cache, me.rank, register.staging, self._room)
        register.sender.describe(register.site.model, geometry)

    def _start(self, now: float, start: PushStart) -> None:
        if self._orders is None:
            raise LocalProtocolError("a push was scheduled before the engine's geometry was known")
        register = self._register
        push, differences = self._orders.take(start)
        register.add(push, request_ended=start.ended)
        register.do(now, register.sender.open(now, push))
        if differences:
            register.abort(now, push.name, Failure("PD-GEO-001", str(differences[0])))
        if register.dead:
            register.abort(now, push.name, Failure("PD-XFER-003", f"the writer died: {register.dead}"))

    def _plan(self, now: float, number: int, slices: Iterable[PushSlice]) -> StepPlan:
        """Plan a step once for all its pushes; its layers use the plans as they are computed."""
        planned, register = StepPlan(number), self._register
        direct: dict[int, list[tuple[Push, int, Job]]] = {}  # by P's kind of layer
        exchanged: dict[int, list[tuple[Push, Job]]] = {}
        # A D that has started again on its ports, with other layers, is another one.
        instances: dict[tuple[tuple[Endpoint, ...], CacheGeometry], int] = {}
        for push_slice in slices:
            push = register.records.get(push_slice.push)
            if push is None or not self._takes_part(push):
                continue
            push.extend(number, push_slice)
            planned.pushes.append(push)
            if push_slice.final:
                planned.final.append(push)
            d_engine = push.reservation.endpoints, push.reservation.geometry
            tokens = 0
            for index, pair in enumerate(push.pairings):
                lo, hi = self._leaving(push, index, push_slice)
                tokens = max(tokens, hi - lo)
                if hi == lo:
                    continue
                if push.lost(index, lo, hi):  # the same on every rank: all have the same blocks
                    what = f"some of tokens [{lo}, {hi}), of {pair.p.group}" if not pair.p.group.stateful else "a state"
                    register.abort(now, push.name, Failure("PD-XFER-002", f"prefill keeps no block for {what}"))
                    continue
                job = push.job(index, lo, hi, instances.setdefault(d_engine, len(instances)))
                if index in push.exchanged:
                    exchanged.setdefault(pair.kind, []).append((push, job))
                elif not register.dead:  # else nothing would use the plan
                    direct.setdefault(pair.kind, []).append((push, index, job))
            facts = {"step": number, "before": push_slice.before, "after": push_slice.after, "tokens": tokens}
            register.effects.append(act.Note("step", {"transfer": str(push.transfer), **facts}))
        for kind, work in sorted(direct.items()):
            plans = self._planners[kind].plan([job for _, _, job in work], number)
            for (push, index, _), plan in zip(work, plans, strict=True):
                push.plans[number, index] = plan
        planned.direct = list(dict.fromkeys(push for work in direct.values() for push, _, _ in work))
        if exchanged and register.exchanges is not None:
            planned.exchanges = register.exchanges.plan(number, exchanged)
        return planned

    def _leaving(self, push: Push, pairing: int, push_slice: PushSlice) -> tuple[int, int]:
        """Return what leaves of one pairing's layers in a step: tokens or entries [lo, hi).

        A state leaves once, at the end.
        """
        d = push.pairings[pairing].d
        if d.group.stateful:
            return 0, int(push_slice.final)
        end, before, after = (
            token // d.group.per_entry for token in (push.reservation.end, push_slice.before, push_slice.after)
        )
        return push_range(push.firsts[pairing], end, before, after, d.covers)

    # `_takes_part` and `_due` are rules of their own because the simulator's mutations leave each of them out.

    def _takes_part(self, push: Push) -> bool:
        """Return whether the push is planned.

        This must not depend on what only this rank knows of it: ranks divide the tokens of all jobs among themselves,
        so all ranks must plan the same jobs.
        """
        return bool(push.pairings)

    def _due(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return which of the exchanges ordered again to make: all, because other ranks need this rank's part."""
        return units
