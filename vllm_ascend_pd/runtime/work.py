# SPDX-License-Identifier: Apache-2.0
"""What P's worker has to push: the request's blocks as it knows them, and the plans of steps not pushed yet.

Plans are byte offsets made once per step; a layer only adds its base addresses. Not thread-safe: the runtime's lock
guards it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, JobPlan
from vllm_ascend_pd.prefill.decisions import PushSlice, PushStart
from vllm_ascend_pd.protocol.messages import Reservation


class Unit(NamedTuple):
    """One layer (own index) of one step. `part` is the sub-step of an exchange, 0 for what is pushed directly."""

    step: int
    layer: int
    part: int = 0


@dataclass(slots=True)
class PushWork:
    """One push: the request's blocks as P's worker knows them, and the plans of steps not yet pushed."""

    push: str
    request_id: str
    reservation: Reservation
    fits: bool  # the two geometries match; equal on all ranks
    exchanges: bool  # the ranks of P regroup before they write; equal on all ranks
    layer_index: tuple[int, ...]  # own layer → index in D's layer list
    ranks: tuple[int, ...]  # D ranks that this worker writes to
    d_blocks: NDArray[np.int32]
    blocks: NDArray[np.int32]
    known: int = 0
    opened: float = 0.0
    sealed: float = 0.0  # when the last layer was announced
    final_step: int | None = None  # after which nothing comes any more; unknown again after a restart
    plans: dict[int, JobPlan] = field(default_factory=dict)
    exchanged: set[int] = field(default_factory=set)  # steps whose bytes come through exchanges

    @classmethod
    def of(
        cls, start: PushStart, own: CacheGeometry, ranks: tuple[int, ...], *, fits: bool, exchanges: bool
    ) -> PushWork:
        reservation = start.reservation
        d_layers = {name: index for index, name in enumerate(reservation.geometry.layers)}
        return cls(
            push=start.push,
            request_id=start.request_id,
            reservation=reservation,
            fits=fits,
            exchanges=exchanges,
            layer_index=tuple(d_layers[name] for name in own.layers) if fits else (),
            ranks=ranks,
            d_blocks=np.frombuffer(reservation.blocks, dtype="<i4"),
            blocks=np.empty(reservation.prompt_length // own.block_size + 2, dtype=np.int32),
        )

    def extend(self, step: int, piece: PushSlice) -> None:
        """Take in a step's new blocks; a restart forgets what was known."""
        if piece.restart:
            self.forget()
        end = self.known + len(piece.new_blocks)
        if end > len(self.blocks):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[: self.known] = self.blocks[: self.known]
            self.blocks = grown
        self.blocks[self.known : end] = piece.new_blocks
        self.known = end
        if piece.final:
            self.final_step = step

    def forget(self) -> None:
        """The blocks are lost: what was planned with them must not be read."""
        self.known = 0
        self.final_step = None
        self.plans.clear()
        self.exchanged.clear()

    def job(self, lo: int, hi: int, instance: int = 0) -> Job:
        """`instance` tells D engines of equal geometry apart within a step."""
        d = self.reservation
        return Job(
            d=d.geometry,
            first=d.first,
            lo=lo,
            hi=hi,
            p_blocks=self.blocks[: self.known],
            d_blocks=self.d_blocks,
            instance=instance,
        )
