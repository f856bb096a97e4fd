# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan --load`: requests go where the router sends them, and take what two lines say."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.bench_load_parts import loads
from vllm_ascend_pd.cli.__main__ import main
from vllm_ascend_pd.cli.load import arrivals
from vllm_ascend_pd.cli.load.arrivals import Arrival, Limits
from vllm_ascend_pd.cli.load.command import compare, overlapping
from vllm_ascend_pd.cli.load.engine import EngineSizes, SimulatedEngine, VirtualTime
from vllm_ascend_pd.cli.load.lines import StepLine, StepLines, measured
from vllm_ascend_pd.cli.load.world import LoadedFleet, LoadedWorld, Loss, SimulatedRequest
from vllm_ascend_pd.router.core.decisions import Role

LINES = StepLines(StepLine(0.01, 0.001), StepLine(0.02, 0.005))
SIZES = EngineSizes(step_tokens=2048, at_once=64, cache_tokens=100_000, chunk=32)
TRACE = '{"timestamp": 2000, "input_length": 100, "output_length": 3, "hash_ids": [4, 5]}\n'


def simulated(
    p: int, d: int, load: list[Arrival], loss: Loss | None = None, pair_s: float = 0.0, routers: int = 1,
    sticky: bool = False, **sizes: Any,
) -> Any:  # fmt: skip
    made = EngineSizes(**{name: sizes.get(name, getattr(SIZES, name)) for name in SIZES.__slots__})
    world = LoadedWorld(LoadedFleet(p, d, LINES, made, pair_s, routers, sticky), load, loss)
    world.run()
    return world.requests


def drawn(count: int, rate: float, prompt: int, answer: int, prefix: int = 0) -> list[Arrival]:
    dice = random.Random(7)
    at = loads.poisson((dice.expovariate(1.0) for _ in range(count)), rate)
    return loads.alike(at, prompt, answer, prefix, 32)


def times(requests: list[SimulatedRequest]) -> list[tuple[float, float]]:
    return [(one.first, one.last) for one in requests]


# -- traces


def test_a_trace_is_read_as_it_was_written_from_its_first_request_on() -> None:
    late = TRACE.replace("2000", "3500")
    load = arrivals.read(late + "\n" + TRACE)
    assert load == [Arrival(0.0, 100, 3, (4, 5)), Arrival(1.5, 100, 3, (4, 5))]
    assert arrivals.read(loads.written(load)) == load


