# SPDX-License-Identifier: Apache-2.0
"""All pushes of one P worker as one machine: events in, effects out.

It plans steps, offers computed and staged bytes to the protocol's machine, seals, turns claims into batches, and keeps
track of pushes that have closed. `now` is an argument; the caller holds its own lock, takes the effects, and acts on
them once the lock is free. Nothing here waits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.errors import LocalProtocolError, PdError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, StepPlanner, push_range
from vllm_ascend_pd.geometry.regroup import Room
from vllm_ascend_pd.metadata import MissedExchange, PrefillStep, PushSlice, PushStart
from vllm_ascend_pd.prefill.worker.core.batches import Bases, Batch, Triples, grouped, joined, spans_of, staged, unit_of
from vllm_ascend_pd.prefill.worker.core.exchanges import Exchanges, PlannedExchange, Run, Staged
from vllm_ascend_pd.prefill.worker.core.orders import OrderBook
from vllm_ascend_pd.prefill.worker.core.push import DirectWrites, Push, SlotShare, Unit
from vllm_ascend_pd.protocol import actions as act
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Contributor, Endpoint
from vllm_ascend_pd.protocol.messages import Message
from vllm_ascend_pd.protocol.push import Claim, Sender
from vllm_ascend_pd.regroup.core.staging import Staging, StagingSlot
from vllm_ascend_pd.transport.base import WriteState

log = logging.getLogger(__name__)

IN_FLIGHT = 2  # batches per destination: one on the wire, one behind it
MAX_CHARACTERS = 200  # characters of another library's error that are sent to D

Sums = Mapping[int, tuple[int, ...]]  # checksums of each component, by member of an exchange


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A value for the metric of that name."""

    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class Writable:
    """Request that the writer looks again: something may have become writable."""


Effect: TypeAlias = act.Action | MetricValue | Writable


@dataclass(frozen=True, slots=True)
class PushSite:
    """Identity of this worker."""

    incarnation: str
    contributor: Contributor
    model: str

    @property
    def leads(self) -> bool:
        """True for the one worker that reports the times of a push for all."""
        return self.contributor == Contributor(0, 0)


@dataclass(slots=True)
class StepPlan:
    """Plan of a step: what its layers will push, and the exchanges that are made again before them."""

    number: int
    direct: bool = False
    exchanges: list[PlannedExchange] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)  # of which this step computes tokens
    final: list[Push] = field(default_factory=list)  # those of which it computes the last tokens
    again: list[Run] = field(default_factory=list)
    before: StepPlan | None = None  # for what earlier steps have computed


