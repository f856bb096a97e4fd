# SPDX-License-Identifier: Apache-2.0
"""Catch-up exchanges: an exchange that found no staging slot is repeated in a later step, from the paged cache."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

import pytest

from unit.kits.watching import Events, running, traced, until
from unit.regroup.common import EngineCache, RegroupDecodeSite, config
from unit.regroup.prefill import FailingTransport, RegroupPrefillSite, engine
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.regroup.core.staging import Staging, StagingSlot
from vllm_ascend_pd.regroup.exchange import ExchangeOutcome, ExchangeRows, GroupExchange
from vllm_ascend_pd.regroup.resources import RegroupResources

LAYERS = 6
SMALL = config(staging_slots=1, staging_destinations=1, verify="full")


def slotless(cache: EngineCache, **keys: object) -> tuple[RegroupPrefillSite, list[FailingTransport]]:
    """P with one slot for each rank; its writes complete when the test releases them."""
    wires = [FailingTransport() for _ in range(cache.tp * cache.pp)]
    return engine(cache, push=SMALL, transports=wires, **keys), wires  # type: ignore[arg-type]


def hold(wires: list[FailingTransport], *sites: RegroupDecodeSite) -> None:
    for wire in wires:
        wire.stalled = set().union(*(site.sessions for site in sites))


def missing(p: RegroupPrefillSite) -> int:
    return int(sum(stats["missing"] for stats in p.stats()))


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (4, 2), (2, 4)])
def test_what_was_missed_comes_later_and_is_right(p_tp: int, d_tp: int) -> None:
    cache = EngineCache(tp=p_tp, heads=8, layers=LAYERS)
    p, wires = slotless(cache)
    d = RegroupDecodeSite(EngineCache(tp=d_tp, heads=8, layers=LAYERS), push=config(verify="full"))
    with traced() as events, running(p, d):
        hold(wires, d)
        prompts = [d.reserve(60), d.reserve(90, first=8), d.reserve(33)]
        d.step()
        p.admit(*prompts)
        p.compute((prompts[0], 30), (prompts[1], 40))
        p.compute((prompts[0], 30), (prompts[1], 50), (prompts[2], 33))
        until(lambda: all(stats["exchanges"] == 2 * LAYERS for stats in p.stats()))
        assert missing(p) > LAYERS, "nothing was missed: the test shows nothing"
        hold(wires)
        assert p.ended(*prompts)
        d.check(*prompts)
        p.finished(*prompts)
        p.holds_nothing()
        assert repeated(p) == [p.catch_ups] + [0] * (p_tp - 1)
    repeats = [facts for stage, facts in events if stage == "exchanged" and facts["again"]]
    assert len(repeats) == p.catch_ups * p_tp, "an exchange is made again on all ranks or on none"


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (4, 2)])
def test_thirty_two_destinations_share_what_was_sized_for_four(p_tp: int, d_tp: int) -> None:
    """All want a slot in every layer at once; metrics show how many exchanges were repeated."""
    layers, tokens, wires = 3, 32, [FailingTransport() for _ in range(p_tp)]
    push = config(verify="full", staging_slots=1)
    p = engine(EngineCache(tp=p_tp, layers=layers), push=push, transports=wires, step_tokens=32 * tokens)
    sites = [RegroupDecodeSite(EngineCache(tp=d_tp, layers=layers), blocks=6, push=push) for _ in range(32)]
    with running(p, *sites):
        hold(wires, *sites)
        prompts = [d.reserve(tokens) for d in sites]
        for d in sites:
            d.step()
        p.admit(*prompts)
        p.compute(*((prompt, tokens) for prompt in prompts))
        until(lambda: all(stats["exchanges"] == layers for stats in p.stats()))
        assert [stats["slots_taken"] for stats in p.stats()] == [4] * p_tp
        missed = 16 * layers - 4  # on each rank: 16 of the D's get their heads from it, and it owns all of those
        assert [stats["missing"] for stats in p.stats()] == [missed] * p_tp
        hold(wires)
        assert p.ended(*prompts)
        for d, prompt in zip(sites, prompts, strict=True):
            d.check(prompt)
        p.finished(*prompts)
        p.holds_nothing()
        assert repeated(p) == [p.catch_ups] + [0] * (p_tp - 1)
        assert p.catch_ups >= missed / 4


def repeated(p: RegroupPrefillSite) -> list[int]:
    """Return how many repeated exchanges each worker reports."""
    taken = [rank.runtime.tally.take() or {"sums": {}} for rank in p.ranks]
    return [data["sums"].get("exchanges_repeated", 0) for data in taken]


def closed(events: Events) -> list[int]:
    """Bytes of the pairs that P has closed."""
    return [facts["bytes"] for stage, facts in list(events) if stage == "closed" and "d_rank" in facts]


def test_the_owners_are_those_of_the_first_time() -> None:
    """Each rank writes as many bytes as without a catch-up."""
    totals = []
    for slots in (1, LAYERS):
        push = config(staging_slots=slots, staging_destinations=1)
        wires = [FailingTransport(), FailingTransport()]
        p = engine(EngineCache(tp=2, layers=LAYERS), push=push, transports=wires)
        d = RegroupDecodeSite(EngineCache(layers=LAYERS))
        with traced() as events, running(p, d):
            hold(wires, d)
            prompt = p.begun(d, 51, 51)
            until(lambda p=p: all(stats["exchanges"] == LAYERS for stats in p.stats()))
            hold(wires)
            assert p.ended(prompt)
            assert bool(p.catch_ups) == (slots == 1)
            p.finished(prompt)
            # A push that closes releases its blocks before the trace event.
            until(lambda events=events: len(closed(events)) == 2)
        totals.append(sorted(closed(events)))
    assert totals[0] == totals[1]


class Short(Staging):
    """Staging without a slot while `short`."""

    short = True

    def take(self, destination: Hashable, nbytes: int) -> StagingSlot | None:
        return None if self.short else super().take(destination, nbytes)


def test_a_share_that_is_on_its_way_is_not_fetched_twice() -> None:
    """One rank asks for an exchange, and another one for the same a step later, before the first is done."""

    def replaced(rank: int, made: RegroupResources) -> RegroupResources:
        made.staging.__class__ = Short
        return made

    p = engine(EngineCache(tp=2, layers=LAYERS), push=config(staging_slots=3 * LAYERS), parts=replaced)
    d = RegroupDecodeSite(EngineCache(layers=LAYERS))
    with traced() as events, running(p, d):
        prompt = p.begun(d, 64, 64)
        until(lambda: missing(p) == 2 * LAYERS)
        for rank in p.ranks:
            rank.device.busy = True
            assert isinstance(rank.parts, RegroupResources)
            assert isinstance(rank.parts.staging, Short)
            rank.parts.staging.short = False
        for _ in range(3):
            p.book.missed([(1, layer, 1) for layer in range(LAYERS)])
            p.idle()
        until(lambda: all(stats["exchanges"] == 4 * LAYERS for stats in p.stats()))
        assert [stats["slots_taken"] for stats in p.stats()] == [LAYERS, LAYERS]
        for rank in p.ranks:
            rank.device.busy = False
        assert p.ended(prompt)
        d.check(prompt)
        p.finished(prompt)
        p.holds_nothing()
    pushed = [facts["bytes"] for stage, facts in events if stage == "layer_pushed"]
    assert sum(pushed) == LAYERS * 64 * 4 * 64, "a byte was written twice"


@pytest.mark.parametrize("when", ["before anything is exchanged again", "while it is exchanged again"])
def test_a_preemption_forgets_what_was_missed(when: str) -> None:
    p, _ = slotless(EngineCache(tp=2, layers=LAYERS))
    d = RegroupDecodeSite(EngineCache(layers=LAYERS), push=config(verify="full"))
    with running(p, d):
        prompt, other = d.reserve(64), d.reserve(64)
        p.admit(prompt, other)
        p.compute((prompt, 40), (other, 40))  # D's workers do not have them yet: their slots stay taken
        until(lambda: all(stats["exchanges"] == LAYERS for stats in p.stats()))
        assert missing(p) > 0
        if when.startswith("while"):
            p.book.missed([(1, layer, 1) for layer in range(LAYERS)])
        p.preempt(prompt)
        d.step()
        p.compute((other, 24))
        p.compute((prompt, 50))
        p.compute((prompt, 14))
        assert p.ended(prompt, other)
        d.check(prompt, other)
        p.finished(prompt, other)
        p.holds_nothing()


def test_a_preemption_while_some_ranks_still_miss_the_last_chunk_does_not_mix_two_divisions() -> None:
    """Rank 0 has said DONE; what rank 1 misses is lost, and a second run would be divided otherwise."""
    p, wires = slotless(EngineCache(tp=2, layers=LAYERS))
    d = RegroupDecodeSite(EngineCache(layers=LAYERS))
    with running(p, d):
        wires[1].stalled = d.sessions
        prompt = p.begun(d, 51, 51)
        until(lambda: p.stats()[1]["missing"] == LAYERS - 1)

        def rank_0_is_done() -> bool:
            p.idle()
            return not any(p.stats()[0][name] for name in ("missing", "slot_shares", "unsealed"))

        until(rank_0_is_done)
        assert p.stats()[1]["missing"] == LAYERS - 1
        wires[1].stalled = set()
        p.preempt(prompt)
        for _ in range(3):  # changes the owners
            p.idle()
        p.compute((prompt, 51))
        if p.ended(prompt):
            d.check(prompt)


class LateExchange(GroupExchange):
    """Exchange that gathers only when the test allows it, so that it lags behind the engine."""

    def run(self, rows: ExchangeRows, layer: int, slots: Sequence[StagingSlot | None]) -> ExchangeOutcome:
        assert MAY_GATHER.wait(20)
        return super().run(rows, layer, slots)


MAY_GATHER = threading.Event()


def test_an_exchange_of_before_a_preemption_is_dropped() -> None:
    """It gathers contents of the blocks' next owner."""

    def replaced(rank: int, made: RegroupResources) -> RegroupResources:
        made.exchange.__class__ = LateExchange
        return made

    MAY_GATHER.clear()
    p = engine(EngineCache(tp=2, layers=LAYERS), push=config(verify="full"), parts=replaced)
    d = RegroupDecodeSite(EngineCache(layers=LAYERS), push=config(verify="full"))
    with traced() as events, running(p, d):
        prompt = p.begun(d, 64, 40)
        until(lambda: [stage for stage, _ in events].count("ready") >= 2)
        p.preempt(prompt)
        MAY_GATHER.set()
        p.compute((prompt, 64))
        assert p.ended(prompt), "a checksum of the wrong bytes was counted"
        d.check(prompt)
        p.finished(prompt)
        p.holds_nothing()


