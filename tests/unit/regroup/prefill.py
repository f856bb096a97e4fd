# SPDX-License-Identifier: Apache-2.0
"""P of a pair without vLLM: the real book, and a real push runtime for each rank, here or in a process of its own.

Ranks in one process have real gloo groups too: the exchanges run on the runtimes' own threads.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist

from unit.device.caches import Pool
from unit.kits.watching import until
from unit.regroup.common import (
    NAME,
    EngineCache,
    LayoutDevice,
    RegisteredMemory,
    RegroupDecodeSite,
    RegroupPrompt,
    config,
)
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.metadata import MissedExchange, PrefillStep
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.request import NewRequest
from vllm_ascend_pd.prefill.worker.core.register import PushSite
from vllm_ascend_pd.prefill.worker.runtime import PushRuntime
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.regroup.core.world import EngineWorld
from vllm_ascend_pd.regroup.resources import RegroupResources, build_resources
from vllm_ascend_pd.transport.base import Wire, WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write

Parts = Callable[[PushConfig, EngineWorld, Caches, LayoutDevice], "RegroupResources | None"]
Layer = Callable[[int], None]  # writes the KV of one of this worker's layers


@dataclass(frozen=True)
class ComputedTokens:
    """Part of a prompt that a step computes: its tokens [lo, hi)."""

    seed: int
    tokens: int
    table: list[int]
    lo: int
    hi: int


@dataclass(frozen=True)
class WorkerReport:
    """Report of a worker to its scheduler after a step."""

    finished: set[str]
    missed: list[MissedExchange]


class RegroupPrefillRank:
    """One worker of P."""

    make_memory: Callable[..., RegisteredMemory] = RegisteredMemory
    make_device: Callable[..., Any] = LayoutDevice

    def __init__(
        self,
        cache: EngineCache,
        contributor: Contributor,
        parts: Parts,
        *,
        blocks: int = 160,
        push: PushConfig | None = None,
        transport: Wire | None = None,
        step_tokens: int = 256,
        inline: bool = False,
    ) -> None:
        self.cache, self.contributor = cache, contributor
        self.names = cache.stage(contributor.stage)
        self.memory = self.make_memory(cache, self.names, contributor.rank, blocks)
        self.memory.fill(7)
        self.device = self.make_device(cache.layout, inline)
        self.push = push or config()
        self.place = EngineWorld(contributor.stage * cache.tp + contributor.rank, cache.tp, cache.pp, step_tokens)
        self.transport = transport or MemoryTransport()
        caches = self.memory.described(self.device)
        self.geometry = caches.geometry
        self.parts: RegroupResources | None = None
        self.runtime = self._start(caches, parts)

    def _start(self, caches: Caches, parts: Parts) -> PushRuntime:
        self.parts = parts(self.push, self.place, caches, self.device)
        site = PushSite(uuid.uuid4().hex[:16], self.contributor, NAME)
        return PushRuntime(self.push, site, caches, self.device, self.transport, None, self.parts)

    def run(self, step: PrefillStep, shares: Sequence[ComputedTokens], hook: str, ended: Sequence[str]) -> WorkerReport:
        """Run one engine step, with hooks in vLLM's order."""
        if step.preempted:
            self.runtime.preempt(step.preempted)
        self.runtime.steps.begin(step)
        if shares:
            HOOKS[hook](self, lambda local_layer: self.write(local_layer, shares))
        self.runtime.steps.end()
        return WorkerReport(self.runtime.take_finished(ended), list(self.runtime.take_news().missed))

    def write(self, local_layer: int, shares: Sequence[ComputedTokens]) -> None:
        layer = self.cache.names.index(self.names[local_layer])
        for share in shares:
            content = self.cache.content(share.seed, share.tokens)
            self.memory.write(layer, local_layer, content, share.table, share.lo, share.hi)

    def saved(self, local_layer: int, name: str | None = None) -> None:
        """Fire the hook of a layer."""
        self.runtime.steps.computed(self.names[local_layer] if name is None else name)

    def stats(self) -> dict[str, int]:
        """Return counts of the exchanges since the start, and what is held now. Empty without exchanges."""
        with self.runtime.lock:
            core, made, exchanger = self.runtime.core, self.runtime.core.exchanges, self.runtime.exchanger
            if made is None or exchanger is None:
                return {}
            exchange: Any = exchanger.exchange
            return {
                "exchanges": made.count,
                "collectives": exchange.collectives,
                "steps": len(made.steps),
                "missing": len(made.missed),
                "slots_taken": made.staging.taken,
                "slot_shares": sum(len(push.slot_shares) for push in core.records.values()),
                "unsealed": sum(push.sealing for push in core.records.values()),
            }

    def close(self) -> None:
        self.runtime.close()


