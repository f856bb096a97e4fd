# SPDX-License-Identifier: Apache-2.0
"""Reference for the ops gather and assemble, byte by byte in plain Python, and caches of every layout for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_ascend_pd.geometry.layout import Region


@dataclass(frozen=True)
class LayerLayout:
    """Layout of one engine's KV: names as in the tests' parameters."""

    head_major: bool = False
    packed: bool = False
    mla: bool = False
    opaque: bool = False
    padding: int = 0  # unused elements after each block

    def cells(self, dim: int, block: int) -> tuple[int, ...]:
        """Elements of a cell by region."""
        per_token = (dim * 4, dim) if self.mla else (2 * dim,) if self.packed else (dim, dim)
        return tuple(n * block for n in per_token) if self.opaque else per_token


class LayerCaches:
    """One rank's caches of one layer, with known bytes."""

    def __init__(
        self, layout: LayerLayout, blocks: int, heads: int, block: int, dim: int, dtype: torch.dtype, seed: int
    ) -> None:
        self.layout, self.heads, self.block = layout, heads, block
        self.tokens = 1 if layout.opaque else block
        self.item = dtype.itemsize
        self.tensors: list[torch.Tensor] = []
        self.regions: list[Region] = []
        random = np.random.default_rng(seed)
        for index, cell in enumerate(layout.cells(dim, block)):
            shape = (heads, self.tokens, cell) if layout.head_major else (self.tokens, heads, cell)
            size = int(np.prod(shape)) + layout.padding
            raw = torch.from_numpy(random.integers(0, 256, blocks * size * self.item, dtype=np.uint8))
            flat = raw.view(dtype)
            strides = (size, shape[1] * cell, cell, 1)
            self.tensors.append(flat.as_strided((blocks, *shape), strides))
            head, token = (strides[1], strides[2]) if layout.head_major else (strides[2], strides[1])
            self.regions.append(
                Region(
                    f"kv{index}",
                    size * self.item,
                    head * self.item if heads > 1 else 0,
                    0 if layout.opaque else token * self.item,
                    cell * self.item,
                )
            )

    @property
    def cell_bytes(self) -> tuple[int, ...]:
        return tuple(region.cell_bytes for region in self.regions)

    def raw(self, region: int) -> np.ndarray:
        """Return the region's storage as bytes: writing here writes the cache."""
        storage = self.tensors[region].untyped_storage()
        return torch.tensor([], dtype=torch.uint8).set_(storage).numpy()

    def cell(self, region: int, block: int, head: int, token: int) -> slice:
        """Return the place of a cell in `raw`."""
        facts = self.regions[region]
        start = block * facts.block_stride + head * facts.head_stride + token * facts.token_stride
        return slice(start, start + facts.cell_bytes)


def gather(cache: LayerCaches, rows: np.ndarray, out: np.ndarray) -> None:
    for region, block, head, token, heads, tokens, offset, head_stride, token_stride in rows.tolist():
        size = cache.regions[region].cell_bytes
        for h in range(heads):
            for t in range(tokens):
                at = offset + h * head_stride + t * token_stride
                out[at : at + size] = cache.raw(region)[cache.cell(region, block, head + h, token + t)]


def assemble(received: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    for cell, heads, tokens, src, src_head, src_token, dst, dst_head, dst_token in rows.tolist():
        for h in range(heads):
            for t in range(tokens):
                a, b = src + h * src_head + t * src_token, dst + h * dst_head + t * dst_token
                out[b : b + cell] = received[a : a + cell]
