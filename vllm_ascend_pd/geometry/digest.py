# SPDX-License-Identifier: Apache-2.0
"""End-to-end checksums of one layer (`verify: full`): sums over atoms, independent of sender and order.

An atom is one cell of a region at an absolute token position, or one opaque plane at a D block index, for one head of
the model. Its hash mixes its bytes with that place, so equal bytes in a wrong place count as a difference. Sums of
disjoint parts add up modulo 2^64: the contributors' sums together must equal D's own sum over all that it wants.
The sums detect accidents, not attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.context_parallel import TokenSplit
from vllm_ascend_pd.geometry.images import starts, token_outer
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.geometry.plan import Job
from vllm_ascend_pd.geometry.regroup import Slot, slot_segments

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
RegionView = Callable[[int], Bytes]

MASK = (1 << 64) - 1
_AT_ONCE = 4 << 20  # bytes copied at a time


def cache_digest(
    memory: RegionView,
    geometry: CacheGeometry,
    rank: int,
    heads: range,
    tokens: range,
    blocks: npt.NDArray[np.int32],
    first_block: int = 0,
    peer: tuple[TokenSplit, int] | None = None,
) -> tuple[int, ...]:
    """Return the sums over `heads` x `tokens` in this rank's cache, by region.

    `memory(region)` is a flat view from the region's base; `blocks[0]` holds block index `first_block` of the prompt. P
    passes a delivery of its plan and its table from token 0; D its own heads, the tokens that it wants, and the
    reservation's table with that table's first block. With `peer`, which is the peer's division of tokens and the index
    of one part, only the tokens of that part count.
    """
    size, split, part = geometry.block_size, geometry.token_split, geometry.ranks.part(rank)
    index = np.arange(tokens.start // split.covers, -(-tokens.stop // split.covers), dtype=np.int64)
    ids = blocks[index[0] - first_block : index[-1] + 1 - first_block] if len(index) else blocks[:0]
    if len(ids) != len(index):
        raise LocalProtocolError(f"{len(blocks)} blocks do not cover tokens {tokens}")
    local = heads.start - geometry.head_range(rank).start
    totals = []
    for number, region in enumerate(geometry.regions):
        total = 0
        view = _cells(memory(number), region, ids, size, local, len(heads))
        step = max(1, _AT_ONCE // max(1, view[:1].nbytes))
        for at in range(0, len(ids), step):
            some = index[at : at + step]
            cells = view[ids[at : at + step]]
            atoms_at = some[:, None] if region.opaque else split.tokens(part, some)
            wanted = np.ones_like(atoms_at, dtype=bool)
            if not region.opaque:
                wanted = (atoms_at >= tokens.start) & (atoms_at < tokens.stop)
                if peer is not None:
                    wanted &= peer[0].holder(atoms_at) == peer[1]
            total += _sum(cells, number, atoms_at, np.arange(heads.start, heads.stop), wanted)
        totals.append(total & MASK)
    return tuple(totals)


def slot_digest(slot: Slot, d: CacheGeometry, jobs: Sequence[Job], staged: Bytes) -> dict[int, tuple[int, ...]]:
    """Return the sums over what an owner has staged in a slot, by job index."""
    d_heads = d.head_range(slot.d_rank)
    members, segments = slot_segments(slot, jobs)
    zero = np.zeros(len(members), dtype=np.int64)
    begin, _ = starts(d, segments, len(d_heads), zero, zero[:1])
    heads = np.arange(d_heads.start, d_heads.stop)
    sums = {}
    for index, member in enumerate(members):
        lo, hi = int(segments.lo[index]), int(segments.hi[index])
        totals = []
        for number, region in enumerate(d.regions):
            total = 0
            at = int(begin[number][index])
            for place, count in _image_runs(region, lo, hi, d.block_size, len(d_heads)):
                length = count * len(d_heads) * region.cell_bytes
                cells = staged[at : at + length].reshape(_image_shape(region, count, len(d_heads)))
                at += length
                if not region.opaque and token_outer(region, len(d_heads)):
                    cells = cells.swapaxes(0, 1)
                atoms_at = np.arange(place, place + count)[None, :]
                total += _sum(cells[None], number, atoms_at, heads, np.ones_like(atoms_at, dtype=bool))
            totals.append(total & MASK)
        sums[member] = tuple(totals)
    return sums


def _image_runs(region: Region, lo: int, hi: int, size: int, heads: int) -> list[tuple[int, int]]:
    """Return first atom and number of atoms per head for each image of [lo, hi)."""
    if region.opaque:
        return [(block, 1) for block in range(lo // size, -(-hi // size))]
    if token_outer(region, heads):
        return [(lo, hi - lo)]
    borders = [lo, *range((lo // size + 1) * size, hi, size), hi]
    return [(a, b - a) for a, b in pairwise(borders)]


def _image_shape(region: Region, count: int, heads: int) -> tuple[int, int, int]:
    if not region.opaque and token_outer(region, heads):
        return count, heads, region.cell_bytes
    return heads, count, region.cell_bytes


def _cells(flat: Bytes, region: Region, ids: npt.NDArray[np.int32], size: int, head: int, heads: int) -> Bytes:
    """Return the region as [block, head, token, byte], checked against the memory's length."""
    tokens = 1 if region.opaque else size
    base = head * region.head_stride
    blocks = int(ids.max()) + 1 if len(ids) else 0
    last = (blocks - 1) * region.block_stride + (heads - 1) * region.head_stride + (tokens - 1) * region.token_stride
    if len(ids) and (int(ids.min()) < 0 or base + last + region.cell_bytes > len(flat)):
        raise LocalProtocolError(f"block {blocks - 1} of {region.name} lies outside {len(flat)} bytes")
    return np.lib.stride_tricks.as_strided(
        flat[base:],
        (blocks, heads, tokens, region.cell_bytes),
        (region.block_stride, region.head_stride, region.token_stride, 1),
        writeable=False,
    )


def _sum(
    cells: Bytes,
    region: int,
    atoms_at: npt.NDArray[np.int64],
    heads: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.bool_],
) -> int:
    """Return the sum over the wanted cells [block, head, atom, byte], which are at `atoms_at` [block, atom]."""
    length = cells.shape[-1]
    short = -length % 8
    if short:
        cells = np.concatenate((cells, np.zeros((*cells.shape[:-1], short), dtype=np.uint8)), axis=-1)
    words = np.ascontiguousarray(cells).view(np.uint64)
    hashed: Words = words @ _factors(words.shape[-1])
    key = _mixed(atoms_at.astype(np.uint64) * np.uint64(2) + np.uint64(1))[:, None, :]
    key = _mixed(key + (heads.astype(np.uint64) << np.uint64(16))[None, :, None] + np.uint64(region + 1))
    atoms = _mixed(_mixed(hashed) ^ key)
    atoms *= wanted[:, None, :]
    return int(np.sum(atoms, dtype=np.uint64))


@lru_cache(maxsize=64)
def _factors(count: int) -> Words:
    """Return odd factors for the words of an atom."""
    factors: Words = _mixed(np.arange(1, count + 1, dtype=np.uint64)) | np.uint64(1)
    return factors


def _mixed(x: Words) -> Words:
    """Map 64-bit words one to one so that every input bit affects every output bit (splitmix64)."""
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = x ^ (x >> np.uint64(31))
    return mixed
