# SPDX-License-Identifier: Apache-2.0
"""The P ranks that fill a D rank, and the share of each.

A head of a part of the tokens has r replicas among the P ranks and is wanted by q D ranks. Divide a line of length q*r
once among the replicas, q to each, and once among the D ranks, r to each. The overlap of a replica and a D rank,
divided by r, is the replica's share of the head for that D rank. Shares depend on the two geometries alone, so both
engines and all ranks agree on them. They are the same whether P ranks write directly or regroup first.

Without context parallelism there is one part, all tokens. With it, every part of P that has tokens of the D rank's
part contributes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain

import msgspec

from vllm_ascend_pd.geometry import context_parallel
from vllm_ascend_pd.geometry.layout import CacheGeometry, Ranks


class Shares(msgspec.Struct, frozen=True):
    """Ranks and their weights, in rank order unless rotated. Only ranks with a weight above zero are listed."""

    ranks: tuple[int, ...]
    weights: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.weights)

    def rotated(self, step_number: int) -> Shares:
        """Return the same shares, starting with another rank, so that no rank always gets what rounding leaves over."""
        turn = step_number % len(self.ranks)
        return Shares(self.ranks[turn:] + self.ranks[:turn], self.weights[turn:] + self.weights[:turn])


@lru_cache(maxsize=4096)
def _holders(ranks: Ranks, part: int) -> tuple[tuple[int, ...], ...]:
    """Return, by head, the ranks of an engine that hold it for a part of the tokens, in rank order."""
    some = [rank for rank in range(len(ranks)) if ranks.part(rank) == part]
    heads_of = {rank: ranks.head_range(rank) for rank in some}
    return tuple(tuple(rank for rank in some if head in heads_of[rank]) for head in range(ranks.kv_heads))


def head_shares(p: CacheGeometry, d: CacheGeometry, d_rank: int, head: int, part: int = 0) -> Shares:
    """Return the shares of `head`, of a part of P's tokens, for `d_rank`. The weights add up to P's replicas."""
    return _head_shares(p.ranks, part, d.ranks, d_rank, head)


@lru_cache(maxsize=65536)
def _head_shares(p: Ranks, part: int, d: Ranks, d_rank: int, head: int) -> Shares:
    replicas = _holders(p, part)[head]
    wanting = _holders(d, d.part(d_rank))[head]
    r, q, x = len(replicas), len(wanting), wanting.index(d_rank)
    overlaps = [min((a + 1) * q, (x + 1) * r) - max(a * q, x * r) for a in range(r)]
    some = [(rank, overlap) for rank, overlap in zip(replicas, overlaps, strict=True) if overlap > 0]
    return Shares(tuple(rank for rank, _ in some), tuple(overlap for _, overlap in some))


def owner_shares(p: CacheGeometry, d: CacheGeometry, d_rank: int) -> Shares:
    """Return what each contributor brings to `d_rank` over all its heads, on a common denominator.

    This is how regroup divides the tokens. Its ranks are the contributors of both modes.
    """
    return _owner_shares(p.ranks, d.ranks, d_rank)


@lru_cache(maxsize=65536)
def _owner_shares(p: Ranks, d: Ranks, d_rank: int) -> Shares:
    by_head = [_head_shares(p, 0, d, d_rank, head) for head in d.head_range(d_rank)]
    common = math.lcm(*(shares.total for shares in by_head))
    weights: dict[int, int] = dict.fromkeys(sorted(chain.from_iterable(shares.ranks for shares in by_head)), 0)
    for shares in by_head:
        for rank, weight in zip(shares.ranks, shares.weights, strict=True):
            weights[rank] += weight * (common // shares.total)
    return Shares(tuple(weights), tuple(weights.values()))


def contributors(p: CacheGeometry, d: CacheGeometry, d_rank: int) -> tuple[int, ...]:
    """Return the P ranks (of one pipeline stage) that `d_rank` waits for."""
    return _contributors(p.ranks, p.token_split, d.ranks, d.token_split, d_rank)


@lru_cache(maxsize=65536)
def _contributors(
    p: Ranks, p_split: context_parallel.TokenSplit, d: Ranks, d_split: context_parallel.TokenSplit, d_rank: int
) -> tuple[int, ...]:
    parts = context_parallel.contributors(p_split, d_split, d.part(d_rank))
    holders = (_head_shares(p, part, d, d_rank, head).ranks for part in parts for head in d.head_range(d_rank))
    return tuple(sorted(set(chain.from_iterable(holders))))


def destinations(p: CacheGeometry, d: CacheGeometry, rank: int) -> tuple[int, ...]:
    """Return the D ranks to which P's `rank` contributes."""
    return tuple(d_rank for d_rank in range(len(d.ranks)) if rank in contributors(p, d, d_rank))
