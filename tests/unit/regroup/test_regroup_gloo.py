# SPDX-License-Identifier: Apache-2.0
"""The regroup exchange among real processes over gloo: every ratio and layout, D's memory right to the last byte."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.support.process import freeze
from unit.kits.watching import until
from unit.regroup.common import EngineCache, RegroupDecodeSite, config
from unit.regroup.engines import WORK, ProcessEngines
from unit.regroup.prefill import ComputedTokens
from unit.regroup.worker import ChildProcesses

pytestmark = pytest.mark.timeout(240)

MAX_RANKS = 8
# heads of the model, ranks of P, ranks of D
RATIOS = [(4, 2, 1), (8, 4, 1), (8, 4, 2), (8, 8, 2), (6, 3, 2), (12, 6, 4), (2, 8, 1)]
# layout of P, layout of D, K and V in one tensor, dtype
FORMS = [
    ("token", "token", False, "bfloat16"),
    ("token", "token", True, "float16"),
    ("token", "head", False, "int8"),
    ("head", "token", True, "float8_e4m3fn"),
    ("head", "head", False, "float8_e5m2"),
    ("plane", "plane", True, "bfloat16"),
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[ChildProcesses]:
    fleet = ChildProcesses(MAX_RANKS)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]} to {form[1]}, {form[3]}")
@pytest.mark.parametrize("ratio", RATIOS, ids=lambda ratio: f"{ratio[1]} to {ratio[2]} with {ratio[0]} heads")
def test_every_ratio_and_layout(
    fleet: ChildProcesses, tmp_path: Path, ratio: tuple[int, int, int], form: tuple[str, str, bool, str]
) -> None:
    heads, p_tp, d_tp = ratio
    p_layout, d_layout, packed, dtype = form
    p = EngineCache(p_layout, p_tp, heads, 8 if p_layout != "head" else 16, packed, dtype)
    d = EngineCache(d_layout, d_tp, heads, 8 if d_layout != "head" else 16, packed, dtype)
    with ProcessEngines(fleet, p, d, folder=tmp_path) as pair:
        pair.check(pair.push(WORK))
        assert pair.exchanges() == [(step, layer, 1) for step in (1, 2, 3) for layer in (0, 1)]


MIXED = [
    (4, 2, (1, 2)),
    (8, 4, (2, 1)),
    (8, 8, (2, 4)),
    (12, 6, (4, 3)),
    (2, 8, (1, 2)),
    (6, 3, (2, 1, 2)),
]


@pytest.mark.parametrize("mixed", MIXED, ids=lambda m: f"{m[1]} to {' and '.join(map(str, m[2]))}")
def test_one_exchange_serves_decode_engines_of_different_tp(
    fleet: ChildProcesses, tmp_path: Path, mixed: tuple[int, int, tuple[int, ...]]
) -> None:
    heads, p_tp, d_tps = mixed
    ds = [EngineCache("token", tp, heads, block) for tp, block in zip(d_tps, (8, 16, 4), strict=False)]
    with ProcessEngines(fleet, EngineCache("token", p_tp, heads), *ds, folder=tmp_path, verify="full") as engines:
        work = [(site, first, tokens, chunks) for site in range(len(ds)) for _, first, tokens, chunks in WORK]
        engines.check(engines.push(work))
        assert engines.exchanges() == [(step, layer, 1) for step in (1, 2, 3) for layer in (0, 1)]


@pytest.mark.parametrize("ratio", RATIOS, ids=lambda ratio: f"{ratio[1]} to {ratio[2]} with {ratio[0]} heads")
def test_ranks_that_own_nothing_or_send_nothing_take_part(
    fleet: ChildProcesses, tmp_path: Path, ratio: tuple[int, int, int]
) -> None:
    """A prompt of one short block has one owner for each D rank: the others receive nothing, and it sends nothing."""
    heads, p_tp, d_tp = ratio
    with ProcessEngines(
        fleet, EngineCache("token", p_tp, heads), EngineCache("token", d_tp, heads), folder=tmp_path
    ) as pair:
        for tokens in (3, 8, 9):
            prompts = pair.push([(0, 0, tokens, [tokens])])
            pair.d[0].check(*pair.d[0].prompts)
            pair.p.finished(*prompts)
        assert {layer for _, layer, _ in pair.exchanges()} == {0, 1}


def test_nothing_is_called_where_nothing_crosses(fleet: ChildProcesses, tmp_path: Path) -> None:
    """Every rank writes from slots what it holds itself: P of TP 2 to D of TP 4."""
    with ProcessEngines(fleet, EngineCache(tp=2), EngineCache(tp=4), folder=tmp_path) as pair:
        pair.check(pair.push(WORK))
        assert pair.exchanges()
        assert all(worker.exchanges()[1] == 0 for worker in pair.p.workers)


def test_a_prefix_hit_much_longer_than_a_step_is_cut_into_sub_steps(fleet: ChildProcesses, tmp_path: Path) -> None:
    """Slots are sized for steps of 256 tokens; 900 are pushed at once."""
    with ProcessEngines(fleet, EngineCache(tp=4), EngineCache(tp=2), folder=tmp_path) as pair:
        pair.check(pair.push([(0, 0, 900, [900]), (0, 0, 30, [30])]))
        exchanges = pair.exchanges()
        assert len({part for _, _, part in exchanges}) > 2
        assert exchanges == [(1, layer, part) for layer in (0, 1) for part in range(1, 1 + len(exchanges) // 2)]


def test_the_order_of_exchanges_is_not_that_of_the_hooks(fleet: ChildProcesses, tmp_path: Path) -> None:
    with ProcessEngines(fleet, EngineCache(tp=4, layers=5), EngineCache(tp=1, layers=5), folder=tmp_path) as pair:
        pair.check(pair.push(WORK, "shuffled"))
        assert pair.exchanges() == [(step, layer, 1) for step in (1, 2, 3) for layer in range(5)]


@pytest.mark.parametrize("hook", ["no name", "none", "all but one"])
def test_what_no_hook_said_was_computed_is_exchanged_and_not_pushed(
    fleet: ChildProcesses, tmp_path: Path, hook: str
) -> None:
    """Other ranks wait for the exchange; its data is not used."""
    with ProcessEngines(
        fleet, EngineCache(tp=4, layers=3), EngineCache(tp=1, layers=3), folder=tmp_path, quiet_s=0.2
    ) as pair:
        prompt = pair.d[0].reserve(40)
        pair.d[0].step()
        pair.p.admit(prompt)
        pair.p.compute((prompt, 40), hook=hook)
        until(lambda: pair.d[0].ended(prompt), "D hears of it")
        (report,) = pair.d[0].reports[prompt.name]
        assert not report.ok and report.why.code == "PD-GEO-004", report
        pair.p.finished(prompt)
        pair.p.holds_nothing()
        until(lambda: all(stats["exchanges"] == 3 for stats in pair.p.stats()), "every rank comes to every exchange")
        assert pair.exchanges() == [(1, layer, 1) for layer in range(3)]


def test_stages_exchange_by_themselves(fleet: ChildProcesses, tmp_path: Path) -> None:
    with ProcessEngines(fleet, EngineCache(tp=2, pp=2, layers=5), EngineCache(tp=1, layers=5), folder=tmp_path) as pair:
        pair.check(pair.push(WORK))


@pytest.mark.parametrize("slots", [4, 1])
def test_exchanges_may_be_launched_from_the_hook(fleet: ChildProcesses, tmp_path: Path, slots: int) -> None:
    """As on an NPU: no thread, no waiting for slots, so layers without one are exchanged in a later step."""
    with ProcessEngines(
        fleet, EngineCache(tp=4), EngineCache(tp=2), folder=tmp_path, kind="inline", staging_slots=slots
    ) as pair:
        pair.check(pair.push(WORK))
        assert pair.exchanges() == [(step, layer, 1) for step in (1, 2, 3) for layer in (0, 1)]


def test_a_rank_that_was_stopped_for_a_while_holds_up_and_breaks_nothing(fleet: ChildProcesses, tmp_path: Path) -> None:
    with ProcessEngines(fleet, EngineCache(tp=4), EngineCache(tp=1), folder=tmp_path) as pair:
        stopped = fleet.members[2].pid
        d, p = pair.d[0], pair.p
        prompt = d.reserve(64)
        d.step()
        p.admit(prompt)
        freeze(stopped)
        waker = threading.Timer(1.0, os.kill, (stopped, signal.SIGCONT))
        waker.start()
        try:
            p.compute((prompt, 64))
            assert p.ended(prompt)
        finally:
            waker.join()
        pair.check([prompt])


def test_a_rank_that_dies_leaves_no_other_in_the_collective(tmp_path: Path) -> None:
    """The engine is lost; but the others fail their pushes at once, with a code, and go on answering."""
    fleet = ChildProcesses(3)
    timers: dict[str, Any] = {
        "lease_s": 5.0,
        "margin_s": 1.0,
        "quiet_s": 1.0,
    }  # time for which D holds the dead rank's blocks
    d = RegroupDecodeSite(EngineCache(heads=6), folder=tmp_path, push=config(**timers))
    p = fleet.engine(EngineCache(tp=3, heads=6), **timers)
    try:
        prompt = p.begun(d, 90, 40)
        victim = fleet.members[1]
        freeze(victim.pid)
        new = p.pool.take(7)
        p.book.scheduled(p.name_of(prompt), 40, 50, new, replaces=False)
        step, table = p.book.take_step(), [*prompt.p_blocks, *new]
        for index in (0, 2):
            fleet.members[index].ask(
                "step", step, [ComputedTokens(prompt.seed, prompt.tokens, table, 40, 90)], "name", []
            )
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: d.ended(prompt), "D hears of it")
        [report] = d.reports[prompt.name]
        assert not report.ok
        assert "PD-XFER-006" in (report.why.code, report.why.detail.split()[0]), report
        stats = [fleet.members[index].ask("stats") for index in (0, 2)]
        assert [facts["exchanges"] for facts in stats] == [4, 4], (
            "two layers of two steps, as well as they could be made"
        )
    finally:
        fleet.abandon()
        d.close()


@pytest.mark.ci
def test_a_rank_whose_collective_raises_leaves_no_other_in_it(tmp_path: Path) -> None:
    """No process dies, so no connection ends by itself: the rank must close its own, or the others wait for ten
    minutes."""
    fleet = ChildProcesses(3)
    d = RegroupDecodeSite(EngineCache(heads=6), folder=tmp_path, push=config(quiet_s=0.2))
    p = fleet.engine(EngineCache(tp=3, heads=6), quiet_s=0.2)
    try:
        fleet.members[1].ask("break_collective", 3)
        prompt = p.begun(d, 90, 40)
        p.compute((prompt, 50))
        assert not p.ended(prompt)
        until(lambda: [facts["exchanges"] for facts in p.stats()] == [4] * 3, "every rank is out", seconds=20)
        p.finished(prompt)
        p.holds_nothing()
    finally:
        fleet.abandon()
        d.close()
