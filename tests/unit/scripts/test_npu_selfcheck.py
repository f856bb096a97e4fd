# SPDX-License-Identifier: Apache-2.0
"""scripts/npu_selfcheck.sh without NPUs: a fake interpreter sets the result of each step, and the report must match."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "npu_selfcheck.sh"
STEPS = ("machine", "build", "load", "ops", "exchange", "transfer", "revocation", "pair")
SMI = """
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.6        40                0    / 0             |
"""

# Runs real Python for the self-check's own program; everything else ends as the file "plan" says.
PRETENDED = """#!{python}
import os, sys, time
words = sys.argv[1:]
if words and words[0].endswith("npu_selfcheck.py"):
    os.execv({python!r}, [{python!r}, *words])
plan = dict(line.split(" ", 1) for line in open({plan!r}).read().splitlines())
xml = [word.split("=", 1)[1] for word in words if word.startswith("--junitxml=")]
step = os.path.basename(xml[0])[:-4] if xml else "build" if "pip" in words else "load" if "use_own_kernels" in words[-1] else "machine"
case = plan.get(step, "pass")
print("words of", step)
print("figure: " + step + ": 12.3 GB/s")
if case == "hang":
    time.sleep(600)
inner = {{"fail": "<failure message='no'/>", "skip": "<skipped message='needs two NPUs'/>"}}.get(case, "")
if xml and case != "silent":
    open(xml[0], "w").write("<testsuites><testsuite><testcase name='t1'>" + inner + "</testcase></testsuite></testsuites>")
sys.exit(case in ("fail", "silent", "broken"))
"""


class Host:
    """A folder with a fake interpreter and npu-smi."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        self.plan = folder / "plan"
        self.plan.write_text("")
        self._program("python", PRETENDED.format(python=sys.executable, plan=str(self.plan)))
        self._program("npu-smi", f"#!/bin/sh\ncat <<'END'\n{SMI}END\n")

    def _program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *arguments: str, **ends: str) -> subprocess.CompletedProcess[str]:
        self.plan.write_text("".join(f"{step} {end}\n" for step, end in ends.items()))
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PD_", "SOC_", "ASCEND", "VLLM_ASCEND"))}
        env = {**clean, "PATH": f"{self.folder}:{clean['PATH']}", "PD_PYTHON": str(self.folder / "python")}
        return subprocess.run(
            [str(SCRIPT), "--out", str(self.out), *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def report(self) -> str:
        return (self.out / "report.md").read_text()

    def verdicts(self) -> dict[str, str]:
        """Return the rows of the table above the first heading."""
        table = self.report.partition("\n## ")[0]
        rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
        return {row[0].removeprefix("| "): row[2] for row in rows}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_all_steps_pass_and_the_report_has_their_figures(host: Host) -> None:
    done = host.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert host.verdicts() == dict.fromkeys(STEPS, "passed")
    assert "Everything ran and passed." in host.report
    assert "SOC_VERSION ascend910b3" in host.report
    assert "* transfer: 12.3 GB/s" in host.report and "910B3" in host.report


def test_a_failed_step_is_reported_and_the_others_run(host: Host) -> None:
    done = host.run(ops="fail", exchange="skip")
    assert done.returncode == 1
    expected = {**dict.fromkeys(STEPS, "passed"), "ops": "FAILED", "exchange": "skipped"}
    assert host.verdicts() == expected
    assert "Not proven by this run: ops, exchange." in host.report
    assert "words of ops" in host.report and "t1: needs two NPUs" in host.report


def test_without_a_build_nothing_is_tested(host: Host) -> None:
    assert host.run(build="broken").returncode == 1
    verdicts = host.verdicts()
    assert verdicts["build"] == "FAILED" and verdicts["machine"] == "passed"
    assert {verdicts[step] for step in STEPS[2:]} == {"not run"}


def test_a_step_that_proves_nothing_is_not_passed(host: Host) -> None:
    assert host.run(pair="skip").returncode == 0
    assert host.verdicts()["pair"] == "skipped"
    assert host.run(pair="silent").returncode == 1
    assert "pytest wrote no results" in host.report or "exit code 1" in host.report


def test_chosen_steps_only(host: Host) -> None:
    assert host.run("--only", "ops,transfer").returncode == 0
    verdicts = host.verdicts()
    assert {step for step, verdict in verdicts.items() if verdict == "passed"} == {"ops", "transfer"}
    assert host.run("--only", "opps").returncode == 2


def test_a_step_that_does_not_end_is_ended_with_all_it_started(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tools import npu_selfcheck

    host.plan.write_text("ops hang\n")
    command = (str(host.folder / "python"), "-m", "pytest", f"--junitxml={tmp_path}/ops.xml")
    step = npu_selfcheck.Step("ops", "", (command,), 1.0, tests=True)
    outcome = npu_selfcheck.run(step, tmp_path, dict(os.environ))
    assert outcome.verdict == "FAILED" and outcome.why.startswith("not done after")


def test_a_dry_run_runs_nothing(host: Host) -> None:
    done = host.run("--dry-run")
    assert done.returncode == 0 and not host.out.exists()
    for step in STEPS:
        assert f"# {step}: " in done.stdout
    assert "-m pytest -m npu" in done.stdout


def test_a_host_without_npu_software_is_refused_with_the_reason(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PD_", "SOC_", "ASCEND", "VLLM_ASCEND"))}
    done = subprocess.run([str(SCRIPT)], env=clean, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "torch_npu" in done.stderr


def test_every_test_marked_npu_is_in_a_step(collected: Callable[[], set[str]]) -> None:
    from tools import npu_selfcheck

    words = [word for step in npu_selfcheck.steps("python", Path("out"), False) for c in step.commands for word in c]
    assert collected() == {word for word in words if word.startswith("tests/")}


@pytest.fixture
def collected() -> Callable[[], set[str]]:
    """Return the files that hold tests marked npu."""

    def find() -> set[str]:
        files = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.npu" in path.read_text()]
        return {str(path.relative_to(ROOT)) for path in files if path.name != Path(__file__).name}

    return find


def test_the_workflow_waits_for_all_steps() -> None:
    from tools import npu_selfcheck

    workflow = (ROOT / ".github" / "workflows" / "npu.yml").read_text()
    (minutes,) = re.findall(r"timeout-minutes: (\d+)", workflow)
    steps = npu_selfcheck.steps("python", Path("out"), given=False)
    assert 60 * int(minutes) > sum(step.timeout_s for step in steps)
