# SPDX-License-Identifier: Apache-2.0
"""Decode engines: a scheduler with a small block pool and its ranks, each with the production core."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from simulation.broker import SECRETS, URL
from simulation.exchange import StreamEvent
from simulation.memory import Content, RankMemory, shade
from simulation.settings import (
    DIGEST,
    DRAFT,
    FIRST_WAIT_S,
    MODEL,
    VOCABULARY,
    EngineShape,
    stage_geometry,
)
from simulation.tables import BlockTables, needed, pool
from simulation.world import Alarm, Process, Violation
from vllm_ascend_pd.decode.scheduler.core.book import WITHHELD
from vllm_ascend_pd.decode.scheduler.core.load import LoadEffect, Start, Wanted
from vllm_ascend_pd.decode.scheduler.core.offers import Offers, SendMessage
from vllm_ascend_pd.decode.scheduler.core.routes import KvRoute, Ticket, read_ticket
from vllm_ascend_pd.decode.worker.core.loads import Loads
from vllm_ascend_pd.geometry.layout import WINDOW, Group
from vllm_ascend_pd.metadata import Bind, DecodeStep, LoadEnd
from vllm_ascend_pd.protocol.actions import Action, Note, Report, Revoke, Send, Verify
from vllm_ascend_pd.protocol.auth import seal
from vllm_ascend_pd.protocol.dialects import Meet
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstToken, FirstTokenRequest
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId
from vllm_ascend_pd.protocol.meeting import Meeting, Offer, SourceId, Unwanted
from vllm_ascend_pd.protocol.messages import Message
from vllm_ascend_pd.protocol.states import ReservationState
from vllm_ascend_pd.protocol.versions import WHOLE

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster
    from simulation.router import Leg


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request at one D engine."""

    name: str
    seed: int
    tokens: int
    content: Content
    tables: BlockTables = field(default_factory=lambda: BlockTables(()))
    transfer: TransferId | None = None
    serial: int = 0
    arrived: float = 0.0
    first: int = 0  # first token to load
    end: int = 0
    started: float = 0.0
    stopped_before: float = 0.0  # seconds that its engine's processes had been stopped before it started
    reports: set[int] = field(default_factory=set)
    left: bool = False
    outputs: list[int] = field(default_factory=list)  # first tokens sent to the client: P's, or 0 for D's own
    push: str = ""  # the push of its KV
    whole: bool = False  # it can begin only with P's token
    held_since: float = 0.0  # the time since when it waits for its first token, with its KV complete
    # the time when its engine learned that its prefill had failed, and no P had begun to push
    hopeless: float | None = None
    params: dict[str, object] = field(default_factory=dict)
    leg: Leg | None = None  # of a request whose router does not send to D first
    source: SourceId | None = None  # from P's answer
    state: str = "waiting"


