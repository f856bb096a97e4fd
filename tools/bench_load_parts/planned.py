# SPDX-License-Identifier: Apache-2.0
"""A plan of a run's requests, by `vllm-ascend-pd plan --load`, beside what the run's pair did with them.

Its two lines are those of the whole run, read from P's and D's /metrics behind each point.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from pathlib import Path

from tools.bench_load_parts.figures import MeasuredPoint, cases_of, of, ranged
from tools.bench_load_parts.loads import LoadCase
from vllm_ascend_pd.cli.load import arrivals
from vllm_ascend_pd.cli.load.arrivals import Limits
from vllm_ascend_pd.cli.load.command import RatioResult, compare
from vllm_ascend_pd.cli.load.engine import EngineSizes
from vllm_ascend_pd.cli.load.lines import StepLine, StepLines, measured
from vllm_ascend_pd.cli.load.world import LoadedFleet

PAIR_S, BACK_S = 0.03, 60.0  # defaults of the command's flags
PAIRS = ("ours", "AscendPushConnector")  # what the engines of (b) are called
COLUMNS = (
    ("goodput, requests/s", 1.0, 2),
    ("TTFT p50, s", 1.0, 2),
    ("TTFT p90, s", 1.0, 2),
    ("TPOT p50, ms", 1e3, 0),
)


def step_lines(pages: Sequence[str]) -> StepLines | None:
    """Return the lines through what the pages of a P, then of a D say. None if one of them has computed nothing."""
    prefills, decodes = measured(pages)
    if not prefills or not decodes:
        return None
    return StepLines(StepLine.through(prefills, flat=False), StepLine.through(decodes, flat=True))


def trace_of(folder: Path, case: LoadCase, repeat: int) -> Path:
    """Return the file with a point's requests."""
    return folder / f"{case.kind}-{case.value:g}-prefix-{case.prefix}-{repeat}.jsonl"


def rows(folder: Path, points: Sequence[MeasuredPoint], limits: Limits, sizes: EngineSizes) -> list[str]:
    """Return a table in Markdown, or nothing if the pair was not asked at a rate.

    Closed loops are left out: the next request's time is the last one's end, which a trace does not say.
    """
    names = [f"{pair}-{side}-*.prom" for pair in PAIRS for side in "pd"]
    pages = [page.read_text() for name in names for page in sorted(folder.glob(name))]
    lines, cases = step_lines(pages), [case for case in cases_of(points) if case.kind == "rate"]
    if lines is None or not any(of(points, "b", case) for case in cases):
        return []
    logging.getLogger("vllm_ascend_pd.router").addHandler(logging.NullHandler())  # `compare` loses engines, too
    made = [
        f"`plan --load`; a step takes {_words(lines.prefill)} a token of prompts, {_words(lines.decode)} an answer:",
        "",
        f"| requests/s, prefix | {' | '.join(f'{name}: plan, pair' for name, _, _ in COLUMNS)} | TTFT p50: plan / pair |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for case in cases:
        if not (mine := [one for one in of(points, "b", case) if not one.failed]):
            continue
        said = [_planned(trace_of(folder, case, one.repeat), lines, limits, sizes) for one in mine]
        did = [
            (
                one.figures["request_goodput"],
                *(one.figures[f"{key}_ms"] / 1e3 for key in ("p50_ttft", "p90_ttft", "p50_tpot")),
            )
            for one in mine
        ]
        cells = []
        for column, (_, times, digits) in enumerate(COLUMNS):
            both = (statistics.median(one[column] for one in figures) * times for figures in (said, did))
            cells.append(", ".join(f"{value:.{digits}f}" for value in both))
        quotients = [plan[1] / pair[1] for plan, pair in zip(said, did, strict=True)]
        made.append(f"| {case.value:g}, {case.prefix} % | {' | '.join(cells)} | {ranged(quotients)} |")
    return made


def _planned(trace: Path, lines: StepLines, limits: Limits, sizes: EngineSizes) -> tuple[float, float, float, float]:
    load = arrivals.read(trace.read_text())
    result: RatioResult = compare(LoadedFleet(1, 1, lines, sizes, PAIR_S), load, limits, BACK_S)
    return (result.goodput, *result.ttft, result.tpot[0])


def _words(line: StepLine) -> str:
    return f"{line.base * 1e3:.3g} ms and {line.slope * 1e3:.3g} ms"
