# SPDX-License-Identifier: Apache-2.0
"""P rank: asks for authority, hands out units that may be written, and closes only when no write is out any more.

`Sender` is pure: its methods take the time, change the machine by the table in `tables.py`, and return actions.
A push goes to one or more D ranks. It succeeds or fails as one, and its blocks may be freed once every pair has closed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.protocol.actions import Action
from vllm_ascend_pd.protocol.compose import PrefillMessages
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.guards import TO_PREFILL, PairGuards
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.layouts import EngineLayout, layout_hash, written
from vllm_ascend_pd.protocol.messages import Memory, Message, message_name
from vllm_ascend_pd.protocol.pair import OPEN, Claim, ComputedUnit, Destination, PairRecord, PushOrder, SenderPush
from vllm_ascend_pd.protocol.push_rules import MAX_MEMORIES, PairMachine
from vllm_ascend_pd.protocol.states import Incoming, PairEvent, PairState
from vllm_ascend_pd.protocol.tables import PAIR_TABLE
from vllm_ascend_pd.protocol.timing import Agenda, Repetition, RunningClock, earliest

__all__ = ["Claim", "Destination", "PushOrder", "Sender"]

MAX_FINISHED = 65536


class PushAgenda:
    """Times of the next look at each push and each of its pairs: on the wall clock, and on the running clock."""

    def __init__(self, clock: RunningClock, stall_timeout_s: float) -> None:
        self._clock, self._stall_s = clock, stall_timeout_s
        self._wall: Agenda[tuple[str, int | None]] = Agenda()
        self._settling: Agenda[tuple[str, int]] = Agenda()
        self._touched: dict[str, tuple[SenderPush, bool]] = {}

    def touch(self, push: SenderPush, *, known: bool) -> None:
        """Note that a push's timers may have changed. The agendas are updated before they are read."""
        self._touched[push.order.push] = push, known

    def _update(self) -> None:
        if self._touched:  # usually empty: agendas are read more often than timers change
            touched, self._touched = self._touched, {}
            for push, known in touched.values():
                self._schedule(push, known=known)

    def _schedule(self, push: SenderPush, *, known: bool) -> None:
        """Put every timer of this push on the agendas."""
        running = known and not push.closed and push.failure is None
        last = min(push.deadline, push.progress + self._stall_s) if running else None
        self._wall.set((push.order.push, None), last)
        settling = len(self._settling) > 0
        for pair in push.pairs.values():
            self._wall.set(pair.key, pair.due if known else None)
            if pair.state is PairState.DRAIN and not pair.coverage.out:
                self._settling.set(pair.key, pair.quiet_at)
            elif settling:
                self._settling.set(pair.key, None)

    def wall_due(self, now: float) -> list[tuple[str, int | None]]:
        self._update()
        return self._wall.due(now)

    def settled(self) -> list[tuple[str, int]]:
        self._update()
        return self._settling.due(self._clock.seconds)

    def next(self) -> tuple[float | None, float | None]:
        self._update()
        settling = self._settling.next()
        return self._wall.next(), None if settling is None else self._clock.wake(settling)


