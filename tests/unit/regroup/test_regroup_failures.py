# SPDX-License-Identifier: Apache-2.0
"""Failures around an exchange, and what they must not do to others. Ranks in one process, gloo among them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from unit.kits.watching import running, traced, until
from unit.regroup.common import EngineCache, RegroupDecodeSite, RegroupPrompt, config
from unit.regroup.prefill import ComputedTokens, FailingTransport, RegroupPrefillSite, engine
from vllm_ascend_pd.prefill.worker import runtime as prefill_runtime
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.regroup.core.staging import Staging, StagingSlot
from vllm_ascend_pd.regroup.exchange import TAG_BYTES, ExchangeRows, GroupExchange
from vllm_ascend_pd.regroup.resources import RegroupResources

SMALL = {"staging_slots": 1}


def reports(prompt: RegroupPrompt) -> list[tuple[bool, str]]:
    return [(report.ok, report.why.code) for report in prompt.site.reports[prompt.name]]


def reasons(prompt: RegroupPrompt) -> list[tuple[str, str]]:
    return [(report.why.code, report.why.detail) for report in prompt.site.reports[prompt.name]]


def started(p: RegroupPrefillSite, *prompts: RegroupPrompt) -> None:
    for site in {id(prompt.site): prompt.site for prompt in prompts}.values():
        site.step()
    p.admit(*prompts)


def exchanged(p: RegroupPrefillSite) -> list[int]:
    return [int(stats["exchanges"]) for stats in p.stats()]


# ---- a rank whose destination failed or was cancelled takes part all the same


def test_a_cancelled_transfer_does_not_keep_its_ranks_out_of_the_exchange() -> None:
    p, one, two = (
        engine(EngineCache(tp=4, heads=8)),
        RegroupDecodeSite(EngineCache(heads=8)),
        RegroupDecodeSite(EngineCache(tp=2, heads=8)),
    )
    with running(p, one, two):
        gone, stays, other = one.reserve(90), one.reserve(90), two.reserve(90)
        started(p, gone, stays, other)
        p.compute((gone, 40), (stays, 40), (other, 40))
        one.cancel(gone)
        until(lambda: one.ended(gone), "the cancelled transfer is fenced")
        p.compute((gone, 50), (stays, 50), (other, 50))
        assert p.ended(stays, other)
        assert not any(ok for ok, _ in reports(gone))
        one.check(stays)
        two.check(other)
        until(lambda: exchanged(p) == [4] * 4, "two layers of two steps on every rank")
        p.finished(gone, stays, other)
        p.holds_nothing()


def test_a_push_that_failed_on_one_rank_alone_does_not_keep_it_out() -> None:
    """Rank 1 cannot write to one of two D's."""
    wires = [FailingTransport(), FailingTransport()]
    p, one, two = (
        engine(EngineCache(tp=2), push=config(quiet_s=0.2), transports=wires),
        RegroupDecodeSite(EngineCache()),
        RegroupDecodeSite(EngineCache()),
    )
    with running(p, one, two):
        wires[1].broken = one.sessions
        lost, other = one.reserve(64), two.reserve(64)
        started(p, lost, other)
        p.compute((lost, 32), (other, 32))
        until(lambda: one.ended(lost), "D hears of the failure")
        p.compute((lost, 32), (other, 32))
        assert p.ended(other)
        assert reports(lost) == [(False, "PD-XFER-003")]
        two.check(other)
        p.finished(lost, other)
        until(lambda: exchanged(p) == [4, 4])
        p.holds_nothing()


def test_a_rank_plans_what_it_has_given_up_like_the_others() -> None:
    """Rank 1 has closed a push that is still open on rank 0 when the next step begins."""
    p, one, two = (
        engine(EngineCache(tp=2), timeout_s=5.0),
        RegroupDecodeSite(EngineCache()),
        RegroupDecodeSite(EngineCache()),
    )
    with running(p, one, two):
        lost, other = one.reserve(64), two.reserve(64)
        p.admit(lost)  # D's workers do not have it, so rank 0 gets no message
        started(p, other)
        p.compute((lost, 32), (other, 32))
        runtime = p.ranks[1].runtime
        with runtime.deciding() as pushes:
            (push,) = [push.name for push in list(pushes.records.values()) if push.reservation == lost.reservation]
            pushes.abort(time.monotonic(), push, Failure("PD-XFER-002", "injected"))
        p.compute((lost, 32), (other, 32))
        assert p.ended(other)
        two.check(other)