class DecodeRank:
    """One worker: the production core, a memory, a session."""

    def __init__(self, engine: DecodeEngine, stage: int, rank: int) -> None:
        cluster, settings = engine.cluster, engine.cluster.settings
        self.engine, self.scheduler = engine, engine.scheduler  # that of its own incarnation
        self.incarnation = engine.incarnation
        self.index = engine.geometry.worker(stage, rank)
        self.process = Process(cluster.world, f"D{engine.index}.{self.index}")
        self.memory = RankMemory(settings, engine.shape, engine.geometry, rank, stage)
        self.session = cluster.world.name("session")
        # the serial of the transfer that may write each block now
        self.owner = np.zeros(engine.shape.blocks, dtype=np.int64)
        self.requests: dict[TransferId, DecodeRequest] = {}
        self.connected: set[str] = set()
        self.reported: set[TransferId] = set()
        self.undrafted: set[TransferId] = set()  # from a P without the draft model
        self.unrevoked_s = 0.0  # spent on revocations that did not succeed at once
        self._revoking_since: float | None = None
        self._chance = cluster.world.dice(f"revocation/{self.process.incarnation}")
        self.core = Loads(
            settings.push(),
            stage,
            rank,
            MODEL,
            stage_geometry(engine.geometry, stage),
            lambda: self.memory.addresses(self.session),
            verify=settings.verify,
        )
        self.core.receiver_type = cluster.mutation.receiver  # type: ignore[assignment]
        self._alarm = Alarm(self.process, self.core.next_wake, self._tick)

    # -- what the engine and the world tell it

    def apply(self, step: DecodeStep, requests: dict[TransferId, DecodeRequest]) -> None:
        """Bind a step's metadata."""
        self.requests.update(requests)
        gate = StreamEvent()
        with self._deciding():
            self.core.step(self.process.clock(), step, gate)
        for transfer in step.overs:
            self.requests.pop(transfer, None)
            self.reported.discard(transfer)
            self.undrafted.discard(transfer)
        if step.binds:
            self.process.post(self.engine.cluster.world.rng.expovariate(1 / 0.004), self._gate, step.binds, gate)

    def _gate(self, binds: tuple[Bind, ...], gate: StreamEvent) -> None:
        """Open the gate: the device has finished the blocks' earlier use and their zeroing."""
        for bind in binds:
            request = self.requests.get(bind.transfer)
            if request is None or bind.transfer in self.reported:
                continue
            for blocks in bind.blocks:
                self.memory.clear(blocks)
                self.owner[blocks] = request.serial
        gate.reached = True
        with self._deciding():
            self.core.look(self.process.clock())

    def deliver(self, peer: Any, message: Message) -> None:
        self.connected.add(message.p_incarnation)
        with self._deciding():
            self.core.message(self.process.clock(), peer, message)

    def connection_ended(self, p_incarnation: str) -> None:
        if p_incarnation in self.connected:
            with self._deciding():
                self.core.peer_gone(self.process.clock(), p_incarnation)

    def connection_back(self, p_incarnation: str) -> None:
        with self._deciding():
            self.core.peer_back(self.process.clock(), p_incarnation)

    def _tick(self) -> None:
        with self._deciding():
            self.core.tick(self.process.clock())

    # -- what the core wants done

    def _deciding(self) -> DecodeRank:
        """Run the effects at the end. Not a generator, because this runs very often."""
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *failed: object) -> None:
        if failed[0] is not None:
            return
        reported = 0
        while effects := self.core.take_effects():
            for effect in effects:
                reported += isinstance(effect, Report)
                self._act(effect)
        reports = self.core.take_reports()
        if len(reports) != reported:
            raise Violation(f"{self.process.name} does not tell its scheduler what it has reported")
        for loaded in reports:
            delay = self.engine.cluster.world.rng.uniform(0.0002, 0.02)
            self.scheduler.post(delay, self.engine.reported, loaded, self.index)
        self._alarm.set()

    def _act(self, action: Action) -> None:
        world = self.engine.cluster.world
        if isinstance(action, Note):
            if action.stage == "undrafted":
                self._without_drafts(action)
            if action.stage == "fencing":
                world.gave_up("D", f"{action.facts['code']} {action.facts['detail']}")
            if world.tracing:
                world.log(self.process.name, action.stage, *(f"{k}={v}" for k, v in action.facts.items()))
        elif isinstance(action, Send):
            self.engine.cluster.to_prefill(self.process, action.peer, action.message)
        elif isinstance(action, Report):
            self._report(action)
        elif isinstance(action, Verify):
            # Simulates the checksums by a comparison with the right bytes.
            wrong = self.engine.first_difference(self, self.requests[action.transfer])
            self.core.verified(self.process.clock(), action.transfer, wrong)
        elif isinstance(action, Revoke):
            if self._revoking_since is None:  # else it is tried again
                self._revoking_since = world.now
                self.engine.cluster.check_revocation(self)
                world.stats["revocations"] += 1
            world.log(self.process.name, "REVOKES")
            fails = self._chance.random() < self.engine.cluster.settings.faults.revocation
            self.process.post(world.rng.uniform(0.01, 1.5), self._not_revoked if fails else self._revoked)

    def _without_drafts(self, note: Note) -> None:
        prefills = [
            p
            for p in self.engine.cluster.prefill
            for rank in p.ranks
            if rank.process.incarnation == note.facts["prefill"]
        ]
        if any(p.shape.drafts for p in prefills):
            raise Violation(
                f"promise 3: {self.process.name} does not expect the draft model's layers of a P that has it"
            )
        self.undrafted.update(t for t in self.requests if str(t) == note.facts["transfer"])

    def _report(self, report: Report) -> None:
        request = self.requests.get(report.transfer)
        if request is None or report.transfer in self.reported:
            raise Violation(f"{self.process.name} reported {report.transfer} twice, or never had it")
        self.reported.add(report.transfer)
        self.owner[self.owner == request.serial] = 0

    def waits_for(self) -> list[str]:
        """Return the incarnations of the writers that fences on this rank wait for."""
        receiver = self.core._receiver
        transfers = receiver._transfers.values() if receiver is not None else ()
        fenced = [record for record in transfers if record.state is ReservationState.FENCING]
        return [writer.p_incarnation for record in fenced for writer in record.leased()]

    def _not_revoked(self) -> None:
        world = self.engine.cluster.world
        if self._chance.random() < 0.5:
            self.session = world.name("no session")
            world.fault("revocation failed, peers cut off")
        else:
            world.fault("revocation failed, peers still write")
        with self._deciding():
            self.core.not_revoked(self.process.clock())

    def _revoked(self) -> None:
        if self._revoking_since is not None:
            self.unrevoked_s += self.engine.cluster.world.now - self._revoking_since
        self._revoking_since = None
        if not self.engine.cluster.mutation.blunt_revocation:
            self.session = self.engine.cluster.world.name("session")
        with self._deciding():
            self.core.revoked(self.process.clock(), self.memory.addresses(self.session))


