# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan --load TRACE`: goodput, queue and recovery for each ratio of P to D. A simulation."""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vllm_ascend_pd.cli.flag_values import at_least, positive, read_text, refuse
from vllm_ascend_pd.cli.load import arrivals
from vllm_ascend_pd.cli.load.arrivals import Arrival, Limits
from vllm_ascend_pd.cli.load.engine import EngineSizes
from vllm_ascend_pd.cli.load.lines import StepLine, StepLines, measured
from vllm_ascend_pd.cli.load.world import LoadedFleet, LoadedWorld, Loss, SimulatedRequest
from vllm_ascend_pd.router.core.decisions import Role

MOST_ENGINES = 64


@dataclass(frozen=True, slots=True)
class RatioResult:
    """Figures of a load under one ratio of P to D. Seconds to recover are None for a role without an engine to lose."""

    prefills: int
    decodes: int
    goodput: float  # good answers a second
    failed: int
    ttft: tuple[float, float]  # median, and the ninth tenth
    tpot: tuple[float, float]
    waiting: float  # requests without a first token, on average
    most_waiting: int
    prefill_lost: float | None
    decode_lost: float | None


def run(args: argparse.Namespace) -> int:
    logging.getLogger("vllm_ascend_pd.router").addHandler(logging.NullHandler())  # engines are lost on purpose here
    engines = at_least("--engines", args.engines, 2)
    if engines > MOST_ENGINES:
        refuse("--engines", engines, f"it must be at most {MOST_ENGINES}", "Give fewer: a ratio is what is asked for.")
    remedy = "Name a file with a JSON object a line."
    try:
        load = arrivals.read(read_text("--load", args.load, Path(args.load), remedy))
    except ValueError as problem:
        refuse("--load", args.load, str(problem), remedy, problem)
    lines = _lines(args)
    sizes = EngineSizes(
        at_least("--step-tokens", args.step_tokens, 1),
        at_least("--at-once", args.at_once, 1),
        at_least("--cache-tokens", args.cache_tokens, 1),
        at_least("--chunk", args.chunk, 1),
    )
    prompt = statistics.median(one.prompt for one in load)
    idle = Limits(lines.prefill(prompt), lines.decode(1))
    ttft, tpot = args.good_ttft_ms or 5e3 * idle.ttft, args.good_tpot_ms or 2e3 * idle.tpot
    limits = Limits(positive("--good-ttft-ms", ttft, "ms") / 1e3, positive("--good-tpot-ms", tpot, "ms") / 1e3)
    routers = at_least("--metaservers", args.metaservers, 1)
    back_s, pair_s = positive("--restart-s", args.restart_s, "seconds"), max(0.0, args.pair_ms) / 1e3
    results = [
        compare(LoadedFleet(number, engines - number, lines, sizes, pair_s, routers), load, limits, back_s)
        for number in range(engines)
    ]
    if args.json:
        said = {"simulation": True, "lines": asdict(lines), "good": asdict(limits)}
        print(json.dumps(said | {"ratios": [asdict(one) for one in results]}))
    else:
        print("\n".join(_table(results, load, lines, limits, back_s)))
    return 0


def _lines(args: argparse.Namespace) -> StepLines:
    """Return the lines as given; what is not given is read from the metrics."""
    by_role = {role: _line(f"--{role}-line", getattr(args, f"{role}_line")) for role in ("prefill", "decode")}
    prefills, decodes = measured([_page(one) for one in args.metrics or ()])
    for role, points, flat in (("prefill", prefills, False), ("decode", decodes, True)):
        if by_role[role] is None and points:
            by_role[role] = StepLine.through(points, flat=flat)
    prefill, decode = by_role["prefill"], by_role["decode"]
    if prefill is None or decode is None:
        role = "prefill" if prefill is None else "decode"
        refuse(f"--{role}-line", "", "it is needed", "Give it, or --metrics of engines that have served requests.")
    return StepLines(prefill, decode)


def _line(flag: str, text: str | None) -> StepLine | None:
    if text is None:
        return None
    try:
        base, slope = (float(word) / 1e3 for word in text.split(","))
    except ValueError as problem:
        refuse(flag, text, "it is not two numbers", "Give two, with a comma: 20,0.6.", problem)
    if not (base >= 0 and slope >= 0 and 0 < base + slope < 1e6):
        refuse(flag, text, "a step would take no time, or forever", "Give ms of at least 0, one of them above.")
    return StepLine(base, slope)


