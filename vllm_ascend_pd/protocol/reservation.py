# SPDX-License-Identifier: Apache-2.0
"""D rank: who may write into which reservation, and when nothing can be written there any more.

`Receiver` is pure: every method takes the time, changes the machine by the table in `tables.py`, and returns actions.
A transfer is reported once: complete, or failed and fenced.
"""

from __future__ import annotations

from collections.abc import Hashable

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.protocol.actions import Action, Revoke
from vllm_ascend_pd.protocol.fence import Writer
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.messages import LayerAddresses, Message, layout_hash
from vllm_ascend_pd.protocol.reservation_rules import EVENTS, Cue, ReservationRules, Transfer
from vllm_ascend_pd.protocol.tables import ReservationEvent, ReservationState

_CLOSED = (ReservationState.CLOSED_OK, ReservationState.CLOSED_FAILED)


class Receiver(ReservationRules):
    """All transfers of one D worker.

    `incarnation` is that of the D engine, as in `TransferId.incarnation`; left empty, the first `bind` tells it.
    """

    # -- what the runtime tells

    def bind(self, now: float, transfer: TransferId, first: int, end: int, deadline_s: float) -> list[Action]:
        """The scheduler has allocated the blocks for tokens [first, end); the gate is still closed."""
        self._observe(now)
        if self._incarnation and transfer.incarnation != self._incarnation:
            raise LocalProtocolError(f"{transfer} is bound by an engine that is not {self._incarnation}")
        if transfer.n <= self._watermark:
            raise LocalProtocolError(f"{transfer} is bound at or below the watermark {self._watermark}")
        self._incarnation = transfer.incarnation
        record = Transfer(transfer, ReservationState.UNBOUND, first, end, deadline=now + deadline_s)
        self._transfers[transfer] = record
        self._fire(ReservationEvent.BIND, now, record)
        return self._taken(record)

    def gate_open(self, now: float, transfer: TransferId) -> list[Action]:
        """The device has finished what ran before the bind: from now on a write harms nobody."""
        return self._local(ReservationEvent.GATE_OPEN, now, transfer)

    def cancel(self, now: float, transfer: TransferId, code: str, detail: str) -> list[Action]:
        """The scheduler does not want it any more, or knows that it failed elsewhere."""
        return self._local(ReservationEvent.CANCEL, now, transfer, Cue(code=code, detail=detail))

    def settle(self, now: float, transfer: TransferId) -> list[Action]:
        """Prefill has ended well: what is missing must arrive within a lease."""
        return self._local(ReservationEvent.SETTLE, now, transfer)

    def verified(self, now: float, transfer: TransferId, layer: str | None) -> list[Action]:
        """The answer to Verify: the layer whose checksum differs, or None."""
        return self._local(ReservationEvent.VERIFIED, now, transfer, Cue(layer=layer))

    def over(self, now: float, transfer: TransferId) -> list[Action]:
        """The scheduler has heard from all ranks: the record may go."""
        return self._local(ReservationEvent.OVER, now, transfer)

    def message(self, now: float, peer: Hashable, message: Message) -> list[Action]:
        self._observe(now)
        event = EVENTS.get(type(message))
        if event is None:
            self.counters["unexpected_" + type(message).__name__.lower()] += 1
            return self._taken()
        cue = Cue(peer, message)
        record = self._lookup(message.transfer)
        if self._incarnation and not message.d_incarnation == message.transfer.incarnation == self._incarnation:
            self._answer_stale(now, record, cue)
        elif message.d_rank != self._rank:
            self._answer_wrong_rank(now, record, cue)
        else:
            self._fire(event, now, record, cue)
        return self._taken(record)

    def peer_gone(self, now: float, p_incarnation: str) -> list[Action]:
        """The kernel has closed the connection of this P process."""
        self._observe(now)
        self._fence_of.gone(p_incarnation)
        self._parking.forget_process(p_incarnation)
        return self._taken(*self._transfers.values())

    def peer_back(self, now: float, p_incarnation: str) -> list[Action]:
        """The very same process has connected again: only its connection was gone."""
        self._observe(now)
        self._fence_of.back(p_incarnation)
        return self._taken(*self._transfers.values())

    def revoked(self, now: float, addresses: LayerAddresses) -> list[Action]:
        """Nothing of an old session can land any more."""
        self._observe(now)
        if not self._fence_of.revoking:
            raise LocalProtocolError("revoked, but no revocation was asked for")
        self._fence_of.revoking = False
        self._addresses, self._layout = addresses, layout_hash(addresses)
        records = list(self._transfers.values())
        for record in records:
            self._fire(ReservationEvent.REVOKED, now, record)
        for record in records:
            if record.state is ReservationState.OPEN:
                self._unpark(now, record)
        return self._taken(*records)

    def tick(self, now: float) -> list[Action]:
        """Whatever is due."""
        self._observe(now)
        touched = []
        for transfer in self._wall.due(now):
            touched.append(record := self._transfers[transfer])
            self._wall_due(now, record)
        for transfer in self._running.due(self._fence_of.clock.seconds):
            touched.append(record := self._transfers[transfer])
            self._running_due(now, record)
        expired = self._parking.expire(now)
        if expired:
            self.counters["parked_expired"] += expired
        return self._taken(*touched)

    def next_wake(self) -> float | None:
        """When `tick` must be called at the latest; None while there is nothing to wait for."""
        times = [at for at in (self._wall.next(), self._parking.next()) if at is not None]
        running = self._running.next()
        if running is not None:
            times.append(self._fence_of.clock.wake(running))
        return min(times, default=None)

    # -- what the runtime asks

    def gated(self) -> tuple[TransferId, ...]:
        """Transfers that wait for `gate_open`."""
        return tuple(t for t, record in self._transfers.items() if record.state is ReservationState.GATED)

    def state(self, transfer: TransferId) -> ReservationState:
        return self._lookup(transfer).state

    def open_count(self) -> int:
        """Transfers that have not been reported."""
        return sum(record.state not in _CLOSED for record in self._transfers.values())

    def record_count(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    def parked_count(self) -> int:
        return self._parking.count

    def _local(self, event: ReservationEvent, now: float, transfer: TransferId, cue: Cue | None = None) -> list[Action]:
        self._observe(now)
        record = self._lookup(transfer)
        self._fire(event, now, record, cue)
        return self._taken(record)

    def _observe(self, now: float) -> None:
        self._fence_of.observe(now)

    def _taken(self, *records: Transfer) -> list[Action]:
        for record in records:
            self._schedule(record)
        actions, self._actions = self._actions, []
        return actions

    # -- time

    def _wall_due(self, now: float, record: Transfer) -> None:
        if record.deadline is not None and now >= record.deadline:
            stage = record.state.value
            self._fire(ReservationEvent.DEADLINE, now, record, Cue(code="PD-XFER-001", detail=stage))
        for writer in record.writers.values():
            if writer.cancel is not None and now >= writer.cancel.at:
                writer.cancel.again(now)
                self._send_cancel(record, writer)

    def _running_due(self, now: float, record: Transfer) -> None:
        if record.state is ReservationState.OPEN:
            lost = [str(writer.contributor) for writer in record.leased() if self._fence_of.lapsed(writer)]
            if lost:
                cue = Cue(code="PD-XFER-004", detail=f"the lease of {', '.join(lost)} lapsed")
                self._fire(ReservationEvent.LAPSE, now, record, cue)
        elif record.state is ReservationState.FENCING:
            self._fire(ReservationEvent.PROVEN, now, record)
            if not self._fence_of.revoking and any(self._fence_of.must_revoke(w) for w in record.leased()):
                self._fence_of.revoking = True
                self._note("revoking", record)
                self._actions.append(Revoke())

    def _schedule(self, record: Transfer) -> None:
        """Put every timer of this transfer on the agendas."""
        transfer = record.transfer
        if transfer not in self._transfers:
            self._wall.set(transfer, None)
            self._running.set(transfer, None)
            return
        leased = record.leased()
        times = [writer.cancel.at for writer in leased if writer.cancel is not None]
        if record.deadline is not None:
            times.append(record.deadline)
        self._wall.set(transfer, min(times, default=None))
        running: list[float] = []
        if record.state is ReservationState.OPEN:
            running = [writer.lapse_at for writer in leased]
        elif record.state is ReservationState.FENCING:
            running = [at for writer in leased if (at := self._proof_due(writer)) is not None]
        self._running.set(transfer, min(running, default=None))

    def _proof_due(self, writer: Writer) -> float | None:
        """When to look at this silent writer again: its proof, or its hold, after which access is revoked."""
        proven_at = self._fence_of.proven_at(writer)
        if proven_at is not None:
            return proven_at
        return None if self._fence_of.revoking else writer.hold_at
