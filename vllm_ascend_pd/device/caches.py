# SPDX-License-Identifier: Apache-2.0
"""Registered KV tensors → plain layout facts: geometry, base addresses, memory to register.

Layouts are read off shapes, strides and storages, never assumed. A layer may have one tensor or a tuple of tensors,
each `[block, head, token, dim]`, `[block, token, head, dim]`, `[block, token, dim]` or `[2, block, ...]` (K and V
stacked). A recurrent layer has one tensor of pages in which its states lie one behind the other, or one tensor for each
state. It becomes a layer for each of its sections (geometry/states.py). An indexer's keys in the tuple of a layer
become a layer of their own, as vLLM has them.

Layers of several groups may share memory: vllm-ascend has states there, and K and V over the same bytes. Whatever the
layout, a block of one group must not reach into a block of another group that has another number: both are in use at
one time.

A block of vLLM's may be several of the kernels', and K and V may take turns for each of these. So such a group is
described by the kernels' blocks, and each number in a table of vLLM's stands for as many of them, one behind the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ascend_pd.device.base import Device, Packing
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.geometry.layout import (
    ALL,
    FRACTAL_CHANNELS,
    FRACTAL_PACKING,
    CacheGeometry,
    Group,
    LayerKind,
    Region,
    attention_of,
    in_execution_order,
    index_of,
    is_index,
    section_of,
)
from vllm_ascend_pd.geometry.states import PACKING, Recurrent

_IN_FRACTALS = Packing(FRACTAL_PACKING, opaque=True)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer, from the engine's configuration."""

    local_heads: int
    total_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes, groups and ranks of the cache, from the engine's configuration."""

    block_size: int
    local_heads: int
    total_heads: int
    head_size: int
    tp_size: int
    drafter: str = ""  # name of the draft model; empty without one, or if it has no cache
    drafts: frozenset[str] = frozenset()  # layers of the draft model
    other_shapes: Mapping[str, LayerShape] = field(default_factory=dict)  # sizes of layers that differ
    groups: tuple[Group, ...] = ()  # empty: one group, in which all tokens matter
    group_of: Mapping[str, int] = field(default_factory=dict)  # index of a layer's group; empty: not known
    states: Mapping[str, Recurrent] = field(default_factory=dict)  # by recurrent layer
    indexes: Mapping[str, int] = field(default_factory=dict)  # last tensors of a layer's tuple that are its indexer's
    dtype_names: Mapping[str, str] = field(
        default_factory=dict
    )  # name of a layer's dtype, if its tensor does not show it
    int8_scales: Mapping[str, Sequence[torch.Tensor]] = field(
        default_factory=dict
    )  # scales of layers whose heads D has in int8 (admission/quantised.py)
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1

    def of(self, name: str) -> LayerShape:
        return self.other_shapes.get(name) or LayerShape(self.local_heads, self.total_heads, self.head_size)

    def group(self, name: str) -> tuple[int, Group]:
        """Return index and group of a layer. Raise PD-GEO-003 for a layer without a group."""
        if not self.groups:
            return 0, Group(self.block_size)
        index = self.group_of.get(name)
        if index is None:
            raise ConfigError("PD-GEO-003", layer=name, why="it belongs to no group of the engine's cache")
        return index, self.groups[index]