def _page(where: str) -> str:
    if where.startswith(("http://", "https://")):
        import httpx

        try:
            answer = httpx.get(where, timeout=10.0).raise_for_status()
        except httpx.HTTPError as problem:
            refuse("--metrics", where, str(problem), "Name the /metrics of an engine that runs.", problem)
        return answer.text
    return read_text("--metrics", where, Path(where), "Name a file with what an engine's /metrics said, or its URL.")


def compare(fleet: LoadedFleet, load: Sequence[Arrival], limits: Limits, back_s: float) -> RatioResult:
    """Return what a ratio makes of a load, alone, and with one engine of each role lost in its middle."""
    calm = _simulated(fleet, load)
    ended = [one for one in calm if not one.failed]
    seconds = max((one.arrival.at + one.last for one in calm), default=0.0) or 1.0
    lost_at = load[-1].at / 2
    lost: dict[Role, float] = {}
    for role, count in ((Role.PREFILL, fleet.prefills), (Role.DECODE, fleet.decodes)):
        if count:
            lossy = _simulated(fleet, load, Loss(role, lost_at, back_s))
            both = zip(lossy, calm, strict=True)
            bad = (one.arrival.at for one, was in both if _good(was, limits) > _good(one, limits))
            lost[role] = max(0.0, max(bad, default=lost_at) - lost_at)
    ttft, tpot = [one.first for one in ended], [_tpot(one) for one in ended]
    return RatioResult(
        fleet.prefills,
        fleet.decodes,
        sum(_good(one, limits) for one in calm) / seconds,
        len(calm) - len(ended),
        _percentiles(ttft),
        _percentiles(tpot),
        sum(ttft) / seconds,
        overlapping([(one.arrival.at, one.arrival.at + one.first) for one in ended]),
        lost.get(Role.PREFILL),
        lost.get(Role.DECODE),
    )


def _simulated(fleet: LoadedFleet, load: Sequence[Arrival], loss: Loss | None = None) -> list[SimulatedRequest]:
    world = LoadedWorld(fleet, load, loss)
    world.run()
    return world.requests


def _tpot(one: SimulatedRequest) -> float:
    return (one.last - one.first) / max(1, one.arrival.answer - 1)


def _good(one: SimulatedRequest, limits: Limits) -> bool:
    return not one.failed and limits.good(one.first, one.last, one.arrival.answer)


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    return (float(np.percentile(values, 50)), float(np.percentile(values, 90))) if values else (0.0, 0.0)


def overlapping(spans: Sequence[tuple[float, float]]) -> int:
    """Return how many of the spans overlap at most."""
    most = now = 0
    for _, change in sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]):
        now += change
        most = max(most, now)
    return most


def _table(
    results: Sequence[RatioResult], load: Sequence[Arrival], lines: StepLines, limits: Limits, back_s: float
) -> list[str]:
    def seconds(value: float | None) -> str:
        return "–" if value is None else f"{value:.0f}"

    rows = [
        "SIMULATION: the router's decisions over engines that take what two lines say; nothing was measured.",
        f"{len(load):,} requests in {load[-1].at:.0f} s; a step takes {lines.prefill.base * 1e3:.3g} ms and "
        f"{lines.prefill.slope * 1e3:.3g} ms a token of prompts, "
        f"{lines.decode.base * 1e3:.3g} ms and {lines.decode.slope * 1e3:.3g} ms an answer",
        f"good: TTFT within {limits.ttft * 1e3:.0f} ms and TPOT within {limits.tpot * 1e3:.0f} ms; "
        f"recovery: seconds from the loss of an engine, which is back after {back_s:.0f}, until the last answer that is "
        "bad for it was asked for",
        "  P:D   good/s  failed     TTFT p50, p90, s   TPOT p50, p90, ms   waiting, most   P lost, s   D lost, s",
    ]
    best = max(results, key=lambda one: one.goodput)
    for one in results:
        tpot = [value * 1e3 for value in one.tpot]
        rows.append(
            f"{one.prefills:>3}:{one.decodes:<3} {one.goodput:>7.2f} {one.failed:>7} {one.ttft[0]:>11.2f} {one.ttft[1]:>10.2f}"
            f" {tpot[0]:>12.0f} {tpot[1]:>8.0f} {one.waiting:>9.1f} {one.most_waiting:>5}"
            f" {seconds(one.prefill_lost):>10} {seconds(one.decode_lost):>11}" + ("  most good" if one is best else "")
        )
    return [*rows, "0:N: engines that compute prompts and answers, behind the same router"]
