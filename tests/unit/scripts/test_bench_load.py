# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/bench_load.sh that need no engine: loads, figures, table, plot, and what is kept of a run."""

from __future__ import annotations

import asyncio
import math
import os
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest

from tools import bench_load
from tools.bench_load_parts import client, destinations, figures, loads, overload, planned, plot, pushed, systems
from tools.bench_load_parts.destinations import PLook, PSteps
from tools.bench_load_parts.figures import MeasuredPoint, TimedRequest
from tools.bench_load_parts.kept import KeptPoints, OtherRun
from tools.bench_load_parts.loads import Lengths, LoadCase, new_tokens
from tools.bench_load_parts.overload import AT_LIMIT, Phase, TimedEnd
from tools.bench_load_parts.pushed import MeasuredPhase, PushedTurn, Used
from tools.support import contenders, routers
from tools.support.processor_time import Scheduled
from tools.support.soaking import ResourceSample
from tools.support.spec import EngineSpec
from vllm_ascend_pd.cli.load.arrivals import Arrival, Limits
from vllm_ascend_pd.cli.load.engine import EngineSizes

LENGTHS = Lengths(prompt=512, answer=48, seconds=50.0)
NAMES = {"a": "(a) one & the same", "b": "(b) another"}


def point(system: str, rate: float, repeat: int, goodput: float, prefix: int = 0, **more: Any) -> MeasuredPoint:
    said = {"completed": 9, "failed": 0, "request_goodput": goodput, "p50_ttft_ms": 1e3 * goodput, **more}
    return MeasuredPoint(system, LoadCase("rate", rate, prefix), repeat, said)


# -- loads


def test_a_load_is_the_same_for_each_system_and_another_in_each_repeat() -> None:
    case = LoadCase("rate", 0.8)
    first, chunk = loads.requests(case, LENGTHS, 0, 3.0, [])
    assert loads.requests(case, LENGTHS, 0, 3.0, []) == (first, chunk)
    other, _ = loads.requests(case, LENGTHS, 1, 3.0, [])
    assert len(first) == len(other) == 40 and [one.at for one in first] != [one.at for one in other]
    for few in (first, other, loads.requests(LoadCase("rate", 0.01), LENGTHS, 0, 3.0, [])[0]):
        rate = 0.01 if len(few) == 4 else 0.8  # just the rate that was asked for, whatever was drawn
        assert few[0].at == 0.0 and few[-1].at == pytest.approx((len(few) - 1) / rate)


@pytest.mark.parametrize(("prefix", "new"), [(0, 512), (90, 512 - 448)])
def test_a_share_of_each_prompt_is_common_to_all(prefix: int, new: int) -> None:
    arrivals, chunk = loads.requests(LoadCase("rate", 0.8, prefix), LENGTHS, 0, 3.0, [])
    assert new_tokens(arrivals, chunk) == 512 + 39 * new
    assert {(one.prompt, one.answer, len(one.chunks)) for one in arrivals} == {(512, 48, 16)}


def test_closed_loops_come_at_once_and_are_as_many_as_an_idle_engine_takes_seconds_for() -> None:
    arrivals, _ = loads.requests(LoadCase("clients", 4), LENGTHS, 0, 2.5, [])
    assert len(arrivals) == 20 and {one.at for one in arrivals} == {0.0}
    assert len(loads.requests(LoadCase("clients", 16), LENGTHS, 0, 25.0, [])[0]) == 32


def test_a_trace_is_cut_after_the_seconds_of_a_point() -> None:
    trace = [Arrival(10.0 * number, 1024, 64, (1, number)) for number in range(30)]
    lengths = Lengths(512, 48, 50.0, trace_lengths=0.25)
    arrivals, chunk = loads.requests(LoadCase("trace", 2.0), lengths, 0, 3.0, trace)
    assert chunk == 128 and [one.at for one in arrivals] == [5.0 * number for number in range(11)]
    assert {(one.prompt, one.answer) for one in arrivals} == {(256, 16)}