class DecodeEngine:
    """One slot for a D engine, whose incarnations follow each other."""

    def __init__(self, cluster: SimulatedCluster, index: int, shape: EngineShape) -> None:
        self.cluster = cluster
        self.index = index
        self.shape = shape
        self.geometry = cluster.settings.geometry(shape)
        self.alive = False
        self.orphans: list[DecodeRank] = []  # of earlier incarnations
        self._orphaned = cluster.world.dice(f"orphans D{index}")
        self.boot()

    def boot(self) -> None:
        """Start a new incarnation without any state."""
        self.alive = True
        self.scheduler = Process(self.cluster.world, f"D{self.index}.s")
        self.incarnation = self.cluster.world.name(f"D{self.index}@")
        waits = FIRST_WAIT_S, self.cluster.settings.timers.lease_s
        self.book = self.cluster.mutation.loads(self.incarnation, *waits)
        self._unread = self.cluster.world.dice(f"unread {self.incarnation}")
        self.offers = Offers(self.cluster.settings.timers)
        self._alarm = Alarm(self.scheduler, self.offers.next_wake, self._tick)
        self.free = pool(self.geometry, self.shape.blocks)
        self.waiting: deque[DecodeRequest] = deque()
        self.loading: dict[str, DecodeRequest] = {}
        self.decoding: dict[str, DecodeRequest] = {}
        self.held_requests: dict[str, DecodeRequest] = {}  # by request id, as in the book of first tokens
        self.outcomes: deque[tuple[TransferId, str, FirstToken | None]] = deque()
        self._by_transfer: dict[TransferId, DecodeRequest] = {}
        self._stepping = False
        self.ranks = [
            DecodeRank(self, *self.geometry.stage_and_rank(worker)) for worker in range(self.geometry.workers)
        ]
        self._bound_at = [0.0] * len(self.ranks)

    def kill(self) -> None:
        """Kill all processes, as the executor does, or at first only the scheduler."""
        world = self.cluster.world
        self.alive = False
        self.scheduler.kill()
        delays = self.cluster.outlives(self._orphaned)
        for rank in self.ranks:
            if delays is None:
                rank.process.kill()
            else:
                self.orphans.append(rank)
                world.after(self._orphaned.choice(delays), rank.process.kill)
        for request in (*self.waiting, *self.loading.values(), *self.held_requests.values(), *self.decoding.values()):
            request.state = "died with its engine"
            world.stats["requests died with their engine"] += 1
        self.cluster.broker.decode_died(self)
        self.cluster.offering_died(self.incarnation)

    def stopped_s(self) -> float:
        stopped = sum(p.stopped_s for p in (self.scheduler, *(rank.process for rank in self.ranks)))
        return stopped + sum(rank.unrevoked_s for rank in self.ranks)

    # -- the scheduler

    def arrive(self, request: DecodeRequest) -> None:
        self.waiting.append(request)
        self._poke()

    def outcome(self, transfer: TransferId, kind: str, first: FirstToken | None = None) -> None:
        """Handle the metaserver client's callback."""
        self.outcomes.append((transfer, kind, first))
        self._poke()

    def leave(self, request: DecodeRequest) -> None:
        """Handle a client's disconnection."""
        request.left = True
        if request in self.waiting:
            self.waiting.remove(request)
            self._finish(request)
            self._end(request, "left")
        elif request.name in self.loading or request.name in self.held_requests:
            self._finish(request)
            self._poke()

    def _finish(self, request: DecodeRequest) -> None:
        """End the request, and notify the connector as vLLM does."""
        self._route(request)
        self.book.request_finished(request.name)
        self._act()

    def _act(self) -> None:
        """Do what the book wants done."""
        for effect, load in self.book.take_effects():
            if effect is LoadEffect.HANG_UP and load.transfer is not None:
                self.cluster.broker.hung_up(load.transfer)
                self.offers.forget(load.transfer)
            elif effect is LoadEffect.NOT_FETCHED and isinstance(meet := load.route, Meet):
                self.offers.send_unwanted(meet.listener, Unwanted(self.incarnation, meet.source, meet.name))
        self._offered()

    # -- offers

    def _route(self, request: DecodeRequest) -> KvRoute | None:
        """Return the source of its KV: from the router's message, or a ticket of the metaserver."""

        def read() -> KvRoute | None:
            if (leg := request.leg) is not None:
                return Meet(leg.listener, request.source, "" if request.source is not None else leg.name)
            ticket = read_ticket(request.params, frozenset({URL}))
            return ticket if isinstance(ticket, Ticket) else None

        return self.book.route(request.name, read)

    def message(self, endpoint: Endpoint, message: Meeting) -> None:
        self.offers.message(self.scheduler.clock(), endpoint, message)
        self._offered()

    def unreachable(self, endpoint: Endpoint) -> None:
        self.offers.unreachable(self.scheduler.clock(), endpoint, "connection refused")
        self._offered()

    def _tick(self) -> None:
        self.offers.tick(self.scheduler.clock())
        self._offered()

    def _offered(self) -> None:
        for effect in self.offers.take_effects():
            if isinstance(effect, SendMessage):
                self.cluster.to_listener(self, effect.to, effect.message)
            elif (outcome := effect.outcome).final:
                self.cluster.world.stats[f"offers {outcome.kind}"] += 1
                if outcome.failure:
                    self.cluster.world.gave_up("D", str(outcome.failure))
                first = outcome.first if isinstance(outcome.first, FirstToken) else None
                self.outcome(effect.transfer, outcome.failure.code if outcome.failure else "prefilled", first)
        self._alarm.set()

    def _poke(self) -> None:
        if not self._stepping:
            self._stepping = True
            self.scheduler.post(self.cluster.world.rng.uniform(0.0005, 0.02), self._step)

    def _step(self) -> None:
        self._stepping = False
        while self.waiting and self._start(self.waiting[0]):
            self.waiting.popleft()
        self._listen()
        step = self.book.take_step(None, self.geometry)
        for start in self.book.take(self.cluster.world.now):
            self._go_on(start)
        self._act()
        if step.empty:
            return
        world = self.cluster.world
        requests = {bind.transfer: self._by_transfer[bind.transfer] for bind in step.binds}
        for rank in self.ranks:
            # Ranks bind a step at different times, but each rank binds the steps in order.
            at = max(self._bound_at[rank.index] + 1e-6, world.now + world.rng.uniform(0.0001, 0.01))
            self._bound_at[rank.index] = at
            rank.process.post(at - world.now, rank.apply, step, requests)

    def _listen(self) -> None:
        while self.outcomes:
            transfer, kind, first = self.outcomes.popleft()
            if kind == "again":
                self.book.token(transfer, first)
                continue
            failed = kind != "prefilled"
            self.book.answered(transfer, Failure("PD-META-006", kind) if failed else None)
            self.book.token(transfer, first, failed=failed)
            if failed and (request := self._by_transfer.get(transfer)) is not None:
                request.hopeless = self.cluster.world.now

    def _start(self, request: DecodeRequest) -> bool:
        """Allocate and reserve, as update_state_after_alloc does."""
        world, groups = self.cluster.world, self.geometry.tables
        size = max(group.covers for group in groups)
        need = -(-request.tokens // size)
        if sum(needed(group, request.tokens) for group in groups) > len(self.free):
            return False
        request.tables = BlockTables(groups)
        request.tables.grow(0, request.tokens, self.free, world.rng)
        hit = world.rng.choice((0, 0, 0, 1, need)) * size
        computed = min(hit, (request.tokens - 1) // size * size)
        route, leaves, first = self._route(request), self.geometry.recomputes_last, self.cluster.settings.first
        request.whole = leaves and first and self.book.each_p_sends_first(request.name)
        leaves = leaves and not request.whole
        states = any(group.stateful for group in groups)
        count = self.book.wanted(request.name, request.tokens, computed, recomputes_last=leaves, states=states)
        self.free.extend(request.tables.let_go(computed + count))
        request.started = world.now
        request.stopped_before = self.stopped_s()
        if count <= 0:
            self.book.loads_nothing(request.name)
            self._act()
            self._decode(request)
            return True
        deadline = self.cluster.settings.timers.recv_deadline_s
        bind = self.book.reserve(request.name, count, request.tables.ids, groups, deadline, world.name("uuid"))
        request.transfer, request.state = bind.transfer, "loading"
        request.first, request.end = computed, computed + count
        self.loading[request.name] = request
        self._by_transfer[bind.transfer] = request
        request.serial = self.cluster.new_transfer(bind.transfer)
        endpoints = tuple(Endpoint(f"D{self.index}", 1 + rank) for rank in range(len(self.ranks)))
        reservation = bind.reservation(MODEL, self.geometry, endpoints, request.tokens, str(request.seed))
        if first and self.book.first_tokens_come(request.name):
            wanted = Wanted(bind.transfer, request.tokens, DIGEST, None, VOCABULARY, request.whole)
            self.book.ask(request.name, "window" if leaves else wanted)
            if not leaves:
                needs = (WHOLE,) if request.whole else ()
                reservation = msgspec.structs.replace(reservation, seed=FirstTokenRequest(DIGEST), needs=needs)
        if isinstance(route, Meet):
            offer = Offer(bind.transfer, seal(reservation, SECRETS), route.source, route.name)
            self.offers.offer(self.scheduler.clock(), route.listener, offer)
            self._offered()
        else:
            self.cluster.broker.reserve(self, request, reservation)
        return True

    def reported(self, loaded: LoadEnd, rank: int) -> None:
        """Handle one worker's finished_recving; vLLM acts when all workers have reported."""
        request = self.loading.get(loaded.request_id)
        if request is None or rank in request.reports:
            raise Violation(f"promise 5: D{self.index}: rank {rank} reported {loaded.request_id} twice")
        request.reports.add(rank)
        self.book.ended((loaded,))
        if loaded.push:
            request.hopeless = None
        if len(request.reports) < len(self.ranks):
            return
        unread = self._unread.random() < self.cluster.settings.faults.unread
        if unread:
            self.cluster.world.fault("load reported outside vLLM's read")
        load = self.book.received(self.cluster.world.now, request.name, starts=not unread)
        if load is None or load.transfer is None or load.transfer != request.transfer:
            raise Violation(f"D{self.index}: {request.name} is reported under {load}, loads {request.transfer}")
        self._act()
        del self.loading[request.name]
        del self._by_transfer[load.transfer]
        self.cluster.check_duration(self, request)
        if load.failure is None:
            self._check_content(request)
            self.cluster.world.stats["transfers ok"] += 1
        else:
            self.cluster.world.stats["transfers failed"] += 1
        self._poke()
        if load.state in WITHHELD:
            request.push, request.held_since, request.state = load.push, self.cluster.world.now, "held"
            request.stopped_before = self.stopped_s()
            self.held_requests[request.name] = request
            self.scheduler.post(self.cluster.settings.timers.lease_s if request.whole else FIRST_WAIT_S, self._poke)
        elif request.left:
            self._end(request, "left")
        elif request.whole and load.failure is None:
            raise Violation(f"promise 3: {request.name} does not wait for the token that alone can begin it")
        else:
            self._decode(request)  # after a failure: kv_load_failure_policy = recompute

    def _go_on(self, start: Start) -> None:
        """Continue a held request with its first token, or compute that."""
        request = self.held_requests.pop(start.request_id, None)
        if request is None:
            raise Violation(f"promise 6: {start.request_id} goes on, and was not held")
        self.cluster.check_first(self, request, start)
        if request.left:
            self._end(request, "left")
            return
        if start.first is not None:
            request.outputs.append(start.first.token)
            self.cluster.world.stats["first tokens taken"] += 1
            self.cluster.world.stats["whole prompts begun"] += request.whole
        elif start.fails:
            self.cluster.world.stats["whole prompts computed again"] += 1
        elif request.whole:
            raise Violation(
                f"promise 3: {request.name} goes on in a cache in which no engine can compute its last token"
            )
        else:
            self.cluster.world.stats[f"first tokens computed: {start.why}"] += 1
        self._decode(request)

    def _decode(self, request: DecodeRequest) -> None:
        if not request.outputs:  # otherwise it was preempted, and the client has its token
            request.outputs.append(0)
        self.decoding[request.name] = request
        request.state = "decoding"
        self.scheduler.post(self.cluster.world.rng.expovariate(1 / 0.2), self._decoded, request)

    def _decoded(self, request: DecodeRequest) -> None:
        del self.decoding[request.name]
        if self.cluster.world.chance(self.cluster.settings.faults.preempt / 2):
            # Its blocks are freed at once; when it is scheduled again D computes the KV instead of loading it.
            self.cluster.world.fault("decode preempted")
            self.free.extend(request.tables.clear())
            request.state = "waiting"
            self.waiting.append(request)
            self._poke()
            return
        self._finish(request)
        if len(request.outputs) != 1:
            raise Violation(f"promise 6: the client of {request.name} got {len(request.outputs)} first tokens")
        self._end(request, "ended")

    def _end(self, request: DecodeRequest, state: str) -> None:
        request.state = state
        self.free.extend(request.tables.clear())
        self._poke()

    # -- promise 3

    def _check_content(self, request: DecodeRequest) -> None:
        if request.serial in self.cluster.wire.spoiled:
            raise Violation(f"promise 3: {request.name} ended well, but bytes of others have landed in it")
        for rank in self.ranks:
            wrong = self.first_difference(rank, request)
            if wrong is not None:
                raise Violation(f"promise 3: {request.name} ended well on {rank.process.name} with wrong KV in {wrong}")

    def _looked_at(self, group: Group, request: DecodeRequest) -> int:
        """Return the first token that must be present: one that the next token sees, or one of the same block.

        The whole block counts because it is cached as a whole.
        """
        if group.matters != WINDOW:
            return request.first
        seen = [token for token in range(request.first, request.end) if token > request.end - group.n]
        return max(request.first, min(seen, default=request.end) // group.block_size * group.block_size)

    def first_difference(self, rank: DecodeRank, request: DecodeRequest) -> str | None:
        """Return the first layer whose bytes differ from those that prefill computed.

        A P without the draft model has none of its layers. Nor have blocks that P found in its cache, if the draft
        model did not run when they were computed: a single engine drafts from such blocks as well.
        """
        memory = rank.memory
        tables, cells = request.tables.arrays(), {}
        for planes in memory.kinds:
            first, last = planes.cell_range(self._looked_at(planes.kind.group, request), request.end)
            cells[planes] = planes.cells(request.content, tables[planes.kind.group_index], first, last, request.end)
        names = self.cluster.settings.names()
        gaps = request.content.shared and request.content.undrafted
        for index, layer in enumerate(memory.layers):
            if names[layer] == DRAFT and (gaps or request.transfer in rank.undrafted):
                continue
            for region, (offsets, right) in enumerate(cells[memory.planes[index]]):
                stored = memory.plane(index, region)[offsets]
                if not np.array_equal(stored, right + np.uint8(shade(layer, region))):
                    return names[layer]
        return None
