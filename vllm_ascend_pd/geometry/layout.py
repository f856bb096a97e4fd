# SPDX-License-Identifier: Apache-2.0
"""How a KV cache lies in memory, as plain numbers.

Every layout we meet is affine: the byte address of the cell of (block, head, token) is
`base + block*block_stride + head*head_stride + token*token_stride`, and a cell is contiguous.
Head-major, token-major, packed K‖V and MLA differ only in these strides. Where the token axis
is opaque (the CPU backend permutes inside a (block, head) plane) `token_stride` is 0 and the cell
is the whole plane.
"""

from __future__ import annotations

import msgspec


class Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of a layer: packed K‖V, K or V alone, an MLA latent."""

    name: str
    block_stride: int
    head_stride: int
    token_stride: int
    cell_bytes: int

    @property
    def opaque(self) -> bool:
        return self.token_stride == 0


class CacheGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's KV cache: what the peer must know to write into it or read from it.

    Regions describe one rank's tensors and are the same for all ranks and layers. `kv_heads` counts
    heads of the whole model (1 for MLA and MQA); rank r of tp_size holds heads `head_range(r)`.
    """

    block_size: int
    kv_heads: int
    tp_size: int
    dtype: str
    packing: str
    regions: tuple[Region, ...]
    stages: tuple[tuple[str, ...], ...]  # layer names by pipeline stage

    @property
    def opaque(self) -> bool:
        return any(region.opaque for region in self.regions)

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name for stage in self.stages for name in stage)

    def head_range(self, rank: int) -> range:
        """Heads that `rank` holds. With fewer heads than ranks neighbouring ranks hold replicas."""
        first = rank * self.kv_heads // self.tp_size
        return range(first, max(first + 1, (rank + 1) * self.kv_heads // self.tp_size))