def test_systems_take_turns() -> None:
    assert [bench_load.turned("abc", repeat) for repeat in range(4)] == ["abc", "bca", "cab", "abc"]


# -- figures


def test_figures_of_chats_are_those_of_vllm_s_client() -> None:
    """TPOT is that of a request, and goodput counts whole requests over the whole time."""
    seen = [
        TimedRequest(1.0, (0.1, 0.1, 0.1, 0.1), 5),
        TimedRequest(3.0, (0.1,) * 4, 5),
        TimedRequest(1.0, (0.1, 0.1, 0.9, 0.9), 5),
        TimedRequest(1.5, (), 1),
        TimedRequest(error="HTTP 503"),
    ]
    values = figures.of_requests(seen, 10.0, Limits(2.0, 0.2))
    assert values["request_goodput"] == pytest.approx(0.2) and values["request_throughput"] == pytest.approx(0.4)
    assert (values["completed"], values["failed"], values["errors"]) == (4, 1, ["HTTP 503"])
    assert values["p50_tpot_ms"] == pytest.approx(100.0) and values["p99_itl_ms"] == pytest.approx(900.0)
    assert values["p90_ttft_ms"] == pytest.approx(float(np.percentile([1.0, 3.0, 1.0, 1.5], 90)) * 1e3)
    assert values["output_throughput"] == pytest.approx(1.6)
    assert set(figures.KEYS) <= values.keys()


def test_computed_and_written_are_counted_over_a_point() -> None:
    before = {"computed": 100.0, "written": 5e6, "lacked": 10.0}
    after = {"computed": 1150.0, "written": 5e6 + 300 * 1024, "lacked": 310.0}
    ratios = figures.counted(before, after, 1000, 1024, 7)
    assert ratios == {"computed_per_new": pytest.approx(1.05), "bytes_per_lacked": pytest.approx(1.0)}
    assert figures.counted({"computed": 1.0}, {"computed": 3.0}, 1, 1024, 0) == {"computed_per_new": 2.0}
    busy = figures.counted({"p_cpu": 1.0, "d_cpu": 0.0}, {"p_cpu": 7.0, "d_cpu": 3.0}, 0, 1024, 12)
    assert busy == {"p_cpu_s": 0.5, "d_cpu_s": 0.25}


def test_the_table_has_medians_and_ranges_and_says_what_failed() -> None:
    points = [point("a", 0.5, repeat, value) for repeat, value in enumerate((0.3, 0.5, 0.4))]
    points += [point("b", 0.5, 0, 0.2, failed=2), MeasuredPoint("b", LoadCase("rate", 0.5), 1, {"completed": 0})]
    points += [point("a", 0.5, 0, 0.1, prefix=90)]
    rows = [row.strip("| ").split(" | ") for row in figures.table(points, NAMES)[2:]]
    assert [row[:3] for row in rows] == [
        ["0.5 requests/s, prefix 0 %", "(a) one & the same", "0.40 (0.30–0.50)"],
        ["0.5 requests/s, prefix 0 %", "(b) another, 2 of 3 runs", "0.20 (0.20–0.20)"],
        ["0.5 requests/s, prefix 90 %", "(a) one & the same, 1 of 3 runs", "0.10"],
    ]
    assert [row[-1] for row in rows] == ["0", "2, 1 runs", "0"]
    assert {row.count("|") for row in figures.table(points, NAMES)} == {13}


def test_a_figure_that_no_point_has_is_a_dash_and_nan_is_none() -> None:
    assert figures.spread([point("a", 1.0, 0, math.nan)], "request_goodput") is None
    assert figures.spread([], "request_goodput") is None
    *_, row = figures.table([point("a", 1.0, 0, 0.5)], NAMES)
    assert row.split(" | ")[8:10] == ["–", "–"]


# -- plot