@dataclass(frozen=True, slots=True)
class Caches:
    """One worker's caches. `geometry.stages` holds only this worker's own layers."""

    geometry: CacheGeometry
    num_blocks: int  # vLLM's
    bases: tuple[tuple[int, ...], ...]  # by layer, by region
    storages: tuple[tuple[int, int], ...]  # (address, length) to register
    tensors: tuple[tuple[torch.Tensor, ...], ...]  # by layer, by region; empty for sections of states
    kernel_blocks: tuple[int, ...]  # by group: blocks of the geometry in one of vLLM's

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of blocks by group, as the geometry has them."""
        return tuple(self.num_blocks * count for count in self.kernel_blocks)


class CacheBytes:
    """Bytes of the caches, readable by the host, by layer and region."""

    def __init__(self, caches: Caches, device: Device) -> None:
        self._caches, self._device = caches, device

    def region(self, layer: int, region: int) -> NDArray[np.uint8]:
        base, caches = self._caches.bases[layer][region], self._caches
        kind = caches.geometry.by_layer[layer]
        length = caches.blocks[kind.group_index] * kind.regions[region].block_stride
        # If a region begins inside a page, its last block ends with the storage, before a whole stride.
        left = next((start + size - base for start, size in caches.storages if start <= base < start + size), length)
        return np.frombuffer(self._device.view(base, min(length, left)), dtype=np.uint8)


def describe(
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    shape: CacheShape,
    device: Device,
    *,
    images: bool = False,
) -> Caches:
    """Return the layout of registered tensors. Raise PD-GEO-003 for a layout that is not supported.

    `images`: they are not the cache, but what is made of it for one layer at a time (regroup/quantise.py). Layers share
    them, and nothing is written from them directly.
    """
    tensors = _without_shared(tensors, shape)
    shape, kernel_blocks = _by_kernels_blocks(tensors, shape, device)
    # Stages of a pipeline come one behind the other, so the order of a whole model must not be that of kinds.
    names = in_execution_order(tensors) if shape.groups or any(map(is_index, tensors)) else list(tensors)
    layers: dict[str, _Layer] = {}
    for name in names:
        if name in shape.states:
            layers.update(_sections(name, _tensors(tensors[name]), shape))
        else:
            parts, count = _parts(tensors[name]), shape.indexes.get(name, 0)
            described = _index if is_index(name) else _layer
            layers[name] = described(name, parts[: len(parts) - count], shape, device)
            if count:
                layers[index_of(name)] = _index(name, parts[-count:], shape, device)
    if not layers:
        raise ConfigError("PD-GEO-003", layer="(none)", why="the engine registered no KV cache")
    first_name, first_layer = next(iter(layers.items()))
    pool = first_layer.blocks // kernel_blocks[first_layer.kind.group_index]
    for name, layer in layers.items():
        if layer.blocks != pool * (each := kernel_blocks[layer.kind.group_index]):
            why = f"it has {layer.blocks} blocks, {each} for one of vLLM's, of which {first_name} has {pool}"
            raise ConfigError("PD-GEO-003", layer=name, why=why)
    begins: dict[tuple[int, int], str] = {}
    for name, layer in () if images else layers.items():
        for base in layer.bases:
            if (other := begins.get((layer.kind.group_index, base))) is not None:
                raise ConfigError("PD-GEO-003", layer=name, why=f"it shares memory with {other}, of the same group")
            begins[layer.kind.group_index, base] = name
    if len(shape.groups) > 1:
        _check_blocks_apart(
            {
                name: (shape.group(name)[0], [part.view(pool, -1, *part.shape[1:]) for part in _parts(tensors[name])])
                for name in names
            }
        )
    # The first kind has the engine's division of the tokens, so it is none that every rank has whole.
    first, *others = kinds = list(dict.fromkeys(sorted((one.kind for one in layers.values()), key=lambda k: k.whole)))
    kind_of = tuple(kinds.index(layer.kind) for layer in layers.values())
    geometry = CacheGeometry(
        block_size=shape.groups[first.group_index].entries if shape.groups else shape.block_size,
        kv_heads=first.kv_heads,
        tp_size=shape.tp_size,
        dtype=first.dtype,
        packing=first.packing,
        regions=first.regions,
        stages=(tuple(layers),),
        drafter=shape.drafter,
        drafts=tuple(name for name in layers if not shape.drafts.isdisjoint((name, attention_of(name)))),
        others=tuple(others),
        kind_of=kind_of if others else (),
        groups=shape.groups,
        group_index=first.group_index,
        dcp=shape.dcp,
        pcp=shape.pcp,
        interleave=shape.interleave,
    )
    storages = {address: length for layer in layers.values() for address, length in layer.storages if not images}
    bases, views = tuple(layer.bases for layer in layers.values()), tuple(layer.tensors for layer in layers.values())
    return Caches(geometry, pool, bases, tuple(storages.items()), views, kernel_blocks)


@dataclass(frozen=True, slots=True)
class _Layer:
    kind: LayerKind
    bases: tuple[int, ...]
    blocks: int
    tensors: tuple[torch.Tensor, ...]
    storages: tuple[tuple[int, int], ...]


def _layer(name: str, parts: Sequence[torch.Tensor], shape: CacheShape, device: Device) -> _Layer:
    group, table = shape.group(name)
    sizes, dtype = shape.of(name), shape.dtype_names.get(name, "")
    if name not in shape.int8_scales:
        return _of_tensors(name, parts, sizes, table.block_size, group, device, dtype)
    planes = [_in_fractals(name, part, table.block_size, sizes) for part in parts]
    return _of_tensors(name, planes, sizes, table.block_size, group, device, dtype, packing=_IN_FRACTALS)


def _in_fractals(name: str, part: torch.Tensor, block_size: int, layer: LayerShape) -> torch.Tensor:
    """Return int8 of heads, which has the shape of a plain cache, as whole planes of (block, head)."""
    plain = tuple(part.shape[1:]) == (block_size, layer.local_heads, layer.head_size) and part[0].is_contiguous()
    if not plain or layer.head_size % FRACTAL_CHANNELS or part.dtype != torch.int8:
        sizes = f"{layer.local_heads} heads of {layer.head_size} in fractals of {FRACTAL_CHANNELS}"
        why = f"shape {tuple(part.shape)}, {part.dtype}, for {sizes}"
        raise ConfigError("PD-GEO-003", layer=name, why=why)
    return part.view(len(part), layer.local_heads, block_size, layer.head_size)


def _index(name: str, parts: Sequence[torch.Tensor], shape: CacheShape, device: Device) -> _Layer:
    """Return an indexer's keys as a layer of their own, from the tuple of its attention `name` or from its own cache.

    Where ranks of DCP divide the tokens of latents, each has all keys, for a block of the table in as many blocks as
    there are ranks.
    """
    group, table = shape.group(name)
    size, whole = table.block_size, shape.dcp > 1 and shape.pcp == 1
    if whole:
        size *= shape.dcp
        parts = [_joined(part, size) for part in parts]
    keys = LayerShape(1, 1, parts[0].shape[-1])
    name = name if is_index(name) else index_of(name)
    return _of_tensors(name, parts, keys, size, group, device, whole=whole)


def _of_tensors(
    name: str,
    parts: Sequence[torch.Tensor],
    sizes: LayerShape,
    block_size: int,
    group: int,
    device: Device,
    dtype: str = "",
    *,
    whole: bool = False,
    packing: Packing | None = None,
) -> _Layer:
    regions, packings = [], []
    for index, part in enumerate(parts):
        if part.dim() not in (3, 4):
            raise ConfigError("PD-GEO-003", layer=name, why=f"shape {tuple(part.shape)}")
        if not _is_apart(part):
            why = f"its cells share memory (shape {tuple(part.shape)}, strides {part.stride()})"
            raise ConfigError("PD-GEO-003", layer=name, why=why)
        packed = packing or device.packing(part, block_size, sizes.head_size)
        region = f"kv{index}" if len(parts) > 1 else "kv"
        token_major = device.token_major and packing is None
        regions.append(_region(name, region, part, block_size, sizes, packed.opaque, token_major))
        packings.append(packed.name)
    blocks = {part.shape[0] for part in parts}
    if len(blocks) != 1:
        raise ConfigError("PD-GEO-003", layer=name, why=f"its tensors have different numbers of blocks: {blocks}")
    storages = [part.untyped_storage() for part in parts]
    dtype = dtype or _joined_names([str(part.dtype).removeprefix("torch.") for part in parts])
    return _Layer(
        kind=LayerKind(sizes.total_heads, dtype, _joined_names(packings), tuple(regions), group, whole),
        bases=tuple(part.data_ptr() for part in parts),
        blocks=blocks.pop(),
        tensors=tuple(parts),
        storages=tuple((storage.data_ptr(), storage.nbytes()) for storage in storages),
    )


def _without_shared(
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], shape: CacheShape
) -> dict[str, torch.Tensor | Sequence[torch.Tensor]]:
    """Leave out layers that only read the cache of another layer, under whose name it is pushed.

    vLLM registers that cache under both names. Only the name of the layer that writes it is in a group of the engine's
    cache. An address alone does not show it: layers of several groups share addresses too.
    """

    def place(name: str) -> list[tuple[int, tuple[int, ...]]]:
        return [(tensor.data_ptr(), tuple(tensor.shape)) for tensor in _tensors(tensors[name])]

    written = [place(name) for name in tensors if name in shape.group_of]
    return {name: parts for name, parts in tensors.items() if name in shape.group_of or place(name) not in written}


def _sections(name: str, tensors: list[torch.Tensor], shape: CacheShape) -> dict[str, _Layer]:
    """Return the sections of a recurrent layer, as layers by their names."""
    recurrent, (group, _) = shape.states[name], shape.group(name)
    sizes, blocks = recurrent.nbytes, tensors[0].shape[0]
    strides = [tensor.stride(0) * tensor.element_size() for tensor in tensors]
    block_bytes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
    apart = len(tensors) == len(sizes) > 1
    fits = block_bytes == list(sizes) if apart else len(tensors) == 1 and block_bytes[0] >= sum(sizes)
    if not fits or any(
        len(tensor) != blocks or not tensor[0].is_contiguous() or not _is_apart(tensor) for tensor in tensors
    ):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ConfigError("PD-GEO-003", layer=name, why=f"shapes {shapes} for states of {list(sizes)} bytes")
    storages = tuple((one.data_ptr(), one.nbytes()) for one in (tensor.untyped_storage() for tensor in tensors))
    begins = [tensor.data_ptr() for tensor in tensors] if apart else [tensors[0].data_ptr()] * len(sizes)
    if not apart:
        strides, begins = strides * len(sizes), [begin + sum(sizes[:i]) for i, begin in enumerate(begins)]
    sections: dict[str, _Layer] = {}
    for section in recurrent.sections(name, shape.tp_size):
        dtype, each = _joined_names([one.dtype for one in section.regions]), section.heads > shape.tp_size
        regions = tuple(
            Region(one.name, strides[one.state], one.cell_bytes if each else 0, 0, one.cell_bytes)
            for one in section.regions
        )
        sections[section_of(name, section.name)] = _Layer(
            kind=LayerKind(section.heads, dtype, PACKING, regions, group),
            bases=tuple(begins[one.state] + one.offset for one in section.regions),
            blocks=blocks,
            tensors=(),
            storages=storages,
        )
    return sections


def _parts(value: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a layer's tensors, their first dimension the blocks."""
    return [part for tensor in _tensors(value) for part in _unstack(tensor)]


