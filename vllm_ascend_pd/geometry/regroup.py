# SPDX-License-Identifier: Apache-2.0
"""The regroup plan of one rank and step: what each rank sends to the others, and what each owner then writes.

Every contributor of a D rank owns an interval of its tokens, with all of the D rank's heads. What an owner holds
itself goes from its cache straight into its slot; the rest arrives by one exchange. All ranks compute the whole
matrix from the same metadata. So they agree on every split, and on whether there is an exchange at all.

Order of the buffers. Send: owner, D layout (by first appearance), D rank, region, unit. Receive: source, then the same.
Slot: region, unit. `images.py` defines units and their layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from vllm_ascend_pd.geometry.coalesce import Ints, Spans
from vllm_ascend_pd.geometry.images import (
    BUFFER_ROW,
    CACHE_ROW,
    Image,
    Rows,
    Segments,
    buffer_rows,
    cache_rows,
    slot_spans,
    starts,
)
from vllm_ascend_pd.geometry.lanes import Lane, lane_of
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.match import require_match
from vllm_ascend_pd.geometry.ownership import TokenLine, granule
from vllm_ascend_pd.geometry.plan import Delivery, Job, LayoutKey, by_layout, line_of

_CACHED_ROUTES = 256


class Slot(msgspec.Struct, frozen=True, eq=False):
    """Data that this rank owns for one D rank of one instance, staged in `nbytes` contiguous bytes.

    `own_rows` gather from this rank's cache, `received` assemble from the receive buffer; together they fill the slot.
    `writes` and `deliveries` are by job index. The writes of a job may be left out: no other job needs its bytes.
    """

    instance: int
    d_rank: int
    nbytes: int
    own_rows: Rows
    received: Rows
    writes: dict[int, tuple[Spans, ...]]
    deliveries: dict[int, Delivery]


class RegroupPlan(msgspec.Struct, frozen=True, eq=False):
    """One rank's part of one step. Offsets only: every layer uses the same plan."""

    rank: int
    matrix: Ints  # bytes from rank [row] to rank [column]; the diagonal is 0 unless it makes all splits equal
    send: Rows
    slots: tuple[Slot, ...]  # by D layout, D rank and instance, in the order of their first jobs

    @property
    def exchanges(self) -> bool:
        """True if any rank sends anything to another; the same on all ranks."""
        return bool((self.matrix.sum() - np.trace(self.matrix)) > 0)

    @property
    def send_splits(self) -> list[int]:
        return [int(size) for size in self.matrix[self.rank]]

    @property
    def receive_splits(self) -> list[int]:
        return [int(size) for size in self.matrix[:, self.rank]]

    @property
    def equal_splits(self) -> bool:
        return bool((self.matrix == self.matrix[0, 0]).all())


class Room(msgspec.Struct, frozen=True):
    """Bytes that the largest slot, send buffer and receive buffer of any rank must hold."""

    slot: int
    send: int
    receive: int


class _ExchangeRoute(msgspec.Struct, frozen=True):
    """Facts about one D layout that depend on no job."""

    granule: int
    lanes: tuple[Lane, ...]


class _Flow(msgspec.Struct, frozen=True, eq=False):
    """One lane in one step: each owner's interval of the line, and its bytes per head."""

    lane: Lane
    d: CacheGeometry
    members: list[int]  # indices of the line's jobs in the step
    line: TokenLine
    intervals: dict[int, tuple[int, int]]
    head_bytes: dict[int, int]