@pytest.mark.parametrize(
    ("text", "word"),
    [("", "no requests"), (TRACE + "{", "line 2"), (TRACE.replace("100", "0"), ">= 1"), ("[1]", "line 1")],
)
def test_what_is_no_trace_is_refused_with_its_line(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        arrivals.read(text)


def test_lengths_and_speed_of_a_trace_can_be_others_and_its_common_beginnings_stay() -> None:
    load = [Arrival(0.0, 1024, 10, (1, 2)), Arrival(4.0, 1500, 20, (1, 2, 3)), Arrival(5.0, 1024, 1)]
    scaled = loads.scaled(load, 0.25, 2.0)
    assert [(one.at, one.prompt, one.answer) for one in scaled] == [(0.0, 256, 2), (2.0, 375, 5), (2.5, 256, 1)]
    assert scaled[0].chunks == (1, 2) and scaled[1].chunks == (1, 2, 3)
    assert len(scaled[2].chunks) == 2 and not {*scaled[2].chunks} & {1, 2, 3}


def test_new_tokens_are_those_of_no_earlier_beginning() -> None:
    load = [
        Arrival(0, 70, 1, (1, 2, 3)),
        Arrival(1, 70, 1, (1, 2, 4)),
        Arrival(2, 64, 1, (9, 2)),
        Arrival(3, 64, 1, (1, 2)),
    ]
    assert loads.new_tokens(load, 32) == 70 + 6 + 64 + 0


def test_arrivals_come_at_their_rate_and_have_their_share_in_common() -> None:
    load = drawn(400, 5.0, 512, 8, prefix=460)
    assert 60 < load[-1].at < 100
    assert {one.chunks[:14] for one in load} == {tuple(range(14))} and {len(one.chunks) for one in load} == {16}
    assert loads.new_tokens(load, 32) == 448 + 400 * 64


# -- lines


def test_a_line_goes_through_points_and_where_they_say_no_slope_it_is_flat_or_from_zero() -> None:
    line = StepLine.through([(1.0, 3.0), (3.0, 7.0)], flat=True)
    assert (line.base, line.slope) == (pytest.approx(1.0), pytest.approx(2.0))
    assert StepLine.through([(500.0, 1.0), (500.0, 2.0)], flat=False) == StepLine(0.0, 0.003)
    assert StepLine.through([(2.0, 0.5), (9.0, 0.1)], flat=True).slope == 0.0


def page(prefills: tuple[int, float], gaps: tuple[int, float], steps: dict[float, int], tokens: int) -> str:
    """Return a page on which so many steps have up to a bucket's tokens, and `tokens` together."""
    labels = 'engine="0",model_name="m"'
    said = {
        "request_prefill_time_seconds_count": prefills[0],
        "request_prefill_time_seconds_sum": prefills[1],
        "inter_token_latency_seconds_count": gaps[0],
        "inter_token_latency_seconds_sum": gaps[1],
        "iteration_tokens_total_count": sum(steps.values()),
        "iteration_tokens_total_sum": tokens,
    }
    lines = [f"vllm:{name}{{{labels}}} {value}" for name, value in said.items()]
    count = 0
    for bound in (1.0, 8.0, 256.0, 512.0, math.inf):
        count += steps.get(bound, 0)
        le = "+Inf" if math.isinf(bound) else bound
        lines.append(f'vllm:iteration_tokens_total_bucket{{engine="0",le="{le}",model_name="m"}} {count}')
    return "\n".join(["# HELP x", *lines, ""])


def test_lines_are_read_from_what_engines_counted_between_two_looks() -> None:
    p = [page((10, 5.0), (0, 0.0), {256.0: 10}, 1000), page((20, 20.0), (0, 0.0), {256.0: 10, 512.0: 10}, 4000)]
    d = [page((4, 0.1), (300, 6.0), {8.0: 100}, 300), page((9, 0.2), (800, 26.0), {8.0: 200}, 800)]
    assert measured([*p, *d]) == ([(100.0, 0.5), (300.0, 1.5)], [(3.0, 0.02), (5.0, 0.04)])


def test_a_step_with_many_prompts_counts_for_each_of_them() -> None:
    """Two steps of 100 tokens and one of 400: of six requests with 100 tokens each, four were in the longest."""
    (point,), _ = measured([page((6, 18.0), (0, 0.0), {256.0: 2, 512.0: 1}, 600)])
    assert point[0] == pytest.approx(600 * (2 * 132**2 + 384**2) / (2 * 132 + 384) ** 2)
    assert 250 < point[0] < 300 and point[1] == 3.0  # and not 200, the mean of the steps


# -- the simulation


def test_a_request_alone_takes_what_the_lines_say() -> None:
    (one,) = simulated(1, 1, [Arrival(3.0, 500, 11, tuple(range(16)))], pair_s=0.03)
    assert one.first == pytest.approx(0.51 + 0.03) and one.last == pytest.approx(one.first + 10 * 0.025)


def test_answers_at_once_share_a_step_and_prompts_wait_for_each_other() -> None:
    load = [Arrival(0.0, 2048, 21, tuple(range(n * 64, n * 64 + 64))) for n in range(2)]
    first, second = simulated(1, 1, load)
    assert first.first == pytest.approx(2.058) and second.first == pytest.approx(2 * 2.058)
    assert first.last == pytest.approx(2.058 + 20 * 0.025)
    requests = simulated(1, 1, [Arrival(0.0, 32, 101, (n,)) for n in range(3)])
    assert [one.first for one in requests] == [
        pytest.approx(0.042),
        *[pytest.approx(0.042 + 3 * 0.025)] * 2,
    ]  # at 0.116 D is in a step
    assert [one.last - one.first for one in requests[1:]] == [pytest.approx(100 * 0.035, abs=0.05)] * 2


def test_d_sees_a_request_and_its_first_token_between_two_steps() -> None:
    """D's steps end at 1.017, 1.042 and 1.067: behind the first it asks P, which has computed at 1.059."""
    _, late = simulated(1, 1, [Arrival(0.0, 32, 101, (1,)), Arrival(1.0, 32, 11, (2,))])
    assert late.first == pytest.approx(0.067)


def test_a_prompt_goes_to_the_p_that_had_its_beginning_and_is_not_computed_again() -> None:
    chunks = tuple(range(64))
    first, other, repeat = simulated(
        2, 1, [Arrival(0.0, 2048, 2, chunks), Arrival(4.0, 640, 2, (*range(900, 920),)), Arrival(9.0, 2048, 2, chunks)]
    )
    assert repeat.first == pytest.approx(0.011) and first.first > 2.0 and other.first == pytest.approx(0.65)


def test_an_engine_without_room_lets_requests_wait_in_their_order() -> None:
    load = [Arrival(0.1 * n, 100, 50, (4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3)) for n in range(4)]
    requests = simulated(1, 1, load, cache_tokens=200)
    ends = [one.arrival.at + one.last for one in requests]
    begins = [one.arrival.at + one.first for one in requests]
    assert all(begin > end for begin, end in zip(begins[1:], ends, strict=False))


def test_the_ratio_that_fits_a_load_is_found() -> None:
    limits = Limits(2.0, 0.05)

    def best(load: list[Arrival]) -> int:
        compared = [compare(LoadedFleet(p, 4 - p, LINES, SIZES, 0.0), load, limits, 20.0) for p in (1, 3)]
        return max(compared, key=lambda one: one.goodput).prefills

    assert best(drawn(200, 4.0, 512, 4)) == 3
    assert best(drawn(200, 4.0, 32, 120)) == 1


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(("p", "d"), [(2, 2), (1, 2)])
def test_an_engine_is_lost_and_every_answer_comes_whole(role: Role, p: int, d: int) -> None:
    """Streams go on with another D; what a P had is computed by another one, or by D where there is none."""
    load = drawn(200, 2.0, 320, 30)
    whole, less = simulated(p, d, load), simulated(p, d, load, Loss(role, load[-1].at / 2, 20.0))
    assert not any(one.failed for one in less) and all(one.came == 30 for one in less)
    before = sum(one.arrival.at + one.last < load[-1].at / 2 for one in whole)
    assert times(less)[: before // 2] == times(whole)[: before // 2] and times(less) != times(whole)


def test_a_metaserver_knows_the_beginnings_that_it_sent_itself() -> None:
    """Eight chats of four turns over four P's: with four metaservers a turn often goes to a P without those before."""
    load = [
        Arrival(
            0.1 + 40.0 * turn + 4.0 * chat, 1024 + 128 * turn, 2, tuple(range(chat * 99, chat * 99 + 32 + 4 * turn))
        )
        for turn in range(4)
        for chat in range(8)
    ]

    def computed(**more: Any) -> list[SimulatedRequest]:
        return [one for one in simulated(4, 1, load, **more) if one.first > 0.5]

    assert len(computed()) == len(computed(routers=4, sticky=True)) == 8, "the first turns"
    assert 12 < len(computed(routers=4)) < 32


def test_every_metaserver_loses_what_was_under_way_at_an_engine_that_ends() -> None:
    load = drawn(200, 2.0, 320, 30)
    for role in Role:
        requests = simulated(2, 2, load, Loss(role, load[-1].at / 2, 20.0), routers=3)
        assert not any(one.failed for one in requests) and all(one.came == 30 for one in requests)


def test_without_another_d_requests_fail_until_it_is_back() -> None:
    load = drawn(300, 2.0, 64, 10)
    lost = Loss(Role.DECODE, 50.0, 30.0)
    failed = [one.arrival.at for one in simulated(1, 1, load, lost) if one.failed]
    assert failed and min(failed) > 49.0 and max(failed) < 83.0
    result = compare(LoadedFleet(1, 1, LINES, SIZES, 0.0), load, Limits(2.0, 0.1), 30.0)
    assert result.decode_lost is not None and 25.0 < result.decode_lost < 35.0


def test_streams_go_on_at_once_however_many_broke() -> None:
    """Retries have a budget, of 200 at first; what streams that go on take is not in it."""
    load = [Arrival(0.0, 32, 100, (n,)) for n in range(500)]
    requests = simulated(1, 2, load, Loss(Role.DECODE, 30.0, 60.0), at_once=1000)
    assert not any(one.failed for one in requests) and max(one.first for one in requests) < 30.0


def test_probes_find_a_lost_engine_before_a_request_does() -> None:
    early, late = simulated(1, 1, [Arrival(0.0, 32, 2, (1,)), Arrival(20.0, 32, 2, (2,))], Loss(Role.DECODE, 5.0, 60.0))
    assert not early.failed and late.failed and late.attempts == 1


def test_a_loss_is_in_the_middle_of_the_load() -> None:
    load = [*(Arrival(0.1 * n, 32, 4, (n,)) for n in range(50)), Arrival(100.0, 32, 4, (99,))]
    result = compare(LoadedFleet(1, 1, LINES, SIZES, 0.0), load, Limits(2.0, 0.1), 20.0)
    assert (result.prefill_lost, result.decode_lost) == (0.0, 0.0) and result.failed == 0


def test_the_queue_is_all_that_has_no_first_token() -> None:
    result = compare(LoadedFleet(1, 1, LINES, SIZES, 0.0), [Arrival(0.0, 490, 21, (1,))], Limits(2.0, 0.1), 20.0)
    assert result.waiting == pytest.approx(0.5 / (0.5 + 20 * 0.025)) and result.most_waiting == 1
    assert overlapping([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (9.0, 9.5)]) == 2


def engine(**sizes: int) -> tuple[VirtualTime, SimulatedEngine, list[float]]:
    """Return a clock, an engine, and the times at which prompts were done, to be filled."""
    time = VirtualTime()
    made = EngineSizes(**{name: sizes.get(name, getattr(SIZES, name)) for name in SIZES.__slots__})
    return time, SimulatedEngine("p", time, LINES, made), []


def test_a_step_of_the_life_before_ends_nothing() -> None:
    time, one, done = engine()
    one.prefill("x", 1000, (), lambda: done.append(time.now))
    time.at(0.5, one.kill)
    time.at(0.5, one.restart)
    time.at(0.5, lambda: one.prefill("x", 1000, (), lambda: done.append(time.now)))
    time.run(lambda: True)
    assert done == [pytest.approx(0.5 + 1.01)]


def test_answers_have_their_tokens_of_a_step_before_prompts() -> None:
    time, one, done = engine(step_tokens=64)
    one.decode("answer", lambda: one.leave("answer") if done else None)
    one.prefill("prompt", 64, (), lambda: done.append(time.now))
    time.run(lambda: not done)
    assert done == [pytest.approx(0.025 + (0.025 + 0.01 + 0.063) + (0.025 + 0.01 + 0.001))]


def test_a_cache_forgets_what_was_used_longest_ago() -> None:
    time, one, done = engine(cache_tokens=64)
    for at, chain in ((0.0, (1, 2)), (1.0, (1, 2)), (2.0, (3, 4)), (3.0, (1, 2))):
        time.at(
            at, lambda begun, chain: one.prefill(begun, 64, chain, lambda: done.append(time.now - begun)), at, chain
        )
    time.run(lambda: len(done) < 4)
    assert done == [pytest.approx(seconds) for seconds in (0.074, 0.011, 0.074, 0.074)]


def test_more_requests_than_the_router_takes_are_refused() -> None:
    load = [Arrival(0.0, 32, 2, (n,)) for n in range(6000)]
    requests = simulated(1, 1, load)
    assert sum(one.failed for one in requests) >= 6000 - 4096 - 1024


def test_a_run_repeats() -> None:
    load = drawn(120, 3.0, 200, 20)
    lost = Loss(Role.PREFILL, 20.0, 10.0)
    assert times(simulated(2, 2, load, lost)) == times(simulated(2, 2, load, lost))


# -- the command


def test_each_ratio_is_printed_as_a_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(loads.written(drawn(100, 2.0, 512, 8)))
    words = ["plan", "--load", str(trace), "--engines", "3", "--prefill-line", "10,1", "--decode-line", "20,5"]
    assert main([*words, "--chunk", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("SIMULATION") and [line.split()[0] for line in lines[4:7]] == ["0:3", "1:2", "2:1"]
    assert sum(line.endswith("most good") for line in lines) == 1
    assert main([*words, "--chunk", "32", "--json", "--metaservers", "2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["simulation"] is True and said["ratios"][0]["prefill_lost"] is None
    assert said["good"] == {"ttft": pytest.approx(5 * 0.522), "tpot": pytest.approx(0.05)}


def test_lines_come_from_pages_of_metrics(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, text in (
        ("t", TRACE),
        ("p", page((10, 5.0), (0, 0.0), {256.0: 10}, 1000)),
        ("d", page((4, 0.1), (300, 6.0), {8.0: 100}, 300)),
    ):
        (tmp_path / name).write_text(text)
    pages = [str(tmp_path / name) for name in "pd"]
    assert main(["plan", "--load", str(tmp_path / "t"), "--engines", "2", "--metrics", *pages, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["lines"]
    assert said == {"prefill": {"base": 0.0, "slope": 0.005}, "decode": {"base": 0.02, "slope": 0.0}}


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["--engines", "1"], "--engines"),
        (["--engines", "65"], "--engines"),
        (["--prefill-line", "10"], "--prefill-line"),
        (["--prefill-line", "0,0"], "--prefill-line"),
        (["--decode-line", "nan,1"], "--decode-line"),
        (["--chunk", "0"], "--chunk"),
        (["--metaservers", "0"], "--metaservers"),
        (["--restart-s", "0"], "--restart-s"),
        (["--good-ttft-ms", "-1"], "--good-ttft-ms"),
        (["--metrics", "none.prom"], "--metrics"),
        (["--load", "none.jsonl"], "--load"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: list[str], key: str
) -> None:
    (tmp_path / "t").write_text(TRACE)
    good = ["--load", str(tmp_path / "t"), "--prefill-line", "10,1", "--decode-line", "20,5"]
    assert main(["plan", *good, *more]) == 2
    assert key in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--p-tp", "1"], ["--load", "T"]])
def test_what_is_needed_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "t").write_text(TRACE)
    assert main(["plan", *(str(tmp_path / "t") if word == "T" else word for word in words)]) == 2
    assert "it is needed" in capsys.readouterr().err


def test_it_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(TRACE)
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not to be imported')\n")
    words = ["-m", "vllm_ascend_pd.cli", "plan", "--load", str(tmp_path / "t"), "--prefill-line", "10,1"]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, *words, "--decode-line", "20,5"],
        env={"PYTHONPATH": f"{tmp_path}:{root}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr and "SIMULATION" in done.stdout


def test_what_several_metaservers_cost_is_printed_beside_one() -> None:
    words = [sys.executable, "-m", "tools.metaservers", "--metaservers", "1", "2", "--rates", "1", "--seconds", "20"]
    done = subprocess.run(
        words, cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, timeout=120, check=True
    )
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| 1 |")]
    assert [row[1] for row in rows] == ["1", "2", "2, a chat's turns at one"]
    slowest = [int(row[3].split(", ")[2]) for row in rows]
    assert slowest[1] > 1.5 * max(slowest[0], slowest[2])