def test_an_aborted_request_is_exchanged_by_no_rank_alone() -> None:
    p, d = engine(EngineCache(tp=2)), RegroupDecodeSite(EngineCache())
    with running(p, d):
        gone, stays = d.reserve(64), d.reserve(64)
        started(p, gone, stays)
        p.compute((gone, 32), (stays, 32))
        p.finish(gone, aborted=True)
        p.compute((stays, 32))
        assert p.ended(stays)
        assert not p.ended(gone)
        d.check(stays)
        p.finished(stays)
        p.let_go(gone)
        p.holds_nothing()


# ---- an exception in one rank's part never leaves the others in the collective


class Faulty(GroupExchange):
    """Exchange that fails in one of its parts, in chosen runs (counted from 0)."""

    part = ""
    numbers: frozenset[int] = frozenset()
    error: type[Exception] = RuntimeError
    _count = 0
    _now = False

    @classmethod
    def instead_of(cls, made: GroupExchange, part: str, numbers: Sequence[int], error: type[Exception]) -> Faulty:
        made.__class__ = cls
        assert isinstance(made, cls)
        made.part, made.numbers, made.error = part, frozenset(numbers), error
        return made

    def run(self, rows: ExchangeRows, layer: int, slots: Sequence[StagingSlot | None]) -> Any:
        self._now = self._count in self.numbers
        self._count += 1
        if self._now and self.part == "assemble":
            slots = [object() if slot is not None else None for slot in slots]  # type: ignore[misc]
        return super().run(rows, layer, slots)

    def _gather(self, rows: ExchangeRows, caches: Sequence[torch.Tensor], number: int) -> None:
        if self._now and self.part == "before":
            raise self.error("injected")
        super()._gather(rows, caches, number)
        if self._now and self.part == "after":
            for begin, end in zip(rows.sent_tags, [*rows.sent_tags[1:], sum(rows.send_splits)], strict=True):
                self._send[begin + TAG_BYTES : end] = 0  # the tags are in the buffer, and must not be trusted
            raise self.error("injected")

    def _all_to_all(self, rows: ExchangeRows) -> None:
        if self._now and self.part == "collective":
            raise self.error("injected")
        super()._all_to_all(rows)


class FullStaging(Staging):
    def take(self, destination: Any, nbytes: int) -> StagingSlot | None:
        raise MemoryError("injected")


class PatientStaging(Staging):
    """Staging that waits long for a slot: this rank misses nothing, however loaded the machine is."""

    def wait_left(self, now: float, destination: Any) -> float:
        return 0.0 if self.room(destination) else 30.0


def faulty(rank: int, part: str, numbers: Sequence[int], error: type[Exception] = RuntimeError) -> Any:
    def replaced(each: int, made: RegroupResources) -> RegroupResources:
        if each == rank:
            Faulty.instead_of(made.exchange, part, numbers, error)
        return made

    return replaced


@pytest.mark.parametrize(
    ("part", "error"), [("before", RuntimeError), ("before", MemoryError), ("after", KeyError), ("assemble", TypeError)]
)
def test_an_error_in_one_ranks_part_fails_what_it_touches_and_nothing_else(part: str, error: type[Exception]) -> None:
    """Rank 1 of 4 fails in the second layer of the first step. Later steps succeed."""
    p = engine(EngineCache(tp=4, heads=8), parts=faulty(1, part, [1], error))
    d = RegroupDecodeSite(EngineCache(tp=2, heads=8))
    with running(p, d):
        first, second = d.reserve(64), d.reserve(64)
        started(p, first)
        p.compute((first, 64))
        assert not p.ended(first)
        assert any(code == "PD-XFER-006" for _, code in reports(first)) or "PD-XFER-006" in str(d.reports)
        started(p, second)
        p.compute((second, 64))
        assert p.ended(second)
        d.check(second)
        until(lambda: exchanged(p) == [4] * 4)
        p.finished(first, second)
        p.holds_nothing()


def test_an_error_where_nothing_crosses_fails_the_push_as_well() -> None:
    """P of TP 2 to D of TP 4: no tag carries the error, only the rank itself knows it."""
    p, d = engine(EngineCache(tp=2), parts=faulty(1, "assemble", [0])), RegroupDecodeSite(EngineCache(tp=4))
    with running(p, d):
        prompt = p.begun(d, 64, 64)
        assert not p.ended(prompt)
        assert (False, "PD-XFER-006") in reports(prompt)


