# SPDX-License-Identifier: Apache-2.0
"""Tails of D's last blocks, behind a prompt's last token. P does not write them, so D clears them.

vLLM does not clear blocks that a connector fills. What they hold from before may be another kind's bytes, because
kinds share memory. As numbers these can be NaN, and an attention kernel that gives them a weight of zero gets NaN.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.geometry.layout import Region
from vllm_ascend_pd.metadata import Bind


class BlockTails:
    """Last blocks of the prompts that one worker loads. Planes without an order of tokens are no part of it: they are
    written whole.
    """

    def __init__(self, caches: Caches, rank: int) -> None:
        self._rank = rank
        self._parts = [
            (kind, part, _token_axis(part, region, kind.block_size))
            for kind, parts in zip(caches.geometry.by_layer, caches.tensors, strict=True)
            if parts and kind.block_size > 1  # not of states
            for region, part in zip(kind.regions, parts, strict=True)
            if not region.opaque
        ]

    def clear(self, bind: Bind) -> None:
        """Clear, on the current stream, what of each group's last block is behind the tokens that P writes."""
        for kind, part, axis in self._parts:
            begin, end = kind.places(bind.first, bind.end)
            index = end // kind.covers
            blocks = bind.blocks[kind.group][index - begin // kind.covers :]
            if len(blocks):  # else its last block is full
                tokens = kind.token_split.tokens(kind.ranks.part(self._rank), np.array([index]))
                held = int((tokens < end).sum())
                part[int(blocks[0])].narrow(axis - 1, held, kind.block_size - held).zero_()


def _token_axis(part: torch.Tensor, region: Region, block_size: int) -> int:
    stride = region.token_stride // part.element_size()
    return next(axis for axis in range(1, part.dim()) if (part.shape[axis], part.stride(axis)) == (block_size, stride))
