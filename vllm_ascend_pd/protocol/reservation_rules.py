# SPDX-License-Identifier: Apache-2.0
"""D rank: the records, and the effects of events on them.

The table in `tables.py` defines which effect an event has, and the state that the record is in by then.
`reservation.py` is the interface for the runtime.
"""

from __future__ import annotations

from collections import Counter

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.protocol.actions import Action, Note, Report, Send, Verify
from vllm_ascend_pd.protocol.compose import ack, cancel, failure_of, layout_request, ready, refused
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.fence import Fence
from vllm_ascend_pd.protocol.guards import Refusal, ReservationGuards
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.messages import Begin, Done, Failed, Memory, RefusalCode, Renew, memory_hash
from vllm_ascend_pd.protocol.parking import Parking
from vllm_ascend_pd.protocol.states import (
    Incoming,
    ReservationEvent,
    ReservationState,
    Table,
    WriterEvent,
    WriterState,
    look_up,
)
from vllm_ascend_pd.protocol.timing import Repetition
from vllm_ascend_pd.protocol.transfer import Transfer, WriterRecord


class ReservationMachine:
    """The transfers of one D rank, driven by a table."""

    def __init__(
        self,
        table: Table[ReservationState, ReservationEvent],
        guards: ReservationGuards,
        incarnation: str,
        addresses: Memory,
        timers: Timers,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.actions: list[Action] = []
        self.transfers: dict[TransferId, Transfer] = {}
        self.watermark = -1
        self.incarnation = incarnation
        self.parking = Parking(timers.ready_timeout_s)
        self.guards = guards
        self._table = table
        self._fence: Fence = guards.fence
        self._timers = timers
        self._seq = 0
        self.move(addresses)

    def move(self, addresses: Memory) -> None:
        """Use these addresses in READY from now on."""
        self.addresses, self.memory = addresses, memory_hash(addresses)

    def lookup(self, transfer: TransferId) -> Transfer:
        record = self.transfers.get(transfer)
        if record is not None:
            return record
        known = self.incarnation and transfer.incarnation == self.incarnation
        above = not known or transfer.n > self.watermark
        return Transfer(transfer, ReservationState.UNBOUND if above else ReservationState.OVER)

    # -- the machine

    def fire(self, event: ReservationEvent, now: float, record: Transfer, cause: object = None) -> None:
        cell = look_up(self._table, record.state, event, self.counters, record.transfer)
        record.state = cell.into
        cell.effect(self, now, record, cause)

    def receive(self, now: float, record: Transfer, received: Incoming[Begin | Renew | Done | Failed]) -> None:
        event, cause = self.guards.event(record, received)
        self.fire(event, now, record, cause)

    def note(self, stage: str, record: Transfer, **facts: object) -> None:
        about = {"transfer": str(record.transfer), "push": record.push, "d_rank": self.guards.rank}
        self.actions.append(Note(stage, {**about, **facts}))

    def ignore(self, now: float, record: Transfer, cause: object) -> None:
        """Do nothing."""

    # -- parking

    def park(self, now: float, record: Transfer, received: Incoming[Begin | Failed]) -> None:
        """Keep the latest message of each contributor until the transfer is bound and its gate is open."""
        reason = self.parking.keep(now, received.peer, received.message)
        if reason:
            self.counters[reason] += 1

    def park_failure(self, now: float, record: Transfer, received: Incoming[Failed]) -> None:
        """Acknowledge and keep a FAILED that came before the bind, so that D need not wait for its deadline."""
        self.acknowledge(now, record, received)
        self.park(now, record, received)

    def unpark(self, now: float, record: Transfer) -> None:
        """Handle the parked messages as if they came now, in the state that the record has now."""
        for parked in self.parking.take(record.transfer):
            self.receive(now, record, Incoming(parked.peer, parked.message))

    # -- binding and opening

    def bind(self, now: float, record: Transfer, cause: None) -> None:
        self.watermark = record.transfer.n
        self.note("bound", record)
        for transfer in self.parking.transfers():
            if self.lookup(transfer).state is ReservationState.OVER or transfer.incarnation != self.incarnation:
                self.unpark(now, Transfer(transfer, ReservationState.OVER))  # skipped by the scheduler: over
        failed = self.parking.failed(record.transfer)
        if failed is not None:
            self.receive(now, record, Incoming(failed.peer, failed.message))

    def open(self, now: float, record: Transfer, cause: None) -> None:
        self.note("gate", record)
        self.unpark(now, record)

    def settle(self, now: float, record: Transfer, cause: None) -> None:
        record.settle_at = now + self._timers.lease_s

    # -- granting

    def grant_first(self, now: float, record: Transfer, received: Incoming[Begin]) -> None:
        """Bind the transfer to a push, its plan and its contributors, and grant."""
        begin = received.message
        record.push, record.plan_digest, record.contributors = begin.push, begin.plan_digest, begin.contributors
        record.writers = {contributor: WriterRecord(contributor) for contributor in self.guards.contributors(begin)}
        record.pushed = self.guards.pushed(begin)
        missing = len(self.guards.layers) - len(record.pushed)
        if missing:
            self.note("undrafted", record, layers=missing, prefill=begin.p_incarnation)
        self.grant(now, record, received)

    def grant(self, now: float, record: Transfer, received: Incoming[Begin | Renew]) -> None:
        """Start lease and timer H anew, and send READY."""
        self._fence.lease(record.author(received.message), received.message)
        self.grant_again(now, record, received)

    def ask_which(self, now: float, record: Transfer, received: Incoming[Begin]) -> None:
        self.actions.append(Send(received.peer, layout_request(received.message)))

    def grant_again(self, now: float, record: Transfer, received: Incoming[Begin | Renew]) -> None:
        asked = received.message
        record.author(asked).peer = received.peer
        self.actions.append(Send(received.peer, ready(asked, self._timers.lease_s, self.memory, self.addresses)))
        self.note("ready", record, contributor=str(asked.contributor), seq=asked.seq)

    # -- ending well

    def finish(self, now: float, record: Transfer, received: Incoming[Done]) -> None:
        done = received.message
        self.acknowledge(now, record, received)
        writer = record.author(done)
        writer.on(WriterEvent.DONE)
        writer.checksums = done.checksums
        record.cached = done.cached
        self.note("done", record, contributor=str(done.contributor), bytes=done.bytes)

    def finish_last(self, now: float, record: Transfer, received: Incoming[Done]) -> None:
        self.finish(now, record, received)
        self.report(now, record, None)

    def finish_and_verify(self, now: float, record: Transfer, received: Incoming[Done]) -> None:
        self.finish(now, record, received)
        self.compare(now, record, None)

    def compare(self, now: float, record: Transfer, cause: None) -> None:
        """Ask for the comparison of the memory with the sum of all checksums.

        DONE numbers layers by their place in the layout, `Verify` by their place in this worker's stage.
        """
        sums: dict[tuple[int, int], int] = {}
        first = self.guards.geometry.first_layer(self.guards.stage)
        for writer in record.writers.values():
            for layer, component, value in writer.checksums:
                place = layer - first, component
                sums[place] = (sums.get(place, 0) + value) % 2**64
        self.actions.append(Verify(record.transfer, sums, record.pushed))

    # -- ending badly

    def fail(self, now: float, record: Transfer, received: Incoming[Failed]) -> None:
        self.acknowledge(now, record, received)
        self.fence(now, record, failure_of(received.message))

    def fail_quietly(self, now: float, record: Transfer, received: Incoming[Failed]) -> None:
        self._fence.answered(record.author(received.message))
        self.fail(now, record, received)

    def fail_other_plan(self, now: float, record: Transfer, received: Incoming[Done]) -> None:
        done = received.message
        self.acknowledge(now, record, received)
        record.author(done).on(WriterEvent.DONE)
        detail = f"plan of {done.contributor}: prefill {done.plan_digest}, decode {record.plan_digest}"
        self.fence(now, record, Failure("PD-XFER-005", detail))

    def fail_cut(self, now: float, record: Transfer, cause: None) -> None:
        """Fail because access was revoked: every contributor that could write before is quiet now."""
        cut = record.leased()
        ranks = ", ".join(str(writer.contributor) for writer in cut)
        failure = Failure("PD-XFER-004", f"access of {ranks} was revoked")
        for writer in cut:
            self.cancel(writer, failure)
            writer.on(WriterEvent.REVOKED)
        self.fence(now, record, failure)

    def fence(self, now: float, record: Transfer, failure: Failure) -> None:
        """Grant no more authority, and wait until every contributor that had any is quiet."""
        record.failure, record.deadline = failure, None
        self.note("fencing", record, code=failure.code, detail=failure.detail)
        for writer in record.leased():
            if writer.state is WriterState.LEASED:
                writer.cancel = Repetition(now, self._timers.resend_first_s, self._timers.resend_max_s)
                self.cancel(writer, failure)
        self.unpark(now, record)
        self.prove(now, record, None)
        self._close_if_quiet(now, record)

    def report_corrupt(self, now: float, record: Transfer, failure: Failure) -> None:
        record.failure = failure
        self.report(now, record, None)

    def receive_done(self, now: float, record: Transfer, received: Incoming[Done]) -> None:
        """Take a DONE as proof that its writer is quiet: every write was acknowledged, so none is in flight."""
        self.acknowledge(now, record, received)
        self._quiet(now, record, record.author(received.message), WriterEvent.DONE, "done")

    def receive_quiet(self, now: float, record: Transfer, received: Incoming[Failed]) -> None:
        self.acknowledge(now, record, received)
        self._fence.answered(record.author(received.message))
        self.prove(now, record, None)

    def prove(self, now: float, record: Transfer, cause: None) -> None:
        for writer in record.leased():
            if self._fence.proven(writer):
                proof = "answer" if writer.state is WriterState.ANSWERED else "gone"
                self._quiet(now, record, writer, WriterEvent.PROVEN, proof)

    def revoke(self, now: float, record: Transfer, cause: None) -> None:
        for writer in record.leased():
            self._quiet(now, record, writer, WriterEvent.REVOKED, "revoked")

    def _quiet(self, now: float, record: Transfer, writer: WriterRecord, event: WriterEvent, proof: str) -> None:
        writer.on(event)
        self.note("quiet", record, contributor=str(writer.contributor), proof=proof)
        self._close_if_quiet(now, record)

    def _close_if_quiet(self, now: float, record: Transfer) -> None:
        if record.state is ReservationState.FENCING and not record.leased():
            self.fire(ReservationEvent.ALL_QUIET, now, record)

    def report(self, now: float, record: Transfer, cause: None) -> None:
        record.deadline = None
        failure = record.failure
        self.note("reported", record, ok=failure is None, code=failure.code if failure else "")
        self.actions.append(Report(record.transfer, failure, record.push, record.cached))

    def drop(self, now: float, record: Transfer, cause: None) -> None:
        del self.transfers[record.transfer]

    # -- answers

    def acknowledge(self, now: float, record: Transfer, received: Incoming[Done | Failed]) -> None:
        self.actions.append(Send(received.peer, ack(received.message)))

    def refuse(self, now: float, record: Transfer, refusal: Refusal) -> None:
        self.send_refused(refusal.received, refusal.code, refusal.detail)

    def refuse_over(self, now: float, record: Transfer, received: Incoming[Begin | Renew]) -> None:
        self.send_refused(received, RefusalCode.OVER)

    def refuse_cancelled(self, now: float, record: Transfer, received: Incoming[Begin | Renew]) -> None:
        self.send_refused(received, RefusalCode.CANCELLED, str(record.failure or "").strip())

    def send_refused(self, received: Incoming[Begin | Renew], code: RefusalCode, detail: str = "") -> None:
        self.counters["refused_" + code.value] += 1
        self.actions.append(Send(received.peer, refused(received.message, code, detail)))

    def cancel(self, writer: WriterRecord, failure: Failure | None) -> None:
        """Send CANCEL, for the first time or again."""
        if writer.granted is None or failure is None:
            raise LocalProtocolError(f"{writer!r} was never granted anything, or nothing has failed")
        self._seq += 1
        self.actions.append(Send(writer.peer, cancel(writer.granted, self._seq, failure)))
