# SPDX-License-Identifier: Apache-2.0
"""What came, precisely: the conditions of both machines, each with the name of an event. They change nothing."""

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
from vllm_ascend_pd.protocol.layouts import Layouts, Told
from vllm_ascend_pd.protocol.messages import (
    Ack,
    Begin,
    Cancel,
    Done,
    Failed,
    Memory,
    Message,
    Ready,
    RefusalCode,
    Refused,
    Renew,
    Which,
)
from vllm_ascend_pd.protocol.pair import OPEN, Pair
from vllm_ascend_pd.protocol.states import (
    Heard,
    PairEvent,
    PairState,
    ReservationEvent,
    ReservationState,
    WriterState,
)
from vllm_ascend_pd.protocol.timing import RunningClock, authority_until
from vllm_ascend_pd.protocol.transfer import Transfer, Writer

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
    Which: PairEvent.WHICH,
    Ack: PairEvent.ACK,
}


Asked = TypeVar("Asked", Begin, Renew, covariant=True)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A BEGIN or RENEW to which D says no, and why."""

    heard: Heard[Begin | Renew]
    code: RefusalCode
    detail: str


@dataclass(frozen=True, slots=True)
class ReservationGuards:
    """D: what a message is to a transfer, by what this rank serves and knows."""

    rank: int  # this worker, counted through all stages
    model: str
    geometry: CacheGeometry  # of the whole engine
    verify: bool
    fence: Fence
    layouts: Layouts  # of P's

    def event(self, record: Transfer, heard: Heard[Message]) -> tuple[ReservationEvent, Heard[Message] | Refusal]:
        message = heard.message
        if record.state is ReservationState.OPEN:
            if isinstance(message, Begin):
                return self._begin(record, Heard(heard.peer, message))
            if isinstance(message, Renew):
                return self._renew(record, Heard(heard.peer, message))
            if isinstance(message, Failed) and not record.bound:
                return ReservationEvent.EARLY_FAILED, heard
        if record.state in (ReservationState.OPEN, ReservationState.FENCING) and isinstance(message, Done | Failed):
            known = self._while_open if record.state is ReservationState.OPEN else self._while_fencing
            return self._without_say(record, message) or known(record, message), heard
        return TO_DECODE[type(message)], heard

    def _begin(self, record: Transfer, heard: Heard[Begin]) -> tuple[ReservationEvent, Heard[Begin] | Refusal]:
        e, begin = ReservationEvent, heard.message
        if self.fence.is_gone(begin.p_incarnation):
            return e.BEGIN_OF_GONE, heard
        if self.fence.revoking:
            return e.BEGIN_IN_REVOCATION, heard
        if record.bound and begin.push != record.push:
            detail = f"push: prefill {begin.push}, decode {record.push}"
            return e.BEGIN_OF_ANOTHER, Refusal(heard, RefusalCode.BOUND, detail)
        writer = record.writers.get(begin.contributor)
        found = self._differences(record, writer, begin)
        if found is None:
            return e.BEGIN_UNTOLD, heard
        if found:
            return e.BEGIN_UNFIT, Refusal(heard, RefusalCode.MISMATCH, "; ".join(found))
        if writer is None:
            return e.FIRST_BEGIN, heard
        if writer.state is WriterState.AWAITED:
            return e.BEGIN, heard
        return self._of_granted(e.BEGIN, writer, heard)

    def _renew(self, record: Transfer, heard: Heard[Renew]) -> tuple[ReservationEvent, Heard[Renew] | Refusal]:
        e, renew = ReservationEvent, heard.message
        writer = record.writers.get(renew.contributor)
        if self.fence.is_gone(renew.p_incarnation):
            return e.BEGIN_OF_GONE, heard
        if writer is None or renew.push != record.push:
            return e.BEGIN_OF_ANOTHER, Refusal(heard, RefusalCode.BOUND, f"push: decode {record.push or 'none'}")
        if self.fence.revoking:
            return e.LATE_BEGIN, heard  # it is about to be cut off
        return self._of_granted(e.RENEW, writer, heard)

    def _of_granted(
        self, event: ReservationEvent, writer: Writer, heard: Heard[Asked]
    ) -> tuple[ReservationEvent, Heard[Asked] | Refusal]:
        e, asked = ReservationEvent, heard.message
        if writer.state is not WriterState.LEASED or asked.seq < writer.seq:
            return e.LATE_BEGIN, heard
        if asked.p_incarnation != writer.p_incarnation:
            return e.BEGIN_OF_ANOTHER, Refusal(heard, RefusalCode.BOUND, f"{asked.contributor} was another process")
        return (event if asked.seq > writer.seq else e.BEGIN_AGAIN), heard

    def _differences(self, record: Transfer, writer: Writer | None, begin: Begin) -> list[str] | None:
        """Compare once per contributor; a BEGIN that comes again is only compared with what was agreed. None: its layout is
        not known."""
        found = []
        if writer is None or writer.state is WriterState.AWAITED:
            theirs = self.layouts.get(begin.layout)
            if theirs is None:
                return None
            found = differences(begin, theirs, self.model, self.geometry, self.rank, record.first, record.end)
        if record.bound and begin.plan_digest != record.plan_digest:
            found.append(f"plan: prefill {begin.plan_digest}, decode {record.plan_digest}")
        if record.bound and begin.contributors != record.contributors:
            found.append("contributors: they are not those of the first BEGIN")
        return found

    def contributors(self, begin: Begin) -> tuple[Contributor, ...]:
        """Who takes part in the push of a BEGIN that has no differences."""
        return contributor_pairs(self._theirs(begin), self.geometry, self.rank)

    def pushed(self, begin: Begin) -> frozenset[str]:
        """Which of this worker's layers such a BEGIN is about."""
        return pushed(self._theirs(begin), self.geometry).intersection(self.layers)

    @property
    def stage(self) -> int:
        return self.geometry.place_of(self.rank)[0]

    @property
    def layers(self) -> tuple[str, ...]:
        """Those of this worker's stage."""
        return self.geometry.stages[self.stage]

    def _theirs(self, begin: Begin) -> CacheGeometry:
        theirs = self.layouts.get(begin.layout)
        if not isinstance(theirs, Told):
            raise LocalProtocolError(f"layout {begin.layout} is not known")
        return theirs.geometry

    def _without_say(self, record: Transfer, message: Done | Failed) -> ReservationEvent | None:
        """Only the process and the push that we granted authority to have a say."""
        writer = record.writers.get(message.contributor)
        if writer is None or message.push != record.push:
            return ReservationEvent.WORD_OF_STRANGER
        if writer.p_incarnation and not self.same_process(writer, message.p_incarnation):
            return ReservationEvent.WORD_OF_ANOTHER
        return None

    def same_process(self, writer: Writer, p_incarnation: str) -> bool:
        return writer.p_incarnation == p_incarnation

    def _while_open(self, record: Transfer, message: Done | Failed) -> ReservationEvent:
        e, state = ReservationEvent, record.author(message).state
        if isinstance(message, Failed):
            quiet_or_loud = e.FAILED if message.quiescent else e.LOUD_FAILED
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
            return ReservationEvent.FAILED if message.quiescent else ReservationEvent.LOUD_FAILED
        return ReservationEvent.DONE if record.author(message).waited_for else ReservationEvent.LATE_DONE

    def revocation(self, record: Transfer) -> ReservationEvent:
        cut = record.state is ReservationState.OPEN and record.leased()
        return ReservationEvent.CUT if cut else ReservationEvent.REVOKED


