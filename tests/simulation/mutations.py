# SPDX-License-Identifier: Apache-2.0
"""The protocol with one rule removed at a time; the simulator must find each of them, which proves that it checks.

None of this is in the package: rules are removed by replacing a machine, a guard, a cell or the fence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec
import numpy as np

from simulation.exchange import StreamEvent
from simulation.prefill import SimulatedWriter
from simulation.settings import STATES, Faults, FirstFaults, SimulationSettings, draw
from vllm_ascend_pd.config import RegroupConfig, Timers
from vllm_ascend_pd.decode.scheduler.core.book import LoadBook
from vllm_ascend_pd.decode.scheduler.core.first_tokens import Start
from vllm_ascend_pd.decode.scheduler.core.load import LoadEvent, LoadState, RemoteLoad
from vllm_ascend_pd.geometry.coalesce import Ints, Spans
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, Served, StepPlanner
from vllm_ascend_pd.geometry.runs import Grid
from vllm_ascend_pd.metadata import Bind, LoadEnd, PrefillStep, PushSlice, PushStart
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.in_flight import BlocksInFlight
from vllm_ascend_pd.prefill.scheduler.core.meetings import Holding, Meetings, OfferedLoad, Record
from vllm_ascend_pd.prefill.scheduler.core.requests import PushRequests
from vllm_ascend_pd.prefill.worker.core.batches import Batch
from vllm_ascend_pd.prefill.worker.core.exchanges import Staged
from vllm_ascend_pd.prefill.worker.core.orders import OrderBook
from vllm_ascend_pd.prefill.worker.core.push import Push, Unit
from vllm_ascend_pd.prefill.worker.core.pushes import Pushes, StepPlan, Sums, Writable
from vllm_ascend_pd.prefill.worker.steps import Steps
from vllm_ascend_pd.prefill.worker.writer import Computed
from vllm_ascend_pd.protocol.actions import Action, Send
from vllm_ascend_pd.protocol.compose import ready
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.fence import Fence
from vllm_ascend_pd.protocol.first import First
from vllm_ascend_pd.protocol.guards import PairGuards, ReservationGuards
from vllm_ascend_pd.protocol.identity import Contributor, TransferId
from vllm_ascend_pd.protocol.meeting import Bound, Offer
from vllm_ascend_pd.protocol.messages import Begin, Cancel, Done, Failed, Message
from vllm_ascend_pd.protocol.pair import Claim, PairRecord
from vllm_ascend_pd.protocol.push import Sender
from vllm_ascend_pd.protocol.push_rules import PairMachine
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.protocol.reservation_rules import ReservationMachine
from vllm_ascend_pd.protocol.states import Cell, Incoming, ReservationEvent, ReservationState, WriterState
from vllm_ascend_pd.protocol.tables import PAIR_TABLE, RESERVATION_TABLE
from vllm_ascend_pd.protocol.timing import OBSERVED_GAP_S, RunningClock
from vllm_ascend_pd.protocol.transfer import Transfer, WriterRecord
from vllm_ascend_pd.transport.base import WriteState

MEETING_TABLE = Meetings.table


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mutation of the protocol. `Mutation()` changes nothing."""

    name: str = ""
    receiver: Callable[..., Receiver] = Receiver
    sender: Callable[..., Sender] = Sender
    book: Callable[..., PushBook] = PushBook
    loads: Callable[..., LoadBook] = LoadBook
    meetings: Callable[..., Meetings] = Meetings
    prefill_requests: Callable[..., PushRequests] = PushRequests
    computing: Callable[..., BlocksInFlight] = BlocksInFlight
    hasty_release: bool = False  # P frees a finished request's blocks at once
    blunt_revocation: bool = False  # D continues under the session that it has revoked
    core: Callable[..., Pushes] = Pushes
    writer: Callable[..., SimulatedWriter] = SimulatedWriter
    steps: Callable[..., Steps] = Steps
    # a world that needs the rule often enough
    world: Callable[[SimulationSettings], SimulationSettings] = lambda settings: settings
    divided: bool = False  # a world with context parallelism, which the others remove

    def settings(self, seed: int) -> SimulationSettings:
        drawn = draw(seed)
        if self.name:
            drawn = drawn.settled() if self.divided else drawn.settled().undivided()
        return self.world(drawn)


def _of(machine: type[Any], table: Mapping[Any, Mapping[Any, Cell[Any]]]) -> Any:
    """Return the table with the methods of `machine` in place of the package's."""
    return {
        state: {event: replace(cell, effect=getattr(machine, cell.effect.__name__)) for event, cell in cells.items()}
        for state, cells in table.items()
    }


class Uncut(PushRequests):
    """P computes the last token of a prompt, although D needs the state before it."""

    def cuts(self, request_id: str) -> bool:
        return False


class FreeBeforeFence(Receiver):
    """D reports a failure without waiting for any writer."""

    class UnfencedReservations(ReservationMachine):
        def fence(self, now: float, record: Transfer, failure: Failure) -> None:
            for writer in record.leased():
                writer.state = WriterState.QUIET
            super().fence(now, record, failure)

    machine, table = UnfencedReservations, _of(UnfencedReservations, RESERVATION_TABLE)


class ReadyBeforeBind(Receiver):
    """D grants authority before the blocks' earlier use has ended."""

    class EagerReservations(ReservationMachine):
        def park(self, now: float, record: Transfer, received: Incoming[Any]) -> None:
            if isinstance(received.message, Begin):
                granted = ready(received.message, self._timers.lease_s, self.memory, self.addresses)
                self.actions.append(Send(received.peer, granted))
            super().park(now, record, received)

    machine, table = EagerReservations, _of(EagerReservations, RESERVATION_TABLE)


def _conclude(machine: Any, now: float, record: Transfer) -> None:
    """Conclude as if the last contributor had said DONE."""
    record.state = ReservationState.VERIFYING if machine.guards.verify else ReservationState.CLOSED_OK
    (machine.compare if machine.guards.verify else machine.report)(now, record, None)


class DoneCountedTwice(Receiver):
    """D counts messages instead of contributors."""

    class CountingReservations(ReservationMachine):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._dones: Counter[Any] = Counter()

        def receive(self, now: float, record: Transfer, received: Incoming[Any]) -> None:
            self._dones[record.transfer] += record.state is ReservationState.OPEN and isinstance(received.message, Done)
            super().receive(now, record, received)
            if record.state is ReservationState.OPEN and self._dones[record.transfer] >= len(record.writers) > 0:
                _conclude(self, now, record)

    machine = CountingReservations  # type: ignore[assignment]


class AnyIncarnationReceiver(Receiver):
    """D accepts messages of any incarnation at the address."""

    class AnyProcess(ReservationGuards):
        def same_process(self, writer: WriterRecord, p_incarnation: str) -> bool:
            return True

    guards = AnyProcess


