# SPDX-License-Identifier: Apache-2.0
"""Which layers of P go into which of D's, kind by kind, and which ranks that makes meet. Layers of unlike groups are of unlike kinds.

Plans, shares and exchanges are made for one kind on either side. What is here puts them together for a whole cache.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from vllm_ascend_pd.geometry import shard
from vllm_ascend_pd.geometry.layout import CacheGeometry


class Pairing(msgspec.Struct, frozen=True):
    """Layers that are of one kind on P, and of one kind on D."""

    kind: int  # P's
    p: CacheGeometry
    d: CacheGeometry
    layers: frozenset[str]


def pushed(p: CacheGeometry, d: CacheGeometry) -> frozenset[str]:
    """The layers that P pushes into D: those of the model, and those of a draft model that both have. With another draft model,
    or none, on one of the two the drafts begin without a cache of the prompt."""
    return frozenset(p.layers).intersection(d.layers)


@lru_cache(maxsize=256)
def pairings(p: CacheGeometry, d: CacheGeometry) -> tuple[Pairing, ...]:
    """In the order of P's layers: the same on every rank."""
    if not (p.others or d.others):
        return (Pairing(0, p, d, pushed(p, d)),)
    ours, theirs = ({name: i for i, kind in enumerate(side.kinds) for name in kind.layers} for side in (p, d))
    found: dict[tuple[int, int], list[str]] = {}
    for name in p.layers:
        if name in theirs:
            found.setdefault((ours[name], theirs[name]), []).append(name)
    return tuple(Pairing(a, p.kinds[a], d.kinds[b], frozenset(names)) for (a, b), names in found.items())


def between(p: CacheGeometry, d: CacheGeometry, stage: int, d_stage: int) -> tuple[Pairing, ...]:
    """Of which kinds a stage of P has layers for a stage of D."""
    both = frozenset(p.stages[stage]).intersection(d.stages[d_stage])
    return tuple(pair for pair in pairings(p, d) if not both.isdisjoint(pair.layers))


@lru_cache(maxsize=1024)
def contributors(p: CacheGeometry, d: CacheGeometry, worker: int) -> tuple[tuple[int, int], ...]:
    """The workers of P, by stage and rank, that D's `worker` waits for: of every stage of P with a layer for its stage, and of
    every kind of layer among those. One that would receive nothing still hears of the transfer: from P's leader."""
    d_stage, d_rank = d.place_of(worker)
    found = {
        (stage, rank)
        for stage in range(len(p.stages))
        for pair in between(p, d, stage, d_stage)
        for rank in shard.contributors(pair.p, pair.d, d_rank)
    }
    return tuple(sorted(found)) or ((0, 0),)


@lru_cache(maxsize=1024)
def destinations(p: CacheGeometry, d: CacheGeometry, stage: int, rank: int) -> tuple[int, ...]:
    """The workers of D that wait for this one of P."""
    return tuple(worker for worker in range(d.workers) if (stage, rank) in contributors(p, d, worker))


def exchanged(p: CacheGeometry, d: CacheGeometry) -> tuple[Pairing, ...]:
    """The layers of which P ranks have something to give each other: where every rank holds all, nobody has. None if layers that
    P exchanges together are unlike on D."""
    found = tuple(
        pair for pair in pairings(p, d) if not pair.p.own.stateful
    )  # a head's state lies together: it gains nothing
    if len(found) == 1:
        return found
    if len({pair.kind for pair in found}) < len(found):
        return ()
    return tuple(pair for pair in found if pair.p.kv_heads > 1)
