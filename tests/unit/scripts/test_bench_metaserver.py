# SPDX-License-Identifier: Apache-2.0
"""The benchmarks behind docs/metaserver.md still run and print what the page shows. No figure is checked here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(180)


def printed(*words: str) -> list[list[str]]:
    """Return the rows of all tables, cell by cell."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return [line.strip("|").split(" | ") for line in done.stdout.splitlines() if re.match(r"\| *\w", line)]


@pytest.mark.ci
def test_the_speed_of_each_system_is_printed_and_what_it_adds_over_the_engine() -> None:
    words = ["--streams", "2", "--rounds", "1", "--seconds", "0.3", "--skip", "memory", "saturation"]
    head, *rows = printed("-m", "tools.bench_metaserver", *words, "--systems", "metaserver", "example", "engine alone")
    head = [cell.strip() for cell in head]
    speeds = {(row[0].strip(), row[1]): dict(zip(head, row, strict=True)) for row in rows}
    assert set(speeds) == {
        *(("whole", name) for name in ("metaserver", "example")),
        *(("relay", name) for name in ("metaserver", "example", "engine alone")),
    }
    for (_, name), row in speeds.items():
        assert float(row["requests/s"]) > 0
        for figure in ("added p50 ms", "added p99 ms"):
            assert row[figure] == "–" if name == "engine alone" else float(row[figure]) < 1e4


def test_reservations_in_flight_are_counted_with_their_memory_and_their_stall() -> None:
    _, row = printed("-m", "tools.bench_metaserver_parts.reservations", "--count", "40", "--waves", "1")
    wave, accepted, prefilled, *figures = (float(cell) for cell in row)
    assert (wave, accepted) == (1, 40) and prefilled >= 40 and all(figure > 0 for figure in figures)


def test_the_cost_of_an_event_that_is_kept_is_printed_by_kind_also_of_another_checkout() -> None:
    words = ["--turns", "1", "--events", "20", "--beside", str(ROOT)]
    head, *rows = printed("-m", "tools.bench_metaserver_parts.kept_events", *words)
    assert [cell.strip() for cell in head] == ["µs for an event", "here", "beside"] and len(rows) == 7
    assert all(float(cell) > 0 for _, *cells in rows for cell in cells)
