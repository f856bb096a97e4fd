# SPDX-License-Identifier: Apache-2.0
"""docs/kinds.md names tests that are there, faults that are planted, and the sizes that the tests' marks say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.mutations import ALL

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "kinds.md").read_text()


def test_each_test_that_is_named_is_there() -> None:
    there = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 10 and not named - there


def test_each_planted_fault_that_is_named_is_one_of_the_simulators() -> None:
    text = " ".join(PAGE.partition("Faults planted in the simulator")[2].partition("\n\n")[0].split())
    faults = text.partition(": ")[2].rstrip(".").split("; ")
    names = {mutation.name for mutation in ALL.values()}
    assert len(faults) > 10
    for fault in faults:
        assert fault.split(", of")[0] in names, fault


@pytest.mark.ci  # it imports what the tests of engines import
def test_the_table_of_sizes_is_that_of_the_marks() -> None:
    command = [sys.executable, "-m", "tools.kind_sizes", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
