# SPDX-License-Identifier: Apache-2.0
"""P's workers without a rule: steps, exchanges, batches and the writer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from simulation.exchange import StreamEvent
from simulation.mutations import worlds
from simulation.mutations.mutation import Mutation
from simulation.prefill import SimulatedWriter
from vllm_ascend_pd.geometry.coalesce import Ints, Spans
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, Served, StepPlanner
from vllm_ascend_pd.geometry.runs import Grid
from vllm_ascend_pd.metadata import PrefillStep, PushSlice, PushStart
from vllm_ascend_pd.prefill.worker.core.batches import Batch
from vllm_ascend_pd.prefill.worker.core.claiming import PushClaims
from vllm_ascend_pd.prefill.worker.core.closing import PushClosings
from vllm_ascend_pd.prefill.worker.core.exchanges import Staged
from vllm_ascend_pd.prefill.worker.core.offering import PushOffers, Sums
from vllm_ascend_pd.prefill.worker.core.orders import OrderBook
from vllm_ascend_pd.prefill.worker.core.planning import PushPlans, StepPlan
from vllm_ascend_pd.prefill.worker.core.push import Push, Unit
from vllm_ascend_pd.prefill.worker.core.pushes import Pushes
from vllm_ascend_pd.prefill.worker.core.register import Writable
from vllm_ascend_pd.prefill.worker.steps import Steps
from vllm_ascend_pd.prefill.worker.writer import Computed
from vllm_ascend_pd.protocol.messages import Message
from vllm_ascend_pd.protocol.pair import Claim
from vllm_ascend_pd.transport.base import WriteState


class OneStageForAll(OrderBook):
    """P pushes only to the workers of D's first stage."""

    def _destinations(self, d: CacheGeometry) -> tuple[int, ...]:
        return tuple(worker for worker in super()._destinations(d) if worker < d.tp_size)


class FirstStageServed(PushPlans):
    orders_type = OneStageForAll


class SlotsReused(PushOffers):
    """P reuses a staging slot as soon as its bytes were offered."""

    def staged(self, now: float, item: Staged, absent: Any, sums: Any) -> None:
        super().staged(now, item, absent, sums)
        for slot in item.slots:
            if slot is not None and slot.users and self._register.staging is not None:
                self._register.staging.release(slot)


class SlotsNotCounted(Pushes):
    """P does not count the shares of a slot, which was released when its bytes were offered."""

    def drop(self, push: Push, worker: int, unit: Unit) -> None:
        push.slot_shares.pop((worker, unit), None)


class StaysAway(PushPlans):
    """A rank that missed nothing takes no part in the repetition of an exchange."""

    def _due(self, units: Sequence[Unit]) -> Sequence[Unit]:
        exchanges = self._register.exchanges
        waiting = exchanges.missed.waiting.values() if exchanges is not None else ()
        missing = {share.unit(layer) for shares in waiting for share, layer in shares}
        return [unit for unit in units if unit in missing]


class NotDrained(Pushes):
    """P overwrites preempted blocks without waiting for their readers, and without a report."""

    def preempt(self, now: float, names: Iterable[str]) -> None:
        for push in self.named(names):
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


class ReportedBeforeClosed(PushClosings):
    """P's workers report a request as soon as it ends, although its blocks are still read."""

    def take_finished(self, ended: Iterable[str]) -> set[str]:
        return {request for request in ended if self.reported_to.pop(request, None) is not None}


class ReportedWithoutBlocks(PushClosings):
    """P's workers report requests that hold no blocks."""

    def _stop_reporting(self, push: Push) -> None:
        """Withdraw nothing."""


class ReadyUnheeded(Pushes):
    """P does not wake its writer at D's READY."""

    def message(self, now: float, peer: Any, message: Message) -> None:
        super().message(now, peer, message)
        self.effects = [effect for effect in self.effects if not isinstance(effect, Writable)]


class PrivatePlans(PushPlans):
    """A P rank plans a step without the pushes that have failed on this rank."""

    def _takes_part(self, push: Push) -> bool:
        return super()._takes_part(push) and not push.closed


