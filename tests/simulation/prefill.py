# SPDX-License-Identifier: Apache-2.0
"""Prefill workers: the production core, writer, steps and exchanger on a simulated device, wire, network and clock.

This module simulates vLLM's model runner (when and where layers are computed), the device's streams, and the threads'
wake-ups (the writer's turns). It decides nothing about a push.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simulation.exchange import STAGING, Flat, RankGroup, RankStream, StreamEvent
from simulation.memory import BASE, Cells, Content, Planes, RankMemory, shade
from simulation.settings import DRAFT, MODEL, stage_geometry
from simulation.tables import NULL, needed
from simulation.wire import Flight
from simulation.world import Alarm, Process, Violation
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.layout import attention_of
from vllm_ascend_pd.geometry.regroup import Room
from vllm_ascend_pd.metadata import MissedExchange, PrefillStep
from vllm_ascend_pd.prefill.worker.core.batches import Batch, Triples, staged, unit_of
from vllm_ascend_pd.prefill.worker.core.pushes import Pushes
from vllm_ascend_pd.prefill.worker.core.register import Effect, PushSite, Writable
from vllm_ascend_pd.prefill.worker.exchanger import Exchanger
from vllm_ascend_pd.prefill.worker.writer import News, Sealed, Writer
from vllm_ascend_pd.protocol.actions import Closed, Note, Send
from vllm_ascend_pd.protocol.identity import Contributor, Endpoint
from vllm_ascend_pd.protocol.messages import Message
from vllm_ascend_pd.protocol.states import PairState
from vllm_ascend_pd.regroup.core.staging import Staging
from vllm_ascend_pd.transport.base import WriteState

if TYPE_CHECKING:
    from simulation.prefill_engine import PrefillEngine

_LIVE = (PairState.ASK, PairState.PUSH)


@dataclass(slots=True, eq=False)
class Fill:
    """Tokens [first, last) of a request, computed by a step into these blocks, by group."""

    push: str
    content: Content
    tables: tuple[NDArray[np.int64], ...]
    first: int
    last: int
    before: int = 0  # tokens of its prompt computed by earlier steps
    cells: dict[Planes, Cells] = field(default_factory=dict)
    touched: frozenset[int] = frozenset()


@dataclass(slots=True)
class EngineStep:
    """Work of an engine's ranks in a step, and the metadata for their connectors."""

    meta: PrefillStep
    fills: list[Fill]
    layer_s: float
    finished: tuple[str, ...] = ()  # requests that have ended without blocks
    begun: float = 0.0  # preempted requests are drained from then on
    computing: int = 0  # layers that the device has not reached
    ended: bool = False  # every hook has been called
    behind: list[StreamEvent] = field(default_factory=list)  # reached when the device has finished the step
    cached_fills: list[Fill] = field(default_factory=list)  # cached blocks, by requests of the next step


class SimulatedWriter(Writer):
    """A writer that may be stopped between the claim of a batch and its submission."""

    rank: PrefillRank

    def _send(self, batch: Batch) -> None:
        rank = self.rank
        rank.wire.take(batch)
        cluster = rank.engine.cluster
        if cluster.world.chance(cluster.settings.faults.submit_stall):
            cluster.stall(rank)
        rank.process.post(0.0, rank.guarded, super()._send, batch)


