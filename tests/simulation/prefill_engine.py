# SPDX-License-Identifier: Apache-2.0
"""Prefill engines: a scheduler that cuts prompts into chunks, preempts, holds blocks, and dies."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simulation.broker import SECRETS
from simulation.exchange import RankGroup
from simulation.memory import Content
from simulation.prefill import EngineStep, Fill, PrefillRank
from simulation.settings import DIGEST, MODEL, EngineShape, Faults
from simulation.tables import BlockTables, needed, pool
from simulation.world import Alarm, Process, Violation
from vllm_ascend_pd.geometry.match import mismatches
from vllm_ascend_pd.geometry.pairing import exchanged
from vllm_ascend_pd.geometry.regroup import Room
from vllm_ascend_pd.geometry.substeps import room_for_a_block
from vllm_ascend_pd.metadata import MissedExchange
from vllm_ascend_pd.prefill.scheduler.core.fitting import opened
from vllm_ascend_pd.prefill.scheduler.core.in_flight import Chunk
from vllm_ascend_pd.prefill.scheduler.core.request import Holding, NewRequest
from vllm_ascend_pd.protocol.auth import unseal
from vllm_ascend_pd.protocol.first import FirstTokenRequest, Sample
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.meeting import Gone, Meeting, Offer, Unwanted
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.regroup.core.staging import exchanges_possible

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster
    from simulation.router import Leg


@dataclass(slots=True, eq=False)
class Prompt:
    """One request at one P engine."""

    name: str
    push: str
    reservation: Reservation | None  # None for a source
    content: Content
    tokens: int
    tables: BlockTables
    known: list[int]  # blocks of each group, as reported to the workers
    computed: int = 0
    fresh: bool = True  # nothing was scheduled since its (re)start
    aborted: bool = False
    ended: float | None = None
    stopped_before: float = 0.0
    leg: Leg | None = None  # of a source: the leg of its answer
    shared: int = 0  # its first tokens lie in blocks of another prompt


@dataclass(slots=True)
class PromptChunk:
    """The part of a prompt that a step computes, as vLLM's scheduler decides it."""

    prompt: Prompt
    computed: int
    count: int
    new: list[list[int]]
    ids: list[list[int]]
    tables: tuple[NDArray[np.int64], ...]
    fresh: bool
    hot: int | None = None  # cached tokens from this one on are computed by another request of the same step


@dataclass(slots=True)
class FlyingStep:
    """A step whose results are not there yet."""

    left: set[int]  # ranks that have not ended it
    scheduled: list[tuple[Prompt, int]]  # and how many of its tokens are computed with it
    ended: list[str] = field(default_factory=list)  # requests that have ended since, of which ranks hear behind it


