# SPDX-License-Identifier: Apache-2.0
"""Effects of events on P's records of a push (pair.py).

The table in `tables.py` defines which effect an event has, and the state that the pair is in by then. `push.py` is the
interface for the runtime.
"""

from __future__ import annotations

from collections import Counter

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.protocol.actions import Action, Closed, Note, Send
from vllm_ascend_pd.protocol.compose import PrefillMessages, failure_of
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.guards import PairGuards, addresses_of
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
    Refused,
    Renew,
)
from vllm_ascend_pd.protocol.pair import Claim, ComputedUnit, Coverage, PairRecord, PushRecord
from vllm_ascend_pd.protocol.states import Incoming, PairEvent, PairState, Table, look_up
from vllm_ascend_pd.protocol.timing import Repetition, authority_until, landed_s, settled_s

MAX_MEMORIES = 4096


class PairMachine:
    """The pushes of one P worker, driven by a table: its cells name the effects below.

    Each effect takes the time, the pair, and the event's cause: a received message, an offer, a claim, or nothing.
    """

    def __init__(
        self, table: Table[PairState, PairEvent], guards: PairGuards, messages: PrefillMessages, timers: Timers
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.actions: list[Action] = []
        self.pushes: dict[str, PushRecord] = {}
        self.claimable: dict[tuple[str, int], PairRecord] = {}
        self.guards = guards
        self.messages = messages
        self._table = table
        self._timers = timers
        self._clock, self._memories = guards.clock, guards.memories

    # -- the machine

    def fire(self, event: PairEvent, now: float, pair: PairRecord, cause: object = None) -> None:
        cell = look_up(self._table, pair.state, event, self.counters, pair)
        pair.state = cell.into
        cell.effect(self, now, pair, cause)

    def receive(self, now: float, pair: PairRecord | None, received: Incoming[Message]) -> None:
        """Handle a message. Without a pair the row UNATTACHED is used: the push is unknown, so no write is out."""
        event = self.guards.event(now, pair, received.message)
        if pair is not None:
            self.fire(event, now, pair, received)
        else:
            cell = look_up(self._table, PairState.UNATTACHED, event, self.counters, received.message.push)
            cell.effect(self, now, None, received)

    def _note(self, stage: str, pair: PairRecord, **facts: object) -> None:
        about = {"transfer": str(pair.push.transfer), "push": pair.push.name}
        about["contributor"] = str(self.messages.contributor)
        self.actions.append(Note(stage, {**about, "d_rank": pair.destination.d_rank, **facts}))

    def ignore(self, now: float, pair: PairRecord | None, cause: object) -> None:
        """Do nothing."""

    # -- asking

    def ask(self, now: float, pair: PairRecord, cause: None) -> None:
        known = self._memories.get(pair.destination.peer)
        self._send_request(now, pair, self.messages.begin(pair, known[0] if known else ""))

    def ask_again(self, now: float, pair: PairRecord, cause: None) -> None:
        pair.begin.sent(now)
        self.ask(now, pair, cause)

    def ask_with_layout(self, now: float, pair: PairRecord, received: Incoming[LayoutRequest]) -> None:
        """Send BEGIN again, with our layout in full."""
        pair.asked_which = True
        self.ask_again(now, pair, None)

    def renew(self, now: float, pair: PairRecord, cause: None) -> None:
        """Ask for more time. What was agreed stays agreed."""
        pair.begin.sent(now)
        self._send_request(now, pair, self.messages.renew(pair))

    def _send_request(self, now: float, pair: PairRecord, asks: Begin | Renew) -> None:
        pair.seq = asks.seq
        pair.sent_begin(asks.seq, now)
        self.actions.append(Send(pair.destination.peer, asks))
        self._note("begin", pair, seq=asks.seq)

    def start(self, now: float, pair: PairRecord, received: Incoming[Ready]) -> None:
        """Take authority for the first time."""
        self.extend(now, pair, received)
        pair.push.progress = now
        self._note("ready", pair, seq=received.message.seq, waited=now - pair.sent[received.message.seq])
        if pair.coverage.pending:
            self.claimable[pair.key] = pair
        self.close_if_finished(now, pair, None)

    def extend(self, now: float, pair: PairRecord, received: Incoming[Ready]) -> None:
        """Set authority to the end of the lease, and the next RENEW to a third of it."""
        ready, sent = received.message, pair.sent[received.message.seq]
        pair.memory, pair.addresses = self._learn(pair, ready)
        pair.authority = authority_until(sent, ready.lease_s)
        pair.begin.rest(max(now + self._timers.resend_first_s, sent + ready.lease_s / 3))

    def _learn(self, pair: PairRecord, ready: Ready) -> tuple[str, Memory]:
        """Remember the addresses of this peer, which a READY carries or which are known."""
        memory, addresses = addresses_of(ready, pair, self._memories)
        if addresses is None:
            raise LocalProtocolError(f"{ready.memory} of {pair!r} is not known")
        peer = pair.destination.peer
        self._memories[peer] = memory, addresses
        self._memories.move_to_end(peer)
        if len(self._memories) > MAX_MEMORIES:
            self._memories.popitem(last=False)
        return memory, addresses

    # -- writing

    def take(self, now: float, pair: PairRecord, offer: ComputedUnit) -> None:
        if pair.push.sealed or pair.coverage.knows(offer.unit):
            raise LocalProtocolError(f"{offer.unit} is offered after the seal or twice")
        pair.coverage.pending[offer.unit] = offer.nbytes
        pair.push.progress = now

    def take_to_write(self, now: float, pair: PairRecord, offer: ComputedUnit) -> None:
        self.take(now, pair, offer)
        self.claimable[pair.key] = pair

    def hand_out(self, now: float, pair: PairRecord, cause: None) -> None:
        pair.coverage.out.update(pair.coverage.pending)
        pair.coverage.pending.clear()
        self.claimable.pop(pair.key, None)

    def return_claim(self, now: float, pair: PairRecord, claim: Claim) -> None:
        pair.coverage.owe(claim.unit)
        self.claimable[pair.key] = pair

    def return_claim_draining(self, now: float, pair: PairRecord, claim: Claim) -> None:
        pair.coverage.owe(claim.unit)
        self.close_if_finished(now, pair, None)

    def cover(self, now: float, pair: PairRecord, claim: Claim) -> None:
        pair.coverage.nbytes += pair.coverage.out.pop(claim.unit)
        pair.coverage.covered.add(claim.unit)
        pair.push.progress = now
        self.close_if_finished(now, pair, None)

    def restart(self, now: float, pair: PairRecord, cause: None) -> None:
        pair.coverage = Coverage()
        self.claimable.pop(pair.key, None)

    # -- failing

    def fail(self, now: float, push: PushRecord, failure: Failure) -> None:
        """Fail a push as one: on all pairs no new write starts, and each closes when its writes have ended."""
        if push.failure is None:
            push.failure = failure
        for pair in push.pairs.values():
            self.fire(PairEvent.FAIL, now, pair)

    def fail_for(self, now: float, pair: PairRecord, failure: Failure) -> None:
        self.fail(now, pair.push, failure)

    def fail_refused(self, now: float, pair: PairRecord, received: Incoming[Refused | Cancel]) -> None:
        self.fail(now, pair.push, failure_of(received.message))

    def fail_moved(self, now: float, pair: PairRecord, received: Incoming[Ready]) -> None:
        """Fail the push: what was written to the old addresses may be lost."""
        self._learn(pair, received.message)
        self.fail(now, pair.push, Failure("PD-XFER-005", "the addresses changed during the transfer"))

    def fail_unfit(self, now: float, pair: PairRecord, received: Incoming[Ready]) -> None:
        to = pair.destination
        addresses = self._learn(pair, received.message)[1]
        del self._memories[to.peer]
        sent, planned = (
            f"{len(counts)} layers, regions {sorted(set(counts))}" for counts in (addresses.counts, to.regions)
        )
        why = f"{to.peer} sent addresses of {sent}; {planned} are planned"
        self.fail(now, pair.push, Failure("PD-WIRE-005", why))

    def fail_late(self, now: float, pair: PairRecord, claim: Claim) -> None:
        self.fail(now, pair.push, Failure("PD-XFER-001", "a submission outlived its authority"))

    def fail_lost(self, now: float, pair: PairRecord, claim: Claim) -> None:
        self.lose(now, pair, claim)
        to = pair.destination
        self.fail(now, pair.push, Failure("PD-XFER-003", f"D rank {to.d_rank} at {to.peer}"))

    def lose(self, now: float, pair: PairRecord, claim: Claim) -> None:
        pair.coverage.owe(claim.unit)  # it stays pending, so this pair cannot send DONE
        pair.quiet_at = self._clock.seconds + settled_s(self.messages.quiet_s)

    def drain(self, now: float, pair: PairRecord, cause: None) -> None:
        pair.owing = pair.owing or not pair.push.sealed  # further offers are ignored
        self.claimable.pop(pair.key, None)
        self._note("drain", pair, why=str(pair.push.cause), out=len(pair.coverage.out))
        self.close_if_finished(now, pair, None)
        if pair.state is PairState.DRAIN:
            self._send_final(now, pair, self.messages.failed(pair, quiescent=False))

    # -- closing

    def close_if_finished(self, now: float, pair: PairRecord, cause: None) -> None:
        """Close the pair, if it may close now."""
        event = self.guards.end(pair)
        if event is not None:
            self.fire(event, now, pair)

    def close_done(self, now: float, pair: PairRecord, cause: None) -> None:
        self._close(now, pair, self.messages.done(pair))

    def close_failed(self, now: float, pair: PairRecord, cause: None) -> None:
        self._close(now, pair, self.messages.failed(pair, quiescent=True))

    def _close(self, now: float, pair: PairRecord, final: Done | Failed) -> None:
        self.claimable.pop(pair.key, None)
        self._send_final(now, pair, final)
        self._note("closed", pair, done=isinstance(final, Done), bytes=pair.coverage.nbytes)
        pair.coverage = Coverage(nbytes=pair.coverage.nbytes)
        self.close_push(pair.push)

    def close_push(self, push: PushRecord) -> None:
        if not push.closed and all(pair.state is PairState.CLOSED for pair in push.pairs.values()):
            push.closed = True
            self.actions.append(Closed(push.name, None if push.delivered else push.cause))

    def _send_final(self, now: float, pair: PairRecord, final: Done | Failed) -> None:
        """Send DONE or FAILED, and repeat it until it is acknowledged or D must have given up."""
        pair.seq, pair.final, pair.acknowledged = final.seq, final, False
        pair.resend = Repetition(now, self._timers.resend_first_s, self._timers.resend_max_s)
        pair.resend_until = now + landed_s(self._timers.lease_s, self.messages.quiet_s, self._timers.margin_s)
        self.repeat(now, pair, None)

    def repeat(self, now: float, pair: PairRecord, cause: object) -> None:
        if pair.final is not None:
            self.actions.append(Send(pair.destination.peer, pair.final))

    def stop_resending(self, now: float, pair: PairRecord, received: Incoming[Ack]) -> None:
        pair.acknowledged = True

    def answer_gone(self, now: float, pair: None, received: Incoming[Ready | Cancel]) -> None:
        self.actions.append(Send(received.peer, self.messages.push_over(received.message)))