class RankWire:
    """The data path of one rank, with the writer's interface."""

    def __init__(self, rank: PrefillRank) -> None:
        self._rank = rank
        self._handles = itertools.count(1)
        self._taken: deque[Flight] = deque()  # in the order of submission
        self._flights: dict[int, Flight] = {}

    def take(self, batch: Batch) -> None:
        """Check a claimed batch: it uses one session, and the claims' destinations."""
        rank = self._rank
        target = rank.engine.cluster.decode_rank(batch.peer, session=batch.session)
        flight = Flight(rank, target, batch.peer, batch.session)
        src, dst, size = np.array(batch.src), np.array(batch.dst), np.array(batch.size)
        end = 0
        for claim in batch.claims:
            push, unit, start = rank.core.records[claim.push], unit_of(claim), end
            theirs = push.pairs[claim.d_rank].addresses
            if theirs is None or theirs.session != batch.session:
                raise Violation(f"promise 1: {rank.process.name}: one batch, two sessions")
            plan = None if unit.sub_step else push.plan(unit.step, unit.layer)
            end += sum(
                map(len, staged(push, claim).writes if plan is None else plan.by_rank[push.rank_of(claim.d_rank)])
            )
            flight.claims.append(claim)
            spans = Triples(src[start:end], dst[start:end], size[start:end])
            flight.writes.append((claim.push, rank.serials[claim.push], spans))
        if end != len(batch.dst):
            raise Violation(f"{rank.process.name} writes something else than it has claimed")
        self._taken.append(flight)

    def submit(self, session: str, src: Sequence[int], dst: Sequence[int], size: Sequence[int]) -> int:
        faults, world = self._rank.engine.cluster.settings.faults, self._rank.process.world
        flight, handle = self._taken.popleft(), next(self._handles)
        if world.chance(faults.writer_dies):
            world.fault("writer died")
            raise OSError("the transfer engine broke")
        self._flights[handle] = flight
        if world.chance(faults.unissued):
            world.fault("write not issued")
            self._rank.process.post(world.rng.uniform(0.0, 5.0), self._rank.returned, flight, WriteState.UNISSUED)
        else:
            self._rank.engine.cluster.wire.fly(flight)
        return handle

    def poll(self, handle: int) -> WriteState:
        flight = self._flights.get(handle)  # None: claimed, and not submitted yet
        if flight is None or flight.outcome is WriteState.PENDING:
            return WriteState.PENDING
        return self._flights.pop(handle).outcome


class RankExchanges:
    """Slots, and a stream for exchanges, of a rank in an engine that regroups."""

    def __init__(self, rank: PrefillRank, group: RankGroup, room: Room) -> None:
        settings = rank.engine.cluster.settings
        count = settings.slots * settings.slot_destinations
        self.bytes = np.zeros(room.slot * count, dtype=np.uint8)
        self.staging = Staging(Flat(self.bytes), room.slot, settings.slots, waits=False)
        self.stream = RankStream(group, rank.contributor.rank, rank.memory, rank.stream_moved)
        self.stream.fails = lambda: _fails(rank)


def _fails(rank: PrefillRank) -> bool:
    world = rank.process.world
    if not world.chance(rank.engine.cluster.settings.faults.exchange_error):
        return False
    world.fault("part of an exchange went wrong")
    return True


