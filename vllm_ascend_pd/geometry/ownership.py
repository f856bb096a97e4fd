# SPDX-License-Identifier: Apache-2.0
"""Lines, stretches, cuts and granules: how P ranks divide the tokens of a step among them.

The jobs of a step that go to equal layouts lie end to end on one line of T tokens, one stretch per D block. The line
is cut in the ratio of the ranks' weights; a cut inside a stretch moves to the nearest multiple of the granule and never
leaves its stretch. Each rank owns what lies between two neighbouring cuts, so it owns at most one contiguous token
range of each job.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.shard import Shares

Ints = npt.NDArray[np.int64]

GRANULE_BYTES = 32 << 10


def max_heads(geometry: CacheGeometry) -> int:
    """Return the number of heads on the rank that holds most."""
    return -(-geometry.kv_heads // geometry.tp_size)


def granule(d: CacheGeometry) -> int:
    """Return the smallest run of tokens that is worth a write of its own on D's side."""
    if d.ranks.world > 1:  # a cut inside a block would cut the part of every rank
        return d.covers
    one_head = max_heads(d) == 1
    if any(region.opaque or not (one_head or region.token_stride > region.head_stride) for region in d.regions):
        return d.block_size
    size = d.block_size
    narrowest = min(region.token_stride for region in d.regions)
    while size % 2 == 0 and size // 2 * narrowest >= GRANULE_BYTES:
        size //= 2
    return size


class TokenLine:
    """Token ranges [lo, hi) of a step's jobs, end to end, and its cuts."""

    def __init__(self, lo: Ints, hi: Ints, block_size: int, granule_tokens: int) -> None:
        self.lo = lo
        self.hi = hi
        self._block = block_size
        self._granule = granule_tokens
        self._ends = np.cumsum(hi - lo)
        self.tokens = int(self._ends[-1]) if len(lo) else 0

    def cuts(self, shares: Shares) -> Ints:
        """Return where each rank's interval begins, in the order of `shares`, and the end of the line."""
        borders = np.zeros(len(shares.ranks) + 1, dtype=np.int64)
        np.cumsum(shares.weights, out=borders[1:])
        borders *= self.tokens
        borders //= shares.total
        inner = borders[1:-1]
        if len(inner) and self.tokens:
            inner[:] = self._rounded(inner)
        return borders

    def _rounded(self, borders: Ints) -> Ints:
        job = np.minimum(np.searchsorted(self._ends, borders, side="right"), len(self.lo) - 1)
        line_to_token = self.hi[job] - self._ends[job]
        token = borders + line_to_token
        block_start = token // self._block * self._block
        nearest = (token + self._granule // 2) // self._granule * self._granule
        low = np.maximum(block_start, self.lo[job])
        high = np.minimum(block_start + self._block, self.hi[job])
        clamped: Ints = np.clip(nearest, low, high) - line_to_token
        # A place at the very end of the line belongs to no stretch.
        return np.where(borders >= self.tokens, self.tokens, clamped)

    def owned(self, shares: Shares, rank: int) -> tuple[Ints, Ints]:
        """Return the token range of each job that `rank` owns; empty where lower and upper bound are equal."""
        index = shares.ranks.index(rank)
        if len(shares.ranks) == 1:
            return self.lo, self.hi
        cuts = self.cuts(shares)
        return self.between(int(cuts[index]), int(cuts[index + 1]))

    def between(self, begin: int, end: int) -> tuple[Ints, Ints]:
        """Return the token range of each job that lies between two places of the line."""
        line_to_token = self.hi - self._ends
        return (
            np.clip(begin + line_to_token, self.lo, self.hi),
            np.clip(end + line_to_token, self.lo, self.hi),
        )

    def blocks_before(self, borders: Ints) -> Ints:
        """Return the number of stretches before each of the places, which must be borders of stretches."""
        stretches = np.where(self.hi > self.lo, -(-self.hi // self._block) - self.lo // self._block, 0)
        job = np.minimum(np.searchsorted(self._ends, borders, side="right"), len(self.lo) - 1)
        token = borders + self.hi[job] - self._ends[job]
        inside = np.minimum(-(-token // self._block) - self.lo[job] // self._block, stretches[job])
        before: Ints = np.cumsum(stretches)[job] - stretches[job] + inside
        return before