def by_name(rank: RegroupPrefillRank, write: Layer) -> None:
    for local_layer in range(len(rank.names)):
        write(local_layer)
        rank.saved(local_layer)


def without_a_name(rank: RegroupPrefillRank, write: Layer) -> None:
    for local_layer in range(len(rank.names)):
        write(local_layer)
        rank.saved(local_layer, "")


def without(rank: RegroupPrefillRank, write: Layer) -> None:
    """Fire no hook, as in a captured graph."""
    for local_layer in range(len(rank.names)):
        write(local_layer)


def all_but_one(rank: RegroupPrefillRank, write: Layer) -> None:
    for local_layer in range(len(rank.names)):
        write(local_layer)
        if local_layer != 0:
            rank.saved(local_layer)


def shuffled(rank: RegroupPrefillRank, write: Layer) -> None:
    """Fire the hooks of each rank in another order."""
    without(rank, write)
    order = list(range(len(rank.names)))
    turn = rank.contributor.rank % len(order)
    for index in reversed(order[turn:] + order[:turn]):
        rank.saved(index)


HOOKS: dict[str, Callable[[RegroupPrefillRank, Layer], None]] = {
    "name": by_name,
    "no name": without_a_name,
    "none": without,
    "all but one": all_but_one,
    "shuffled": shuffled,
}


class Handle(Protocol):
    """Interface of one worker for the engine, in this process or another."""

    geometry: CacheGeometry

    def begin(self, step: PrefillStep, shares: Sequence[ComputedTokens], hook: str, ended: Sequence[str]) -> None: ...
    def answer(self) -> WorkerReport: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...


class InProcessWorker:
    """A worker in this process."""

    def __init__(self, rank: RegroupPrefillRank) -> None:
        self.rank, self.geometry = rank, rank.geometry
        self._answer = WorkerReport(set(), [])

    def begin(self, step: PrefillStep, shares: Sequence[ComputedTokens], hook: str, ended: Sequence[str]) -> None:
        self._answer = self.rank.run(step, shares, hook, ended)

    def answer(self) -> WorkerReport:
        return self._answer

    def stats(self) -> dict[str, int]:
        return self.rank.stats()

    def close(self) -> None:
        self.rank.close()


