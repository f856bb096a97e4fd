# SPDX-License-Identifier: Apache-2.0
"""Steps of scripts/npu_selfcheck.sh, each in a process of its own, and the report of their results.

A failed step does not prevent later ones, except that nothing can be tested without a build. A skipped step is reported
with its reason as not proven. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAIL = 40  # lines of a failed step's log in the report

VERSIONS = """
import importlib.metadata as m
for name in ("torch", "torch_npu", "vllm", "vllm-ascend", "mooncake-transfer-engine-npu", "mooncake-transfer-engine"):
    try:
        print(name, m.version(name))
    except m.PackageNotFoundError:
        print(name, "is not installed")
import torch, torch_npu
print("devices:", torch.npu.device_count(), *{torch.npu.get_device_name(i) for i in range(torch.npu.device_count())})
"""
LOAD = """
import torch, torch_npu
from vllm_ascend_pd.regroup import ops
ops.use_own_kernels(True)
print("figure: kernels: registered for the NPU:", ", ".join(ops.NAMES), "| vector cores:", torch.ops.vllm_ascend_pd.vector_cores())
"""


@dataclass(frozen=True)
class Step:
    """Commands that run one after the other. `tests`: the last one is pytest."""

    name: str
    what: str
    commands: tuple[tuple[str, ...], ...]
    timeout_s: float
    tests: bool = False
    needs: str = ""  # a step that must have passed before


@dataclass
class StepOutcome:
    verdict: str  # passed, FAILED, skipped, not run
    seconds: float = 0.0
    why: str = ""
    figures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)


def steps(python: str, out: Path, given: bool) -> list[Step]:
    """Return the steps. `given`: the interpreter is the caller's own, so scripts/setup.sh installs nothing into it."""

    def tests(name: str, what: str, *selection: str, timeout_s: float) -> Step:
        command = (python, "-m", "pytest", "-m", "npu", "-rs", f"--junitxml={out / name}.xml", *selection)
        return Step(name, what, (command,), timeout_s, tests=True, needs="build")

    pip = (
        python,
        "-m",
        "pip",
        "install",
        "--no-build-isolation",
        "--upgrade-strategy",
        "only-if-needed",
        "-e",
        ".[test]",
    )
    build = pip if given else ("scripts/setup.sh", "test")
    hardware = "tests/native/test_npu_hardware.py"
    return [
        Step("machine", "driver, chips, versions", (("npu-smi", "info"), (python, "-c", VERSIONS)), 300),
        Step("build", "the package with its AscendC kernels", (build,), 1800),
        Step("load", "the kernels are registered for the NPU", ((python, "-c", LOAD),), 300, needs="build"),
        tests("ops", "both paths against the CPU's ops", hardware, "-k", "not exchange", timeout_s=3600),
        tests("exchange", "HCCL among all local devices", hardware, "-k", "exchange", timeout_s=1800),
        tests("transfer", "Mooncake between two devices", "tests/native/test_npu_transfer.py", timeout_s=600),
        tests("revocation", "a sleeping writer is shut out", "tests/native/test_npu_revocation.py", timeout_s=600),
        tests("pair", "real engines through vllm-ascend", "tests/ascend_host/test_npu_pairs.py", timeout_s=21600),
    ]


def environment(given: bool) -> dict[str, str]:
    env = dict(os.environ)
    if not given:
        env.pop("PD_PYTHON", None)  # scripts/setup.sh would take it for the caller's and install nothing
    return env


def run(step: Step, out: Path, env: dict[str, str]) -> StepOutcome:
    """Run commands until one fails. Output goes to a log, progress to the terminal."""
    log, begun = out / f"{step.name}.log", time.monotonic()
    why = ""
    with log.open("w") as stream:
        for command in step.commands:
            stream.write(f"$ {shlex.join(command)}\n")
            stream.flush()
            why = _call(command, stream.fileno(), env, step.timeout_s - (time.monotonic() - begun))
            if why:
                break
    lines = log.read_text(errors="replace").splitlines()
    outcome = StepOutcome("FAILED" if why else "passed", time.monotonic() - begun, why)
    outcome.figures = [line.removeprefix("figure: ") for line in lines if line.startswith("figure: ")]
    if step.tests:
        _read_results(out / f"{step.name}.xml", outcome)
    if outcome.verdict == "FAILED":
        outcome.tail = lines[-TAIL:]
    return outcome


def _call(command: Sequence[str], output: int, env: dict[str, str], timeout_s: float) -> str:
    """Return the reason of a failure, or "". A command that takes too long is ended with its children."""
    try:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    try:
        code = child.wait(max(1.0, timeout_s))
    except BaseException as error:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"not done after {timeout_s:.0f} s"
    return "" if code == 0 else f"exit code {code}"


