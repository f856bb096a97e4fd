# SPDX-License-Identifier: Apache-2.0
"""Figures of points, and the table of a run. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.bench_load_parts.loads import LoadCase
from vllm_ascend_pd.cli.load.arrivals import Limits

PERCENTILES = (50, 90, 99)
TIMES = ("ttft", "tpot", "itl")
# Names of `vllm bench serve`'s results, and those that are counted here.
KEYS = (
    "request_goodput",
    "request_throughput",
    "output_throughput",
    *(f"p{percent}_{time}_ms" for time in TIMES for percent in PERCENTILES),
)
COUNTED = ("computed_per_new", "bytes_per_lacked", "p_cpu_s", "d_cpu_s")


@dataclass(frozen=True)
class TimedRequest:
    """One answer as its client saw it; `gaps` between its pieces. Of one that failed there is only the error."""

    ttft: float = 0.0
    gaps: tuple[float, ...] = ()
    tokens: int = 0
    error: str = ""

    @property
    def seconds(self) -> float:
        return self.ttft + sum(self.gaps)


def of_requests(requests: Sequence[TimedRequest], seconds: float, limits: Limits) -> dict[str, Any]:
    """Return the figures of answers by `vllm bench serve`'s names and definitions."""
    ended = [one for one in requests if not one.error]
    good = sum(limits.good(one.ttft, one.seconds, one.tokens) for one in ended)
    times = {
        "ttft": [one.ttft for one in ended],
        "tpot": [(one.seconds - one.ttft) / (one.tokens - 1) for one in ended if one.tokens > 1],
        "itl": [gap for one in ended for gap in one.gaps],
    }
    results: dict[str, Any] = {
        "completed": len(ended),
        "failed": len(requests) - len(ended),
        "errors": [one.error for one in requests if one.error],
        "duration": seconds,
        "request_goodput": good / seconds,
        "request_throughput": len(ended) / seconds,
        "output_throughput": sum(one.tokens for one in ended) / seconds,
    }
    for name, values in times.items():
        for percent in PERCENTILES:
            results[f"p{percent}_{name}_ms"] = float(np.percentile(values or [math.nan], percent)) * 1e3
    return results


def counted(
    before: Mapping[str, float], after: Mapping[str, float], new: int, token_bytes: int, answers: int
) -> dict[str, float]:
    """Return how often P computed a new token of the prompts, how often a byte was written that D lacked, and the
    processor time of both sides for an answer.

    `before`, `after`: `computed`, `written` and `lacked`, read from the engines; one that no engine has is not said.
    """
    grown = {name: after[name] - before[name] for name in after if name in before}
    said = {"computed_per_new": grown["computed"] / new} if new and "computed" in grown else {}
    said |= {f"{side}_s": grown[side] / answers for side in ("p_cpu", "d_cpu") if grown.get(side) and answers}
    if grown.get("lacked") and "written" in grown:
        said["bytes_per_lacked"] = grown["written"] / (grown["lacked"] * token_bytes)
    return said


@dataclass(frozen=True)
class MeasuredPoint:
    """Figures of one system under one load, once."""

    system: str
    case: LoadCase
    repeat: int
    figures: Mapping[str, Any]

    @property
    def failed(self) -> bool:
        """Return whether it has no figures."""
        return not self.figures.get("completed")


def spread(points: Iterable[MeasuredPoint], key: str) -> tuple[float, float, float] | None:
    """Return median, lowest and highest value of the points that have it."""
    values = [value for p in points if not p.failed and (value := p.figures.get(key)) is not None and value == value]
    return (statistics.median(values), min(values), max(values)) if values else None


def ranged(values: Sequence[float], digits: int = 2) -> str:
    """Return median (lowest–highest)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def of(points: Sequence[MeasuredPoint], system: str, case: LoadCase) -> list[MeasuredPoint]:
    return [one for one in points if (one.system, one.case) == (system, case)]


def cases_of(points: Sequence[MeasuredPoint]) -> list[LoadCase]:
    return list(dict.fromkeys(one.case for one in points))


def table(points: Sequence[MeasuredPoint], names: Mapping[str, str]) -> list[str]:
    """Return a table in Markdown, load by load: medians, and (lowest–highest)."""
    columns = ["load", "", "goodput, requests/s", "answered, requests/s", "tokens/s", "TTFT p50, p90, s"]
    columns += [
        "TPOT p50, p90, ms",
        "ITL p50, p99, ms",
        "computed / new",
        "bytes / lacked",
        "CPU s an answer: P, D",
        "failed",
    ]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for case in cases_of(points):
        for system, name in names.items():
            if mine := of(points, system, case):
                fewer = f", {len(mine)} of {runs(points)} runs" if len(mine) < runs(points) else ""
                rows.append(f"| {case} | {name}{fewer} | {' | '.join(_cells(mine))} |")
    return rows


def runs(points: Iterable[MeasuredPoint]) -> int:
    """Return how often a load was run that was run most often."""
    return max((one.repeat for one in points), default=-1) + 1


def _cells(mine: Sequence[MeasuredPoint]) -> list[str]:
    def shown(key: str, digits: int, factor: float = 1.0) -> str:
        if (spread_of := spread(mine, key)) is None:
            return "–"
        middle, low, high = (f"{value * factor:.{digits}f}" for value in spread_of)
        return f"{middle} ({low}–{high})" if len(mine) > 1 else middle

    def times(time: str, percents: Iterable[int], digits: int, factor: float = 1.0) -> str:
        return ", ".join(shown(f"p{percent}_{time}_ms", digits, factor) for percent in percents)

    failed = sum(one.figures.get("failed", 0) for one in mine)
    lost = sum(one.failed for one in mine)
    return [
        shown("request_goodput", 2),
        shown("request_throughput", 2),
        shown("output_throughput", 1),
        times("ttft", (50, 90), 2, 1e-3),
        times("tpot", (50, 90), 0),
        times("itl", (50, 99), 0),
        shown("computed_per_new", 2),
        shown("bytes_per_lacked", 2),
        ", ".join(shown(side, 2) for side in ("p_cpu_s", "d_cpu_s")),
        f"{failed}" + (f", {lost} runs" if lost else ""),
    ]
