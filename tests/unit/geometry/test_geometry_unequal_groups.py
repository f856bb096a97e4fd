# SPDX-License-Identifier: Apache-2.0
"""Five groups of unequal block sizes over the same pages, as DeepSeek-V4 has them: every byte of D's memory.

Layers with a window keep many numbers of few tokens in a block, layers with a latent few numbers of many tokens, and an
indexer's layers lie between. Compressed layers have an entry for 4 tokens, or for 9. A page is as long as the largest
block; the others are padded. The reference is the cache as slicing would fill it, so that padding, other blocks, blocks
before a window and entries of tokens still to come must be as they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch

from unit.device.caches import TokenMajorDevice
from vllm_ascend_pd.device.caches import CacheBytes, CacheShape, LayerShape, describe
from vllm_ascend_pd.engine import WorkerFacts, merge_geometries
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group
from vllm_ascend_pd.geometry.match import mismatches
from vllm_ascend_pd.geometry.pairing import pairings
from vllm_ascend_pd.geometry.plan import Job, StepPlanner, push_range

POOL = 40  # pages


@dataclass(frozen=True)
class Sort:
    """Layers of one group: their heads in the whole model, the numbers of a head, and which tokens matter."""

    heads: int
    dim: int
    window: int = 0
    per_entry: int = 1

    def group(self, size: int) -> Group:
        matters = ("window", self.window) if self.window else ("compressed", self.per_entry)
        return Group(size, *matters) if max(self.window, self.per_entry) > 1 else Group(size)


SORTS = (Sort(4, 8, 20), Sort(1, 6), Sort(1, 10), Sort(1, 12, per_entry=4), Sort(1, 5, per_entry=9))
LAYERS = {f"l.{i}": i % 5 for i in range(10)}  # two layers of each group: l.0 to l.4 share an address
P_SIZES, D_SIZES = (16, 96, 32, 6, 2), (8, 64, 48, 4, 3)  # entries in a block of each group


def number(name: str, entry: int, head: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    sort = SORTS[LAYERS[name]]
    return np.arange(sort.dim, dtype=np.float32) + 16 * (head + 4 * (entry + 1024 * int(name[2:])))


class PagedMemory:
    """One rank's memory: a storage for each layer of a group, cut into pages."""

    def __init__(self, sizes: tuple[int, ...], tp: int, rank: int) -> None:
        self.sizes, self.rank = sizes, rank
        self.local = [max(1, sort.heads // tp) for sort in SORTS]
        self.first = [rank * sort.heads // tp if sort.heads > 1 else 0 for sort in SORTS]
        elements = [size * heads * sort.dim for size, heads, sort in zip(sizes, self.local, SORTS, strict=True)]
        page = max(elements) + 5
        self.storages = [torch.full((POOL * page,), -1.0) for _ in range(2)]
        self.made = {name: self._view(name, page) for name in LAYERS}
        groups = tuple(sort.group(size) for size, sort in zip(sizes, SORTS, strict=True))
        shapes = [LayerShape(local, sort.heads, sort.dim) for local, sort in zip(self.local, SORTS, strict=True)]
        first, *_ = shapes
        shape = CacheShape(
            sizes[0], first.local_heads, first.total_heads, first.head_size, tp,
            other_shapes={name: shapes[group] for name, group in LAYERS.items()}, groups=groups, group_of=LAYERS,
        )  # fmt: skip
        self.caches = describe(self.made, shape, TokenMajorDevice())

    def _view(self, name: str, page: int) -> torch.Tensor:
        group = LAYERS[name]
        size, heads, dim = self.sizes[group], self.local[group], SORTS[group].dim
        storage = self.storages[int(name[2:]) // len(SORTS)]
        return storage.as_strided((POOL, size, heads, dim), (page, heads * dim, dim, 1))

    def fill(self, tables: list[list[int]], first: list[int], end: int) -> PagedMemory:
        """Fill the blocks of one request: of each group the tokens from `first` on."""
        for name, group in LAYERS.items():
            per = SORTS[group].per_entry
            for entry in range(first[group] // per, end // per):
                block, at = tables[group][entry // self.sizes[group]], entry % self.sizes[group]
                for head in range(self.local[group]):
                    values = number(name, entry, head + self.first[group])
                    self.made[name][block, at, head] = torch.from_numpy(values)
        return self

    def bytes(self, layer: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return CacheBytes(self.caches, TokenMajorDevice()).region(layer, 0)


def whole(sides: list[PagedMemory]) -> CacheGeometry:
    return merge_geometries({(0, side.rank): WorkerFacts(None, side.caches.geometry) for side in sides})


def tables(sizes: tuple[int, ...], first: list[int], end: int, step: int) -> list[list[int]]:
    """Return block tables whose blocks are all of one pool, null (0) before `first`."""
    free = [1 + (step * i) % (POOL - 1) for i in range(POOL - 1)]
    return [
        [0 if (i + 1) * size <= begin else free.pop() for i in range(-(-(end // sort.per_entry) // size))]
        for size, begin, sort in zip(sizes, first, SORTS, strict=True)
    ]


def begins(geometry: CacheGeometry, end: int) -> list[int]:
    return [group.begins(0, end) for group in geometry.tables]


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (4, 2)], ids=lambda tps: f"{tps[0]}→{tps[1]}")
@pytest.mark.parametrize("chunk", [48, 1000])
@pytest.mark.parametrize("end", [3, 7, 63, 64, 145])
def test_each_group_arrives_in_its_own_blocks_and_nothing_else_changes(
    tps: tuple[int, int], chunk: int, end: int
) -> None:
    p, d, wanted = (
        [PagedMemory(sizes, tp, rank) for rank in range(tp)]
        for sizes, tp in ((P_SIZES, tps[0]), (D_SIZES, tps[1]), (D_SIZES, tps[1]))
    )
    ours, theirs = whole(p), whole(d)
    assert not mismatches(ours, theirs) and len({group.block_size for group in theirs.tables}) == 5
    of_p, of_d = begins(ours, end), begins(theirs, end)
    p_tables, d_tables = tables(P_SIZES, of_p, end, 7), tables(D_SIZES, of_d, end, 11)
    for side in p:
        side.fill(p_tables, of_p, end)
    moved = 0
    pairs = pairings(ours, theirs)
    assert {name for pair in pairs for name in pair.layers} == set(LAYERS)
    for step, before in enumerate(range(0, end, chunk)):
        for pair in pairs:
            (first, stop), size, per = pair.d.wanted_entries(0, end), pair.d.covers, pair.d.group.per_entry
            lo, hi = push_range(first, stop, before // per, min(before + chunk, end) // per, size)
            if lo == hi:
                continue
            p_table, d_table = p_tables[pair.p.group_index], d_tables[pair.d.group_index][first // size :]
            job = Job(pair.d, first, lo, hi, np.array(p_table, np.int32), np.array(d_table, np.int32))
            for source in p:
                (plan,) = StepPlanner(pair.p, source.rank).plan([job], step)
                for name in sorted(pair.layers):
                    here, there = ours.layers.index(name), theirs.layers.index(name)
                    for d_rank, (spans,) in plan.by_rank.items():
                        for src, dst, length in zip(spans.src, spans.dst, spans.size, strict=True):
                            d[d_rank].bytes(there)[dst : dst + length] = source.bytes(here)[src : src + length]
                            moved += int(length)
    for got, reference in zip(d, wanted, strict=True):
        reference.fill(d_tables, of_d, end)
        assert all(torch.equal(*both) for both in zip(got.storages, reference.storages, strict=True))
    cells = [
        (end // SORTS[group].per_entry - of_d[group] // SORTS[group].per_entry)
        * (wanted[0].local[group] * SORTS[group].dim)
        for group in LAYERS.values()
    ]
    assert moved == 4 * sum(cells) * tps[1], "each byte once"


def test_entries_of_other_numbers_of_tokens_are_refused() -> None:
    ours = whole([PagedMemory(P_SIZES, 1, 0)])
    others = [msgspec.structs.replace(group, n=5) if group.per_entry == 4 else group for group in ours.groups]
    differences = mismatches(ours, msgspec.structs.replace(ours, groups=tuple(others)))
    assert [str(one) for one in differences] == ["tokens that matter of l.3: prefill compressed 4, decode compressed 5"]


def test_a_block_of_p_that_is_no_multiple_of_d_s_is_refused_for_a_window() -> None:
    ours = whole([PagedMemory(P_SIZES, 1, 0)])
    differences = mismatches(ours, whole([PagedMemory((12, *D_SIZES[1:]), 1, 0)]))
    assert any("block_size of l.0" in str(one) for one in differences), differences