@pytest.mark.parametrize("how", ["preempted", "aborted"])
def test_what_was_missed_is_forgotten_with_its_push_at_once(how: str) -> None:
    p, _ = slotless(EngineCache(tp=2, layers=LAYERS))
    d = RegroupDecodeSite(EngineCache(layers=LAYERS))
    with running(p, d):
        prompt = d.reserve(64)
        p.admit(prompt)
        p.compute((prompt, 40))
        until(lambda: all(stats["exchanges"] == LAYERS for stats in p.stats()))
        assert missing(p) > 0
        if how == "preempted":
            p.preempt(prompt)
        else:
            p.finish(prompt, aborted=True)
            p.idle()
        until(lambda: missing(p) == 0, seconds=10)
        if how == "aborted":
            p.let_go(prompt)
            for _ in range(5):
                p.idle()
            p.holds_nothing()
        assert p.catch_ups == 0, "what has ended was exchanged again"


def test_a_stage_makes_only_its_own_layers_again() -> None:
    """Two stages of 3 and 2 layers: an exchange is named by its layer in the whole engine."""
    p, wires = slotless(EngineCache(tp=2, pp=2, layers=5))
    d = RegroupDecodeSite(EngineCache(layers=5))
    with traced() as events, running(p, d):
        hold(wires, d)
        prompt = p.begun(d, 64, 64)
        until(lambda: [stats["exchanges"] for stats in p.stats()] == [3, 3, 2, 2])
        assert missing(p) > 0
        hold(wires)
        assert p.ended(prompt)
        d.check(prompt)
        p.finished(prompt)
        p.holds_nothing()
        counts = repeated(p)
        assert counts[0] + counts[2] == p.catch_ups and counts[1] == counts[3] == 0, "each stage tells of its own, once"
        assert counts[2], "nothing was made again there: the test shows nothing"
    repeats = [facts for stage, facts in events if stage == "exchanged" and facts["again"]]
    assert len(repeats) == p.catch_ups * 2, "a catch-up was made by more than the two ranks of its stage"


def test_the_scheduler_looks_again_soon_after_a_catch_up_and_then_rests() -> None:
    book = PushBook(model="a model")
    assert not book.must_step()
    book.missed([(1, 0, 1)])
    assert book.must_step()
    assert book.take_step().catch_ups == ((1, 0, 1),)
    looks = 0
    while book.must_step():
        assert book.take_step().empty
        looks += 1
        assert looks < 100
    assert looks > 1
