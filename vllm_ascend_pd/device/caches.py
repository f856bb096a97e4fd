# SPDX-License-Identifier: Apache-2.0
"""Registered KV tensors → plain layout facts: geometry, base addresses, memory to register.

Layouts are read off shapes, strides and storages, never assumed. Understood are, per layer, one tensor or a
tuple of tensors, each `[block, head, token, dim]`, `[block, token, head, dim]`, `[block, token, dim]` or
`[2, block, ...]` (K and V stacked).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the engine's configuration says of the cache."""

    block_size: int
    local_heads: int
    total_heads: int
    head_size: int
    tp_size: int
    drafter: str = ""  # which draft model; empty where it has no cache
    drafts: frozenset[str] = frozenset()  # its layers


@dataclass(frozen=True, slots=True)
class Caches:
    """One worker's caches. `geometry.stages` holds only this worker's own layers."""

    geometry: CacheGeometry
    num_blocks: int
    bases: tuple[tuple[int, ...], ...]  # by layer, by region
    storages: tuple[tuple[int, int], ...]  # (address, length) to register
    tensors: tuple[tuple[torch.Tensor, ...], ...]  # by layer, by region


class CacheBytes:
    """Caches as the host reads them, by layer and region."""

    def __init__(self, caches: Caches, device: Device) -> None:
        self._caches, self._device = caches, device

    def region(self, layer: int, region: int) -> NDArray[np.uint8]:
        length = self._caches.num_blocks * self._caches.geometry.regions[region].block_stride
        return np.frombuffer(self._device.view(self._caches.bases[layer][region], length), dtype=np.uint8)


def describe(tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], shape: CacheShape, device: Device) -> Caches:
    """Raises PD-GEO-003 for a layout that is not understood, or that differs between layers."""
    layers: dict[str, tuple[tuple[Region, ...], tuple[int, ...], int, str, str]] = {}
    parts_of: dict[str, tuple[torch.Tensor, ...]] = {}
    storages: dict[int, int] = {}
    for name, value in tensors.items():
        parts = [part for tensor in _tensors(value) for part in _unstack(tensor, shape)]
        regions, bases, packings, blocks = [], [], [], set()
        for index, part in enumerate(parts):
            if part.dim() not in (3, 4):
                raise ConfigError("PD-GEO-003", layer=name, why=f"shape {tuple(part.shape)}")
            packing, opaque = device.packing(part, shape.block_size, shape.head_size)
            regions.append(
                _region(name, f"kv{index}" if len(parts) > 1 else "kv", part, shape, opaque, device.token_major)
            )
            bases.append(part.data_ptr())
            packings.append(packing)
            blocks.add(part.shape[0])
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        if len(blocks) != 1:
            raise ConfigError("PD-GEO-003", layer=name, why=f"its tensors have different numbers of blocks: {blocks}")
        parts_of[name] = tuple(parts)
        dtypes = "/".join(dict.fromkeys(str(part.dtype).removeprefix("torch.") for part in parts))
        layers[name] = (tuple(regions), tuple(bases), blocks.pop(), "/".join(sorted(set(packings))), dtypes)
    if not layers:
        raise ConfigError("PD-GEO-003", layer="(none)", why="the engine registered no KV cache")
    first_name, (regions_0, _, blocks_0, packing_0, dtype_0) = next(iter(layers.items()))
    for name, (regions_i, _, blocks_i, packing_i, dtype_i) in layers.items():
        if (regions_i, blocks_i, packing_i, dtype_i) != (regions_0, blocks_0, packing_0, dtype_0):
            raise ConfigError("PD-GEO-003", layer=name, why=f"its layout differs from that of {first_name}")
    geometry = CacheGeometry(
        block_size=shape.block_size,
        kv_heads=shape.total_heads,
        tp_size=shape.tp_size,
        dtype=dtype_0,
        packing=packing_0,
        regions=regions_0,
        stages=(tuple(layers),),
        drafter=shape.drafter,
        drafts=tuple(name for name in layers if name in shape.drafts),
    )
    by_layer = tuple(bases for _, bases, *_ in layers.values())
    return Caches(geometry, blocks_0, by_layer, tuple(storages.items()), tuple(parts_of.values()))


def _tensors(value: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [tensor for tensor in value if tensor is not None]


def _unstack(tensor: torch.Tensor, shape: CacheShape) -> list[torch.Tensor]:
    return list(tensor.unbind(0)) if tensor.dim() == 5 and tensor.shape[0] == 2 else [tensor]


def _region(layer: str, name: str, tensor: torch.Tensor, shape: CacheShape, opaque: bool, token_major: bool) -> Region:
    size = tensor.element_size()
    dims, strides = tuple(tensor.shape), tuple(stride * size for stride in tensor.stride())
    if len(dims) == 3 and dims[1] == shape.block_size and shape.local_heads == 1:
        head_stride, token_stride, dim, dim_stride = 0, strides[1], dims[2], strides[2]
    elif (
        len(dims) == 4
        and dims[1:3] == (shape.local_heads, shape.block_size)
        and not (dims[1] == dims[2] and token_major)
    ):
        _, head_stride, token_stride, dim_stride = strides
        dim = dims[3]
    elif len(dims) == 4 and dims[1:3] == (shape.block_size, shape.local_heads):
        _, token_stride, head_stride, dim_stride = strides
        dim = dims[3]
    else:
        raise ConfigError(
            "PD-GEO-003",
            layer=layer,
            why=f"shape {dims}, block size {shape.block_size}, {shape.local_heads} KV heads on this rank",
        )
    if dim_stride != size:
        raise ConfigError(
            "PD-GEO-003", layer=layer, why=f"the innermost dimension is not contiguous (strides {strides})"
        )
    cell = dim * size
    if opaque:
        if token_stride != cell:
            raise ConfigError("PD-GEO-003", layer=layer, why="the opaque (block, head) plane is not contiguous")
        token_stride, cell = 0, cell * shape.block_size
    if shape.local_heads == 1:
        head_stride = 0
    return Region(name, strides[0], head_stride, token_stride, cell)