Memories = OrderedDict[Hashable, tuple[str, Memory]]  # by peer: what its addresses are called, and where they are


def told(ready: Ready, pair: Pair, memories: Memories) -> tuple[str, Memory | None]:
    """The addresses that a READY is about, by name: those it carries, or those known of the peer, or of the pair."""
    if ready.addresses is not None:
        return ready.memory, ready.addresses
    known = memories.get(pair.destination.peer)
    return known if known is not None and known[0] == ready.memory else (pair.memory, pair.addresses)


@dataclass(frozen=True, slots=True)
class PairGuards:
    """P: what a message is to a pair, and what its writes have come to."""

    clock: RunningClock
    memories: Memories

    def event(self, now: float, pair: Pair | None, message: Message) -> PairEvent:
        if pair is not None and isinstance(message, Ready) and pair.state in OPEN:
            return self._ready(now, pair, message)
        if pair is not None and isinstance(message, Which) and pair.state is PairState.ASK and pair.asked_which:
            return PairEvent.WHICH_AGAIN
        if pair is not None and isinstance(message, Ack) and pair.said is not None:
            ours = message.seq == pair.said.seq and message.kind == type(pair.said).__name__.lower()
            return PairEvent.ACK if ours else PairEvent.ACK_OF_ANOTHER
        return TO_PREFILL[type(message)]

    def _ready(self, now: float, pair: Pair, ready: Ready) -> PairEvent:
        sent = pair.sent.get(ready.seq)
        if sent is None:
            return PairEvent.READY_UNASKED
        until = authority_until(sent, ready.lease_s)
        if until <= now or until <= (pair.authority or until - 1):
            return PairEvent.READY_LATE
        memory, addresses = told(ready, pair, self.memories)
        if addresses is None or memory != ready.memory:
            return PairEvent.READY_BARE
        if pair.addresses is not None and pair.memory != memory:
            return PairEvent.READY_MOVED
        return PairEvent.READY if pair.destination.fits(addresses) else PairEvent.READY_UNFIT

    def submission(self, now: float, pair: Pair) -> PairEvent:
        late = pair.state is PairState.PUSH and not pair.authorised(now)
        return PairEvent.SUBMITTED_LATE if late else PairEvent.SUBMITTED

    def end(self, pair: Pair) -> PairEvent | None:
        """How the pair closes, if it may close now."""
        if pair.state is PairState.PUSH:
            return PairEvent.COMPLETE if pair.complete else None
        if not self.settled(pair):
            return None
        return PairEvent.COMPLETE if self.delivered(pair) else PairEvent.QUIET

    def settled(self, pair: Pair) -> bool:
        return not pair.coverage.out and self.clock.seconds >= pair.quiet_at

    def delivered(self, pair: Pair) -> bool:
        """In spite of the failure, everything has arrived."""
        return pair.complete and pair.authority is not None and not pair.owing
