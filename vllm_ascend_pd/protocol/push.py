# SPDX-License-Identifier: Apache-2.0
"""P rank: asks for authority, hands out units that may be written, and closes only when no write is out any more.

`Sender` is pure: its methods take the time, change the machine by the table in `tables.py`, and return actions.
A push goes to one or more D ranks. It succeeds or fails as one, and its blocks may be freed once every pair has closed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.protocol.actions import Action
from vllm_ascend_pd.protocol.compose import PrefillMessages
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.guards import TO_PREFILL, PairGuards
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.layouts import EngineLayout, written
from vllm_ascend_pd.protocol.messages import Message, message_name
from vllm_ascend_pd.protocol.pair import OPEN, Claim, ComputedUnit, Destination, PairRecord, PushRecord
from vllm_ascend_pd.protocol.push_rules import MAX_MEMORIES, PairMachine
from vllm_ascend_pd.protocol.states import Incoming, PairEvent, PairState
from vllm_ascend_pd.protocol.tables import PAIR_TABLE
from vllm_ascend_pd.protocol.timing import Agendas, Due, Repetition, RunningClock, earliest

__all__ = ["Claim", "Destination", "PushRecord", "Sender"]

MAX_FINISHED = 65536
WHOLE = -1  # in place of a D rank: the push itself


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
        timers: Timers,
        quiet_s: float,
    ) -> None:
        self._timers = timers
        self._clock = RunningClock()
        self._messages = PrefillMessages(incarnation, contributor, quiet_s)
        guards = self.guards(self._clock, OrderedDict())
        self._machine = self.machine(self.table, guards, self._messages, timers)
        self._agenda = Agendas(self._clock, self._times)
        self._pushes, self.counters = self._machine.pushes, self._machine.counters
        self._finished: OrderedDict[str, None] = OrderedDict()  # to distinguish late local events from wrong ones
        self._last_message: OrderedDict[Hashable, float] = OrderedDict()

    # -- input from the runtime

    def describe(self, model: str, geometry: CacheGeometry) -> None:
        """Set what BEGIN says of this engine, before the first push is opened."""
        self._messages.describe(written(EngineLayout(model, geometry)))

    def open(self, now: float, push: PushRecord) -> list[Action]:
        """Open a push, whose request and reservation are both known: send BEGIN to every destination."""
        self._clock.observe(now)
        if push.name in self._pushes or push.name in self._finished:
            raise LocalProtocolError(f"push {push.name} is opened twice")
        push.opened = push.progress = now
        self._pushes[push.name] = push
        for destination in push.destinations:
            if destination.d_rank in push.pairs:
                raise LocalProtocolError(f"push {push.name} names D rank {destination.d_rank} twice")
            begin = Repetition(now, self._timers.resend_first_s, self._timers.resend_max_s)
            pair = PairRecord(push, destination, begin, ready_by=now + self._timers.ready_timeout_s)
            push.pairs[destination.d_rank] = pair
            self._machine.fire(PairEvent.OPEN, now, pair)
        self._machine.close_push(push)
        return self._taken(push)

    def offer(self, now: float, push: PushRecord, d_rank: int, unit: Hashable, nbytes: int) -> list[Action]:
        """Record that `unit` is computed. Only authority is needed to write it."""
        pair = push.pairs.get(d_rank)
        if pair is None:
            raise LocalProtocolError(f"{push!r} has no D rank {d_rank}")
        return self._fire(PairEvent.OFFER, now, pair, ComputedUnit(unit, nbytes))

    def checksum(self, push: PushRecord, d_rank: int, layer: int, values: Sequence[int]) -> None:
        """Add to the sums of a layer's components that DONE will carry."""
        pair = push.pairs[d_rank]
        if pair.state in OPEN:
            sums = pair.coverage.checksums
            for component, value in enumerate(values):
                sums[layer, component] = (sums.get((layer, component), 0) + value) % 2**64

    def seal(self, now: float, push: PushRecord) -> list[Action]:
        """Record that no more units will be offered."""
        self._check_opened(now, push)
        if push.sealed and push.live:
            raise LocalProtocolError(f"push {push.name} is sealed twice")
        push.sealed = True
        for pair in push.pairs.values():
            self._machine.fire(PairEvent.SEAL, now, pair)
        return self._taken(push)

    def restart(self, now: float, push: PushRecord) -> list[Action]:
        """Start over, because the request was preempted: what was covered is written again. No write may be out.

        A sealed push fails instead. Other ranks may have sent DONE, and a step that is computed again divides the work
        between the ranks anew, so their shares would not fit together.
        """
        self._check_opened(now, push)
        if push.closed:
            return self._taken()
        if push.failure is not None or push.sealed:
            self._mark_source_invalid(push)
            self._machine.fail(now, push, Failure("PD-XFER-002", "preempted after its last step"))
        elif push.out:
            raise LocalProtocolError(f"push {push.name} is restarted while writes are out")
        else:
            push.epoch += 1
            push.progress = now
            for pair in push.pairs.values():
                self._machine.fire(PairEvent.RESTART, now, pair)
        return self._taken(push)

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
        elif message.transfer != pair.push.transfer or message.d_incarnation != message.transfer.incarnation:
            self.counters["wrong_transfer"] += 1
        elif peer != pair.destination.peer:
            self.counters["wrong_peer"] += 1  # another D, which has no part in this push
        else:
            self._machine.receive(now, pair, Incoming(peer, message))
            self._schedule(pair.push)
        return self._taken()

    def abort(self, now: float, push: PushRecord, failure: Failure) -> list[Action]:
        """Give the push up. From now on its blocks may be overwritten. It still closes only when no write is out."""
        self._check_opened(now, push)
        self._mark_source_invalid(push)
        self._machine.fail(now, push, failure)
        return self._taken(push)

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
            if d_rank == WHOLE:
                self._push_due(now, push)
            else:
                self._pair_due(now, push.pairs[d_rank])
            self._schedule(push)
        for name, d_rank in self._agenda.running_due():
            push = self._pushes[name]
            self._machine.close_if_finished(now, push.pairs[d_rank], None)
            self._schedule(push)
        return self._taken()

    def next_wake(self) -> float | None:
        """Return when `tick` must be called at the latest; None while there is nothing to wait for."""
        return earliest(*self._agenda.next())

    # -- queries of the runtime

    def find(self, push: str) -> PushRecord | None:
        """Return the live record of a push: callers only read it. None if it is not known, or not any more."""
        return self._pushes.get(push)

    def last_message_at(self, peer: Hashable) -> float | None:
        """Return when the last message of `peer` arrived; None if that is not known."""
        return self._last_message.get(peer)

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

    def _fire(self, event: PairEvent, now: float, pair: PairRecord, cause: object) -> list[Action]:
        self._clock.observe(now)
        self._machine.fire(event, now, pair, cause)
        return self._taken(pair.push)

    def _claimed(self, claim: Claim, what: str) -> PairRecord:
        pair = self._pair(claim.push, claim.d_rank)
        if pair is None or claim.epoch != pair.push.epoch or claim.unit not in pair.coverage.out:
            raise LocalProtocolError(f"{what}: {claim} is not out")
        return pair

    def _mark_source_invalid(self, push: PushRecord) -> None:
        """Note that the blocks may be overwritten at any time: writes still out do not count as delivered."""
        for pair in push.pairs.values():
            pair.owing = True

    def _check_opened(self, now: float, push: PushRecord) -> None:
        self._clock.observe(now)
        if push.name not in self._pushes and push.name not in self._finished:
            raise LocalProtocolError(f"push {push.name} was never opened")

    def _pair(self, push: str, d_rank: int) -> PairRecord | None:
        record = self._pushes.get(push)
        return record.pairs.get(d_rank) if record else None

    def _taken(self, *touched: PushRecord) -> list[Action]:
        for push in touched:
            self._schedule(push)
        actions, self._machine.actions = self._machine.actions, []
        return actions

    # -- time

    def _push_due(self, now: float, push: PushRecord) -> None:
        if now >= push.deadline:
            self._machine.fail(now, push, Failure("PD-XFER-001", f"deadline of {push.deadline_s:g} s"))
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
                pair.resend.sent(now)
                self._machine.repeat(now, pair, None)

    def _schedule(self, push: PushRecord) -> None:
        """Update the timers of a push, or forget it if it is over."""
        if push.closed and not any(pair.resending for pair in push.pairs.values()):
            self._pushes.pop(push.name, None)
            self._finished[push.name] = None
            if len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)
        self._agenda.touch(push)

    def _times(self, push: PushRecord) -> Iterator[Due[tuple[str, int]]]:
        """Yield when to look next at a push and at each of its pairs: on the wall clock, and on the running clock."""
        known = push.name in self._pushes
        give_up = min(push.deadline, push.progress + self._timers.stall_timeout_s)
        yield (push.name, WHOLE), give_up if known and push.live else None, None
        for pair in push.pairs.values():
            settling = pair.state is PairState.DRAIN and not pair.coverage.out
            yield pair.key, pair.due if known else None, pair.quiet_at if settling else None
