# SPDX-License-Identifier: Apache-2.0
"""under_load.sh: counts runs, keeps their output, and leaves no busy process behind, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/under_load.sh"
DEADLINE = 60


def start(out: Path, *words: str) -> subprocess.Popen[str]:
    # A shell cannot trap signals that are ignored when it starts, as SIGINT is in a background job.
    command = ["env", "--default-signal=INT", str(SCRIPT), "--out", str(out), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(said: str) -> None:
    """Check that the busy processes in its output have ended."""
    pids = re.search(r"\(pids ([\d ]+)\)", said)
    assert pids is not None, said
    for pid in pids[1].split():
        assert not Path("/proc", pid).exists()


def test_every_run_is_counted_and_its_output_kept(tmp_path: Path) -> None:
    run = start(
        tmp_path / "out", "--runs", "3", "--busy", "2", "--", "sh", "-c", "echo first; echo its last words; echo"
    )
    said, _ = run.communicate(timeout=DEADLINE)
    assert run.returncode == 0, said
    lines = said.splitlines()
    assert lines[-1] == "3 of 3"
    assert [re.sub(r"\d+ s", "N s", line) for line in lines[1:-1] if line.startswith("run")] == [
        f"run {number}: exit code 0, N s, its last words" for number in (1, 2, 3)
    ]
    assert (tmp_path / "out/run-3.log").read_text() == "first\nits last words\n\n"
    ended(said)


def test_one_run_that_fails_makes_the_exit_code_1(tmp_path: Path) -> None:
    once = f"test -e {tmp_path}/was && exit 7; touch {tmp_path}/was"
    run = start(tmp_path / "out", "--runs", "2", "--busy", "1", "--", "sh", "-c", once)
    said, _ = run.communicate(timeout=DEADLINE)
    assert run.returncode == 1 and said.splitlines()[-1] == "1 of 2" and "run 2: exit code 7" in said
    ended(said)


def test_a_run_past_its_deadline_is_ended_and_counts_as_failed(tmp_path: Path) -> None:
    run = start(tmp_path / "out", "--runs", "1", "--busy", "1", "--deadline", "1", "--", "sleep", "1000")
    said, _ = run.communicate(timeout=DEADLINE)
    assert run.returncode == 1 and "run 1: exit code 124" in said and "ended by the deadline" in said
    ended(said)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_the_busy_processes(tmp_path: Path, number: signal.Signals, code: int) -> None:
    pipe = tmp_path / "pid"
    os.mkfifo(pipe)
    run = start(tmp_path / "out", "--runs", "1", "--busy", "2", "--", "sh", "-c", f"echo $$ >{pipe}; exec sleep 1000")
    pid = pipe.read_text().strip()  # the run has begun
    run.send_signal(number)
    said, _ = run.communicate(timeout=DEADLINE)
    assert run.returncode == code, said
    assert not Path("/proc", pid).exists()
    ended(said)


@pytest.mark.parametrize(
    ("words", "why"),
    [(["--runs", "x", "--", "true"], "--runs x"), (["--runs", "0", "--", "true"], "at least one"), ([], "a command")],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, words: list[str], why: str) -> None:
    run = start(tmp_path / "out", *words)
    said, _ = run.communicate(timeout=DEADLINE)
    assert run.returncode == 2 and why in said


def test_help_names_every_flag(tmp_path: Path) -> None:
    said, _ = start(tmp_path / "out", "--help").communicate(timeout=DEADLINE)
    assert all(flag in said for flag in ("--runs", "--busy", "--deadline", "--out"))
