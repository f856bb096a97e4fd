# SPDX-License-Identifier: Apache-2.0
"""Tails of D's last blocks, behind a prompt's last token. P does not write them, so D clears them.

vLLM does not clear blocks that a connector fills. What they hold from before may be another kind's bytes, because
kinds share memory. As numbers these can be NaN, and an attention kernel that gives them a weight of zero gets NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.metadata import Bind


class _Part(NamedTuple):
    """A tensor, and its facts with the tokens next to the blocks: to ask the tensor each time costs as much as a
    view of it.
    """

    tensor: torch.Tensor
    begin: int
    block: int  # strides
    token: int
    others: tuple[int, ...]
    sizes: tuple[int, ...]  # of the other axes

    @classmethod
    def of(cls, tensor: torch.Tensor, axis: int) -> _Part:
        tensor = tensor.movedim(axis, 1)
        block, token, *others = tensor.stride()
        return cls(tensor, int(tensor.storage_offset()), block, token, tuple(others), tuple(tensor.shape[2:]))

    def clear(self, block: int, first: int, end: int) -> None:
        """Clear places [first, end) of a block. One view, of the storage: the engine waits for each."""
        begin = self.begin + block * self.block + first * self.token
        self.tensor.as_strided((end - first, *self.sizes), (self.token, *self.others), begin).zero_()


class BlockTails:
    """Last blocks of the prompts that one worker loads. Planes without an order of tokens are no part of it: they are
    written whole.
    """

    def __init__(self, caches: Caches, rank: int) -> None:
        self._rank = rank
        parts_of: dict[CacheGeometry, list[_Part]] = {}
        for kind, parts in zip(caches.geometry.by_layer, caches.tensors, strict=True):
            if parts and kind.block_size > 1:  # not of states
                parts_of.setdefault(kind, []).extend(
                    _Part.of(part, _token_axis(part, region, kind.block_size))
                    for region, part in zip(kind.regions, parts, strict=True)
                    if not region.opaque
                )
        self._kinds = tuple(parts_of.items())

    def clear(self, bind: Bind) -> None:
        """Clear, on the current stream, what of each group's last block is behind the tokens that P writes."""
        for kind, parts in self._kinds:
            begin, end = kind.wanted_entries(bind.first, bind.end)
            index, table = end // kind.covers, bind.blocks[kind.group_index]
            blocks = table[index - begin // kind.covers :]
            if len(blocks):  # else its last block is full
                tokens = kind.token_split.tokens(kind.ranks.part(self._rank), np.array([index]))
                block, filled = int(blocks[0]), int((tokens < end).sum())
                for part in parts:
                    part.clear(block, filled, kind.block_size)
            for block in _unused(table, bind.kernel_blocks[kind.group_index]):
                for part in parts:
                    part.clear(block, 0, kind.block_size)


def _unused(table: NDArray[np.int32], count: int) -> range:
    """Return the kernels' blocks behind a table's last one in the same block of vLLM's, which is `count` of them."""
    behind = int(table[-1]) + 1 if len(table) else 0
    return range(behind, -(-behind // count) * count)


def _token_axis(part: torch.Tensor, region: Region, block_size: int) -> int:
    stride = region.token_stride // part.element_size()
    return next(axis for axis in range(1, part.dim()) if (part.shape[axis], part.stride(axis)) == (block_size, stride))