def test_a_group_in_another_order_gives_no_rank_the_bytes_of_another() -> None:
    """Each of two ranks has the other's place in the process group, so each gets its own bytes for the other's."""
    exchanges: list[GroupExchange] = []

    def crossed(rank: int, made: RegroupResources) -> RegroupResources:
        exchanges.append(made.exchange)
        if rank == 1:
            one, other = exchanges
            one._group, other._group = other._group, one._group
        return made

    p, d = engine(EngineCache(tp=2), parts=crossed), RegroupDecodeSite(EngineCache())
    with running(p, d):
        prompt = p.begun(d, 64, 64)
        assert not p.ended(prompt)
        assert any("did not give their part" in detail for _, detail in reasons(prompt))
        p.finished(prompt)
        p.holds_nothing()


def test_a_collective_that_raises_on_one_rank_keeps_no_other_in_it() -> None:
    """Rank 1 of 4 cannot call the second one. The others are inside, and their group would wait for minutes."""
    parts = faulty(1, "collective", [1])
    p = engine(EngineCache(tp=4, heads=8), push=config(regroup="auto", quiet_s=0.2), parts=parts, timeout_s=600.0)
    d, direct = RegroupDecodeSite(EngineCache(tp=2, heads=8)), RegroupDecodeSite(EngineCache(tp=4, heads=8))
    with running(p, d, direct):
        first, later, other = d.reserve(64), d.reserve(64), direct.reserve(64)
        started(p, first)
        p.compute((first, 64))
        assert not p.ended(first)
        until(lambda: exchanged(p) == [2] * 4, "every rank is out of it", seconds=20)
        p.finished(first)
        assert any("PD-XFER-006" in (code, detail.split()[0]) for code, detail in reasons(first))
        started(p, later, other)
        p.compute((later, 64), (other, 64))
        assert not p.ended(later), "exchanges are over for good"
        assert p.ended(other), "what needs no exchange goes on"
        direct.check(other)
        p.finished(later, other)
        p.holds_nothing()


def test_staging_that_breaks_on_one_rank_leaves_no_other_waiting() -> None:
    def replaced(rank: int, made: RegroupResources) -> RegroupResources:
        if rank == 0:
            made.staging.__class__ = FullStaging
        return made

    p, d = engine(EngineCache(tp=2), parts=replaced), RegroupDecodeSite(EngineCache())
    with running(p, d):
        prompt = p.begun(d, 64, 64)
        assert not p.ended(prompt)
        until(lambda: exchanged(p) == [2, 2])
        p.finished(prompt)
        p.holds_nothing()


@pytest.mark.parametrize("part", ["before", "after"])
def test_a_source_that_is_done_with_a_push_still_cannot_spoil_it(part: str) -> None:
    """Rank 1 has no slot for most layers and gets them later. By then rank 0 has closed the push, and its gather
    fails: only the owner can still fail the transfer, and it must not deliver the old contents of the buffer."""
    wires = [FailingTransport(), FailingTransport()]
    layers = 4
    spoiled = faulty(0, part, range(layers, 99))

    def parts(rank: int, made: RegroupResources) -> RegroupResources:
        if rank == 0:
            made.staging.__class__ = PatientStaging
        return spoiled(rank, made)  # type: ignore[no-any-return]

    p = engine(EngineCache(tp=2, layers=layers), push=config(**SMALL), transports=wires, parts=parts)
    d = RegroupDecodeSite(EngineCache(layers=layers))
    with running(p, d):
        wires[1].stalled = d.sessions
        prompt = p.begun(d, 64, 64)
        until(lambda: p.ranks[0].stats()["exchanges"] == layers)
        until(lambda: p.stats()[0]["slot_shares"] == 0 and p.stats()[0]["unsealed"] == 0, "rank 0 is done")
        assert p.stats()[1]["missing"] > 0, "nothing was missed: the test shows nothing"
        p.finish(prompt)
        until(lambda: p.ranks[0].runtime.take_finished([]) or p.idle(), "rank 0 lets its blocks go")
        wires[1].stalled = set()
        assert not p.ended(prompt), "D was given what had not been sent"
        assert reports(prompt) == [(False, "PD-XFER-006")]


# ---- a stalled destination stops no other


@pytest.mark.parametrize("stall", ["never ready", "writes do not return"])
def test_a_stalled_destination_stops_no_other(stall: str) -> None:
    wires = [FailingTransport(), FailingTransport()]
    layers = 6
    cache = EngineCache(tp=2, layers=layers)
    push = config(staging_slots=2, staging_destinations=2)
    p, one, two = (
        engine(cache, push=push, transports=wires),
        *(RegroupDecodeSite(EngineCache(layers=layers)) for _ in "12"),
    )
    with running(p, one, two):
        stuck = one.reserve(64)
        if stall == "never ready":
            p.admit(stuck)  # D's workers never get it
        else:
            for wire in wires:
                wire.stalled = one.sessions
            started(p, stuck)
        p.compute((stuck, 32))
        others = [two.reserve(64) for _ in range(6)]
        started(p, *others)
        for index, other in enumerate(others):
            p.compute((other, 64), *[(stuck, 32)] * (index == 3))
        assert p.ended(*others)
        two.check(*others)
        assert not one.ended(stuck)
        assert all(stats["slots_taken"] <= 4 for stats in p.stats())
        p.finished(*others)
        for wire in wires:
            wire.stalled = set()
        one.step()
        assert p.ended(stuck), "it was slow, not lost"
        one.check(stuck)
        p.finished(stuck)
        p.holds_nothing()