class RegroupPlanner:
    """Planner of one P rank's exchanges. All ranks of the group must call it with the same jobs and step_number."""

    def __init__(self, p: CacheGeometry, rank: int) -> None:
        self._p = p
        self._rank = rank
        self._routes: dict[LayoutKey, _ExchangeRoute] = {}

    def plan(self, jobs: Sequence[Job], step_number: int = 0) -> RegroupPlan:
        """Return the plan of one step or sub-step. `step_number` is its sequence number."""
        flows = self._flows(jobs, step_number)
        matrix, through = self._matrix(flows)
        sent = np.cumsum(matrix[self._rank]) - matrix[self._rank]
        received = np.cumsum(matrix[:, self._rank]) - matrix[:, self._rank]
        send: list[Rows] = []
        slots: list[Slot] = []
        alone: dict[object, list[Slot]] = {}
        for flow in flows:
            send.append(self._send(flow, jobs, sent, through))
            if self._rank not in flow.intervals:
                continue
            if through or flow.lane.feeds[self._rank].keys() != {self._rank}:
                slots.extend(self._slots(flow, jobs, received, through))
                continue
            # Nothing arrives from other ranks: slots of D ranks that get the same tokens differ only in the heads.
            heads = flow.lane.d_heads
            key = id(flow.line), flow.intervals[self._rank], len(heads)
            like = alone.get(key)
            if like is None:
                like = alone[key] = self._slots(flow, jobs, received, through)
                slots.extend(like)
            else:
                p_head = self._first_head(heads)
                slots.extend(_of_other_heads(slot, flow.lane.d_rank, heads, p_head) for slot in like)
        return RegroupPlan(self._rank, matrix, _stacked(send, len(CACHE_ROW)), tuple(slots))

    def room(self, jobs: Sequence[Job], step_number: int = 0, enough: int = 0) -> Room:
        """Return the most that the step needs on any rank.

        A slot counts with an upper bound if that is at most `enough`; only a larger one is computed exactly.
        """
        flows = self._flows(jobs, step_number)
        matrix, _ = self._matrix(flows)
        slot = 0
        for flow in flows:
            heads = len(flow.lane.d_heads)
            instances = np.array([jobs[index].instance for index in flow.members], dtype=np.int64)
            for owner, size in flow.head_bytes.items():
                if size * heads > enough and (instances != instances[0]).any():
                    size = _fullest(flow, jobs, owner, instances)  # noqa: PLW2901
                slot = max(slot, size * heads)
        return Room(slot, int(matrix.sum(axis=1).max()), int(matrix.sum(axis=0).max()))

    def _route(self, layout: LayoutKey, d: CacheGeometry) -> _ExchangeRoute:
        route = self._routes.get(layout)
        if route is None:
            require_match(self._p, d)
            if len(self._routes) >= _CACHED_ROUTES:
                self._routes.clear()
            lanes = tuple(lane_of(self._p, d, d_rank) for d_rank in range(d.tp_size))
            route = self._routes[layout] = _ExchangeRoute(granule(d), lanes)
        return route

    def _flows(self, jobs: Sequence[Job], step_number: int) -> list[_Flow]:
        flows = []
        for layout, members in by_layout(jobs).items():
            d = jobs[members[0]].d
            route = self._route(layout, d)
            line = line_of([jobs[index] for index in members], route.granule)
            for lane in route.lanes:
                shares = lane.owners.rotated(step_number)
                cuts = line.cuts(shares)
                blocks = line.blocks_before(cuts) if d.opaque else cuts
                size = np.zeros(len(shares.ranks), dtype=np.int64)
                for region in d.regions:
                    size += np.diff(blocks if region.opaque else cuts) * region.cell_bytes
                borders = cuts.tolist()
                intervals = dict(zip(shares.ranks, pairwise(borders), strict=True))
                head_bytes = dict(zip(shares.ranks, size.tolist(), strict=True))
                flows.append(_Flow(lane, d, members, line, intervals, head_bytes))
        return flows

    def _matrix(self, flows: Sequence[_Flow]) -> tuple[Ints, bool]:
        """Return the bytes from each rank to each, and whether a rank's own bytes go through the exchange too."""
        size = self._p.tp_size
        matrix = np.zeros((size, size), dtype=np.int64)
        for flow in flows:
            for owner, feed in flow.lane.feeds.items():
                for source, heads in feed.items():
                    matrix[source, owner] += flow.head_bytes[owner] * len(heads)
        through = size > 1 and bool(matrix[0, 0] > 0 and (matrix == matrix[0, 0]).all())
        if not through:
            np.fill_diagonal(matrix, 0)
        return matrix, through

    def _send(self, flow: _Flow, jobs: Sequence[Job], sent: Ints, through: bool) -> Rows:
        """Return rows for what this rank sends of one lane. Advance `sent`, the filled part of each owner's split."""
        owners = [
            owner
            for owner in sorted(flow.lane.feeds)
            if self._rank in flow.lane.feeds[owner] and (through or owner != self._rank)
        ]
        if not owners:
            return np.empty((0, len(CACHE_ROW)), dtype=np.int64)
        heads = flow.lane.feeds[owners[0]][self._rank]  # a source passes on the same heads to every owner
        parts = [flow.line.between(*flow.intervals[owner]) for owner in owners]
        segments, group, _ = _segments(jobs, flow.members, parts)
        image = Image(len(heads), 0, len(heads))
        begin, ends = starts(flow.d, segments, image.width, group, sent[owners])
        sent[owners] = ends
        if not len(segments.jobs):
            return np.empty((0, len(CACHE_ROW)), dtype=np.int64)
        p_head = self._first_head(heads)
        return cache_rows(self._p, flow.d, segments, begin, p_head, image, len(flow.lane.d_heads))

    def _first_head(self, heads: range) -> int:
        """The place of these heads' first among this rank's."""
        return heads.start - self._p.head_range(self._rank).start

    def _slots(self, flow: _Flow, jobs: Sequence[Job], received: Ints, through: bool) -> list[Slot]:
        """Return this rank's slots of one lane. Advance `received`, the used part of each source's split."""
        lane, d = flow.lane, flow.d
        parts = [flow.line.between(*flow.intervals[self._rank])]
        segments, _, members = _segments(jobs, flow.members, parts)
        feed = lane.feeds[self._rank]
        arriving: dict[int, list[Ints]] = {}
        for source in sorted(feed):
            if through or source != self._rank:
                one = np.zeros(len(members), dtype=np.int64)
                arriving[source], end = starts(d, segments, len(feed[source]), one, received[source : source + 1])
                received[source] = end[0]
        slots = []
        instances = [job.instance for job in segments.jobs]
        for instance in dict.fromkeys(instances):
            chosen = [index for index, each in enumerate(instances) if each == instance]
            of_slot = _chosen(segments, chosen)
            some = {source: [begin[chosen] for begin in regions] for source, regions in arriving.items()}
            slots.append(self._slot(lane, d, of_slot, [members[index] for index in chosen], some))
        return slots

    def _slot(
        self, lane: Lane, d: CacheGeometry, segments: Segments, members: Sequence[int], arriving: dict[int, list[Ints]]
    ) -> Slot:
        d_heads, feed = lane.d_heads, lane.feeds[self._rank]
        base = np.zeros(1, dtype=np.int64)
        begin, end = starts(d, segments, len(d_heads), np.zeros(len(members), dtype=np.int64), base)
        own_rows = np.empty((0, len(CACHE_ROW)), dtype=np.int64)
        if self._rank not in arriving:
            heads = feed[self._rank]
            image = Image(len(d_heads), heads.start - d_heads.start, len(heads))
            p_head = self._first_head(heads)
            own_rows = cache_rows(self._p, d, segments, begin, p_head, image, len(d_heads))
        received = []
        for source, regions in arriving.items():
            image = Image(len(d_heads), feed[source].start - d_heads.start, len(feed[source]))
            received.append(buffer_rows(d, segments, regions, begin, image, len(d_heads)))
        by_region = [(spans, ends.tolist()) for spans, ends in slot_spans(d, segments, begin, len(d_heads))]
        writes, deliveries = {}, {}
        for index, member in enumerate(members):
            writes[member] = tuple(spans.part(ends, index) for spans, ends in by_region)
            bounds = d_heads.start, d_heads.stop
            deliveries[member] = Delivery(int(segments.lo[index]), int(segments.hi[index]), bounds)
        rows = _stacked(received, len(BUFFER_ROW))
        return Slot(segments.jobs[0].instance, lane.d_rank, int(end[0]), own_rows, rows, writes, deliveries)


