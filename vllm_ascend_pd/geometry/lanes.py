# SPDX-License-Identifier: Apache-2.0
"""The heads that P ranks send to each other when they regroup for a D rank."""

from __future__ import annotations

import msgspec

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.shard import Shares, head_shares, owner_shares


class Lane(msgspec.Struct, frozen=True):
    """One D rank of a layout: the P ranks that own its tokens, and the heads that each owner gets from each source."""

    d_rank: int
    held: range  # heads of the D rank
    owners: Shares
    feeds: dict[int, dict[int, range]]  # owner -> source -> heads


def lane_of(p: CacheGeometry, d: CacheGeometry, d_rank: int) -> Lane:
    """Return the lane of a D rank. It depends on the two geometries alone, so it is the same on every rank."""
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
    """Return the rank that sends `head` to `owner`: the owner itself if it holds the head.

    Of several replicas it is the one at the place that the owner has among its own replicas, so that all send alike.
    """
    own = max(p.head_range(owner).start, d.head_range(d_rank).start)
    peers = head_shares(p, d, d_rank, own).ranks
    offering = head_shares(p, d, d_rank, head).ranks
    return offering[peers.index(owner) * len(offering) // len(peers)]