def test_a_destination_that_stalls_for_good_gives_its_slots_back() -> None:
    push = config(ready_timeout_s=4.0, **SMALL)
    p, one, two = (
        engine(EngineCache(tp=2), push=push),
        RegroupDecodeSite(EngineCache()),
        RegroupDecodeSite(EngineCache()),
    )
    with running(p, one, two):
        stuck, other = one.reserve(64), two.reserve(64)
        p.admit(stuck)
        started(p, other)
        p.compute((stuck, 64), (other, 64))
        assert p.ended(other)
        two.check(other)
        p.finish(stuck)
        p.finished(other)
        p.let_go(stuck)
        p.holds_nothing()


def test_what_one_destination_missed_does_not_wait_for_another() -> None:
    """Two D's share an exchange and both find no slot. One has room again, the other is stalled for good."""
    wires = [FailingTransport(), FailingTransport()]
    layers = 4
    push = config(staging_slots=1, staging_destinations=2)
    p = engine(EngineCache(tp=2, layers=layers), push=push, transports=wires)
    one, two = RegroupDecodeSite(EngineCache(layers=layers)), RegroupDecodeSite(EngineCache(layers=layers))
    with running(p, one, two):
        for wire in wires:
            wire.stalled = one.sessions | two.sessions
        stuck, other = one.reserve(64), two.reserve(64)
        started(p, stuck, other)
        p.compute((stuck, 64), (other, 64))
        until(lambda: exchanged(p) == [layers] * 2)
        assert all(stats["missing"] for stats in p.stats())
        for wire in wires:
            wire.stalled = one.sessions
        assert p.ended(other)
        two.check(other)


# ---- the threads


def test_close_makes_what_is_due_first() -> None:
    p, d = engine(EngineCache(tp=2, layers=8)), RegroupDecodeSite(EngineCache(layers=8))
    with running(d):
        p.begun(d, 64, 64)
        closers = [threading.Thread(target=rank.close, name="closer") for rank in p.ranks]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(20)
        assert exchanged(p) == [8, 8]
    assert not any(closer.is_alive() for closer in closers)


def test_close_does_not_wait_for_ever_inside_a_collective(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 does not come. Rank 0's worker still ends, and its thread as soon as gloo times out."""
    p, d = engine(EngineCache(tp=2), timeout_s=4.0), RegroupDecodeSite(EngineCache())
    with running(p, d):
        prompt = d.reserve(64)
        started(p, prompt)
        table = p.pool.take(8)
        p.book.scheduled(p.name_of(prompt), 0, 64, table, replaces=True)
        p.ranks[0].run(p.book.take_step(), [ComputedTokens(prompt.seed, 64, table, 0, 64)], "name", [])
        with monkeypatch.context() as patch:
            patch.setattr(prefill_runtime, "CLOSE_GRACE_S", 0.3)
            p.ranks[0].close()
        assert "is still inside a collective" in caplog.text
        until(lambda: not any(thread.name == "pd-regroup-0" for thread in threading.enumerate()), seconds=20)


def test_events_tell_what_was_exchanged_and_staged() -> None:
    p, d = engine(EngineCache(tp=2)), RegroupDecodeSite(EngineCache())
    with traced() as events, running(p, d):
        prompt = p.begun(d, 64, 64)
        assert p.ended(prompt)
    transfer = str(prompt.transfer)
    made = [facts for stage, facts in events if stage == "exchanged"]
    assert sorted((f["step"], f["layer"], f["sub_step"]) for f in made) == [(1, 0, 1), (1, 0, 1), (1, 1, 1), (1, 1, 1)]
    assert all(facts["bytes"] > 0 and facts["waited"] >= 0 and facts["ok"] and not facts["again"] for facts in made)
    staged = [facts for stage, facts in events if stage == "staged"]
    assert [facts["transfers"] for facts in staged] == [[transfer]] * 4
    assert sum(facts["bytes"] for facts in staged) == 64 * 4 * 64 * 2
    assert all(facts["slots"] == 1 for facts in staged)
