# SPDX-License-Identifier: Apache-2.0
"""scripts/bench_fanout.sh: what it prints comes from completed pushes over the real Mooncake."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.ci
@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="Mooncake is not installed")
def test_it_measures_each_number_of_destinations() -> None:
    flags = ["--destinations", "1", "6", "--rounds", "1", "--steps", "2", "--tokens", "40", "--layers", "2"]
    command = [str(ROOT / "scripts" / "bench_fanout.sh"), *flags]
    env = {**os.environ, "PD_PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True)
    rows = [[float(cell) for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == [1, 6]
    for count, first, step, each, _, _, sockets, catch_ups in rows:
        assert first > 0 and step > 0 and abs(each - step / count) < 0.1 and catch_ups >= 0
        assert sockets >= 2 * count, "each of them writes over a connection of its own"
