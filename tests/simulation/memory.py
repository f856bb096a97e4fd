# SPDX-License-Identifier: Apache-2.0
"""One rank's KV cache as a small real array, and the bytes of each prompt's KV."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from simulation.settings import EngineShape, SimulationSettings
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.protocol import messages

_POOL = np.random.default_rng(7).integers(0, 256, 1 << 20, dtype=np.uint8)
_PERIOD = 1_048_573  # of longer prompts; a prime, so that no two blocks are alike
NOISE = 0xEE  # bytes that zeroing, or the step before, leaves in a block
BASE = 1 << 20  # addresses do not start at zero

Cells = list[tuple[NDArray[np.int64], NDArray[np.uint8]]]  # by region: place, and bytes


class Content:
    """The KV of one prompt.

    A cell is (token, head), or (block, head) with all its filled tokens where tokens are opaque. Of states it is
    (tokens so far, head).
    """

    def __init__(self, seed: int) -> None:
        self.shared = False  # a prompt has found blocks of another one that begins alike
        self.undrafted = False  # the draft model did not run for a step of it
        self._start = seed * 7919 % (len(_POOL) - (1 << 16))

    def cells(
        self, kind: CacheGeometry, region: Region, first: int, last: int, heads: range, computed: int
    ) -> NDArray[np.uint8]:
        """Return the cells [first, last) of `heads` in layer 0, before its shade: shape (cells, heads, bytes)."""
        width = region.cell_bytes
        size = kind.kv_heads * width
        begin, end = self._start + first * size, self._start + last * size
        flat = _POOL[begin:end] if end <= _PERIOD else _POOL[np.arange(begin, end) % _PERIOD]
        cells = flat.reshape(last - first, kind.kv_heads, width)[:, heads.start : heads.stop]
        if kind.opaque:
            blocks = np.arange(first, last)
            filled = np.minimum(computed - blocks * kind.block_size, kind.block_size).astype(np.uint8)
            cells = cells + filled[:, None, None]
        return cells


def shade(layer: int, region: int) -> int:
    """Return the number added (mod 256) to every byte of a layer's region: bytes in a wrong one are found.

    `layer` is the index in the whole model.
    """
    return (37 * layer + 101 * region) % 256


class Planes:
    """The layers of one kind in one rank, one after the other: their offsets in its memory, and their blocks.

    Equal layers of several groups share it.
    """

    def __init__(self, kind: CacheGeometry, layers: int, blocks: int, rank: int, start: int) -> None:
        self.kind, self.regions = kind, kind.regions
        self.heads = kind.head_range(rank)
        pcp_rank, place = divmod(rank, kind.tp_size)
        self.world, self.part = kind.dcp * kind.pcp, pcp_rank * kind.dcp + place % kind.dcp
        self.start, self.layers, self._blocks = start, layers, blocks
        self.sizes = [region.block_stride * blocks for region in self.regions]  # bytes of each region of one layer
        self.offsets = [0, *itertools.accumulate(self.sizes)]  # of its regions
        self.layer_bytes = self.offsets[-1]
        self.end = start + layers * self.layer_bytes
        self._begins, self._borders = np.array(self.offsets[:-1]), np.array(self.offsets[1:-1])
        self._strides = np.array([region.block_stride for region in self.regions])

    def block_of(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        block: NDArray[np.int64] = (addresses - self.start) % self.layer_bytes
        if len(self.regions) == 1:
            block //= self.regions[0].block_stride
        else:
            region = self._borders.searchsorted(block, side="right")
            block -= self._begins[region]
            block //= self._strides[region]
        return block

    def by_block(self, memory: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """Return for each region the bytes of all layers: by layer, by block."""
        layers = memory[self.start : self.end].reshape(self.layers, self.layer_bytes)
        return [
            layers[:, begin:end].reshape(self.layers, self._blocks, -1)
            for begin, end in itertools.pairwise(self.offsets)
        ]

    def cell_range(self, first: int, last: int) -> tuple[int, int]:
        """Return the cells of tokens [first, last)."""
        size = self.kind.block_size
        if self.kind.group.stateful:
            return last, last + 1  # the state after the last token
        first, last = first // self.kind.group.per_entry, last // self.kind.group.per_entry
        return (first // size, -(-last // size)) if self.kind.opaque else (first, last)

    def cells(self, content: Content, blocks: NDArray[np.int64], first: int, last: int, computed: int) -> Cells:
        """Return by region the places of the cells [first, last), and their bytes before the shade.

        `blocks` is the block table from token 0. Regions of one layout share the places.
        """
        layouts: dict[tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.uint8]]] = {}
        indices, local_cells = self._own_cells(first, last)
        cells = []
        for region in self.regions:
            like = region.block_stride, region.head_stride, region.token_stride, region.cell_bytes
            if like not in layouts:
                right = content.cells(self.kind, region, first, last, self.heads, computed)
                layouts[like] = self._offsets(region, blocks, local_cells), right if self.world == 1 else right[indices]
            cells.append(layouts[like])
        return cells

    def _own_cells(self, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which of the cells [first, last) this rank has, and their places, which are consecutive."""
        cells = np.arange(last)
        if self.world == 1:
            return cells[first:] - first, cells[first:]
        rank_cells = np.flatnonzero(cells // self.kind.interleave % self.world == self.part)
        return rank_cells[rank_cells >= first] - first, np.flatnonzero(rank_cells >= first)

    def _offsets(self, region: Region, blocks: NDArray[np.int64], cells: NDArray[np.int64]) -> NDArray[np.int64]:
        size = self.kind.block_size
        if self.kind.group.stateful:
            start = blocks[(cells - 1) // self.kind.group.block_size] * region.block_stride
        elif region.opaque:
            start = blocks[cells] * region.block_stride
        else:
            start = blocks[cells // size] * region.block_stride + cells % size * region.token_stride
        heads = np.arange(len(self.heads)) * region.head_stride
        offsets: NDArray[np.int64] = start[:, None, None] + heads[None, :, None] + np.arange(region.cell_bytes)
        return offsets


class RankMemory:
    """All layers and regions of one rank, kind by kind.

    Kinds that differ only in their groups share addresses, as in vLLM: their first layers are at one place, their
    second layers at the next. A block belongs to one group at a time.
    """

    def __init__(
        self, settings: SimulationSettings, shape: EngineShape, geometry: CacheGeometry, rank: int, stage: int | None
    ) -> None:
        numbers, names = settings.names(), geometry.layers if stage is None else geometry.stages[stage]
        self.layers = [numbers.index(name) for name in names]
        self.blocks = shape.blocks
        self.kinds: list[Planes] = []
        place_of: dict[str, tuple[Planes, int]] = {}
        layers_of = [[name for name in names if name in kind.layers] for kind in geometry.kinds]
        most, starts, end = dict[tuple[str, ...], int](), dict[tuple[str, ...], int](), 0
        for kind, layers in zip(geometry.kinds, layers_of, strict=True):
            most[_alike(kind)] = max(len(layers), most.get(_alike(kind), 0))
        for kind, layers in zip(geometry.kinds, layers_of, strict=True):
            start = starts.setdefault(_alike(kind), end)
            planes = Planes(kind, most[_alike(kind)], shape.blocks, rank, start)
            end = max(end, planes.end)
            self.kinds.append(planes)
            place_of.update({name: (planes, i) for i, name in enumerate(layers)})
        self.planes = [place_of[name][0] for name in names]  # by layer
        self._starts = [planes.start + i * planes.layer_bytes for planes, i in (place_of[name] for name in names)]
        self.bytes = np.zeros(end, dtype=np.uint8)
        # Kinds without layers are other stages'; those that share addresses count once.
        self._distinct = list({planes.start: planes for planes in self.kinds if planes.end > planes.start}.values())
        self._ends = np.array([planes.end for planes in self._distinct])
        self._by_block = [view for planes in self._distinct for view in planes.by_block(self.bytes)]
        self._groups = len(geometry.tables)
        self.bases = tuple(
            tuple(BASE + start + begin for begin in planes.offsets[:-1])
            for planes, start in zip(self.planes, self._starts, strict=True)
        )

    def addresses(self, session: str) -> messages.Memory:
        return messages.Memory(session, (self.blocks,) * self._groups, self.bases)

    def clear(self, blocks: NDArray[np.int32]) -> None:
        for planes in self._by_block:
            planes[:, blocks] = NOISE

    def block_of(self, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the block of each byte."""
        if len(self._distinct) == 1:
            return self._distinct[0].block_of(addresses)
        which = self._ends.searchsorted(addresses, side="right")
        return which.choose([planes.block_of(addresses) for planes in self._distinct])

    def layer(self, index: int) -> NDArray[np.uint8]:
        """Return all regions of one layer."""
        start, planes = self._starts[index], self.planes[index]
        return self.bytes[start : start + planes.layer_bytes]

    def plane(self, index: int, region: int) -> NDArray[np.uint8]:
        offsets = self.planes[index].offsets
        return self.layer(index)[offsets[region] : offsets[region + 1]]


def _alike(kind: CacheGeometry) -> tuple[str, ...]:
    return tuple(region.name for region in kind.regions)
