# SPDX-License-Identifier: Apache-2.0
"""Blocks of vLLM's that are several of the kernels', from the schedulers' tables to every byte of D's memory.

As vllm-ascend has attention beside states: K and V of one kernel's block, then of the next. P and D have other numbers
of these in a block of vLLM's, or one alone.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from unit.device.caches import TokenMajorDevice
from unit.kits.loads import book_with
from unit.protocol.kit import D_INCARNATION
from vllm_ascend_pd.device.caches import CacheBytes, CacheShape, describe
from vllm_ascend_pd.device.tails import BlockTails
from vllm_ascend_pd.engine import WorkerFacts, merge_geometries
from vllm_ascend_pd.geometry.layout import STATE, CacheGeometry, Group, in_kernel_blocks
from vllm_ascend_pd.geometry.pairing import pairings
from vllm_ascend_pd.geometry.plan import Job, StepPlanner
from vllm_ascend_pd.metadata import Bind
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.vllm_patches import older_groups

HEADS, DIM, POOL, NAME = 4, 3, 12, "l.3.attn"
SIZES = {
    "four": (8, 4),
    "three": (8, 3),
    "one": (16, 1),
}  # tokens of a kernel's block, and such blocks in one of vLLM's


def number(token: int, head: int, part: int) -> torch.Tensor:
    return torch.arange(DIM) + 4.0 * (part + 2 * (head + HEADS * (token + 1)))


class TurnsMemory:
    """One rank's memory, in which K and V take turns."""

    def __init__(self, sizes: tuple[int, int], tp: int, rank: int) -> None:
        (self.tokens, self.count), self.rank, self.local = sizes, rank, HEADS // tp
        self.raw = torch.full((POOL * self.count, 2, self.tokens, self.local, DIM), torch.nan)
        groups = (Group(self.tokens * self.count),)
        shape = CacheShape(groups[0].block_size, self.local, HEADS, DIM, tp, groups=groups, group_of={NAME: 0})
        self.caches = describe({NAME: self.raw.unbind(1)}, shape, TokenMajorDevice())

    def fill(self, table: list[int], first: int, end: int) -> None:
        for token in range(first, end):
            block, place = divmod(token, self.tokens * self.count)
            at, place = table[block] * self.count + place // self.tokens, place % self.tokens
            for head in range(self.local):
                for part in range(2):
                    self.raw[at, part, place, head] = number(token, head + self.rank * self.local, part)

    def bytes(self, region: int) -> Any:
        return CacheBytes(self.caches, TokenMajorDevice()).region(0, region)


def whole(sides: list[TurnsMemory]) -> CacheGeometry:
    return merge_geometries({(0, side.rank): WorkerFacts(None, side.caches.geometry) for side in sides})


def table_of(tokens: int, size: int, seed: int) -> list[int]:
    free = list(range(1, POOL))
    random.Random(seed).shuffle(free)
    return free[: -(-tokens // size)]


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (4, 2)], ids=lambda tps: f"{tps[0]}→{tps[1]}")
@pytest.mark.parametrize(("ours", "theirs"), [("four", "three"), ("three", "four"), ("four", "one"), ("one", "three")])
@pytest.mark.parametrize(("first", "end"), [(0, 5), (0, 8), (0, 24), (0, 33), (0, 96), (96, 100)])
def test_tokens_arrive_and_the_rest_of_vllms_last_block_is_empty(
    tps: tuple[int, int], ours: str, theirs: str, first: int, end: int
) -> None:
    p = [TurnsMemory(SIZES[ours], tps[0], rank) for rank in range(tps[0])]
    d, wanted = ([TurnsMemory(SIZES[theirs], tps[1], rank) for rank in range(tps[1])] for _ in range(2))
    size = d[0].tokens * d[0].count
    p_table, d_table = table_of(end, p[0].tokens * p[0].count, 3), table_of(end, size, 5)
    for side in p:
        side.fill(p_table, 0, end)
    book = book_with("r", incarnation=D_INCARNATION)
    assert book.wanted("r", end, first) == end - first
    groups, counts = whole(d).tables, d[0].caches.kernel_blocks
    bind = book.reserve("r", end - first, [d_table], groups, 30.0, "u", counts)
    assert sorted(bind.taken()) == sorted(d_table[first // size :])
    for side in d:
        BlockTails(side.caches, side.rank).clear(bind)
    ids = in_kernel_blocks([p_table], p[0].caches.kernel_blocks)[0]
    (pair,) = pairings(whole(p), whole(d))
    job = Job(pair.d, first, first, end, np.array(ids, np.int32), bind.blocks[0])
    for source in p:
        (plan,) = StepPlanner(pair.p, source.rank).plan([job], 1)
        for d_rank, spans in plan.by_rank.items():
            for region, some in enumerate(spans):
                for src, dst, length in zip(some.src, some.dst, some.size, strict=True):
                    d[d_rank].bytes(region)[dst : dst + length] = source.bytes(region)[src : src + length]
    for got, reference in zip(d, wanted, strict=True):
        for block in range(end // size * got.count, -(-end // size) * got.count):
            reference.raw[d_table[block // got.count] * got.count + block % got.count] = 0
        reference.fill(d_table, first, end)
        assert torch.equal(got.raw.nan_to_num(-1), reference.raw.nan_to_num(-1))


def test_each_group_has_its_own_number_and_what_is_alike_stays_as_it_is() -> None:
    tables = [[3, 1], [7]]
    assert in_kernel_blocks(tables, (2, 1)) == [[6, 7, 2, 3], [7]]
    assert in_kernel_blocks(tables, (1, 1)) is in_kernel_blocks(tables, ()) is tables


def test_vllms_blocks_of_a_load_are_counted_and_not_cleared() -> None:
    """vLLM before 0.30 clears new blocks by its own numbers."""
    groups = (Group(8), Group(4096, STATE))
    book = book_with("r", incarnation=D_INCARNATION)
    book.wanted("r", 41, 0, recomputes_last=True)
    bind = book.reserve("r", 40, [[2, 5], [9]], groups, 30.0, "u", (4, 1))
    assert [ids.tolist() for ids in bind.blocks] == [[8, 9, 10, 11, 20], [9]]
    output = SimpleNamespace(new_block_ids_to_zero=[2, 5, 6, 8, 9, 20])
    older_groups.keep_loads(output, SimpleNamespace(decode=SimpleNamespace(binds=(bind,))))
    assert output.new_block_ids_to_zero == [6, 8, 20]
    book.request_finished("r")
    assert book.fencing_blocks() == 3


def test_a_load_that_ends_with_a_kernels_block_leaves_those_behind_it_empty() -> None:
    memory = TurnsMemory(SIZES["four"], 1, 0)
    blocks = (np.array([8, 9], np.int32),)
    BlockTails(memory.caches, 0).clear(Bind("r", TransferId("d", 1, "a uuid"), 0, 16, blocks, 1.0, (4,)))
    empty = {int(block) for block in range(4 * POOL) if not memory.raw[block].isnan().any()}
    assert empty == {10, 11}