def test_the_plot_has_a_panel_for_each_share_a_line_for_each_system_and_a_bar_for_each_range() -> None:
    points = [
        point(system, rate, repeat, rate * factor + 0.01 * repeat, prefix)
        for system, factor in (("a", 0.9), ("b", 0.5))
        for rate in (0.25, 0.5, 1.0)
        for repeat in range(3)
        for prefix in (0, 90)
    ]
    picture = plot.svg(points, NAMES, "good: TTFT < 1 s")
    root = ElementTree.fromstring(picture)
    texts = [one.text for one in root.findall(".//{*}text")]
    assert {"(a) one & the same", "good: TTFT < 1 s", "90 % of each prompt common to all"} <= set(texts)
    lines = [one for one in root.findall(".//{*}polyline") if one.get("points", "").count(",") == 3]
    assert len(lines) == 4 and len(list(root.findall(".//{*}circle"))) == 12
    ys = [float(pair.split(",")[1]) for pair in lines[0].get("points", "").split()]
    assert ys == sorted(ys, reverse=True) and len(set(ys)) == 3  # more is higher
    width, height = (float(root.get(name, "")) for name in ("width", "height"))
    circles = [tuple(map(float, one)) for one in re.findall(r'c[x]="([\d.]+)" cy="([\d.]+)"', picture)]
    assert all(0 < x < width and 0 < y < height for x, y in circles)


@pytest.mark.parametrize(("most", "step"), [(0.0, 1.0), (0.8, 0.1), (1.2, 0.2), (7.0, 1.0), (30.0, 5.0), (100.0, 10.0)])
def test_ticks_are_few_and_round(most: float, step: float) -> None:
    assert plot.tick_step(most) == pytest.approx(step)


def test_a_run_in_which_nothing_was_good_can_be_drawn() -> None:
    ElementTree.fromstring(plot.svg([point("a", 0.5, 0, 0.0)], NAMES, ""))
    ElementTree.fromstring(plot.svg([], NAMES, ""))


# -- the plan of its requests


def engine_page(prompts: int, gaps: int, gap_s: float, steps: int, tokens: int) -> str:
    """Return an engine's metrics. A prompt takes a second."""
    said = {"request_prefill_time_seconds": (prompts, prompts), "inter_token_latency_seconds": (gaps, gaps * gap_s)}
    said["iteration_tokens_total"] = (steps, tokens)
    return "".join(f"vllm:{name}_count {count}\nvllm:{name}_sum {total}\n" for name, (count, total) in said.items())


def test_a_plan_of_the_same_requests_stands_beside_what_the_pair_did(tmp_path: Path) -> None:
    load = [Arrival(10.0 * number, 512, 11, tuple(range(16 * number, 16 * number + 16))) for number in range(4)]
    for repeat in range(2):
        planned.trace_of(tmp_path, LoadCase("rate", 0.1), repeat).write_text(loads.written(load))
    for number, times in enumerate((1, 2)):  # counts go on from point to point
        (tmp_path / f"ours-p-000{2 * number}.prom").write_text(engine_page(8 * times, 0, 0.0, 8 * times, 4096 * times))
        (tmp_path / f"ours-d-000{2 * number + 1}.prom").write_text(engine_page(4, 40 * times, 0.05, 40, 40))
    did = {"p90_ttft_ms": 2000.0, "p50_tpot_ms": 40.0}
    points = [point("b", 0.1, 0, 0.5, **did), point("a", 0.1, 0, 9.0), point("b", 0.1, 1, 1.0, **did)]
    points.append(MeasuredPoint("b", LoadCase("rate", 0.2), 0, {"completed": 0}))
    sizes = EngineSizes(2048, 32, 16384, 32)
    head, _, _, _, row = planned.rows(tmp_path, points, Limits(5.0, 0.1), sizes)
    assert "a step takes 0 ms and 1.95 ms a token of prompts, 50 ms and 0 ms an answer" in head
    assert row == "| 0.1, 0 % | 0.13, 0.75 | 1.03, 0.75 | 1.03, 2.00 | 50, 40 | 1.55 (1.03–2.06) |"
    assert planned.rows(tmp_path, points[1:2], Limits(5.0, 0.1), sizes) == []
    assert planned.rows(tmp_path / "none", points, Limits(5.0, 0.1), sizes) == []