class PrefillRank:
    """One worker of one stage."""

    def __init__(
        self, engine: PrefillEngine, stage: int, rank: int, group: RankGroup | None, room: Room | None
    ) -> None:
        cluster, settings = engine.cluster, engine.cluster.settings
        self.engine, self.scheduler = engine, engine.scheduler  # that of its own incarnation
        self.index = engine.geometry.worker(stage, rank)
        self.stage = stage
        self.process: Process = Process(cluster.world, f"P{engine.index}.{stage}.{rank}")
        self.memory: RankMemory = RankMemory(settings, engine.shape, engine.geometry, rank, stage)
        self.contributor: Contributor = Contributor(stage, rank)
        self.flights: dict[Flight, None] = {}
        self.trouble = -1e9  # the time when a write last failed or was slow
        self.serials: dict[str, int] = {}
        self._texts: dict[str, Content] = {}  # by push
        self._step: EngineStep | None = None
        self._hooked: StreamEvent | None = None
        self._waking = self._turning = False
        self._writer_died = False
        self.exchanging = RankExchanges(self, group, room) if group is not None and room is not None else None
        geometry, parts = stage_geometry(engine.geometry, stage), self.exchanging
        self.core: Pushes = cluster.mutation.pushes()(
            settings.push(),
            PushSite(self.process.incarnation, self.contributor, MODEL),
            geometry,
            self.memory.bases,
            parts.staging if parts is not None else None,
            room,
            tracing=lambda: False,
        )
        self.wire = RankWire(self)
        self.writer: SimulatedWriter = cluster.mutation.writer(self.deciding, self.wire, self.process.clock)
        self.writer.rank = self
        exchanger = None
        if parts is not None:
            stream: Any = parts.stream
            asked = self.deciding, self.process.clock, _never
            exchanger = Exchanger("", *asked, stream, parts.staging, stream, self.put)
        self._steps = cluster.mutation.steps(
            geometry.layers,
            self.deciding,
            self._record,
            self.put,
            self.process.clock,
            exchanger,
            drafts=geometry.drafts,
            states=geometry.states,
        )
        self._ending: EngineStep | None = None
        self._busy = False  # the host runs a step
        self._waiting: deque[EngineStep] = deque()  # for the host
        self._open: deque[EngineStep] = deque()  # begun, and not over
        self._before: EngineStep | None = None  # while a step begins: the one that the device still computes
        self._reached_by = self._latest = 0.0  # when the device is done with the steps before, and with all
        self._alarm = Alarm(self.process, self.core.next_wake, self._tick)

    # -- a step

    def run_step(self, step: EngineStep) -> None:
        """Run a step once the host has run the one before, which the device may still compute."""
        fills = [Fill(f.push, f.content, f.tables, f.first, f.last, f.before) for f in step.fills]
        self._waiting.append(EngineStep(step.meta, fills, step.layer_s, step.finished))
        self._run_next()

    def _run_next(self) -> None:
        """Preempted pushes are drained before anything is overwritten."""
        if self._busy or not self._waiting or self._ended():
            return
        self._busy, step = True, self._waiting.popleft()
        if not step.meta.preempted:
            self._compute(step)
            return
        self._step, step.begun = step, self.process.world.now
        with self.deciding() as core:
            core.preempt(self.process.clock(), step.meta.preempted)
        self._drain(step)

    def _ended(self) -> bool:
        """End an engine whose writer has died, at its next step after its pushes are over."""
        try:
            self.core.check()
        except PdError:
            self.engine.cluster.prefill_ended_itself(self)
            return True
        return False

    def _drain(self, step: EngineStep) -> None:
        """Block the engine's thread until the writes that read preempted blocks have ended, or for a bounded time."""
        if self._step is not step:
            return
        with self.deciding() as core:
            left = core.drain(self.process.clock())
        if left > 0:
            self.process.post(left, self._drain, step)
        else:
            self._step = None
            self._check_drained(step)
            self._compute(step)

    def _check_drained(self, step: EngineStep) -> None:
        """Check that P's forward waits for writes that read what it will overwrite, within the bound."""
        drain_s, waited = self.engine.cluster.settings.timers.preempt_drain_s, self.process.world.now - step.begun
        if waited > drain_s + 0.01 and self.process.disturbed < step.begun:
            raise Violation(f"promise 4: {self.process.name} waited {waited:.2f} s for preempted blocks")
        reads = {
            push for flight in self.flights if flight.outcome is WriteState.PENDING for push, _, _ in flight.writes
        }
        if waited < drain_s - 0.01 and not self._writer_died and not reads.isdisjoint(step.meta.preempted):
            raise Violation(f"promise 2: {self.process.name} does not wait for writes that read preempted blocks")

    def _compute(self, step: EngineStep) -> None:
        """Call the hooks layer by layer; the device follows."""
        meta, world = step.meta, self.process.world
        for start in meta.starts:
            self.serials[start.push] = self.engine.cluster.serial_of(start.reservation.transfer)
        self._texts.update((fill.push, fill.content) for fill in step.fills)
        world.stats["catch-ups"] += len(meta.catch_ups) if self.exchanging is not None else 0
        self._before = next((each for each in reversed(self._open) if each.computing), None)
        self._reached_by = self._latest
        self._open.append(step)
        self._cached([Fill(f.push, f.content, f.tables, 0, f.before) for f in step.fills if f.before])
        self._steps.begin(meta)
        self._before = None
        self.finished(step.finished)
        names, states = self.engine.geometry.stages[self.stage], self.engine.geometry.states
        layers = [i for i, name in enumerate(names) if not attention_of(name)] if meta.slices or step.fills else []
        step.computing = len(layers)
        at = 0.0
        for layer in layers:
            at += step.layer_s * world.rng.uniform(0.5, 1.5)
            if names[layer] in states:
                self.process.post(at, self._unhooked, step, layer)
            elif names[layer] != DRAFT:
                self.process.post(at, self._hook, step, layer)
            elif world.chance(self.engine.cluster.settings.faults.undrafted):
                world.fault("draft model did not run")
                step.computing -= 1
                for fill in step.fills:
                    fill.content.undrafted = True
            else:
                at += step.layer_s  # the sampler first
                self.process.post(at, self._hook, step, layer)
                for _ in range(world.rng.choice((0, 0, 1, 2))):  # the tokens drafted after the first
                    at += step.layer_s
                    self.process.post(at, self._steps.computed, DRAFT)
        self.process.post(at + 1e-6, self._end, step)

    def _cached(self, fills: list[Fill]) -> None:
        """Fill what a request found in P's cache, once the device has done the step before."""
        if self._before is not None:
            self._before.cached_fills += fills
            return
        for fill in fills:
            for layer, name in enumerate(self.engine.geometry.stages[self.stage]):
                if name not in self.engine.geometry.states:
                    self._fill(fill, layer)

    def _unhooked(self, step: EngineStep, layer: int) -> None:
        self._call(step, layer)

    def _hook(self, step: EngineStep, layer: int) -> None:
        """Return from the model's call of a layer, and call its hook."""
        self._hooked = self._call(step, layer)
        if layer % 2 == 0:  # not every layer says when its cache is written
            self._steps.written("")
        self._steps.computed(self.engine.geometry.stages[self.stage][layer])
        self._hooked = None

    def _call(self, step: EngineStep, layer: int) -> StreamEvent:
        """Return from the model's call of a layer; the device computes it later."""
        world, event = self.process.world, StreamEvent()
        behind = world.rng.uniform(0.0, step.layer_s)
        if world.chance(self.engine.cluster.settings.faults.late_event):
            world.fault("layer computed late")
            behind = world.rng.uniform(0.0, 20 * step.layer_s)
        behind = max(behind, self._reached_by + 1e-9 - world.now)
        self._latest = max(self._latest, world.now + behind)
        self.process.post(behind, self._reached, step, layer, event)
        return event

    def _record(self) -> StreamEvent:
        if self._hooked is not None:
            return self._hooked
        before = self._ending or self._before
        event = StreamEvent(reached=before is None or not before.computing)
        if before is not None:
            before.behind.append(event)
        return event

    def _reached(self, step: EngineStep, layer: int, event: StreamEvent) -> None:
        """Put a layer's KV into the cache."""
        names = self.engine.geometry.stages[self.stage]
        for fill in step.fills:
            if layer and attention_of(names[layer - 1]) == names[layer]:
                self._fill(fill, layer - 1)  # the indexer runs before the attention
            self._fill(fill, layer)
        event.reached = True
        if self.exchanging is not None:
            self.exchanging.stream.soon()
        self._look_again()
        step.computing -= 1
        self._pass(step)
        self._end_perhaps()

    def _pass(self, step: EngineStep) -> None:
        """Reach the events recorded after the last layer."""
        if not step.computing:
            fills, step.cached_fills = step.cached_fills, []
            self._cached(fills)
            for event in step.behind:
                event.reached = True
            if step.behind and self.exchanging is not None:
                self.exchanging.stream.soon()
            self._look_again()

    def _fill(self, fill: Fill, layer: int) -> None:
        memory, planes = self.memory, self.memory.planes[layer]
        if planes not in fill.cells:
            table, group = fill.tables[planes.kind.group_index], planes.kind.group
            begin, size = fill.first, group.block_size
            if group.stateful:
                begin = fill.last - 1
            elif group.partial:  # layers with a window have only the cached tokens in it
                begin = max(begin, next((i for i, block in enumerate(table) if block != NULL), len(table)) * size)
            first, last = planes.cell_range(begin, fill.last)
            fill.cells[planes] = planes.cells(fill.content, table, first, last, fill.last)
            fill.touched |= frozenset(table[begin // group.covers : needed(group, fill.last)].tolist())
        if self.flights:
            self._check_overwrite(fill)
        for region, (offsets, cells) in enumerate(fill.cells[planes]):
            memory.plane(layer, region)[offsets] = cells + np.uint8(shade(memory.layers[layer], region))

    def _check_overwrite(self, fill: Fill) -> None:
        """Check promise 2: blocks that a live push may still read are not overwritten for another request.

        A request of the same text may share them, and compute their next layer.
        """
        for flight in self.flights:
            for claim, (push, _, spans) in zip(flight.claims, flight.writes, strict=True):
                staged = unit_of(claim).sub_step > 0
                if (
                    staged
                    or self._texts.get(push) is fill.content
                    or self.core.sender.state(push, claim.d_rank) not in _LIVE
                ):
                    continue
                read = set(self.memory.block_of(spans.src - BASE).tolist())
                if not fill.touched.isdisjoint(read):
                    raise Violation(f"promise 2: {self.process.name} overwrites blocks that push {push} still reads")

    def _end(self, step: EngineStep) -> None:
        self._ending = step
        self._steps.end()
        self._ending = None
        self._pass(step)
        step.ended = True
        if any(not push_slice.final for push_slice in step.meta.slices):
            self.engine.cluster.cut_off_perhaps(self)
        self._end_perhaps()
        self._busy = False
        self._run_next()

    def _end_perhaps(self) -> None:
        """End a step when its sampled tokens are there, after the device has finished it and all before."""
        while self._open and self._open[0].ended and not self._open[0].computing:
            self._open.popleft()
            self.scheduler.post(0.0001, self.engine.rank_done, self.index, self.missed())

    def finished(self, ended: Sequence[str]) -> None:
        """End requests, and report those whose pushes are over here to the scheduler."""
        for request in sorted(self.core.closings.take_finished(ended)):
            delay = self.process.world.rng.uniform(0.0002, 0.02)
            self.scheduler.post(delay, self.engine.sent, request, self.index)

    def missed(self) -> list[MissedExchange]:
        """Return the missed exchanges, which the scheduler gets with each step."""
        return self.core.plans.take_missed()

    def owed(self) -> bool:
        """Return whether a missed exchange is still wanted: a shortcut, because the engine would find out by asking."""
        return self.core.exchanges is not None and len(self.core.exchanges.missed) > 0

    # -- the writer: it runs at news, and soon again while it has anything to look at

    def put(self, item: News) -> None:
        if not self._writer_died:
            self.writer.put(item)
            self._look_again()

    def stream_moved(self) -> None:
        self._look_again()

    def _look_again(self) -> None:
        """Wake the writer if the next thing it waits for has come; otherwise its turn would change nothing."""
        for queue in (self.writer._computed, self.writer._exchanged):
            if queue and (isinstance(queue[0], Sealed) or queue[0].event.done()):
                self._wake()
                return

    def _wake(self) -> None:
        if not self._waking and not self._writer_died:
            self._waking = True
            self.process.post(self.process.world.rng.uniform(0.0, 0.001), self._turn)

    def _turn(self) -> None:
        self._waking, self._turning = False, True
        self.guarded(self.writer.turn)
        self._turning = False
        self._alarm.set()
        self._check_asleep()

    def guarded(self, act: Callable[..., None], *args: Any) -> None:
        """Call `act` with the thread's error handling."""
        if self._writer_died:
            return
        try:
            act(*args)
        except OSError as error:
            self._writer_died = True
            self.writer.died(error)

    def _check_asleep(self) -> None:
        """Check that a writer that waits for news has nothing to write."""
        if self._waking or self.writer.busy or self._writer_died:
            return
        now = self.process.clock()
        for push in self.core.records.values():
            for pair in push.pairs.values():
                if push.paused or pair.state is not PairState.PUSH or not pair.coverage.pending:
                    continue
                if pair.authority is not None and now < pair.authority - 1e-6:
                    raise Violation(f"promise 4: {self.process.name} sleeps although it may write for push {push.name}")

    def returned(self, flight: Flight, state: WriteState) -> None:
        """Record the transport's outcome, which the writer sees at its next look."""
        if state is not WriteState.LANDED:
            self.trouble = self.process.world.now
        flight.outcome = state
        self._wake()
        if self._step is not None:
            self.process.post(0.002, self._drain, self._step)

    def readable(self, staged: bool) -> tuple[NDArray[np.uint8], int]:
        """Return the memory that writes read, and its address."""
        if staged and self.exchanging is not None:
            return self.exchanging.bytes, STAGING
        return self.memory.bytes, BASE

    # -- the side channel

    def deliver(self, peer: Endpoint, message: Message) -> None:
        with self.deciding() as core:
            core.message(self.process.clock(), peer, message)
        self._check_asleep()

    def unreachable(self, peer: Endpoint) -> None:
        with self.deciding() as core:
            core.unreachable(self.process.clock(), peer, "connection refused")

    def _tick(self) -> None:
        with self.deciding() as core:
            core.tick(self.process.clock())
        self._check_asleep()

    # -- what the core wants done

    def deciding(self) -> PrefillRank:
        """Run the effects at the end of the block. Not a generator, because this runs very often."""
        return self

    def __enter__(self) -> Pushes:
        return self.core

    def __exit__(self, *failed: object) -> None:
        for effect in self.core.take_effects():
            self._act(effect)
        if not self._turning:  # otherwise once, at the turn's end
            self._alarm.set()

    def _act(self, effect: Effect) -> None:
        world = self.process.world
        if isinstance(effect, Note):
            if effect.stage == "drain":
                world.gave_up("P", str(effect.facts["why"]))
            if world.tracing:
                world.log(self.process.name, effect.stage, *(f"{k}={v}" for k, v in effect.facts.items()))
        elif isinstance(effect, Send):
            peer: Any = effect.peer
            self.engine.cluster.to_decode(self, peer, effect.message)
        elif isinstance(effect, Writable):
            self._wake()
        elif isinstance(effect, Closed):
            self._check_closed(effect)
            self.finished(())

    def _check_closed(self, closed: Closed) -> None:
        for flight in self.flights:
            for push, _, _ in flight.writes:
                if push == closed.push and flight.outcome is WriteState.PENDING:
                    raise Violation(f"promise 2: {self.process.name} closed push {closed.push} while it writes")

    # -- what must be empty at the end

    def left(self) -> dict[str, int]:
        open_pushes = [push for push in self.core.records.values() if not push.closed]
        counts = {
            "records": self.core.sender.record_count(),
            "pushes": len(open_pushes),
            "unsealed": sum(push.sealing for push in self.core.records.values()),
            "flights": sum(flight.target.process.alive for flight in self.flights),
            "timers": int(self.core.next_wake() is not None),
            "requests not reported as finished": len(self.core.closings.reported_to),
        }
        parts, made = self.exchanging, self.core.exchanges
        if parts is not None and made is not None:
            counts |= {
                "exchanges waiting": len(parts.stream.queue),
                "steps": len(made.steps),
                "missing": len(made.missed),
                "slot shares": sum(len(push.slot_shares) for push in self.core.records.values()),
                "owed": sum(len(push.owed) for push in self.core.records.values()),
                "slots": made.staging.taken,
            }
        return counts


def _never(seconds: float) -> None:
    raise Violation(f"promise 4: an exchange would wait {seconds} s for a slot in a layer's hook")
