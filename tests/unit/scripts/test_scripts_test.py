# SPDX-License-Identifier: Apache-2.0
"""scripts/test.sh: which tests each of its tiers selects, shown by an interpreter that prints its arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORKING = ["-m", "not slow and not ci", "--seeds", "few"]
CI = ["-m", "not slow", "--seeds", "ci"]
ONE = "tests/unit/test_config.py"


def arguments(folder: Path, *words: str) -> list[str]:
    """Return what pytest would get."""
    python = folder / "python"
    python.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    environment = {**os.environ, "PD_PYTHON": str(python), "PD_DEVICE": "cpu"}
    command = [str(ROOT / "scripts" / "test.sh"), "--no-setup", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert done.stdout.splitlines()[:2] == ["-m", "pytest"], done.stdout
    return done.stdout.splitlines()[2:]


@pytest.mark.parametrize(
    ("flag", "selection", "ascend"), [("", WORKING, False), ("--ci", CI, True), ("--all", [], True)]
)
def test_each_tier_selects_more_than_the_one_before(
    tmp_path: Path, flag: str, selection: list[str], ascend: bool
) -> None:
    found = arguments(tmp_path, *([flag] if flag else []))
    assert found[: len(selection)] == selection and found[len(selection)] == "-n"
    assert ("tests/ascend_host" in found) is ascend
    assert {f"tests/{name}" for name in ("integration", "simulation", "native", "unit")} <= set(found)


def test_what_is_named_runs_as_in_ci(tmp_path: Path) -> None:
    assert arguments(tmp_path, ONE, "-x") == [*CI, "-x", ONE]
    assert arguments(tmp_path, "--all", ONE) == [ONE]


def test_ci_runs_its_own_tier() -> None:
    assert (ROOT / ".ci" / "run").read_text().endswith("exec ./scripts/test.sh --ci\n")