# -- what is kept


def test_a_run_goes_on_with_the_points_that_are_missing(tmp_path: Path) -> None:
    settings = {"prompt": "512"}
    first = KeptPoints(tmp_path, settings)
    first.add(point("a", 0.5, 0, 0.4, ttfts=[1.0] * 999, errors=["x" * 1000] * 9))
    with (tmp_path / "points.jsonl").open("a") as out:
        out.write('{"system": "b", "case": {"ki')  # it was ended in the middle of a line
    resumed = KeptPoints(tmp_path, settings)
    case = LoadCase("rate", 0.5)
    assert resumed.has("a", case, 0) and not resumed.has("b", case, 0) and not resumed.has("a", case, 1)
    resumed.add(point("b", 0.5, 0, 0.3))
    third = KeptPoints(tmp_path, settings)
    assert [(one.system, one.figures["request_goodput"]) for one in third.points] == [("a", 0.4), ("b", 0.3)]
    assert "ttfts" not in third.points[0].figures and len(third.points[0].figures["errors"]) == 3
    third.add(MeasuredPoint("b", case, 1, {"completed": 0, "errors": ["it did not end within 600 s"]}))
    assert not KeptPoints(tmp_path, settings).has("b", case, 1)
    third.add(point("b", 0.5, 1, 0.2))
    fourth = KeptPoints(tmp_path, settings)
    assert fourth.has("b", case, 1) and len(fourth.points) == 3
    with pytest.raises(OtherRun, match="prompt"):
        KeptPoints(tmp_path, {"prompt": "256"})


# -- clients


