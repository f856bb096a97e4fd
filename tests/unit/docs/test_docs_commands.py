# SPDX-License-Identifier: Apache-2.0
"""Commands in the pages, in blocks and in sentences: each program exists and knows its flags, or there is a reason."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm_ascend_pd.cli.__main__ import parser

ROOT = Path(__file__).resolve().parents[3]
PAGES = subprocess.run(
    ("git", "-C", str(ROOT), "ls-files", "*.md"), check=True, capture_output=True, text=True
).stdout.split()
UNCHECKED = {
    "pip": "installs from a package index",
    "python3.12": "an interpreter that this machine need not have",
    ".venv/bin/pip": "builds a wheel; test_packaging_build.py does that",
    "kubectl": "needs a cluster",
    "curl": "needs a running metaserver; test_metaserver_admin.py calls the same routes",
}
ELSEWHERE = {  # flags that a script passes on, and the file that knows them; empty: another project's
    "--junitxml": "",
    "--stagger": "tests/conftest.py",
    "--mutation": "tests/simulation/run.py",
}
# A program of ours in the pages, and the test that runs it, or what it calls. The others are run by hand: why.
RUN_BY = {
    ".venv/bin/python tests/native/npu_revocation.py": "tests/native/test_npu_revocation.py",
    "examples/check.sh": "tests/integration/test_examples_check.py",
    "examples/large-ep/decode.sh": "tests/unit/docs/test_examples.py",
    "examples/large-ep/metaserver.sh": "tests/unit/docs/test_examples.py",
    "examples/large-ep/prefill.sh": "tests/unit/docs/test_examples.py",
    "examples/two-hosts/decode.sh": "tests/unit/docs/test_examples.py",
    "examples/two-hosts/metaserver.sh": "tests/unit/docs/test_examples.py",
    "examples/two-hosts/prefill.sh": "tests/unit/docs/test_examples.py",
    "python -m build": "tests/unit/packaging/test_packaging_build.py",
    "python -m simulation.sums": "tests/simulation/test_simulation.py",
    "python -m tools.kind_sizes": "tests/unit/docs/test_docs_kinds.py",
    "python -m vllm.entrypoints.openai.api_server": "tests/unit/docs/test_examples.py",
    "python -m vllm_ascend_pd.config": "tests/unit/test_config.py",
    "python -m vllm_ascend_pd.errors": "tests/unit/test_errors.py",
    "python -m vllm_ascend_pd.metaserver.service.settings": "tests/unit/metaserver/test_metaserver_settings.py",
    "scripts/bench_fanout.sh": "tests/unit/scripts/test_bench_fanout.py",
    "scripts/bench_metaserver.sh": "tests/unit/scripts/test_bench_metaserver.py",
    "scripts/bench_planning.sh": "tests/unit/test_predecessor.py",
    "scripts/bench_regroup.sh": "tests/unit/docs/test_regroup_benefit.py",
    "scripts/compare_ascend.sh": "tests/unit/scripts/test_compare_ascend.py",
    "scripts/compare_kinds.sh": "tests/unit/scripts/test_compare_kinds.py",
    "scripts/fault_matrix.sh": "tests/integration/test_faults.py",
    "scripts/field.sh": "tests/unit/scripts/test_field.py",
    "scripts/fuzz.sh": "tests/unit/scripts/test_fuzz.py",
    "scripts/launch_1p1d.sh": "tests/unit/scripts/test_scripts_launch.py",
    "scripts/matrix.sh": "tests/unit/scripts/test_matrix.py",
    "scripts/mutate.sh": "tests/unit/scripts/test_mutate.py",
    "scripts/npu_selfcheck.sh": "tests/unit/scripts/test_npu_selfcheck.py",
    "scripts/prefill.sh": "tests/unit/scripts/test_scripts_roles.py",
    "scripts/resume.sh": "tests/integration/test_resume.py",
    "scripts/setup.sh": "tests/unit/scripts/test_scripts_setup.py",
    "scripts/simulate.sh": "tests/simulation/test_simulation.py",
    "scripts/soak.sh": "tests/integration/test_gqa.py",
    "scripts/test.sh": "tests/unit/scripts/test_scripts_test.py",
    "scripts/under_load.sh": "tests/unit/scripts/test_scripts_under_load.py",
    "tests/ascend_host/environment.sh": "tests/unit/scripts/test_scripts_test.py",
    "vllm-ascend-pd doctor": "tests/unit/cli/test_cli_doctor.py",
    "vllm-ascend-pd metaserver": "tests/unit/metaserver/test_metaserver_settings.py",
    "vllm-ascend-pd plan": "tests/unit/cli/test_cli_plan.py",
    "vllm-ascend-pd sidecar": "tests/unit/metaserver/test_sidecar.py",
    "vllm-ascend-pd trace": "tests/unit/cli/test_cli_trace.py",
}
BENCHMARK = "a benchmark of minutes: a page has what it printed"
BY_HAND = {
    ".ci/run": "it runs all tests",
    "python -m tools.bench_channel": BENCHMARK,
    "python -m tools.bench_metaserver_parts.reservations": BENCHMARK,
    "python -m tools.bench_waiting": BENCHMARK,
    "scripts/bench_long.sh": BENCHMARK,
    "scripts/bench_ops.sh": BENCHMARK,
    "scripts/bench_pair.sh": BENCHMARK,
    "scripts/bench_prefix.sh": BENCHMARK,
    "scripts/quickstart.sh": "it makes an environment; test_examples_check.py starts the same servers",
}
OURS = re.compile(r"(\./)?((scripts|tests|examples)/\S+\.sh|\.ci/run)|vllm-ascend-pd|(\.venv/bin/)?python")
ASSIGNED = re.compile(r"[A-Z_]+=\S*")
FLAG = re.compile(r"--[a-z][a-z0-9-]*")


class ShownCommand(NamedTuple):
    where: str
    words: tuple[str, ...]


def commands() -> list[ShownCommand]:
    """Return the lines of the blocks that begin with a program, without variables in front of it."""
    found = []
    for page in PAGES:
        fenced = False
        for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
                continue
            words = line.strip().removeprefix("$ ").split()
            while words and ASSIGNED.fullmatch(words[0]):
                words = words[1:]
            if fenced and words and (words[0] in UNCHECKED or OURS.fullmatch(words[0])):
                found.append(ShownCommand(f"{page}:{number}", tuple(split(" ".join(words)))))
    return found


def inline() -> list[ShownCommand]:
    """Return the commands with arguments that stand between backquotes in sentences, also over the end of a line."""
    found = []
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        for quoted in re.findall(r"`([^`]+)`", prose):
            words = split(" ".join(quoted.split()))
            while words and ASSIGNED.fullmatch(words[0]):
                words = words[1:]
            if len(words) > 1 and OURS.fullmatch(words[0]):
                found.append(ShownCommand(f"{page}: {' '.join(words)[:60]}", tuple(words)))
    return found


def split(line: str) -> list[str]:
    """Return the words of a command without its comment; a quotation that goes on in the next line stays as it is."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.partition(" # ")[0].split()
    return words[: words.index("--")] if "--" in words else words


