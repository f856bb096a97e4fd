# SPDX-License-Identifier: Apache-2.0
"""The direct plan: the bytes of its own cache that a P rank writes, and their places in the D ranks' caches.

A step is planned once for all its requests; the spans are offsets, so every layer only adds its base addresses. The
work is proportional to the blocks of the step, not to those sent before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.coalesce import Ints, Spans, merged
from vllm_ascend_pd.geometry.context_parallel import shared
from vllm_ascend_pd.geometry.layout import CacheGeometry, Ranks, Region
from vllm_ascend_pd.geometry.match import require_match
from vllm_ascend_pd.geometry.ownership import TokenLine, granule
from vllm_ascend_pd.geometry.runs import Grid, Pattern, Tables, dealt_grid, grid
from vllm_ascend_pd.geometry.shard import Shares, destinations, head_shares

_CACHED_ROUTES = 256


def push_range(first: int, end: int, before: int, after: int, d_block_size: int) -> tuple[int, int]:
    """Return the tokens of [first, end) that leave in the step that moves the watermark from `before` to `after`.

    Only complete D blocks leave, and the final partial one. Consecutive steps meet without gap or overlap.
    """
    lo = max(first, before // d_block_size * d_block_size)
    hi = end if after >= end else after // d_block_size * d_block_size
    if before >= end:
        lo = end
    return lo, max(lo, hi)


def plan_digest(p: CacheGeometry, d: CacheGeometry, first: int, end: int, mode: str) -> str:
    """Return a hash of what P and D must agree on before a byte moves: geometries, token range and mode.

    Fields of a geometry that have their defaults are not in it. So releases with different features agree on caches
    that need none of these.
    """
    return hashlib.sha256(msgspec.msgpack.encode(("plan/1", p, d, first, end, mode))).hexdigest()


class Job(msgspec.Struct, frozen=True, eq=False):
    """One request's tokens [lo, hi) of one step, on their way to one D instance."""

    d: CacheGeometry
    first: int  # where the transfer starts, in this group's tokens
    lo: int
    hi: int
    p_blocks: npt.NDArray[np.int32]  # from token 0
    d_blocks: npt.NDArray[np.int32]  # from the block that holds `first`
    instance: int = 0  # distinguishes D instances of equal geometry


class Delivery(msgspec.Struct, frozen=True):
    """Cells that one P rank must deliver to one D rank for a job: these heads at tokens [lo, hi).

    If ranks divide the tokens, only those that both ranks hold are meant.
    """

    lo: int
    hi: int
    heads: tuple[int, int]  # first, and one past the last


class JobPlan(msgspec.Struct, eq=False):
    """One job's spans by D rank, one `Spans` per region. D ranks that get nothing in this step are absent."""

    by_rank: dict[int, tuple[Spans, ...]]
    deliveries: dict[int, Delivery]

    def nbytes(self, d_rank: int) -> int:
        return sum(spans.nbytes for spans in self.by_rank.get(d_rank, ()))


class Served(msgspec.Struct, frozen=True):
    """Work of this rank for one D rank: the heads, the ranks that share them, and the spans of a chunk.

    `d_part` is the part of the tokens that the D rank holds.
    """

    d_rank: int
    heads: range
    shares: Shares
    d_part: int
    patterns: tuple[Pattern, ...]


class _DirectRoute(msgspec.Struct, frozen=True):
    """Facts about one D layout that depend on no job."""

    granule: int
    targets: tuple[Served, ...]


LayoutKey = tuple[Ranks, int, int, tuple[Region, ...]]


def layout_key(d: CacheGeometry) -> LayoutKey:
    """Return the layout of a D cache. Jobs with equal layouts share a line."""
    return d.ranks, d.block_size, d.interleave, d.regions


