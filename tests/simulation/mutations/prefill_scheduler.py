# SPDX-License-Identifier: Apache-2.0
"""P's scheduler without a rule: orders to its workers, held sources, what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simulation.mutations import worlds
from simulation.mutations.mutation import Mutation, with_methods_of
from vllm_ascend_pd.metadata import PrefillStep, PushSlice
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.in_flight import BlocksInFlight
from vllm_ascend_pd.prefill.scheduler.core.request import PushRequest, PushTarget, RequestEnding
from vllm_ascend_pd.prefill.worker.core.planning import PushPlans
from vllm_ascend_pd.prefill.worker.core.push import Push
from vllm_ascend_pd.protocol.meeting import Bound, Offer

PUSH_TABLE = PushBook.table


class Uncut(PushBook):
    """P computes the last token of a prompt, although D needs the state before it."""

    def cuts(self, request_id: str) -> bool:
        return False


class StateOfOneTokenLess(PushBook):
    """P's scheduler pushes the state before the last token that D counts as computed."""

    def scheduled(
        self, request_id: str, computed: int, count: int, *blocks: Sequence[int], replaces: bool, ready: int = 0
    ) -> PushSlice | None:
        record = self.find(request_id)
        target = record.target if record is not None else None
        less = target is not None and computed + count == target.reservation.end - 1
        return super().scheduled(request_id, computed, count + less, *blocks, replaces=replaces, ready=ready)


class StateOfEveryStep(PushPlans):
    """P pushes the state after every chunk, so that an older one may land after a newer."""

    def _leaving(self, push: Push, pairing: int, push_slice: PushSlice) -> tuple[int, int]:
        lo, hi = super()._leaving(push, pairing, push_slice)
        if push.pairings[pairing].d.group.stateful and push_slice.after > push.reservation.first:
            table = push.tables[push.pairings[pairing].p.group_index]
            if len(table.known_ids):  # with cached tokens there is none
                table.ids[0], table.known = table.known_ids[-1], 1  # the newest reported one
                return 0, 1
        return lo, hi