def program_of(words: tuple[str, ...]) -> str:
    """Return which program of ours a command starts; "" if it is one of `UNCHECKED`."""
    name = words[0].removeprefix("./")
    if words[0] in UNCHECKED:
        return ""
    if name == "vllm-ascend-pd":
        return f"{name} {words[1]}"
    if name.endswith("python"):
        return f"python -m {words[2]}" if words[1] == "-m" else f"{name} {words[1]}"
    return name


def named() -> set[str]:
    """Return the programs of ours that the pages name, with arguments or alone."""
    text = "".join((ROOT / page).read_text() for page in PAGES)
    alone = {script.removeprefix("./") for script in re.findall(r"`((?:\./)?scripts/\w+\.sh)`", text)}
    return {program for one in (*commands(), *inline()) if (program := program_of(one.words))} | alone


def wrong(words: tuple[str, ...]) -> str:
    """Return what is wrong with a command of ours, or ""."""
    program, flags = words[0], [word.partition("=")[0] for word in words[1:] if FLAG.match(word)]
    if program == "vllm-ascend-pd":
        [group] = [action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
        if words[1] not in group.choices:
            return f"no command {words[1]}"
        known = " ".join(group.choices[words[1]]._option_string_actions)
    elif program in ("python", ".venv/bin/python"):
        if words[1].endswith(".py"):
            known = (ROOT / words[1]).read_text() if (ROOT / words[1]).is_file() else ""
            return "" if known else f"no file {words[1]}"
        if words[1] != "-m":
            return "it is no module"
        if words[2] == "build":  # a tool of others that makes wheels
            return ""
        if words[2].startswith("vllm."):  # an engine: its flags are vLLM's, which test_examples.py gives to its parser
            return ""
        file = next((at / f"{words[2].replace('.', '/')}.py" for at in (ROOT, ROOT / "tests")
                     if (at / f"{words[2].replace('.', '/')}.py").is_file()), None)  # fmt: skip
        if file is None:
            return f"no module {words[2]}"
        known = file.read_text()
    else:
        file = ROOT / program
        if not file.is_file() or not file.stat().st_mode & 0o100:
            return f"{program} cannot be run"
        sources = [file, ROOT / "tools" / f"{file.stem}.py", ROOT / "scripts/options.sh", ROOT / "scripts/engine.sh"]
        called = re.findall(r"[\w-]+\.sh", file.read_text())
        sources += [ROOT / "scripts" / name for name in called]
        known = "\n".join(source.read_text() for source in sources if source.is_file())
    for flag in [flag for flag in flags if flag in ELSEWHERE]:
        if ELSEWHERE[flag]:
            known += (ROOT / ELSEWHERE[flag]).read_text()
        else:
            flags.remove(flag)
    return ", ".join(f"{flag} is not known" for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", known))


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.where)
def test_the_program_of_a_command_exists_and_knows_its_flags(command: ShownCommand) -> None:
    if command.words[0] not in UNCHECKED:
        assert not wrong(command.words), " ".join(command.words)


@pytest.mark.parametrize("command", inline(), ids=lambda command: command.where)
def test_a_command_in_a_sentence_exists_and_knows_its_flags(command: ShownCommand) -> None:
    assert not wrong(command.words), " ".join(command.words)


def test_each_program_is_run_by_a_test_or_by_hand_for_a_reason() -> None:
    assert named() == RUN_BY.keys() | BY_HAND.keys() and not RUN_BY.keys() & BY_HAND.keys()
    for program, test in RUN_BY.items():
        called = program.split()[-1].split("/")[-1].removesuffix(".sh").rsplit(".", 1)[-1]
        assert called in (ROOT / test).read_text() or "unit/cli" in test, f"{test} does not run {program}"


def test_every_reason_is_still_needed() -> None:
    assert {command.words[0] for command in commands()} >= UNCHECKED.keys()
    assert len(commands()) > 25


@pytest.mark.parametrize(
    "line",
    [
        "scripts/nothing.sh",
        "scripts/test.sh --everything",
        "vllm-ascend-pd nothing",
        "vllm-ascend-pd trace DIR --nothing",
        "python -m simulation.nothing",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    assert wrong(tuple(split(line)))