class AnyIncarnationSender(Sender):
    """P answers for earlier incarnations at its address."""

    def message(self, now: float, peer: Any, message: Message) -> list[Action]:
        mine = msgspec.structs.replace(message, p_incarnation=self._messages.incarnation)
        return super().message(now, peer, mine)


class SuccessInSpiteOfFailed(Receiver):
    """D treats FAILED like any other end."""

    class ForgivingReservations(ReservationMachine):
        def end(self, now: float, record: Transfer, received: Incoming[Failed]) -> None:
            self.acknowledge(now, record, received)
            if record.bound and received.message.quiescent:
                record.author(received.message).state = WriterState.DONE
                if all(writer.state is WriterState.DONE for writer in record.writers.values()):
                    _conclude(self, now, record)

    machine = ForgivingReservations
    table = {  # noqa: RUF012 - like its base
        **RESERVATION_TABLE,
        ReservationState.OPEN: {
            **RESERVATION_TABLE[ReservationState.OPEN],
            ReservationEvent.FAILED: Cell(ReservationState.OPEN, ForgivingReservations.end),
            ReservationEvent.FAILED_IN_FLIGHT: Cell(ReservationState.OPEN, ForgivingReservations.end),
            ReservationEvent.EARLY_FAILED: Cell(ReservationState.OPEN, ForgivingReservations.end),
        },
    }


class LeaseNotChecked(Sender):
    """P writes without a time limit once it was allowed to."""

    class UnlimitedPairs(PairMachine):
        def extend(self, now: float, pair: PairRecord, received: Incoming[Any]) -> None:
            super().extend(now, pair, received)
            pair.authority = now + 1e6

    machine, table = UnlimitedPairs, _of(UnlimitedPairs, PAIR_TABLE)


class CancelNotAcknowledged(Sender):
    """P stops on request without acknowledging it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._cancelled: set[str] = set()

    def message(self, now: float, peer: Any, message: Message) -> list[Action]:
        if isinstance(message, Cancel):
            self._cancelled.add(message.push)
        return [action for action in super().message(now, peer, message) if not self._silenced(action)]

    def tick(self, now: float) -> list[Action]:
        return [action for action in super().tick(now) if not self._silenced(action)]

    def wrote(self, now: float, claim: Claim, ok: bool) -> list[Action]:
        return [action for action in super().wrote(now, claim, ok) if not self._silenced(action)]

    def _silenced(self, action: Action) -> bool:
        return (
            isinstance(action, Send)
            and isinstance(action.message, Done | Failed)
            and action.message.push in self._cancelled
        )


class CancelAnsweredAtOnce(Sender):
    """P reports that it is quiet as soon as it is asked, despite pending writes."""

    def message(self, now: float, peer: Any, message: Message) -> list[Action]:
        actions = super().message(now, peer, message)
        if isinstance(message, Cancel) and message.p_incarnation == self._messages.incarnation:
            actions.append(Send(peer, self._messages.over(message)))
        return actions


class QuarantineSkipped(Sender):
    """P counts as quiet as soon as the transport has given up."""

    class GivenUpIsSettled(PairGuards):
        def settled(self, pair: PairRecord) -> bool:
            return not pair.coverage.out

    guards = GivenUpIsSettled


class LostForgiven(Sender):
    """P counts a failed write as landed, and says DONE."""

    class ForgivingPairs(PairMachine):
        def fail_lost(self, now: float, pair: PairRecord, claim: Claim) -> None:
            self.cover(now, pair, claim)

        lose = fail_lost

    machine, table = ForgivingPairs, _of(ForgivingPairs, PAIR_TABLE)


class DoneFromLostSource(Sender):
    """P says DONE although its blocks were overwritten during the writes, or a unit was never offered."""

    class CompleteIsDelivered(PairGuards):
        def delivered(self, pair: PairRecord) -> bool:
            return pair.complete and pair.authority is not None

    guards = CompleteIsDelivered


class SealedPushRestarted(Sender):
    """P restarts a push although some ranks may have said DONE."""

    def restart(self, now: float, push: str) -> list[Action]:
        record = self._pushes.get(push)
        if record is not None and not any(pair.coverage.out for pair in record.pairs.values()):
            record.sealed = False
        return super().restart(now, push)


class _CountsAll(RunningClock):
    def observe(self, now: float) -> bool:
        before = self._last
        stopped = super().observe(now)
        if before is not None and now > before:
            self.seconds += now - before - min(now - before, OBSERVED_GAP_S)
        return stopped


class SealedPushOrderedAgain(PushBook):
    """P's scheduler orders that restart, too."""

    def preempted(self, request_id: str) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.sealed = False
        super().preempted(request_id)


class StageNotAwaited(Receiver):
    """D waits for one stage of P, although others have layers for it, too."""

    class OneStage(ReservationGuards):
        def contributors(self, begin: Begin) -> tuple[Contributor, ...]:
            return tuple(one for one in super().contributors(begin) if one.stage == begin.contributor.stage)

    guards = OneStage


class OneStageForAll(OrderBook):
    """P pushes only to the workers of D's first stage."""

    def _destinations(self, d: CacheGeometry) -> tuple[int, ...]:
        return tuple(worker for worker in super()._destinations(d) if worker < d.tp_size)


class FirstStageServed(Pushes):
    orders_type = OneStageForAll


class LandedWhileStopped(Receiver):
    """D's timer H goes on while D is stopped."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._fence_of.clock = _CountsAll()


class _Trusting(Fence):
    def observe(self, now: float) -> None:
        self.clock.observe(now)


class AnswerBelievedAfterStop(Receiver):
    """D believes FAILED(quiescent) at once, although its own buffers may still hold earlier writes."""

    fence = _Trusting


class _LandedOnly(Fence):
    def proven_at(self, writer: WriterRecord) -> float | None:
        if writer.state is not WriterState.ANSWERED and self.is_gone(writer.p_incarnation):
            return writer.landed_at
        return super().proven_at(writer)


class GoneIsQuiet(Receiver):
    """D only waits for H once a writer's process is gone, even if it has just ended."""

    fence = _LandedOnly


class TimeAloneFrees(Receiver):
    """D takes the end of H for a proof."""

    class Impatient(Fence):
        def proven_at(self, writer: WriterRecord) -> float | None:
            return super().proven_at(writer) or writer.landed_at

    fence = Impatient


class RevokedOnce(Receiver):
    """D does not try again to revoke access after that has failed."""

    def not_revoked(self, now: float) -> list[Action]:
        return []


class RevokedAnyhow(Receiver):
    """D takes a revocation that has failed for one that has cut the peers off."""

    def not_revoked(self, now: float) -> list[Action]:
        return self.revoked(now, self._machine.addresses)