class StepPlanner:
    """Planner of one P rank's steps. It caches only what depends on geometries alone."""

    def __init__(self, p: CacheGeometry, rank: int) -> None:
        self._p = p
        self._rank = rank
        self._routes: dict[LayoutKey, _DirectRoute] = {}

    def plan(self, jobs: Sequence[Job], step_number: int = 0) -> list[JobPlan]:
        """Return the plans in the order of `jobs`. `step_number` is the step's sequence number, equal on all ranks."""
        plans = [JobPlan({}, {}) for _ in jobs]
        for layout, members in by_layout(jobs).items():
            some = [jobs[index] for index in members]
            route = self._route(layout, some[0].d)
            line = line_of(some, route.granule)
            for target in route.targets:
                shares = target.shares.rotated(step_number)
                lo, hi = line.owned(shares, self._rank)
                self._fill(plans, jobs, members, target, lo, hi)
        return plans

    def whole(self, job: Job, d_rank: int) -> tuple[Spans, ...]:
        """Return the spans of all of a job's tokens, as if no other rank shared this rank's heads for `d_rank`."""
        [target] = (each for each in self._route(layout_key(job.d), job.d).targets if each.d_rank == d_rank)
        line = line_of([job], 1)
        _, chunks = self._chunks(line.lo, line.hi, [job], target)
        return tuple(merged(*pattern.spans(chunks))[0] for pattern in target.patterns)

    def _route(self, layout: LayoutKey, d: CacheGeometry) -> _DirectRoute:
        route = self._routes.get(layout)
        if route is None:
            require_match(self._p, d)
            if len(self._routes) >= _CACHED_ROUTES:
                self._routes.clear()
            targets = tuple(self._target(d, d_rank) for d_rank in destinations(self._p, d, self._rank))
            route = self._routes[layout] = _DirectRoute(granule(d), targets)
        return route

    def _target(self, d: CacheGeometry, d_rank: int) -> Served:
        ours, theirs = self._p.head_range(self._rank), d.head_range(d_rank)
        heads = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        # Ranks hold either one head, which they may share, or several that they do not share: one cut serves all heads.
        shares = head_shares(self._p, d, d_rank, heads.start, self._p.ranks.part(self._rank))
        at = heads.start - ours.start, heads.start - theirs.start
        patterns = tuple(
            Pattern.between((a, at[0]), (b, at[1]), len(heads), self._p.block_size)
            for a, b in zip(self._p.regions, d.regions, strict=True)
        )
        return Served(d_rank, heads, shares, d.ranks.part(d_rank), patterns)

    def _chunks(self, lo: Ints, hi: Ints, jobs: Sequence[Job], target: Served) -> tuple[Ints, Grid]:
        """Return the jobs with tokens of [lo, hi) that this rank and the target both hold, and these tokens as chunks.

        Jobs are given by index.
        """
        ours, theirs = p_tables(jobs, self._p.covers), d_tables(jobs)
        p, d = self._p.token_split, jobs[0].d.token_split
        if p.world == d.world == 1:
            return np.arange(len(jobs)), grid(lo, hi, ours, theirs)
        part = self._p.ranks.part(self._rank)
        runs = [shared(p, part, d, target.d_part, *bounds) for bounds in zip(lo.tolist(), hi.tolist(), strict=True)]
        return dealt_grid(runs, ours, theirs)

    def _fill(
        self, plans: list[JobPlan], jobs: Sequence[Job], members: Sequence[int], target: Served, lo: Ints, hi: Ints
    ) -> None:
        """Add to the plans what `target` gets of each job's [lo, hi)."""
        busy = np.flatnonzero(hi > lo)
        if not len(busy):
            return
        some, chunks = self._chunks(lo[busy], hi[busy], [jobs[members[index]] for index in busy.tolist()], target)
        busy = busy[some]
        if not len(busy):
            return
        chosen = [members[index] for index in busy.tolist()]
        lo, hi = lo[busy], hi[busy]
        distinct = list(dict.fromkeys(target.patterns))  # K and V alike: one set of spans serves both
        which = [distinct.index(pattern) for pattern in target.patterns]
        all_spans = [merged(*pattern.spans(chunks)) for pattern in distinct]
        groups = [(spans, ends.tolist()) for spans, ends in all_spans]
        heads = (target.heads.start, target.heads.stop)
        for index, (job, begin, end) in enumerate(zip(chosen, lo.tolist(), hi.tolist(), strict=True)):
            cut = [spans.part(ends, index) for spans, ends in groups]
            plan = plans[job]
            plan.by_rank[target.d_rank] = tuple([cut[one] for one in which])
            plan.deliveries[target.d_rank] = Delivery(begin, end, heads)


def by_layout(jobs: Sequence[Job]) -> dict[LayoutKey, list[int]]:
    """Return the indices of the jobs by layout. Both are in the order of the jobs, never in hash order."""
    layouts: dict[int, list[int]] = {}
    members_of: dict[LayoutKey, list[int]] = {}
    for index, job in enumerate(jobs):
        members = layouts.get(id(job.d))
        if members is None:
            members = layouts[id(job.d)] = members_of.setdefault(layout_key(job.d), [])
        members.append(index)
    return members_of


def line_of(jobs: Sequence[Job], granule_tokens: int) -> TokenLine:
    count = len(jobs)
    lo = np.fromiter((job.lo for job in jobs), np.int64, count)
    hi = np.fromiter((job.hi for job in jobs), np.int64, count)
    if (hi < lo).any() or (lo < np.fromiter((job.first for job in jobs), np.int64, count)).any():
        raise LocalProtocolError("a job's token range is reversed or starts before its transfer")
    d = jobs[0].d
    if d.opaque and (lo[hi > lo] % d.block_size).any():
        raise LocalProtocolError("a job starts inside a block whose token axis is opaque")
    return TokenLine(lo, hi, d.covers, granule_tokens)


def p_tables(jobs: Sequence[Job], block_size: int) -> Tables:
    return Tables(block_size, [job.p_blocks for job in jobs], [0] * len(jobs))


def d_tables(jobs: Sequence[Job]) -> Tables:
    size = jobs[0].d.covers
    return Tables(size, [job.d_blocks for job in jobs], [job.first // size for job in jobs])