class RegroupPrefillSite:
    """One prefill engine: its book and its workers, stage by stage."""

    def __init__(self, cache: EngineCache, workers: Sequence[Handle], *, blocks: int = 160) -> None:
        self.cache, self.workers = cache, list(workers)
        self.book, self.pool = PushBook(model=NAME), Pool(blocks, 1)
        stages = [self.workers[stage * cache.tp].geometry.layers for stage in range(cache.pp)]
        self.geometry = msgspec.structs.replace(self.workers[0].geometry, stages=tuple(stages))
        self.book.geometry = self.geometry
        self._known: set[str] = set()
        self._ended: list[str] = []
        self._seen: list[set[str]] = [set() for _ in self.workers]
        self.released: set[str] = set()
        self.catch_ups = 0

    @property
    def ranks(self) -> list[RegroupPrefillRank]:
        """Ranks of an engine in this process."""
        return [worker.rank for worker in self.workers if isinstance(worker, InProcessWorker)]

    def admit(self, *prompts: RegroupPrompt) -> None:
        for prompt in prompts:
            reservation = prompt.reservation
            prompted = (prompt.tokens, reservation.prompt_hash)
            refused = self.book.take(0.0, NewRequest(self.name_of(prompt), prompted, uuid.uuid4().hex, reservation))
            assert refused is None, refused

    @staticmethod
    def name_of(prompt: RegroupPrompt) -> str:
        return f"{prompt.name} of {prompt.site.incarnation}"

    def compute(self, *work: tuple[RegroupPrompt, int], hook: str = "name") -> PrefillStep:
        """Run one engine step that computes so many tokens of each prompt."""
        shares = []
        for prompt, count in work:
            name, block = self.name_of(prompt), self.cache.block
            new = self.pool.take(-(-(prompt.computed + count) // block) - len(prompt.p_blocks))
            prompt.p_blocks += new
            whole = name not in self._known
            self._known.add(name)
            blocks = prompt.p_blocks if whole else new
            ready = prompt.computed if whole else 0
            self.book.scheduled(name, prompt.computed, count, blocks, replaces=whole, ready=ready)
            table = list(prompt.p_blocks)
            shares.append(ComputedTokens(prompt.seed, prompt.tokens, table, prompt.computed, prompt.computed + count))
            prompt.computed += count
        return self.deliver(shares, hook)

    def begun(self, d: RegroupDecodeSite, tokens: int, computed: int) -> RegroupPrompt:
        """Let D reserve a prompt, and compute its first tokens here."""
        prompt = d.reserve(tokens)
        d.step()
        self.admit(prompt)
        self.compute((prompt, computed))
        return prompt

    def cached_prefix(self, prompt: RegroupPrompt, tokens: int) -> None:
        """Put the first tokens into P's cache beforehand. Only for an engine in this process."""
        prompt.p_blocks, prompt.computed = self.pool.take(-(-tokens // self.cache.block)), tokens
        for rank in self.ranks:
            for local_layer in range(len(rank.names)):
                rank.write(local_layer, [ComputedTokens(prompt.seed, prompt.tokens, prompt.p_blocks, 0, tokens)])

    def idle(self) -> PrefillStep:
        return self.deliver([], "none")

    def preempt(self, prompt: RegroupPrompt) -> PrefillStep:
        """Take its blocks away in a step of others, and overwrite them at once."""
        name = self.name_of(prompt)
        self.book.preempted(name)
        self.pool.give(prompt.p_blocks)
        lost, prompt.p_blocks, prompt.computed = prompt.p_blocks, [], 0
        self._known.discard(name)
        step = self.idle()
        for rank in self.ranks:
            rank.memory.scribble(lost, 0x77)
        return step

    def finish(self, prompt: RegroupPrompt, *, aborted: bool = False) -> None:
        name = self.name_of(prompt)
        self._ended.append(name)
        blocks_held = self.book.finished(
            0.0, name, holds_blocks=True, well=False, why="the client left" if aborted else ""
        ).blocks_held
        assert blocks_held, f"{name} was never started"

    def deliver(self, shares: Sequence[ComputedTokens], hook: str) -> PrefillStep:
        step = self.book.take_step()
        self.catch_ups += len(step.catch_ups)
        ended, self._ended = self._ended, []
        for worker in self.workers:
            worker.begin(step, shares, hook, ended)
        for index, worker in enumerate(self.workers):
            answer = worker.answer()
            self.book.missed(answer.missed)
            for name in answer.finished:
                assert name not in self._seen[index], f"{name} was reported twice"
                self._seen[index].add(name)
                if all(name in seen for seen in self._seen) and self.book.released(name):
                    self.released.add(name)
        return step

    def ended(self, *prompts: RegroupPrompt, seconds: float = 30.0) -> bool:
        """Step until D has reported these; return True if all of them succeeded."""

        def all_reported() -> bool:
            self.idle()
            reports = [prompt.site.ended(prompt) for prompt in prompts]
            return all(reports)

        def by_prompt() -> Any:
            return {prompt.name: prompt.site.reports.get(prompt.name) for prompt in prompts}

        until(all_reported, f"reports of {by_prompt()}", seconds)
        return all(report.ok for reports in by_prompt().values() for report in reports)

    def finished(self, *prompts: RegroupPrompt, seconds: float = 30.0) -> None:
        """End these requests and step until every worker has released their blocks."""
        for prompt in prompts:
            self.finish(prompt)
        self.let_go(*prompts, seconds=seconds)

    def let_go(self, *prompts: RegroupPrompt, seconds: float = 30.0) -> None:
        def all_out() -> bool:
            self.idle()
            return all(self.name_of(prompt) in self.released for prompt in prompts)

        until(all_out, "blocks let go", seconds)
        self.idle()  # the workers learn that these pushes have ended
        for prompt in prompts:
            self.pool.give(prompt.p_blocks)
            prompt.p_blocks = []

    def stats(self) -> list[dict[str, int]]:
        return [worker.stats() for worker in self.workers]

    def holds_nothing(self) -> None:
        """Wait until no exchange holds anything. A failed push is released before an exchange in progress for it has
        returned its slots."""
        names = ("steps", "missing", "slots_taken", "slot_shares", "unsealed")

        def leftovers() -> list[dict[str, Any]]:
            return [left for stats in self.stats() if any((left := {name: stats[name] for name in names}).values())]

        until(lambda: not leftovers(), leftovers)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class FailingTransport(MemoryTransport):
    """Transport on which writes to chosen sessions never complete, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.stalled: set[str] = set()
        self.broken: set[str] = set()

    def land(self, write: Write) -> WriteState:
        if write.session in self.stalled:
            return WriteState.PENDING
        if write.session in self.broken:
            return WriteState.FAILED
        return super().land(write)


# ---- gloo among ranks of one process


def gloo_groups(size: int, timeout_s: float = 30.0) -> list[dist.ProcessGroup]:
    """A gloo group whose members are threads."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    groups: list[Any] = [None] * size

    def join(rank: int) -> None:
        gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        group = dist.ProcessGroup(store, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        groups[rank] = group

    threads = [threading.Thread(target=join, args=(rank,), name=f"join-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(groups), "a rank did not join its group"
    return groups


def engine(
    cache: EngineCache,
    *,
    blocks: int = 160,
    push: PushConfig | None = None,
    transports: Sequence[Wire] | None = None,
    parts: Callable[[int, RegroupResources], RegroupResources] = lambda rank, made: made,
    timeout_s: float = 30.0,
    **keys: Any,
) -> RegroupPrefillSite:
    """A prefill engine in this process. `parts` may replace a rank's parts of the exchange."""
    push = push or config()
    workers = []
    for stage in range(cache.pp):
        groups = gloo_groups(cache.tp, timeout_s) if cache.tp > 1 else []
        for rank in range(cache.tp):
            number = stage * cache.tp + rank

            def make(
                push: PushConfig,
                place: EngineWorld,
                caches: Caches,
                device: LayoutDevice,
                rank: int = rank,
                groups: Any = groups,
            ) -> RegroupResources | None:
                if not groups or push.regroup.regroup == "never":
                    return None
                return parts(rank, build_resources(push.regroup, place, caches, device, groups[rank]))

            transport = transports[number] if transports is not None else None
            worker = RegroupPrefillRank(
                cache, Contributor(stage, rank), make, blocks=blocks, push=push, transport=transport, **keys
            )
            workers.append(InProcessWorker(worker))
    return RegroupPrefillSite(cache, workers, blocks=blocks)