class PrefillEngine:
    """One slot for a P engine, whose incarnations follow each other."""

    def __init__(self, cluster: SimulatedCluster, index: int, shape: EngineShape) -> None:
        self.cluster = cluster
        self.index = index
        self.shape = shape
        self.geometry = cluster.settings.geometry(shape)
        self.alive = False
        self.orphans: list[PrefillRank] = []  # of earlier incarnations
        self._orphaned = cluster.world.dice(f"orphans P{index}")
        self.boot()

    def boot(self) -> None:
        self.alive = True
        self.scheduler = Process(self.cluster.world, f"P{self.index}.s")
        self.free = pool(self.geometry, self.shape.blocks)
        self._shared: Counter[int] = Counter()  # by block, the prompts that have it beside the first
        t = self.cluster.settings.timers
        holding = Holding(256, self._spare(), t.hold_s, t.meet_s)
        name = self.scheduler.incarnation
        self.book = self.cluster.mutation.book(name, holding, model=MODEL, geometry=self.geometry)
        self._alarm = Alarm(self.scheduler, self.book.next_wake, self._tick)
        self.waiting: deque[Prompt] = deque()
        self.running: list[Prompt] = []
        self.holding: dict[str, Prompt] = {}
        self.reports: dict[str, set[int]] = {}  # ranks that have reported each finished request
        self._by_transfer: dict[TransferId, Prompt] = {}
        self._building = False
        self._flying: deque[FlyingStep] = deque()
        self._results: list[tuple[int, list[MissedExchange]]] = []  # that came while a step was built
        self._arrives = 0.0  # when the last step comes to the last rank
        self._poked = False
        self._asked = False  # a step was requested while one was built or computed
        self._preempted = False
        self._lost: list[str] = []  # preempted, before the step that reports it is built
        self._scheduled: list[tuple[Prompt, int]] = []  # of the step that is built
        self._finished: list[str] = []
        self._telling = self.cluster.world.dice(f"telling {self.scheduler.name}")
        self._dice = self.cluster.world.dice(f"hot {self.scheduler.name}")
        self._others = self.cluster.world.dice(f"loaded by another {self.scheduler.name}")
        self._beside: list[str] = []  # made-up requests that compute the hot blocks
        self._looking = False
        self._resting_until = 0.0
        self.ranks: list[PrefillRank] = []
        room = self._room()
        for stage in range(self.shape.pp):
            group = RankGroup(self.cluster.world, f"P{self.index}.{stage}") if room is not None else None
            self.ranks += [PrefillRank(self, stage, rank, group, room) for rank in range(len(self.geometry.ranks))]

    def _spare(self) -> int:
        """Return how many blocks sources without a D may hold: one prompt must always fit beside them."""
        need = sum(needed(group, self.cluster.settings.tokens) for group in self.geometry.tables)
        return max(0, len(self.free) - need - 1)

    def _room(self) -> Room | None:
        """Return the size of slots and buffers: a few blocks, so that long steps are cut. None without exchanges."""
        settings = self.cluster.settings
        if not exchanges_possible(settings.regroup, self.geometry, self.shape.tp):
            return None
        theirs = [settings.geometry(shape) for shape in settings.decode]
        pairs = [pair for d in theirs if not mismatches(self.geometry, d) for pair in exchanged(self.geometry, d)]
        needs = [room_for_a_block(pair.p, pair.d) for pair in pairs]
        if not needs:
            return None
        slot, buffer = max(need.slot for need in needs), max(max(need.send, need.receive) for need in needs)
        return Room(slot * settings.room, buffer * settings.room, buffer * settings.room)

    def kill(self) -> None:
        """Kill all processes, or at first only the scheduler: its ranks go on with what they have."""
        self.alive = False
        self.scheduler.kill()
        delays = self.cluster.outlives(self._orphaned)
        for rank in self.ranks:
            if delays is None:
                rank.process.kill()
                self.cluster.wire.source_died(rank)
            else:
                self.orphans.append(rank)
                self.cluster.world.after(self._orphaned.choice(delays), self.cluster.orphan_died, rank)
        self.cluster.broker.prefill_died(self)
        self.cluster.router.prefill_died(self)

    def stopped_s(self) -> float:
        return sum(p.stopped_s for p in (self.scheduler, *(rank.process for rank in self.ranks)))

    # -- requests

    def accept(self, reservation: Reservation, content: Content) -> None:
        """Accept an HTTP request with a reservation."""
        world, groups, tokens = self.cluster.world, self.geometry.tables, reservation.prompt_length
        prompt = Prompt(
            world.name("prompt"),
            world.name("push"),
            reservation,
            content,
            tokens,
            BlockTables(groups),
            [0] * len(groups),
        )
        if self.geometry.recomputes_last:
            self._take(prompt)
            prompt.tokens -= self.book.cuts(prompt.name)
        self.waiting.append(prompt)
        self._by_transfer[reservation.transfer] = prompt
        self._poke()

    def collect(self, leg: Leg) -> None:
        """Accept a request without a reservation."""
        world, groups = self.cluster.world, self.geometry.tables
        nothing = BlockTables(groups), [0] * len(groups)
        prompt = Prompt(world.name("prompt"), world.name("push"), None, leg.content, leg.tokens, *nothing, leg=leg)
        self.waiting.append(prompt)
        if world.chance(self.cluster.settings.faults.leave):
            world.fault("source aborted")
            self.scheduler.post(world.rng.choice((0.001, 0.02, 0.2)), self._give_up, prompt)
        self._poke()

    def _give_up(self, prompt: Prompt) -> None:
        prompt.aborted = True
        self._poke()

    # -- what D's schedulers say

    def message(self, peer: str, message: Meeting) -> None:
        reservation = opened(message, lambda sealed: unseal(sealed, SECRETS)) if isinstance(message, Offer) else None
        if isinstance(reservation, Gone):
            raise Violation(f"P{self.index} cannot read {message}")
        self.cluster.world.stats["unwanted"] += isinstance(message, Unwanted)
        self.book.message(self.scheduler.clock(), peer, message, reservation)
        self._met()

    def decode_gone(self, peer: str) -> None:
        """Handle the end of that D scheduler's connection."""
        self.book.gone(peer)
        self._met()

    def _tick(self) -> None:
        self.book.tick(self.scheduler.clock())
        self._met()

    def _met(self) -> None:
        for peer, message in self.book.take_messages():
            self.cluster.check_bound(self, message)
            self.cluster.to_offering(self, str(peer), message)
        self._alarm.set()
        if self.book.must_step():
            self._poke()

    def abort(self, transfer: TransferId) -> None:
        """Abort the request of a client that has disconnected."""
        prompt = self._by_transfer.get(transfer)
        if prompt is not None:
            prompt.aborted = True
            self._poke()

    # -- stepping

    @property
    def _stepping(self) -> bool:
        return self._building or len(self._flying) > self.cluster.settings.ahead

    def _poke(self) -> None:
        self._asked = True
        if not self._poked and not self._stepping:
            self._poked = True
            self.scheduler.post(self.cluster.world.rng.uniform(0.0002, 0.005), self._step)

    def _step(self) -> None:
        self._poked = False
        if self._stepping:
            return
        for prompt in [p for p in (*self.running, *self.waiting) if p.aborted]:
            self._finish(prompt, "aborted")
        if self.running and self.cluster.world.chance(self.cluster.settings.faults.preempt):
            self.cluster.world.fault("prefill preempted")
            self._preempt(self.running[-1])
        chunks = self._schedule()
        self._building, self._asked = True, False
        if self.cluster.world.rng.random() < 0.2:  # messages of D's schedulers may come between the two
            self.scheduler.post(self.cluster.world.rng.uniform(0.0, 0.003), self._build, chunks)
        else:
            self._build(chunks)

    def _build(self, chunks: list[PromptChunk]) -> None:
        """Build the step's metadata, at the end of vLLM's `schedule`."""
        self._send(chunks)
        results, self._results = self._results, []
        for rank, missed in results:
            self.rank_done(rank, missed)

    def _send(self, chunks: list[PromptChunk]) -> None:
        lost, self._lost = self._lost, []
        for name in lost:
            self.book.preempted(name)
        self._tell(chunks)
        fills = [self._fill(chunk) for chunk in chunks]
        preempted, self._preempted = self._preempted, False
        meta = self.book.take_step()
        self._building = False
        if meta.empty and not fills:
            if preempted or self._asked:
                self._poke()
            elif self.book.must_step() or any(rank.owed() for rank in self.ranks):
                self._look_soon()
            return
        self._flying.append(FlyingStep(set(range(len(self.ranks))), self._scheduled))
        world, self._scheduled = self.cluster.world, []
        finished, self._finished = tuple(self._finished), []
        step = EngineStep(meta, fills, world.rng.choice((0.0005, 0.002, 0.02)), finished)
        world.log(self.scheduler.name, "STEP", meta.number, f"fills={len(fills)} preempted={meta.preempted}")
        at = 0.0
        for rank in self.ranks:
            delay = rank.stage * step.layer_s + world.rng.uniform(0.0001, 0.002)
            if len(self._flying) > 1:
                delay = max(delay, self._arrives - world.now)  # behind the step before
            at = max(at, world.now + delay)
            rank.process.post(delay, rank.run_step, step)
        self._arrives = at
        if len(self._flying) > 1 and fills:
            world.fault("two steps in flight")
        if self.cluster.settings.ahead:
            self._poke()

    def _schedule(self) -> list[PromptChunk]:
        """Schedule running requests, then waiting ones, as long as there are tokens and blocks."""
        budget, chunks = self.cluster.settings.chunk, []
        self._scheduled = []
        for prompt in list(self.running):
            count = min(budget, prompt.tokens - prompt.computed)
            if count <= 0 or prompt not in self.running:
                continue
            while not self._allocate(prompt, prompt.computed + count):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is prompt:
                    # Held blocks are in its way: an immediate retry would only waste simulated work.
                    self._resting_until = self.cluster.world.now + 5.0
                    self.scheduler.post(5.0, self._poke)
                    break
            if prompt in self.running:
                chunks.append(self._chunk(prompt, count))
                budget -= count
        rests = self.cluster.world.now < self._resting_until
        while budget > 0 and self.waiting and not self._preempted and not rests:
            prompt = self.waiting[0]
            size = max(group.covers for group in self.geometry.tables)
            hit = self.cluster.world.rng.choice((0, 0, 1, 2)) * size
            prompt.computed = min(hit, (prompt.tokens - 1) // size * size)
            prompt.shared = self._share(prompt) if self.cluster.settings.shared else 0
            prompt.computed = prompt.shared or prompt.computed
            count = min(budget, prompt.tokens - prompt.computed)
            if not self._allocate(prompt, prompt.computed + count):
                self._give_back(prompt.tables.clear())
                break
            self.waiting.popleft()
            self.running.append(prompt)
            chunks.append(self._chunk(prompt, count))
            budget -= count
        return chunks

    def _share(self, prompt: Prompt) -> int:
        """Take the blocks of another prompt that begins alike, also of this step. Return how many tokens they have."""
        size = self.geometry.tables[0].covers
        wanted = (prompt.tokens - 1) // size
        for other in (*self.running, *self.holding.values()):
            count = min(wanted, other.computed // size)
            if other.content is prompt.content and count:
                self.cluster.world.stats["blocks shared"] += count
                self.cluster.world.fault("blocks shared by prefix")
                prompt.tables.ids = [other.tables.ids[0][:count]]
                prompt.content.shared = True
                self._shared.update(prompt.tables.ids[0])
                return count * size
        return 0

    def _give_back(self, blocks: Iterable[int]) -> None:
        """Free blocks that no other prompt has."""
        for block in blocks:
            if self._shared[block]:
                self._shared[block] -= 1
            else:
                self.free.append(block)

    def _allocate(self, prompt: Prompt, tokens: int) -> bool:
        self._give_back(prompt.tables.let_go(prompt.computed))
        return prompt.tables.grow(prompt.computed, tokens, self.free, self.cluster.world.rng)

    def _chunk(self, prompt: Prompt, count: int) -> PromptChunk:
        if prompt.fresh:  # vLLM reports a request when it leaves the queue
            self._take(prompt)
        ids = [list(table) for table in prompt.tables.ids]
        new = [table if prompt.fresh else table[known:] for table, known in zip(ids, prompt.known, strict=True)]
        chunk = PromptChunk(prompt, prompt.computed, count, new, ids, prompt.tables.arrays(), prompt.fresh)
        prompt.known, prompt.fresh = [len(table) for table in ids], False
        prompt.computed += count  # once the step is over
        self._scheduled.append((prompt, prompt.computed))
        return chunk

    def _tell(self, chunks: list[PromptChunk]) -> None:
        """Choose hot blocks: a new prompt's last cached blocks may be filled in the same step.

        Another request computes them, or another connector loads them.
        """
        computed, tables = [], {chunk.prompt.name: chunk.ids for chunk in chunks}
        beside, self._beside = self._beside, []
        for chunk in chunks:
            core_chunk = Chunk(chunk.prompt.name, chunk.computed, chunk.count, chunk.new, replaces=chunk.fresh)
            size = max(group.covers for group in self.geometry.tables)
            if chunk.fresh and chunk.computed and not chunk.prompt.shared and self._dice.random() < 0.3:
                self.cluster.world.stats["blocks found hot"] += 1
                chunk.hot = size * self._dice.randrange(chunk.computed // size)
                if self._others.random() < 0.5:
                    # Another connector loads them in this step, before each layer is computed.
                    self.cluster.world.stats["blocks loaded by another"] += 1
                    computed.append(replace(core_chunk, cached=chunk.hot))
                    continue
                groups = zip(chunk.new, self.geometry.tables, strict=True)
                ids = [table[: chunk.computed // group.covers] for table, group in groups]
                self._beside.append(f"beside {chunk.prompt.name}")
                computed.append(Chunk(self._beside[-1], chunk.hot, chunk.computed - chunk.hot, ids, replaces=True))
            computed.append(core_chunk)
        for name in beside:
            self.book.finished(self.scheduler.clock(), name, holds_blocks=True, well=False, why="")
        self.book.step(computed, tables.__getitem__)

    def _fill(self, chunk: PromptChunk) -> Fill:
        """Return what is filled: earlier steps computed the cached tokens, except the hot ones."""
        first = chunk.computed if chunk.hot is None else chunk.hot
        before = first if chunk.fresh and not chunk.prompt.shared else 0
        return Fill(chunk.prompt.push, chunk.prompt.content, chunk.tables, first, chunk.computed + chunk.count, before)

    def _take(self, prompt: Prompt) -> None:
        if self.book.knows(prompt.name):
            return
        if (r := prompt.reservation) is not None:
            # settings that differ from D's
            odd = self.cluster.settings.faults != Faults() and self._telling.random() < 0.05
            seed = None if odd else FirstTokenRequest(DIGEST)
            asked = NewRequest(prompt.name, (r.prompt_length, r.prompt_hash), prompt.push, r, seed=seed)
        else:
            name, text = (prompt.leg.name, str(prompt.leg.seed)) if prompt.leg is not None else ("", "")
            uuid = self.cluster.world.name("uuid")
            asked = NewRequest(prompt.name, (prompt.tokens, text), prompt.push, meets=name, uuid=uuid)
        self.book.take(self.scheduler.clock(), asked)
        self._met()

    def _preempt(self, prompt: Prompt) -> None:
        self._preempted = True
        self.running.remove(prompt)
        self.waiting.appendleft(prompt)
        self._forget_results(prompt)
        self._give_back(prompt.tables.clear())
        prompt.known, prompt.computed, prompt.fresh = [0] * len(prompt.known), 0, True
        self._lost.append(prompt.name)

    def _forget_results(self, prompt: Prompt) -> None:
        self._scheduled = [(p, n) for p, n in self._scheduled if p is not prompt]
        for step in self._flying:
            step.scheduled = [(p, n) for p, n in step.scheduled if p is not prompt]

    def _look_soon(self) -> None:
        """Step now and then while held blocks are the only work, so that the workers report what they missed."""
        if not self._looking:
            self._looking = True
            at_once = self.book.must_step()
            delay = (
                self.cluster.world.rng.uniform(0.001, 0.05) if at_once else self.cluster.world.rng.uniform(0.05, 1.0)
            )
            self.scheduler.post(delay, self._look)

    def _look(self) -> None:
        self._looking = False
        for rank in self.ranks:
            rank.process.run(self._tell_missed, rank)
        self._poke()

    def _tell_missed(self, rank: PrefillRank) -> None:
        missed = rank.missed()
        if missed:
            self.scheduler.post(0.0001, self._missed, missed)

    def _missed(self, exchanges: list[MissedExchange]) -> None:
        self.book.missed(exchanges)
        self._poke()

    def rank_done(self, rank: int, missed: list[MissedExchange]) -> None:
        """Handle the end of a rank's step; its results are there when all ranks have ended theirs."""
        if self._building:
            self._results.append((rank, missed))
            return
        self.book.missed(missed)
        next(step for step in self._flying if rank in step.left).left.discard(rank)
        if self._flying[0].left:
            return
        step = self._flying.popleft()
        for name in step.ended:
            self._tell_over(name)
        for prompt, computed in step.scheduled:
            if computed >= prompt.tokens:
                if self.cluster.world.chance(self.cluster.settings.faults.preempt / 2):
                    # Asynchronous scheduling: it was preempted while its last step was computed.
                    self.cluster.world.fault("prefill preempted in its last step")
                    self._preempt(prompt)
                else:
                    self._finish(prompt, "ended")
        self._poke()

    def _finish(self, prompt: Prompt, why: str) -> None:
        self._forget_results(prompt)
        if prompt in self.running:
            self.running.remove(prompt)
        else:
            self.waiting.remove(prompt)
        r = prompt.reservation
        if r is not None and self._by_transfer.get(r.transfer) is prompt:
            del self._by_transfer[r.transfer]
        prompt.ended, prompt.stopped_before = self.cluster.world.now, self.stopped_s()
        self._give_back(prompt.tables.let_go(prompt.computed))
        ending = self.book.finished(
            self.scheduler.clock(),
            prompt.name,
            holds_blocks=any(prompt.tables.ids),
            well=why == "ended",
            why=why,
            sampled=lambda: self._sample(prompt) if why == "ended" else None,
        )
        holds_blocks, source = ending.blocks_held, ending.source.source if ending.source is not None else None
        if holds_blocks and not self.cluster.mutation.hasty_release:
            self.holding[prompt.name] = prompt
        else:
            self._release(prompt)
        if holds_blocks:
            if self._flying:
                self._flying[-1].ended.append(prompt.name)
            else:
                self._tell_over(prompt.name)
        else:
            self._finished.append(prompt.name)
        if prompt.leg is not None:
            self._met()
            self.cluster.router.answered(self, prompt.leg, source)
        elif why == "ended" and r is not None:
            kind = "prefilled" if ending.refusal is None else ending.refusal.code
            self.cluster.broker.prefill_ended(self, r.transfer, kind, ending.first)

    def _tell_over(self, name: str) -> None:
        """Tell the ranks with the metadata of the next step, or of a later one."""
        for rank in self.ranks:
            rank.process.post(self.cluster.world.rng.uniform(0.0002, 0.005), rank.finished, (name,))

    def _sample(self, prompt: Prompt) -> Sample:
        """Return a sample; no two have the same token."""
        return self.cluster.sampled(prompt), DIGEST, ()

    def sent(self, request: str, rank: int) -> None:
        """Handle one worker's finished_sending; vLLM acts when all workers have reported."""
        reported = self.reports.setdefault(request, set())
        if rank in reported:
            raise Violation(f"promise 5: P{self.index}: rank {rank} reported {request} twice")
        reported.add(rank)
        if len(reported) < len(self.ranks):
            return
        del self.reports[request]
        prompt = self.holding.pop(request, None)
        if not self.book.released(request):
            raise Violation(f"promise 5: P{self.index}: {request} is reported, and vLLM does not know it any more")
        if prompt is not None:
            self.cluster.check_hold(self, prompt)
            self._release(prompt)

    def _release(self, prompt: Prompt) -> None:
        self._give_back(prompt.tables.clear())
        self._poke()
