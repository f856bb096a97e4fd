# SPDX-License-Identifier: Apache-2.0
"""Division of a step into sub-steps that fit every rank's buffers and slots.

A prefix hit on P can push far more than one step's tokens. The step is then cut at borders of D blocks, in the order
of its jobs. Each sub-step is planned, exchanged and written like a step of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.lanes import lane_of
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job
from vllm_ascend_pd.geometry.regroup import RegroupPlanner, Room


class SubStep(msgspec.Struct, frozen=True, eq=False):
    """Jobs of one exchange: `members[i]` is the index of `jobs[i]` in the step."""

    jobs: list[Job]
    members: list[int]
    step_number: int


def room_for_a_block(p: CacheGeometry, d: CacheGeometry) -> Room:
    """Return the least that slots and buffers must hold for regroup to serve this D geometry at all.

    One rank may own all of a partly filled block, whatever its share of a full one.
    """
    lanes = [lane_of(p, d, rank) for rank in range(d.tp_size)]
    head = sum(region.cell_bytes * (1 if region.opaque else d.block_size) for region in d.regions)
    send, receive = [0] * p.tp_size, [0] * p.tp_size
    for lane in lanes:
        for rank in range(p.tp_size):
            feed = lane.feeds.get(rank, {})
            receive[rank] += sum(len(heads) for source, heads in feed.items() if source != rank)
            given = [len(feeds[rank]) for owner, feeds in lane.feeds.items() if owner != rank and rank in feeds]
            send[rank] += max(given, default=0)
    slot = max(len(lane.d_heads) for lane in lanes)
    return Room(slot * head, max(send) * head, max(receive) * head)


def sub_steps(
    planner: RegroupPlanner, jobs: Sequence[Job], slot_bytes: int, buffer_bytes: int, step_number: int = 0
) -> list[SubStep]:
    """Cut the step into few sub-steps, in each of which no slot and no buffer of any rank overflows.

    All ranks get the same: it depends only on the jobs, the geometries and the two sizes.
    """
    blocks = [_blocks(job) for job in jobs]
    total = sum(blocks)
    cut: list[SubStep] = []

    def fits(stop: int) -> bool:
        part = _part(jobs, blocks, at, stop, step_number + len(cut))
        need = planner.room(part.jobs, part.step_number, slot_bytes)
        return need.slot <= slot_bytes and max(need.send, need.receive) <= buffer_bytes

    at = 0
    while at < total:
        stop = total if fits(total) else _last_that_fits(fits, at, total)
        if stop == at:
            raise LocalProtocolError(
                f"one D block does not fit a slot of {slot_bytes} and buffers of {buffer_bytes} bytes"
            )
        cut.append(_part(jobs, blocks, at, stop, step_number + len(cut)))
        at = stop
    return cut


def _blocks(job: Job) -> int:
    if job.hi == job.lo:
        return 0
    return -(-job.hi // job.d.block_size) - job.lo // job.d.block_size


def _last_that_fits(fits: Callable[[int], bool], at: int, total: int) -> int:
    """Return the furthest stop that fits, found by bisection; `at` if not even one block fits."""
    low, high = at, total  # low fits (trivially), high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _part(jobs: Sequence[Job], blocks: Sequence[int], begin: int, stop: int, step_number: int) -> SubStep:
    """Return a sub-step of the step's D blocks number `begin` to `stop`, counted over its jobs."""
    some: list[Job] = []
    members: list[int] = []
    first = 0
    for index, (job, count) in enumerate(zip(jobs, blocks, strict=True)):
        a, b = max(begin - first, 0), min(stop - first, count)
        first += count
        if a >= b:
            continue
        if b - a < count:
            size = job.d.block_size
            base = job.lo // size
            lo, hi = max(job.lo, (base + a) * size), min(job.hi, (base + b) * size)
            job = Job(job.d, job.first, lo, hi, job.p_blocks, job.d_blocks, job.instance)  # noqa: PLW2901
        some.append(job)
        members.append(index)
    return SubStep(some, members, step_number)
