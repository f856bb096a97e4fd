# SPDX-License-Identifier: Apache-2.0
"""One rank's KV cache as a small real array, and what each prompt's KV looks like byte by byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulation.settings import Settings, Shape
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.protocol import messages

_POOL = np.random.default_rng(7).integers(0, 256, 1 << 20, dtype=np.uint8)
NOISE = 0xEE  # what zeroing, or the step before, leaves in a block
BASE = 1 << 20  # addresses do not start at zero


class Content:
    """The KV of one prompt. A cell is (token, head), or (block, head) with all its filled tokens where tokens are opaque."""

    def __init__(self, seed: int, settings: Settings) -> None:
        self._settings = settings
        self._start = seed * 7919 % (len(_POOL) - (1 << 16))

    def cells(self, geometry: CacheGeometry, first: int, last: int, heads: range, computed: int) -> NDArray[np.uint8]:
        """Cells [first, last) of `heads` in layer 0, region 0: shape (cells, heads, bytes)."""
        width = geometry.regions[0].cell_bytes
        size = self._settings.kv_heads * width
        flat = _POOL[self._start + first * size : self._start + last * size]
        found = flat.reshape(last - first, self._settings.kv_heads, width)[:, heads.start : heads.stop]
        if geometry.opaque:
            blocks = np.arange(first, last)
            filled = np.minimum(computed - blocks * geometry.block_size, geometry.block_size).astype(np.uint8)
            found = found + filled[:, None, None]
        return found


def shade(layer: int, region: int) -> int:
    """How layer `layer` (index in the whole model) and region differ from layer 0, region 0."""
    return (37 * layer + 101 * region) % 256


class Memory:
    """All layers and regions of one rank, one after the other."""

    def __init__(self, settings: Settings, shape: Shape, geometry: CacheGeometry, rank: int, stage: int | None) -> None:
        names = settings.names()
        self.geometry = geometry
        self.heads = geometry.head_range(rank)
        self.layers = [names.index(name) for name in (geometry.layers if stage is None else geometry.stages[stage])]
        self.blocks = shape.blocks
        self.plane = geometry.regions[0].block_stride * shape.blocks  # bytes of one region of one layer
        self.regions = len(geometry.regions)
        count = len(self.layers) * self.regions
        self.bytes = np.zeros(count * self.plane, dtype=np.uint8)
        self.by_block = self.bytes.reshape(count, shape.blocks, geometry.regions[0].block_stride)
        self.bases = tuple(
            tuple(BASE + (i * self.regions + r) * self.plane for r in range(self.regions))
            for i in range(len(self.layers))
        )

    def addresses(self, session: str) -> messages.Memory:
        return messages.Memory(session, (self.blocks,), self.bases)

    def offsets(self, blocks: NDArray[np.int64], first: int, last: int) -> NDArray[np.int64]:
        """Where the cells [first, last) lie inside a plane; `blocks` is the block table from token 0."""
        g, region = self.geometry, self.geometry.regions[0]
        cells = np.arange(first, last)
        if region.opaque:
            start = blocks[cells] * region.block_stride
        else:
            start = blocks[cells // g.block_size] * region.block_stride + cells % g.block_size * region.token_stride
        heads = np.arange(len(self.heads)) * region.head_stride
        return start[:, None, None] + heads[None, :, None] + np.arange(region.cell_bytes)

    def cell_range(self, first: int, last: int) -> tuple[int, int]:
        """Tokens to cells."""
        if not self.geometry.opaque:
            return first, last
        size = self.geometry.block_size
        return first // size, -(-last // size)

    def layer_view(self, index: int, region: int) -> NDArray[np.uint8]:
        start = (index * self.regions + region) * self.plane
        return self.bytes[start : start + self.plane]
