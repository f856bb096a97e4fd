# SPDX-License-Identifier: Apache-2.0
"""P rank: asks for authority, hands out what may be written, and closes only when nothing is out any more.

`Sender` is pure: every method takes the time, changes the machine by the table in `tables.py`, and returns actions.
A push goes to one or more D ranks; it succeeds or fails as one, and its blocks may go once every pair has closed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.protocol.actions import Action, Closed, Note, Send
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.messages import Ack, Cancel, LayerAddresses, Message, Ready, RefusalCode, Refused
from vllm_ascend_pd.protocol.pair import Claim, Coverage, Destination, Pair, Push, PushOrder
from vllm_ascend_pd.protocol.tables import PAIR_TABLE, PairEvent, PairState
from vllm_ascend_pd.protocol.timing import Agenda, Backoff, RunningClock, authority_until, hold_s, settled_s
from vllm_ascend_pd.protocol.words import PrefillWords

__all__ = ["Claim", "Destination", "PushOrder", "Sender"]

MAX_LAYOUTS = 4096
MAX_FINISHED = 65536
_OPEN = (PairState.ASK, PairState.PUSH)
_EVENTS: dict[type, PairEvent] = {
    Ready: PairEvent.READY,
    Refused: PairEvent.REFUSED,
    Cancel: PairEvent.CANCEL,
    Ack: PairEvent.ACK,
}


@dataclass(frozen=True, slots=True)
class _Cue:
    """What came with an event."""

    message: Message | None = None
    claim: Claim | None = None
    unit: Hashable = None
    nbytes: int = 0
    code: str = ""
    detail: str = ""


_NOTHING = _Cue()


class Sender:
    """All pushes of one P worker."""

    table = PAIR_TABLE

    def __init__(
        self,
        *,
        incarnation: str,
        contributor: Contributor,
        model: str,
        geometry: CacheGeometry,
        timers: Timers,
        quiet_s: float,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._words = PrefillWords(incarnation, contributor, model, geometry, quiet_s)
        self._timers = timers
        self._clock = RunningClock()
        self._pushes: dict[str, Push] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()  # so that late local events are told from wrong ones
        self._claimable: dict[tuple[str, int], Pair] = {}
        self._layouts: OrderedDict[Hashable, tuple[str, LayerAddresses]] = OrderedDict()
        self._heard: OrderedDict[Hashable, float] = OrderedDict()
        self._wall: Agenda[tuple[str, int | None]] = Agenda()
        self._settling: Agenda[tuple[str, int]] = Agenda()  # on the running clock
        self._actions: list[Action] = []

    # -- what the runtime tells

    def open(self, now: float, order: PushOrder) -> list[Action]:
        """Source and reservation are both known: ask every destination."""
        self._clock.observe(now)
        if order.push in self._pushes or order.push in self._finished:
            raise LocalProtocolError(f"push {order.push} is opened twice")
        push = Push(order, deadline=now + order.deadline_s, progress=now)
        self._pushes[order.push] = push
        for destination in order.destinations:
            if destination.d_rank in push.pairs:
                raise LocalProtocolError(f"push {order.push} names D rank {destination.d_rank} twice")
            begin = Backoff(now, self._timers.resend_first_s, self._timers.resend_max_s)
            pair = Pair(push, destination, begin, ready_by=now + self._timers.ready_timeout_s)
            push.pairs[destination.d_rank] = pair
            self._fire(PairEvent.OPEN, now, pair)
        self._close_if_done(push)
        self._schedule(push)
        return self._taken()

    def offer(self, now: float, push: str, d_rank: int, unit: Hashable, nbytes: int) -> list[Action]:
        """`unit` is computed; nobody has to wait for anything to write it but authority."""
        return self._local(PairEvent.OFFER, now, push, d_rank, _Cue(unit=unit, nbytes=nbytes))

    def checksum(self, push: str, d_rank: int, layer: str, value: int) -> None:
        """Add to the sum of `layer` that DONE will carry."""
        pair = self._pair(push, d_rank)
        if pair is not None and pair.state in _OPEN:
            sums = pair.coverage.checksums
            sums[layer] = (sums.get(layer, 0) + value) % 2**64

    def seal(self, now: float, push: str) -> list[Action]:
        """No unit comes after this."""
        self._clock.observe(now)
        record = self._record(push)
        if record is not None:
            if record.sealed and not record.closed and record.failure is None:
                raise LocalProtocolError(f"push {push} is sealed twice")
            record.sealed = True
            for pair in record.pairs.values():
                self._fire(PairEvent.SEAL, now, pair)
            self._schedule(record)
        return self._taken()

    def restart(self, now: float, push: str) -> list[Action]:
        """The request was preempted: what was covered is to be written again. Nothing may be out.

        A sealed push fails instead: other ranks may have said DONE, and a step that is computed again divides the work
        between the ranks anew, so the shares would not fit together.
        """
        self._clock.observe(now)
        record = self._record(push)
        if record is None or record.closed:
            return self._taken()
        if record.failure is not None or record.sealed:
            self._lose_source(record)
            self._fail(now, record, "PD-XFER-002", "preempted after its last step")
        elif any(pair.coverage.out for pair in record.pairs.values()):
            raise LocalProtocolError(f"push {push} is restarted while writes are out")
        else:
            record.epoch += 1
            record.progress = now
            for pair in record.pairs.values():
                self._fire(PairEvent.RESTART, now, pair)
        self._schedule(record)
        return self._taken()

    def claim(self, now: float, allow: Callable[[Hashable], bool] | None = None) -> list[Claim]:
        """Everything that may be written at this moment, in the order offered; `allow` may hold a peer back.

        Look at the clock, claim, submit, look again (`submitted`): nothing else may come in between.
        """
        self._clock.observe(now)
        claims: list[Claim] = []
        for pair in list(self._claimable.values()):
            if pair.authority is None or not self._authorised(pair, now):
                continue
            if allow is not None and not allow(pair.destination.peer):
                continue
            push, d_rank = pair.key
            claims.extend(Claim(push, d_rank, unit, pair.push.epoch) for unit in pair.coverage.pending)
            self._fire(PairEvent.CLAIM, now, pair)
        return claims

    def returned(self, now: float, claim: Claim) -> list[Action]:
        """The claim was not submitted after all; it may be claimed again."""
        return self._about(PairEvent.RETURN, now, claim)

    def submitted(self, now: float, claim: Claim) -> list[Action]:
        """The submission returned at `now`."""
        return self._about(PairEvent.SUBMITTED, now, claim)

    def wrote(self, now: float, claim: Claim, ok: bool) -> list[Action]:
        """The transport has acknowledged the write, or has given it up (then it may still land)."""
        return self._about(PairEvent.LANDED if ok else PairEvent.LOST, now, claim)

    def message(self, now: float, peer: Hashable, message: Message) -> list[Action]:
        self._clock.observe(now)
        self._heard[peer] = now
        self._heard.move_to_end(peer)
        if len(self._heard) > MAX_LAYOUTS:
            self._heard.popitem(last=False)
        event = _EVENTS.get(type(message))
        if event is None:
            self.counters["unexpected_" + type(message).__name__.lower()] += 1
            return self._taken()
        if message.p_incarnation != self._words.incarnation or message.contributor != self._words.contributor:
            self.counters["stale_" + event.value] += 1
            return self._taken()
        pair = self._pair(message.push, message.d_rank)
        if pair is None:
            self._answer_unknown(event, now, peer, message)
        elif message.transfer != pair.push.order.transfer or message.d_incarnation != message.transfer.incarnation:
            self.counters["wrong_transfer"] += 1
        else:
            self._fire(event, now, pair, _Cue(message=message))
            self._schedule(pair.push)
        return self._taken()

    def abort(self, now: float, push: str, code: str, detail: str) -> list[Action]:
        """Give the push up. From here on its blocks may be overwritten, though it closes only when nothing is out."""
        self._clock.observe(now)
        record = self._record(push)
        if record is not None:
            self._lose_source(record)
            self._fail(now, record, code, detail)
            self._schedule(record)
        return self._taken()

    def unreachable(self, now: float, peer: Hashable, detail: str) -> list[Action]:
        """The channel could not connect to `peer`."""
        self._clock.observe(now)
        cue = _Cue(code="PD-XFER-004", detail=f"{peer}: {detail}")
        for push in list(self._pushes.values()):
            for pair in push.pairs.values():
                if pair.destination.peer == peer:
                    self._fire(PairEvent.UNREACHABLE, now, pair, cue)
            self._schedule(push)
        return self._taken()

    def tick(self, now: float) -> list[Action]:
        """Whatever is due."""
        self._clock.observe(now)
        for name, d_rank in self._wall.due(now):
            push = self._pushes.get(name)
            if push is None:
                continue  # forgotten by an earlier one of this very tick
            if d_rank is None:
                self._push_due(now, push)
            else:
                self._pair_due(now, push.pairs[d_rank])
            self._schedule(push)
        for name, d_rank in self._settling.due(self._clock.seconds):
            push = self._pushes[name]
            self._fire(PairEvent.QUIET, now, push.pairs[d_rank])
            self._schedule(push)
        return self._taken()

    def next_wake(self) -> float | None:
        """When `tick` must be called at the latest; None while nothing is open."""
        times = [at for at in (self._wall.next(),) if at is not None]
        settling = self._settling.next()
        if settling is not None:
            times.append(self._clock.wake(settling))
        return min(times, default=None)

    # -- what the runtime asks

    def outstanding(self, push: str) -> int:
        """Claims that have not come home."""
        record = self._pushes.get(push)
        return sum(len(pair.coverage.out) for pair in record.pairs.values()) if record else 0

    def addresses(self, push: str, d_rank: int) -> LayerAddresses | None:
        """Where D's layers lie, as READY told it."""
        pair = self._pair(push, d_rank)
        return pair.addresses if pair else None

    def heard(self, peer: Hashable) -> float | None:
        """When `peer` last said anything."""
        return self._heard.get(peer)

    def authority(self, push: str, d_rank: int) -> float | None:
        pair = self._pair(push, d_rank)
        return pair.authority if pair else None

    def state(self, push: str, d_rank: int) -> PairState:
        pair = self._pair(push, d_rank)
        return pair.state if pair else PairState.UNATTACHED

    def open_count(self) -> int:
        """Pushes that have not closed."""
        return sum(not push.closed for push in self._pushes.values())

    def record_count(self) -> int:
        """Pushes that are remembered, closed ones whose last word is not acknowledged included."""
        return len(self._pushes)

    # -- the machine

    def _fire(self, event: PairEvent, now: float, pair: Pair, cue: _Cue = _NOTHING) -> None:
        rule = self.table[pair.state].get(event)
        if rule is None:
            raise LocalProtocolError(f"{event.value} in state {pair.state.value} of push {pair.key}")
        handler: Callable[[float, Pair, _Cue], None] = getattr(self, rule.handler)
        handler(now, pair, cue)
        if pair.state not in rule.into:
            raise LocalProtocolError(f"{event.value} led push {pair.key} to {pair.state.value}")

    def _local(self, event: PairEvent, now: float, push: str, d_rank: int, cue: _Cue) -> list[Action]:
        self._clock.observe(now)
        record = self._record(push)
        if record is not None:
            pair = record.pairs.get(d_rank)
            if pair is None:
                raise LocalProtocolError(f"push {push} has no D rank {d_rank}")
            self._fire(event, now, pair, cue)
            self._schedule(record)
        return self._taken()

    def _about(self, event: PairEvent, now: float, claim: Claim) -> list[Action]:
        pair = self._pair(claim.push, claim.d_rank)
        if pair is None or claim.epoch != pair.push.epoch or claim.unit not in pair.coverage.out:
            raise LocalProtocolError(f"{event.value}: {claim} is not out")
        return self._local(event, now, claim.push, claim.d_rank, _Cue(claim=claim))

    def _record(self, push: str) -> Push | None:
        record = self._pushes.get(push)
        if record is None and push not in self._finished:
            raise LocalProtocolError(f"push {push} was never opened")
        return record

    def _pair(self, push: str, d_rank: int) -> Pair | None:
        record = self._pushes.get(push)
        return record.pairs.get(d_rank) if record else None

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _note(self, stage: str, pair: Pair, **facts: object) -> None:
        about = {"transfer": str(pair.push.order.transfer), "push": pair.push.order.push}
        self._actions.append(Note(stage, {**about, "d_rank": pair.destination.d_rank, **facts}))

    # -- asking

    def _ask(self, now: float, pair: Pair, cue: _Cue) -> None:
        pair.state = PairState.ASK
        self._begin(now, pair, cue, again=False)

    def _begin(self, now: float, pair: Pair, cue: _Cue, again: bool = True) -> None:
        if again:
            pair.begin.again(now)
        pair.seq += 1
        pair.sent_begin(pair.seq, now)
        to = pair.destination.peer
        known = self._layouts.get(to)
        self._actions.append(Send(to, self._words.begin(pair, pair.seq, known[0] if known else "")))
        self._note("begin", pair, seq=pair.seq)

    def _authorise(self, now: float, pair: Pair, cue: _Cue) -> None:
        ready = cue.message
        if not isinstance(ready, Ready):
            raise LocalProtocolError("READY without its message")
        sent = pair.sent.get(ready.seq)
        if sent is None:
            self.counters["ready_unasked"] += 1
            return
        until = authority_until(sent, ready.lease_s)
        if until <= now or until <= (pair.authority or until - 1):
            self.counters["ready_late"] += 1
            return
        if not self._learn_layout(pair, ready):
            return
        if pair.addresses is not None and pair.layout != ready.layout:
            # D has revoked the memory that we wrote to: what we wrote may be lost.
            self._fail(now, pair.push, "PD-XFER-005", "the addresses changed during the transfer")
            return
        pair.layout, pair.addresses = self._layouts[pair.destination.peer]
        pair.authority = until
        pair.begin.rest(max(now + self._timers.resend_first_s, sent + ready.lease_s / 3))
        if pair.state is PairState.ASK:
            pair.state = PairState.PUSH
            pair.push.progress = now
            self._note("ready", pair, seq=ready.seq, waited=now - sent)
            if pair.coverage.pending:
                self._claimable[pair.key] = pair
            self._finish_if_complete(now, pair)

    def _learn_layout(self, pair: Pair, ready: Ready) -> bool:
        """Remember the addresses of this peer; False when they are neither told nor known."""
        peer = pair.destination.peer
        if ready.addresses is not None:
            self._layouts[peer] = (ready.layout, ready.addresses)
            if len(self._layouts) > MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        known = self._layouts.get(peer)
        if known is None or known[0] != ready.layout:
            self.counters["ready_without_addresses"] += 1
            return False
        self._layouts.move_to_end(peer)
        return True

    # -- writing

    def _take(self, now: float, pair: Pair, cue: _Cue) -> None:
        if pair.push.sealed or pair.coverage.knows(cue.unit):
            raise LocalProtocolError(f"{cue.unit} is offered after the seal or twice")
        pair.coverage.pending[cue.unit] = cue.nbytes
        pair.push.progress = now
        if pair.state is PairState.PUSH:
            self._claimable[pair.key] = pair

    def _authorised(self, pair: Pair, now: float) -> bool:
        return pair.authority is not None and now < pair.authority

    def _hand_out(self, now: float, pair: Pair, cue: _Cue) -> None:
        pair.coverage.out.update(pair.coverage.pending)
        pair.coverage.pending.clear()
        self._claimable.pop(pair.key, None)

    def _take_back(self, now: float, pair: Pair, cue: _Cue) -> None:
        unit = cue.claim.unit if cue.claim else None
        pair.coverage.pending[unit] = pair.coverage.out.pop(unit)
        if pair.state is PairState.PUSH:
            self._claimable[pair.key] = pair
        else:
            self._settle(now, pair, cue)

    def _look_again(self, now: float, pair: Pair, cue: _Cue) -> None:
        if not self._authorised(pair, now):
            self._fail(now, pair.push, "PD-XFER-001", "a submission outlived its authority")

    def _cover(self, now: float, pair: Pair, cue: _Cue) -> None:
        unit = cue.claim.unit if cue.claim else None
        pair.coverage.nbytes += pair.coverage.out.pop(unit)
        pair.coverage.covered.add(unit)
        pair.push.progress = now
        if pair.state is PairState.PUSH:
            self._finish_if_complete(now, pair)
        else:
            self._settle(now, pair, cue)

    def _seal(self, now: float, pair: Pair, cue: _Cue) -> None:
        if pair.state is PairState.PUSH:
            self._finish_if_complete(now, pair)

    def _restart(self, now: float, pair: Pair, cue: _Cue) -> None:
        pair.coverage = Coverage()
        self._claimable.pop(pair.key, None)

    def _finish_if_complete(self, now: float, pair: Pair) -> None:
        if pair.push.sealed and pair.coverage.complete:
            self._close(now, pair)

    # -- failing

    def _fail(self, now: float, push: Push, code: str, detail: str) -> None:
        """A push fails as one: on all pairs no new write starts, and each closes when its writes are home."""
        if push.failure is None:
            push.failure = (code, detail)
        for pair in push.pairs.values():
            self._fire(PairEvent.FAIL, now, pair)

    def _lose_source(self, push: Push) -> None:
        """The blocks may go at any time now: whatever is still out does not count as delivered."""
        for pair in push.pairs.values():
            pair.owing = True

    def _drain(self, now: float, pair: Pair, cue: _Cue) -> None:
        pair.state = PairState.DRAIN
        pair.owing = pair.owing or not pair.push.sealed  # what is offered from here on is ignored
        self._claimable.pop(pair.key, None)
        self._note("drain", pair, why=self._cause(pair), out=len(pair.coverage.out))
        self._settle(now, pair, cue)
        if pair.state is PairState.DRAIN:
            self._say(now, pair, done=False, quiescent=False)

    def _fail_by_event(self, now: float, pair: Pair, cue: _Cue) -> None:
        self._fail(now, pair.push, cue.code, cue.detail)

    def _fail_by_peer(self, now: float, pair: Pair, cue: _Cue) -> None:
        message = cue.message
        if isinstance(message, Refused):
            code = "PD-GEO-001" if message.code == RefusalCode.MISMATCH else "PD-XFER-005"
            self._fail(now, pair.push, code, f"{message.code}: {message.detail}")
        elif isinstance(message, Cancel):
            self._fail(now, pair.push, "PD-XFER-002", message.cause)

    def _fail_by_loss(self, now: float, pair: Pair, cue: _Cue) -> None:
        self._lose(now, pair, cue)
        self._fail(now, pair.push, "PD-XFER-003", f"D rank {pair.destination.d_rank} at {pair.destination.peer}")

    def _lose(self, now: float, pair: Pair, cue: _Cue) -> None:
        unit = cue.claim.unit if cue.claim else None
        pair.coverage.pending[unit] = pair.coverage.out.pop(unit)  # owed for ever: this pair cannot say DONE
        pair.quiet_at = self._clock.seconds + settled_s(self._words.quiet_s)

    def _settled(self, pair: Pair) -> bool:
        return not pair.coverage.out and self._clock.seconds >= pair.quiet_at

    def _settle(self, now: float, pair: Pair, cue: _Cue) -> None:
        if self._settled(pair):
            self._close(now, pair)

    # -- closing

    def _close(self, now: float, pair: Pair) -> None:
        pair.state = PairState.CLOSED
        self._claimable.pop(pair.key, None)
        done = pair.push.sealed and pair.coverage.complete and pair.authority is not None and not pair.owing
        self._say(now, pair, done=done, quiescent=True)
        self._note("closed", pair, done=done, bytes=pair.coverage.nbytes)
        pair.coverage = Coverage(nbytes=pair.coverage.nbytes)
        self._close_if_done(pair.push)

    def _close_if_done(self, push: Push) -> None:
        if push.closed or any(pair.state is not PairState.CLOSED for pair in push.pairs.values()):
            return
        push.closed = True
        code, detail = push.failure or ("", "")
        if push.delivered:
            code, detail = "", ""
        self._actions.append(Closed(push.order.push, push.delivered, code, detail))

    def _cause(self, pair: Pair) -> str:
        code, detail = pair.push.failure or ("PD-XFER-002", "unknown")
        return f"{code} {detail}"

    def _say(self, now: float, pair: Pair, *, done: bool, quiescent: bool) -> None:
        """DONE or FAILED: sent, and repeated until it is acknowledged or D must have given up."""
        pair.seq += 1
        if done:
            pair.said = self._words.done(pair, pair.seq)
        else:
            pair.said = self._words.failed(pair, pair.seq, quiescent=quiescent, cause=self._cause(pair))
        pair.acknowledged = False
        pair.speak = Backoff(now, self._timers.resend_first_s, self._timers.resend_max_s)
        pair.speak_until = now + hold_s(self._timers.lease_s, self._words.quiet_s, self._timers.margin_s)
        self._repeat(now, pair, _NOTHING)

    def _repeat(self, now: float, pair: Pair, cue: _Cue) -> None:
        if pair.said is not None:
            self._actions.append(Send(pair.destination.peer, pair.said))

    def _acknowledged(self, now: float, pair: Pair, cue: _Cue) -> None:
        ack, said = cue.message, pair.said
        if not isinstance(ack, Ack) or said is None:
            return
        if ack.seq == said.seq and ack.kind == type(said).__name__.lower():
            pair.acknowledged = True

    def _ignore(self, now: float, pair: Pair, cue: _Cue) -> None:
        if cue.message is not None:
            self.counters["ignored_" + type(cue.message).__name__.lower()] += 1

    def _answer_unexpected(self, now: float, pair: Pair, cue: _Cue) -> None:
        self.counters["unexpected_" + type(cue.message).__name__.lower()] += 1

    def _answer_unknown(self, event: PairEvent, now: float, peer: Hashable, message: Message) -> None:
        """By the table's UNATTACHED row: we know nothing of this push, so nothing of it is out."""
        if self.table[PairState.UNATTACHED][event].handler != "_answer_gone":
            self.counters["ignored_" + event.value] += 1
            return
        self.counters["unknown_" + event.value] += 1
        self._actions.append(Send(peer, self._words.gone(message)))

    # -- time

    def _push_due(self, now: float, push: Push) -> None:
        if now >= push.deadline:
            self._fail(now, push, "PD-XFER-001", f"deadline of {push.order.deadline_s:g} s")
        elif now >= push.progress + self._timers.stall_timeout_s:
            self._fail(now, push, "PD-XFER-001", f"no progress for {self._timers.stall_timeout_s:g} s")

    def _pair_due(self, now: float, pair: Pair) -> None:
        if pair.state is PairState.PUSH and not self._authorised(pair, now):
            cue = _Cue(code="PD-XFER-001", detail="authority ran out: D did not renew it")
            self._fire(PairEvent.AUTHORITY_OVER, now, pair, cue)
        elif pair.state is PairState.ASK and now >= pair.ready_by:
            cue = _Cue(code="PD-XFER-001", detail=f"no READY within {self._timers.ready_timeout_s:g} s")
            self._fire(PairEvent.READY_TIMEOUT, now, pair, cue)
        elif pair.state in _OPEN and now >= pair.begin.at:
            self._fire(PairEvent.RENEW, now, pair)
        if pair.speaking and pair.speak is not None and now >= pair.speak.at:
            if now >= pair.speak_until:
                pair.acknowledged = True  # nobody listens any more
                self.counters["unacknowledged"] += 1
            else:
                pair.speak.again(now)
                self._repeat(now, pair, _NOTHING)

    def _schedule(self, push: Push) -> None:
        """Put every timer of this push on the agendas, or forget the push."""
        name = push.order.push
        if push.closed and not any(pair.speaking for pair in push.pairs.values()):
            self._pushes.pop(name, None)
            self._finished[name] = None
            if len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)
        over = name not in self._pushes
        failing = over or push.closed or push.failure is not None
        last = None if failing else min(push.deadline, push.progress + self._timers.stall_timeout_s)
        self._wall.set((name, None), last)
        for pair in push.pairs.values():
            times: list[float] = []
            if pair.state in _OPEN:
                times.append(pair.begin.at)
                times.append(pair.ready_by if pair.authority is None else pair.authority)
            if pair.speaking and pair.speak is not None:
                times.append(pair.speak.at)
            self._wall.set(pair.key, None if over else min(times, default=None))
            waiting = pair.state is PairState.DRAIN and not pair.coverage.out
            self._settling.set(pair.key, pair.quiet_at if waiting else None)