class SlotsReused(Pushes):
    """P reuses a staging slot as soon as its bytes were offered."""

    def staged(self, now: float, item: Staged, absent: Any, sums: Any) -> None:
        super().staged(now, item, absent, sums)
        for slot in item.slots:
            if slot is not None and slot.users and self._staging is not None:
                self._staging.release(slot)

    def _drop(self, push: Push, d_rank: int, unit: Unit) -> None:
        push.slot_shares.pop((d_rank, unit), None)


class StaysAway(Pushes):
    """A rank that missed nothing takes no part in the repetition of an exchange."""

    def _due(self, units: Sequence[Unit]) -> Sequence[Unit]:
        waiting = self.exchanges.missed._waiting.values() if self.exchanges is not None else ()
        missing = {share.unit(layer) for shares in waiting for share, layer in shares}
        return [unit for unit in units if unit in missing]


class NotDrained(Pushes):
    """P overwrites preempted blocks without waiting for their readers, and without a report."""

    def preempt(self, now: float, names: Iterable[str]) -> None:
        for push in self._named(names):
            push.forget()

    def drain(self, now: float) -> float:
        return 0.0


class DrainedAtOnce(Pushes):
    """P gives up pushes that still write at their preemption, although it may wait for them."""

    def drain(self, now: float) -> float:
        return super().drain(self._drained_by)


class DrainedForEver(Pushes):
    """P's forward waits for preempted blocks without a time limit."""

    def drain(self, now: float) -> float:
        return super().drain(min(now, self._drained_by - 1.0))


class ReportedBeforeClosed(Pushes):
    """P's workers report a request as soon as it ends, although its blocks are still read."""

    def take_finished(self, ended: Iterable[str]) -> set[str]:
        return {request for request in ended if self._reported_to.pop(request, None) is not None}


class ReportedWithoutBlocks(Pushes):
    """P's workers report requests that hold no blocks."""

    def _stop_reporting(self, push: Push) -> None:
        """Withdraw nothing."""


class EndsSwallowed(LoadBook):
    """D treats a load that failed on some ranks as complete."""

    def ended(self, ends: Iterable[LoadEnd]) -> None:
        super().ended(end for end in ends if not end.code)


class EveryAnswerGood(LoadBook):
    """D waits for KV although the metaserver has said that none will come."""

    def answered(self, transfer: TransferId, kind: str, code: str = "", detail: str = "") -> None:
        super().answered(transfer, "prefilled")


class NoAnswerGood(LoadBook):
    """D gives a load up although the metaserver has said that P has finished."""

    def answered(self, transfer: TransferId, kind: str, code: str = "", detail: str = "") -> None:
        super().answered(transfer, "failed", code, detail)


class ReservedTooLittle(LoadBook):
    """D reserves one token less than it has bound."""

    def reserve(self, *args: Any) -> Bind:
        bind = super().reserve(*args)
        return replace(bind, end=bind.end - 1) if bind.end - bind.first > 1 else bind


class ReadyUnheeded(Pushes):
    """P does not wake its writer at D's READY."""

    def message(self, now: float, peer: Any, message: Message) -> None:
        super().message(now, peer, message)
        self._effects = [effect for effect in self._effects if not isinstance(effect, Writable)]


class PrivatePlans(Pushes):
    """A P rank plans a step without the pushes that have failed on this rank."""

    def _takes_part(self, push: Push) -> bool:
        return super()._takes_part(push) and not push.closed


class SessionsMixed(Pushes):
    """P writes for the old and the new session of an address in one batch."""

    def _session(self, claim: Claim) -> str | None:
        return None


class AbsentBelieved(Pushes):
    """P writes the results of an exchange without checking their sender."""

    def staged(self, now: float, item: Staged, absent: Any, sums: Sequence[Sums]) -> None:
        super().staged(now, item, [[] for _ in item.slots], sums)


class SealsEarly(Pushes):
    """P seals a push although exchanges still have parts of it."""

    def _owes(self, push: Push) -> bool:
        return False


class UnissuedLanded(Pushes):
    """P continues after a write of which nothing was sent, as if it had landed."""

    def finished(self, now: float, batch: Batch, state: WriteState) -> None:
        super().finished(now, batch, WriteState.LANDED if state is WriteState.UNISSUED else state)


class DeadWriterForgotten(Pushes):
    """Pending writes of a dead writer count as over at once."""

    def finished(self, now: float, batch: Batch, state: WriteState) -> None:
        super().finished(now, batch, WriteState.UNISSUED if self.dead else state)


class DraftsTooEarly(Steps):
    """P pushes the draft model's layers with the target's last one, before they are written."""

    def _mark(self, current: Any, index: int, event: Any = None) -> None:
        super()._mark(current, index, event)
        if current.missing and current.missing <= self._drafts:
            current.drafted |= self._drafts
            self.end()


class EventOfAnotherLayer(Steps):
    """P keeps the event of a written cache for the layers after it."""

    def computed(self, name: str) -> None:
        kept = self._written
        super().computed(name)
        self._written = kept


class DraftsWithoutHook(Steps):
    """P pushes all missing layers at the end of a step, as an earlier version did."""

    def end(self) -> None:
        if self._current is not None:
            self._current.drafted |= self._current.missing
        super().end()


class IndexersTooEarly(Steps):
    """P takes the hook of one attention for the indexer of the next, whose keys are not written yet."""

    def _by_hook(self) -> dict[str, list[int]]:
        found = super()._by_hook()
        hooks, moved = sorted(found), dict[str, list[int]]()
        before = dict(zip(hooks[1:], hooks, strict=False))
        for hook, complete in found.items():
            for index in complete:
                own = self._names[index] == hook
                moved.setdefault(hook if own else before.get(hook, hook), []).append(index)
        return moved


class WindowTooShort(Pushes):
    """P pushes a block less of each window."""

    def _leaving(self, push: Push, pairing: int, push_slice: PushSlice) -> tuple[int, int]:
        lo, hi = super()._leaving(push, pairing, push_slice)
        own = push.pairings[pairing].d.own
        return (min(hi, max(lo, push.firsts[pairing] + own.block_size)) if own.partial else lo), hi


