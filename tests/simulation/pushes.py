# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank knows of a push: its blocks, the plans of its steps, and the addresses that a claim means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, JobPlan
from vllm_ascend_pd.prefill.decisions import PushSlice, PushStart
from vllm_ascend_pd.protocol.messages import LayerAddresses, Reservation
from vllm_ascend_pd.protocol.push import Claim

Bases = tuple[tuple[int, ...], ...]


class Unit(NamedTuple):
    """One layer (own index) of one step."""

    step: int
    layer: int


class Span(NamedTuple):
    """Absolute addresses and sizes of one claim."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    size: NDArray[np.int64]


@dataclass(slots=True)
class Pushing:
    push: str
    reservation: Reservation
    serial: int
    layers: tuple[int, ...]  # own layer -> index in D's list
    ranks: tuple[int, ...]  # D ranks that this rank writes to
    blocks: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    plans: dict[int, JobPlan] = field(default_factory=dict)

    @classmethod
    def of(cls, start: PushStart, own: tuple[str, ...], ranks: tuple[int, ...], serial: int) -> Pushing:
        names = start.reservation.geometry.layers
        layers = tuple(names.index(name) for name in own) if ranks else ()
        return cls(start.push, start.reservation, serial, layers, ranks)

    def extend(self, piece: PushSlice) -> None:
        if piece.restart:
            self.forget()
        self.blocks = np.concatenate((self.blocks, piece.new_blocks))

    def forget(self) -> None:
        """The blocks are lost, and what was planned with them."""
        self.blocks = np.empty(0, dtype=np.int32)
        self.plans.clear()

    def job(self, lo: int, hi: int) -> Job:
        r = self.reservation
        d_blocks = np.frombuffer(r.blocks, dtype="<i4")
        return Job(d=r.geometry, first=r.first, lo=lo, hi=hi, p_blocks=self.blocks, d_blocks=d_blocks)

    def spans(self, claim: Claim, own: Bases, theirs: LayerAddresses) -> Span | None:
        """None if the step's plan is forgotten."""
        step, layer = claim.unit if isinstance(claim.unit, Unit) else (-1, -1)
        plan = self.plans.get(step)
        if plan is None:
            return None
        bases = zip(plan.by_rank[claim.d_rank], own[layer], theirs.bases[self.layers[layer]], strict=True)
        parts = [(spans.src + src, spans.dst + dst, spans.size) for spans, src, dst in bases]
        return (
            Span(*parts[0])
            if len(parts) == 1
            else Span(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        )


def grouped(claims: list[Claim], fuse: int, peer_of: dict[str, Pushing]) -> list[list[Claim]]:
    """Claims of one destination and neighbouring layers go together, as the pusher does it."""
    by_peer: dict[object, list[Claim]] = {}
    for claim in claims:
        by_peer.setdefault(peer_of[claim.push].reservation.endpoints[claim.d_rank], []).append(claim)
    groups = []
    for mine in by_peer.values():
        by_unit: dict[object, list[Claim]] = {}
        for claim in sorted(mine, key=lambda c: c.unit):
            by_unit.setdefault(claim.unit, []).append(claim)
        units = list(by_unit.values())
        groups.extend([c for unit in units[at : at + fuse] for c in unit] for at in range(0, len(units), fuse))
    return groups


def stage_geometry(g: CacheGeometry, stage: int) -> CacheGeometry:
    return CacheGeometry(g.block_size, g.kv_heads, g.tp_size, g.dtype, g.packing, g.regions, (g.stages[stage],))
