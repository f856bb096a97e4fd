# SPDX-License-Identifier: Apache-2.0
"""Pairing of P's layers with D's, kind by kind, and the workers that write to each other because of it.

Plans, shares and exchanges are made for one kind on either side. This module combines them for a whole cache. Layers
of different groups are of different kinds.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from vllm_ascend_pd.geometry import shard
from vllm_ascend_pd.geometry.layout import CacheGeometry


class Pairing(msgspec.Struct, frozen=True):
    """Layers that are of one kind on P and of one kind on D."""

    kind: int  # index of P's kind
    p: CacheGeometry
    d: CacheGeometry
    layers: frozenset[str]


def pushed(p: CacheGeometry, d: CacheGeometry) -> frozenset[str]:
    """Return the layers that P pushes into D: those that both have.

    If only one side has a draft model, its layers are not pushed, and drafting begins without a cache of the prompt.
    """
    return frozenset(p.layers).intersection(d.layers)


@lru_cache(maxsize=256)
def pairings(p: CacheGeometry, d: CacheGeometry) -> tuple[Pairing, ...]:
    """Return all pairings, in the order of P's layers: the same on every rank."""
    if not (p.others or d.others):
        return (Pairing(0, p, d, pushed(p, d)),)
    ours, theirs = (dict(zip(side.layers, side.kind_indices, strict=True)) for side in (p, d))
    by_kinds: dict[tuple[int, int], list[str]] = {}
    for name in p.layers:
        if name in theirs:
            by_kinds.setdefault((ours[name], theirs[name]), []).append(name)
    return tuple(Pairing(a, p.kinds[a], d.kinds[b], frozenset(names)) for (a, b), names in by_kinds.items())


def between(p: CacheGeometry, d: CacheGeometry, stage: int, d_stage: int) -> tuple[Pairing, ...]:
    """Return the pairings of which a stage of P has layers for a stage of D."""
    both = frozenset(p.stages[stage]).intersection(d.stages[d_stage])
    return tuple(pair for pair in pairings(p, d) if not both.isdisjoint(pair.layers))


@lru_cache(maxsize=1024)
def contributors(p: CacheGeometry, d: CacheGeometry, worker: int) -> tuple[tuple[int, int], ...]:
    """Return the workers of P, by stage and rank, that D's `worker` waits for.

    They are of every stage of P with a layer for the worker's stage, and of every kind among those layers. A worker
    that would receive nothing waits for P's leader, (0, 0), so that it learns of the transfer.
    """
    d_stage, d_rank = d.stage_and_rank(worker)
    ranks = {
        (stage, rank)
        for stage in range(len(p.stages))
        for pair in between(p, d, stage, d_stage)
        for rank in shard.contributors(pair.p, pair.d, d_rank)
    }
    return tuple(sorted(ranks)) or ((0, 0),)


@lru_cache(maxsize=1024)
def destinations(p: CacheGeometry, d: CacheGeometry, stage: int, rank: int) -> tuple[int, ...]:
    """Return the workers of D that wait for this worker of P."""
    return tuple(worker for worker in range(d.workers) if (stage, rank) in contributors(p, d, worker))


def no_exchange_reason(p: CacheGeometry, d: CacheGeometry) -> str:
    """Return why ranks of P or D do not each hold some heads of all tokens; "" if they do."""
    return "the tokens are divided among ranks" if max(p.ranks.world, d.ranks.world) > 1 else ""


def exchanged(p: CacheGeometry, d: CacheGeometry) -> tuple[Pairing, ...]:
    """Return the pairings whose layers P ranks can exchange with each other.

    An exchange moves heads between ranks that hold all tokens of their heads. There is none in other engines, nor if
    layers of one kind on P are of several kinds on D. Of several pairings, those with one head are left out: every
    rank has that head.
    """
    if no_exchange_reason(p, d):
        return ()
    pairs = tuple(
        pair for pair in pairings(p, d) if not pair.p.group.stateful
    )  # a head's state is contiguous already: an exchange gains nothing
    if len(pairs) == 1:
        return pairs
    if len({pair.kind for pair in pairs}) < len(pairs):
        return ()
    return tuple(pair for pair in pairs if pair.p.kv_heads > 1)
