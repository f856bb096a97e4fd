# SPDX-License-Identifier: Apache-2.0
"""Plans executed as memory copies, exchange included, and clusters drawn at random to plan for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from unit.geometry.kit import PlannedCluster, covers, geometry
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, JobPlan, push_range
from vllm_ascend_pd.geometry.regroup import RegroupPlan, Slot

Parts = tuple[int, int, int, int]

# TP, DCP, PCP and interleave of P and of D
PARTS: list[tuple[Parts, Parts]] = [
    ((1, 1, 1, 1), (1, 1, 1, 1)),
    ((8, 8, 1, 8), (2, 2, 1, 8)),
    ((1, 1, 1, 1), (4, 4, 1, 4)),
    ((4, 4, 1, 1), (4, 2, 1, 2)),
    ((2, 1, 2, 8), (4, 2, 1, 8)),
    ((4, 2, 2, 2), (8, 4, 1, 1)),
    ((2, 2, 3, 4), (4, 4, 1, 8)),
    ((8, 2, 1, 8), (1, 1, 1, 1)),
    ((4, 1, 2, 8), (4, 1, 1, 1)),
]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[PlannedCluster, list[list[int]]]:
    heads = draw(st.sampled_from([1, 1, 2, 3, 4, 6, 8]))
    cells = draw(st.sampled_from([(4,), (2, 2), (5, 1)]))
    opaque = draw(st.sampled_from([False, False, True]))
    block = draw(st.sampled_from([2, 4, 6, 8]))

    def side() -> CacheGeometry:
        kind = "opaque" if opaque else draw(st.sampled_from(["token", "head"]))
        size = block if opaque else draw(st.sampled_from([block, block, 2, 4, 6, 8, 16]))
        tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
        return geometry(kind, heads=heads, tp=tp, block=size, cells=cells, pad=draw(st.sampled_from([0, 0, 3])))

    p = side()
    ds = [side()]
    for _ in range(draw(st.integers(0, 2))):
        ds.append(ds[0] if draw(st.booleans()) else side())
    prompts = []
    for _ in range(draw(st.integers(1, 4))):
        instance = draw(st.integers(0, len(ds) - 1))
        end = draw(st.integers(1, 40))
        first = draw(st.integers(0, end - 1))
        if opaque:
            first -= first % block
        prompts.append((instance, first, end))
    steps = draw(st.lists(st.lists(st.integers(0, 20), min_size=len(prompts), max_size=len(prompts)), max_size=4))
    return PlannedCluster(p, ds, prompts, draw(st.integers(0, 2**20))), steps


def jobs_of(cluster: PlannedCluster, advances: list[int]) -> list[Job]:
    """Jobs of one step: request i computes `advances[i]` more tokens."""
    jobs = []
    for request, advance in zip(cluster.requests, advances, strict=True):
        d = cluster.ds[request.instance]
        before, after = request.done, min(request.end, request.done + advance)
        cluster.compute(request, after)
        lo, hi = push_range(request.first, request.end, before, after, covers(d))
        jobs.append(Job(d, request.first, lo, hi, request.p_blocks, request.d_blocks, request.instance))
    return jobs


def execute(cluster: PlannedCluster, rank: int, jobs: list[Job], plans: list[JobPlan]) -> None:
    for job, plan in zip(jobs, plans, strict=True):
        for d_rank, regions in plan.by_rank.items():
            for region, spans in enumerate(regions):
                source = cluster.ranks[rank].memory[region]
                for src, dst, size in zip(spans.src.tolist(), spans.dst.tolist(), spans.size.tolist(), strict=True):
                    cluster.write(job.instance, d_rank, region, source, src, dst, size)


def box(offset: int, heads: int, head: int, tokens: int, token: int, cell: int) -> np.ndarray:
    """Byte places of a box, (head, token, byte)."""
    starts = offset + np.arange(heads)[:, None] * head + np.arange(tokens)[None, :] * token
    return starts[:, :, None] + np.arange(cell)


def gather(cluster: PlannedCluster, rank: int, rows: np.ndarray, out: np.ndarray, filled: np.ndarray) -> None:
    """Execute the gather op with a table of cache rows."""
    cache = cluster.ranks[rank]
    for region, block, head, token, heads, tokens, offset, head_stride, token_stride in rows.tolist():
        shape = cache.geometry.regions[region]
        assert 0 <= block < cache.blocks
        assert 0 <= head < head + heads <= len(cache.heads)
        assert 0 <= token < token + tokens <= (1 if shape.opaque else cache.geometry.block_size)
        source = block * shape.block_stride + head * shape.head_stride + token * shape.token_stride
        sources = box(source, heads, shape.head_stride, tokens, shape.token_stride, shape.cell_bytes)
        target = box(offset, heads, head_stride, tokens, token_stride, shape.cell_bytes)
        out[target] = cache.memory[region][sources]
        np.add.at(filled, target, 1)


def assemble(received: np.ndarray, rows: np.ndarray, out: np.ndarray, filled: np.ndarray, used: np.ndarray) -> None:
    """Execute the assemble op with a table of buffer rows."""
    for cell, heads, tokens, source, source_head, source_token, target, target_head, target_token in rows.tolist():
        sources = box(source, heads, source_head, tokens, source_token, cell)
        image = box(target, heads, target_head, tokens, target_token, cell)
        out[image] = received[sources]
        np.add.at(used, sources, 1)
        np.add.at(filled, image, 1)


def staged(cluster: PlannedCluster, jobs: list[Job], plans: list[RegroupPlan]) -> Iterator[tuple[Slot, np.ndarray]]:
    """Run one step of all ranks: gather, all-to-all, assemble, write. Every buffer byte is used exactly once."""
    outgoing = []
    for plan in plans:
        buffer, filled = np.zeros(sum(plan.send_splits), np.uint8), np.zeros(sum(plan.send_splits), int)
        gather(cluster, plan.rank, plan.send, buffer, filled)
        assert (filled == 1).all()
        outgoing.append(np.split(buffer, np.cumsum(plan.send_splits)[:-1]))
    for plan in plans:
        received = np.concatenate([splits[plan.rank] for splits in outgoing])
        assert [len(splits[plan.rank]) for splits in outgoing] == plan.receive_splits
        used = np.zeros(len(received), int)
        for slot in plan.slots:
            memory, filled = np.zeros(slot.nbytes, np.uint8), np.zeros(slot.nbytes, int)
            gather(cluster, plan.rank, slot.own_rows, memory, filled)
            assemble(received, slot.received, memory, filled, used)
            assert (filled == 1).all()
            write(cluster, slot, jobs, memory)
            yield slot, memory
        assert (used == 1).all()


def write(cluster: PlannedCluster, slot: Slot, jobs: list[Job], memory: np.ndarray) -> None:
    written = np.zeros(slot.nbytes, int)
    for member, regions in slot.writes.items():
        assert jobs[member].instance == slot.instance
        for region, spans in enumerate(regions):
            for src, dst, size in zip(spans.src.tolist(), spans.dst.tolist(), spans.size.tolist(), strict=True):
                cluster.write(slot.instance, slot.d_rank, region, memory, src, dst, size)
                written[src : src + size] += 1
    assert (written == 1).all()


def exchange(cluster: PlannedCluster, jobs: list[Job], plans: list[RegroupPlan]) -> None:
    for _ in staged(cluster, jobs, plans):
        pass
