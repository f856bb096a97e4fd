# SPDX-License-Identifier: Apache-2.0
"""Tails of D's last blocks, behind a prompt's last token: they are cleared, of every kind, and no other byte is.

The reference goes through the last block cell by cell, by the addresses that the layout says and the tokens that the
rank holds. All memory is NaN before.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from unit.device.caches import TokenMajorDevice
from vllm_ascend_pd.device.caches import Caches, CacheShape, LayerShape, describe
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.device.tails import BlockTails
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group
from vllm_ascend_pd.geometry.states import MAMBA2, Recurrent
from vllm_ascend_pd.metadata import Bind
from vllm_ascend_pd.protocol.identity import TransferId

BLOCKS, SIZE = 12, 8
GQA = CacheShape(SIZE, 2, 4, 6, tp_size=2)
MLA = CacheShape(SIZE, 1, 1, 6, tp_size=1)
Tensors = dict[str, Any]
BF16, INT8, FP16, FP8 = torch.bfloat16, torch.int8, torch.float16, torch.float8_e4m3fn


def rows(*dims: int, dtype: torch.dtype = BF16, blocks: int = BLOCKS, size: int = SIZE) -> torch.Tensor:
    return torch.empty(blocks, size, *dims, dtype=dtype)


def in_one_storage(sizes: dict[str, int]) -> Tensors:
    """Layers at one address, each with so many tokens in a block."""
    page = max(sizes.values()) * 6
    pages = torch.empty(BLOCKS * page, dtype=BF16)
    return {name: pages.as_strided((BLOCKS, size, 1, 6), (page, 6, 6, 1)) for name, size in sizes.items()}


def beside_states() -> tuple[Tensors, CacheShape]:
    """A state's page, and attention over the same bytes."""
    recurrent = Recurrent(MAMBA2, ((3, 20), (2, 4, 6)), ("bfloat16", "float32"), (2, 4), dim_first=False, groups=1)
    page = max(sum(recurrent.nbytes), SIZE * 12)
    pages = torch.empty(BLOCKS, page, dtype=INT8)
    keys = pages.view(BF16)[:, : SIZE * 6].unflatten(1, (SIZE, 1, 6))
    states = pages[:, : sum(recurrent.nbytes)].unflatten(1, (1, 1, sum(recurrent.nbytes)))
    shape = replace(
        MLA, groups=(Group(SIZE), Group(SIZE, "state")), group_of={"l.0": 0, "l.1": 1}, states={"l.1": recurrent}
    )
    return {"l.0": keys, "l.1": states}, shape


def dealt(dcp: int, pcp: int, interleave: int) -> CacheShape:
    return replace(MLA, tp_size=dcp, dcp=dcp, pcp=pcp, interleave=interleave)


def grouped(*groups: Group) -> CacheShape:
    return replace(MLA, groups=groups, group_of={f"l.{index}": index for index in range(len(groups))})


