# SPDX-License-Identifier: Apache-2.0
"""D rank: permission to write into reservations, and proof that nothing can be written there any more.

`Receiver` is pure: its methods take the time, change the machine by the table in `tables.py`, and return actions.
A transfer is reported once: complete, or failed and fenced.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.protocol.actions import Action, Revoke
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.fence import Fence
from vllm_ascend_pd.protocol.guards import ReservationGuards
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.layouts import Layouts
from vllm_ascend_pd.protocol.messages import Begin, Done, Failed, Memory, Message, RefusalCode, Renew, message_name
from vllm_ascend_pd.protocol.reservation_rules import ReservationMachine
from vllm_ascend_pd.protocol.states import Incoming, ReservationEvent, ReservationState
from vllm_ascend_pd.protocol.tables import RESERVATION_TABLE
from vllm_ascend_pd.protocol.timing import Agendas, Due, earliest
from vllm_ascend_pd.protocol.transfer import Transfer, WriterRecord

REVOKE_AGAIN_S = 1.0
_CLOSED = (ReservationState.CLOSED_OK, ReservationState.CLOSED_FAILED)


class Receiver:
    """All transfers of one D worker.

    `incarnation` is that of the D engine, as in `TransferId.incarnation`. If it is empty, the first `bind` sets it.
    """

    # The simulator replaces these to take a rule out.
    table = RESERVATION_TABLE
    guards = ReservationGuards
    machine = ReservationMachine
    fence_type = Fence

    def __init__(
        self,
        *,
        incarnation: str,
        rank: int,
        model: str,
        geometry: CacheGeometry,
        addresses: Memory,
        timers: Timers,
        quiet_s: float,
        verify: bool,
    ) -> None:
        self._rank = rank
        self._fence = self.fence_type(timers, quiet_s)
        self._layouts = Layouts()
        guards = self.guards(rank, model, geometry, verify, self._fence, self._layouts)
        self._machine = self.machine(self.table, guards, incarnation, addresses, timers)
        self._agenda = Agendas(self._fence.clock, self._times)
        self._revoke_at: float | None = None  # when a revocation that failed is asked for again
        self._transfers, self._parking = self._machine.transfers, self._machine.parking
        self.counters = self._machine.counters

    # -- input from the runtime

    def bind(self, now: float, transfer: TransferId, first: int, end: int, deadline_s: float) -> list[Action]:
        """Bind a transfer: the scheduler has allocated the blocks for tokens [first, end). The gate is still closed."""
        self._fence.observe(now)
        machine = self._machine
        if machine.incarnation and transfer.incarnation != machine.incarnation:
            raise LocalProtocolError(f"{transfer} is bound by an engine that is not {machine.incarnation}")
        if transfer.n <= machine.watermark:
            raise LocalProtocolError(f"{transfer} is bound at or below the watermark {machine.watermark}")
        machine.incarnation = transfer.incarnation
        record = Transfer(transfer, ReservationState.UNBOUND, first, end, deadline=now + deadline_s)
        self._transfers[transfer] = record
        machine.fire(ReservationEvent.BIND, now, record)
        return self._taken(record)

    def gate_open(self, now: float, transfer: TransferId) -> list[Action]:
        """Open the gate: the device has finished the work from before the bind, so the blocks may be written."""
        return self._local(ReservationEvent.GATE_OPEN, now, transfer)

    def cancel(self, now: float, transfer: TransferId, failure: Failure) -> list[Action]:
        """Cancel a transfer that the scheduler does not want any more, or that has failed elsewhere."""
        return self._local(ReservationEvent.CANCEL, now, transfer, failure)

    def settle(self, now: float, transfer: TransferId) -> list[Action]:
        """Record that prefill has ended well: all its ranks must begin within a lease."""
        return self._local(ReservationEvent.SETTLE, now, transfer)

    def verified(self, now: float, transfer: TransferId, layer: str | None) -> list[Action]:
        """Handle the answer to `Verify`: the layer whose checksum differs, or None."""
        if layer is None:
            return self._local(ReservationEvent.VERIFIED, now, transfer)
        return self._local(ReservationEvent.CORRUPT, now, transfer, Failure("PD-WIRE-004", layer))

    def load_over(self, now: float, transfer: TransferId) -> list[Action]:
        """Drop the record: all ranks have reported to the scheduler."""
        return self._local(ReservationEvent.OVER, now, transfer)

    def message(self, now: float, peer: Hashable, message: Message) -> list[Action]:
        self._fence.observe(now)
        if not isinstance(message, Begin | Renew | Done | Failed):
            self.counters["unexpected_" + message_name(message)] += 1
            return self._taken()
        if isinstance(message, Begin) and message.layout_bytes:
            self._layouts.add(message.layout_bytes)
        machine, received = self._machine, Incoming(peer, message)
        record = machine.lookup(message.transfer)
        ours = machine.incarnation
        if ours and not message.d_incarnation == message.transfer.incarnation == ours:
            self._turn_away(now, record, received, RefusalCode.STALE, f"incarnation: decode {ours}")
        elif message.d_rank != self._rank:
            why = f"d_rank: prefill {message.d_rank}, decode {self._rank}"
            self._turn_away(now, record, received, RefusalCode.MISMATCH, why)
        else:
            machine.receive(now, record, received)
        return self._taken(record)

    def peer_gone(self, now: float, p_incarnation: str) -> list[Action]:
        """Record that the kernel has closed the connection of this P process."""
        self._fence.observe(now)
        self._fence.gone(p_incarnation)
        self._parking.forget_process(p_incarnation)
        return self._taken(*self._transfers.values())

    def peer_back(self, now: float, p_incarnation: str) -> list[Action]:
        """Record that the same process has connected again: only its connection was gone."""
        self._fence.observe(now)
        self._fence.back(p_incarnation)
        return self._taken(*self._transfers.values())

    def revoked(self, now: float, addresses: Memory) -> list[Action]:
        """Handle the end of a revocation: nothing of an old session can land any more."""
        self._fence.observe(now)
        if not self._fence.revoking:
            raise LocalProtocolError("revoked, but no revocation was asked for")
        self._fence.revoking = False
        machine, records = self._machine, list(self._transfers.values())
        machine.move(addresses)
        for record in records:
            machine.fire(machine.guards.revocation(record), now, record)
        for record in records:
            if record.state is ReservationState.OPEN:
                machine.unpark(now, record)
        return self._taken(*records)

    def not_revoked(self, now: float) -> list[Action]:
        """Handle a revocation that failed: peers may still write, so nothing changes. It is asked for again."""
        self._fence.observe(now)
        self._revoke_at = now + REVOKE_AGAIN_S
        return self._taken()

    def tick(self, now: float) -> list[Action]:
        """Handle all that is due."""
        self._fence.observe(now)
        if self._revoke_at is not None and now >= self._revoke_at:
            self._revoke_at = None
            self._machine.actions.append(Revoke())
        touched = []
        for transfer in self._agenda.wall_due(now):
            touched.append(record := self._transfers[transfer])
            self._wall_due(now, record)
        for transfer in self._agenda.running_due():
            touched.append(record := self._transfers[transfer])
            self._running_due(now, record)
        expired = self._parking.expire(now)
        if expired:
            self.counters["parked_expired"] += expired
        return self._taken(*touched)

    def next_wake(self) -> float | None:
        """Return when `tick` must be called at the latest; None while there is nothing to wait for."""
        return earliest(self._revoke_at, earliest(earliest(*self._agenda.next()), self._parking.next()))

    # -- queries of the runtime

    def state(self, transfer: TransferId) -> ReservationState:
        return self._machine.lookup(transfer).state

    def open_count(self) -> int:
        """Return the number of transfers that have not been reported."""
        return sum(record.state not in _CLOSED for record in self._transfers.values())

    def record_count(self) -> int:
        """Return the number of transfers on record: those that are not over."""
        return len(self._transfers)

    def parked_count(self) -> int:
        return self._parking.count

    def _local(self, event: ReservationEvent, now: float, transfer: TransferId, cause: object = None) -> list[Action]:
        self._fence.observe(now)
        record = self._machine.lookup(transfer)
        self._machine.fire(event, now, record, cause)
        return self._taken(record)

    def _turn_away(
        self,
        now: float,
        record: Transfer,
        received: Incoming[Begin | Renew | Done | Failed],
        code: RefusalCode,
        detail: str,
    ) -> None:
        """Answer a message that is not for this rank, whatever the state of its transfer."""
        if isinstance(received.message, Begin | Renew):
            self._machine.send_refused(Incoming(received.peer, received.message), code, detail)
        else:
            self._machine.acknowledge(now, record, Incoming(received.peer, received.message))

    def _taken(self, *records: Transfer) -> list[Action]:
        for record in records:
            self._agenda.touch(record)
        actions, self._machine.actions = self._machine.actions, []
        return actions

    # -- time

    def _times(self, record: Transfer) -> Iterator[Due[TransferId]]:
        """Yield when to look at a transfer next: on the wall clock, and on the running clock."""
        if record.transfer not in self._transfers:
            yield record.transfer, None, None
            return
        leased = record.leased()
        wall = [at for writer in leased if (at := writer.cancel_at) is not None]
        if (expires := record.expires) is not None:
            wall.append(expires)
        running: list[float] = []
        if record.state is ReservationState.OPEN:
            running = [writer.lapse_at for writer in leased]
        elif record.state is ReservationState.FENCING:
            running = [at for writer in leased if (at := self._proof_due(writer)) is not None]
        yield record.transfer, min(wall, default=None), min(running, default=None)

    def _proof_due(self, writer: WriterRecord) -> float | None:
        """Return when to look at this writer again: when it is proven quiet, or H is over and access is revoked."""
        proven_at = self._fence.proven_at(writer)
        if proven_at is not None:
            return proven_at
        return None if self._fence.revoking else writer.landed_at

    def _wall_due(self, now: float, record: Transfer) -> None:
        if (expires := record.expires) is not None and now >= expires:
            failure = Failure("PD-XFER-001", record.state.value)
            self._machine.fire(ReservationEvent.DEADLINE, now, record, failure)
        for writer in record.leased():
            if writer.cancel is not None and writer.cancel_at is not None and now >= writer.cancel_at:
                writer.cancel.sent(now)
                self._machine.cancel(writer, record.failure)

    def _running_due(self, now: float, record: Transfer) -> None:
        if record.state is ReservationState.OPEN:
            lost = [str(writer.contributor) for writer in record.leased() if self._fence.lapsed(writer)]
            if lost:
                failure = Failure("PD-XFER-004", f"the lease of {', '.join(lost)} lapsed")
                self._machine.fire(ReservationEvent.LAPSE, now, record, failure)
        elif record.state is ReservationState.FENCING:
            self._machine.fire(ReservationEvent.PROVEN, now, record)
            if not self._fence.revoking and any(self._fence.must_revoke(w) for w in record.leased()):
                self._fence.revoking = True
                self._machine.note("revoking", record)
                self._machine.actions.append(Revoke())