class EntryTooEarly(Pushes):
    """P pushes an entry of several tokens with the first of them."""

    def _leaving(self, push: Push, pairing: int, push_slice: PushSlice) -> tuple[int, int]:
        lo, hi = super()._leaving(push, pairing, push_slice)
        d, end = push.pairings[pairing].d, push.reservation.end
        if d.own.per_entry == 1 or hi == lo:
            return lo, hi
        return lo, min(end // d.own.per_entry, max(hi, -(-push_slice.after // d.own.per_entry)))


class EntriesTakenForTokens(Pushes):
    """P counts the blocks of compressed layers by tokens."""

    def _start(self, now: float, start: PushStart) -> None:
        super()._start(now, start)
        push = self._pushes[start.push]
        push.firsts = tuple(
            min(push.reservation.first, pair.d.places(0, push.reservation.end)[1])
            if pair.d.own.per_entry > 1
            else first
            for pair, first in zip(push.pairings, push.firsts, strict=True)
        )


class _PartOfAnother(StepPlanner):
    def _chunks(self, lo: Ints, hi: Ints, jobs: Sequence[Job], target: Served) -> tuple[Ints, Grid]:
        world = jobs[0].d.ranks.world
        return super()._chunks(lo, hi, jobs, msgspec.structs.replace(target, d_part=(target.d_part + 1) % world))


class PartOfAnother(Pushes):
    """P confuses D's ranks: it takes each for the one that holds the tokens after its own."""

    planner_type = _PartOfAnother


class KeysAsLatents(Pushes):
    """P takes an indexer's keys to be divided among D's ranks as the latents are."""

    def _start(self, now: float, start: PushStart) -> None:
        super()._start(now, start)
        push, d = self._pushes[start.push], start.reservation.geometry
        push.pairings = tuple(
            msgspec.structs.replace(
                pairing,
                d=msgspec.structs.replace(
                    pairing.d, dcp=d.dcp, interleave=d.interleave, block_size=pairing.d.covers // d.dcp
                ),
            )
            for pairing in push.pairings
        )


class FoundByAddress(Pushes):
    """P takes all layers at one address for the first of them."""

    def _start(self, now: float, start: PushStart) -> None:
        super()._start(now, start)
        push, first = self._pushes[start.push], dict[tuple[int, ...], int]()
        at = [first.setdefault(bases, layer) for layer, bases in enumerate(self._bases)]
        push.pairing_of = tuple(push.pairing_of[layer] for layer in at)


class WrongGroup(Pushes):
    """P writes every layer into the blocks of D's first group."""

    def _start(self, now: float, start: PushStart) -> None:
        super()._start(now, start)
        push = self._pushes[start.push]
        push.d_blocks = tuple(push.d_blocks[0] for _ in push.d_blocks)


class ScaleOfAnotherBlock(Pushes):
    """P reads the scales of the previous block."""

    def _plan(self, now: float, number: int, slices: Iterable[PushSlice]) -> StepPlan:
        planned = super()._plan(now, number, slices)
        for push in self._direct.get(number, ()):
            for index, pair in enumerate(push.pairings):
                if (plan := push.plans.get((number, index))) is not None:
                    for rank, spans in plan.by_rank.items():
                        plan.by_rank[rank] = tuple(
                            Spans(part.src - region.block_stride, part.dst, part.size)
                            if region.name.endswith("scale")
                            else part
                            for part, region in zip(spans, pair.p.regions, strict=True)
                        )
        return planned


class StateTooEarly(Steps):
    """P counts states as computed at the first hook of a step, or earlier."""

    def begin(self, step: PrefillStep) -> None:
        super().begin(step)
        for index in sorted(self._states):
            if self._current is not None and index in self._current.missing:
                self._mark(self._current, index)


class StateOfOneTokenLess(PushBook):
    """P's scheduler pushes the state before the last token that D counts as computed."""

    def scheduled(
        self, request_id: str, computed: int, count: int, *blocks: Sequence[int], replaces: bool, ready: int = 0
    ) -> PushSlice | None:
        tracked = self._tracked.get(request_id)
        less = tracked is not None and computed + count == tracked.reservation.end - 1
        return super().scheduled(request_id, computed, count + less, *blocks, replaces=replaces, ready=ready)


class StateOfEveryStep(Pushes):
    """P pushes the state after every chunk, so that an older one may land after a newer."""

    def _leaving(self, push: Push, pairing: int, push_slice: PushSlice) -> tuple[int, int]:
        lo, hi = super()._leaving(push, pairing, push_slice)
        if push.pairings[pairing].d.own.stateful and push_slice.after > push.reservation.first:
            table = push.tables[push.pairings[pairing].p.group]
            if len(table.known_ids):  # with cached tokens there is none
                table.ids[0], table.known = table.known_ids[-1], 1  # the newest reported one
                return 0, 1
        return lo, hi


class StateWithEveryStep(PushBook):
    """P's scheduler reports the place of the state with every step."""

    def scheduled(
        self, request_id: str, computed: int, count: int, *blocks: Sequence[int], replaces: bool, ready: int = 0
    ) -> PushSlice | None:
        tracked = self._tracked.get(request_id)
        push_slice = super().scheduled(request_id, computed, count, *blocks, replaces=replaces, ready=ready)
        if tracked is None or push_slice is None:
            return push_slice
        at = [(push_slice.after - 1) // group.block_size for group in tracked.groups]
        new_blocks = [
            np.asarray(ids[i : i + 1], dtype=np.int32) if group.stateful else new
            for group, ids, i, new in zip(tracked.groups, blocks, at, push_slice.new_blocks, strict=True)
        ]
        self._pending.slices[-1] = replace(push_slice, new_blocks=tuple(new_blocks))
        return push_slice


class LastTokenLoaded(LoadBook):
    """D loads the prompt's last token, too, and computes it again without what its window needs."""

    def wanted(self, request_id: str, prompt_length: int, computed: int, *, recomputes_last: bool = False) -> int:
        return super().wanted(request_id, prompt_length, computed)


class EventsNotAwaited(SimulatedWriter):
    """P's writer does not wait for the device."""

    def put(self, item: Any) -> None:
        super().put(replace(item, event=Reached()) if isinstance(item, Computed) else item)


class Reached:
    def done(self) -> bool:
        return True


class LooksTooEarly(SimulatedWriter):
    """P's writer looks for finished writes only after it has submitted.

    Work that they make room for waits for other news.
    """

    def turn(self) -> None:
        self._announce(self._computed)
        self._announce(self._exchanged)
        self._submit()
        self._poll()


# Worlds that need a rule all the time. The unchanged protocol must hold in them, too.


class HoldFreedEarly(Meetings):
    """P frees the blocks of a source when its request ends, and continues to offer them."""

    def hold(self, now: float, record: Record) -> None:
        super().hold(now, record)
        self._book.free(record.request_id)


HoldFreedEarly.table = _of(HoldFreedEarly, MEETING_TABLE)


class HoldForEver(Meetings):
    """P never frees the blocks of a source that no D loads."""

    def release(self, now: float, record: Record) -> None:
        return None


HoldForEver.table = _of(HoldForEver, MEETING_TABLE)


class BoundTwice(Meetings):
    """A source goes to every target that asks for it."""

    def __init__(self, book: PushBook, incarnation: str, holding: Holding) -> None:
        super().__init__(book, incarnation, holding)
        self._gone: dict[Any, str] = {}

    def bind_held(self, now: float, record: Record, target: OfferedLoad) -> None:
        self._gone[record.source] = record.push
        super().bind_held(now, record, target)

    def offer(self, now: float, peer: Any, offer: Offer, reservation: Any) -> None:
        if offer.source in self._gone and offer.transfer not in self._ended:
            self._outbox.append((peer, Bound(offer.transfer, self._gone[offer.source], ended=True)))
        else:
            super().offer(now, peer, offer, reservation)

    def taken(self, now: float, record: Record, target: OfferedLoad) -> None:
        self._outbox.append((target.peer, Bound(target.transfer, record.push, ended=False)))


BoundTwice.table = _of(BoundTwice, MEETING_TABLE)


class SourceOfTheDead(Meetings):
    """P takes a source of an earlier incarnation for its own, with any prompt."""

    def __init__(self, book: PushBook, incarnation: str, holding: Holding) -> None:
        super().__init__(book, incarnation, holding)
        book.refusal_of = lambda *_: None  # type: ignore[method-assign]

    def _meant(self, source: Any, meets: str) -> Record | None:
        if source is None or source.incarnation == self._incarnation:
            return super()._meant(source, meets)
        return next((record for record in self._sources.values() if record.target is None), None)


class HotTakenForCached(BlocksInFlight):
    """P pushes everything that vLLM calls cached, also what this very step computes."""

    def ready(self, chunk: Any, groups: Any) -> int:
        return int(chunk.filled)


class LoadingTakenForCached(BlocksInFlight):
    """P pushes everything that vLLM calls computed, also what another connector loads in this step."""

    def step(self, chunks: Any, over: Any) -> None:
        super().step([replace(chunk, found=None) for chunk in chunks], over)

    def ready(self, chunk: Any, groups: Any) -> int:
        return super().ready(replace(chunk, found=None), groups)


class TokenOfAnother(Meetings):
    """P reports a source's sample with the source that ends next."""

    _last: Any = None

    def finished(self, now: float, request_id: str, *, well: bool, sample: Any = None) -> bool:
        previous, self._last = self._last or sample, sample
        return super().finished(now, request_id, well=well, sample=previous)


class AttachedWithoutItsPast(PushBook):
    """P does not push what was computed before the push had a target."""

    def attach(self, *facts: Any) -> None:
        super().attach(*facts)
        self._pending.computed = [replace(push_slice, before=push_slice.after) for push_slice in self._pending.computed]


class LostBlocksPushed(PushBook):
    """P pushes a step's blocks although they were lost before the step."""

    def preempted(self, request_id: str) -> None:
        computed, starts = list(self._pending.computed), list(self._pending.starts)
        super().preempted(request_id)
        self._pending.computed, self._pending.starts = computed, starts


class EndedBeforeItsPush(PushBook):
    """P's workers do not learn that a request had ended before its push began."""

    def take_step(self, geometry: CacheGeometry | None) -> PrefillStep:
        step = super().take_step(geometry)
        return replace(step, starts=tuple(replace(start, ended=False) for start in step.starts))


def _met(settings: SimulationSettings) -> SimulationSettings:
    """Every router sends to P first, or to both at once; no engine has the draft model."""
    settings = replace(settings, windows=(), group_of=(), scales=(), p_first=0.5, at_once=1.0)
    prefill, decode = (
        tuple(replace(shape, drafts=False, pp=1) for shape in side) for side in (settings.prefill, settings.decode)
    )
    faults = replace(settings.faults, undrafted=0.0)
    return replace(_roomy(replace(settings, prefill=prefill, decode=decode)), faults=faults)


def _kindly_met(settings: SimulationSettings) -> SimulationSettings:
    return _met(_kind(settings))


def _met_astray(settings: SimulationSettings) -> SimulationSettings:
    """Sides come late, twice or never, and P is short of blocks."""
    settings = _met(replace(settings, burst=8, faults=Faults(astray=0.3, preempt=0.2, leave=0.1)))
    return replace(settings, timers=replace(settings.timers, hold_s=20.0, meet_s=10.0))


def _met_first(settings: SimulationSettings) -> SimulationSettings:
    """D asks for P's first tokens."""
    return replace(_met_astray(settings), first=True)


def _met_after_restarts(settings: SimulationSettings) -> SimulationSettings:
    """P is restarted all the time, and D comes late for its sources."""
    settings = _met(
        replace(settings, burst=8, prefill=settings.prefill[:1], faults=Faults(kill_prefill=0.05, astray=0.5))
    )
    return replace(settings, p_first=1.0, timers=replace(settings.timers, hold_s=20.0))


def _cut_off(settings: SimulationSettings) -> SimulationSettings:
    """The side channels of writers are cut in the middle of a prompt, while their data path works."""
    return replace(settings, chunk=4, faults=Faults(partition=0.2))


def _stopped_and_killed(settings: SimulationSettings) -> SimulationSettings:
    """Writers die while a stopped D has their writes in its buffers."""
    return replace(settings, faults=Faults(stop_decode=0.1, kill_prefill=0.1, write_slow=0.1))


def _killed_after_a_stop(settings: SimulationSettings) -> SimulationSettings:
    """Writers that were stopped write once more before they die."""
    return replace(settings, faults=Faults(submit_stall=0.02, write_stop=0.02, kill_prefill=0.05))


def _revoked_in_vain(settings: SimulationSettings) -> SimulationSettings:
    """Writers that are stopped in a write must be shut out, which often fails."""
    return replace(settings, faults=Faults(submit_stall=0.02, write_stop=0.02, revocation=0.7))


def _scarce_slots(settings: SimulationSettings) -> SimulationSettings:
    """Exchanges are missed and repeated all the time, and parts of them fail."""
    faults = Faults(exchange_error=0.1, late=0.05, write_slow=0.02)
    always = RegroupConfig(regroup="always")
    return replace(settings, regroup=always, slots=1, slot_destinations=1, room=1, faults=faults)


def _slots_read_late(settings: SimulationSettings) -> SimulationSettings:
    """Writes fail, and continue to read the only slot of their destination while others use it."""
    return replace(_scarce_slots(settings), faults=Faults(write_error=0.2))


def _preempted(settings: SimulationSettings) -> SimulationSettings:
    """Many requests at once are preempted all the time, writes that read their blocks are slow, messages are lost."""
    need = -(-settings.tokens // min(shape.block_size for shape in settings.prefill)) + 1
    return replace(
        settings,
        prefill=tuple(replace(shape, blocks=4 * need) for shape in settings.prefill),
        decode=tuple(replace(shape, pp=1, blocks=20 * need) for shape in settings.decode),
        chunk=16,
        burst=8,
        timers=replace(settings.timers, preempt_drain_s=0.0),
        faults=Faults(preempt=0.2, write_slow=0.2, drop=0.2),
        regroup=RegroupConfig(regroup="never"),
    )


def _preempted_patiently(settings: SimulationSettings) -> SimulationSettings:
    """The same, and P waits for readers."""
    return replace(_preempted(settings), timers=replace(settings.timers, preempt_drain_s=1.0))


def _kind(settings: SimulationSettings) -> SimulationSettings:
    """Nothing fails, and no deadline is near."""
    timers = replace(
        settings.timers,
        recv_deadline_s=600.0,
        stall_timeout_s=600.0,
        ready_timeout_s=600.0,
        preempt_drain_s=1.0,
        hold_s=600.0,
        meet_s=600.0,
    )
    return replace(settings, timers=timers, faults=Faults())


def _broken_writers(settings: SimulationSettings) -> SimulationSettings:
    """Transfer engines break, or accept nothing, while writes are slow."""
    return replace(settings, faults=Faults(unissued=0.05, writer_dies=0.01, write_slow=0.1))


def _decode_comes_back(settings: SimulationSettings) -> SimulationSettings:
    """A D returns on its address with another session, while writes for its predecessor wait behind slow ones."""
    need = -(-settings.tokens // settings.prefill[0].block_size) + 1
    timers = Timers(stall_timeout_s=20.0, recv_deadline_s=40.0)
    return replace(
        settings,
        prefill=(replace(settings.prefill[0], tp=1, pp=1, blocks=8 * need),),
        decode=(replace(settings.decode[0], tp=1, blocks=10 * need),),
        layers=3,
        indexed=(),
        windows=(),
        group_of=(),
        scales=(),
        chunk=64,
        burst=8,
        gap_s=4.0,
        timers=timers,
        transfer_timeout_s=5.0,
        quiet_s=5.0 + timers.quiet_extra_s,
        regroup=RegroupConfig(regroup="never"),
        faults=Faults(kill_decode=0.05, silent_death=1.0, write_slow=0.7),
        p_first=0.0,
        at_once=0.0,
        first=False,
    )


def _drafting(settings: SimulationSettings) -> SimulationSettings:
    """Every engine has the draft model, which sometimes does not run."""
    prefill, decode = (
        tuple(replace(shape, drafts=True) for shape in side) for side in (settings.prefill, settings.decode)
    )
    return replace(settings, prefill=prefill, decode=decode, faults=replace(settings.faults, undrafted=0.2))


def _stages(settings: SimulationSettings) -> SimulationSettings:
    """Both sides are pipelines, cut differently."""
    prefill, decode = (
        tuple(replace(shape, pp=pp, late=late) for shape in side)
        for side, pp, late in ((settings.prefill, 3, False), (settings.decode, 2, True))
    )
    return replace(settings, prefill=prefill, decode=decode, layers=4, windows=(), group_of=(), scales=())


def _kind_stages(settings: SimulationSettings) -> SimulationSettings:
    return _stages(_kind(settings))


def _indexed(settings: SimulationSettings) -> SimulationSettings:
    """Indexers beside all attentions, of which there are several in a stage."""
    prefill = tuple(replace(shape, pp=1) for shape in settings.prefill)
    return replace(settings, prefill=prefill, layers=3, indexed=(0, 1, 2), windows=(), group_of=(), scales=())


def _quantised(settings: SimulationSettings) -> SimulationSettings:
    """Scales beside keys and values, which are pushed without an exchange."""
    regroup = replace(settings.regroup, regroup="never")
    return replace(_kind(settings), quantised=2, regroup=regroup)


def _parts(settings: SimulationSettings) -> SimulationSettings:
    """D's ranks divide the tokens; no deadline is near."""
    settings = replace(_kind(settings), windows=(), group_of=(), scales=(), indexed=(), opaque=False, kv_heads=1)
    decode = tuple(replace(shape, tp=2, dcp=2, pcp=1, interleave=1) for shape in settings.decode)
    return replace(settings.undivided(), decode=decode)


def _indexed_parts(settings: SimulationSettings) -> SimulationSettings:
    """Indexers beside latents that D's ranks divide."""
    return replace(_parts(_indexed(settings)), indexed=(0, 1, 2))


def _windows(settings: SimulationSettings) -> SimulationSettings:
    """Groups that share addresses: two windows, and layers that need all tokens; no deadline is near."""
    prefill = tuple(replace(shape, pp=1) for shape in settings.prefill)
    settings = replace(
        _kind(settings), prefill=prefill, tokens=max(settings.tokens, 24), windows=(), group_of=(), scales=()
    )
    return _roomy(settings).grouped((5, 0, 9), (0, 1, 2, 0, 2), (1, 1, 1))


def _roomy(settings: SimulationSettings) -> SimulationSettings:
    need = -(-settings.tokens // min(shape.block_size for shape in (*settings.prefill, *settings.decode))) + 1
    prefill, decode = (
        tuple(replace(shape, blocks=3 * need) for shape in side) for side in (settings.prefill, settings.decode)
    )
    return replace(settings, prefill=prefill, decode=decode)


def _windows_in_need(settings: SimulationSettings) -> SimulationSettings:
    """The same with few blocks on P, which are reused as soon as they are behind a window, and slow writes."""
    settings = replace(_windows(settings), chunk=16, burst=8, faults=Faults(write_slow=0.3))
    need = -(-settings.tokens // settings.prefill[0].block_size) + 1
    return replace(settings, prefill=tuple(replace(shape, blocks=4 * need + 1) for shape in settings.prefill))


def _states(settings: SimulationSettings) -> SimulationSettings:
    """States of two groups beside layers that need all tokens, and layers with a window; no deadline is near."""
    return _kept(settings, (STATES, 0, STATES, 5), (0, 1, 2, 0, 3))


def _states_alone(settings: SimulationSettings) -> SimulationSettings:
    """Nothing but states, and a token in each step."""
    return replace(_kept(settings, (STATES,), (0, 0)), chunk=1)


def _states_in_need(settings: SimulationSettings) -> SimulationSettings:
    """Few tokens in each step, few blocks on P, and slow writes."""
    settings = replace(_kept(settings, (STATES, 0), (0, 1, 0)), chunk=3, burst=8, faults=Faults(write_slow=0.3))
    need = -(-settings.tokens // settings.prefill[0].block_size) + 1
    return replace(settings, prefill=tuple(replace(shape, blocks=3 * need + 1) for shape in settings.prefill))


def _compressed(settings: SimulationSettings) -> SimulationSettings:
    """Layers with an entry for 3 tokens, or for 5, beside a window, in steps that end inside of one."""
    settings = replace(settings.undivided(), opaque=False, p_first=0.0, at_once=0.0)
    return replace(_kept(settings, (-3, 9, -5), (0, 1, 2)), chunk=4, burst=8)


def _kept(settings: SimulationSettings, windows: tuple[int, ...], group_of: tuple[int, ...]) -> SimulationSettings:
    prefill = tuple(replace(shape, pp=1) for shape in settings.prefill)
    settings = replace(
        _kind(settings), prefill=prefill, tokens=max(settings.tokens, 24), windows=(), group_of=(), scales=()
    )
    return _roomy(settings).grouped(windows, group_of, (1,) * len(windows))


class AnyToken(LoadBook):
    """D starts with any token that arrives."""

    def token(self, transfer: TransferId, first: First | None, code: str = "", why: str = "") -> None:
        load = self._by_transfer.get(transfer)
        if load is not None and load.wanted is not None and first is not None and first.token < load.wanted.vocabulary:
            load.answer = load.answer or msgspec.structs.replace(first, push=load.push or first.push)
        else:
            super().token(transfer, first, code, why)


class AnyPush(LoadBook):
    """D does not check the push of its KV."""

    def take(self, now: float, *unfit: Any) -> list[Start]:
        for load in self._loads.values():
            if isinstance(load.answer, First):
                load.answer = msgspec.structs.replace(load.answer, push=load.push)
        return super().take(now, *unfit)


class TokenTakenTwice(LoadBook):
    """A repeated token is output again."""

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self._gone: dict[TransferId, Start] = {}
        self._again: list[Start] = []

    def token(self, transfer: TransferId, first: First | None, code: str = "", why: str = "") -> None:
        if first is not None and (start := self._gone.get(transfer)) is not None:
            self._again.append(start)
        super().token(transfer, first, code, why)

    def take(self, now: float, *unfit: Any) -> list[Start]:
        ready, again = super().take(now, *unfit), self._again
        self._gone.update((start.first.transfer, start) for start in ready if start.first is not None)
        self._again = []
        return again + ready


class LoadsLater(LoadBook):
    """A request that loaded nothing when it was first scheduled loads after a preemption."""

    def loads_nothing(self, request_id: str) -> None:
        """Record nothing."""


class WaitsForEver(LoadBook):
    """D waits without a limit for a missing token."""

    def __init__(self, incarnation: str, *waits: float) -> None:
        super().__init__(incarnation, 1e9, 1e9)


class HeldForgotten(LoadBook):
    """vLLM does not learn that a held request was aborted."""

    _HELD = LoadBook.table[LoadState.HELD]
    table: ClassVar = {
        **LoadBook.table,
        LoadState.HELD: {**_HELD, LoadEvent.ENDED: replace(_HELD[LoadEvent.ENDED], into=LoadState.OVER)},
    }


class BegunWithoutToken(LoadBook):
    """D continues without P's token where it cannot compute the prompt's last token."""

    def take(self, now: float, *unfit: Any) -> list[Start]:
        return [replace(start, fails=False) for start in super().take(now, *unfit)]


class WholeGivenUp(LoadBook):
    """Outside vLLM's read of a step D gives up every token, also one that alone can begin."""

    def received(self, now: float, request_id: str, *, starts: bool = True) -> RemoteLoad | None:
        load = self.find(request_id)
        if load is not None and load.wanted is not None:
            load.wanted = replace(load.wanted, whole=load.wanted.whole and starts)
        return super().received(now, request_id, starts=starts)


class BegunIsLanded(SimulatedWriter):
    """A write counts as landed with its first bytes."""

    def __init__(self, deciding: Any, wire: Any, clock: Any) -> None:
        begun: Any = _BegunWire(wire)
        super().__init__(deciding, begun, clock)


@dataclass(frozen=True, slots=True)
class _BegunWire:
    wire: Any

    def submit(self, *write: Any) -> int:
        return int(self.wire.submit(*write))

    def poll(self, handle: int) -> WriteState:
        flight = self.wire._flights.get(handle)
        if flight is not None and flight.begun and flight.outcome is WriteState.PENDING:
            self.wire._flights.pop(handle)
            return WriteState.LANDED
        return WriteState(self.wire.poll(handle))


class RestartIsTheEnd(Receiver):
    """D takes a peer's next incarnation at the same address for the end of the one before."""

    def message(self, now: float, peer: Any, message: Message) -> list[Action]:
        for record in self._transfers.values():
            for writer in record.leased():
                if writer.peer == peer and writer.p_incarnation != message.p_incarnation:
                    writer.state = WriterState.QUIET
        return super().message(now, peer, message)


def _orphans(settings: SimulationSettings) -> SimulationSettings:
    """The ranks of a dead scheduler go on for a while, beside those of the next."""
    return replace(settings, faults=Faults(kill_prefill=0.1, orphans=1.0, write_slow=0.1, silent_death=1.0))


class CachedTooEarly(Steps):
    """P pushes at once what it found in its cache, also what the device still computes for the step before."""

    def _computed_before(self, plan: StepPlan) -> None:
        record, self._record = self._record, lambda: StreamEvent(reached=True)
        super()._computed_before(plan)
        self._record = record


def _ahead(settings: SimulationSettings) -> SimulationSettings:
    """Steps are planned ahead, and begin with what the step before computes."""
    return replace(_shared(settings), ahead=True, chunk=8, faults=Faults(late_event=0.5))


def _shared(settings: SimulationSettings) -> SimulationSettings:
    """Prompts begin alike, and share their first blocks."""
    prefill = tuple(replace(shape, blocks=4 * shape.blocks) for shape in settings.prefill)
    bare = replace(_kind(settings), windows=(), group_of=(), scales=(), p_first=0.0, at_once=0.0)
    return replace(bare, prefill=prefill, shared=0.8, burst=8)


def _spread(settings: SimulationSettings) -> SimulationSettings:
    """Writes take their time, and their first bytes come first."""
    return replace(_kind(settings), faults=Faults(write_slow=0.3, write_spread=1.0))


def _whole_unread(settings: SimulationSettings) -> SimulationSettings:
    """All loads are reported outside vLLM's read."""
    return replace(_whole(settings), faults=Faults(unread=1.0))


def _whole(settings: SimulationSettings) -> SimulationSettings:
    """Windows and first tokens, some of which are lost or late."""
    return replace(_windows(settings), p_first=0.0, at_once=0.0, first=True, first_faults=FirstFaults(0.1, 0.3))


def _first(settings: SimulationSettings) -> SimulationSettings:
    """First tokens are lost, late, doubled and mixed up, prefills are dispatched twice, and clients disconnect."""
    faults = Faults(leave=0.3, preempt=0.2, double_dispatch=0.3, kill_prefill=0.02, kill_metaserver=0.02, http=0.05)
    return replace(
        settings,
        windows=(),
        group_of=(),
        scales=(),
        p_first=0.0,
        at_once=0.0,
        first=True,
        first_faults=FirstFaults(0.1, 0.3, 0.2, 0.2, 0.1),
        faults=faults,
    )


WANTED = (
    Mutation("free before fence", receiver=FreeBeforeFence),
    Mutation("READY before bind", receiver=ReadyBeforeBind),
    Mutation("DONE counted twice", receiver=DoneCountedTwice),
    Mutation("no incarnation check", receiver=AnyIncarnationReceiver, sender=AnyIncarnationSender),
    Mutation("success in spite of one FAILED", receiver=SuccessInSpiteOfFailed),
    Mutation("lease not checked before a write", sender=LeaseNotChecked, world=_cut_off),
    Mutation("cancel not acknowledged", sender=CancelNotAcknowledged),
    Mutation("quarantine skipped", sender=QuarantineSkipped),
)
MORE = (
    Mutation("cancel answered at once", sender=CancelAnsweredAtOnce),
    Mutation("a failed write counts as landed", sender=LostForgiven, world=_slots_read_late),
    Mutation("quiet at once, slots used again", sender=QuarantineSkipped, world=_slots_read_late),
    Mutation("DONE from a lost source", sender=DoneFromLostSource, world=_preempted),
    Mutation("sealed push restarted", sender=SealedPushRestarted, book=SealedPushOrderedAgain),
    Mutation("hold runs while D is stopped", receiver=LandedWhileStopped, world=_stopped_and_killed),
    Mutation("answer believed right after a stop", receiver=AnswerBelievedAfterStop),
    Mutation("gone is quiet", receiver=GoneIsQuiet, world=_killed_after_a_stop),
    Mutation("time alone frees", receiver=TimeAloneFrees),
    Mutation("preempted blocks not drained", core=NotDrained),
    Mutation("preempted blocks given up at once", core=DrainedAtOnce, world=_preempted_patiently),
    Mutation("the forward waits for ever", core=DrainedForEver, world=_preempted_patiently),
    Mutation("reported before it is closed", core=ReportedBeforeClosed),
    Mutation("reported though no blocks are held", core=ReportedWithoutBlocks),
    Mutation("a rank's failure is not received", loads=EndsSwallowed),
    Mutation("every answer is good", loads=EveryAnswerGood),
    Mutation("no answer is good", loads=NoAnswerGood, world=_kind),
    Mutation("a token less is reserved", loads=ReservedTooLittle, world=_kind),
    Mutation("ranks plan what they know", core=PrivatePlans),
    Mutation("a stage of P is not waited for", receiver=StageNotAwaited, world=_stages),
    Mutation("tokens of another part of D", core=PartOfAnother, world=_parts, divided=True),
    Mutation("an indexer's keys divided as latents", core=KeysAsLatents, world=_indexed_parts, divided=True),
    Mutation("a stage of D is not served", core=FirstStageServed, world=_kind_stages),
    Mutation("blocks released before closed", hasty_release=True),
    Mutation("revocation keeps the session", blunt_revocation=True),
    Mutation("a failed revocation is not tried again", receiver=RevokedOnce, world=_revoked_in_vain),
    Mutation("a failed revocation has cut the peers off", receiver=RevokedAnyhow, world=_revoked_in_vain),
    Mutation("one batch, two sessions", core=SessionsMixed, world=_decode_comes_back),
    Mutation("absent ranks believed", core=AbsentBelieved, world=_scarce_slots),
    Mutation("sealed before the catch-up", core=SealsEarly),
    Mutation("slots reused at once", core=SlotsReused),
    Mutation("a rank stays away from a catch-up", core=StaysAway),
    Mutation("a write that was never issued has landed", core=UnissuedLanded, world=_broken_writers),
    Mutation("a dead writer's writes are over", core=DeadWriterForgotten, world=_broken_writers),
    Mutation("the device is not waited for", writer=EventsNotAwaited),
    Mutation("the event of another layer's cache", steps=EventOfAnotherLayer),
    Mutation("a draft layer pushed before it was written", steps=DraftsTooEarly, world=_drafting),
    Mutation("a draft layer pushed that was not computed", steps=DraftsWithoutHook, world=_drafting),
    Mutation("an indexer's keys pushed before they were written", steps=IndexersTooEarly, world=_indexed),
    Mutation("scales of another block", core=ScaleOfAnotherBlock, world=_quantised),
    Mutation("a window one block short", core=WindowTooShort, world=_windows),
    Mutation("an entry before its last token", core=EntryTooEarly, world=_compressed),
    Mutation("entries taken for tokens", core=EntriesTakenForTokens, world=_compressed),
    Mutation("a layer found by its address", core=FoundByAddress, world=_windows),
    Mutation("another group's blocks", core=WrongGroup, world=_windows),
    Mutation("the last token is loaded too", loads=LastTokenLoaded, world=_windows),
    Mutation("P computes the last token", prefill_requests=Uncut, world=_windows_in_need),
    Mutation("a state pushed before it was computed", steps=StateTooEarly, world=_states),
    Mutation("a state one token early", book=StateOfOneTokenLess, world=_states_alone),
    Mutation("an older state over a newer one", book=StateWithEveryStep, core=StateOfEveryStep, world=_states_in_need),
    Mutation("a state into another group's blocks", core=WrongGroup, world=_states),
    Mutation("P computes the last token of a state", prefill_requests=Uncut, world=_states),
    Mutation("any first token is taken", loads=AnyToken, world=_first),
    Mutation("another push's first token is taken", loads=AnyPush, world=_first),
    Mutation("a first token is taken twice", loads=TokenTakenTwice, world=_first),
    Mutation("a first token for a request that has one", loads=LoadsLater, world=_first),
    Mutation("a first token is waited for", loads=WaitsForEver, world=_first),
    Mutation("an aborted request stays held", loads=HeldForgotten, world=_first),
    Mutation("a whole prompt begins without its token", loads=BegunWithoutToken, world=_whole),
    Mutation("what the step before computes taken for cached", steps=CachedTooEarly, world=_ahead),
    Mutation("a block of another's step taken for cached", computing=HotTakenForCached, world=_shared),
    Mutation("a restart is the end of what was before", receiver=RestartIsTheEnd, world=_orphans),
    Mutation("a whole prompt's token is given up", loads=WholeGivenUp, world=_whole_unread),
    Mutation("a write that has begun has landed", writer=BegunIsLanded, world=_spread),
    Mutation("a wake-up is lost", writer=LooksTooEarly),
    Mutation("READY wakes no push", core=ReadyUnheeded),
    Mutation("hold freed early", meetings=HoldFreedEarly, world=_met_astray),
    Mutation("hold for ever", meetings=HoldForEver, world=_met_astray),
    Mutation("source bound twice", meetings=BoundTwice, world=_met_astray),
    Mutation("a block of this step taken for cached", computing=HotTakenForCached, world=_kind),
    Mutation("what another connector loads taken for cached", computing=LoadingTakenForCached, world=_kind),
    Mutation("a source's token reported with the next", meetings=TokenOfAnother, world=_met_first),
    Mutation("source of a dead incarnation taken", meetings=SourceOfTheDead, world=_met_after_restarts),
    Mutation("what was computed before is not pushed", book=AttachedWithoutItsPast, world=_kindly_met),
    Mutation("lost blocks are pushed", book=LostBlocksPushed, world=_met_astray),
    Mutation("an ended request is not known to have ended", book=EndedBeforeItsPush, world=_kindly_met),
)
ALL = {mutation.name: mutation for mutation in (*WANTED, *MORE)}
