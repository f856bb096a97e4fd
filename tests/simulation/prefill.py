# SPDX-License-Identifier: Apache-2.0
"""Prefill workers: the production Sender, planner and batches; computing, writing and preemption are simulated."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simulation.memory import BASE, Content, Memory, shade
from simulation.pushes import Pushing, Unit, grouped, stage_geometry
from simulation.settings import MODEL
from simulation.wire import Flight
from simulation.world import Alarm, Process, Violation
from vllm_ascend_pd.geometry.match import mismatches
from vllm_ascend_pd.geometry.plan import StepPlanner, plan_digest, push_range
from vllm_ascend_pd.geometry.shard import destinations
from vllm_ascend_pd.prefill.decisions import PrefillStep, PushStart
from vllm_ascend_pd.protocol.actions import Action, Closed, Note, Send
from vllm_ascend_pd.protocol.agreement import contributor_pairs
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.messages import Endpoint, Message
from vllm_ascend_pd.protocol.push import Claim, Destination, PushOrder, Sender
from vllm_ascend_pd.protocol.tables import PairState

if TYPE_CHECKING:
    from simulation.prefill_engine import PrefillEngine

IN_FLIGHT = 2
_LIVE = (PairState.ASK, PairState.PUSH)


@dataclass(slots=True, eq=False)
class Fill:
    """Tokens [first, last) of a request, computed by a step into these blocks."""

    push: str
    content: Content
    blocks: NDArray[np.int64]
    first: int
    last: int
    places: NDArray[np.int64] | None = None
    cells: NDArray[np.uint8] | None = None
    touched: frozenset[int] = frozenset()


@dataclass(slots=True)
class Step:
    """What the engine lets its ranks compute, and what it tells their connectors."""

    meta: PrefillStep
    fills: list[Fill]
    layer_s: float
    waiting: set[str] = field(default_factory=set)  # preempted pushes that still drain


class PrefillRank:
    """One worker of one stage."""

    def __init__(self, engine: PrefillEngine, stage: int, rank: int) -> None:
        cluster, settings = engine.cluster, engine.cluster.settings
        self.engine = engine
        self.index = stage * engine.shape.tp + rank
        self.stage = stage
        self.process = Process(cluster.world, f"P{engine.index}.{stage}.{rank}")
        self.memory = Memory(settings, engine.shape, engine.geometry, rank, stage)
        self.contributor = Contributor(stage, rank)
        self.works: dict[str, Pushing] = {}
        self._members: dict[str, Pushing] = {}  # until the scheduler says that they ended: all ranks must plan alike
        self.flights: dict[Flight, None] = {}
        self.trouble = -1e9  # when a write last failed or was slow
        self._planner = StepPlanner(engine.geometry, rank)
        self._own = stage_geometry(engine.geometry, stage)
        self._busy: dict[Endpoint, int] = {}
        self._held: set[str] = set()
        self._closed: set[str] = set()
        self._step: Step | None = None
        self.sender: Sender = cluster.mutation.sender(
            incarnation=self.process.incarnation,
            contributor=self.contributor,
            model=MODEL,
            geometry=engine.geometry,
            timers=settings.timers,
            quiet_s=settings.quiet_s,
        )
        self._alarm = Alarm(self.process, self.sender.next_wake, self._tick)

    # -- a step (see runtime/pushing.py)

    def run_step(self, step: Step) -> None:
        """Preempted pushes are drained before anything is overwritten."""
        step = Step(step.meta, [Fill(f.push, f.content, f.blocks, f.first, f.last) for f in step.fills], step.layer_s)
        if not self.engine.cluster.mutation.deaf_to_preemption:
            step.waiting = {push for push in step.meta.preempted if push in self.works}
        self._held |= step.waiting
        drain = self.engine.cluster.settings.timers.preempt_drain_s
        self.process.post(drain, self._drained, step, True)
        self._step = step
        self._drained(step, False)

    def _drained(self, step: Step, late: bool) -> None:
        if self._step is not step:
            return
        now = self.process.clock()
        for push in sorted(step.waiting):
            work = self.works.get(push)
            out = self.sender.outstanding(push)
            if work is not None and out and not late:
                continue
            step.waiting.discard(push)
            self._held.discard(push)
            if work is None:
                continue
            work.forget()
            if out:
                self.act(self.sender.abort(now, push, "PD-XFER-001", "writes did not return before preemption"))
            else:
                self.act(self.sender.restart(now, push))
        if not step.waiting:
            self._step = None
            self._compute(step)

    def _compute(self, step: Step) -> None:
        for abort in step.meta.aborts:
            if abort.push in self.works:
                self.act(self.sender.abort(self.process.clock(), abort.push, abort.code, abort.detail))
        for start in step.meta.starts:
            self._start(start)
        self._plan(step.meta)
        at = 0.0
        for layer in range(len(self._own.layers)):
            at += step.layer_s * self.engine.cluster.world.rng.uniform(0.5, 1.5)
            self.process.post(at, self._layer, step, layer)
        self.process.post(at + 1e-6, self._end, step)

    def _start(self, start: PushStart) -> None:
        d, engine = start.reservation.geometry, self.engine.geometry
        ranks = () if mismatches(engine, d) else destinations(engine, d, self.contributor.rank)
        r = start.reservation
        to = tuple(
            Destination(
                rank,
                r.endpoints[rank],
                contributor_pairs(engine, d, rank),
                plan_digest(engine, d, r.first, r.end, "direct"),
            )
            for rank in ranks
        )
        serial = self.engine.cluster.serial_of(r.transfer)
        self.works[start.push] = self._members[start.push] = Pushing.of(start, self._own.layers, ranks, serial)
        order = PushOrder(start.push, r.transfer, r.deadline_s, r.end - r.first, len(self._own.layers), to)
        self.act(self.sender.open(self.process.clock(), order))

    def _plan(self, meta: PrefillStep) -> None:
        planned, jobs = [], []
        for piece in meta.slices:
            work = self._members.get(piece.push)
            if work is None or (self.engine.cluster.mutation.private_plans and piece.push not in self.works):
                continue
            work.extend(piece)
            r = work.reservation
            lo, hi = push_range(r.first, r.end, piece.before, piece.after, r.geometry.block_size)
            if hi > lo and work.ranks:
                planned.append(work)
                jobs.append(work.job(lo, hi))
        for work, plan in zip(planned, self._planner.plan(jobs, meta.rotation) if jobs else (), strict=True):
            work.plans[meta.rotation] = plan
        for push in meta.ended:
            self._members.pop(push, None)

    def _layer(self, step: Step, layer: int) -> None:
        """A layer is computed: its KV is in the cache, and may leave."""
        for fill in step.fills:
            self._fill(fill, layer)
        unit, now = Unit(step.meta.rotation, layer), self.process.clock()
        for push, work in list(self.works.items()):
            plan = work.plans.get(unit.step)
            for rank in plan.by_rank if plan is not None else ():
                self.act(self.sender.offer(now, push, rank, unit, plan.nbytes(rank)))
        self.pump()

    def _fill(self, fill: Fill, layer: int) -> None:
        memory = self.memory
        if fill.places is None:
            first, last = memory.cell_range(fill.first, fill.last)
            fill.places = memory.offsets(fill.blocks, first, last)
            fill.cells = fill.content.cells(self.engine.geometry, first, last, memory.heads, fill.last)
            size = self.engine.shape.block_size
            fill.touched = frozenset(fill.blocks[fill.first // size : -(-fill.last // size)].tolist())
        if self.flights:
            self._check_overwrite(fill)
        for region in range(memory.regions):
            memory.layer_view(layer, region)[fill.places] = fill.cells + np.uint8(shade(memory.layers[layer], region))

    def _check_overwrite(self, fill: Fill) -> None:
        """Promise 2: what a live push may still read is not overwritten for another request."""
        stride, plane = self.engine.geometry.regions[0].block_stride, self.memory.plane
        for flight in self.flights:
            for claim, (push, _, spans) in zip(flight.claims, flight.pieces, strict=True):
                if push == fill.push or self.sender.state(push, claim.d_rank) not in _LIVE:
                    continue
                read = set(((spans.src - BASE) % plane // stride).tolist())
                if not fill.touched.isdisjoint(read):
                    raise Violation(f"promise 2: {self.process.name} overwrites blocks that push {push} still reads")

    def _end(self, step: Step) -> None:
        now = self.process.clock()
        for piece in step.meta.slices:
            if piece.final and piece.push in self.works:
                self.act(self.sender.seal(now, piece.push))
        if any(not piece.final for piece in step.meta.slices):
            self.engine.cluster.cut_off_perhaps(self)
        self.engine.scheduler.post(0.0001, self.engine.rank_done, self.index)

    # -- writing (see runtime/pusher.py)

    def pump(self) -> None:
        """Claim what may be written now and submit it, all for one destination and layer together."""
        now = self.process.clock()
        claims: list[Claim] = []
        for claim in self.sender.claim(now, lambda peer: self._busy.get(peer, 0) < IN_FLIGHT):
            if claim.push in self._held:
                self.act(self.sender.returned(now, claim))
            else:
                claims.append(claim)
        cluster = self.engine.cluster
        for group in grouped(claims, 4, self.works):
            peer = self.works[group[0].push].reservation.endpoints[group[0].d_rank]
            addresses = self.sender.addresses(group[0].push, group[0].d_rank)
            if addresses is None:
                raise Violation(f"{self.process.name} may write, but does not know where")
            target = cluster.decode_rank(peer)
            flight = Flight(self, target, addresses.session, [])
            for claim in group:
                self._add(now, flight, claim)
            if not flight.claims:
                continue
            self._busy[peer] = self._busy.get(peer, 0) + 1
            if cluster.world.chance(cluster.settings.faults.submit_stall):
                cluster.stall(self)
            self.process.post(0.0, self._submit, flight)

    def _add(self, now: float, flight: Flight, claim: Claim) -> None:
        theirs = self.sender.addresses(claim.push, claim.d_rank)
        if theirs is None or theirs.session != flight.session:
            raise Violation(f"{self.process.name}: one batch, two sessions")
        work = self.works[claim.push]
        spans = work.spans(claim, self.memory.bases, theirs)
        if spans is None:
            self.act(self.sender.returned(now, claim))
            self.act(self.sender.abort(now, claim.push, "PD-XFER-002", "the step was forgotten"))
            return
        flight.claims.append(claim)
        flight.pieces.append((claim.push, work.serial, spans))

    def _submit(self, flight: Flight) -> None:
        self.engine.cluster.wire.fly(flight)
        now = self.process.clock()
        for claim in flight.claims:
            self.act(self.sender.submitted(now, claim))

    def returned(self, flight: Flight, ok: bool) -> None:
        """The transport has the outcome."""
        peer = flight.claims[0]
        endpoint = Endpoint(f"D{flight.target.engine.index}", 1 + peer.d_rank)
        self._busy[endpoint] -= 1
        if not ok:
            self.trouble = self.process.world.now
        now = self.process.clock()
        for claim in flight.claims:
            self.act(self.sender.wrote(now, claim, ok))
        if self._step is not None and self._step.waiting:
            self._drained(self._step, False)
        self.pump()

    # -- the side channel

    def deliver(self, peer: Endpoint, message: Message) -> None:
        self.act(self.sender.message(self.process.clock(), peer, message))
        self.pump()

    def unreachable(self, peer: Endpoint) -> None:
        self.act(self.sender.unreachable(self.process.clock(), peer, "connection refused"))

    def _tick(self) -> None:
        self.act(self.sender.tick(self.process.clock()))
        self.pump()

    def act(self, actions: list[Action]) -> None:
        world = self.process.world
        todo: deque[Action] = deque(actions)
        while todo:
            action: Any = todo.popleft()
            if isinstance(action, Send):
                self.engine.cluster.to_decode(self, action.peer, action.message)
            elif isinstance(action, Closed):
                self._close(action)
            elif isinstance(action, Note) and world.tracing:
                world.log(self.process.name, action.stage, *(f"{k}={v}" for k, v in action.facts.items()))
        self._alarm.set()

    def _close(self, closed: Closed) -> None:
        if closed.push in self._closed:
            raise Violation(f"{self.process.name} closed push {closed.push} twice")
        self._closed.add(closed.push)
        if self.works.pop(closed.push, None) is None:
            raise Violation(f"{self.process.name} closed push {closed.push}, which it never had")
        for flight in self.flights:
            for push, _, _ in flight.pieces:
                if push == closed.push and not flight.returned:
                    raise Violation(f"promise 2: {self.process.name} closed push {push} while it writes")
        self.engine.scheduler.post(
            self.process.world.rng.uniform(0.0002, 0.02), self.engine.closed, closed.push, self.index
        )