class Pushes:
    """Pushes of one worker. `staging` and `room` are for exchanges, else None."""

    # The simulator replaces these to run without one of the rules.
    sender_type = Sender
    orders_type = OrderBook
    planner_type = StepPlanner

    def __init__(
        self,
        config: PushConfig,
        site: PushSite,
        own: CacheGeometry,
        bases: Bases,
        staging: Staging | None = None,
        room: Room | None = None,
        tracing: Callable[[], bool] = lambda: True,
    ) -> None:
        self._config, self._site, self._own, self._bases = config, site, own, bases
        self._staging, self._room = staging, room
        self._tracing = tracing  # whether the notes that cost time are read
        self._pushes: dict[str, Push] = {}
        self._reported_to: dict[str, Push] = {}  # by request, until the request and the push have both ended
        self._ended: set[str] = set()  # requests that vLLM has finished, not reported yet
        self._freed: set[str] = set()  # requests that were held and never pushed, not reported yet
        self._failures: list[tuple[str, str]] = []  # transfer and code, not reported to the scheduler yet
        self._preempted: list[str] = []  # pushes that are being drained
        self._drained_by = 0.0  # at the latest
        self._direct: dict[int, list[Push]] = {}  # by step: pushes with layers that go without an exchange
        self._effects: list[Effect] = []
        self._sender: Sender | None = None
        self._planners: list[StepPlanner] = []  # by kind of layer
        self._orders: OrderBook | None = None
        self._first_layer = 0  # of this stage, counted through the whole engine
        self.exchanges: Exchanges | None = None
        self.dead = ""  # why nothing can be written any more

    def take_effects(self) -> list[Effect]:
        """Return the effects, in order, each once."""
        effects, self._effects = self._effects, []
        return effects

    # -- the engine's steps

    def begin(self, now: float, step: PrefillStep) -> StepPlan:
        """Take in a step's metadata and plan what its layers will push."""
        if self._sender is None and step.geometry is not None:
            self._set_geometry(step.geometry)
        for abort in step.aborts:
            self.abort(now, abort.push, abort.code, abort.detail)
        for start in step.starts:
            self._start(now, start)
        before = self._plan(now, step.before, step.computed) if step.computed else None
        plan = self._plan(now, step.number, step.slices) if step.slices else StepPlan(step.number)
        plan.before = before
        self._freed.update(step.freed)
        over = self._named(step.ended)
        for push in over:
            push.over = True
            self._stop_reporting(push)
            self._forget_if_done(push)
        if self.exchanges is not None:
            self.exchanges.over(over)
            # Layers are numbered through the whole engine here; a stage makes only its own exchanges again.
            units = [Unit(number, layer - self._first_layer, sub_step) for number, layer, sub_step in step.catch_ups]
            plan.again = self.exchanges.again(self._due(units))
            if plan.again and self._site.contributor.rank == 0:  # one rank counts for its stage
                self._effects.append(MetricValue("exchanges_repeated", len(plan.again)))
        return plan

    def preempt(self, now: float, names: Iterable[str]) -> None:
        """Submit nothing more of these pushes until they start over: their blocks will be overwritten."""
        self._preempted, self._drained_by = list(names), now + self._config.timers.preempt_drain_s
        for push in self._open(self._preempted):
            push.paused = True

    def drain(self, now: float) -> float:
        """Return for how many seconds to wait, at most, for writes that read preempted blocks; then call again.

        At 0 the pushes have been restarted or failed, and their blocks may be overwritten.
        """
        left = self._drained_by - now
        if left > 0 and any(push.out for push in self._open(self._preempted)):
            return left
        names, self._preempted = self._preempted, []
        self._start_over(now, names)
        return 0.0

    def _start_over(self, now: float, names: Iterable[str]) -> None:
        """Restart pushes whose blocks are lost now. A push with writes in flight fails instead."""
        for push in self._named(names):
            push.paused = False
            self._let_go(push)
            push.forget()  # also if it has closed here: it still takes part in plans
            if push.out:
                self.abort(now, push.name, "PD-XFER-001", "writes did not return before preemption")
            elif not push.closed:
                self._do(now, self._machine.restart(now, push.name))

    def abort(self, now: float, name: str, code: str, detail: str) -> None:
        for push in self._open([name]):
            self._do(now, self._machine.abort(now, push.name, code, detail))

    def abort_all(self, now: float, code: str, detail: str) -> None:
        for name in [push.name for push in self._pushes.values() if not push.closed]:
            self.abort(now, name, code, detail)

    def take_finished(self, ended: Iterable[str]) -> set[str]:
        """Return requests whose blocks may be freed, each once; `ended` are requests that vLLM has finished.

        Their pushes have closed here, or they were held and never pushed.
        """
        self._ended.update(request for request in ended if request in self._reported_to)
        ready = {request for request in self._ended if self._reported_to[request].closed}
        self._ended -= ready
        for request in ready:
            del self._reported_to[request]
        freed, self._freed = self._freed, set()
        return ready | freed

    def take_failures(self) -> list[tuple[str, str]]:
        """Return transfers whose push failed here since the last call, with the code."""
        failures, self._failures = self._failures, []
        return failures

    def take_missed(self) -> list[MissedExchange]:
        """Return exchanges that this worker wants to be made again."""
        wanted = self.exchanges.wanted() if self.exchanges is not None else []
        return [(unit.step, unit.layer + self._first_layer, unit.sub_step) for unit in wanted]

    def check(self) -> None:
        """Raise PD-XFER-007 if the writer is dead and all pushes have closed: nothing can be pushed any more."""
        if self.dead and all(push.closed for push in self._pushes.values()):
            raise PdError("PD-XFER-007", why=self.dead)

    # -- what was computed and exchanged, in the order of the device

    def computed(self, now: float, step: int, layer: int) -> None:
        """Offer a layer of a step, which is in the cache now, to every destination of the step's direct pushes."""
        unit = Unit(step, layer)
        for push in self._direct.get(step, ()):
            plan = push.plan(step, layer)
            if plan is not None and not push.closed:
                for rank in plan.by_rank:
                    worker = push.worker(layer, rank)
                    self._do(now, self._machine.offer(now, push.name, worker, unit, plan.nbytes(rank)))

    def uncomputed(self, now: float, plan: StepPlan, layer: str) -> None:
        """Abort all pushes of a step in which a layer was not computed, also those that it would push later."""
        for push in plan.pushes:
            self.abort(now, push.name, "PD-GEO-004", layer)

    def staged(self, now: float, item: Staged, absent: Sequence[list[int]], sums: Sequence[Sums]) -> None:
        """Offer what an exchange has brought; drop bytes of pushes that have ended or started over meanwhile.

        By slot: `absent` are the ranks that did not send their part, `sums` the checksums of what came, if wanted.
        """
        if self.exchanges is None:
            return
        run = item.run
        if self._site.leads:
            self._effects.append(MetricValue("regroup_time_seconds", item.waited))
        if item.error is not None:
            self._fail_exchanged(now, run.exchange.members, str(item.error)[:MAX_CHARACTERS])
        for index, (slot, ranks) in enumerate(zip(item.slots, absent, strict=True)):
            if slot is None:
                continue
            share = run.exchange.shares[index]
            if ranks:
                why = f"prefill ranks {', '.join(map(str, ranks))} did not give their part"
                self._fail_exchanged(now, list(share.pushes), why)
            elif item.error is None:
                self._offer_staged(now, run, index, slot, sums[index])
            if not slot.users:
                self.exchanges.staging.release(slot)
            self.exchanges.arrived(share, run.unit.layer)
        self._seal(now, run.exchange.members)
        self._note("staged", item.facts)

    def direct_writes(self, step: int, names: Iterable[str]) -> list[DirectWrites]:
        """Return what was pushed directly of the pushes whose last step this was: all of it is computed now."""
        ending = (push for push in self._open(names) if push.final_step == step and push.live)
        return [written for push in ending for written in push.direct_writes()]

    def sealed(
        self,
        now: float,
        step: int,
        names: Iterable[str],
        announced_at: float,
        sums: Iterable[tuple[DirectWrites, tuple[int, ...]]] = (),
    ) -> None:
        """End a step whose direct layers were all offered. It was the last of these pushes: seal them once complete.

        `sums`: the checksums of their direct parts, if wanted.
        """
        self._direct.pop(step, None)
        ending = {push.name: push for push in self._open(names) if push.final_step == step}  # others start over
        for part, values in sums:
            if (push := ending.get(part.push)) is not None:
                self._machine.checksum(part.push, part.worker, push.index(part.layer), values)
        for push in ending.values():
            push.sealing, push.sealed_at = True, announced_at
            self._seal(now, [push])

    # -- exchanges, before they are made

    def wait_left(self, now: float, run: Run, index: int) -> float:
        """Return for how many seconds to wait before `slot` is called."""
        return self.exchanges.wait_left(now, run, index) if self.exchanges is not None else 0.0

    def slot(self, run: Run, index: int) -> StagingSlot | None:
        return self.exchanges.slot(run, index) if self.exchanges is not None else None

    def made(self, run: Run) -> None:
        """Record that an exchange was called; what it brought comes as `staged`."""
        if self.exchanges is not None:
            self.exchanges.made(run)

    # -- writing

    def claim(self, now: float, in_flight: Sequence[Batch]) -> list[Batch]:
        """Return what may be written now, by destination and layer. Destinations with enough in flight wait."""
        if self._sender is None or not self._sender.anything_claimable:
            return []
        busy: Counter[object] = Counter(batch.peer for batch in in_flight)
        claims: list[Claim] = []
        for claim in self._sender.claim(now, lambda peer: busy[peer] < IN_FLIGHT):
            if self._pushes[claim.push].paused:
                self._do(now, self._sender.returned(now, claim))
            else:
                claims.append(claim)
        if not claims:
            return []
        groups = grouped(claims, self._pushes, self._config.wire.fuse_layers, self._session)
        batches = [self._batch(now, peer, group) for peer, group in groups]
        return [batch for batch in batches if batch is not None]

    def submitted(self, now: float, batch: Batch) -> None:
        for claim in batch.claims:
            self._do(now, self._machine.submitted(now, claim))
        self._note("layer_submitted", batch.facts)

    def finished(self, now: float, batch: Batch, state: WriteState) -> None:
        """Handle a batch's outcome. Writes that were never issued cannot land: no block waits for them."""
        landed = state is WriteState.LANDED
        self._note("layer_pushed", lambda: {"ok": landed, "took": now - batch.submitted_at, **batch.facts()})
        if landed:
            self._effects.append(MetricValue("bytes_transferred", sum(batch.size)))
            if batch.direct:
                self._effects.append(MetricValue("bytes_direct", batch.direct))
            self._effects.append(MetricValue("num_descriptors", len(batch.size)))
        for claim in batch.claims:
            if state is WriteState.UNISSUED:
                self._do(now, self._machine.returned(now, claim))
            else:
                self._drop(self._pushes[claim.push], claim.d_rank, unit_of(claim))
                self._do(now, self._machine.wrote(now, claim, landed))
        if state is WriteState.UNISSUED:
            for name in dict.fromkeys(claim.push for claim in batch.claims):
                self.abort(now, name, "PD-XFER-003", f"{batch.peer} does not take writes, nothing was sent")

    def died(self, now: float, why: str) -> None:
        """Fail every push, and every later one: the writer has ended with an error."""
        self.dead = why
        self._effects.append(MetricValue("writers_dead", 1))
        self.abort_all(now, "PD-XFER-003", f"the writer died: {why}")

    # -- the side channel and time

    def message(self, now: float, peer: Endpoint, message: Message) -> None:
        if self._sender is not None:  # else it is for an earlier process at our address
            self._do(now, self._sender.message(now, peer, message))
            if self._sender.anything_claimable:  # READY may have granted authority
                self._effects.append(Writable())

    def unreachable(self, now: float, peer: Endpoint, detail: str) -> None:
        self._do(now, self._machine.unreachable(now, peer, detail))

    def tick(self, now: float) -> None:
        if self._sender is not None:
            self._do(now, self._sender.tick(now))

    def next_wake(self) -> float | None:
        """Return when `tick` must be called at the latest."""
        return self._sender.next_wake() if self._sender is not None else None

    def last_message_at(self, peer: Endpoint) -> float | None:
        """Return when `peer` last sent anything."""
        return self._machine.last_message_at(peer)

    # -- what is held

    def pushes(self) -> list[Push]:
        return list(self._pushes.values())

    # -- starting and planning

    @property
    def counters(self) -> Mapping[str, int]:
        """Irregular events of the protocol, by name."""
        return self._sender.counters if self._sender is not None else {}

    @property
    def _machine(self) -> Sender:
        if self._sender is None:
            raise LocalProtocolError("the machine is asked before its first step")
        return self._sender

    def _set_geometry(self, geometry: CacheGeometry) -> None:
        me = self._site.contributor
        self._first_layer = geometry.first_layer(me.stage)
        self._orders = self.orders_type(geometry, self._own, me, self._config.regroup, self._room)
        self._planners = [self.planner_type(kind, me.rank) for kind in geometry.kinds]
        if self._staging is not None and self._room is not None:
            self.exchanges = Exchanges.of(geometry, self._own, me.rank, self._staging, self._room)
        self._sender = self.sender_type(
            incarnation=self._site.incarnation,
            contributor=me,
            model=self._site.model,
            geometry=geometry,
            timers=self._config.timers,
            quiet_s=self._config.quiet_s,
        )

    def _start(self, now: float, start: PushStart) -> None:
        if self._orders is None:
            raise LocalProtocolError("a push was scheduled before the engine's geometry was known")
        push, order, differences = self._orders.take(now, start)
        self._pushes[push.name] = self._reported_to[push.request_id] = push
        if start.ended:
            self._ended.add(push.request_id)
        opened = self._machine.open(now, order)
        push.pairs = self._machine.pairs(push.name)
        self._do(now, opened)
        if differences:
            self.abort(now, push.name, "PD-GEO-001", str(differences[0]))
        if self.dead:
            self.abort(now, push.name, "PD-XFER-003", f"the writer died: {self.dead}")

    def _plan(self, now: float, number: int, slices: Iterable[PushSlice]) -> StepPlan:
        """Plan a step once for all its pushes; its layers use the plans as they are computed."""
        planned = StepPlan(number)
        direct: dict[int, list[tuple[Push, int, Job]]] = {}  # by P's kind of layer
        exchanged: dict[int, list[tuple[Push, Job]]] = {}
        # A D that has started again on its ports, with other layers, is another one.
        instances: dict[tuple[tuple[Endpoint, ...], CacheGeometry], int] = {}
        for push_slice in slices:
            push = self._pushes.get(push_slice.push)
            if push is None or not self._takes_part(push):
                continue
            push.extend(number, push_slice)
            planned.pushes.append(push)
            if push_slice.final:
                planned.final.append(push)
            tokens = 0
            for index, pair in enumerate(push.pairings):
                lo, hi = self._leaving(push, index, push_slice)
                tokens = max(tokens, hi - lo)
                if hi == lo:
                    continue
                if push.lost(index, lo, hi):  # the same on every rank: all have the same blocks
                    what = f"some of tokens [{lo}, {hi}), of {pair.p.own}" if not pair.p.own.stateful else "a state"
                    why = f"prefill keeps no block for {what}"
                    self.abort(now, push.name, "PD-XFER-002", why)
                    continue
                d_engine = push.reservation.endpoints, push.reservation.geometry
                instance = instances.setdefault(d_engine, len(instances))
                job = push.job(index, lo, hi, instance)
                if index in push.exchanged:
                    exchanged.setdefault(pair.kind, []).append((push, job))
                elif not self.dead:  # else nothing would use the plan
                    direct.setdefault(pair.kind, []).append((push, index, job))
            facts = {"step": number, "before": push_slice.before, "after": push_slice.after, "tokens": tokens}
            self._effects.append(act.Note("step", {"transfer": push.transfer, **facts}))
        for kind, work in sorted(direct.items()):
            plans = self._planners[kind].plan([job for _, _, job in work], number)
            for (push, index, _), plan in zip(work, plans, strict=True):
                push.plans[number, index] = plan
        if direct:
            pushes = [push for work in direct.values() for push, _, _ in work]
            self._direct[number] = list(dict.fromkeys(pushes))
            planned.direct = True
        if exchanged and self.exchanges is not None:
            planned.exchanges = self.exchanges.plan(number, exchanged)
        return planned

    def _leaving(self, push: Push, pairing: int, push_slice: PushSlice) -> tuple[int, int]:
        """Return what leaves of one pairing's layers in a step: tokens or entries [lo, hi).

        A state leaves once, at the end.
        """
        d = push.pairings[pairing].d
        if d.own.stateful:
            return 0, int(push_slice.final)
        end, before, after = (
            token // d.own.per_entry for token in (push.reservation.end, push_slice.before, push_slice.after)
        )
        return push_range(push.firsts[pairing], end, before, after, d.covers)

    # `_takes_part`, `_due` and `_owes` are rules of their own because the simulator's mutations leave each of them out.

    def _takes_part(self, push: Push) -> bool:
        """Return whether the push is planned.

        This must not depend on what only this rank knows of it: ranks divide the tokens of all jobs among themselves,
        so all ranks must plan the same jobs.
        """
        return bool(push.pairings)

    def _due(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return which of the exchanges ordered again to make: all, because other ranks need this rank's part."""
        return units

    # -- offering and sealing

    def _offer_staged(self, now: float, run: Run, index: int, slot: StagingSlot, sums: Sums) -> None:
        planned, share = run.exchange.plan.slots[index], run.exchange.shares[index]
        for member, writes in planned.writes.items():
            push, slot_share = run.exchange.members[member], SlotShare(slot, writes, sums.get(member))
            if slot_share.nbytes and share in push.owed:
                slot.users += 1
                worker = push.worker(run.unit.layer, planned.d_rank)
                push.slot_shares[worker, run.unit] = slot_share
                self._do(now, self._machine.offer(now, push.name, worker, run.unit, slot_share.nbytes))

    def _fail_exchanged(self, now: float, pushes: Iterable[Push], why: str) -> None:
        for push in pushes:
            self.abort(now, push.name, "PD-XFER-006", why)

    def _seal(self, now: float, pushes: Iterable[Push]) -> None:
        """Seal the pushes that are complete; one that exchanges still owe something waits for it."""
        for push in pushes:
            if push.sealing and not self._owes(push):
                push.sealing = False
                self._do(now, self._machine.seal(now, push.name))

    def _owes(self, push: Push) -> bool:
        return bool(push.owed)

    # -- batches

    def _session(self, claim: Claim) -> str | None:
        return self._machine.session(claim)

    def _batch(self, now: float, peer: Endpoint, claims: list[Claim]) -> Batch | None:
        """Return these claims as one batch. A claim that cannot be written fails its push."""
        parts: list[Triples] = []
        taken, session, direct = [], "", 0
        for claim in claims:
            push, theirs = self._pushes[claim.push], self._machine.addresses(claim.push, claim.d_rank)
            try:
                if theirs is None:
                    raise PdError("PD-CTRL-002", why="READY brought no addresses")
                spans = spans_of(push, claim, self._bases, theirs)
                self._add_checksum(push, claim)
            except PdError as error:
                self._unwritten(now, claim, error.code, error.sentence)
                continue
            except Exception as error:  # concerns one request's plan or memory: the others go on
                log.exception("a write for push %s cannot be prepared", claim.push)
                self._unwritten(now, claim, "PD-XFER-003", f"preparing the write failed: {error}"[:MAX_CHARACTERS])
                continue
            parts += spans
            session = theirs.session
            taken.append(claim)
            if self.exchanges is not None and not unit_of(claim).sub_step:
                direct += sum(int(part.size.sum()) for part in spans)
        if not taken:
            return None
        triples = joined(parts)
        transfers = sorted({self._pushes[claim.push].transfer for claim in taken})
        lists = triples.src.tolist(), triples.dst.tolist(), triples.size.tolist()
        return Batch(peer, session, taken, transfers, *lists, direct)

    def _add_checksum(self, push: Push, claim: Claim) -> None:
        """Add the checksums of what an exchange has brought; `sealed` adds those of what is pushed directly."""
        unit = unit_of(claim)
        values = staged(push, claim).checksums if unit.sub_step else None
        if values is not None:
            self._machine.checksum(claim.push, claim.d_rank, push.index(unit.layer), values)

    def _unwritten(self, now: float, claim: Claim, code: str, why: str) -> None:
        """Hand back a claim that was not submitted, and fail its push, which need not wait for it."""
        self._do(now, self._machine.returned(now, claim))
        self.abort(now, claim.push, code, why)

    # -- staging slots: one goes back when the last share of it is written or dropped

    def _drop(self, push: Push, worker: int, unit: Unit) -> None:
        slot_share = push.slot_shares.pop((worker, unit), None)
        if slot_share is not None and self._staging is not None:
            slot_share.slot.users -= 1
            if not slot_share.slot.users:
                self._staging.release(slot_share.slot)

    def _let_go(self, push: Push) -> None:
        """Stop exchanges for a push, and drop what is staged for it, except what is being written."""
        if self.exchanges is not None:
            self.exchanges.forget(push)
        for worker, unit in list(push.slot_shares):
            if unit not in push.pairs[worker].coverage.out:
                self._drop(push, worker, unit)

    # -- records and effects

    def _named(self, names: Iterable[str]) -> list[Push]:
        return [push for name in names if (push := self._pushes.get(name)) is not None]

    def _open(self, names: Iterable[str]) -> list[Push]:
        return [push for push in self._named(names) if not push.closed]

    def _note(self, stage: str, facts: Callable[[], Mapping[str, object]]) -> None:
        if self._tracing():
            self._effects.append(act.Note(stage, facts()))

    def _do(self, now: float, actions: Iterable[act.Action]) -> None:
        """Add the protocol's actions to the effects; apply at once what they change in this worker's own records."""
        for action in actions:
            self._effects.append(action)
            if isinstance(action, act.Note):
                self._apply_note(action)
            elif isinstance(action, act.Closed):
                self._close(now, action)

    def _apply_note(self, note: act.Note) -> None:
        if note.stage == "drain":
            self._let_go(self._pushes[str(note.facts["push"])])
        elif note.stage == "ready" and self._site.leads:
            waited = note.facts.get("waited")
            if isinstance(waited, float):
                self._effects.append(MetricValue("ready_wait_seconds", waited))

    def _close(self, now: float, closed: act.Closed) -> None:
        push = self._pushes.get(closed.push)
        if push is None or push.closed:
            raise LocalProtocolError(f"push {closed.push} closed twice, or was never opened")
        push.closed, push.sealing = True, False
        push.plans.clear()
        self._let_go(push)
        self._forget_if_done(push)
        why = closed.failure or Failure("")
        facts = {"transfer": push.transfer, "ok": closed.ok, "code": why.code, "detail": why.detail}
        self._effects.append(act.Note("push_closed", facts))
        if not closed.ok:
            self._failures.append((push.transfer, why.code))
        elif self._site.leads:
            exposed = max(0.0, now - push.sealed_at) if push.sealed_at else 0.0
            self._effects.append(MetricValue("xfer_time_seconds", now - push.opened))
            self._effects.append(MetricValue("exposed_time_seconds", exposed))

    def _stop_reporting(self, push: Push) -> None:
        """Do not report a push whose request holds no blocks (any more): vLLM would stop the engine over it."""
        self._reported_to.pop(push.request_id, None)
        self._ended.discard(push.request_id)

    def _forget_if_done(self, push: Push) -> None:
        if push.closed and push.over:
            self._pushes.pop(push.name, None)