class SessionsMixed(PushClaims):
    """P writes for the old and the new session of an address in one batch."""

    def _session(self, push: Push, claim: Claim) -> str | None:
        return None


class AbsentBelieved(PushOffers):
    """P writes the results of an exchange without checking their sender."""

    def staged(self, now: float, item: Staged, absent: Any, sums: Sequence[Sums]) -> None:
        super().staged(now, item, [[] for _ in item.slots], sums)


class SealsEarly(PushOffers):
    """P seals a push although exchanges still have parts of it."""

    def _owes(self, push: Push) -> bool:
        return False


class UnissuedLanded(PushClaims):
    """P continues after a write of which nothing was sent, as if it had landed."""

    def finished(self, now: float, batch: Batch, state: WriteState) -> None:
        super().finished(now, batch, WriteState.LANDED if state is WriteState.UNISSUED else state)


class DeadWriterForgotten(PushClaims):
    """Pending writes of a dead writer count as over at once."""

    def finished(self, now: float, batch: Batch, state: WriteState) -> None:
        super().finished(now, batch, WriteState.UNISSUED if self._register.dead else state)


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
        by_hook = super()._by_hook()
        hooks, moved = sorted(by_hook), dict[str, list[int]]()
        before = dict(zip(hooks[1:], hooks, strict=False))
        for hook, complete in by_hook.items():
            for index in complete:
                is_hook = self._names[index] == hook
                moved.setdefault(hook if is_hook else before.get(hook, hook), []).append(index)
        return moved


class WindowTooShort(PushPlans):
    """P pushes a block less of each window."""

    def _leaving(self, push: Push, pairing: int, push_slice: PushSlice) -> tuple[int, int]:
        lo, hi = super()._leaving(push, pairing, push_slice)
        group = push.pairings[pairing].d.group
        return (min(hi, max(lo, push.firsts[pairing] + group.block_size)) if group.partial else lo), hi


