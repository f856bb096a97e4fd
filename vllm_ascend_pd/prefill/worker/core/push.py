# SPDX-License-Identifier: Apache-2.0
"""One push on a worker of P: the protocol's record, the request's blocks, and what is planned, staged and missing.

Plans are byte offsets made once per step; a layer only adds its base addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.coalesce import Spans
from vllm_ascend_pd.geometry.context_parallel import TokenSplit
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.pairing import Pairing
from vllm_ascend_pd.geometry.plan import Job, JobPlan
from vllm_ascend_pd.metadata import PushSlice, PushStart
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.pair import Destination, PushRecord
from vllm_ascend_pd.regroup.core.staging import StagingSlot


class Unit(NamedTuple):
    """One layer (own index) of one step. `sub_step` is that of an exchange, 0 for what is pushed directly."""

    step: int
    layer: int
    sub_step: int = 0


@dataclass(slots=True, eq=False)
class Share:
    """The part of an exchange that this worker owns for one D rank: one staging slot per layer, divided among pushes.

    It is owed from the moment it is planned, whichever step makes the exchange that brings a layer.
    """

    step: int
    sub_step: int
    pushes: list[Push]  # that want it
    destinations: dict[int, Endpoint]  # by layer: the worker of D that has it
    layers: dict[int, bool]  # layers not here yet: whether an exchange has found a slot and is bringing them

    def unit(self, layer: int) -> Unit:
        return Unit(self.step, layer, self.sub_step)

    def wants(self, layer: int) -> bool:
        return bool(self.pushes) and self.layers.get(layer) is False


@dataclass(frozen=True, slots=True)
class SlotShare:
    """A push's part of a staging slot: its writes, as offsets into the slot, and its checksums if they are wanted."""

    slot: StagingSlot
    writes: tuple[Spans, ...]
    checksums: tuple[int, ...] | None  # by component

    @property
    def nbytes(self) -> int:
        return sum(spans.nbytes for spans in self.writes)


@dataclass(frozen=True, slots=True, eq=False)
class DirectWrites:
    """Bytes of P's cache that one unit writes directly to a D worker; for its checksums."""

    push: str
    worker: int
    layer: int
    heads: range
    tokens: range
    blocks: NDArray[np.int32]  # from token 0
    peer: tuple[TokenSplit, int]  # D's division of tokens, and that worker's part