def test_vllm_s_client_takes_the_flags(tmp_path: Path) -> None:
    """Its own parser reads them, and its trace has our prompts: equal first tokens where the chunks are equal."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: Any = FlexibleArgumentParser()  # type: ignore[no-untyped-call]
    serve.add_cli_args(parser)
    trace = tmp_path / "x.jsonl"
    for case in (LoadCase("rate", 0.5), LoadCase("clients", 3, 90)):
        words = client.flags("http://127.0.0.1:1", tmp_path, case, trace, 9, 32, Limits(2.0, 0.1), tmp_path / "r.json")
        said = parser.parse_args(words)
        assert serve.check_goodput_args(said) == {"ttft": 2000.0, "tpot": 100.0}
        assert (said.dataset_name, said.num_prompts, said.timed_trace_chunk_hash_size) == ("timed_trace", 9, 32)
        assert said.max_concurrency == (3 if case.kind == "clients" else None)
        assert said.self_timed is (False if case.kind == "clients" else None)


def test_all_of_a_chat_but_its_turns_and_answers_was_there_before() -> None:
    turns = loads.TURNS
    assert client.new_of_chats(3, LENGTHS) == 3 * (turns * 64 + (turns - 1) * 48)
    assert asdict(LENGTHS)["turn"] == 64


# -- pushes into D


def test_gaps_are_those_of_one_stream_within_a_phase() -> None:
    times = [[0.5, 1.0, 1.25, 2.0, 2.5], [1.5, 1.75]]
    assert pushed.gaps_within(times, 1.0, 2.0) == [0.25, 0.75, 0.25]
    assert pushed.gaps_within(times, 1.1, 1.9) == [0.25]


def test_a_push_is_compared_with_none_in_the_same_turn() -> None:
    four = pushed.PushPhase(4)
    slow, fast = (
        PushedTurn(
            8,
            {
                pushed.NONE: MeasuredPhase([x * 0.02] * 96, 0, Used(10.0, 2.0, 4.0, 1.0)),
                four: MeasuredPhase([x * 0.02] * 50 + [x * 0.03] * 46, 7, Used(x * 20.0, 3.0, 4.0, 2.0)),
            },
        )
        for x in (2.0, 1.0)
    )
    assert slow.ratio(four, 50) == fast.ratio(four, 50) == pytest.approx(1.0)
    assert slow.ratio(four, 99) == fast.ratio(four, 99) == pytest.approx(1.5)
    rows = pushed.table([("a", slow), ("a", fast)], NAMES)
    assert rows[2:] == [
        "| (a) one & the same | 8 | none | 0 | 192 | 30.0 | 30.0 | 10.0, 2.0, 4.0, 1.0 |  |  |",
        "| (a) one & the same | 8 | 4 | 14 | 192 | 30.0 | 45.0 | 30.0, 3.0, 4.0, 2.0 | 1.00 (1.00–1.00) | 1.50 (1.50–1.50) |",
    ]
    assert [list(pushed.rotated((0, 1, 4), turn)) for turn in range(3)] == [[0, 1, 4], [1, 4, 0], [4, 0, 1]]


def test_the_time_of_d_is_told_apart_by_processes_and_by_the_thread_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {"worker": 21.0, "core": 4.0, "server": 3.0}

    def scheduled(processes: list[str], *, first: bool = False) -> Scheduled:
        return Scheduled(15.5 if first else sum(seconds[one] for one in processes))

    monkeypatch.setattr(pushed, "parts", lambda _: {name: [name] for name in seconds})
    monkeypatch.setattr(pushed, "scheduled", scheduled)
    assert pushed.used(cast(Any, None)) == Used(steps=15.5, links=5.5, core=4.0, server=3.0)


def test_a_push_is_compared_with_the_same_prompts_on_p_alone() -> None:
    gaps = {
        pushed.NONE: 0.02,
        pushed.PushPhase(0, False): 0.021,
        pushed.PushPhase(4): 0.03,
        pushed.PushPhase(4, False): 0.025,
    }
    turn = PushedTurn(1, {phase: MeasuredPhase([gap], phase.prompts, Used(18.0)) for phase, gap in gaps.items()})
    rows = pushed.table([("a", turn)], NAMES)
    assert len({row.count("|") for row in rows}) == 1
    assert [row.removeprefix("| (a) one & the same | 1 | ") for row in rows[2:]] == [
        "none | 0 | 1 | 20.0 | 20.0 | 18.0, 0.0, 0.0, 0.0 |  |  |  |",
        "none, once more | 0 | 1 | 21.0 | 21.0 | 18.0, 0.0, 0.0, 0.0 | 1.05 (1.05–1.05) | 1.05 (1.05–1.05) |  |",
        "4 on P alone | 4 | 1 | 25.0 | 25.0 | 18.0, 0.0, 0.0, 0.0 | 1.25 (1.25–1.25) | 1.25 (1.25–1.25) |  |",
        "4 | 4 | 1 | 30.0 | 30.0 | 18.0, 0.0, 0.0, 0.0 | 1.50 (1.50–1.50) | 1.50 (1.50–1.50) | 1.20 (1.20–1.20) |",
    ]


def test_p_s_steps_are_those_between_two_ends_of_steps_that_were_seen() -> None:
    looks = [PLook(0.0, 5, 10240, 7.0), PLook(0.5, 5, 10240, 7.5), PLook(1.0, 6, 12288, 8.0)]
    looks += [PLook(2.0, 7, 14336, 9.0), PLook(4.0, 8, 16384, 10.7), PLook(5.0, 8, 16384, 11.7)]
    assert destinations.between(looks) == pytest.approx(PSteps(seconds=1.5, tokens=2048.0, busy=0.9))
    with pytest.raises(RuntimeError, match="more --seconds"):
        destinations.between(looks[:3])


def test_a_step_of_p_is_compared_with_one_without_a_push_in_the_same_turn() -> None:
    def turn(*seconds: float, tokens: float = 2048.0, busy: float = 0.99) -> dict[int, PSteps]:
        return {number: PSteps(each, tokens, busy) for number, each in zip((0, 1, 8), seconds, strict=True)}

    assert destinations.table([turn(1.0, 1.02, 2.0), turn(2.0, 2.04, 2.0)])[2:] == [
        "| none | 1500 |  | 2048 | 99% |",
        "| 1 | 1530 | 1.02 (1.02–1.02) | 2048 | 99% |",
        "| 8 | 2000 | 1.50 (1.00–2.00) | 2048 | 99% |",
    ]
    for waited in (turn(1.0, 1.0, 1.0, tokens=1900.0), turn(1.0, 1.0, 1.0, busy=0.9)):
        assert "**it waited**" in destinations.table([waited])[2]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("--push 4 4", "each number once"),
        ("--push 4 --destinations 8", "not allowed with"),
        ("--push 4 --systems a", "a system with a D"),
        ("--push 65", "at most 64"),
        ("--destinations 16", "at most 8"),
        ("--destinations 1 3", "divides 2048"),
        ("--push 4 --regroup", "at least 2"),
        ("--destinations 8 --alone", "go with --push"),
        ("--verify", "go with --push or --destinations"),
        ("--vllm-ascend --overload 2", "not with --push"),
        ("--vllm-ascend --systems ab", "letters of bef with --vllm-ascend"),
        ("--systems e", "letters of abcd"),
    ],
)
def test_flags_that_mean_nothing_together_are_refused(
    words: str, wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_load", *words.split()])
    with pytest.raises(SystemExit) as ended:
        bench_load.main()
    assert ended.value.code == 2 and wrong in " ".join(capsys.readouterr().err.split())


# -- overload


def _event(*ids: int) -> str:
    return f'data: {{"choices": [{{"token_ids": {list(ids)}}}]}}\n\n'


@pytest.mark.parametrize(
    ("answer", "answered", "refused", "lost"),
    [
        (httpx.Response(200, text=_event(5) + _event(6) + "data: [DONE]\n\n"), 1, 0, ""),
        (httpx.Response(429, headers={"retry-after": "2"}, text='{"error": {"code": "PD-META-009"}}'), 0, 1, ""),
        (httpx.Response(429, text='{"error": {"code": "PD-META-009"}}'), 0, 0, "without Retry-After"),
        (httpx.Response(429, headers={"retry-after": "2"}, text="of an engine"), 0, 0, "of an engine"),
        (httpx.Response(503, text="no engine"), 0, 0, "no engine"),
        (httpx.Response(200, text=_event(5) + "data: [DONE]\n\n"), 0, 0, "1 of 2 tokens"),
    ],
)
def test_only_a_refusal_that_says_when_to_come_back_is_no_loss(
    answer: httpx.Response, answered: int, refused: int, lost: str
) -> None:
    phase = Phase(2.0, 10.0)

    async def run() -> None:
        hooks = {"response": [overload.has_retry_after]}
        transport = httpx.MockTransport(lambda _: answer)
        async with httpx.AsyncClient(transport=transport, event_hooks=hooks) as asking:
            await overload.ask(asking, "http://front/v1/completions", {"max_tokens": 2}, phase)

    asyncio.run(run())
    assert (len(phase.answers), phase.refused) == (answered, refused)
    assert [lost in why for why in phase.lost] == [True] * bool(lost)


def test_times_under_overload_are_ratios_to_those_at_the_limit_of_the_same_turn() -> None:
    def turn(speed: float) -> dict[float, Phase]:
        return {
            AT_LIMIT: Phase(AT_LIMIT, 10.0, 50.0, [TimedEnd(55.0, speed, speed / 10)] * 16),
            10.0: Phase(
                10.0,
                10.0,
                0.0,
                [
                    *[TimedEnd(1.9, 99.0, 99.0)] * 3,  # it fills up
                    *[TimedEnd(9.0, 1.5 * speed, 1.2 * speed / 10)] * 16,
                    *[TimedEnd(10.5, 0.0, 0.0)] * 4,  # no more come
                ],
                177,
            ),
        }

    rows = overload.table([turn(1.0), turn(3.0)])
    assert rows[2].startswith("| at the limit | 32 | 32 | 2.00 (2.00–2.00) | 0 | 0 | 2.00, 2.00 | 200, 200 |  |  |")
    ratios = "1.50 (1.50–1.50), 1.50 (1.50–1.50) | 1.20 (1.20–1.20), 1.20 (1.20–1.20) | 0%"
    assert rows[3] == f"| 10 times | 400 | 32 | 2.00 (2.00–2.00) | 354 | 0 | 3.00, 3.00 | 240, 240 | {ratios} |"


def test_what_becomes_more_in_every_turn_is_a_leak() -> None:
    def samples(*sockets: int) -> list[ResourceSample]:
        return [ResourceSample(0, "router", 1, 0, 30.4, 0.0, 0, 2, count, None, None) for count in sockets]

    assert overload.resources({"router": samples(9, 11)})[2] == "| router | 30, 30 | 2, 2 | 9, 11 |"
    assert overload.growth({"router": samples(9, 11), "p": samples(9, 11, 11)}) == []
    assert overload.growth({"router": samples(9, 11, 12)}) == ["router: sockets [9, 11, 12]"]


@pytest.mark.parametrize(
    ("have", "alone", "rest"),
    [({0, 1}, "", [0, 1]), ({0, 1}, "p", [1]), ({4, 5, 6}, "d", [4, 6]), ({0, 1, 2, 3}, "d", [2, 3])],
)
def test_neither_router_nor_client_runs_where_a_side_has_a_core_to_itself(
    have: set[int], alone: str, rest: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: have)
    assert systems.cores(alone) == (sorted(have)[:2], rest)


# -- under vllm-ascend


def test_pairs_under_vllm_ascend_have_a_core_an_engine_and_those_with_other_connectors_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[EngineSpec] = []
    paused: list[str] = []

    def start(*specs: EngineSpec) -> list[SimpleNamespace]:
        started.extend(specs)
        processes = (SimpleNamespace(pause=lambda name=spec.name: paused.append(name)) for spec in specs)
        return [SimpleNamespace(process=process, spec=SimpleNamespace(port=1)) for process in processes]

    cluster = SimpleNamespace(
        port=lambda: 1,
        logs=tmp_path,
        start=start,
        metaserver=lambda *_: None,
        push_config=lambda *urls, **more: {"trace_dir": "x"},
    )
    build = SimpleNamespace(python="/there/python", plugins=(), variables=dict)
    monkeypatch.setattr(systems, "older_host_build", lambda: build)
    monkeypatch.setattr(systems, "_divided", lambda: [4, 7])
    monkeypatch.setattr(contenders, "ensure", lambda _: tmp_path)
    monkeypatch.setattr(routers, "Router", lambda *_, **__: SimpleNamespace(stop=lambda: None))
    with systems.started_on_ascend(cast(Any, cluster), "fb", {"max_len": 640, "kv_bytes": 4096}) as pairs:
        assert [(letter, pair.paused) for letter, pair in pairs.items()] == [("f", True), ("b", False)]
    assert paused == ["MooncakeConnectorV1-p", "MooncakeConnectorV1-d"]
    assert [one.prefix for one in started] == [("taskset", "-c", "4"), ("taskset", "-c", "7")] * 2
    assert {(one.max_len, one.arguments[-1]) for one in started} == {(640, "4096")}
    assert not any("trace_dir" in one.extra for one in started)
    ports = [one.d["kv_port"] for one in contenders.CONTENDERS if one.d]
    assert len(ports) == len(set(ports)) == 2
