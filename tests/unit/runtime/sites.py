# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine without vLLM: the real books, workers and runtimes of both sides in one process.

The side channel is real (127.0.0.1); the transfer engine is the in-process one unless a test brings another. Caches
are torch tensors in the layouts that vLLM and vllm-ascend register. A request's KV is random and known token by
token, P computes it step by step as a model would, and D's memory is compared with it to the last byte, including
bytes that must not change.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise
from typing import Any

import numpy as np

from unit.device.caches import CacheModel, Divided, Pool, RankCache
from unit.kits.loads import arrive
from unit.kits.watching import Events, parsed, until
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.decode.scheduler.core.book import LoadBook
from vllm_ascend_pd.decode.worker.role import DecodeWorker
from vllm_ascend_pd.decode.worker.runtime import ReceiveRuntime
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.engine import Engine, merge_geometries
from vllm_ascend_pd.metadata import DecodeStep, LoadEnd, PrefillStep
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.request import NewRequest
from vllm_ascend_pd.prefill.worker.role import PrefillWorker
from vllm_ascend_pd.prefill.worker.runtime import PushRuntime
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Contributor
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.regroup.core.world import EngineWorld
from vllm_ascend_pd.roles import StepMetadata
from vllm_ascend_pd.transport.base import Target, Wire
from vllm_ascend_pd.transport.memory import MemoryTransport

LOOPBACK = "127.0.0.1"
NAME = "a model of the tests"
DEADLINE_S = 20.0
UNTOUCHED = -16657  # as a float NaN, like what another kind of cache may have left there
FAST = {
    "transport": "memory",
    "verify": "full",
    "regroup": "never",  # exchanges need a process for each rank
    "resend_first_s": 0.05,
    "resend_max_s": 0.2,
    "transfer_timeout_s": 5,
}

MakeTransport = Callable[[], MemoryTransport | Target | Wire]
Hook = Callable[[PrefillWorker, str, Any], None]


def config(*, quiet_s: float | None = None, **keys: Any) -> PushConfig:
    return parsed({**FAST, "quiet_extra_s": 0.0, **keys}, quiet_s)


@dataclass(frozen=True)
class PairEngine(Engine):
    """An engine with the transfer engine of the test."""

    make_transport: MakeTransport = MemoryTransport

    def create_target(self, *_: Any, **__: Any) -> Any:
        return self.make_transport()

    create_wire = create_target


def engine_of(config: PushConfig, make_transport: MakeTransport, secrets: Secrets | None) -> PairEngine:
    return PairEngine(
        config, uuid.uuid4().hex[:16], "an engine", NAME, LOOPBACK, secrets, make_transport=make_transport
    )


@dataclass(eq=False)
class SitePrompt:
    """One prompt on both sides."""

    name: str
    tokens: int
    first: int
    content: np.ndarray
    reservation: Reservation
    d_blocks: list[int]
    p_blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def p_name(self) -> str:
        return f"{self.name}-on-p"


