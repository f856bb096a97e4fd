# SPDX-License-Identifier: Apache-2.0
"""Turn claims into batches: choose the claims that are written together, and compute the absolute spans of each.

One batch holds everything that goes to one D rank for one layer; neighbouring layers that are ready together share one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.coalesce import Spans
from vllm_ascend_pd.prefill.worker.core.push import Push, SlotShare, Unit
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.messages import Memory
from vllm_ascend_pd.protocol.push import Claim

Bases = tuple[tuple[int, ...], ...]  # by layer, by region


@dataclass(frozen=True, slots=True)
class Triples:
    """Absolute source and destination addresses and sizes."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    size: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Batch:
    """Claims of one destination, written together."""

    peer: Endpoint
    session: str
    claims: list[Claim]
    transfers: list[str]
    src: list[int]
    dst: list[int]
    size: list[int]
    direct: int = 0  # bytes of it that no exchange has brought, on an engine that makes some
    handle: int = 0
    submitted_at: float = 0.0

    def facts(self) -> Mapping[str, Any]:
        """Facts for the trace."""
        units = [unit_of(claim) for claim in self.claims]
        return {
            "peer": str(self.peer),
            "layers": sorted({unit.layer for unit in units}),
            "steps": sorted({unit.step for unit in units}),
            "bytes": sum(self.size),
            "descriptors": len(self.src),
            "transfers": self.transfers,
        }


def unit_of(claim: Claim) -> Unit:
    """Return the claim's unit, which the protocol's machine hands back as it received it."""
    if not isinstance(claim.unit, Unit):
        raise TypeError(f"{claim.unit!r} is not a unit of this runtime")
    return claim.unit


def grouped(
    claims: list[Claim], pushes: Mapping[str, Push], fuse: int, session_of: Callable[[Push, Claim], str | None]
) -> list[tuple[Endpoint, list[Claim]]]:
    """Group claims by destination and session, in layer order, up to `fuse` units in a group.

    A D rank that has revoked access has a new session. Claims that were made under the old session stay with it:
    through the new one their writes would land.
    """
    by_session: dict[tuple[Endpoint, str | None], list[Claim]] = {}
    for claim in claims:
        push = pushes[claim.push]
        by_session.setdefault((push.endpoint(claim.d_rank), session_of(push, claim)), []).append(claim)
    groups: list[tuple[Endpoint, list[Claim]]] = []
    for (peer, _), mine in by_session.items():
        by_unit: dict[Unit, list[Claim]] = {}
        for claim in sorted(mine, key=unit_of):
            by_unit.setdefault(unit_of(claim), []).append(claim)
        units = list(by_unit.values())
        fused = (units[start : start + fuse] for start in range(0, len(units), fuse))
        groups.extend((peer, [claim for unit in some for claim in unit]) for some in fused)
    return groups


def memory_of(push: Push, claim: Claim) -> Memory:
    """Return the addresses of D's layers, as READY gave them."""
    theirs = push.pairs[claim.d_rank].addresses
    if theirs is None:
        raise PdError("PD-CTRL-002", why="READY brought no addresses")
    return theirs


def spans_of(push: Push, claim: Claim, bases: Bases, theirs: Memory) -> list[Triples]:
    """Return the absolute spans of a claim, by component: from the cache, or from a staging slot."""
    unit = unit_of(claim)
    if unit.sub_step:
        slot_share = staged(push, claim)
        return aimed(slot_share.writes, [slot_share.slot.address] * len(slot_share.writes), push, unit, theirs)
    plan = push.plan(unit.step, unit.layer)
    if plan is None:
        raise PdError("PD-XFER-002", why="the step was forgotten")
    return aimed(plan.by_rank[push.rank_of(claim.d_rank)], bases[unit.layer], push, unit, theirs)


def staged(push: Push, claim: Claim) -> SlotShare:
    slot_share = push.slot_shares.get((claim.d_rank, unit_of(claim)))
    if slot_share is None:
        raise PdError("PD-XFER-002", why="what was staged is gone")
    return slot_share


def aimed(spans: Sequence[Spans], sources: Sequence[int], push: Push, unit: Unit, theirs: Memory) -> list[Triples]:
    """Add the base addresses to spans. Raise PD-WIRE-003 if one leaves D's layer: the last check before bytes move."""
    kind = push.d_kind(unit.layer)
    blocks, bases = theirs.blocks[kind.group_index], theirs.bases[push.d_position[unit.layer][1]]
    parts: list[Triples] = []
    for part, region, src, dst in zip(spans, kind.regions, sources, bases, strict=True):
        if not len(part.dst):
            continue
        end = region.block_stride * blocks
        if part.dst.min() < 0 or (part.dst + part.size).max() > end:
            bad = int(np.argmax((part.dst < 0) | (part.dst + part.size > end)))
            raise PdError("PD-WIRE-003", length=int(part.size[bad]), address=int(part.dst[bad]) + dst, side="D's layer")
        parts.append(Triples(part.src + src, part.dst + dst, part.size))
    return parts


def joined(parts: list[Triples]) -> Triples:
    if len(parts) == 1:
        return parts[0]
    return Triples(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("src", "dst", "size")))