C8 = (rows(1, 12), rows(1, 6), rows(1, 6, dtype=INT8), rows(1, 1, dtype=FP16))
KEYS = (rows(1, 12), rows(1, 6), rows(1, 6, blocks=4 * BLOCKS))
SIZES = {
    "l.0": 8,
    "l.1": 24,
    "l.2": 12,
    "l.3": 4,
}  # a window, latents, entries for 2 tokens, a window in shorter blocks
KINDS: dict[str, tuple[Tensors, CacheShape, int]] = {
    "tuples of K and V": ({"l.0": (rows(2, 6), rows(2, 6))}, GQA, 1),
    "K and V stacked": ({"l.0": torch.empty(2, BLOCKS, SIZE, 2, 6)}, GQA, 0),
    "heads first": ({"l.0": torch.empty(BLOCKS, 2, SIZE, 6)}, GQA, 0),
    "heads first, seen tokens first": ({"l.0": torch.empty(BLOCKS, 2, SIZE, 6).permute(0, 2, 1, 3)}, GQA, 0),
    "as many heads as tokens": ({"l.0": rows(8, 6)}, CacheShape(SIZE, 8, 8, 6, tp_size=1), 0),
    "fp8": ({"l.0": rows(2, 6, dtype=FP8)}, replace(GQA, dtype_names={"l.0": "fp8"}), 0),
    "latents of three axes": ({"l.0": rows(6)}, MLA, 0),
    "latent and rope": ({"l.0": (rows(1, 12), rows(1, 6))}, MLA, 0),
    "an indexer in int8 with scales": ({"l.0.attn": C8}, replace(MLA, indexes={"l.0.attn": 2}), 0),
    "a draft model of other heads": (
        {"l.0": rows(1, 6), "l.1": rows(2, 6)},
        replace(MLA, other_shapes={"l.1": LayerShape(2, 2, 6)}, drafter="a draft model", drafts=frozenset({"l.1"})),
        0,
    ),
    "blocks that are one token": ({"l.0": rows(1, 6, size=1)}, replace(MLA, block_size=1), 0),
    "ranks that divide the tokens": ({"l.0": rows(1, 6)}, dealt(4, 1, 1), 2),
    "ranks that divide them in runs, the last rank": ({"l.0": rows(1, 6)}, dealt(2, 2, 4), 3),
    "ranks that divide latents and have all keys": (
        {"l.0.attn": KEYS},
        replace(dealt(4, 1, 8), indexes={"l.0.attn": 1}),
        1,
    ),
    "groups of unequal blocks at one address": (
        in_one_storage(SIZES),
        grouped(Group(8, "window", 20), Group(24), Group(12, "compressed", 2), Group(4, "window", 5)),
        0,
    ),
    "attention over states": (*beside_states(), 0),
    "kernels' blocks, four for one of vLLM's": (
        {"l.0": rows(2, 6, size=SIZE // 4, blocks=4 * BLOCKS)},
        replace(GQA, groups=(Group(SIZE),), group_of={"l.0": 0}),
        0,
    ),
    "K and V that take turns, three blocks for one of vLLM's": (
        {"l.0": torch.empty(3 * BLOCKS, 2, SIZE, 2, 6, dtype=BF16).unbind(1)},
        replace(GQA, groups=(Group(3 * SIZE),), group_of={"l.0": 0}),
        0,
    ),
}


def bytes_of(caches: Caches) -> dict[int, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Storages by their addresses."""
    device = CpuDevice()
    return {address: np.frombuffer(device.view(address, length), np.uint8) for address, length in caches.storages}


def behind(kind: CacheGeometry, rank: int, end: int) -> Iterator[int]:
    """Return a rank's places in the last block that are behind token (or entry) `end`."""
    begin, part = end // kind.covers * kind.covers, rank // kind.tp_size * kind.dcp + rank % kind.tp_size % kind.dcp
    world, run = kind.dcp * kind.pcp, kind.interleave
    rank_tokens = [token for token in range(begin, begin + kind.covers) if world == 1 or token // run % world == part]
    return (place for place, token in enumerate(rank_tokens) if token >= end)


def bind_of(caches: Caches, first: int, end: int) -> Bind:
    """Bind a prompt's tokens to blocks that no two groups share."""
    free, tables = list(range(BLOCKS)), []
    random.Random(end).shuffle(free)
    for group, count in zip(caches.geometry.tables, caches.kernel_blocks, strict=True):
        wanted = group.blocks(first, end)
        ids = [
            block * count + part
            for block in (free.pop() for _ in range(0, len(wanted), count))
            for part in range(count)
        ]
        tables.append(np.array(ids[: len(wanted)], np.int32))
    return Bind("r", TransferId("d", 1, "a uuid"), first, end, tuple(tables), 1.0, caches.kernel_blocks)


@pytest.mark.parametrize("end", [1, 7, 8, 9, 20, 23, 24, 25, 31])
@pytest.mark.parametrize(("tensors", "shape", "rank"), KINDS.values(), ids=list(KINDS))
def test_what_is_behind_the_last_token_is_cleared_and_nothing_else(
    tensors: Tensors, shape: CacheShape, rank: int, end: int
) -> None:
    device = TokenMajorDevice()
    caches = describe(tensors, shape, device)
    geometry, memory = caches.geometry, bytes_of(caches)
    covers = [group.covers * count for group, count in zip(geometry.tables, caches.kernel_blocks, strict=True)]
    end = min(end, BLOCKS * min(covers))
    first = max(covers) if end > max(covers) else 0
    for stored in memory.values():
        stored[:] = 0xFF
    expected = {address: stored.copy() for address, stored in memory.items()}
    bind = bind_of(caches, first, end)
    BlockTails(caches, rank).clear(bind)
    for kind, bases in zip(geometry.by_layer, caches.bases, strict=True):
        _, stop = kind.wanted_entries(first, end)
        if kind.group.stateful or not len(bind.blocks[kind.group_index]):
            continue
        last, count = int(bind.blocks[kind.group_index][-1]), caches.kernel_blocks[kind.group_index]
        cleared = [(last, place) for place in behind(kind, rank, stop) if stop % kind.covers]
        unused = range(last + 1, (last // count + 1) * count)  # in the same block of vLLM's
        cleared += [(block, place) for block in unused for place in range(kind.block_size)]
        for region, base in zip(kind.regions, bases, strict=True):
            begin = max(address for address in memory if address <= base)
            for head in range(len(kind.head_range(rank))):
                for block, place in cleared:
                    at = base + block * region.block_stride - begin
                    at += head * region.head_stride + place * region.token_stride
                    expected[begin][at : at + region.cell_bytes] = 0
    for address, stored in memory.items():
        assert (stored == expected[address]).all(), np.flatnonzero(stored != expected[address])[:8].tolist()


def test_planes_without_an_order_of_tokens_are_left_to_p() -> None:
    tensor = torch.full((BLOCKS, 2, 32, 12), torch.nan)
    caches = describe({"l.0": tensor}, replace(GQA, block_size=32), CpuDevice())
    BlockTails(caches, 0).clear(bind_of(caches, 0, 40))
    assert caches.geometry.opaque and tensor.isnan().all()


def test_a_load_costs_little_more_than_what_clears() -> None:
    """The engine's thread waits for it, once for each load of a step: what is alike in all layers is found once."""
    caches = describe({f"l.{layer}": (rows(2, 6), rows(2, 6)) for layer in range(32)}, GQA, TokenMajorDevice())
    tails, bind = BlockTails(caches, 0), bind_of(caches, 0, 20)
    views = [part[0, 4:] for parts in caches.tensors for part in parts]
    assert least(lambda: tails.clear(bind)) < 10 * least(lambda: [view.zero_() for view in views])


def least(work: Callable[[], object]) -> float:
    """Return the least seconds of this thread's processor time."""
    seconds = []
    for _ in range(50):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return min(seconds)
