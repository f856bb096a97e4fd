# SPDX-License-Identifier: Apache-2.0
"""Every push of one P worker as one machine: events in, effects out.

It plans steps, offers computed and staged bytes to the protocol's machine, seals, turns claims into batches, and knows
which pushes have closed. `now` is an argument; whoever calls it holds its lock, takes the effects, and acts on them
once the lock is free. Nothing here waits.
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
from vllm_ascend_pd.metadata import Exchanged, PrefillStep, PushSlice, PushStart
from vllm_ascend_pd.prefill.core.batches import Bases, Batch, Triples, grouped, joined, spans_of, staged, unit_of
from vllm_ascend_pd.prefill.core.exchanges import Exchanges, Run, Staged, SubStep
from vllm_ascend_pd.prefill.core.orders import OrderBook
from vllm_ascend_pd.prefill.core.push import Piece, Push, Unit
from vllm_ascend_pd.protocol import actions as act
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Contributor, Endpoint
from vllm_ascend_pd.protocol.messages import Message
from vllm_ascend_pd.protocol.push import Claim, Sender
from vllm_ascend_pd.regroup.staging import Staging, StagingSlot
from vllm_ascend_pd.transport.base import WriteState

log = logging.getLogger(__name__)

IN_FLIGHT = 2  # batches per destination: one on the wire, one behind it
MOST_WORDS = 200  # of another library's error that D is told

Sums = Mapping[int, tuple[int, ...]]  # by member of an exchange; of each component
Digest = Callable[
    [Push, Unit, int], tuple[int, ...]
]  # by component, of what a push's unit reads from the cache for a D worker


@dataclass(frozen=True, slots=True)
class Told:
    """A fact for the metric of that name."""

    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class Writable:
    """The writer must look: it may write what it did not know of."""


Effect: TypeAlias = act.Action | Told | Writable


@dataclass(frozen=True, slots=True)
class PushSite:
    """Who this worker is."""

    incarnation: str
    contributor: Contributor
    model: str

    @property
    def leads(self) -> bool:
        """Whether this worker tells the times of a push for all."""
        return self.contributor == Contributor(0, 0)


@dataclass(slots=True)
class StepPlan:
    """What a step's layers will bring, and which exchanges are made again before them."""

    number: int
    direct: bool = False
    parts: list[SubStep] = field(default_factory=list)
    pushes: list[Push] = field(default_factory=list)  # of which this step computes tokens
    final: list[Push] = field(default_factory=list)  # of those, whose last tokens
    again: list[Run] = field(default_factory=list)
    before: StepPlan | None = None  # of what earlier steps have computed


