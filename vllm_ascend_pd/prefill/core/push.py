# SPDX-License-Identifier: Apache-2.0
"""One push as P's worker knows it: the request's blocks, its pairs, what is planned, staged and missing of it.

Plans are byte offsets made once per step; a layer only adds its base addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.coalesce import Spans
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.pairing import Pairing
from vllm_ascend_pd.geometry.plan import Job, JobPlan
from vllm_ascend_pd.prefill.decisions import PushSlice, PushStart
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.pair import Pair
from vllm_ascend_pd.regroup.staging import StagingSlot


class Unit(NamedTuple):
    """One layer (own index) of one step. `part` is the sub-step of an exchange, 0 for what is pushed directly."""

    step: int
    layer: int
    part: int = 0


@dataclass(slots=True, eq=False)
class Share:
    """What this worker owns of an exchange for one D rank: in each layer one staging slot, of which pushes have parts.

    It is owed from the moment it is planned; which step makes the exchange that brings a layer does not matter.
    """

    step: int
    part: int
    destination: Endpoint
    pushes: list[Push]  # that want it
    layers: dict[int, bool]  # that are not here: whether an exchange has found a slot and is bringing them

    def unit(self, layer: int) -> Unit:
        return Unit(self.step, layer, self.part)

    def wants(self, layer: int) -> bool:
        return bool(self.pushes) and self.layers.get(layer) is False


@dataclass(frozen=True, slots=True)
class Piece:
    """A push's share of a staging slot: its writes, as offsets into the slot, and its checksum where one is wanted."""

    slot: StagingSlot
    writes: tuple[Spans, ...]
    checksums: tuple[int, ...] | None  # by component

    @property
    def nbytes(self) -> int:
        return sum(spans.nbytes for spans in self.writes)


@dataclass(slots=True, eq=False, repr=False)
class Push:
    """Remembered until it has closed here and the scheduler has said that it is over."""

    name: str
    request_id: str
    reservation: Reservation
    pairings: tuple[Pairing, ...]  # none if the two geometries do not match; equal on all ranks
    exchanged: frozenset[int]  # of those, by place: the ranks of P regroup before they write; equal on all ranks
    layer_index: tuple[int | None, ...]  # own layer → index in D's layer list; None: it is not D's
    pairing_of: tuple[int, ...]  # own layer → its place in `pairings`; of one that is not D's nothing
    ranks: tuple[int, ...]  # D ranks that this worker writes to
    d_blocks: NDArray[np.int32]
    blocks: NDArray[np.int32]
    opened: float
    known: int = 0  # blocks
    sealed_at: float = 0.0  # when the last layer was announced
    final_step: int | None = None  # after which nothing comes any more; unknown again after a restart
    pairs: Mapping[int, Pair] = field(default_factory=dict)  # by D rank; the protocol's own records
    plans: dict[tuple[int, int], JobPlan] = field(default_factory=dict)  # of direct pushes, by step and pairing
    pieces: dict[tuple[int, Unit], Piece] = field(default_factory=dict)  # staged, by D rank and unit
    owed: set[Share] = field(default_factory=set)  # exchanges that have not brought everything yet
    held: bool = False  # nothing of it is submitted: its blocks are about to be overwritten
    sealing: bool = False  # the last layer was announced, but exchanges are still owed
    closed: bool = False  # here: nothing of it is out, and nothing will be
    over: bool = False  # everywhere: the scheduler has done with it

    @classmethod
    def of(
        cls,
        now: float,
        start: PushStart,
        own: CacheGeometry,
        ranks: tuple[int, ...],
        some: tuple[Pairing, ...],
        exchanged: tuple[Pairing, ...],
    ) -> Push:
        reservation = start.reservation
        place = {name: index for index, pair in enumerate(some) for name in pair.layers}
        d_layers = {name: index for index, name in enumerate(reservation.geometry.layers)}
        return cls(
            name=start.push,
            request_id=start.request_id,
            reservation=reservation,
            pairings=some,
            exchanged=frozenset(index for index, pair in enumerate(some) if pair in exchanged),
            layer_index=tuple(d_layers.get(name) for name in own.layers) if some else (),
            pairing_of=tuple(place.get(name, -1) for name in own.layers),
            ranks=ranks,
            d_blocks=np.frombuffer(reservation.blocks, dtype="<i4"),
            blocks=np.empty(reservation.prompt_length // own.block_size + 2, dtype=np.int32),
            opened=now,
        )

    def __repr__(self) -> str:
        """<Push p-1 of decode-1/7/uuid-7: 12 blocks, 2 pieces, owes 1, held; D rank 0 push 3 out>"""
        words = [f"{self.known} blocks"]
        words += [f"{len(self.pieces)} pieces"] if self.pieces else []
        words += [f"owes {len(self.owed)}"] if self.owed else []
        words += [word for word in ("held", "sealing", "closed", "over") if getattr(self, word)]
        pairs = [
            f"D rank {rank} {pair.state.value}" + (f" {len(pair.coverage.out)} out" if pair.coverage.out else "")
            for rank, pair in self.pairs.items()
        ]
        return (
            f"<Push {self.name} of {self.reservation.transfer}: {', '.join(words)}; {', '.join(pairs) or 'no D rank'}>"
        )

    @property
    def transfer(self) -> str:
        return str(self.reservation.transfer)

    @property
    def out(self) -> int:
        """Writes that have not come home."""
        return sum(len(pair.coverage.out) for pair in self.pairs.values())

    @property
    def live(self) -> bool:
        """Whether anything that is computed or exchanged for it is still of use here."""
        return not self.closed and all(pair.push.failure is None for pair in self.pairs.values())

    def wants(self, layer: int) -> bool:
        """Whether D has this layer: not one of a draft model that is on P alone."""
        return self.layer_index[layer] is not None

    def index(self, layer: int) -> int:
        """Of an own layer in D's list."""
        index = self.layer_index[layer]
        if index is None:
            raise LocalProtocolError(f"push {self.name} has nothing of layer {layer}")
        return index

    def endpoint(self, d_rank: int) -> Endpoint:
        return self.reservation.endpoints[d_rank]

    def extend(self, step: int, piece: PushSlice) -> None:
        """Take in a step's new blocks. Those of before a preemption were forgotten (`Pushes.preempt`)."""
        if piece.restart and self.known:
            raise LocalProtocolError(f"push {self.name} starts over, but nobody was told that it had lost its blocks")
        end = self.known + len(piece.new_blocks)
        if end > len(self.blocks):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[: self.known] = self.blocks[: self.known]
            self.blocks = grown
        self.blocks[self.known : end] = piece.new_blocks
        self.known = end
        if piece.final:
            self.final_step = step

    def plan(self, step: int, layer: int) -> JobPlan | None:
        """Of what is pushed directly of a layer; None where nothing is, or not any more."""
        return self.plans.get((step, self.pairing_of[layer]))

    def d_kind(self, layer: int) -> CacheGeometry:
        """How an own layer lies on D."""
        return self.pairings[self.pairing_of[layer]].d

    def forget(self) -> None:
        """The blocks are lost: what was planned with them must not be read."""
        self.known = 0
        self.final_step = None
        self.sealing = False
        self.plans.clear()

    def job(self, pairing: int, lo: int, hi: int, instance: int = 0) -> Job:
        """Of the layers of one pairing. `instance` tells D engines of equal geometry apart within a step."""
        d = self.reservation
        return Job(
            d=self.pairings[pairing].d,
            first=d.first,
            lo=lo,
            hi=hi,
            p_blocks=self.blocks[: self.known],
            d_blocks=self.d_blocks,
            instance=instance,
        )
