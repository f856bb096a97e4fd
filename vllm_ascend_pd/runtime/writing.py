# SPDX-License-Identifier: Apache-2.0
"""What the pusher's thread decides: which computed or staged bytes are offered, what is claimed, what one batch holds.

Implements pusher.Work. Every method decides under the machine's lock; sockets and the transfer engine are touched after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Iterable

from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.protocol.messages import Endpoint, LayerAddresses
from vllm_ascend_pd.protocol.push import Claim, Sender
from vllm_ascend_pd.regroup.staging import StagingSlot
from vllm_ascend_pd.runtime.batches import Batch, Triples, aimed, grouped, joined, spans_of, unit_of
from vllm_ascend_pd.runtime.machine import Deciding, PushMachine
from vllm_ascend_pd.runtime.pieces import Piece, Pieces
from vllm_ascend_pd.runtime.pusher import IN_FLIGHT, Computed, Sealed
from vllm_ascend_pd.runtime.regrouping import Regrouper, Staged
from vllm_ascend_pd.runtime.verify import Summer
from vllm_ascend_pd.runtime.work import PushWork, Unit
from vllm_ascend_pd.transport.base import WriteState

log = logging.getLogger(__name__)

MOST_WORDS = 200  # of another library's error that D is told


class Writing:
    """Between the machine and the wire. `regrouper` joins once the engine's geometry is known."""

    def __init__(
        self, machine: PushMachine, caches: Caches, fuse_layers: int, summer: Summer | None, pieces: Pieces | None
    ) -> None:
        self._machine, self._caches, self._fuse_layers = machine, caches, fuse_layers
        self._summer, self._pieces = summer, pieces
        self.regrouper: Regrouper | None = None
        self.held: set[str] = set()  # pushes being drained: nothing of them is submitted
        self._unsealed: set[str] = set()  # pushes whose last layer was announced, but that missed an exchange

    # -- under the lock, asked by the machine and by the engine's thread

    def forget(self, push: str) -> None:
        """It has closed, or starts over: nothing staged for it is written, nothing is sealed."""
        self._unsealed.discard(push)
        if self._pieces is not None:
            self._pieces.drop(time.monotonic(), push)
        if self.regrouper is not None:
            self.regrouper.forget(push)

    def hold(self, push: str) -> None:
        self.held.add(push)

    def start_over(self, push: str, *, writes_out: bool) -> None:
        """After a hold. What is still being written keeps its staging slot."""
        self.held.discard(push)
        self._unsealed.discard(push)
        if self.regrouper is not None:
            self.regrouper.forget(push)
        if self._pieces is not None and not writes_out:
            self._pieces.drop(time.monotonic(), push)

    def levels(self) -> dict[str, int]:
        with self._machine.lock:
            return {"pieces": len(self._pieces or ()), "unsealed": len(self._unsealed)}

    def wants(self, push: str, step: int) -> bool:
        """Asked by the regrouper, from its thread: whether bytes of this push are still of use here."""
        with self._machine.lock:
            work = self._machine.works.get(push)
            return work is not None and step in work.exchanged

    # -- news

    def computed(self, item: Computed) -> None:
        """Offer a computed layer of a step to the machine, for every push and destination of the step."""
        unit = Unit(item.step, item.layer)
        with self._machine.deciding() as deciding:
            now = time.monotonic()
            for work in list(self._machine.works.values()):
                plan = work.plans.get(item.step)
                for rank in plan.by_rank if plan is not None else ():
                    nbytes = plan.nbytes(rank) if plan is not None else 0
                    deciding.actions += deciding.sender.offer(now, work.push, rank, unit, nbytes)

    def staged(self, item: Staged) -> None:
        """Offer what an exchange has brought; bytes of pushes that ended or started over meanwhile are dropped."""
        pieces, regrouper = self._pieces, self.regrouper
        if pieces is None or regrouper is None:
            return
        if self._machine.leads:
            self._machine.tally.time("regroup_time_seconds", item.waited)
        strangers = [item.strangers(index) if item.error is None else [] for index in range(len(item.slots))]
        with self._machine.deciding() as deciding:
            if item.error is not None:
                self._fail_exchanged(deciding, item.part.works, str(item.error)[:MOST_WORDS])
            for index, (slot, ranks) in enumerate(zip(item.slots, strangers, strict=True)):
                if slot is None:
                    continue
                if ranks:
                    why = f"prefill ranks {', '.join(map(str, ranks))} did not give their part"
                    self._fail_exchanged(deciding, item.part.pushes(index), why)
                elif item.error is None:
                    self._offer_staged(deciding, pieces, item, index, slot)
                pieces.unused(slot)
                regrouper.arrived(item.unit, index)
            self._seal_late(deciding, time.monotonic())
        if trace.enabled():
            trace.emit("staged", **item.facts())

    def _offer_staged(self, deciding: Deciding, pieces: Pieces, item: Staged, index: int, slot: StagingSlot) -> None:
        planned, unit = item.part.rows.plan.slots[index], item.unit
        sums = self._summer.staged(planned, item.part.jobs, slot) if self._summer is not None else {}
        for member, writes in planned.writes.items():
            work, rank = item.part.works[member], planned.d_rank
            piece = Piece(slot, writes, sums.get(member))
            if not piece.nbytes or work.push not in self._machine.works or unit.step not in work.exchanged:
                continue
            if pieces.add(work.push, rank, unit, piece):
                now = time.monotonic()
                deciding.actions += deciding.sender.offer(now, work.push, rank, unit, piece.nbytes)

    def _fail_exchanged(self, deciding: Deciding, works: Iterable[PushWork], why: str) -> None:
        for work in works:
            if work.push in self._machine.works:
                deciding.actions += deciding.sender.abort(time.monotonic(), work.push, "PD-XFER-006", why)

    def sealed(self, item: Sealed) -> None:
        with self._machine.deciding() as deciding:
            for push in item.pushes:
                work = self._machine.works.get(push)
                if work is not None and work.final_step == item.step:  # else it was preempted and starts over
                    self._unsealed.add(push)
            self._seal_late(deciding, time.monotonic())

    def _seal_late(self, deciding: Deciding, now: float) -> None:
        """Seal what is complete; a push that missed an exchange waits until that was made again."""
        for push in list(self._unsealed):
            if push not in self._machine.works:
                self._unsealed.discard(push)
            elif self.regrouper is None or not self.regrouper.owes(push):
                self._unsealed.discard(push)
                deciding.actions += deciding.sender.seal(now, push)

    # -- batches

    def next_batches(self, busy: dict[Hashable, int]) -> list[Batch]:
        """Claim what may be written now, grouped by destination and layer; destinations with enough in flight wait."""
        if not self._machine.started:
            return []
        batches: list[Batch] = []
        with self._machine.deciding() as deciding:
            sender, now = deciding.sender, time.monotonic()
            claims = []
            for claim in sender.claim(now, lambda peer: busy.get(peer, 0) < IN_FLIGHT):
                if claim.push in self.held:
                    deciding.actions += sender.returned(now, claim)
                else:
                    claims.append(claim)
            for peer, group in grouped(claims, self._machine.works, self._fuse_layers, sender.session):
                batch = self._batch(deciding, peer, group)
                if batch is not None:
                    batches.append(batch)
        return batches

    def submitted(self, batch: Batch) -> None:
        with self._machine.deciding() as deciding:
            now = time.monotonic()
            for claim in batch.claims:
                deciding.actions += deciding.sender.submitted(now, claim)
        if trace.enabled():
            trace.emit("layer_submitted", **batch.facts())

    def finished(self, batch: Batch, state: WriteState) -> None:
        now, ok = time.monotonic(), state is WriteState.LANDED
        if trace.enabled():
            trace.emit("layer_pushed", ok=ok, took=now - batch.submitted_at, **batch.facts())
        if ok:
            self._machine.tally.add("bytes_transferred", sum(batch.size))
            self._machine.tally.add("num_descriptors", len(batch.size))
        with self._machine.deciding() as deciding:
            if state is WriteState.UNISSUED:
                self._give_back(deciding, now, batch)
            else:
                self._came_home(deciding, now, batch, ok)
            self._machine.returned.notify_all()

    def _came_home(self, deciding: Deciding, now: float, batch: Batch, ok: bool) -> None:
        for claim in batch.claims:
            if self._pieces is not None:
                self._pieces.written(now, claim.push, claim.d_rank, unit_of(claim), ok)
            deciding.actions += deciding.sender.wrote(now, claim, ok)

    def _give_back(self, deciding: Deciding, now: float, batch: Batch) -> None:
        """The peer took nothing of it in time. Its push fails, but nothing of this can land: no block waits for it."""
        for claim in batch.claims:
            deciding.actions += deciding.sender.returned(now, claim)
        for push in dict.fromkeys(claim.push for claim in batch.claims):
            detail = f"{batch.peer} does not take writes, nothing was sent"
            deciding.actions += deciding.sender.abort(now, push, "PD-XFER-003", detail)

    def heard(self, peer: Endpoint) -> float | None:
        with self._machine.deciding() as deciding:
            return deciding.sender.heard(peer)

    def died(self, error: Exception) -> None:
        """The pusher's thread ended by an error: fail every push, and every later one."""
        self._machine.dead = error
        self._machine.tally.level("writers_dead", 1)
        self._machine.abort_all("PD-XFER-003", f"the pusher died: {error}")

    def _batch(self, deciding: Deciding, peer: Endpoint, claims: list[Claim]) -> Batch | None:
        """The spans of these claims as one batch. A claim that cannot be written fails its push."""
        sender = deciding.sender
        parts, taken, session = [], [], ""
        for claim in claims:
            work = self._machine.works[claim.push]
            theirs = sender.addresses(claim.push, claim.d_rank)
            try:
                if theirs is None:
                    raise PdError("PD-CTRL-002", why="READY brought no addresses")
                spans = self._spans(work, claim, theirs)
                self._add_checksum(sender, claim, work)
            except PdError as error:
                self._unwritten(deciding, claim, error.code, error.sentence)
                continue
            except Exception as error:
                log.exception("a write for push %s cannot be prepared", claim.push)
                self._unwritten(deciding, claim, "PD-XFER-003", f"preparing the write failed: {error}"[:MOST_WORDS])
                continue
            parts.append(spans)
            session = theirs.session
            taken.append(claim)
        if not taken:
            return None
        triples = joined(parts)
        transfers = sorted({str(self._machine.works[claim.push].reservation.transfer) for claim in taken})
        return Batch(peer, session, taken, transfers, triples.src.tolist(), triples.dst.tolist(), triples.size.tolist())

    def _unwritten(self, deciding: Deciding, claim: Claim, code: str, why: str) -> None:
        """Nothing of the claim is out: its push fails, and waits for nothing."""
        now = time.monotonic()
        deciding.actions += deciding.sender.returned(now, claim)
        deciding.actions += deciding.sender.abort(now, claim.push, code, why)

    def _spans(self, work: PushWork, claim: Claim, theirs: LayerAddresses) -> Triples:
        unit = unit_of(claim)
        if unit.part == 0 or self._pieces is None:
            return spans_of(work, claim, self._caches.bases, theirs)
        piece = self._pieces.get(claim.push, claim.d_rank, unit)
        if piece is None:
            raise PdError("PD-XFER-002", why="what was staged is gone")
        return aimed(piece.writes, [piece.slot.address] * len(piece.writes), work, unit, theirs)

    def _add_checksum(self, sender: Sender, claim: Claim, work: PushWork) -> None:
        if self._summer is None:
            return
        unit = unit_of(claim)
        piece = self._pieces.get(claim.push, claim.d_rank, unit) if self._pieces is not None and unit.part else None
        if piece is None:
            self._summer.add(sender, claim, work)
        elif piece.checksum is not None:
            sender.checksum(claim.push, claim.d_rank, self._caches.geometry.layers[unit.layer], piece.checksum)