class EntryTooEarly(PushPlans):
    """P pushes an entry of several tokens with the first of them."""

    def _leaving(self, push: Push, pairing: int, push_slice: PushSlice) -> tuple[int, int]:
        lo, hi = super()._leaving(push, pairing, push_slice)
        d, end = push.pairings[pairing].d, push.reservation.end
        if d.group.per_entry == 1 or hi == lo:
            return lo, hi
        return lo, min(end // d.group.per_entry, max(hi, -(-push_slice.after // d.group.per_entry)))


class EntriesTakenForTokens(PushPlans):
    """P counts the blocks of compressed layers by tokens."""

    def _start(self, now: float, start: PushStart) -> None:
        super()._start(now, start)
        push = self._register.records[start.push]
        push.firsts = tuple(
            min(push.reservation.first, pair.d.wanted_entries(0, push.reservation.end)[1])
            if pair.d.group.per_entry > 1
            else first
            for pair, first in zip(push.pairings, push.firsts, strict=True)
        )


class _PartOfAnother(StepPlanner):
    def _chunks(self, lo: Ints, hi: Ints, jobs: Sequence[Job], target: Served) -> tuple[Ints, Grid]:
        world = jobs[0].d.ranks.world
        return super()._chunks(lo, hi, jobs, msgspec.structs.replace(target, d_part=(target.d_part + 1) % world))


class PartOfAnother(PushPlans):
    """P confuses D's ranks: it takes each for the one that holds the tokens after its own."""

    planner_type = _PartOfAnother


class KeysAsLatents(PushPlans):
    """P takes an indexer's keys to be divided among D's ranks as the latents are."""

    def _start(self, now: float, start: PushStart) -> None:
        super()._start(now, start)
        push, d = self._register.records[start.push], start.reservation.geometry
        push.pairings = tuple(
            msgspec.structs.replace(
                pairing,
                d=msgspec.structs.replace(
                    pairing.d, dcp=d.dcp, interleave=d.interleave, block_size=pairing.d.covers // d.dcp
                ),
            )
            for pairing in push.pairings
        )


class FoundByAddress(PushPlans):
    """P takes all layers at one address for the first of them."""

    def _start(self, now: float, start: PushStart) -> None:
        super()._start(now, start)
        push, first = self._register.records[start.push], dict[tuple[int, ...], int]()
        at = [first.setdefault(bases, layer) for layer, bases in enumerate(cast("Pushes", self._register).claims.bases)]
        push.pairing_of = tuple(push.pairing_of[layer] for layer in at)


class WrongGroup(PushPlans):
    """P writes every layer into the blocks of D's first group."""

    def _start(self, now: float, start: PushStart) -> None:
        super()._start(now, start)
        push = self._register.records[start.push]
        push.d_blocks = tuple(push.d_blocks[0] for _ in push.d_blocks)


class ScaleOfAnotherBlock(PushPlans):
    """P reads the scales of the previous block."""

    def _plan(self, now: float, number: int, slices: Iterable[PushSlice]) -> StepPlan:
        planned = super()._plan(now, number, slices)
        for push in planned.direct:
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


class CachedTooEarly(Steps):
    """P pushes at once what it found in its cache, also what the device still computes for the step before."""

    def _computed_before(self, plan: StepPlan) -> None:
        record, self._record = self._record, lambda: StreamEvent(reached=True)
        super()._computed_before(plan)
        self._record = record


MUTATIONS = (
    Mutation("preempted blocks not drained", core=NotDrained),
    Mutation("preempted blocks given up at once", core=DrainedAtOnce, world=worlds.preempted_patiently),
    Mutation("the forward waits for ever", core=DrainedForEver, world=worlds.preempted_patiently),
    Mutation("reported before it is closed", closings=ReportedBeforeClosed),
    Mutation("reported though no blocks are held", closings=ReportedWithoutBlocks),
    Mutation("ranks plan what they know", plans=PrivatePlans),
    Mutation("tokens of another part of D", plans=PartOfAnother, world=worlds.parts, divided=True),
    Mutation("an indexer's keys divided as latents", plans=KeysAsLatents, world=worlds.indexed_parts, divided=True),
    Mutation("a stage of D is not served", plans=FirstStageServed, world=worlds.kind_stages),
    Mutation("one batch, two sessions", claims=SessionsMixed, world=worlds.decode_comes_back),
    Mutation("absent ranks believed", offers=AbsentBelieved, world=worlds.scarce_slots),
    Mutation("sealed before the catch-up", offers=SealsEarly),
    Mutation("slots reused at once", core=SlotsNotCounted, offers=SlotsReused),
    Mutation("a rank stays away from a catch-up", plans=StaysAway),
    Mutation("a write that was never issued has landed", claims=UnissuedLanded, world=worlds.broken_writers),
    Mutation("a dead writer's writes are over", claims=DeadWriterForgotten, world=worlds.broken_writers),
    Mutation("the device is not waited for", writer=EventsNotAwaited),
    Mutation("the event of another layer's cache", steps=EventOfAnotherLayer),
    Mutation("a draft layer pushed before it was written", steps=DraftsTooEarly, world=worlds.drafting),
    Mutation("a draft layer pushed that was not computed", steps=DraftsWithoutHook, world=worlds.drafting),
    Mutation("an indexer's keys pushed before they were written", steps=IndexersTooEarly, world=worlds.indexed),
    Mutation("scales of another block", plans=ScaleOfAnotherBlock, world=worlds.quantised),
    Mutation("a window one block short", plans=WindowTooShort, world=worlds.windows),
    Mutation("an entry before its last token", plans=EntryTooEarly, world=worlds.compressed),
    Mutation("entries taken for tokens", plans=EntriesTakenForTokens, world=worlds.compressed),
    Mutation("a layer found by its address", plans=FoundByAddress, world=worlds.windows),
    Mutation("another group's blocks", plans=WrongGroup, world=worlds.windows),
    Mutation("a state pushed before it was computed", steps=StateTooEarly, world=worlds.states),
    Mutation("a state into another group's blocks", plans=WrongGroup, world=worlds.states),
    Mutation("what the step before computes taken for cached", steps=CachedTooEarly, world=worlds.ahead),
    Mutation("a write that has begun has landed", writer=BegunIsLanded, world=worlds.spread),
    Mutation("a wake-up is lost", writer=LooksTooEarly),
    Mutation("READY wakes no push", core=ReadyUnheeded),
)