def _of_other_heads(slot: Slot, d_rank: int, d_heads: range, p_head: int) -> Slot:
    """Return the slot for another D rank that gets the same tokens of as many heads, all held by this rank."""
    own_rows = slot.own_rows.copy()
    own_rows[:, CACHE_ROW.index("head")] = p_head
    heads = d_heads.start, d_heads.stop
    deliveries = {job: Delivery(old.lo, old.hi, heads) for job, old in slot.deliveries.items()}
    return msgspec.structs.replace(slot, d_rank=d_rank, own_rows=own_rows, deliveries=deliveries)


def _segments(
    jobs: Sequence[Job], members: Sequence[int], parts: Sequence[tuple[Ints, Ints]]
) -> tuple[Segments, Ints, list[int]]:
    """Return the non-empty ranges of several owners, one owner after the other, with the owner's index and the job."""
    busy = [np.flatnonzero(hi > lo) for lo, hi in parts]
    lo = np.concatenate([lo[some] for (lo, _), some in zip(parts, busy, strict=True)])
    hi = np.concatenate([hi[some] for (_, hi), some in zip(parts, busy, strict=True)])
    group = np.repeat(np.arange(len(parts)), [len(some) for some in busy])
    chosen = [members[index] for some in busy for index in some.tolist()]
    return Segments(tuple(jobs[index] for index in chosen), lo, hi), group, chosen


def _chosen(segments: Segments, which: list[int]) -> Segments:
    if len(which) == len(segments.jobs):
        return segments
    return Segments(tuple(segments.jobs[index] for index in which), segments.lo[which], segments.hi[which])


def _stacked(tables: Sequence[Rows], columns: int) -> Rows:
    some = [table for table in tables if len(table)]
    if len(some) == 1:
        return some[0]
    return np.concatenate(some) if some else np.empty((0, columns), dtype=np.int64)


def _fullest(flow: _Flow, jobs: Sequence[Job], owner: int, instances: Ints) -> int:
    """Return the bytes per head of the instance that gets most from `owner`."""
    segments, _, members = _segments(jobs, flow.members, [flow.line.between(*flow.intervals[owner])])
    size = np.zeros(len(members), dtype=np.int64)
    for region in flow.d.regions:
        size += segments.measure(region, flow.d.block_size) * region.cell_bytes
    by_instance = {int(instance): 0 for instance in instances}
    for member, bytes_per_head in zip(members, size.tolist(), strict=True):
        by_instance[jobs[member].instance] += bytes_per_head
    return max(by_instance.values())


def slot_segments(slot: Slot, jobs: Sequence[Job]) -> tuple[list[int], Segments]:
    """Return the job indices of a slot in the order of its images, and their token ranges."""
    members = list(slot.deliveries)
    lo = np.array([one.lo for one in slot.deliveries.values()], dtype=np.int64)
    hi = np.array([one.hi for one in slot.deliveries.values()], dtype=np.int64)
    return members, Segments(tuple(jobs[member] for member in members), lo, hi)