class Pushes:
    """`staging` and `room` are what exchanges use, None without them. `digest` is asked with `verify: full` only."""

    # What the simulator replaces when it takes a rule out.
    sender_type = Sender
    orders_type = OrderBook

    def __init__(
        self,
        config: PushConfig,
        site: PushSite,
        own: CacheGeometry,
        bases: Bases,
        staging: Staging | None = None,
        room: Room | None = None,
        digest: Digest | None = None,
        tracing: Callable[[], bool] = lambda: True,
    ) -> None:
        self._config, self._site, self._own, self._bases = config, site, own, bases
        self._staging, self._room, self._digest = staging, room, digest
        self._tracing = tracing  # whether anybody reads the notes that cost something
        self._pushes: dict[str, Push] = {}
        self._reported_to: dict[str, Push] = {}  # by request, until the request and the push have both ended
        self._ended: set[str] = set()  # requests that vLLM has finished, not reported yet
        self._freed: set[str] = set()  # requests that were held for nobody, not reported yet
        self._failures: list[tuple[str, str]] = []  # transfer and code, not told to the scheduler yet
        self._preempted: list[str] = []  # pushes that are drained
        self._drained_by = 0.0  # at the latest
        self._direct: dict[int, list[Push]] = {}  # by step: whose layers are pushed without an exchange
        self._effects: list[Effect] = []
        self._sender: Sender | None = None
        self._planners: list[StepPlanner] = []  # by kind of layer
        self._orders: OrderBook | None = None
        self._first_layer = 0  # of this stage, counted through the whole engine
        self.exchanges: Exchanges | None = None
        self.dead = ""  # why nothing can be written any more

    def take_effects(self) -> list[Effect]:
        """In order, each once."""
        effects, self._effects = self._effects, []
        return effects

    # -- the engine's steps

    def begin(self, now: float, step: PrefillStep) -> StepPlan:
        """Take in a step's metadata and plan what its layers will push."""
        if self._sender is None and step.engine is not None:
            self._open_engine(step.engine)
        for abort in step.aborts:
            self.abort(now, abort.push, abort.code, abort.detail)
        for start in step.starts:
            self._start(now, start)
        before = self._plan(now, step.before, step.computed) if step.computed else None
        plan = self._plan(now, step.rotation, step.slices) if step.slices else StepPlan(step.rotation)
        plan.before = before
        self._freed.update(step.freed)
        over = self._named(step.ended)
        for push in over:
            push.over = True
            self._untold(push)
            self._forget_if_done(push)
        if self.exchanges is not None:
            self.exchanges.over(over)
            # Layers are told apart by their place in the whole engine: each stage makes its own exchanges again.
            units = [Unit(number, layer - self._first_layer, part) for number, layer, part in step.catch_ups]
            plan.again = self.exchanges.again(self._due(units))
            if plan.again and self._site.contributor.rank == 0:  # each stage makes its own
                self._effects.append(Told("exchanges_repeated", len(plan.again)))
        return plan

    def preempt(self, now: float, names: Iterable[str]) -> None:
        """The blocks of these pushes will be overwritten: nothing of them is submitted until they start over."""
        self._preempted, self._drained_by = list(names), now + self._config.timers.preempt_drain_s
        for push in self._open(self._preempted):
            push.held = True

    def draining(self, now: float) -> float:
        """For how many seconds at most to wait for a write that reads what was preempted; then ask again. 0: the pushes
        have started over or failed, and their blocks may be overwritten."""
        left = self._drained_by - now
        if left > 0 and any(push.out for push in self._open(self._preempted)):
            return left
        names, self._preempted = self._preempted, []
        self._start_over(now, names)
        return 0.0

    def _start_over(self, now: float, names: Iterable[str]) -> None:
        """The blocks are lost: what was pushed is pushed again. A push that still writes fails instead."""
        for push in self._named(names):
            push.held = False
            self._let_go(push)
            push.forget()  # also of one that has closed here: it takes part in what is planned
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
        """Requests whose pushes are closed, each once; `ended` are requests that vLLM has finished."""
        self._ended.update(request for request in ended if request in self._reported_to)
        ready = {request for request in self._ended if self._reported_to[request].closed}
        self._ended -= ready
        for request in ready:
            del self._reported_to[request]
        freed, self._freed = self._freed, set()
        return ready | freed

    def take_failures(self) -> list[tuple[str, str]]:
        """Transfers whose push failed here, with the code, since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def take_missed(self) -> list[Exchanged]:
        """Exchanges that this worker wants to be made again."""
        wanted = self.exchanges.wanted() if self.exchanges is not None else []
        return [(unit.step, unit.layer + self._first_layer, unit.part) for unit in wanted]

    def check(self) -> None:
        """Raise PD-XFER-007 once a dead writer has left nothing open: blocks are free, and nothing can be pushed again."""
        if self.dead and all(push.closed for push in self._pushes.values()):
            raise PdError("PD-XFER-007", why=self.dead)

    # -- what was computed and exchanged, in the order of the device

    def computed(self, now: float, step: int, layer: int) -> None:
        """A layer of a step is in the cache: offer it to every destination of the step's pushes."""
        unit = Unit(step, layer)
        for push in self._direct.get(step, ()):
            plan = push.plan(step, layer)
            if plan is not None and not push.closed:
                for rank in plan.by_rank:
                    worker = push.worker(layer, rank)
                    self._do(now, self._machine.offer(now, push.name, worker, unit, plan.nbytes(rank)))

    def uncomputed(self, now: float, plan: StepPlan, layer: str) -> None:
        """A layer was not computed in a step: what the step computed of its pushes is incomplete, also where it is pushed later."""
        for push in plan.pushes:
            self.abort(now, push.name, "PD-GEO-004", layer)

    def staged(self, now: float, item: Staged, strangers: Sequence[list[int]], sums: Sequence[Sums]) -> None:
        """An exchange is done; bytes of pushes that ended or started over meanwhile are dropped. By slot: `strangers`
        are the ranks that did not give their part, `sums` the checksums of what came, where they are wanted."""
        if self.exchanges is None:
            return
        run = item.run
        if self._site.leads:
            self._effects.append(Told("regroup_time_seconds", item.waited))
        if item.error is not None:
            self._fail_exchanged(now, run.part.members, str(item.error)[:MOST_WORDS])
        for index, (slot, ranks) in enumerate(zip(item.slots, strangers, strict=True)):
            if slot is None:
                continue
            share = run.part.shares[index]
            if ranks:
                why = f"prefill ranks {', '.join(map(str, ranks))} did not give their part"
                self._fail_exchanged(now, list(share.pushes), why)
            elif item.error is None:
                self._offer_staged(now, run, index, slot, sums[index])
            if not slot.users:
                self.exchanges.staging.release(slot)
            self.exchanges.arrived(share, run.unit.layer)
        self._seal(now, run.part.members)
        self._note("staged", item.facts)

    def sealed(self, now: float, step: int, names: Iterable[str], announced_at: float) -> None:
        """Every layer of a step was offered to what is pushed directly; these pushes get nothing more after this step."""
        self._direct.pop(step, None)
        for push in self._open(names):
            if push.final_step == step:  # else it was preempted and starts over
                push.sealing, push.sealed_at = True, announced_at
                self._seal(now, [push])

    # -- exchanges, before they are made

    def patience(self, now: float, run: Run, index: int) -> float:
        """For how many seconds to wait before `slot` is asked."""
        return self.exchanges.patience(now, run, index) if self.exchanges is not None else 0.0

    def slot(self, run: Run, index: int) -> StagingSlot | None:
        return self.exchanges.slot(run, index) if self.exchanges is not None else None

    def made(self, run: Run) -> None:
        """The exchange was called; what it brought comes as `staged`."""
        if self.exchanges is not None:
            self.exchanges.made(run)

    # -- writing

    def claim(self, now: float, flying: Sequence[Batch]) -> list[Batch]:
        """What may be written now, by destination and layer; destinations with enough in flight wait."""
        if self._sender is None or not self._sender.anything_claimable:
            return []
        busy: Counter[object] = Counter(batch.peer for batch in flying)
        claims: list[Claim] = []
        for claim in self._sender.claim(now, lambda peer: busy[peer] < IN_FLIGHT):
            if self._pushes[claim.push].held:
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
        """The transport has an outcome. Of what was never issued nothing can land: no block waits for it."""
        landed = state is WriteState.LANDED
        self._note("layer_pushed", lambda: {"ok": landed, "took": now - batch.submitted_at, **batch.facts()})
        if landed:
            self._effects.append(Told("bytes_transferred", sum(batch.size)))
            self._effects.append(Told("num_descriptors", len(batch.size)))
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
        """The writer has ended by an error: fail every push, and every later one."""
        self.dead = why
        self._effects.append(Told("writers_dead", 1))
        self.abort_all(now, "PD-XFER-003", f"the writer died: {why}")

    # -- the side channel and time

    def message(self, now: float, peer: Endpoint, message: Message) -> None:
        if self._sender is not None:  # else it is for whoever lived at our address before
            self._do(now, self._sender.message(now, peer, message))
            if self._sender.anything_claimable:  # READY may have said so
                self._effects.append(Writable())

    def unreachable(self, now: float, peer: Endpoint, detail: str) -> None:
        self._do(now, self._machine.unreachable(now, peer, detail))

    def tick(self, now: float) -> None:
        if self._sender is not None:
            self._do(now, self._sender.tick(now))

    def next_wake(self) -> float | None:
        """When `tick` must be called at the latest."""
        return self._sender.next_wake() if self._sender is not None else None

    def heard(self, peer: Endpoint) -> float | None:
        """When `peer` last said anything."""
        return self._machine.heard(peer)

    # -- what is held, for whoever looks

    def pushes(self) -> list[Push]:
        return list(self._pushes.values())

    def stats(self) -> dict[str, int]:
        """Of the exchanges: counts since the start, and what is held at this moment. Empty without them."""
        if self.exchanges is None:
            return {}
        pushes = self._pushes.values()
        return {
            **self.exchanges.stats(),
            "pieces": sum(len(push.pieces) for push in pushes),
            "unsealed": sum(push.sealing for push in pushes),
        }

    # -- starting and planning

    @property
    def _machine(self) -> Sender:
        if self._sender is None:
            raise LocalProtocolError("the machine is asked before its first step")
        return self._sender

    def _open_engine(self, engine: CacheGeometry) -> None:
        me = self._site.contributor
        self._first_layer = engine.first_layer(me.stage)
        self._orders = self.orders_type(engine, self._own, me, self._config.regroup, self._room)
        self._planners = [StepPlanner(kind, me.rank) for kind in engine.kinds]
        if self._staging is not None and self._room is not None:
            self.exchanges = Exchanges.of(engine, self._own, me.rank, self._staging, self._room)
        self._sender = self.sender_type(
            incarnation=self._site.incarnation,
            contributor=me,
            model=self._site.model,
            geometry=engine,
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
        """Plan a step once for all its pushes; the plans wait for the layers."""
        planned = StepPlan(number)
        direct: dict[int, list[tuple[Push, int, Job]]] = {}  # by P's kind of layer
        exchanged: dict[int, list[tuple[Push, Job]]] = {}
        instances: dict[tuple[Endpoint, ...], int] = {}
        for piece in slices:
            push = self._pushes.get(piece.push)
            if push is None or not self._takes_part(push):
                continue
            push.extend(number, piece)
            planned.pushes.append(push)
            if piece.final:
                planned.final.append(push)
            tokens = 0
            for index, pair in enumerate(push.pairings):
                lo, hi = self._leaving(push, index, piece)
                tokens = max(tokens, hi - lo)
                if hi == lo:
                    continue
                if push.lost(index, lo, hi):  # on every rank: they were told the same blocks
                    what = f"some of tokens [{lo}, {hi}), of {pair.p.own}" if not pair.p.own.stateful else "a state"
                    why = f"prefill keeps no block for {what}"
                    self.abort(now, push.name, "PD-XFER-002", why)
                    continue
                instance = instances.setdefault(push.reservation.endpoints, len(instances))
                job = push.job(index, lo, hi, instance)
                if index in push.exchanged:
                    exchanged.setdefault(pair.kind, []).append((push, job))
                elif not self.dead:  # else nothing would use the plan
                    direct.setdefault(pair.kind, []).append((push, index, job))
            facts = {"step": number, "before": piece.before, "after": piece.after, "tokens": tokens}
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
            planned.parts = self.exchanges.plan(number, exchanged)
        return planned

    def _leaving(self, push: Push, pairing: int, piece: PushSlice) -> tuple[int, int]:
        """Which tokens of the layers of one pairing leave in a step. A state leaves once, after the last."""
        if push.pairings[pairing].d.own.stateful:
            return 0, int(piece.final)
        size = push.pairings[pairing].d.block_size
        return push_range(push.firsts[pairing], push.reservation.end, piece.before, piece.after, size)

    def _takes_part(self, push: Push) -> bool:
        """Whatever this rank knows of the push: ranks share the tokens of all jobs, so all must plan the same jobs."""
        return bool(push.pairings)

    def _due(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Of what the scheduler orders again: all, also what this rank has, because other ranks need its part."""
        return units

    # -- offering and sealing

    def _offer_staged(self, now: float, run: Run, index: int, slot: StagingSlot, sums: Sums) -> None:
        planned, share = run.part.plan.slots[index], run.part.shares[index]
        for member, writes in planned.writes.items():
            push, piece = run.part.members[member], Piece(slot, writes, sums.get(member))
            if piece.nbytes and share in push.owed:
                slot.users += 1
                worker = push.worker(run.unit.layer, planned.d_rank)
                push.pieces[worker, run.unit] = piece
                self._do(now, self._machine.offer(now, push.name, worker, run.unit, piece.nbytes))

    def _fail_exchanged(self, now: float, pushes: Iterable[Push], why: str) -> None:
        for push in pushes:
            self.abort(now, push.name, "PD-XFER-006", why)

    def _seal(self, now: float, pushes: Iterable[Push]) -> None:
        """Seal what is complete: a push that is owed something by exchanges waits for it."""
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
        """The spans of these claims as one batch. A claim that cannot be written fails its push."""
        parts: list[Triples] = []
        taken, session = [], ""
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
            except Exception as error:  # of one request's plan or memory: the others go on
                log.exception("a write for push %s cannot be prepared", claim.push)
                self._unwritten(now, claim, "PD-XFER-003", f"preparing the write failed: {error}"[:MOST_WORDS])
                continue
            parts += spans
            session = theirs.session
            taken.append(claim)
        if not taken:
            return None
        triples = joined(parts)
        transfers = sorted({self._pushes[claim.push].transfer for claim in taken})
        return Batch(peer, session, taken, transfers, triples.src.tolist(), triples.dst.tolist(), triples.size.tolist())

    def _add_checksum(self, push: Push, claim: Claim) -> None:
        if self._digest is None:
            return
        unit = unit_of(claim)
        values = staged(push, claim).checksums if unit.part else self._digest(push, unit, claim.d_rank)
        if values is not None:
            self._machine.checksum(claim.push, claim.d_rank, push.index(unit.layer), values)

    def _unwritten(self, now: float, claim: Claim, code: str, why: str) -> None:
        """Nothing of the claim is out: its push fails, and waits for nothing."""
        self._do(now, self._machine.returned(now, claim))
        self.abort(now, claim.push, code, why)

    # -- staging slots: one goes back when the last of its pieces is written or dropped

    def _drop(self, push: Push, worker: int, unit: Unit) -> None:
        piece = push.pieces.pop((worker, unit), None)
        if piece is not None and self._staging is not None:
            piece.slot.users -= 1
            if not piece.slot.users:
                self._staging.release(piece.slot)

    def _let_go(self, push: Push) -> None:
        """Nothing of it is exchanged any more, and what is staged is dropped, but for what is being written."""
        if self.exchanges is not None:
            self.exchanges.forget(push)
        for worker, unit in list(push.pieces):
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
        """The protocol's actions are effects; what it says of this worker's own records is done at once."""
        for action in actions:
            self._effects.append(action)
            if isinstance(action, act.Note):
                self._noted(action)
            elif isinstance(action, act.Closed):
                self._close(now, action)

    def _noted(self, note: act.Note) -> None:
        if note.stage == "drain":
            self._let_go(self._pushes[str(note.facts["push"])])
        elif note.stage == "ready" and self._site.leads:
            waited = note.facts.get("waited")
            if isinstance(waited, float):
                self._effects.append(Told("ready_wait_seconds", waited))

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
            self._effects.append(Told("xfer_time_seconds", now - push.opened))
            self._effects.append(Told("exposed_time_seconds", exposed))

    def _untold(self, push: Push) -> None:
        """No blocks are held for it (any more): vLLM must not hear of it, and would stop the engine over it."""
        self._reported_to.pop(push.request_id, None)
        self._ended.discard(push.request_id)

    def _forget_if_done(self, push: Push) -> None:
        if push.closed and push.over:
            self._pushes.pop(push.name, None)
