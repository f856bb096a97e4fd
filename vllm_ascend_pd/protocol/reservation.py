# SPDX-License-Identifier: Apache-2.0
"""D rank: who may write into which reservation, and when nothing can be written there any more.

`Receiver` is pure: every method takes the time, changes the machine by the table in `tables.py`, and returns actions.
A transfer is reported once: complete, or failed and fenced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.errors import CATALOGUE, LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.protocol.actions import Action, Note, Report, Revoke, Send, Verify
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

_EVENTS: dict[type, ReservationEvent] = {
    Begin: ReservationEvent.BEGIN,
    Done: ReservationEvent.DONE,
    Failed: ReservationEvent.FAILED,
}
_CLOSED = (ReservationState.CLOSED_OK, ReservationState.CLOSED_FAILED)
_BOUND = (ReservationState.GATED, ReservationState.OPEN)


@dataclass(frozen=True, slots=True)
class _Cue:
    """What came with an event."""

    peer: Hashable = None
    message: Message | None = None
    code: str = ""
    detail: str = ""
    layer: str | None = None


@dataclass(slots=True)
class _Transfer:
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


class Receiver:
    """All transfers of one D worker.

    `incarnation` is that of the D engine, as in `TransferId.incarnation`; left empty, the first `bind` tells it.
    """

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
        self._transfers: dict[TransferId, _Transfer] = {}
        self._seq = 0
        self._wall: Agenda[TransferId] = Agenda()
        self._running: Agenda[TransferId] = Agenda()
        self._parking = Parking(timers.ready_timeout_s)
        self._actions: list[Action] = []

    # -- what the runtime tells

    def bind(self, now: float, transfer: TransferId, first: int, end: int, deadline_s: float) -> list[Action]:
        """The scheduler has allocated the blocks for tokens [first, end); the gate is still closed."""
        self._observe(now)
        if self._incarnation and transfer.incarnation != self._incarnation:
            raise LocalProtocolError(f"{transfer} is bound by an engine that is not {self._incarnation}")
        if transfer.n <= self._watermark:
            raise LocalProtocolError(f"{transfer} is bound at or below the watermark {self._watermark}")
        self._incarnation = transfer.incarnation
        record = _Transfer(transfer, ReservationState.UNBOUND, first, end, deadline=now + deadline_s)
        self._transfers[transfer] = record
        self._fire(ReservationEvent.BIND, now, record)
        return self._taken(record)

    def gate_open(self, now: float, transfer: TransferId) -> list[Action]:
        """The device has finished what ran before the bind: from now on a write harms nobody."""
        return self._local(ReservationEvent.GATE_OPEN, now, transfer)

    def cancel(self, now: float, transfer: TransferId, code: str, detail: str) -> list[Action]:
        """The scheduler does not want it any more, or knows that it failed elsewhere."""
        return self._local(ReservationEvent.CANCEL, now, transfer, _Cue(code=code, detail=detail))

    def settle(self, now: float, transfer: TransferId) -> list[Action]:
        """Prefill has ended well: what is missing must arrive within a lease."""
        return self._local(ReservationEvent.SETTLE, now, transfer)

    def verified(self, now: float, transfer: TransferId, layer: str | None) -> list[Action]:
        """The answer to Verify: the layer whose checksum differs, or None."""
        return self._local(ReservationEvent.VERIFIED, now, transfer, _Cue(layer=layer))

    def over(self, now: float, transfer: TransferId) -> list[Action]:
        """The scheduler has heard from all ranks: the record may go."""
        return self._local(ReservationEvent.OVER, now, transfer)

    def message(self, now: float, peer: Hashable, message: Message) -> list[Action]:
        self._observe(now)
        event = _EVENTS.get(type(message))
        if event is None:
            self.counters["unexpected_" + type(message).__name__.lower()] += 1
            return self._taken()
        cue = _Cue(peer, message)
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

    # -- the machine

    def _fire(self, event: ReservationEvent, now: float, record: _Transfer, cue: _Cue | None = None) -> None:
        rule = self.table[record.state].get(event)
        if rule is None:
            raise LocalProtocolError(f"{event.value} in state {record.state.value} of {record.transfer}")
        handler: Callable[[float, _Transfer, _Cue], None] = getattr(self, rule.handler)
        handler(now, record, cue or _Cue())
        if record.state not in rule.into:
            raise LocalProtocolError(f"{event.value} led {record.transfer} to {record.state.value}")

    def _local(
        self, event: ReservationEvent, now: float, transfer: TransferId, cue: _Cue | None = None
    ) -> list[Action]:
        self._observe(now)
        record = self._lookup(transfer)
        self._fire(event, now, record, cue)
        return self._taken(record)

    def _lookup(self, transfer: TransferId) -> _Transfer:
        record = self._transfers.get(transfer)
        if record is not None:
            return record
        known = self._incarnation and transfer.incarnation == self._incarnation
        above = not known or transfer.n > self._watermark
        return _Transfer(transfer, ReservationState.UNBOUND if above else ReservationState.OVER)

    def _observe(self, now: float) -> None:
        self._fence_of.observe(now)

    def _taken(self, *records: _Transfer) -> list[Action]:
        for record in records:
            self._schedule(record)
        actions, self._actions = self._actions, []
        return actions

    def _note(self, stage: str, record: _Transfer, **facts: object) -> None:
        about = {"transfer": str(record.transfer), "push": record.push, "d_rank": self._rank}
        self._actions.append(Note(stage, {**about, **facts}))

    # -- parking

    def _park(self, now: float, record: _Transfer, cue: _Cue) -> None:
        """Keep the latest word of each contributor until the transfer is bound and its gate open."""
        if not isinstance(cue.message, Begin | Failed):
            raise LocalProtocolError("only BEGIN and FAILED are parked")
        reason = self._parking.keep(now, cue.peer, cue.message)
        if reason:
            self.counters[reason] += 1

    def _park_failure(self, now: float, record: _Transfer, cue: _Cue) -> None:
        """P gave up before we were asked to bind: remember it, so that D need not wait for its deadline."""
        self._answer_ack(now, record, cue)
        self._park(now, record, cue)

    def _unpark(self, now: float, record: _Transfer) -> None:
        """Handle what was parked as if it came now, in the state that the record has now."""
        for parked in self._parking.take(record.transfer):
            self._fire(_EVENTS[type(parked.message)], now, record, _Cue(parked.peer, parked.message))

    # -- binding and opening

    def _bind(self, now: float, record: _Transfer, cue: _Cue) -> None:
        self._watermark = record.transfer.n
        record.state = ReservationState.GATED
        self._note("bound", record)
        for transfer in self._parking.transfers():
            if self._lookup(transfer).state is ReservationState.OVER or transfer.incarnation != self._incarnation:
                self._unpark(now, _Transfer(transfer, ReservationState.OVER))  # skipped by the scheduler: over
        failed = self._parking.failed(record.transfer)
        if failed is not None:
            self._fire(ReservationEvent.FAILED, now, record, _Cue(failed.peer, failed.message))

    def _open(self, now: float, record: _Transfer, cue: _Cue) -> None:
        record.state = ReservationState.OPEN
        self._note("gate", record)
        self._unpark(now, record)

    def _settle(self, now: float, record: _Transfer, cue: _Cue) -> None:
        soon = now + self._timers.lease_s
        record.deadline = soon if record.deadline is None else min(record.deadline, soon)

    # -- granting

    def _grant(self, now: float, record: _Transfer, cue: _Cue) -> None:
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

    def _agreed(self, record: _Transfer, cue: _Cue, begin: Begin) -> bool:
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

    def _lease(self, record: _Transfer, cue: _Cue, begin: Begin) -> None:
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

    def _finish(self, now: float, record: _Transfer, cue: _Cue) -> None:
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
            self._fence(now, record, _Cue(code="PD-XFER-005", detail=detail))
            return
        writer.state = WriterState.DONE
        writer.checksums = done.checksums
        self._note("done", record, contributor=str(done.contributor), bytes=done.bytes)
        if self._complete(record):
            self._conclude(now, record)

    def _complete(self, record: _Transfer) -> bool:
        return all(writer.state is WriterState.DONE for writer in record.writers.values())

    def _conclude(self, now: float, record: _Transfer) -> None:
        if not self._verify:
            self._close(record, ReservationState.CLOSED_OK)
            return
        record.state = ReservationState.VERIFYING
        sums: dict[str, int] = {}
        for writer in record.writers.values():
            for layer, value in writer.checksums:
                sums[layer] = (sums.get(layer, 0) + value) % 2**64
        self._actions.append(Verify(record.transfer, sums))

    def _verdict(self, now: float, record: _Transfer, cue: _Cue) -> None:
        if cue.layer is None:
            self._close(record, ReservationState.CLOSED_OK)
        else:
            record.failure = ("PD-WIRE-004", cue.layer)
            self._close(record, ReservationState.CLOSED_FAILED)

    # -- ending badly

    def _fail_before_lease(self, now: float, record: _Transfer, cue: _Cue) -> None:
        """Nobody was ever granted anything, so nobody has to be waited for."""
        self._acknowledge(cue)
        code, detail = _cause(cue)
        self._fence(now, record, _Cue(code=code, detail=detail))

    def _fail_by_peer(self, now: float, record: _Transfer, cue: _Cue) -> None:
        failed = cue.message
        self._acknowledge(cue)
        if not isinstance(failed, Failed):
            raise LocalProtocolError("FAILED without its message")
        if record.push:
            writer = self._author(record, cue)
            if writer is None or writer.state is WriterState.DONE:
                return
            writer.answered = writer.answered or failed.quiescent
        code, detail = _cause(cue)
        self._fence(now, record, _Cue(code=code, detail=detail))

    def _fence(self, now: float, record: _Transfer, cue: _Cue) -> None:
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

    def _close_if_fenced(self, record: _Transfer) -> None:
        if record.state is ReservationState.FENCING and not record.leased():
            self._close(record, ReservationState.CLOSED_FAILED)

    def _quiet_by_answer(self, now: float, record: _Transfer, cue: _Cue) -> None:
        answer = cue.message
        self._acknowledge(cue)
        writer = self._author(record, cue)
        if writer is not None and isinstance(answer, Done):
            self._quiet(record, writer, "done")  # every write was acknowledged: nothing is on its way
        elif writer is not None and isinstance(answer, Failed) and answer.quiescent:
            writer.answered = True
            writer.cancel = None
            self._quiet_by_proof(now, record, cue)

    def _quiet_by_proof(self, now: float, record: _Transfer, cue: _Cue) -> None:
        for writer in record.leased():
            if self._fence_of.proven(writer):
                self._quiet(record, writer, "answer" if writer.answered else "gone")

    def _cut(self, now: float, record: _Transfer, cue: _Cue) -> None:
        """Access was revoked: every contributor that could write before is quiet now."""
        cut = record.leased()
        if record.state is ReservationState.OPEN and cut:
            who = ", ".join(str(writer.contributor) for writer in cut)
            for writer in cut:
                self._send_cancel_once(record, writer, "access was revoked")
                writer.state = WriterState.QUIET
            self._fence(now, record, _Cue(code="PD-XFER-004", detail=f"access of {who} was revoked"))
        for writer in cut:
            if writer.state is WriterState.LEASED:
                self._quiet(record, writer, "revoked")

    def _quiet(self, record: _Transfer, writer: Writer, proof: str) -> None:
        if writer.state is WriterState.LEASED:
            writer.state = WriterState.QUIET
            writer.cancel = None
            self._note("quiet", record, contributor=str(writer.contributor), proof=proof)
            self._close_if_fenced(record)

    def _close(self, record: _Transfer, state: ReservationState) -> None:
        record.state = state
        record.deadline = None
        ok = state is ReservationState.CLOSED_OK
        code, detail = ("", "") if ok or record.failure is None else record.failure
        self._note("reported", record, ok=ok, code=code)
        self._actions.append(Report(record.transfer, ok, code, detail))

    def _drop(self, now: float, record: _Transfer, cue: _Cue) -> None:
        del self._transfers[record.transfer]
        record.state = ReservationState.OVER

    # -- answers

    def _author(self, record: _Transfer, cue: _Cue) -> Writer | None:
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

    def _acknowledge(self, cue: _Cue) -> None:
        message = cue.message
        if isinstance(message, Done | Failed):
            self._actions.append(Send(cue.peer, ack(message)))

    def _refuse(self, cue: _Cue, code: RefusalCode, detail: str = "") -> None:
        message = cue.message
        if message is None:
            raise LocalProtocolError("REFUSED without a BEGIN")
        self.counters["refused_" + code.value] += 1
        self._actions.append(Send(cue.peer, refused(message, code, detail)))

    def _send_cancel(self, record: _Transfer, writer: Writer) -> None:
        code, detail = record.failure or ("PD-XFER-002", "")
        self._send_cancel_once(record, writer, f"{code} {detail}")

    def _send_cancel_once(self, record: _Transfer, writer: Writer, cause: str) -> None:
        if writer.granted is None:
            raise LocalProtocolError(f"{writer.contributor} of {record.transfer} was never granted anything")
        self._seq += 1
        self._actions.append(Send(writer.peer, cancel(writer.granted, self._seq, cause)))

    def _answer_ack(self, now: float, record: _Transfer, cue: _Cue) -> None:
        self._acknowledge(cue)

    def _answer_unexpected(self, now: float, record: _Transfer, cue: _Cue) -> None:
        self.counters["unexpected_" + type(cue.message).__name__.lower()] += 1
        self._acknowledge(cue)

    def _answer_over(self, now: float, record: _Transfer, cue: _Cue) -> None:
        self._refuse(cue, RefusalCode.OVER)

    def _answer_cancelled(self, now: float, record: _Transfer, cue: _Cue) -> None:
        code, detail = record.failure or ("", "")
        self._refuse(cue, RefusalCode.CANCELLED, f"{code} {detail}".strip())

    def _answer_stale(self, now: float, record: _Transfer, cue: _Cue) -> None:
        if isinstance(cue.message, Begin):
            self._refuse(cue, RefusalCode.STALE, f"incarnation: decode {self._incarnation}")
        else:
            self._acknowledge(cue)

    def _answer_wrong_rank(self, now: float, record: _Transfer, cue: _Cue) -> None:
        if isinstance(cue.message, Begin):
            self._refuse(cue, RefusalCode.MISMATCH, f"d_rank: prefill {cue.message.d_rank}, decode {self._rank}")
        else:
            self._acknowledge(cue)

    def _ignore(self, now: float, record: _Transfer, cue: _Cue) -> None:
        pass

    # -- time

    def _wall_due(self, now: float, record: _Transfer) -> None:
        if record.deadline is not None and now >= record.deadline:
            stage = record.state.value
            self._fire(ReservationEvent.DEADLINE, now, record, _Cue(code="PD-XFER-001", detail=stage))
        for writer in record.writers.values():
            if writer.cancel is not None and now >= writer.cancel.at:
                writer.cancel.again(now)
                self._send_cancel(record, writer)

    def _running_due(self, now: float, record: _Transfer) -> None:
        if record.state is ReservationState.OPEN:
            lost = [str(writer.contributor) for writer in record.leased() if self._fence_of.lapsed(writer)]
            if lost:
                cue = _Cue(code="PD-XFER-004", detail=f"the lease of {', '.join(lost)} lapsed")
                self._fire(ReservationEvent.LAPSE, now, record, cue)
        elif record.state is ReservationState.FENCING:
            self._fire(ReservationEvent.PROVEN, now, record)
            if not self._fence_of.revoking and any(self._fence_of.must_revoke(w) for w in record.leased()):
                self._fence_of.revoking = True
                self._note("revoking", record)
                self._actions.append(Revoke())

    def _schedule(self, record: _Transfer) -> None:
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


def _cause(cue: _Cue) -> tuple[str, str]:
    """The code and the sentence in a FAILED."""
    text = cue.message.cause if isinstance(cue.message, Failed) else ""
    code, _, detail = text.partition(" ")
    return (code, detail) if code in CATALOGUE else ("PD-META-006", text)
