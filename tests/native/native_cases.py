# SPDX-License-Identifier: Apache-2.0
"""Case files for the native runners (case.h): rows, tensors, and the expected bytes, computed in numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from unit.geometry.kit import CountedMemory, PlannedCluster, geometry

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, push_range
from vllm_ascend_pd.geometry.regroup import RegroupPlan, RegroupPlanner

GATHER, ASSEMBLE, SCATTER = 0, 1, 2
UNTOUCHED = 0xA5


class OpCase(NamedTuple):
    name: str
    kind: int
    views: Sequence[tuple[int, ...]]  # blocks, heads, tokens, cell, strides of block, head, token
    rows: np.ndarray
    before: list[np.ndarray]
    expected: list[np.ndarray]

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.name}.case"
        sizes = [len(tensor) for tensor in self.before]
        words = [0x45534143, self.kind, len(self.rows), len(self.views), len(sizes)]
        words += [word for view in self.views for word in view] + sizes
        with path.open("wb") as out:
            np.array(words, dtype=np.int64).tofile(out)
            self.rows.astype(np.int64).tofile(out)
            for tensor in (*self.before, *self.expected):
                tensor.tofile(out)
        return path


def _box(offset: int, heads: int, head: int, tokens: int, token: int, cell: int) -> np.ndarray:
    starts = offset + np.arange(heads)[:, None] * head + np.arange(tokens)[None, :] * token
    return starts[:, :, None] + np.arange(cell)


def cache_case(name: str, cache: CountedMemory, rows: np.ndarray, size: int, kind: int = GATHER) -> OpCase:
    """Return a case that gathers from `cache`, or scatters random bytes into it."""
    facts = cache.geometry
    tokens = [1 if region.opaque else facts.block_size for region in facts.regions]
    views = [
        (cache.blocks, len(cache.heads), count, r.cell_bytes, r.block_stride, r.head_stride, r.token_stride)
        for r, count in zip(facts.regions, tokens, strict=True)
    ]
    before = [memory.copy() for memory in cache.memory]
    if kind == GATHER:
        before.append(np.full(size, UNTOUCHED, dtype=np.uint8))
    else:
        before.append(np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8))
    expected = [tensor.copy() for tensor in before]
    for region, block, head, token, heads, count, offset, head_stride, token_stride in rows.tolist():
        r = facts.regions[region]
        start = block * r.block_stride + head * r.head_stride + token * r.token_stride
        cells = _box(start, heads, r.head_stride, count, r.token_stride, r.cell_bytes)
        buffer_cells = _box(offset, heads, head_stride, count, token_stride, r.cell_bytes)
        if kind == GATHER:
            expected[-1][buffer_cells] = before[region][cells]
        else:
            expected[region][cells] = before[-1][buffer_cells]
    return OpCase(name, kind, views, rows, before, expected)


def assemble_case(name: str, received: np.ndarray, rows: np.ndarray, size: int) -> OpCase:
    before = [received, np.full(size, UNTOUCHED, dtype=np.uint8)]
    expected = [tensor.copy() for tensor in before]
    for cell, heads, tokens, source, head_a, token_a, target, head_b, token_b in rows.tolist():
        expected[1][_box(target, heads, head_b, tokens, token_b, cell)] = received[
            _box(source, heads, head_a, tokens, token_a, cell)
        ]
    return OpCase(name, ASSEMBLE, [], rows, before, expected)


def plans_of(cluster: PlannedCluster, step_number: int = 0) -> list[RegroupPlan]:
    """Return the plans of all prompts in one step."""
    jobs = []
    for request in cluster.requests:
        d = cluster.ds[request.instance]
        cluster.compute(request, request.end)
        lo, hi = push_range(request.first, request.end, 0, request.end, d.block_size)
        jobs.append(Job(d, request.first, lo, hi, request.p_blocks, request.d_blocks, request.instance))
    return [RegroupPlanner(cluster.p, rank).plan(jobs, step_number) for rank in range(cluster.p.tp_size)]


def regroup_cases(name: str, cluster: PlannedCluster, ranks: Sequence[int]) -> Iterator[OpCase]:
    """Yield the cases of `ranks` in one step of the real regroup plan."""
    noise = np.random.default_rng(3)
    plans = plans_of(cluster)
    for rank in ranks:
        plan, cache = plans[rank], cluster.ranks[rank]
        if len(plan.send):
            size = sum(plan.send_splits)
            yield cache_case(f"{name}-rank{rank}-send", cache, plan.send, size)
            yield cache_case(f"{name}-rank{rank}-scatter", cache, plan.send, size, SCATTER)
        received = noise.integers(0, 256, sum(plan.receive_splits), dtype=np.uint8)
        for index, slot in enumerate(plan.slots[:2]):
            if len(slot.own_rows):
                yield cache_case(f"{name}-rank{rank}-own{index}", cache, slot.own_rows, slot.nbytes)
            if len(slot.received):
                yield assemble_case(f"{name}-rank{rank}-slot{index}", received, slot.received, slot.nbytes)


RATIOS = [(8, 2, 1), (8, 4, 1), (8, 4, 2), (8, 8, 2), (6, 3, 2), (6, 6, 4), (2, 8, 1), (8, 4, 8), (1, 4, 2)]
# Bytes of one token and head, by component. States are missing: they are never exchanged (geometry/pairing.py).
CELLS = {
    "apart": (256, 256),
    "packed": (512,),
    "mla": (1024, 128),
    "odd": (72, 40),
    "scales": (576, 128, 4, 8),  # latent and index key in int8, scales of 4 and 8 bytes
}


def pair(kind: str, heads: int, p_tp: int, d_tp: int, cells: tuple[int, ...], tokens: int = 700) -> PlannedCluster:
    """Return a cluster with two D's of different TP, cached prefixes, and partial last blocks.

    `kind` is the layout; "head>token" names P's and D's.
    """
    p_kind, _, d_kind = kind.partition(">")

    def side(layout: str, tp: int, pad: int) -> CacheGeometry:
        return geometry(layout, heads=heads, tp=tp, block=32, cells=cells, pad=pad)

    prompts = [(0, 0, tokens), (1, 32, 109), (0, 64, 65 + tokens // 3), (1, 0, 1)]
    ds = [side(d_kind or p_kind, d_tp, 32), side(d_kind or p_kind, p_tp, 0)]
    return PlannedCluster(side(p_kind, p_tp, 0), ds, prompts, seed=4)