@dataclass(slots=True, eq=False)
class BlockTable:
    """A request's blocks of one group, as far as steps have brought them to the workers."""

    ids: NDArray[np.int32]
    known: int = 0

    @property
    def known_ids(self) -> NDArray[np.int32]:
        return self.ids[: self.known]

    def extend(self, more: NDArray[np.int32]) -> None:
        end = self.known + len(more)
        if end > len(self.ids):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[: self.known] = self.known_ids
            self.ids = grown
        self.ids[self.known : end] = more
        self.known = end


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Push(PushRecord):
    """One push, remembered until it has closed here and the scheduler is done with it."""

    request_id: str
    reservation: Reservation
    pairings: tuple[Pairing, ...]  # none if the two geometries do not match; equal on all ranks
    exchanged: frozenset[int]  # indexes of pairings that P's ranks regroup before they write; equal on all ranks
    layer_index: tuple[int | None, ...]  # own layer → index in D's layer list; None: D has no such layer
    pairing_of: tuple[int, ...]  # own layer → index in `pairings`; -1: D has no such layer
    d_position: tuple[tuple[int, int], ...]  # own layer → D's stage, and index there; (-1, -1): D has no such layer
    firsts: tuple[int, ...]  # by pairing: the first token, or entry of a state, that D wants of its layers
    d_blocks: tuple[NDArray[np.int32], ...]  # by group of D
    tables: tuple[BlockTable, ...]  # by group of P
    sealed_at: float = 0.0  # when the last layer was announced
    final_step: int | None = None  # the last one that computes tokens of it; unknown until then, and after a restart
    plans: dict[tuple[int, int], JobPlan] = field(default_factory=dict)  # of direct pushes, by step and pairing
    slot_shares: dict[tuple[int, Unit], SlotShare] = field(default_factory=dict)  # staged, by D worker and unit
    owed: set[Share] = field(default_factory=set)  # shares of exchanges that have not brought everything yet
    paused: bool = False  # nothing of it is submitted: its blocks are about to be overwritten
    sealing: bool = False  # the last layer was announced, but exchanges are still owed
    retired: bool = False  # closed on all workers: the scheduler is done with it

    @classmethod
    def of(
        cls,
        start: PushStart,
        cache: CacheGeometry,
        pairings: tuple[Pairing, ...],
        exchanged: tuple[Pairing, ...],
        destinations: tuple[Destination, ...],
    ) -> Push:
        reservation, d = start.reservation, start.reservation.geometry
        pairing_of = {name: index for index, pairing in enumerate(pairings) for name in pairing.layers}
        d_layers = {name: index for index, name in enumerate(d.layers)}
        first, end, length = reservation.first, reservation.end, reservation.prompt_length
        stages = {name: (stage, index) for stage, names in enumerate(d.stages) for index, name in enumerate(names)}
        return cls(
            name=start.push,
            transfer=reservation.transfer,
            deadline_s=reservation.deadline_s,
            destinations=destinations,
            cached=start.cached,
            request_id=start.request_id,
            reservation=reservation,
            pairings=pairings,
            exchanged=frozenset(index for index, pairing in enumerate(pairings) if pairing in exchanged),
            layer_index=tuple(d_layers.get(name) for name in cache.layers) if pairings else (),
            pairing_of=tuple(pairing_of.get(name, -1) for name in cache.layers),
            d_position=tuple(stages.get(name, (-1, -1)) for name in cache.layers),
            firsts=tuple(pairing.d.wanted_entries(first, end)[0] for pairing in pairings),
            d_blocks=tuple(np.frombuffer(ids, dtype="<i4") for ids in reservation.blocks),
            tables=tuple(
                BlockTable(np.empty(length // group.block_size + 2, dtype=np.int32)) for group in cache.tables
            ),
        )

    def words(self) -> list[str]:
        words = [*PushRecord.words(self), f"{' + '.join(str(table.known) for table in self.tables)} blocks"]
        words += [f"{len(self.slot_shares)} slot shares"] if self.slot_shares else []
        words += [f"owes {len(self.owed)}"] if self.owed else []
        return words + [word for word in ("paused", "sealing", "closed", "retired") if getattr(self, word)]

    def wants(self, layer: int) -> bool:
        """Return whether D has this layer. It lacks the layers of a draft model that only P has."""
        return self.layer_index[layer] is not None

    def index(self, layer: int) -> int:
        """Return the index of an own layer in D's list."""
        index = self.layer_index[layer]
        if index is None:
            raise LocalProtocolError(f"push {self.name} has nothing of layer {layer}")
        return index

    def worker(self, layer: int, rank: int) -> int:
        """Return the D worker that holds this worker's layer `layer` and has rank `rank` in its stage."""
        return self.reservation.geometry.worker(self.d_position[layer][0], rank)

    def rank_of(self, worker: int) -> int:
        """Return the rank of D's worker in its stage: the key of a plan's deliveries."""
        return self.reservation.geometry.stage_and_rank(worker)[1]

    def endpoint(self, worker: int) -> Endpoint:
        return self.reservation.endpoints[worker]

    def extend(self, step: int, push_slice: PushSlice) -> None:
        """Add a step's new blocks. Those from before a preemption were forgotten (`Pushes.drain`)."""
        if push_slice.restart and any(table.known for table in self.tables):
            raise LocalProtocolError(f"push {self.name} starts over, without a message that it had lost its blocks")
        for table, more in zip(self.tables, push_slice.new_blocks, strict=True):
            table.extend(more)
        if push_slice.final:
            self.final_step = step

    def plan(self, step: int, layer: int) -> JobPlan | None:
        """Return the plan of what is pushed directly of a layer; None if nothing is, or not any more."""
        return self.plans.get((step, self.pairing_of[layer]))

    def d_kind(self, layer: int) -> CacheGeometry:
        """Return D's kind of this worker's layer."""
        return self.pairings[self.pairing_of[layer]].d

    def direct_writes(self) -> Iterator[DirectWrites]:
        """Yield what was offered directly so far, by D worker.

        The tables are not copied. A push that starts over changes them; checksums computed of them are dropped then.
        """
        for worker, pair in self.pairs.items():
            rank, known = self.rank_of(worker), pair.coverage
            for unit in (*known.covered, *known.out, *known.pending):
                if not isinstance(unit, Unit) or unit.sub_step:
                    continue
                plan, d = self.plan(unit.step, unit.layer), self.d_kind(unit.layer)
                if plan is None:
                    raise LocalProtocolError(f"step {unit.step} of push {self.name} was forgotten")
                delivery = plan.deliveries[rank]
                heads, tokens = range(*delivery.heads), range(delivery.lo, delivery.hi)
                table, peer = self.table(unit.layer), (d.token_split, d.ranks.part(rank))
                yield DirectWrites(self.name, worker, unit.layer, heads, tokens, table, peer)

    def forget(self) -> None:
        """Forget the blocks, which are lost, and the plans that would read them."""
        for table in self.tables:
            table.known = 0
        self.final_step = None
        self.sealing = False
        self.plans.clear()

    def table(self, layer: int) -> NDArray[np.int32]:
        """Return the blocks of an own layer."""
        return self.tables[self.pairings[self.pairing_of[layer]].p.group_index].known_ids

    def lost(self, pairing: int, lo: int, hi: int) -> bool:
        """Return whether P keeps no block for some of tokens [lo, hi), or for the state."""
        p = self.pairings[pairing].p
        if not p.group.partial:
            return False
        begin, stop = lo // p.covers, -(-hi // p.covers)
        kept = self.tables[p.group_index].known_ids[begin:stop]
        return len(kept) < stop - begin or not kept.all()

    def job(self, pairing: int, lo: int, hi: int, instance: int = 0) -> Job:
        """Return the job of one pairing's layers. `instance` distinguishes D engines of equal geometry in a step."""
        p, d = self.pairings[pairing].p, self.pairings[pairing].d
        return Job(
            d=d,
            first=self.firsts[pairing],
            lo=lo,
            hi=hi,
            p_blocks=self.tables[p.group_index].known_ids,
            d_blocks=self.d_blocks[d.group_index],
            instance=instance,
        )
