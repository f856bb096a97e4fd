# SPDX-License-Identifier: Apache-2.0
"""Guards of both state machines: they decide which event a message or a timer is. They change nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.pairing import pushed
from vllm_ascend_pd.protocol.agreement import contributor_pairs, differences
from vllm_ascend_pd.protocol.fence import Fence
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.layouts import EngineLayout, Layouts
from vllm_ascend_pd.protocol.messages import (
    Ack,
    Begin,
    Cancel,
    Done,
    Failed,
    LayoutRequest,
    Memory,
    Message,
    Ready,
    RefusalCode,
    Refused,
    Renew,
    message_name,
)
from vllm_ascend_pd.protocol.pair import OPEN, PairRecord
from vllm_ascend_pd.protocol.states import (
    Incoming,
    PairEvent,
    PairState,
    ReservationEvent,
    ReservationState,
    WriterState,
)
from vllm_ascend_pd.protocol.timing import RunningClock, authority_until
from vllm_ascend_pd.protocol.transfer import Transfer, WriterRecord

TO_DECODE: Mapping[type, ReservationEvent] = {
    Begin: ReservationEvent.BEGIN,
    Renew: ReservationEvent.RENEW,
    Done: ReservationEvent.DONE,
    Failed: ReservationEvent.FAILED,
}
TO_PREFILL: Mapping[type, PairEvent] = {
    Ready: PairEvent.READY,
    Refused: PairEvent.REFUSED,
    Cancel: PairEvent.CANCEL,
    LayoutRequest: PairEvent.WHICH,
    Ack: PairEvent.ACK,
}


Asked = TypeVar("Asked", Begin, Renew, covariant=True)


@dataclass(frozen=True, slots=True)
class Refusal:
    """BEGIN or RENEW that D refuses, and the reason."""

    received: Incoming[Begin | Renew]
    code: RefusalCode
    detail: str


@dataclass(frozen=True, slots=True)
class ReservationGuards:
    """D: the event that a message is for a transfer, by what this rank serves and knows."""

    rank: int  # this worker, counted through all stages
    model: str
    geometry: CacheGeometry  # of the whole engine
    verify: bool
    fence: Fence
    layouts: Layouts  # of P engines

    def event(
        self, record: Transfer, received: Incoming[Message]
    ) -> tuple[ReservationEvent, Incoming[Message] | Refusal]:
        message = received.message
        if record.state is ReservationState.OPEN:
            if isinstance(message, Begin):
                return self._begin(record, Incoming(received.peer, message))
            if isinstance(message, Renew):
                return self._renew(record, Incoming(received.peer, message))
            if isinstance(message, Failed) and not record.bound:
                return ReservationEvent.EARLY_FAILED, received
        if record.state in (ReservationState.OPEN, ReservationState.FENCING) and isinstance(message, Done | Failed):
            known = self._while_open if record.state is ReservationState.OPEN else self._while_fencing
            return self._unauthorised_event(record, message) or known(record, message), received
        return TO_DECODE[type(message)], received

    def _begin(self, record: Transfer, received: Incoming[Begin]) -> tuple[ReservationEvent, Incoming[Begin] | Refusal]:
        e, begin = ReservationEvent, received.message
        if self.fence.is_gone(begin.p_incarnation):
            return e.BEGIN_OF_GONE, received
        if self.fence.revoking:
            return e.BEGIN_IN_REVOCATION, received
        if record.bound and begin.push != record.push:
            detail = f"push: prefill {begin.push}, decode {record.push}"
            return e.BEGIN_OF_ANOTHER, Refusal(received, RefusalCode.BOUND, detail)
        writer = record.writers.get(begin.contributor)
        unlike = self._differences(record, writer, begin)
        if unlike is None:
            return e.BEGIN_UNKNOWN_LAYOUT, received
        if unlike:
            return e.BEGIN_UNFIT, Refusal(received, RefusalCode.MISMATCH, "; ".join(unlike))
        if writer is None:
            return e.FIRST_BEGIN, received
        if writer.state is WriterState.AWAITED:
            return e.BEGIN, received
        return self._of_granted(e.BEGIN, writer, received)

    def _renew(self, record: Transfer, received: Incoming[Renew]) -> tuple[ReservationEvent, Incoming[Renew] | Refusal]:
        e, renew = ReservationEvent, received.message
        writer = record.writers.get(renew.contributor)
        if self.fence.is_gone(renew.p_incarnation):
            return e.BEGIN_OF_GONE, received
        if writer is None or renew.push != record.push:
            return e.BEGIN_OF_ANOTHER, Refusal(received, RefusalCode.BOUND, f"push: decode {record.push or 'none'}")
        if self.fence.revoking:
            return e.LATE_BEGIN, received  # its access is about to be revoked
        return self._of_granted(e.RENEW, writer, received)

    def _of_granted(
        self, event: ReservationEvent, writer: WriterRecord, received: Incoming[Asked]
    ) -> tuple[ReservationEvent, Incoming[Asked] | Refusal]:
        e, asked = ReservationEvent, received.message
        if writer.state is not WriterState.LEASED or asked.seq < writer.seq:
            return e.LATE_BEGIN, received
        if asked.p_incarnation != writer.p_incarnation:
            return e.BEGIN_OF_ANOTHER, Refusal(received, RefusalCode.BOUND, f"{asked.contributor} was another process")
        return (event if asked.seq > writer.seq else e.BEGIN_AGAIN), received

    def _differences(self, record: Transfer, writer: WriterRecord | None, begin: Begin) -> list[str] | None:
        """Return how a BEGIN differs from what is expected; None if its layout is not known.

        A contributor's BEGIN is compared in full until one is granted. A later one is only compared with what was
        agreed.
        """
        unlike = []
        if writer is None or writer.state is WriterState.AWAITED:
            theirs = self.layouts.get(begin.layout)
            if theirs is None:
                return None
            unlike = differences(begin, theirs, self.model, self.geometry, self.rank, record.first, record.end)
        if record.bound and begin.plan_digest != record.plan_digest:
            unlike.append(f"plan: prefill {begin.plan_digest}, decode {record.plan_digest}")
        if record.bound and begin.contributors != record.contributors:
            unlike.append("contributors: they are not those of the first BEGIN")
        return unlike

    def contributors(self, begin: Begin) -> tuple[Contributor, ...]:
        """Return the contributors to the push of a BEGIN that has no differences."""
        return contributor_pairs(self._theirs(begin), self.geometry, self.rank)

    def pushed(self, begin: Begin) -> frozenset[str]:
        """Return the names of this worker's layers that the push of such a BEGIN contains."""
        return pushed(self._theirs(begin), self.geometry).intersection(self.layers)

    @property
    def stage(self) -> int:
        return self.geometry.stage_and_rank(self.rank)[0]

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers of this worker's stage."""
        return self.geometry.stages[self.stage]

    def _theirs(self, begin: Begin) -> CacheGeometry:
        theirs = self.layouts.get(begin.layout)
        if not isinstance(theirs, EngineLayout):
            raise LocalProtocolError(f"layout {begin.layout} is not known")
        return theirs.geometry

    def _unauthorised_event(self, record: Transfer, message: Done | Failed) -> ReservationEvent | None:
        """Return the event of a message from an unauthorised sender; None if the sender is authorised.

        Only the push that was bound, and the process that was granted its lease, are.
        """
        writer = record.writers.get(message.contributor)
        if writer is None or message.push != record.push:
            return ReservationEvent.NOT_A_CONTRIBUTOR
        if writer.p_incarnation and not self.same_process(writer, message.p_incarnation):
            return ReservationEvent.OTHER_PROCESS
        return None

    def same_process(self, writer: WriterRecord, p_incarnation: str) -> bool:
        return writer.p_incarnation == p_incarnation

    def _while_open(self, record: Transfer, message: Done | Failed) -> ReservationEvent:
        e, state = ReservationEvent, record.author(message).state
        if isinstance(message, Failed):
            quiet_or_loud = e.FAILED if message.quiescent else e.FAILED_IN_FLIGHT
            return {WriterState.AWAITED: e.EARLY_FAILED, WriterState.DONE: e.LATE_FAILED}.get(state, quiet_or_loud)
        if state is not WriterState.LEASED:
            return e.EARLY_DONE if state is WriterState.AWAITED else e.LATE_DONE
        if message.plan_digest != record.plan_digest:
            return e.WRONG_PLAN_DONE
        if sum(writer.state is not WriterState.DONE for writer in record.writers.values()) > 1:
            return e.DONE
        return e.LAST_DONE_TO_VERIFY if self.verify else e.LAST_DONE

    def _while_fencing(self, record: Transfer, message: Done | Failed) -> ReservationEvent:
        if isinstance(message, Failed):
            return ReservationEvent.FAILED if message.quiescent else ReservationEvent.FAILED_IN_FLIGHT
        return ReservationEvent.DONE if record.author(message).waited_for else ReservationEvent.LATE_DONE

    def revocation(self, record: Transfer) -> ReservationEvent:
        cut = record.state is ReservationState.OPEN and record.leased()
        return ReservationEvent.CUT if cut else ReservationEvent.REVOKED


