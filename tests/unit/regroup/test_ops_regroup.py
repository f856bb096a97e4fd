# SPDX-License-Identifier: Apache-2.0
"""The ops driven by the real regroup plan: caches of P → gather → exchange → assemble → caches of D, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unit.geometry.kit import CountedMemory, PlannedCluster, geometry
from unit.regroup.memory_views import views
from vllm_ascend_pd.geometry.plan import Job, push_range
from vllm_ascend_pd.geometry.regroup import RegroupPlan, RegroupPlanner
from vllm_ascend_pd.regroup import ops


def gathered(cache: CountedMemory, rows: np.ndarray, out: torch.Tensor) -> None:
    if len(rows):
        ops.gather(views(cache), torch.from_numpy(rows), out)


def exchange(cluster: PlannedCluster, plans: list[RegroupPlan]) -> None:
    outgoing = []
    for plan in plans:
        send = torch.zeros(sum(plan.send_splits), dtype=torch.uint8)
        gathered(cluster.ranks[plan.rank], plan.send, send)
        outgoing.append(send.split(plan.send_splits))
    for plan in plans:
        received = torch.cat([splits[plan.rank] for splits in outgoing])
        for slot in plan.slots:
            staged = torch.zeros(slot.nbytes, dtype=torch.uint8)
            gathered(cluster.ranks[plan.rank], slot.own_rows, staged)
            ops.assemble(received, torch.from_numpy(slot.received), staged)
            for regions in slot.writes.values():
                for region, spans in enumerate(regions):
                    for span in zip(spans.src.tolist(), spans.dst.tolist(), spans.size.tolist(), strict=True):
                        cluster.write(slot.instance, slot.d_rank, region, staged.numpy(), *span)


def run(cluster: PlannedCluster, steps: list[list[int]]) -> None:
    planners = [RegroupPlanner(cluster.p, rank) for rank in range(cluster.p.tp_size)]
    for number, advances in enumerate([*steps, [10**6] * len(cluster.requests)]):
        jobs = []
        for request, advance in zip(cluster.requests, advances, strict=True):
            d = cluster.ds[request.instance]
            before, after = request.done, min(request.end, request.done + advance)
            cluster.compute(request, after)
            lo, hi = push_range(request.first, request.end, before, after, d.block_size)
            jobs.append(Job(d, request.first, lo, hi, request.p_blocks, request.d_blocks, request.instance))
        exchange(cluster, [planner.plan(jobs, number) for planner in planners])
    cluster.check()


# Bytes of one token and head, by component. States are missing: they are never exchanged, because a head's state lies
# together on both sides (geometry/pairing.py).
CELLS = {
    "K and V apart": (256, 256),
    "K and V packed": (512,),
    "odd cells": (72, 40),
    "int8, scales in float32": (128, 128, 4, 4),
    "latent and index key in int8, scales of 8 bytes": (576, 128, 8),
}


@pytest.mark.parametrize("cells", CELLS.values(), ids=CELLS.keys())
@pytest.mark.parametrize("kind", ["token", "head", "opaque"])
@pytest.mark.parametrize(
    ("heads", "p_tp", "d_tp"),
    [(8, 2, 1), (8, 4, 1), (8, 4, 2), (8, 8, 2), (6, 3, 2), (6, 6, 4), (2, 8, 1), (8, 4, 8), (1, 4, 2)],
    ids=str,
)
def test_every_ratio_arrives_byte_for_byte(heads: int, p_tp: int, d_tp: int, kind: str, cells: tuple[int, ...]) -> None:
    """Two D's of different TP in one step, partial last chunks, ranks with nothing to send, chunked prompts."""
    cells = tuple(cell * 4 if kind == "opaque" else cell for cell in cells)
    p = geometry(kind, heads=heads, tp=p_tp, block=16, cells=cells)
    d = geometry(kind, heads=heads, tp=d_tp, block=16, cells=cells, pad=32)
    same = geometry(kind, heads=heads, tp=p_tp, block=16, cells=cells)
    prompts = [(0, 0, 50), (1, 16, 39), (0, 32, 100), (1, 0, 1)]
    run(PlannedCluster(p, [d, same], prompts, seed=4), [[17, 39, 20, 0], [3, 0, 40, 1]])


@pytest.mark.parametrize(("p_kind", "d_kind"), [("token", "head"), ("head", "token")])
@pytest.mark.parametrize(("p_block", "d_block"), [(16, 32), (32, 16), (24, 16)])
def test_layouts_and_block_sizes_may_differ(p_kind: str, d_kind: str, p_block: int, d_block: int) -> None:
    p = geometry(p_kind, heads=8, tp=4, block=p_block, cells=(128, 64))
    d = geometry(d_kind, heads=8, tp=2, block=d_block, cells=(128, 64))
    run(PlannedCluster(p, [d], [(0, 0, 100), (0, 7, 65)], seed=2), [[33, 20]])


def test_mla_latent_and_rope_apart() -> None:
    p, d = (geometry("token", heads=1, tp=tp, block=16, cells=(1024, 128)) for tp in (4, 2))
    run(PlannedCluster(p, [d], [(0, 0, 77), (0, 16, 40)], seed=1), [[30, 5]])