class DecodeSite:
    """One decode engine: its book and its workers, stage by stage. `cuts`: numbers of layers after which a stage
    ends; `hosts`: hosts of the workers, in turns."""

    def __init__(
        self,
        model: CacheModel,
        tp: int,
        *,
        cuts: Sequence[int] = (),
        hosts: Sequence[str] = (LOOPBACK,),
        divided: Divided = Divided(),  # noqa: B008
        block: int = 4,
        blocks: int = 64,
        push: PushConfig | None = None,
        make_transport: MakeTransport = MemoryTransport,
        device: Device | None = None,
        secrets: Secrets | None = None,
        seed: int = 2,
    ) -> None:
        self.model, self.tp, self.covers = model, tp, block * divided.world
        self.config, self.secrets = push or config(), secrets
        device = device or model.device()
        self.engine = engine_of(self.config, make_transport, secrets)
        self.book = LoadBook(self.engine.incarnation)
        self.pool = Pool(blocks, seed)
        self.firsts = [0, *cuts]  # first layer of each stage
        self.stages = [model.names[a:b] for a, b in pairwise([*self.firsts, len(model.names)])]
        self.positions = [(stage, rank) for stage in range(len(self.stages)) for rank in range(tp)]
        self.ranks = [
            RankCache(model, self.stages[stage], tp, rank, blocks, block, divided) for stage, rank in self.positions
        ]
        self.workers = []
        for (stage, rank), cache, host in zip(self.positions, self.ranks, cycle(hosts), strict=False):
            cache.fill(UNTOUCHED)
            shape = model.shape(block, tp, rank, divided)
            there = replace(engine_of(self.config, make_transport, secrets), host=host)
            worker = DecodeWorker(there, shape, device, stage, rank)
            worker.register_kv_caches(cache.tensors)
            self.workers.append(worker)
        facts = {place: worker.handshake() for place, worker in zip(self.positions, self.workers, strict=True)}
        self.geometry = merge_geometries(facts)  # type: ignore[arg-type]
        self.endpoints = tuple(f.endpoint for f in facts.values() if f is not None and f.endpoint is not None)
        self.requests: dict[str, SitePrompt] = {}
        self.used: set[int] = set()  # blocks of requests that have ended
        self.seen: list[Counter[str]] = [Counter() for _ in self.workers]
        self.outcomes: dict[str, list[LoadEnd]] = {}
        self.done: dict[str, list[LoadEnd]] = {}

    def reserve(
        self, name: str, tokens: int, *, first: int = 0, deadline_s: float = 30.0, seed: int | None = None
    ) -> SitePrompt:
        """Allocate blocks for [first, tokens) like D's scheduler; the workers get it in the next step."""
        content = self.model.content(tokens, len(self.requests) if seed is None else seed)
        before = first // self.covers
        blocks = [0] * before + self.pool.take(-(-tokens // self.covers) - before)
        arrive(self.book, name)
        assert self.book.wanted(name, tokens, first) == tokens - first
        bind = self.book.reserve(name, tokens - first, [blocks], self.geometry.tables, deadline_s, uuid.uuid4().hex)
        reservation = Reservation(
            version=PROTOCOL_VERSION,
            transfer=bind.transfer,
            model=NAME,
            first=bind.first,
            end=bind.end,
            blocks=tuple(ids.astype("<i4").tobytes() for ids in bind.blocks),
            geometry=self.geometry,
            endpoints=self.endpoints,
            deadline_s=deadline_s,
            prompt_length=tokens,
            prompt_hash="the hash",
        )
        self.requests[name] = SitePrompt(name, tokens, first, content, reservation, blocks[before:])
        return self.requests[name]

    @property
    def runtime(self) -> ReceiveRuntime:
        """That of the first worker."""
        runtime = self.workers[0].runtime
        assert runtime is not None
        return runtime

    def bound(self, name: str, tokens: int, **facts: Any) -> SitePrompt:
        """Reserve, and take the step that brings it to the workers."""
        request = self.reserve(name, tokens, **facts)
        self.step()
        return request

    def copied(self) -> list[np.ndarray]:
        """Return copies of what the first worker's cache holds."""
        return [view.copy() for views in self.ranks[0].views for view in views]

    def holds(self, before: list[np.ndarray]) -> bool:
        """Return whether the first worker's cache holds the same as when `copied` was called."""
        return all((one == other).all() for one, other in zip(before, self.copied(), strict=True))

    def step(self) -> DecodeStep:
        """Run one engine step: the metadata goes to the workers, their reports come back."""
        step = self.book.take_step(None, self.geometry)
        for worker in self.workers:
            worker.bind(StepMetadata(decode=step))
        self.collect()
        return step

    def collect(self) -> None:
        for rank, worker in enumerate(self.workers):
            for report in worker.reports():
                self.seen[rank][report.request_id] += 1
                assert self.seen[rank][report.request_id] == 1, f"{report} came twice from rank {rank}"
                self.outcomes.setdefault(report.request_id, []).append(report)
        for name, reports in list(self.outcomes.items()):
            if len(reports) == len(self.workers):
                del self.outcomes[name]
                if self.book.received(0.0, name) is not None:
                    self.done[name] = reports

    def received(self, *requests: SitePrompt, seconds: float = DEADLINE_S) -> list[LoadEnd]:
        """Step until every worker has reported these requests."""
        names = [request.name for request in requests]
        step_until(self.step, names, self.done, lambda: f"reports of {names}, so far {self.outcomes}", seconds)
        return [report for name in names for report in self.done[name]]

    def complete(self, *requests: SitePrompt) -> None:
        """Step until every worker has reported these requests, all of them well, and check what came."""
        assert all(report.ok for report in self.received(*requests)), self.outcomes
        self.check(*requests)

    def release(self, request: SitePrompt) -> None:
        """End the request: its blocks return to the pool with their contents."""
        del self.requests[request.name]
        self.pool.give(request.d_blocks)
        self.used.update(request.d_blocks)

    def check(self, *requests: SitePrompt, layers: int | None = None) -> None:
        """Check that these requests' KV is complete, and that nothing else changed but blocks of requests not named.
        `layers`: only so many, from the first."""
        for (stage, rank), cache in zip(self.positions, self.ranks, strict=True):
            for local_layer, views in enumerate(cache.views[:layers]):
                for region, view in enumerate(views):
                    where = f"stage {stage}, rank {rank}, layer {local_layer}, region {region}"
                    self._check(requests, where, view, self.firsts[stage] + local_layer, local_layer, region, cache)

    def _check(
        self,
        requests: Sequence[SitePrompt],
        where: str,
        view: np.ndarray,
        layer: int,
        local_layer: int,
        region: int,
        cache: RankCache,
    ) -> None:
        expected = np.full_like(view, UNTOUCHED)
        free = np.zeros(view.shape, dtype=bool)
        free[list(self.used.difference(*(request.d_blocks for request in requests)))] = True
        for request in self.requests.values():
            if request not in requests:
                free[request.d_blocks] = True
                continue
            tokens, at, row = cache.rank_tokens(request.first, request.tokens, local_layer, region)
            if self.used.intersection(request.d_blocks):  # used blocks may hold anything elsewhere
                free[request.d_blocks] = True
            ids = np.asarray(request.d_blocks)[at - request.first // self.covers]
            wanted = request.content[layer, region][tokens][:, cache.heads[local_layer], : view.shape[-1]]
            expected[ids, :, row] = wanted
            landed = view[ids, :, row]
            assert (landed == wanted).all(), f"{request.name}: {where}: wrong tokens {_wrong(landed != wanted)}"
            if self.model.layout == "opaque" and request.tokens % self.covers:
                free[request.d_blocks[-1], :, request.tokens % self.covers :] = True  # a plane is written whole
                continue
            last, behind = self._tail(request, cache, local_layer, region)
            expected[last, :, behind] = 0
            assert not view[last, :, behind].any(), f"{request.name}: {where}: what is behind it is not cleared"
        touched = (view != expected) & ~free
        assert not touched.any(), f"{where}: blocks {np.unique(np.argwhere(touched)[:, 0]).tolist()} were touched"

    def _tail(self, request: SitePrompt, cache: RankCache, *of: int) -> tuple[int, np.ndarray]:
        """Return the request's last block, and this rank's places in it behind the last token."""
        full = -(-request.tokens // self.covers) * self.covers
        return request.d_blocks[-1], cache.rank_tokens(request.tokens, full, *of)[2]

    def written(self, *requests: SitePrompt) -> bool:
        """Return whether a P has written into any of these requests' blocks."""
        for cache in self.ranks:
            for local_layer, views in enumerate(cache.views):
                for region, view in enumerate(views):
                    before = np.full_like(view, UNTOUCHED)
                    for request in requests:
                        last, behind = self._tail(request, cache, local_layer, region)
                        before[last, :, behind] = 0
                    blocks = [block for request in requests for block in request.d_blocks]
                    if (view != before)[blocks].any():
                        return True
        return False

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def _wrong(differs: np.ndarray) -> list[int]:
    return np.flatnonzero(differs.reshape(len(differs), -1).any(axis=1)).tolist()[:8]


def by_name(worker: PrefillWorker, name: str, tensor: Any) -> None:
    worker.save_layer(name)


def without_a_name(worker: PrefillWorker, name: str, tensor: Any) -> None:
    """Fire the hook without a name, as vllm-ascend does in some of its paths."""
    worker.save_layer("")


def no_hook(worker: PrefillWorker, name: str, tensor: Any) -> None:
    """Fire no hook, as in a captured graph."""


class PrefillSite:
    """One prefill engine: its book and its workers, by (stage, rank). `cuts`: ends of its stages, if they differ in
    size."""

    def __init__(
        self,
        model: CacheModel,
        tp: int,
        *,
        pp: int = 1,
        cuts: Sequence[int] = (),
        divided: Divided = Divided(),  # noqa: B008
        block: int = 4,
        blocks: int = 64,
        push: PushConfig | None = None,
        make_transport: MakeTransport = MemoryTransport,
        device: Device | Callable[[int], Device] | None = None,
        secrets: Secrets | None = None,
        seed: int = 1,
    ) -> None:
        self.model, self.tp, self.covers = model, tp, block * divided.world
        self.config = push or config()
        device = device or model.device()
        device_of = device if callable(device) else lambda _: device
        self.book = PushBook(model=NAME)
        self.pool = Pool(blocks, seed)
        self.workers: dict[tuple[int, int], PrefillWorker] = {}
        self.caches: dict[tuple[int, int], RankCache] = {}
        self.stages = [tuple(map(str, part)) for part in np.array_split(np.array(model.names), cuts or pp)]
        pp = len(self.stages)
        for stage, names in enumerate(self.stages):
            for rank in range(tp * divided.pcp):
                cache = RankCache(model, names, tp, rank, blocks, block, divided)
                cache.fill(7)
                shape = model.shape(block, tp, rank, divided)
                engine = engine_of(self.config, make_transport, secrets)
                place = EngineWorld(stage * tp + rank, tp, pp, 8192)
                worker = PrefillWorker(engine, shape, device_of(rank), Contributor(stage, rank), place)
                worker.register_kv_caches(cache.tensors)
                self.workers[stage, rank], self.caches[stage, rank] = worker, cache
        self.geometry = merge_geometries({key: worker.handshake() for key, worker in self.workers.items()})  # type: ignore[misc]
        self.book.geometry = self.geometry
        self.known: set[str] = set()
        self.ended: list[str] = []
        self.seen: dict[tuple[int, int], Counter[str]] = {key: Counter() for key in self.workers}
        self.sent: set[str] = set()
        self.released: set[str] = set()

    def admit(self, request: SitePrompt, **changes: Any) -> Any:
        """Take the request's reservation like P's scheduler."""
        reservation = request.reservation
        return self.book.take(
            0.0, NewRequest(request.p_name, (request.tokens, reservation.prompt_hash), uuid.uuid4().hex, reservation)
        )

    @property
    def runtime(self) -> PushRuntime:
        """That of the first worker."""
        runtime = self.workers[0, 0].runtime
        assert runtime is not None
        return runtime

    def begun(self, d: DecodeSite, name: str, tokens: int, computed: int, **facts: Any) -> SitePrompt:
        """Let D reserve a prompt, and compute its first tokens here."""
        request = d.bound(name, tokens, **facts)
        assert self.admit(request) is None
        self.compute((request, computed))
        return request

    def compute(self, *work: tuple[SitePrompt, int], hook: Hook = by_name, ready: int = 0) -> PrefillStep:
        """Run one engine step that computes so many tokens of each request, of which the first `ready` are cached."""
        ranges = []
        for request, count in work:
            new = self.pool.take(-(-(request.computed + count) // self.covers) - len(request.p_blocks))
            request.p_blocks += new
            whole = request.p_name not in self.known
            self.known.add(request.p_name)
            blocks = request.p_blocks if whole else new
            self.book.scheduled(request.p_name, request.computed, count, blocks, replaces=whole, ready=ready)
            ranges.append((request, request.computed, request.computed + count))
            request.computed += count
        return self._deliver(ranges, hook)

    def prefill(self, request: SitePrompt, *chunks: int, hook: Hook = by_name) -> None:
        """Compute a whole prompt, in chunks; one chunk if none are named."""
        assert self.admit(request) is None
        for chunk in chunks or (request.tokens,):
            self.compute((request, chunk), hook=hook)

    def cached_prefix(self, request: SitePrompt, tokens: int) -> None:
        """Put the first tokens into P's cache beforehand, as an earlier request would."""
        request.p_blocks, request.computed = self.pool.take(-(-tokens // self.covers)), tokens
        self.fill(request, tokens)

    def fill(self, request: SitePrompt, tokens: int) -> None:
        """Write the request's first tokens into its blocks."""
        for (stage, _), cache in self.caches.items():
            for index, name in enumerate(self.stages[stage]):
                self._write(cache, self.model.names.index(name), index, request, 0, tokens)

    def idle(self) -> PrefillStep:
        """Run a step without tokens."""
        return self._deliver([], by_name)

    def preempt(self, request: SitePrompt) -> PrefillStep:
        """Take the request's blocks away in a step of others."""
        self.book.preempted(request.p_name)
        self.pool.give(request.p_blocks)
        self.known.discard(request.p_name)
        request.p_blocks, request.computed = [], 0
        return self.idle()

    def finish(self, request: SitePrompt, *, holds_blocks: bool = True) -> bool:
        self.ended.append(request.p_name)
        return self.book.finished(
            0.0, request.p_name, holds_blocks=holds_blocks, well=False, why="the test ended it"
        ).blocks_held

    def finish_and_free(self, *requests: SitePrompt) -> None:
        """End requests, and step until their blocks are free."""
        for request in requests:
            self.finish(request)
        self.released_blocks_of(*requests)

    def released_blocks_of(self, *requests: SitePrompt, seconds: float = DEADLINE_S) -> None:
        """Step until every worker has reported these requests, so that their blocks are free."""
        names = [request.p_name for request in requests]
        step_until(self.idle, names, self.sent, lambda: f"{names} sent, seen {self.seen}", seconds)

    def _deliver(self, ranges: list[tuple[SitePrompt, int, int]], hook: Hook) -> PrefillStep:
        step = self.book.take_step()
        for worker in self.workers.values():
            worker.preempt(StepMetadata(prefill=step))
            assert worker.runtime is not None
            worker.runtime.steps.begin(step)  # `bind` would end an engine whose writer has died
        for (stage, rank), worker in self.workers.items():
            cache = self.caches[stage, rank]
            for index, name in sorted(enumerate(self.stages[stage]), key=lambda each: ".indexer." not in each[1]):
                for request, begin, end in ranges:  # an indexer's keys are written before the attention runs
                    self._write(cache, self.model.names.index(name), index, request, begin, end)
                if ranges:
                    hook(worker, name, cache.tensors[name])
            worker.end_step()
        self.collect()
        return step

    def _write(self, cache: RankCache, layer: int, local_layer: int, request: SitePrompt, begin: int, end: int) -> None:
        if layer >= len(request.content):
            return  # layer of a draft model that D lacks
        for region, view in enumerate(cache.views[local_layer]):
            tokens, at, row = cache.rank_tokens(begin, end, local_layer, region)
            ids = np.asarray(request.p_blocks)[at]
            content = request.content[layer, region][tokens][:, cache.heads[local_layer], : view.shape[-1]]
            view[ids, :, row] = content

    def collect(self) -> None:
        ended, self.ended = self.ended, []
        for key, worker in self.workers.items():
            for name in worker.ended(ended).sent:
                self.seen[key][name] += 1
                assert self.seen[key][name] == 1, f"{name} was reported twice by {key}"
                if all(counts[name] for counts in self.seen.values()):
                    self.sent.add(name)
                    if self.book.released(name):
                        self.released.add(name)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def pushed(
    p: PrefillSite, d: DecodeSite, name: str, tokens: int, *, deadline_s: float = 30.0
) -> tuple[SitePrompt, list[LoadEnd]]:
    """Reserve, prefill and push a prompt of its own. Return it with what D's workers report."""
    request = d.reserve(name, tokens, deadline_s=deadline_s)
    d.step()
    p.prefill(request)
    return request, d.received(request)


def step_until(
    step: Callable[[], object], names: Sequence[str], reported: Container[str], what: Callable[[], str], seconds: float
) -> None:
    """Run steps until all of these are reported, and one more: nothing may be reported twice."""

    def all_reported() -> bool:
        step()
        return all(name in reported for name in names)

    until(all_reported, what, seconds)
    step()


def heard_ready(events: Events) -> set[tuple[str, int]]:
    """Return transfers and D ranks whose first READY has come to P. D may repeat READY, as BEGINs are repeated."""
    return {
        (facts["transfer"], facts["d_rank"]) for stage, facts in list(events) if stage == "ready" and "waited" in facts
    }
