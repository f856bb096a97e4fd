# SPDX-License-Identifier: Apache-2.0
"""P's worker driven as vllm-ascend drives it: the pushes are complete and right, direct and regrouped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from unit.kits.watching import running
from unit.regroup.common import EngineCache, RegroupDecodeSite, config
from unit.regroup.prefill import ComputedTokens, InProcessWorker, RegroupPrefillSite
from unit.regroup.runner import RUNS, AscendRank
from unit.regroup.worker import ChildProcesses
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.regroup.resources import allocate

MODES = {"direct": "never", "regrouped": "always"}


@pytest.fixture(scope="module")
def fleet() -> Iterator[ChildProcesses]:
    fleet = ChildProcesses(2)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hook", RUNS)
def test_pushes_are_complete_and_right_however_the_hooks_are_called(
    fleet: ChildProcesses, tmp_path: Path, hook: str, mode: str
) -> None:
    """K and V apart in `[block, token, head, dim]`, two chunked prompts, one of them with a prefix hit on D."""
    push = {"regroup": MODES[mode], "verify": "full"}
    d = RegroupDecodeSite(EngineCache(layers=3), folder=tmp_path, push=config(**push))
    p = fleet.engine(EngineCache(tp=2, layers=3), kind="ascend", **push)
    try:
        prompts = [d.reserve(45), d.reserve(70, first=16)]
        d.step()
        p.admit(*prompts)
        p.compute((prompts[0], 21), hook=hook)
        p.compute((prompts[0], 24), (prompts[1], 30), hook=hook)
        p.compute((prompts[1], 40), hook=hook)
        assert p.ended(*prompts)
        d.check(*prompts)
        p.finished(*prompts)
        collectives = [stats.get("collectives", 0) for stats in p.stats()]
        assert all(collectives) == any(collectives) == (mode == "regrouped")
    finally:
        fleet.shut(p)
        d.close()


@pytest.mark.parametrize("hook", ["by name", "with unregistered", "twice"])
def test_a_layer_is_pushed_when_its_hook_fires_and_not_at_the_end_of_the_step(hook: str) -> None:
    cache = EngineCache(tp=1, layers=3)
    rank = AscendRank(cache, Contributor(0, 0), allocate, push=config(regroup="never"))
    p, d = RegroupPrefillSite(cache, [InProcessWorker(rank)]), RegroupDecodeSite(cache)
    written: list[int] = []
    original = rank.write

    def noting(local_layer: int, shares: Sequence[ComputedTokens]) -> None:
        written.append(local_layer)
        original(local_layer, shares)

    rank.write = noting  # type: ignore[method-assign]
    with running(p, d):
        prompt = d.reserve(64)
        d.step()
        p.admit(prompt)
        computed: list[tuple[int, int]] = []
        unsubscribe = trace.subscribe(
            lambda stage, facts: computed.append((facts["layer"], written[-1])) if stage == "layer_computed" else None
        )
        p.compute((prompt, 64), hook=hook)
        unsubscribe()
        assert computed == [(0, 0), (1, 1), (2, 2)]
        assert p.ended(prompt)
        d.check(prompt)


@pytest.mark.parametrize("mode", MODES)
def test_dummy_runs_push_nothing(fleet: ChildProcesses, tmp_path: Path, mode: str) -> None:
    """Hooks with no metadata bound: before there are caches, before the first step, and between two steps."""
    push = {"regroup": MODES[mode]}
    d = RegroupDecodeSite(EngineCache(layers=3), folder=tmp_path, push=config(**push))
    p = fleet.engine(EngineCache(tp=2, layers=3), kind="ascend", **push)
    members = fleet.members[:2]
    try:
        prompt = d.reserve(64)
        d.step()
        p.admit(prompt)
        for count in (24, 40):
            for member in members:
                member.ask("dummy_run")
            p.compute((prompt, count), hook="by name")
        for member in members:
            member.ask("dummy_run")
        assert p.ended(prompt)
        d.check(prompt)
        p.finished(prompt)
    finally:
        fleet.shut(p)
        d.close()
