# SPDX-License-Identifier: Apache-2.0
"""A slow, independent reference for geometry: caches as real bytes, and each rank's share worked out cell by cell.

Nothing here uses the package's arithmetic: only `CacheGeometry`'s plain numbers. A cluster's caches are filled with
known contents, plans are executed as memory copies, and D's caches are compared byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import msgspec
import numpy as np

from vllm_ascend_pd.geometry.layout import CacheGeometry, Region


def geometry(
    kind: str, *, heads: int, tp: int, block: int, cells: tuple[int, ...] = (2, 2), pad: int = 0, layers: int = 1
) -> CacheGeometry:
    """A cache of one of the supported kinds. `cells`: bytes of one (token, head) cell of each region."""
    local_heads = max(len(range_of(heads, tp, rank)) for rank in range(tp))
    regions = []
    for index, cell in enumerate(cells):
        pad += index * bool(pad)  # makes regions of equal cells differ too
        if kind == "token":
            token, head = local_heads * cell + pad, cell
            regions.append(Region(f"r{index}", block * token + pad, head, token, cell))
        elif kind == "head":
            token, head = cell, block * cell + pad
            regions.append(Region(f"r{index}", local_heads * head + pad, head, token, cell))
        else:
            plane = block * cell
            regions.append(Region(f"r{index}", local_heads * (plane + pad) + pad, plane + pad, 0, plane))
    names = tuple(f"layer.{n}" for n in range(layers))
    return CacheGeometry(block, heads, tp, "float16", "plain", tuple(regions), (names,))


def dealt(g: CacheGeometry, *, dcp: int = 1, pcp: int = 1, interleave: int = 1) -> CacheGeometry:
    """The same cache with its tokens divided among ranks."""
    return msgspec.structs.replace(g, dcp=dcp, pcp=pcp, interleave=interleave)


def covers(g: CacheGeometry) -> int:
    """Return how many tokens a block of the table stands for."""
    return g.block_size * g.dcp * g.pcp


def ranks_of(g: CacheGeometry) -> range:
    """Return all ranks: prefill context parallelism multiplies those of tensor parallelism, decode's divides them."""
    return range(g.tp_size * g.pcp)


def part_of(g: CacheGeometry, rank: int) -> int:
    pcp_rank, place = rank // g.tp_size, rank % g.tp_size
    return pcp_rank * g.dcp + place % g.dcp