class StateWithEveryStep(PushBook):
    """P's scheduler reports the place of the state with every step."""

    def scheduled(
        self, request_id: str, computed: int, count: int, *blocks: Sequence[int], replaces: bool, ready: int = 0
    ) -> PushSlice | None:
        push_slice = super().scheduled(request_id, computed, count, *blocks, replaces=replaces, ready=ready)
        if push_slice is None or self.geometry is None:
            return push_slice
        at = [(push_slice.after - 1) // group.block_size for group in self.geometry.tables]
        new_blocks = [
            np.asarray(ids[i : i + 1], dtype=np.int32) if group.stateful else new
            for group, ids, i, new in zip(self.geometry.tables, blocks, at, push_slice.new_blocks, strict=True)
        ]
        self._orders.slices[-1] = replace(push_slice, new_blocks=tuple(new_blocks))
        return push_slice


class HoldFreedEarly(PushBook):
    """P frees the blocks of a source when its request ends, and continues to offer them."""

    def hold(self, record: PushRequest, now: float, *cause: Any) -> None:
        super().hold(record, now, *cause)
        self.release(record)


HoldFreedEarly.table = with_methods_of(HoldFreedEarly, PUSH_TABLE)


class HoldForEver(PushBook):
    """P never frees the blocks of a source that no D loads."""

    def release(self, record: PushRequest) -> None:
        return None


HoldForEver.table = with_methods_of(HoldForEver, PUSH_TABLE)


class BoundTwice(PushBook):
    """A source goes to every target that asks for it."""

    def __init__(self, *facts: Any, **more: Any) -> None:
        super().__init__(*facts, **more)
        self._gone: dict[Any, str] = {}

    def bind_held(self, record: PushRequest, now: float, target: PushTarget) -> None:
        self._gone[record.source] = record.push
        super().bind_held(record, now, target)

    def offer(self, now: float, peer: Any, offer: Offer, reservation: Any) -> None:
        if offer.source in self._gone and offer.transfer not in self._answers:
            self._outbox.append((peer, Bound(offer.transfer, self._gone[offer.source], ended=True)))
        else:
            super().offer(now, peer, offer, reservation)

    def taken(self, record: PushRequest, now: float, target: PushTarget) -> None:
        self._outbox.append((target.peer, Bound(target.transfer, record.push, ended=False)))


BoundTwice.table = with_methods_of(BoundTwice, PUSH_TABLE)


class SourceOfTheDead(PushBook):
    """P takes a source of an earlier incarnation for its own, with any prompt."""

    def refusal_of(self, reservation: Any, prompt: Any) -> None:
        return None

    def _meant(self, source: Any, meets: str) -> PushRequest | None:
        if source is None or source.incarnation == self._incarnation:
            return super()._meant(source, meets)
        return next((record for record in self._sources.values() if record.target is None), None)


class HotBlocksTaken(BlocksInFlight):
    """P pushes everything that vLLM calls cached, also what this very step computes."""

    def ready(self, chunk: Any, table: Any, groups: Any) -> int:
        return int(chunk.filled)


class HotTakenForCached(PushBook):
    in_flight = HotBlocksTaken


class LoadingTakenForCached(PushBook):
    """P pushes everything that vLLM calls computed, also what another connector loads in this step."""

    def step(self, chunks: Any, tables: Any) -> None:
        super().step([replace(chunk, cached=None) for chunk in chunks], tables)


class TokenOfAnother(PushBook):
    """P reports a source's sample with the source that ends next."""

    _last: Any = None

    def finished(self, *facts: Any, sampled: Any = lambda: None, **more: Any) -> RequestEnding:
        def shifted() -> Any:
            sample = sampled()
            previous, self._last = self._last or sample, sample
            return previous

        return super().finished(*facts, sampled=shifted, **more)


class AttachedWithoutItsPast(PushBook):
    """P does not push what was computed before the push had a target."""

    def push_past(self, record: PushRequest) -> None:
        super().push_past(record)
        self._orders.computed = [replace(push_slice, before=push_slice.after) for push_slice in self._orders.computed]


AttachedWithoutItsPast.table = with_methods_of(AttachedWithoutItsPast, PUSH_TABLE)


class LostBlocksPushed(PushBook):
    """P pushes a step's blocks although they were lost before the step."""

    def preempted(self, request_id: str) -> None:
        computed, starts = list(self._orders.computed), list(self._orders.starts)
        super().preempted(request_id)
        self._orders.computed, self._orders.starts = computed, starts


class EndedBeforeItsPush(PushBook):
    """P's workers do not learn that a request had ended before its push began."""

    def take_step(self) -> PrefillStep:
        step = super().take_step()
        return replace(step, starts=tuple(replace(start, ended=False) for start in step.starts))


MUTATIONS = (
    Mutation("blocks released before closed", hasty_release=True),
    Mutation("P computes the last token", book=Uncut, world=worlds.windows_in_need),
    Mutation("a state one token early", book=StateOfOneTokenLess, world=worlds.states_alone),
    Mutation(
        "an older state over a newer one", book=StateWithEveryStep, plans=StateOfEveryStep, world=worlds.states_in_need
    ),
    Mutation("P computes the last token of a state", book=Uncut, world=worlds.states),
    Mutation("a block of another's step taken for cached", book=HotTakenForCached, world=worlds.shared),
    Mutation("hold freed early", book=HoldFreedEarly, world=worlds.met_astray),
    Mutation("hold for ever", book=HoldForEver, world=worlds.met_astray),
    Mutation("source bound twice", book=BoundTwice, world=worlds.met_astray),
    Mutation("a block of this step taken for cached", book=HotTakenForCached, world=worlds.kind),
    Mutation("what another connector loads taken for cached", book=LoadingTakenForCached, world=worlds.kind),
    Mutation("a source's token reported with the next", book=TokenOfAnother, world=worlds.met_first),
    Mutation("source of a dead incarnation taken", book=SourceOfTheDead, world=worlds.met_after_restarts),
    Mutation("what was computed before is not pushed", book=AttachedWithoutItsPast, world=worlds.kindly_met),
    Mutation("lost blocks are pushed", book=LostBlocksPushed, world=worlds.met_astray),
    Mutation("an ended request is not known to have ended", book=EndedBeforeItsPush, world=worlds.kindly_met),
)
