# SPDX-License-Identifier: Apache-2.0
"""Lanes of an exchange: for a D rank, the heads that P ranks send to the ranks that own its tokens."""

from __future__ import annotations

import msgspec

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.shard import Shares, head_shares, owner_shares


class Lane(msgspec.Struct, frozen=True):
    """One D rank of a layout: the P ranks that own its tokens, and the heads that each owner gets from each sender."""

    d_rank: int
    d_heads: range  # heads of the D rank
    owners: Shares
    feeds: dict[int, dict[int, range]]  # owner -> sender -> heads


def lane_of(p: CacheGeometry, d: CacheGeometry, d_rank: int) -> Lane:
    """Return the lane of a D rank. It depends on the two geometries alone, so it is the same on every rank."""
    d_heads = d.head_range(d_rank)
    owners = owner_shares(p, d, d_rank)
    feeds = {}
    for owner in owners.ranks:
        heads: dict[int, list[int]] = {}
        for head in d_heads:
            heads.setdefault(_sender(p, d, d_rank, owner, head), []).append(head)
        feeds[owner] = {sender: range(some[0], some[-1] + 1) for sender, some in heads.items()}
    return Lane(d_rank, d_heads, owners, feeds)


def _sender(p: CacheGeometry, d: CacheGeometry, d_rank: int, owner: int, head: int) -> int:
    """Return the rank that sends `head` to `owner`: the owner itself if it holds the head.

    If several ranks hold the head, the owners are spread over them in order, so that each sends about as much.
    """
    first = max(p.head_range(owner).start, d.head_range(d_rank).start)
    peers = head_shares(p, d, d_rank, first).ranks
    offering = head_shares(p, d, d_rank, head).ranks
    return offering[peers.index(owner) * len(offering) // len(peers)]
