# SPDX-License-Identifier: Apache-2.0
"""Prefill workers: the production Sender, planners, order book, exchanges and staging; computing, writing and preemption
are simulated. Written a second time, without locks and threads, are the decisions of runtime/pushing.py (`_plan`, `_drain`),
runtime/writing.py (`Writing`) and runtime/pusher.py: docs/reliability.md lists them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simulation.exchange import STAGING, Flat, Group, Stream
from simulation.memory import BASE, Content, Memory, shade
from simulation.settings import MODEL
from simulation.wire import Flight
from simulation.world import Alarm, Process, Violation
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, StepPlanner, push_range
from vllm_ascend_pd.geometry.regroup import Room
from vllm_ascend_pd.prefill.decisions import Exchanged, PrefillStep, PushStart
from vllm_ascend_pd.protocol.actions import Action, Closed, Note, Send
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.messages import Endpoint, LayerAddresses, Message
from vllm_ascend_pd.protocol.push import Claim, Sender
from vllm_ascend_pd.protocol.states import PairState
from vllm_ascend_pd.regroup.staging import Staging, StagingSlot
from vllm_ascend_pd.runtime.batches import Triples, aimed, grouped, spans_of, unit_of
from vllm_ascend_pd.runtime.orders import OrderBook
from vllm_ascend_pd.runtime.pieces import Piece, Pieces
from vllm_ascend_pd.runtime.pusher import IN_FLIGHT, Sealed
from vllm_ascend_pd.runtime.regrouping import Regrouper, Staged
from vllm_ascend_pd.runtime.work import PushWork, Unit

if TYPE_CHECKING:
    from simulation.prefill_engine import PrefillEngine

FUSED = 4
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
    computes: bool = True  # whether any layer is of interest


class Exchanging:
    """What a rank of an engine that regroups has besides: slots, a stream, and the production Regrouper over them."""

    def __init__(self, rank: PrefillRank, group: Group, room: Room) -> None:
        settings, mutation = rank.engine.cluster.settings, rank.engine.cluster.mutation
        count = settings.slots * settings.slot_destinations + settings.spares
        self.bytes = np.zeros(room.slot * count, dtype=np.uint8)
        memory: Any = Flat(self.bytes)
        self.staging = Staging(
            memory, room.slot, settings.slots, settings.spares, waits=False, clock=rank.process.clock
        )
        self.pieces: Pieces = mutation.pieces(self.staging, settings.quiet_s)
        self.stream = Stream(group, rank.contributor.rank, rank.memory, room.send, rank.stream_moved)
        self.stream.fails = lambda: _fails(rank)
        device: Any = self.stream
        self.regrouper: Regrouper = mutation.regrouper(
            rank.engine.geometry,
            rank.contributor.rank,
            len(rank.own.layers),
            device,
            self.staging,
            device,
            rank.exchanged.append,
            rank.wants,
        )

    def spoiled(self) -> int:
        """Slots that did not come back although their time is over."""
        if self.staging.quarantined:
            return self.staging.quarantined
        return self.staging.count - len(self.staging._free) - len(self.staging._spare)


def _fails(rank: PrefillRank) -> bool:
    world = rank.process.world
    if not world.chance(rank.engine.cluster.settings.faults.exchange_error):
        return False
    world.fault("part of an exchange went wrong")
    return True


class PrefillRank:
    """One worker of one stage."""

    def __init__(self, engine: PrefillEngine, stage: int, rank: int, group: Group | None, room: Room | None) -> None:
        cluster, settings = engine.cluster, engine.cluster.settings
        self.engine = engine
        self.index = stage * engine.shape.tp + rank
        self.stage = stage
        self.process = Process(cluster.world, f"P{engine.index}.{stage}.{rank}")
        self.memory = Memory(settings, engine.shape, engine.geometry, rank, stage)
        self.contributor = Contributor(stage, rank)
        self.own = stage_geometry(engine.geometry, stage)
        self.works: dict[str, PushWork] = {}
        self.exchanged: deque[Any] = deque()  # Staged and Sealed, in order
        self.flights: dict[Flight, None] = {}
        self.trouble = -1e9  # when a write last failed or was slow
        self._members: dict[str, PushWork] = {}  # until the scheduler says that they ended: all ranks must plan alike
        self._serials: dict[str, int] = {}
        self._planner = StepPlanner(engine.geometry, rank)
        self._orders = OrderBook(engine.geometry, self.own, rank, settings.regroup, room)
        self._first_layer = sum(len(names) for names in engine.geometry.stages[:stage])
        self._busy: dict[Endpoint, int] = {}
        self._held: set[str] = set()
        self._unsealed: set[str] = set()
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
        self.exchanging = Exchanging(self, group, room) if group is not None and room is not None else None

    # -- a step

    def run_step(self, step: Step) -> None:
        """Preempted pushes are drained before anything is overwritten."""
        step = Step(step.meta, [Fill(f.push, f.content, f.blocks, f.first, f.last) for f in step.fills], step.layer_s)
        if not self.engine.cluster.mutation.deaf_to_preemption:
            step.waiting = {push for push in step.meta.preempted if push in self.works}
        self._step = step
        if step.waiting:
            self._held |= step.waiting
            self.process.post(self.engine.cluster.settings.timers.preempt_drain_s, self._drained, step, True)
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
            if work is not None:
                self._start_over(now, work, out)
        if not step.waiting:
            self._step = None
            self._compute(step)

    def _start_over(self, now: float, work: PushWork, out: int) -> None:
        self._unsealed.discard(work.push)
        work.forget()
        if self.exchanging is not None:
            self.exchanging.regrouper.forget(work.push)
            if not out:
                self.exchanging.pieces.drop(now, work.push)
        if out:
            self.act(self.sender.abort(now, work.push, "PD-XFER-001", "writes did not return before preemption"))
        else:
            self.act(self.sender.restart(now, work.push))

    def _compute(self, step: Step) -> None:
        now, meta = self.process.clock(), step.meta
        for abort in meta.aborts:
            if abort.push in self.works:
                self.act(self.sender.abort(now, abort.push, abort.code, abort.detail))
        for start in meta.starts:
            self._start(start)
        step.computes = self._plan(meta) or bool(step.fills)
        for push in meta.ended:
            self._members.pop(push, None)
        if self.exchanging is not None and (meta.ended or meta.catch_ups):
            self.process.world.stats["catch-ups"] += len(meta.catch_ups)
            self.exchanging.regrouper.end(meta.ended)
            again = [Unit(number, layer - self._first_layer, part) for number, layer, part in meta.catch_ups]
            self.exchanging.regrouper.catch_up(again, self.exchanging.stream.record())
        at = 0.0
        for layer in range(len(self.own.layers) if step.computes else 0):
            at += step.layer_s * self.process.world.rng.uniform(0.5, 1.5)
            self.process.post(at, self._layer, step, layer)
        self.process.post(at + 1e-6, self._end, step)

    def _start(self, start: PushStart) -> None:
        work, order, found = self._orders.take(start)
        self._serials[start.push] = self.engine.cluster.serial_of(start.reservation.transfer)
        self.works[start.push] = self._members[start.push] = work
        self.act(self.sender.open(self.process.clock(), order))
        if found:
            self.act(self.sender.abort(self.process.clock(), start.push, "PD-GEO-001", str(found[0])))

    def _plan(self, meta: PrefillStep) -> bool:
        direct: list[tuple[PushWork, Job]] = []
        exchanged: list[tuple[PushWork, Job]] = []
        instances: dict[tuple[Endpoint, ...], int] = {}
        private = self.engine.cluster.mutation.private_plans
        for piece in meta.slices:
            work = self._members.get(piece.push)
            if work is None or not work.fits or (private and piece.push not in self.works):
                continue
            work.extend(meta.rotation, piece)
            r = work.reservation
            lo, hi = push_range(r.first, r.end, piece.before, piece.after, r.geometry.block_size)
            if hi > lo:
                job = work.job(lo, hi, instances.setdefault(r.endpoints, len(instances)))
                (exchanged if work.exchanges else direct).append((work, job))
        if direct:
            plans = self._planner.plan([job for _, job in direct], meta.rotation)
            for (work, _), plan in zip(direct, plans, strict=True):
                work.plans[meta.rotation] = plan
        if exchanged and self.exchanging is not None:
            works = [work for work, _ in exchanged]
            self.exchanging.regrouper.plan(meta.rotation, works, [job for _, job in exchanged])
            for work in works:
                work.exchanged.add(meta.rotation)
        return bool(direct or exchanged)

    def _layer(self, step: Step, layer: int) -> None:
        """A layer is computed: its KV is in the cache, and may leave."""
        for fill in step.fills:
            self._fill(fill, layer)
        unit, now = Unit(step.meta.rotation, layer), self.process.clock()
        actions: list[Action] = []
        for push, work in self.works.items():
            plan = work.plans.get(unit.step)
            for rank in plan.by_rank if plan is not None else ():
                actions += self.sender.offer(now, push, rank, unit, plan.nbytes(rank))
        self.act(actions)
        if self.exchanging is not None:
            self.exchanging.regrouper.computed(unit.step, layer, self.exchanging.stream.record())
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
                staged = unit_of(claim).part > 0
                if staged or push == fill.push or self.sender.state(push, claim.d_rank) not in _LIVE:
                    continue
                read = set(((spans.src - BASE) % plane // stride).tolist())
                if not fill.touched.isdisjoint(read):
                    raise Violation(f"promise 2: {self.process.name} overwrites blocks that push {push} still reads")

    def _end(self, step: Step) -> None:
        final = [piece.push for piece in step.meta.slices if piece.final and piece.push in self._members]
        behind = {push for push in final if self._members[push].exchanges}
        number = step.meta.rotation
        self._sealed(Sealed(number, tuple(push for push in final if push not in behind)))
        if self.exchanging is not None:
            self.exchanging.regrouper.forward(Sealed(number, tuple(p for p in final if p in behind), True))
            self.announce()
        if any(not piece.final for piece in step.meta.slices):
            self.engine.cluster.cut_off_perhaps(self)
        self.engine.scheduler.post(0.0001, self.engine.rank_done, self.index, self.missed())

    # -- exchanges

    def missed(self) -> list[Exchanged]:
        """Told to the scheduler with each step."""
        if self.exchanging is None:
            return []
        wanted = self.exchanging.regrouper.wanted()
        return [(unit.step, unit.layer + self._first_layer, unit.part) for unit in wanted]

    def owed(self) -> bool:
        """Whether anything was missed and is still wanted. A shortcut: the engine would find out by asking."""
        return self.exchanging is not None and len(self.exchanging.regrouper._missed) > 0

    def wants(self, push: str, step: int) -> bool:
        work = self.works.get(push)
        return work is not None and step in work.exchanged

    def stream_moved(self) -> None:
        self.process.post(self.process.world.rng.uniform(0.0, 0.001), self._news)

    def _news(self) -> None:
        self.announce()
        self.pump()

    def announce(self) -> None:
        while self.exchanged:
            head = self.exchanged[0]
            if isinstance(head, Sealed):
                self._sealed(head)
            elif not head.event.done():
                return
            else:
                self._staged(head)
            self.exchanged.popleft()

    def _staged(self, item: Staged) -> None:
        """Offer what an exchange has brought; bytes of pushes that ended or started over meanwhile are dropped."""
        parts = self.exchanging
        if parts is None:
            return
        if item.error is not None:
            self._fail(item.part.works, str(item.error))
        for index, slot in enumerate(item.slots):
            if slot is None:
                continue
            strangers = item.strangers(index) if item.error is None else []
            if strangers and not self.engine.cluster.mutation.believes_strangers:
                self._fail(item.part.pushes(index), f"prefill ranks {strangers} did not give their part")
            elif item.error is None:
                self._offer(item, index, slot)
            parts.pieces.unused(slot)
            parts.regrouper.arrived(item.unit, index)
        self._seal_late()

    def _offer(self, item: Staged, index: int, slot: StagingSlot) -> None:
        planned, unit, parts = item.part.rows.plan.slots[index], item.unit, self.exchanging
        for member, writes in planned.writes.items():
            work, rank = item.part.works[member], planned.d_rank
            piece = Piece(slot, writes, None)
            if parts is None or not piece.nbytes or work.push not in self.works or unit.step not in work.exchanged:
                continue
            if parts.pieces.add(work.push, rank, unit, piece):
                self.act(self.sender.offer(self.process.clock(), work.push, rank, unit, piece.nbytes))

    def _fail(self, works: Iterable[PushWork], why: str) -> None:
        for work in works:
            if work.push in self.works:
                self.act(self.sender.abort(self.process.clock(), work.push, "PD-XFER-006", why))

    def _sealed(self, item: Sealed) -> None:
        for push in item.pushes:
            work = self.works.get(push)
            if work is not None and work.final_step == item.step:  # else it was preempted and starts over
                self._unsealed.add(push)
        self._seal_late()

    def _seal_late(self) -> None:
        patient = self.exchanging is not None and not self.engine.cluster.mutation.seals_early
        for push in sorted(self._unsealed):
            if push not in self.works:
                self._unsealed.discard(push)
            elif not patient or not self.exchanging.regrouper.owes(push):
                self._unsealed.discard(push)
                self.act(self.sender.seal(self.process.clock(), push))

    # -- writing

    def pump(self) -> None:
        """Claim what may be written now and submit it, all for one destination and layer together."""
        now = self.process.clock()
        claims: list[Claim] = []
        for claim in self.sender.claim(now, self._idle):
            if claim.push in self._held:
                self.act(self.sender.returned(now, claim))
            else:
                claims.append(claim)
        if not claims:
            return
        cluster = self.engine.cluster
        mixed = cluster.mutation.sessions_mixed
        for peer, group in grouped(claims, self.works, FUSED, _no_session if mixed else self.sender.session):
            addresses = self.sender.addresses(group[0].push, group[0].d_rank)
            if addresses is None:
                raise Violation(f"{self.process.name} may write, but does not know where")
            flight = Flight(self, cluster.decode_rank(peer), peer, addresses.session)
            for claim in group:
                self._add(now, flight, claim)
            if not flight.claims:
                continue
            self._busy[peer] = self._busy.get(peer, 0) + 1
            if cluster.world.chance(cluster.settings.faults.submit_stall):
                cluster.stall(self)
            self.process.post(0.0, self._submit, flight)

    def _idle(self, peer: Any) -> bool:
        return self._busy.get(peer, 0) < IN_FLIGHT

    def _add(self, now: float, flight: Flight, claim: Claim) -> None:
        theirs = self.sender.addresses(claim.push, claim.d_rank)
        if self.engine.cluster.mutation.sessions_mixed and theirs is not None:
            flight.session = theirs.session
        if theirs is None or theirs.session != flight.session:
            raise Violation(f"promise 1: {self.process.name}: one batch, two sessions")
        spans = self._spans(claim, theirs)
        if spans is None:
            self.act(self.sender.returned(now, claim))
            self.act(self.sender.abort(now, claim.push, "PD-XFER-002", "the step was forgotten"))
            return
        flight.claims.append(claim)
        flight.pieces.append((claim.push, self._serials[claim.push], spans))

    def _spans(self, claim: Claim, theirs: LayerAddresses) -> Triples | None:
        """None if the step's plan, or what was staged, is forgotten."""
        work, unit = self.works[claim.push], unit_of(claim)
        if unit.part == 0 or self.exchanging is None:
            known = unit.step in work.plans
            return spans_of(work, claim, self.memory.bases, theirs) if known else None
        piece = self.exchanging.pieces.get(claim.push, claim.d_rank, unit)
        if piece is None:
            return None
        return aimed(piece.writes, [piece.slot.address] * len(piece.writes), work, unit, theirs)

    def _submit(self, flight: Flight) -> None:
        self.engine.cluster.wire.fly(flight)
        now = self.process.clock()
        self.act([action for claim in flight.claims for action in self.sender.submitted(now, claim)])

    def returned(self, flight: Flight, ok: bool) -> None:
        """The transport has the outcome."""
        self._busy[flight.peer] -= 1
        if not ok:
            self.trouble = self.process.world.now
        now = self.process.clock()
        actions: list[Action] = []
        for claim in flight.claims:
            if self.exchanging is not None:
                self.exchanging.pieces.written(now, claim.push, claim.d_rank, unit_of(claim), ok)
            actions += self.sender.wrote(now, claim, ok)
        self.act(actions)
        if self._step is not None and self._step.waiting:
            self._drained(self._step, False)
        self.pump()

    def readable(self, staged: bool) -> tuple[NDArray[np.uint8], int]:
        """What writes read, and where it begins."""
        if staged and self.exchanging is not None:
            return self.exchanging.bytes, STAGING
        return self.memory.bytes, BASE

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
        for action in actions:
            if isinstance(action, Send):
                self.engine.cluster.to_decode(self, action.peer, action.message)
            elif isinstance(action, Closed):
                self._close(action)
            elif isinstance(action, Note):
                if action.stage == "drain":
                    world.gave_up("P", str(action.facts["why"]))
                if world.tracing:
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
        self._unsealed.discard(closed.push)
        if self.exchanging is not None:
            self.exchanging.pieces.drop(self.process.clock(), closed.push)
            self.exchanging.regrouper.forget(closed.push)
        self.engine.scheduler.post(
            self.process.world.rng.uniform(0.0002, 0.02), self.engine.closed, closed.push, self.index
        )

    # -- what must be nothing in the end

    def left(self) -> dict[str, int]:
        found = {
            "records": self.sender.record_count(),
            "works": len(self.works),
            "members": len(self._members),
            "unsealed": len(self._unsealed),
            "flights": sum(f.target.process.alive for f in self.flights),
            "timers": int(self.sender.next_wake() is not None),
        }
        parts = self.exchanging
        if parts is not None:
            stats = parts.regrouper.stats()
            found |= {
                "exchanges waiting": len(parts.stream.queue) + len(self.exchanged),
                "steps": int(stats["steps"]),
                "missing": int(stats["missing"]),
                "pieces": len(parts.pieces),
                "slots": int(stats["slots_taken"]),
                "slots lost": parts.spoiled(),
            }
        return found


def _no_session(claim: Claim) -> None:
    """All claims alike: what one batch per session is not."""


def stage_geometry(g: CacheGeometry, stage: int) -> CacheGeometry:
    return CacheGeometry(g.block_size, g.kv_heads, g.tp_size, g.dtype, g.packing, g.regions, (g.stages[stage],))
