# SPDX-License-Identifier: Apache-2.0
"""Who hands which heads to whom when P ranks regroup for a D rank."""

from __future__ import annotations

import msgspec

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.shard import Shares, head_shares, owner_shares


class Lane(msgspec.Struct, frozen=True):
    """One D rank of a layout: who owns its tokens, and which heads each owner gets from whom."""

    d_rank: int
    held: range  # heads of the D rank
    owners: Shares
    feeds: dict[int, dict[int, range]]  # owner -> source -> heads


def lane_of(p: CacheGeometry, d: CacheGeometry, d_rank: int) -> Lane:
    """The same on every rank: a function of the two geometries."""
    held = d.head_range(d_rank)
    owners = owner_shares(p, d, d_rank)
    feeds = {}
    for owner in owners.ranks:
        heads: dict[int, list[int]] = {}
        for head in held:
            heads.setdefault(_source(p, d, d_rank, owner, head), []).append(head)
        feeds[owner] = {source: range(some[0], some[-1] + 1) for source, some in heads.items()}
    return Lane(d_rank, held, owners, feeds)


def _source(p: CacheGeometry, d: CacheGeometry, d_rank: int, owner: int, head: int) -> int:
    """Who hands `head` to `owner`: the replica at the owner's own place among replicas, so that all replicas send alike.

    For a head that the owner holds that is the owner itself.
    """
    own = max(p.head_range(owner).start, d.head_range(d_rank).start)
    peers = head_shares(p, d, d_rank, own).ranks
    offering = head_shares(p, d, d_rank, head).ranks
    return offering[peers.index(owner) * len(offering) // len(peers)]
