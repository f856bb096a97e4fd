# SPDX-License-Identifier: Apache-2.0
"""Which P ranks fill which D rank, and with what share.

A head has r replicas among the P ranks and is wanted by q D ranks. Laid side by side on a stretch of length
q*r, each replica covers q and each D rank r of it; the overlap of the two, over r, is the replica's share of the
head for that D rank. Shares depend on the two geometries alone, so both engines and all ranks agree on them,
and they are the same whether P ranks write directly or regroup first.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain

import msgspec

from vllm_ascend_pd.geometry.layout import CacheGeometry


class Shares(msgspec.Struct, frozen=True):
    """Ranks and their weights, in rank order. Only ranks with a weight above zero are listed."""

    ranks: tuple[int, ...]
    weights: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.weights)

    def rotated(self, rotation: int) -> Shares:
        """The same shares, starting with another rank, so that no rank always gets what rounding leaves over."""
        turn = rotation % len(self.ranks)
        return Shares(self.ranks[turn:] + self.ranks[:turn], self.weights[turn:] + self.weights[:turn])


@lru_cache(maxsize=256)
def _holders(kv_heads: int, tp_size: int) -> tuple[tuple[int, ...], ...]:
    held = CacheGeometry(1, kv_heads, tp_size, "", "", (), ())
    ranks = [held.head_range(rank) for rank in range(tp_size)]
    return tuple(tuple(r for r in range(tp_size) if head in ranks[r]) for head in range(kv_heads))


def holders(geometry: CacheGeometry, head: int) -> tuple[int, ...]:
    """The ranks of this engine that hold `head`, in rank order."""
    return _holders(geometry.kv_heads, geometry.tp_size)[head]


def head_shares(p: CacheGeometry, d: CacheGeometry, d_rank: int, head: int) -> Shares:
    """Who provides `head` to `d_rank`. The weights add up to the number of replicas on P."""
    return _head_shares(p.kv_heads, p.tp_size, d.tp_size, d_rank, head)


@lru_cache(maxsize=65536)
def _head_shares(kv_heads: int, p_tp: int, d_tp: int, d_rank: int, head: int) -> Shares:
    replicas = _holders(kv_heads, p_tp)[head]
    wanting = _holders(kv_heads, d_tp)[head]
    r, q, x = len(replicas), len(wanting), wanting.index(d_rank)
    overlaps = [min((a + 1) * q, (x + 1) * r) - max(a * q, x * r) for a in range(r)]
    some = [(rank, overlap) for rank, overlap in zip(replicas, overlaps, strict=True) if overlap > 0]
    return Shares(tuple(rank for rank, _ in some), tuple(overlap for _, overlap in some))


def owner_shares(p: CacheGeometry, d: CacheGeometry, d_rank: int) -> Shares:
    """What each contributor brings to `d_rank` over all its heads, on a common denominator.

    This is how regroup divides the tokens. Its ranks are the contributors of both modes.
    """
    return _owner_shares(p.kv_heads, p.tp_size, d.tp_size, d_rank)


@lru_cache(maxsize=65536)
def _owner_shares(kv_heads: int, p_tp: int, d_tp: int, d_rank: int) -> Shares:
    held = CacheGeometry(1, kv_heads, d_tp, "", "", (), ()).head_range(d_rank)
    by_head = [_head_shares(kv_heads, p_tp, d_tp, d_rank, head) for head in held]
    common = math.lcm(*(shares.total for shares in by_head))
    weights: dict[int, int] = dict.fromkeys(sorted(chain.from_iterable(shares.ranks for shares in by_head)), 0)
    for shares in by_head:
        for rank, weight in zip(shares.ranks, shares.weights, strict=True):
            weights[rank] += weight * (common // shares.total)
    return Shares(tuple(weights), tuple(weights.values()))


def contributors(p: CacheGeometry, d: CacheGeometry, d_rank: int) -> tuple[int, ...]:
    """The P ranks (of one pipeline stage) that `d_rank` waits for."""
    return owner_shares(p, d, d_rank).ranks


def destinations(p: CacheGeometry, d: CacheGeometry, rank: int) -> tuple[int, ...]:
    """The D ranks to which P's `rank` contributes."""
    return tuple(d_rank for d_rank in range(d.tp_size) if rank in contributors(p, d, d_rank))