def _by_kernels_blocks(
    tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], shape: CacheShape, device: Device
) -> tuple[CacheShape, tuple[int, ...]]:
    """Return the shape with the kernels' blocks where all tokens matter, and by group how many one of vLLM's is.

    Tensors of a group that do not agree, and those that fit no kernel's block, are refused with their shapes later.
    """
    counts = [1] * max(1, len(shape.groups))
    if shape.groups and device.token_major:
        for name in tensors:
            index, group = shape.group(name)
            if group.matters == ALL:
                counts[index] = _kernel_blocks(_parts(tensors[name])[0], group.block_size, shape.of(name), device)
    groups = [
        msgspec.structs.replace(group, block_size=group.block_size // count)
        for group, count in zip(shape.groups, counts, strict=False)
    ]
    return replace(shape, groups=tuple(groups)), tuple(counts)


def _kernel_blocks(part: torch.Tensor, block_size: int, sizes: LayerShape, device: Device) -> int:
    """Return how many blocks of [block, token, head, dim] are one of `block_size` tokens; 1 if it is not known."""
    if part.dim() != 4 or part.shape[2] != sizes.local_heads or block_size % part.shape[1]:
        return 1
    return 1 if device.packing(part, part.shape[1], sizes.head_size).opaque else block_size // part.shape[1]


def _joined_names(words: Sequence[str]) -> str:
    """Join the words of all regions to one; equal words are written once."""
    return "/".join(words) if len(set(words)) > 1 else words[0]


def _is_apart(tensor: torch.Tensor) -> bool:
    """Return whether each axis goes beyond all that the shorter ones reach: then no two elements share bytes."""
    reach = 1
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1 and stride < reach:
            return False
        reach += (count - 1) * stride
    return True


def _joined(part: torch.Tensor, block_size: int) -> torch.Tensor:
    """Join blocks of [block, token, 1, dim], with no gap between, to longer ones. Other tensors stay as they are."""
    if part.dim() != 4 or part.shape[2] != 1 or not part.is_contiguous():
        return part
    count, odd = divmod(block_size, part.shape[1])
    return part if odd or part.shape[0] % count else part.view(part.shape[0] // count, block_size, *part.shape[2:])


def _check_blocks_apart(layers: Mapping[str, tuple[int, Sequence[torch.Tensor]]]) -> None:
    """Raise PD-GEO-003 if a block of one group shares bytes with another block of another group."""
    spans: dict[_Span, tuple[int, str]] = {}
    for name, (group, parts) in layers.items():
        for part in parts:
            spans.setdefault(_Span.of(part), (group, name))
    for (one, (group, name)), (other, (beside, later)) in itertools.combinations(spans.items(), 2):
        if group != beside and (pair := one.shared(other)) is not None:
            why = f"its block {pair[1]} shares memory with block {pair[0]} of {name}, which is of another group"
            raise ConfigError("PD-GEO-003", layer=later, why=why)


@dataclass(frozen=True, slots=True)
class _Span:
    """Addresses of a tensor's blocks, and the bytes of each."""

    begin: int
    stride: int
    length: int
    blocks: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Span:
        size = tensor.element_size()
        reach = sum((count - 1) * stride for count, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
        return cls(tensor.data_ptr(), tensor.stride(0) * size, (reach + 1) * size, tensor.shape[0])

    def shared(self, other: _Span) -> tuple[int, int] | None:
        """Return two blocks with different numbers that share bytes, or None."""
        numbers = np.arange(self.blocks)
        begins = self.begin + numbers * self.stride - other.begin
        first = np.maximum((begins - other.length) // other.stride + 1, 0)
        last = np.minimum((begins + self.length - 1) // other.stride, other.blocks - 1)
        wrong = np.flatnonzero((first <= last) & ((first != numbers) | (last != numbers)))
        if not len(wrong):
            return None
        block = int(wrong[0])
        return block, int(first[block] if first[block] != block else last[block])


def _tensors(value: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [tensor for tensor in value if tensor is not None]


def _unstack(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.unbind(0)) if tensor.dim() == 5 and tensor.shape[0] == 2 else [tensor]


def _region(
    layer: str, name: str, tensor: torch.Tensor, block_size: int, shape: LayerShape, opaque: bool, token_major: bool
) -> Region:
    size = tensor.element_size()
    dims, strides = tuple(tensor.shape), tuple(stride * size for stride in tensor.stride())
    if len(dims) == 3 and dims[1] == block_size and shape.local_heads == 1:
        head_stride, token_stride, dim, dim_stride = 0, strides[1], dims[2], strides[2]
    # With as many heads as tokens in a block the shape fits both orders: then the device's own decides.
    elif len(dims) == 4 and dims[1:3] == (shape.local_heads, block_size) and not (dims[1] == dims[2] and token_major):
        _, head_stride, token_stride, dim_stride = strides
        dim = dims[3]
    elif len(dims) == 4 and dims[1:3] == (block_size, shape.local_heads):
        _, token_stride, head_stride, dim_stride = strides
        dim = dims[3]
    else:
        raise ConfigError(
            "PD-GEO-003",
            layer=layer,
            why=f"shape {dims}, block size {block_size}, {shape.local_heads} KV heads on this rank",
        )
    if dim_stride != size:
        raise ConfigError(
            "PD-GEO-003", layer=layer, why=f"the innermost dimension is not contiguous (strides {strides})"
        )
    cell = dim * size
    if opaque:
        if token_stride != cell:
            raise ConfigError("PD-GEO-003", layer=layer, why="the opaque (block, head) plane is not contiguous")
        token_stride, cell = 0, cell * block_size
    if shape.local_heads == 1:
        head_stride = 0
    return Region(name, strides[0], head_stride, token_stride, cell)