Memories = OrderedDict[Hashable, tuple[str, Memory]]  # by peer: the name of its addresses, and the addresses


def addresses_of(ready: Ready, pair: PairRecord, memories: Memories) -> tuple[str, Memory | None]:
    """Return the name and the addresses of a READY: those it carries, or those known of the peer, or of the pair."""
    if ready.addresses is not None:
        return ready.memory, ready.addresses
    known = memories.get(pair.destination.peer)
    return known if known is not None and known[0] == ready.memory else (pair.memory, pair.addresses)


@dataclass(frozen=True, slots=True)
class PairGuards:
    """P: the event that a message is for a pair, and the event that its writes have led to."""

    clock: RunningClock
    memories: Memories

    def event(self, now: float, pair: PairRecord | None, message: Message) -> PairEvent:
        if pair is not None and isinstance(message, Ready) and pair.state in OPEN:
            return self._ready(now, pair, message)
        if pair is not None and isinstance(message, LayoutRequest) and pair.state is PairState.ASK and pair.asked_which:
            return PairEvent.WHICH_AGAIN
        if pair is not None and isinstance(message, Ack) and pair.final is not None:
            ours = message.seq == pair.final.seq and message.kind == message_name(pair.final)
            return PairEvent.ACK if ours else PairEvent.ACK_OF_ANOTHER
        return TO_PREFILL[type(message)]

    def _ready(self, now: float, pair: PairRecord, ready: Ready) -> PairEvent:
        sent = pair.sent.get(ready.seq)
        if sent is None:
            return PairEvent.READY_UNASKED
        until = authority_until(sent, ready.lease_s)
        if until <= now or until <= (pair.authority or until - 1):
            return PairEvent.READY_LATE
        memory, addresses = addresses_of(ready, pair, self.memories)
        if addresses is None or memory != ready.memory:
            return PairEvent.READY_NO_ADDRESSES
        if pair.addresses is not None and pair.memory != memory:
            return PairEvent.READY_MOVED
        return PairEvent.READY if pair.destination.fits(addresses) else PairEvent.READY_UNFIT

    def submission(self, now: float, pair: PairRecord) -> PairEvent:
        late = pair.state is PairState.PUSH and not pair.authorised(now)
        return PairEvent.SUBMITTED_LATE if late else PairEvent.SUBMITTED

    def end(self, pair: PairRecord) -> PairEvent | None:
        """Return the event that closes the pair; None if it may not close yet."""
        if pair.state is PairState.PUSH:
            return PairEvent.COMPLETE if pair.complete else None
        if not self.settled(pair):
            return None
        return PairEvent.COMPLETE if self.delivered(pair) else PairEvent.QUIET

    def settled(self, pair: PairRecord) -> bool:
        return not pair.coverage.out and self.clock.seconds >= pair.quiet_at

    def delivered(self, pair: PairRecord) -> bool:
        """Return whether everything has arrived in spite of the failure."""
        return pair.complete and pair.authority is not None and not pair.owing