def held_by(g: CacheGeometry, rank: int, end: int) -> list[int]:
    """Return the tokens before `end` that a rank holds, one by one."""
    return [t for t in range(end) if t // g.interleave % (g.dcp * g.pcp) == part_of(g, rank)]


def range_of(heads: int, tp: int, rank: int) -> list[int]:
    """Heads of a rank, by iteration: dealt in order, replicated if there are fewer heads than ranks."""
    if heads >= tp:
        return [head for head in range(heads) if rank * heads // tp <= head < (rank + 1) * heads // tp]
    return [head for head in range(heads) if head == rank * heads // tp]


def share(p: CacheGeometry, d: CacheGeometry, p_rank: int, d_rank: int, head: int) -> Fraction:
    """Return the part of `head` that p_rank sends to d_rank, counted slot by slot on q*r slots. With context
    parallelism: of the tokens that both hold."""
    replicas, wanting = (
        [
            r
            for r in ranks_of(g)
            if head in range_of(g.kv_heads, g.tp_size, r % g.tp_size) and part_of(g, r) == part_of(g, rank)
        ]
        for g, rank in ((p, p_rank), (d, d_rank))
    )
    if p_rank not in replicas or d_rank not in wanting:
        return Fraction(0)
    slots = 0
    for slot in range(len(replicas) * len(wanting)):
        if replicas[slot // len(wanting)] == p_rank and wanting[slot // len(replicas)] == d_rank:
            slots += 1
    return Fraction(slots, len(replicas))


def owner_share(p: CacheGeometry, d: CacheGeometry, p_rank: int, d_rank: int) -> Fraction:
    """Return the part of all of d_rank's tokens that p_rank owns when regrouping."""
    mine = range_of(d.kv_heads, d.tp_size, d_rank)
    return sum((share(p, d, p_rank, d_rank, head) for head in mine), Fraction(0)) / len(mine)


@dataclass
class CountedMemory:
    """One rank's memory, one flat array per region, and how often each byte was written by a plan."""

    geometry: CacheGeometry
    rank: int
    blocks: int
    seed: int = 0
    memory: list[np.ndarray] = field(default_factory=list)
    writes: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.heads = range_of(self.geometry.kv_heads, self.geometry.tp_size, self.rank % self.geometry.tp_size)
        noise = np.random.default_rng([self.seed, self.rank])
        for region in self.geometry.regions:
            self.memory.append(noise.integers(0, 256, self.blocks * region.block_stride, dtype=np.uint8))
            self.writes.append(np.zeros(self.blocks * region.block_stride, dtype=np.int16))

    def offsets(self, region: int, table: np.ndarray, base: int, head: int, lo: int, hi: int) -> np.ndarray:
        """Byte offsets of this rank's tokens in [lo, hi) of a head: shape (tokens, cell). An opaque plane is stored
        transposed. The tokens that a rank holds lie one after the other, in as many blocks as needed."""
        shape, size = self.geometry.regions[region], self.geometry.block_size
        tokens = np.array(
            [i for i, token in enumerate(held_by(self.geometry, self.rank, hi)) if token >= lo], dtype=int
        )
        start = table[tokens // size - base].astype(np.int64) * shape.block_stride
        start += self.heads.index(head) * shape.head_stride
        if shape.opaque:
            offsets = (start + tokens % size)[:, None] + np.arange(shape.cell_bytes // size) * size
        else:
            offsets = (start + tokens % size * shape.token_stride)[:, None] + np.arange(shape.cell_bytes)
        return np.asarray(offsets)


@dataclass
class PlannedRequest:
    """Tokens [first, end) of a prompt go to one D instance; contents[region] is (token, head, byte)."""

    instance: int
    first: int
    end: int
    p_blocks: np.ndarray
    d_blocks: np.ndarray
    contents: list[np.ndarray]
    done: int = 0


class PlannedCluster:
    """One P engine and several D engines, with a pool of blocks on each."""

    def __init__(
        self, p: CacheGeometry, ds: list[CacheGeometry], prompts: list[tuple[int, int, int]], seed: int
    ) -> None:
        """Allocate blocks and fill the caches. `prompts`: (instance, first, end) of each request."""
        noise = np.random.default_rng(seed)
        self.p, self.ds = p, ds
        wanted_p = [-(-end // covers(p)) for _, _, end in prompts]
        pool_p = noise.permutation(sum(wanted_p) + 1).astype(np.int32)
        pools = [0] * len(ds)
        for instance, first, end in prompts:
            pools[instance] += -(-end // covers(ds[instance])) - first // covers(ds[instance])
        free = [noise.permutation(count + 1).astype(np.int32) for count in pools]
        if seed % 3 == 0:  # fresh pool: adjacent blocks, so that spans merge
            pool_p, free = np.sort(pool_p), [np.sort(pool) for pool in free]
        elif seed % 3 == 1:  # pool that was filled backwards
            pool_p, free = np.sort(pool_p)[::-1].copy(), [np.sort(pool)[::-1].copy() for pool in free]
        self.ranks = [CountedMemory(p, rank, len(pool_p), seed + 1) for rank in ranks_of(p)]
        self.engines = [
            [CountedMemory(d, rank, pools[i] + 1, seed + 2 + i) for rank in ranks_of(d)] for i, d in enumerate(ds)
        ]
        self.before = [[[m.copy() for m in cache.memory] for cache in engine] for engine in self.engines]
        self.requests = []
        for (instance, first, end), count in zip(prompts, wanted_p, strict=True):
            d = ds[instance]
            mine, pool_p = pool_p[:count], pool_p[count:]
            theirs = -(-end // covers(d)) - first // covers(d)
            table, free[instance] = free[instance][:theirs], free[instance][theirs:]
            cells = [r.cell_bytes // (p.block_size if r.opaque else 1) for r in p.regions]
            contents = [noise.integers(0, 256, (end, p.kv_heads, cell), dtype=np.uint8) for cell in cells]
            self.requests.append(PlannedRequest(instance, first, end, mine, table, contents))

    def compute(self, request: PlannedRequest, after: int) -> None:
        """P computes a request's tokens up to `after`, on every rank that holds the head."""
        for cache in self.ranks:
            tokens = [token for token in held_by(self.p, cache.rank, after) if token >= request.done]
            for head in cache.heads:
                for region, contents in enumerate(request.contents):
                    offsets = cache.offsets(region, request.p_blocks, 0, head, request.done, after)
                    cache.memory[region][offsets] = contents[tokens, head]
        request.done = after

    def write(self, instance: int, d_rank: int, region: int, source: np.ndarray, src: int, dst: int, size: int) -> None:
        """Execute one write as the wire would; outside the memory it is an error, not a clipped slice."""
        cache = self.engines[instance][d_rank]
        target = cache.memory[region]
        if not (0 <= src <= src + size <= len(source) and 0 <= dst <= dst + size <= len(target) and size > 0):
            raise AssertionError(f"write of {size} bytes from {src} to {dst} lies outside the memory")
        target[dst : dst + size] = source[src : src + size]
        cache.writes[region][dst : dst + size] += 1

    def check(self) -> None:
        """Check that each wanted byte was written exactly once and is right, and that nothing else was written."""
        for instance, engine in enumerate(self.engines):
            for cache in engine:
                self._check(
                    cache, self.before[instance][cache.rank], [r for r in self.requests if r.instance == instance]
                )

    def _check(self, cache: CountedMemory, before: list[np.ndarray], requests: list[PlannedRequest]) -> None:
        size = cache.geometry.block_size
        for region, shape in enumerate(cache.geometry.regions):
            wanted = np.zeros(len(cache.memory[region]), dtype=np.int16)
            exact = np.zeros(len(wanted), dtype=bool)
            expected = before[region].copy()
            for request in requests:
                base = request.first // covers(cache.geometry)
                tokens = [token for token in held_by(cache.geometry, cache.rank, request.end) if token >= request.first]
                for head in cache.heads:
                    offsets = cache.offsets(region, request.d_blocks, base, head, request.first, request.end)
                    expected[offsets] = request.contents[region][tokens, head]
                    exact[offsets] = True
                    if shape.opaque:  # a plane is written whole, including what lies behind the last token
                        offsets = cache.offsets(
                            region,
                            request.d_blocks,
                            base,
                            head,
                            base * size,
                            len(request.d_blocks) * size + base * size,
                        )
                    wanted[offsets] += 1
            assert wanted.max(initial=0) <= 1
            np.testing.assert_array_equal(cache.writes[region], wanted)
            compared = exact | (wanted == 0)
            np.testing.assert_array_equal(cache.memory[region][compared], expected[compared])