def _read_results(path: Path, outcome: StepOutcome) -> None:
    """Read pytest's results. A step in which no test ran has proven nothing, whatever the exit code is."""
    if not path.is_file():
        outcome.verdict, outcome.why = "FAILED", outcome.why or "pytest wrote no results"
        return
    cases = list(ElementTree.parse(path).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    for case in cases:
        skip = case.find("skipped")
        if skip is not None:
            outcome.skipped.append(f"{case.get('name')}: {skip.get('message', '')}")
    ran = len(cases) - len(outcome.skipped)
    if failed:
        outcome.verdict = "FAILED"
        outcome.why = f"{len(failed)} of {ran} tests failed: " + ", ".join(str(case.get("name")) for case in failed)
    elif outcome.verdict == "passed":
        outcome.verdict = "passed" if ran else "skipped"
        outcome.why = f"{ran} tests" if ran else "no test could run"


def check(chosen: Sequence[Step], wanted: set[str], out: Path, env: dict[str, str]) -> dict[str, StepOutcome]:
    outcomes: dict[str, StepOutcome] = {}
    for step in chosen:
        lacking = outcomes.get(step.needs)
        if wanted and step.name not in wanted:
            outcomes[step.name] = StepOutcome("not run", why="not asked for")
        elif lacking is not None and lacking.verdict == "FAILED":
            outcomes[step.name] = StepOutcome("not run", why=f"{step.needs} failed")
        else:
            print(f"[self-check] {step.name}: {step.what} …", flush=True)
            outcomes[step.name] = run(step, out, env)
        outcome = outcomes[step.name]
        print(f"[self-check] {step.name}: {outcome.verdict}, {outcome.seconds:.0f} s {outcome.why}", flush=True)
        for line in outcome.figures:
            print(f"[self-check]   {line}", flush=True)
    return outcomes


def report(chosen: Sequence[Step], outcomes: dict[str, StepOutcome], out: Path) -> str:
    """Return one page, ready to be attached to an issue."""
    unproven = [name for name, outcome in outcomes.items() if outcome.verdict != "passed"]
    lines = [
        "# Self-check on Ascend NPUs",
        "",
        f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}, {platform.machine()}, Python {platform.python_version()}, "
        f"SOC_VERSION {os.environ.get('SOC_VERSION', 'not set')}, CANN {os.environ.get('ASCEND_HOME_PATH', 'not set')}",
        "",
        "Everything ran and passed." if not unproven else f"Not proven by this run: {', '.join(unproven)}.",
        "",
        "| step | what | verdict | seconds | |",
        "|---|---|---|---|---|",
    ]
    for step in chosen:
        outcome = outcomes[step.name]
        lines.append(f"| {step.name} | {step.what} | {outcome.verdict} | {outcome.seconds:.0f} | {outcome.why} |")
    figures = [line for step in chosen for line in outcomes[step.name].figures]
    if figures:
        lines += ["", "## Figures", "", *(f"* {line}" for line in figures)]
    skipped = [line for step in chosen for line in outcomes[step.name].skipped]
    if skipped:
        lines += ["", "## Skipped, and so not proven", "", *(f"* {line}" for line in skipped)]
    for step in chosen:
        if outcomes[step.name].tail:
            lines += ["", f"## The end of {step.name}.log", "", "```", *outcomes[step.name].tail, "```"]
    machine = out / "machine.log"
    if machine.is_file():
        lines += ["", "## The machine", "", "```", *machine.read_text(errors="replace").splitlines(), "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", default="", help="steps, separated by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "npu-selfcheck")
    args = parser.parse_args()
    out, given = args.out.absolute(), bool(os.environ.get("PD_GIVEN"))
    chosen = steps(os.environ.get("PD_PYTHON", sys.executable), out, given)
    wanted = {word for word in args.only.split(",") if word}
    if wanted - {step.name for step in chosen}:
        parser.error(f"no such step: {', '.join(sorted(wanted - {step.name for step in chosen}))}")
    if args.dry_run:
        for step in chosen:
            if not wanted or step.name in wanted:
                print(f"# {step.name}: {step.what} (at most {step.timeout_s:.0f} s)")
                print(*(shlex.join(command) for command in step.commands), sep="\n")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.log"), *out.glob("*.xml"), out / "report.md"):
        old.unlink(missing_ok=True)
    outcomes = check(chosen, wanted, out, environment(given))
    (out / "report.md").write_text(report(chosen, outcomes, out))
    print(f"[self-check] report: {out / 'report.md'}", flush=True)
    return int(any(outcome.verdict == "FAILED" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