class Sender:
    """All pushes of one P worker."""

    # The simulator replaces these to take a rule out.
    table = PAIR_TABLE
    guards = PairGuards
    machine = PairMachine

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
        self._timers = timers
        self._clock = RunningClock()
        layout = written(EngineLayout(model, geometry))
        self._messages = PrefillMessages(incarnation, contributor, layout, layout_hash(layout), quiet_s)
        guards = self.guards(self._clock, OrderedDict())
        self._machine = self.machine(self.table, guards, self._messages, timers)
        self._agenda = PushAgenda(self._clock, timers.stall_timeout_s)
        self._pushes, self.counters = self._machine.pushes, self._machine.counters
        self._finished: OrderedDict[str, None] = OrderedDict()  # to distinguish late local events from wrong ones
        self._last_message: OrderedDict[Hashable, float] = OrderedDict()

    # -- input from the runtime

    def open(self, now: float, order: PushOrder) -> list[Action]:
        """Open a push, whose request and reservation are both known: send BEGIN to every destination."""
        self._clock.observe(now)
        if order.push in self._pushes or order.push in self._finished:
            raise LocalProtocolError(f"push {order.push} is opened twice")
        push = SenderPush(order, deadline=now + order.deadline_s, progress=now)
        self._pushes[order.push] = push
        for destination in order.destinations:
            if destination.d_rank in push.pairs:
                raise LocalProtocolError(f"push {order.push} names D rank {destination.d_rank} twice")
            begin = Repetition(now, self._timers.resend_first_s, self._timers.resend_max_s)
            pair = PairRecord(push, destination, begin, ready_by=now + self._timers.ready_timeout_s)
            push.pairs[destination.d_rank] = pair
            self._machine.fire(PairEvent.OPEN, now, pair)
        self._machine.close_push(push)
        self._schedule(push)
        return self._taken()

    def offer(self, now: float, push: str, d_rank: int, unit: Hashable, nbytes: int) -> list[Action]:
        """Record that `unit` is computed. Only authority is needed to write it."""
        return self._local(PairEvent.OFFER, now, push, d_rank, ComputedUnit(unit, nbytes))

    def checksum(self, push: str, d_rank: int, layer: int, values: Sequence[int]) -> None:
        """Add to the sums of a layer's components that DONE will carry."""
        pair = self._pair(push, d_rank)
        if pair is not None and pair.state in OPEN:
            sums = pair.coverage.checksums
            for component, value in enumerate(values):
                sums[layer, component] = (sums.get((layer, component), 0) + value) % 2**64

    def seal(self, now: float, push: str) -> list[Action]:
        """Record that no more units will be offered."""
        self._clock.observe(now)
        record = self._record(push)
        if record is not None:
            if record.sealed and not record.closed and record.failure is None:
                raise LocalProtocolError(f"push {push} is sealed twice")
            record.sealed = True
            for pair in record.pairs.values():
                self._machine.fire(PairEvent.SEAL, now, pair)
            self._schedule(record)
        return self._taken()

    def restart(self, now: float, push: str) -> list[Action]:
        """Start over, because the request was preempted: what was covered is written again. No write may be out.

        A sealed push fails instead. Other ranks may have sent DONE, and a step that is computed again divides the work
        between the ranks anew, so their shares would not fit together.
        """
        self._clock.observe(now)
        record = self._record(push)
        if record is None or record.closed:
            return self._taken()
        if record.failure is not None or record.sealed:
            self._mark_source_invalid(record)
            self._machine.fail(now, record, Failure("PD-XFER-002", "preempted after its last step"))
        elif any(pair.coverage.out for pair in record.pairs.values()):
            raise LocalProtocolError(f"push {push} is restarted while writes are out")
        else:
            record.epoch += 1
            record.progress = now
            for pair in record.pairs.values():
                self._machine.fire(PairEvent.RESTART, now, pair)
        self._schedule(record)
        return self._taken()

    @property
    def anything_claimable(self) -> bool:
        """True if a `claim` is worth while. It may still return nothing, for lack of authority or by `allow`."""
        return bool(self._machine.claimable)

    def claim(self, now: float, allow: Callable[[Hashable], bool] | None = None) -> list[Claim]:
        """Return everything that may be written now, of each pair in the order offered. `allow` may hold back a peer.

        The caller reads the clock, claims, submits, and reads the clock again (`submitted`). It must do nothing else in
        between.
        """
        self._clock.observe(now)
        claims: list[Claim] = []
        for pair in list(self._machine.claimable.values()):
            if not pair.authorised(now):
                continue
            if allow is not None and not allow(pair.destination.peer):
                continue
            push, d_rank = pair.key
            claims.extend(Claim(push, d_rank, unit, pair.push.epoch) for unit in pair.coverage.pending)
            self._machine.fire(PairEvent.CLAIM, now, pair)
        return claims

    def returned(self, now: float, claim: Claim) -> list[Action]:
        """Take back a claim that was not submitted; it may be claimed again."""
        return self._fire(PairEvent.RETURN, now, self._claimed(claim, "returned"), claim)

    def submitted(self, now: float, claim: Claim) -> list[Action]:
        """Record that the submission of a claim returned at `now`."""
        pair = self._claimed(claim, "submitted")
        return self._fire(self._machine.guards.submission(now, pair), now, pair, claim)

    def wrote(self, now: float, claim: Claim, ok: bool) -> list[Action]:
        """Record that the transport has acknowledged the write, or has given it up (then it may still land)."""
        event = PairEvent.LANDED if ok else PairEvent.LOST
        return self._fire(event, now, self._claimed(claim, event.value), claim)

    def message(self, now: float, peer: Hashable, message: Message) -> list[Action]:
        self._clock.observe(now)
        self._last_message[peer] = now
        self._last_message.move_to_end(peer)
        if len(self._last_message) > MAX_MEMORIES:
            self._last_message.popitem(last=False)
        event = TO_PREFILL.get(type(message))
        if event is None:
            self.counters["unexpected_" + message_name(message)] += 1
            return self._taken()
        if message.p_incarnation != self._messages.incarnation or message.contributor != self._messages.contributor:
            self.counters["stale_" + event.value] += 1
            return self._taken()
        pair = self._pair(message.push, message.d_rank)
        if pair is None:
            self._machine.receive(now, None, Incoming(peer, message))
        elif message.transfer != pair.push.order.transfer or message.d_incarnation != message.transfer.incarnation:
            self.counters["wrong_transfer"] += 1
        elif peer != pair.destination.peer:
            self.counters["wrong_peer"] += 1  # another D, which has no part in this push
        else:
            self._machine.receive(now, pair, Incoming(peer, message))
            self._schedule(pair.push)
        return self._taken()

    def abort(self, now: float, push: str, code: str, detail: str) -> list[Action]:
        """Give the push up. From now on its blocks may be overwritten. It still closes only when no write is out."""
        self._clock.observe(now)
        record = self._record(push)
        if record is not None:
            self._mark_source_invalid(record)
            self._machine.fail(now, record, Failure(code, detail))
            self._schedule(record)
        return self._taken()

    def unreachable(self, now: float, peer: Hashable, detail: str) -> list[Action]:
        """Record that the channel could not connect to `peer`."""
        self._clock.observe(now)
        failure = Failure("PD-XFER-004", f"{peer}: {detail}")
        for push in list(self._pushes.values()):
            for pair in push.pairs.values():
                if pair.destination.peer == peer:
                    self._machine.fire(PairEvent.UNREACHABLE, now, pair, failure)
            self._schedule(push)
        return self._taken()

    def tick(self, now: float) -> list[Action]:
        """Handle all that is due."""
        self._clock.observe(now)
        for name, d_rank in self._agenda.wall_due(now):
            push = self._pushes.get(name)
            if push is None:
                continue  # forgotten earlier in this tick
            if d_rank is None:
                self._push_due(now, push)
            else:
                self._pair_due(now, push.pairs[d_rank])
            self._schedule(push)
        for name, d_rank in self._agenda.settled():
            push = self._pushes[name]
            self._machine.close_if_finished(now, push.pairs[d_rank], None)
            self._schedule(push)
        return self._taken()

    def next_wake(self) -> float | None:
        """Return when `tick` must be called at the latest; None while there is nothing to wait for."""
        return earliest(*self._agenda.next())

    # -- queries of the runtime

    def pairs(self, push: str) -> Mapping[int, PairRecord]:
        """Return the pairs of a push by D rank. They are the live records: callers only read them."""
        record = self._pushes.get(push)
        return record.pairs if record else {}

    def addresses(self, push: str, d_rank: int) -> Memory | None:
        """Return the addresses of D's layers, as READY gave them."""
        pair = self._pair(push, d_rank)
        return pair.addresses if pair else None

    def session(self, claim: Claim) -> str | None:
        """Return the session of D's transfer engine to which this claim is written."""
        theirs = self.addresses(claim.push, claim.d_rank)
        return theirs.session if theirs is not None else None

    def last_message_at(self, peer: Hashable) -> float | None:
        """Return when the last message of `peer` arrived; None if that is not known."""
        return self._last_message.get(peer)

    def authority(self, push: str, d_rank: int) -> float | None:
        pair = self._pair(push, d_rank)
        return pair.authority if pair else None

    def state(self, push: str, d_rank: int) -> PairState:
        pair = self._pair(push, d_rank)
        return pair.state if pair else PairState.UNATTACHED

    def open_count(self) -> int:
        """Return the number of pushes that have not closed."""
        return sum(not push.closed for push in self._pushes.values())

    def record_count(self) -> int:
        """Return the number of pushes on record, with closed ones whose last message is not acknowledged yet."""
        return len(self._pushes)

    # -- look-up and events

    def _local(self, event: PairEvent, now: float, push: str, d_rank: int, cause: object) -> list[Action]:
        record = self._record(push)
        if record is None:
            self._clock.observe(now)
            return self._taken()
        pair = record.pairs.get(d_rank)
        if pair is None:
            raise LocalProtocolError(f"push {push} has no D rank {d_rank}")
        return self._fire(event, now, pair, cause)

    def _fire(self, event: PairEvent, now: float, pair: PairRecord, cause: object) -> list[Action]:
        self._clock.observe(now)
        self._machine.fire(event, now, pair, cause)
        self._schedule(pair.push)
        return self._taken()

    def _claimed(self, claim: Claim, what: str) -> PairRecord:
        pair = self._pair(claim.push, claim.d_rank)
        if pair is None or claim.epoch != pair.push.epoch or claim.unit not in pair.coverage.out:
            raise LocalProtocolError(f"{what}: {claim} is not out")
        return pair

    def _mark_source_invalid(self, push: SenderPush) -> None:
        """Note that the blocks may be overwritten at any time: writes still out do not count as delivered."""
        for pair in push.pairs.values():
            pair.owing = True

    def _record(self, push: str) -> SenderPush | None:
        record = self._pushes.get(push)
        if record is None and push not in self._finished:
            raise LocalProtocolError(f"push {push} was never opened")
        return record

    def _pair(self, push: str, d_rank: int) -> PairRecord | None:
        record = self._pushes.get(push)
        return record.pairs.get(d_rank) if record else None

    def _taken(self) -> list[Action]:
        actions, self._machine.actions = self._machine.actions, []
        return actions

    # -- time

    def _push_due(self, now: float, push: SenderPush) -> None:
        if now >= push.deadline:
            self._machine.fail(now, push, Failure("PD-XFER-001", f"deadline of {push.order.deadline_s:g} s"))
        elif now >= push.progress + self._timers.stall_timeout_s:
            why = f"no progress for {self._timers.stall_timeout_s:g} s"
            self._machine.fail(now, push, Failure("PD-XFER-001", why))

    def _pair_due(self, now: float, pair: PairRecord) -> None:
        if pair.state is PairState.PUSH and not pair.authorised(now):
            failure = Failure("PD-XFER-001", "authority ran out: D did not renew it")
            self._machine.fire(PairEvent.AUTHORITY_OVER, now, pair, failure)
        elif pair.state is PairState.ASK and now >= pair.ready_by:
            failure = Failure("PD-XFER-001", f"no READY within {self._timers.ready_timeout_s:g} s")
            self._machine.fire(PairEvent.READY_TIMEOUT, now, pair, failure)
        elif pair.state in OPEN and now >= pair.begin.at:
            self._machine.fire(PairEvent.RENEW, now, pair)
        if pair.resending and pair.resend is not None and now >= pair.resend.at:
            if now >= pair.resend_until:
                pair.acknowledged = True  # D must have given up by now
                self.counters["unacknowledged"] += 1
            else:
                pair.resend.again(now)
                self._machine.repeat(now, pair, None)

    def _schedule(self, push: SenderPush) -> None:
        """Update the timers of a push, or forget it if it is over."""
        name = push.order.push
        if push.closed and not any(pair.resending for pair in push.pairs.values()):
            self._pushes.pop(name, None)
            self._finished[name] = None
            if len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)
        self._agenda.touch(push, known=name in self._pushes)
