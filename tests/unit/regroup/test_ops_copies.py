# SPDX-License-Identifier: Apache-2.0
"""The ops made of copies, which an NPU runs by default, against the ops themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unit.geometry.kit import CountedMemory, PlannedCluster, geometry
from unit.regroup.memory_views import views
from vllm_ascend_pd.geometry.plan import Job, push_range
from vllm_ascend_pd.geometry.regroup import RegroupPlan, RegroupPlanner
from vllm_ascend_pd.regroup import ops
from vllm_ascend_pd.regroup.copies import AssembleCopies, GatherCopies, _can_be_paged, joined


class Pages:
    """Stand-in for torch_npu's npu_gather_pa_kv_cache with one sequence; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        table: torch.Tensor,
        length: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        self.calls += 1
        for cache, out in ((key_cache, keys), (value_cache, values)):
            out.copy_(cache[table[0].long()].flatten(0, 1)[: int(length[0])])


def view_numbers(tensors: list[torch.Tensor]) -> list[tuple[int, ...]]:
    return [
        (*t.shape[:3], t.shape[3] * t.element_size(), *(s * t.element_size() for s in t.stride()[:3])) for t in tensors
    ]


def plans(cluster: PlannedCluster) -> list[RegroupPlan]:
    jobs = []
    for request in cluster.requests:
        d = cluster.ds[request.instance]
        cluster.compute(request, request.end)
        lo, hi = push_range(request.first, request.end, 0, request.end, d.block_size)
        jobs.append(Job(d, request.first, lo, hi, request.p_blocks, request.d_blocks, request.instance))
    return [RegroupPlanner(cluster.p, rank).plan(jobs) for rank in range(cluster.p.tp_size)]


def same_gather(cache: CountedMemory, rows: np.ndarray, size: int, pages: Pages | None) -> None:
    tensors = [view.view(torch.int8) for view in views(cache)]
    wanted, got = torch.full((size,), 9, dtype=torch.uint8), torch.full((size,), 9, dtype=torch.uint8)
    ops.gather(tensors, torch.from_numpy(rows), wanted)
    GatherCopies(rows, view_numbers(tensors), tensors, pages)(tensors, got)
    assert torch.equal(got, wanted)


def same_assemble(rows: np.ndarray, received: torch.Tensor, size: int) -> None:
    wanted, got = torch.full((size,), 9, dtype=torch.uint8), torch.full((size,), 9, dtype=torch.uint8)
    ops.assemble(received, torch.from_numpy(rows), wanted)
    AssembleCopies(rows)(received, got)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("p_kind", "d_kind"), [("token", "token"), ("head", "head"), ("token", "head"), ("opaque", "opaque")]
)
@pytest.mark.parametrize("cells", [(256, 256), (512,), (1024, 128), (72, 40), (64, 64, 32)], ids=str)
def test_copies_do_what_the_ops_do(p_kind: str, d_kind: str, cells: tuple[int, ...], paged: bool) -> None:
    pages = Pages() if paged else None
    for heads, p_tp, d_tp in [(8, 4, 2), (6, 3, 2), (8, 4, 8), (8, 8, 1)]:
        p = geometry(p_kind, heads=heads, tp=p_tp, block=16, cells=cells)
        d = geometry(d_kind, heads=heads, tp=d_tp, block=16, cells=cells, pad=32)
        cluster = PlannedCluster(p, [d], [(0, 0, 150), (0, 16, 77)], seed=3)
        for plan in plans(cluster)[:2]:
            cache = cluster.ranks[plan.rank]
            same_gather(cache, plan.send, sum(plan.send_splits), pages)
            received = torch.randint(0, 256, (sum(plan.receive_splits),), dtype=torch.uint8)
            for slot in plan.slots:
                same_gather(cache, slot.own_rows, slot.nbytes, pages)
                same_assemble(slot.received, received, slot.nbytes)
    if pages is not None and p_kind == "token" and len(cells) > 1:
        assert pages.calls
    if pages is not None and (p_kind == "opaque" or len(cells) == 1):
        assert not pages.calls


@settings(max_examples=150)
@given(st.data())
def test_boxes_of_any_place_and_width_are_copied(data: st.DataObject) -> None:
    """Elements are as wide as all offsets and sizes allow, down to single bytes."""
    rows, source, target = [], 0, 0
    for _ in range(data.draw(st.integers(1, 5))):
        cell, heads, tokens = (data.draw(st.integers(1, limit)) for limit in (40, 4, 6))
        source, target = source + data.draw(st.integers(0, 9)), target + data.draw(st.integers(0, 9))
        orders = [data.draw(st.sampled_from([(cell, heads * cell), (tokens * cell, cell)])) for _ in range(2)]
        rows.append((cell, heads, tokens, source, *orders[0], target, *orders[1]))
        source, target = source + cell * heads * tokens, target + cell * heads * tokens
    received = torch.randint(0, 256, (source,), dtype=torch.uint8)
    same_assemble(np.array(rows, dtype=np.int64), received, target + 3)


def test_what_a_rank_sends_of_a_long_prompt_is_a_handful_of_copies() -> None:
    """Llama-70B 8 -> 2, 4,096 tokens on scattered blocks: three owners, K and V."""
    p, d = (geometry("token", heads=8, tp=tp, block=128, cells=(256, 256)) for tp in (8, 2))
    cluster = PlannedCluster(p, [d], [(0, 0, 4096)], seed=4)
    plan, pages = plans(cluster)[1], Pages()
    tensors = [view.view(torch.int8) for view in views(cluster.ranks[1])]
    gather = GatherCopies(plan.send, view_numbers(tensors), tensors, pages)
    assert len(plan.send) > 40
    assert len(gather._direct) == 0
    assert len(gather._from_pages) == 3 * 2
    same_gather(cluster.ranks[1], plan.send, sum(plan.send_splits), pages)
    assert pages.calls == 1
    for slot in plan.slots:
        assert len(AssembleCopies(slot.received)._boxes) == 3  # three sources; V continues K, on both sides


def test_of_one_head_it_does_not_matter_where_the_next_would_be() -> None:
    caches = [torch.zeros(1, dtype=torch.int8)] * 2
    one, two = (4, 1, 16, 64, 1024, 999, 64), (4, 2, 16, 64, 2048, 999, 128)
    assert _can_be_paged([one] * 2, caches) and not _can_be_paged([two] * 2, caches)


def test_boxes_are_joined_only_where_both_sides_go_on() -> None:
    box = [0, 8, 1, 4, 0, 8, 8, 0, 8, 8]
    follows = [0, 8, 1, 4, 32, 8, 8, 32, 8, 8]
    elsewhere = [0, 8, 1, 4, 64, 8, 8, 72, 8, 8]
    other_base = [1, 8, 1, 4, 96, 8, 8, 104, 8, 8]
    boxes = joined(np.array([box, follows, elsewhere, other_base], dtype=np.int64))
    assert boxes[:, 3].tolist() == [8, 4, 4]
    assert boxes[:, 7].tolist() == [0, 72, 104]
