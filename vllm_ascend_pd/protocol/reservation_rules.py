# SPDX-License-Identifier: Apache-2.0
"""D rank: what happens at each event. The table in `tables.py` names these handlers and says where each may lead;
`reservation.py` is the face that the runtime sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.errors import CATALOGUE, LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.protocol.actions import Action, Note, Report, Send, Verify
from vllm_ascend_pd.protocol.agreement import differences
from vllm_ascend_pd.protocol.fence import Fence, Writer
from vllm_ascend_pd.protocol.identity import Contributor, TransferId
from vllm_ascend_pd.protocol.messages import (
    Begin,
    Done,
    Failed,
    LayerAddresses,
    Message,
    RefusalCode,
    layout_hash,
)
from vllm_ascend_pd.protocol.parking import Parking
from vllm_ascend_pd.protocol.tables import RESERVATION_TABLE, ReservationEvent, ReservationState, WriterState
from vllm_ascend_pd.protocol.timing import Agenda, Backoff
from vllm_ascend_pd.protocol.words import ack, cancel, ready, refused

EVENTS: dict[type, ReservationEvent] = {
    Begin: ReservationEvent.BEGIN,
    Done: ReservationEvent.DONE,
    Failed: ReservationEvent.FAILED,
}


@dataclass(frozen=True, slots=True)
class Cue:
    """What came with an event."""

    peer: Hashable = None
    message: Message | None = None
    code: str = ""
    detail: str = ""
    layer: str | None = None


@dataclass(slots=True)
class Transfer:
    """One reservation on this rank."""

    transfer: TransferId
    state: ReservationState
    first: int = 0
    end: int = 0
    deadline: float | None = None
    push: str = ""  # bound by the first BEGIN that is granted
    plan_digest: str = ""
    writers: dict[Contributor, Writer] = field(default_factory=dict)
    failure: tuple[str, str] | None = None

    def leased(self) -> list[Writer]:
        return [writer for writer in self.writers.values() if writer.state is WriterState.LEASED]


class ReservationRules:
    """The records of one D rank and the handlers that change them."""

    table = RESERVATION_TABLE

    def __init__(
        self,
        *,
        incarnation: str,
        rank: int,
        model: str,
        geometry: CacheGeometry,
        addresses: LayerAddresses,
        timers: Timers,
        quiet_s: float,
        verify: bool,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._incarnation = incarnation
        self._rank = rank
        self._model = model
        self._geometry = geometry
        self._addresses = addresses
        self._layout = layout_hash(addresses)
        self._timers = timers
        self._verify = verify
        self._fence_of = Fence(timers, quiet_s)
        self._watermark = -1
        self._transfers: dict[TransferId, Transfer] = {}
        self._seq = 0
        self._parking = Parking(timers.ready_timeout_s)
        self._wall: Agenda[TransferId] = Agenda()
        self._running: Agenda[TransferId] = Agenda()  # on the running clock
        self._actions: list[Action] = []

    # -- the machine

    def _fire(self, event: ReservationEvent, now: float, record: Transfer, cue: Cue | None = None) -> None:
        rule = self.table[record.state].get(event)
        if rule is None:
            raise LocalProtocolError(f"{event.value} in state {record.state.value} of {record.transfer}")
        handler: Callable[[float, Transfer, Cue], None] = getattr(self, rule.handler)
        handler(now, record, cue or Cue())
        if record.state not in rule.into:
            raise LocalProtocolError(f"{event.value} led {record.transfer} to {record.state.value}")

    def _lookup(self, transfer: TransferId) -> Transfer:
        record = self._transfers.get(transfer)
        if record is not None:
            return record
        known = self._incarnation and transfer.incarnation == self._incarnation
        above = not known or transfer.n > self._watermark
        return Transfer(transfer, ReservationState.UNBOUND if above else ReservationState.OVER)

    def _note(self, stage: str, record: Transfer, **facts: object) -> None:
        about = {"transfer": str(record.transfer), "push": record.push, "d_rank": self._rank}
        self._actions.append(Note(stage, {**about, **facts}))

    # -- parking

    def _park(self, now: float, record: Transfer, cue: Cue) -> None:
        """Keep the latest word of each contributor until the transfer is bound and its gate open."""
        if not isinstance(cue.message, Begin | Failed):
            raise LocalProtocolError("only BEGIN and FAILED are parked")
        reason = self._parking.keep(now, cue.peer, cue.message)
        if reason:
            self.counters[reason] += 1

    def _park_failure(self, now: float, record: Transfer, cue: Cue) -> None:
        """P gave up before we were asked to bind: remember it, so that D need not wait for its deadline."""
        self._answer_ack(now, record, cue)
        self._park(now, record, cue)

    def _unpark(self, now: float, record: Transfer) -> None:
        """Handle what was parked as if it came now, in the state that the record has now."""
        for parked in self._parking.take(record.transfer):
            self._fire(EVENTS[type(parked.message)], now, record, Cue(parked.peer, parked.message))

    # -- binding and opening

    def _bind(self, now: float, record: Transfer, cue: Cue) -> None:
        self._watermark = record.transfer.n
        record.state = ReservationState.GATED
        self._note("bound", record)
        for transfer in self._parking.transfers():
            if self._lookup(transfer).state is ReservationState.OVER or transfer.incarnation != self._incarnation:
                self._unpark(now, Transfer(transfer, ReservationState.OVER))  # skipped by the scheduler: over
        failed = self._parking.failed(record.transfer)
        if failed is not None:
            self._fire(ReservationEvent.FAILED, now, record, Cue(failed.peer, failed.message))

    def _open(self, now: float, record: Transfer, cue: Cue) -> None:
        record.state = ReservationState.OPEN
        self._note("gate", record)
        self._unpark(now, record)

    def _settle(self, now: float, record: Transfer, cue: Cue) -> None:
        soon = now + self._timers.lease_s
        record.deadline = soon if record.deadline is None else min(record.deadline, soon)

    # -- granting

    def _grant(self, now: float, record: Transfer, cue: Cue) -> None:
        begin = cue.message
        if not isinstance(begin, Begin):
            raise LocalProtocolError("BEGIN without its message")
        if self._fence_of.is_gone(begin.p_incarnation):
            self.counters["begin_of_the_gone"] += 1
        elif self._fence_of.revoking:
            self._park(now, record, cue)  # the addresses are about to change
        elif record.push and begin.push != record.push:
            self._refuse(cue, RefusalCode.BOUND, f"push: prefill {begin.push}, decode {record.push}")
        elif self._agreed(record, cue, begin):
            self._lease(record, cue, begin)

    def _agreed(self, record: Transfer, cue: Cue, begin: Begin) -> bool:
        """Compare once per contributor; renewals are only compared with what was agreed."""
        writer = record.writers.get(begin.contributor)
        if writer is None or writer.state is WriterState.AWAITED:
            found = differences(begin, self._model, self._geometry, self._rank, record.first, record.end)
            if begin.contributor not in begin.contributors:
                found.append(f"contributor: {begin.contributor} is not in the set")
        else:
            found = []
        if record.push and begin.plan_digest != record.plan_digest:
            found.append(f"plan: prefill {begin.plan_digest}, decode {record.plan_digest}")
        if record.push and set(begin.contributors) != set(record.writers):
            found.append(f"contributors: prefill {len(begin.contributors)}, decode {len(record.writers)}")
        if found:
            self._refuse(cue, RefusalCode.MISMATCH, "; ".join(found))
            return False
        if not record.push:
            record.push = begin.push
            record.plan_digest = begin.plan_digest
            record.writers = {contributor: Writer(contributor) for contributor in begin.contributors}
        return True

    def _lease(self, record: Transfer, cue: Cue, begin: Begin) -> None:
        writer = record.writers[begin.contributor]
        if writer.state in (WriterState.DONE, WriterState.QUIET) or begin.seq < writer.seq:
            self.counters["late_begin"] += 1
            return
        if writer.state is WriterState.LEASED and begin.p_incarnation != writer.p_incarnation:
            self._refuse(cue, RefusalCode.BOUND, f"{begin.contributor} was another process")
            return
        if writer.state is WriterState.AWAITED or begin.seq > writer.seq:
            self._fence_of.lease(writer, begin)
        writer.peer = cue.peer
        granted = ready(begin, self._timers.lease_s, self._layout, self._addresses)
        self._actions.append(Send(cue.peer, granted))
        self._note("ready", record, contributor=str(begin.contributor), seq=begin.seq)

    # -- ending well

    def _finish(self, now: float, record: Transfer, cue: Cue) -> None:
        done = cue.message
        self._acknowledge(cue)
        writer = self._author(record, cue)
        if not isinstance(done, Done) or writer is None:
            return
        if writer.state is not WriterState.LEASED:
            self.counters["late_done" if writer.state is WriterState.DONE else "unexpected_done"] += 1
            return
        if done.plan_digest != record.plan_digest:
            writer.state = WriterState.QUIET
            detail = f"plan of {done.contributor}: prefill {done.plan_digest}, decode {record.plan_digest}"
            self._fence(now, record, Cue(code="PD-XFER-005", detail=detail))
            return
        writer.state = WriterState.DONE
        writer.checksums = done.checksums
        self._note("done", record, contributor=str(done.contributor), bytes=done.bytes)
        if self._complete(record):
            self._conclude(now, record)

    def _complete(self, record: Transfer) -> bool:
        return all(writer.state is WriterState.DONE for writer in record.writers.values())

    def _conclude(self, now: float, record: Transfer) -> None:
        if not self._verify:
            self._close(record, ReservationState.CLOSED_OK)
            return
        record.state = ReservationState.VERIFYING
        sums: dict[str, int] = {}
        for writer in record.writers.values():
            for layer, value in writer.checksums:
                sums[layer] = (sums.get(layer, 0) + value) % 2**64
        self._actions.append(Verify(record.transfer, sums))

    def _verdict(self, now: float, record: Transfer, cue: Cue) -> None:
        if cue.layer is None:
            self._close(record, ReservationState.CLOSED_OK)
        else:
            record.failure = ("PD-WIRE-004", cue.layer)
            self._close(record, ReservationState.CLOSED_FAILED)

    # -- ending badly

    def _fail_before_lease(self, now: float, record: Transfer, cue: Cue) -> None:
        """Nobody was ever granted anything, so nobody has to be waited for."""
        self._acknowledge(cue)
        code, detail = cause_of(cue)
        self._fence(now, record, Cue(code=code, detail=detail))

    def _fail_by_peer(self, now: float, record: Transfer, cue: Cue) -> None:
        failed = cue.message
        self._acknowledge(cue)
        if not isinstance(failed, Failed):
            raise LocalProtocolError("FAILED without its message")
        if record.push:
            writer = self._author(record, cue)
            if writer is None or writer.state is WriterState.DONE:
                return
            writer.answered = writer.answered or failed.quiescent
        code, detail = cause_of(cue)
        self._fence(now, record, Cue(code=code, detail=detail))

    def _fence(self, now: float, record: Transfer, cue: Cue) -> None:
        """No new authority; wait until every contributor that had any is quiet."""
        record.state = ReservationState.FENCING
        record.failure = (cue.code, cue.detail)
        record.deadline = None
        self._note("fencing", record, code=cue.code, detail=cue.detail)
        for writer in record.leased():
            if not writer.answered:
                writer.cancel = Backoff(now, self._timers.resend_first_s, self._timers.resend_max_s)
                self._send_cancel(record, writer)
        self._unpark(now, record)
        self._quiet_by_proof(now, record, cue)
        self._close_if_fenced(record)

    def _close_if_fenced(self, record: Transfer) -> None:
        if record.state is ReservationState.FENCING and not record.leased():
            self._close(record, ReservationState.CLOSED_FAILED)

    def _quiet_by_answer(self, now: float, record: Transfer, cue: Cue) -> None:
        answer = cue.message
        self._acknowledge(cue)
        writer = self._author(record, cue)
        if writer is not None and isinstance(answer, Done):
            self._quiet(record, writer, "done")  # every write was acknowledged: nothing is on its way
        elif writer is not None and isinstance(answer, Failed) and answer.quiescent:
            writer.answered = True
            writer.cancel = None
            self._quiet_by_proof(now, record, cue)

    def _quiet_by_proof(self, now: float, record: Transfer, cue: Cue) -> None:
        for writer in record.leased():
            if self._fence_of.proven(writer):
                self._quiet(record, writer, "answer" if writer.answered else "gone")

    def _cut(self, now: float, record: Transfer, cue: Cue) -> None:
        """Access was revoked: every contributor that could write before is quiet now."""
        cut = record.leased()
        if record.state is ReservationState.OPEN and cut:
            who = ", ".join(str(writer.contributor) for writer in cut)
            for writer in cut:
                self._send_cancel_once(record, writer, "access was revoked")
                writer.state = WriterState.QUIET
            self._fence(now, record, Cue(code="PD-XFER-004", detail=f"access of {who} was revoked"))
        for writer in cut:
            if writer.state is WriterState.LEASED:
                self._quiet(record, writer, "revoked")

    def _quiet(self, record: Transfer, writer: Writer, proof: str) -> None:
        if writer.state is WriterState.LEASED:
            writer.state = WriterState.QUIET
            writer.cancel = None
            self._note("quiet", record, contributor=str(writer.contributor), proof=proof)
            self._close_if_fenced(record)

    def _close(self, record: Transfer, state: ReservationState) -> None:
        record.state = state
        record.deadline = None
        ok = state is ReservationState.CLOSED_OK
        code, detail = ("", "") if ok or record.failure is None else record.failure
        self._note("reported", record, ok=ok, code=code)
        self._actions.append(Report(record.transfer, ok, code, detail, record.push))

    def _drop(self, now: float, record: Transfer, cue: Cue) -> None:
        del self._transfers[record.transfer]
        record.state = ReservationState.OVER

    # -- answers

    def _author(self, record: Transfer, cue: Cue) -> Writer | None:
        """The contributor that speaks, if it is the process and the push that we granted authority to."""
        message = cue.message
        if message is None:
            return None
        writer = record.writers.get(message.contributor)
        if writer is None or message.push != record.push:
            self.counters["not_a_contributor"] += 1
            return None
        if writer.p_incarnation and not self._same_process(writer, message.p_incarnation):
            self.counters["other_incarnation"] += 1
            return None
        return writer

    def _same_process(self, writer: Writer, p_incarnation: str) -> bool:
        return writer.p_incarnation == p_incarnation

    def _acknowledge(self, cue: Cue) -> None:
        message = cue.message
        if isinstance(message, Done | Failed):
            self._actions.append(Send(cue.peer, ack(message)))

    def _refuse(self, cue: Cue, code: RefusalCode, detail: str = "") -> None:
        message = cue.message
        if message is None:
            raise LocalProtocolError("REFUSED without a BEGIN")
        self.counters["refused_" + code.value] += 1
        self._actions.append(Send(cue.peer, refused(message, code, detail)))

    def _send_cancel(self, record: Transfer, writer: Writer) -> None:
        code, detail = record.failure or ("PD-XFER-002", "")
        self._send_cancel_once(record, writer, f"{code} {detail}")

    def _send_cancel_once(self, record: Transfer, writer: Writer, cause: str) -> None:
        if writer.granted is None:
            raise LocalProtocolError(f"{writer.contributor} of {record.transfer} was never granted anything")
        self._seq += 1
        self._actions.append(Send(writer.peer, cancel(writer.granted, self._seq, cause)))

    def _answer_ack(self, now: float, record: Transfer, cue: Cue) -> None:
        self._acknowledge(cue)

    def _answer_unexpected(self, now: float, record: Transfer, cue: Cue) -> None:
        self.counters["unexpected_" + type(cue.message).__name__.lower()] += 1
        self._acknowledge(cue)

    def _answer_over(self, now: float, record: Transfer, cue: Cue) -> None:
        self._refuse(cue, RefusalCode.OVER)

    def _answer_cancelled(self, now: float, record: Transfer, cue: Cue) -> None:
        code, detail = record.failure or ("", "")
        self._refuse(cue, RefusalCode.CANCELLED, f"{code} {detail}".strip())

    def _answer_stale(self, now: float, record: Transfer, cue: Cue) -> None:
        if isinstance(cue.message, Begin):
            self._refuse(cue, RefusalCode.STALE, f"incarnation: decode {self._incarnation}")
        else:
            self._acknowledge(cue)

    def _answer_wrong_rank(self, now: float, record: Transfer, cue: Cue) -> None:
        if isinstance(cue.message, Begin):
            self._refuse(cue, RefusalCode.MISMATCH, f"d_rank: prefill {cue.message.d_rank}, decode {self._rank}")
        else:
            self._acknowledge(cue)

    def _ignore(self, now: float, record: Transfer, cue: Cue) -> None:
        pass


def cause_of(cue: Cue) -> tuple[str, str]:
    """The code and the sentence in a FAILED."""
    text = cue.message.cause if isinstance(cue.message, Failed) else ""
    code, _, detail = text.partition(" ")
    return (code, detail) if code in CATALOGUE else ("PD-META-006", text)
