# SPDX-License-Identifier: Apache-2.0
"""P rank: what happens at each event. The table in `tables.py` names these handlers and says where each may lead;
`push.py` is the face that the runtime sees.
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
from vllm_ascend_pd.protocol.pair import Claim, Coverage, Pair, Push
from vllm_ascend_pd.protocol.tables import PAIR_TABLE, PairEvent, PairState
from vllm_ascend_pd.protocol.timing import Agenda, Backoff, RunningClock, authority_until, hold_s, settled_s
from vllm_ascend_pd.protocol.words import PrefillWords

MAX_LAYOUTS = 4096
OPEN = (PairState.ASK, PairState.PUSH)


@dataclass(frozen=True, slots=True)
class Cue:
    """What came with an event."""

    message: Message | None = None
    claim: Claim | None = None
    unit: Hashable = None
    nbytes: int = 0
    code: str = ""
    detail: str = ""


NOTHING = Cue()


class PushRules:
    """The pushes of one P worker and the handlers that change them."""

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

    # -- the machine

    def _fire(self, event: PairEvent, now: float, pair: Pair, cue: Cue = NOTHING) -> None:
        rule = self.table[pair.state].get(event)
        if rule is None:
            raise LocalProtocolError(f"{event.value} in state {pair.state.value} of push {pair.key}")
        handler: Callable[[float, Pair, Cue], None] = getattr(self, rule.handler)
        handler(now, pair, cue)
        if pair.state not in rule.into:
            raise LocalProtocolError(f"{event.value} led push {pair.key} to {pair.state.value}")

    def _note(self, stage: str, pair: Pair, **facts: object) -> None:
        about = {"transfer": str(pair.push.order.transfer), "push": pair.push.order.push}
        about["contributor"] = str(self._words.contributor)
        self._actions.append(Note(stage, {**about, "d_rank": pair.destination.d_rank, **facts}))

    # -- asking

    def _ask(self, now: float, pair: Pair, cue: Cue) -> None:
        pair.state = PairState.ASK
        self._begin(now, pair, cue, again=False)

    def _begin(self, now: float, pair: Pair, cue: Cue, again: bool = True) -> None:
        if again:
            pair.begin.again(now)
        pair.seq += 1
        pair.sent_begin(pair.seq, now)
        to = pair.destination.peer
        known = self._layouts.get(to)
        self._actions.append(Send(to, self._words.begin(pair, pair.seq, known[0] if known else "")))
        self._note("begin", pair, seq=pair.seq)

    def _authorise(self, now: float, pair: Pair, cue: Cue) -> None:
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
        layout, addresses = self._layouts[pair.destination.peer]
        if not pair.destination.fits(addresses):
            del self._layouts[pair.destination.peer]
            told = sorted({len(base) for base in addresses.bases})
            wanted = f"{pair.destination.layers} layers of {pair.destination.regions} regions"
            why = f"{pair.destination.peer} told addresses of {len(addresses.bases)} layers, regions {told}; {wanted} are planned"
            self._fail(now, pair.push, "PD-WIRE-005", why)
            return
        pair.layout, pair.addresses = layout, addresses
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

    def _take(self, now: float, pair: Pair, cue: Cue) -> None:
        if pair.push.sealed or pair.coverage.knows(cue.unit):
            raise LocalProtocolError(f"{cue.unit} is offered after the seal or twice")
        pair.coverage.pending[cue.unit] = cue.nbytes
        pair.push.progress = now
        if pair.state is PairState.PUSH:
            self._claimable[pair.key] = pair

    def _authorised(self, pair: Pair, now: float) -> bool:
        return pair.authority is not None and now < pair.authority

    def _hand_out(self, now: float, pair: Pair, cue: Cue) -> None:
        pair.coverage.out.update(pair.coverage.pending)
        pair.coverage.pending.clear()
        self._claimable.pop(pair.key, None)

    def _take_back(self, now: float, pair: Pair, cue: Cue) -> None:
        unit = cue.claim.unit if cue.claim else None
        pair.coverage.pending[unit] = pair.coverage.out.pop(unit)
        if pair.state is PairState.PUSH:
            self._claimable[pair.key] = pair
        else:
            self._settle(now, pair, cue)

    def _look_again(self, now: float, pair: Pair, cue: Cue) -> None:
        if not self._authorised(pair, now):
            self._fail(now, pair.push, "PD-XFER-001", "a submission outlived its authority")

    def _cover(self, now: float, pair: Pair, cue: Cue) -> None:
        unit = cue.claim.unit if cue.claim else None
        pair.coverage.nbytes += pair.coverage.out.pop(unit)
        pair.coverage.covered.add(unit)
        pair.push.progress = now
        if pair.state is PairState.PUSH:
            self._finish_if_complete(now, pair)
        else:
            self._settle(now, pair, cue)

    def _seal(self, now: float, pair: Pair, cue: Cue) -> None:
        if pair.state is PairState.PUSH:
            self._finish_if_complete(now, pair)

    def _restart(self, now: float, pair: Pair, cue: Cue) -> None:
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

    def _drain(self, now: float, pair: Pair, cue: Cue) -> None:
        pair.state = PairState.DRAIN
        pair.owing = pair.owing or not pair.push.sealed  # what is offered from here on is ignored
        self._claimable.pop(pair.key, None)
        self._note("drain", pair, why=self._cause(pair), out=len(pair.coverage.out))
        self._settle(now, pair, cue)
        if pair.state is PairState.DRAIN:
            self._say(now, pair, done=False, quiescent=False)

    def _fail_by_event(self, now: float, pair: Pair, cue: Cue) -> None:
        self._fail(now, pair.push, cue.code, cue.detail)

    def _fail_by_peer(self, now: float, pair: Pair, cue: Cue) -> None:
        message = cue.message
        if isinstance(message, Refused):
            code = "PD-GEO-001" if message.code == RefusalCode.MISMATCH else "PD-XFER-005"
            self._fail(now, pair.push, code, f"{message.code}: {message.detail}")
        elif isinstance(message, Cancel):
            self._fail(now, pair.push, "PD-XFER-002", message.cause)

    def _fail_by_loss(self, now: float, pair: Pair, cue: Cue) -> None:
        self._lose(now, pair, cue)
        self._fail(now, pair.push, "PD-XFER-003", f"D rank {pair.destination.d_rank} at {pair.destination.peer}")

    def _lose(self, now: float, pair: Pair, cue: Cue) -> None:
        unit = cue.claim.unit if cue.claim else None
        pair.coverage.pending[unit] = pair.coverage.out.pop(unit)  # owed for ever: this pair cannot say DONE
        pair.quiet_at = self._clock.seconds + settled_s(self._words.quiet_s)

    def _settled(self, pair: Pair) -> bool:
        return not pair.coverage.out and self._clock.seconds >= pair.quiet_at

    def _settle(self, now: float, pair: Pair, cue: Cue) -> None:
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
        self._repeat(now, pair, NOTHING)

    def _repeat(self, now: float, pair: Pair, cue: Cue) -> None:
        if pair.said is not None:
            self._actions.append(Send(pair.destination.peer, pair.said))

    def _acknowledged(self, now: float, pair: Pair, cue: Cue) -> None:
        ack, said = cue.message, pair.said
        if not isinstance(ack, Ack) or said is None:
            return
        if ack.seq == said.seq and ack.kind == type(said).__name__.lower():
            pair.acknowledged = True

    def _ignore(self, now: float, pair: Pair, cue: Cue) -> None:
        if cue.message is not None:
            self.counters["ignored_" + type(cue.message).__name__.lower()] += 1

    def _answer_unexpected(self, now: float, pair: Pair, cue: Cue) -> None:
        self.counters["unexpected_" + type(cue.message).__name__.lower()] += 1

    def _answer_unknown(self, event: PairEvent, now: float, peer: Hashable, message: Message) -> None:
        """By the table's UNATTACHED row: we know nothing of this push, so nothing of it is out."""
        if self.table[PairState.UNATTACHED][event].handler != "_answer_gone":
            self.counters["ignored_" + event.value] += 1
            return
        self.counters["unknown_" + event.value] += 1
        self._actions.append(Send(peer, self._words.gone(message)))
