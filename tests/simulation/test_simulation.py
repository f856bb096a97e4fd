# SPDX-License-Identifier: Apache-2.0
"""The promises of docs/protocol.md hold in simulated clusters, and the simulator's results are reliable."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from simulation.run import Sum, main, run_seed, run_seeds
from simulation.settings import STATES, Faults, draw
from simulation.sums import summed

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "client left",
    "clock drifts",
    "connection flapped",
    "death that is not reported",
    "failed write read its slot's next bytes",
    "decode killed",
    "decode preempted",
    "decode stopped",
    "dispatched again after a death",
    "dispatched twice",
    "first token forged",
    "first token late",
    "first token lost",
    "first token mixed_up",
    "first token twice",
    "forged parameters",
    "http 4xx",
    "http 503",
    "http 5xx",
    "http answer lost",
    "http late",
    "http no connection",
    "http no metaserver",
    "http prefill refuses",
    "http prefill unreachable",
    "http prefill's answer lost",
    "http unknown ticket",
    "message across a restart",
    "message doubled",
    "message dropped",
    "message late",
    "metaserver killed",
    "part of an exchange went wrong",
    "prefill killed",
    "revocation failed, peers cut off",
    "revocation failed, peers still write",
    "prefill preempted",
    "prefill preempted in its last step",
    "prefill stopped",
    "side channel cut",
    "stopped for ten H or more",
    "write failed, lands later",
    "write failed, lands partly",
    "write failed, never lands",
    "write lands after its writer's death",
    "write slow",
    "write to a stopped decode",
    "writer stopped before its submission",
    "writer stopped inside a write",
    "writer died",
    "prefill ended over a dead writer",
    "write not issued",
    "http source lost",
    "source aborted",
    "source late",
    "source never",
    "source twice",
    "target late",
    "target never",
    "target twice",
    "layer computed late",
    "draft model did not run",
    "write landed over a time",
    "two steps in flight",
    "blocks shared by prefix",
    "ranks outlived their scheduler",
    "load reported outside vLLM's read",
}


CUT_OFF_WHILE_STOPPED = 3  # a seed
SEEDS = {"few": 200, "ci": 400, "all": 800}


@pytest.fixture(scope="module")
def seeds(request: pytest.FixtureRequest) -> int:
    return SEEDS[request.config.getoption("--seeds")]


@pytest.fixture(scope="module")
def twenty_thousand(seeds: int, progress: Callable[[str], None]) -> Sum:
    """Run consecutive seeds on two cores: twenty thousand transfers with all seeds."""
    total = run_seeds(1000, seeds, jobs=2, progress_s=1e9)
    progress(f"simulator: {total.seeds} of {SEEDS['all']} seeds, {total.transfers} transfers")
    return total


@pytest.mark.timeout(900)
def test_no_promise_is_broken_in_twenty_thousand_transfers(twenty_thousand: Sum, seeds: int) -> None:
    total = twenty_thousand
    assert not total.violations, f"scripts/simulate.sh --seed {total.violations[0].seed} --trace"
    assert total.seeds == seeds and total.transfers > 20_000 * seeds / SEEDS["all"]
    assert total.stats["transfers ok"] > total.transfers / 2


@pytest.mark.ci  # few seeds are too few
def test_every_kind_of_fault_is_injected(twenty_thousand: Sum, seeds: int) -> None:
    assert set(twenty_thousand.faults) == KINDS
    assert min(twenty_thousand.faults.values()) >= seeds / 80, "often enough to be found with others"


@pytest.mark.ci
def test_sources_and_targets_meet_and_miss_each_other(twenty_thousand: Sum, seeds: int) -> None:
    stats = twenty_thousand.stats
    assert min(stats["P first"], stats["at once"], stats["offers prefilled"]) > 1.25 * seeds
    assert stats["offers failed"] > 0.625 * seeds


@pytest.mark.ci
def test_exchanges_are_made_and_missed(twenty_thousand: Sum, seeds: int) -> None:
    assert twenty_thousand.stats["exchanges"] > 5 * seeds
    assert twenty_thousand.stats["catch-ups"] > 1.25 * seeds


@pytest.mark.ci
@pytest.mark.parametrize(
    "reason",
    [
        "D: PD-XFER-004 the lease of",
        "D: PD-XFER-001 open",
        "D: PD-XFER-004 access of",
        "P: PD-XFER-001 authority ran out",
        "P: PD-XFER-001 a submission outlived its authority",
        "P: PD-XFER-001 no READY within",
        "P: PD-XFER-001 deadline",
        "P: PD-XFER-001 no progress",
        "P: PD-XFER-005 bound",
        "P: PD-XFER-005 stale",
        "P: PD-XFER-006 prefill ranks",
    ],
)
def test_transfers_fail_in_every_way_there_is(twenty_thousand: Sum, reason: str) -> None:
    """Leases that expire at the worst moment, restarts, invalid parts of exchanges."""
    assert any(cause.startswith(reason) for cause in twenty_thousand.reasons), sorted(twenty_thousand.reasons)


@pytest.mark.parametrize("seed", [22, 27], ids=["direct", "exchanges"])
def test_a_seed_replays_exactly_whatever_the_hash_seed(seed: int) -> None:
    code = f"from simulation.run import run_seed; print(*run_seed({seed}, tracing=True).trace, sep='\\n')"
    traces = []
    for hashing in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hashing, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120
        )
        traces.append(done.stdout.splitlines())
    assert len(traces[0]) > 100
    assert traces[0] == traces[1]


def test_without_faults_every_transfer_ends_well() -> None:
    kind = [seed for seed in range(100) if not any(vars_of(seed))][:5]
    for seed in kind:
        result = run_seed(seed)
        assert not result.violation
        assert result.stats["transfers ok"] == result.transfers > 0
        assert result.stats["longest ms"] < 5000


def vars_of(seed: int) -> list[float]:
    faults = draw(seed).faults
    return [getattr(faults, name) for name in faults.__slots__]


def test_shapes_of_all_sorts_are_drawn() -> None:
    drawn = [draw(seed) for seed in range(300)]
    prefill = {(shape.tp, shape.pp) for settings in drawn for shape in settings.prefill}
    assert prefill >= {(tp, pp) for tp in (1, 2, 3, 4) for pp in (1, 2)}
    assert {shape.pp for settings in drawn for shape in settings.decode} == {1, 2, 3}
    assert {len(settings.prefill) for settings in drawn} == {len(settings.decode) for settings in drawn} == {1, 2, 3, 4}
    assert {settings.indexed for settings in drawn} == {(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)}
    assert {
        (STATES in settings.windows, 0 in settings.windows, max(settings.windows, default=0) > 0) for settings in drawn
    } >= {(True, False, False), (True, True, False), (True, False, True), (True, True, True)}
    assert {-n for settings in drawn for n in settings.windows if n < STATES} == {2, 3, 4, 5}
    assert {settings.quantised for settings in drawn} == {0, 1, 2, 4}
    assert {(settings.quantised > 0, settings.opaque, len(settings.windows) > 1) for settings in drawn} == set(
        itertools.product((True, False), repeat=3)
    )
    assert {settings.opaque for settings in drawn} == {settings.verify for settings in drawn} == {True, False}


def test_a_writer_that_is_stopped_and_cut_off_at_once_breaks_the_promise_that_the_docs_except() -> None:
    """The one known way to a wrong write: docs/protocol.md (How it is checked), docs/security.md, docs/operations.md.

    If this fails, a rule bears it now: draw it like every other fault, and take the exception out of those pages.
    """
    stopped = Faults(submit_stall=0.05, write_stop=0.05)
    drawn = draw(CUT_OFF_WHILE_STOPPED).undivided()
    world = replace(drawn, faults=replace(stopped, cut_stopped=1.0), p_first=0.0, at_once=0.0)
    result = run_seed(CUT_OFF_WHILE_STOPPED, settings=world)
    assert result.violation.startswith("Violation: promise 1: a write of transfer")
    assert not run_seed(CUT_OFF_WHILE_STOPPED, settings=replace(world, faults=stopped)).violation


def test_a_violation_ends_the_command_with_its_seed_and_trace() -> None:
    command = [str(ROOT / "scripts" / "simulate.sh"), "--seeds", "60", "--mutation", "READY before bind"]
    env = {**os.environ, "PD_PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "promise" in done.stdout
    assert "--seed" in done.stdout
    assert "VIOLATION" in done.stdout


def test_runs_are_summed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "8", "--from", "2000"]) == 0
    out = capsys.readouterr().out
    one, faults = summed([out])
    two, twice = summed([out, out, out[: out.index("violations: ")], "cut off"])
    assert one["transfers"] > 100 and one["seeds"] == 8 and one["ended well"] > 50 and faults["clock drifts"] > 50
    assert two == Counter({what: 2 * count for what, count in one.items()})
    assert twice == Counter({what: 2 * count for what, count in faults.items()})


@pytest.mark.ci
@pytest.mark.parametrize("faults", [False, True], ids=["all well", "faults"])
def test_two_prefill_ranks_push_to_thirty_two_decode_ranks(faults: bool) -> None:
    """A D with 32 data-parallel ranks, each an engine of its own, with staging sized for four destinations."""
    total = Sum()
    for seed in range(5000, 5008):
        drawn = draw(seed).undivided()
        p = replace(drawn.prefill[0], tp=2, pp=1, blocks=400)
        d = replace(drawn.decode[0], tp=1, pp=1, block_size=p.block_size)
        wide = replace(drawn, prefill=(p,), decode=(d,) * 32, kv_heads=4, opaque=False, requests=96, burst=32, slots=1)
        wide = replace(wide, regroup=replace(drawn.regroup, regroup="always"))
        result = run_seed(seed, settings=wide if faults else wide.without_faults())
        assert not result.violation, f"seed {seed}: {result.violation}"
        total.transfers += result.transfers
        total.stats += result.stats
    assert total.transfers > 600
    assert total.stats["catch-ups"] > 500
    assert faults or total.stats["transfers ok"] == total.transfers


@pytest.mark.ci
@pytest.mark.parametrize("faults", [False, True], ids=["all well", "faults"])
def test_groups_of_unequal_block_sizes_share_one_pool(faults: bool) -> None:
    """As in DeepSeek-V4 and beyond: two windows, entries for 4 and for 7 tokens, states, over pages of one size."""
    total = Sum()
    for seed in range(8000, 8012):
        drawn = replace(draw(seed).undivided(), opaque=False, windows=(), group_of=(), scales=(), indexed=(0, 3))
        prefill, decode = (
            tuple(replace(shape, pp=1, drafts=False, block_size=2, blocks=120) for shape in side)
            for side in (drawn.prefill, drawn.decode)
        )
        drawn = replace(drawn, prefill=prefill, decode=decode, tokens=24, p_first=0.0, at_once=0.0)
        settings = drawn.grouped((5, 0, -4, 9, STATES, -7), (0, 1, 3, 2, 4, 5), (1, 4, 2, 3, 5, 1))
        assert len({group.covers for group in settings.tables(settings.prefill[0])}) == 6
        result = run_seed(seed, settings=settings if faults else settings.without_faults())
        assert not result.violation, f"seed {seed}: {result.violation}"
        total.transfers += result.transfers
        total.stats += result.stats
    assert total.transfers > 300
    assert faults or total.stats["transfers ok"] == total.transfers


@pytest.mark.parametrize(
    "faults", [pytest.param(False, id="all well", marks=pytest.mark.ci), pytest.param(True, id="faults")]
)
def test_prompts_of_a_million_tokens_are_pushed_in_chunks(faults: bool) -> None:
    """The longest prompt that vllm-ascend's configurations allow."""
    total = Sum()
    for seed in range(7000, 7012):
        settings = draw(seed).lengthened(1 << 20, 65536)
        result = run_seed(seed, settings=settings if faults else settings.without_faults())
        assert not result.violation, f"seed {seed}: {result.violation}"
        total.transfers += result.transfers
        total.stats += result.stats
    assert total.transfers > 40 and total.stats["writes landed"] > 500
    assert faults or total.stats["transfers ok"] == total.transfers
