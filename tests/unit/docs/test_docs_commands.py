# SPDX-License-Identifier: Apache-2.0
"""Commands in the pages, in blocks and in sentences: each program exists and knows its flags, or there is a reason."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.kits.flags import flags_of, subcommands
from vllm_ascend_pd.cli.__main__ import parser

ROOT = Path(__file__).resolve().parents[3]
PAGES = subprocess.run(
    ("git", "-C", str(ROOT), "ls-files", "*.md"), check=True, capture_output=True, text=True
).stdout.split()
UNCHECKED = {
    "pip": "installs from a package index",
    "python3.12": "an interpreter that this machine need not have",
    ".venv/bin/pip": "builds a wheel; test_packaging_build.py does that",
    "/tmp/other/bin/pip": "installs from a package index, for an interpreter that this machine need not have",
    "bin/python": "that interpreter",
    "docker": "needs a daemon, and bases from a registry",
    "kubectl": "needs a cluster",
    "vllm": "vLLM's own; test_examples.py gives its flags to vLLM's parser",
    "curl": "needs a running metaserver; test_metaserver_admin.py calls the same routes",
}
OF_SHELLS, OF_SYSTEMS = "a word of every shell", "comes with the system"
# What a block of commands may have besides; it does not make a block one of commands.
PLAIN = {
    "cd": OF_SHELLS,
    "cp": OF_SYSTEMS,
    "done": OF_SHELLS,
    "export": OF_SHELLS,
    "for": OF_SHELLS,
    "od": OF_SYSTEMS,
    "rm": OF_SYSTEMS,
    "tr": OF_SYSTEMS,
    "umask": OF_SHELLS,
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
    "python -m tools.bench_metaserver_parts.kept_events": "tests/unit/scripts/test_bench_metaserver.py",
    "python -m tools.kind_sizes": "tests/unit/docs/test_docs_kinds.py",
    "python -m tools.metaservers": "tests/unit/cli/test_cli_plan_load.py",
    "python -m vllm.entrypoints.openai.api_server": "tests/unit/scripts/test_scripts_roles.py",
    "python -m vllm_ascend_pd.config": "tests/unit/test_config.py",
    "python -m vllm_ascend_pd.errors": "tests/unit/test_errors.py",
    "python -m vllm_ascend_pd.router.settings": "tests/unit/router/test_metaserver_settings.py",
    "scripts/bench_fanout.sh": "tests/unit/scripts/test_bench_fanout.py",
    "scripts/bench_metaserver.sh": "tests/unit/scripts/test_bench_metaserver.py",
    "scripts/bench_planning.sh": "tests/unit/test_predecessor.py",
    "scripts/bench_regroup.sh": "tests/unit/docs/test_regroup_benefit.py",
    "scripts/compare_ascend.sh": "tests/unit/scripts/test_compare_ascend.py",
    "scripts/compare_kinds.sh": "tests/unit/scripts/test_compare_kinds.py",
    "scripts/fault_matrix.sh": "tests/integration/test_faults.py",
    "scripts/field.sh": "tests/unit/scripts/test_field.py",
    "scripts/upstream.sh": "tests/unit/scripts/test_upstream.py",
    "scripts/images.sh": "tests/unit/packaging/test_images.py",
    "scripts/release.sh": "tests/unit/packaging/test_release.py",
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
    "vllm-ascend-pd metaserver": "tests/unit/router/test_metaserver_settings.py",
    "vllm-ascend-pd plan": "tests/unit/cli/test_cli_plan.py",
    "vllm-ascend-pd sidecar": "tests/unit/router/test_sidecar.py",
    "vllm-ascend-pd trace": "tests/unit/cli/test_cli_trace.py",
}
BENCHMARK = "a benchmark of minutes: a page has what it printed"
BY_HAND = {
    ".ci/run": "it runs all tests",
    "python -m tools.bench_channel": BENCHMARK,
    "python -m tools.bench_metaserver_parts.reservations": BENCHMARK,
    "python -m tools.bench_scheduler": BENCHMARK,
    "python -m tools.bench_waiting": BENCHMARK,
    "scripts/bench_load.sh": BENCHMARK,
    "scripts/bench_long.sh": BENCHMARK,
    "scripts/bench_ops.sh": BENCHMARK,
    "scripts/bench_pair.sh": BENCHMARK,
    "scripts/bench_prefix.sh": BENCHMARK,
    "scripts/quickstart.sh": "it makes an environment; test_examples_check.py starts the same servers",
}
OURS = re.compile(r"(\./)?((scripts|tests|examples)/\S+\.sh|\.ci/run)|vllm-ascend-pd|(\.venv/bin/)?python")
ASSIGNED = re.compile(r"[A-Z_]+=\S*")
FLAG = re.compile(r"--[a-z][a-z0-9-]*")


BETWEEN = re.compile(r"[();|&]+")  # commands of one line
PROMPT = "$ "


class ShownCommand(NamedTuple):
    where: str
    words: tuple[str, ...]


def commands() -> list[ShownCommand]:
    """Return all commands in the pages' blocks, without variables in front of them."""
    return [
        ShownCommand(f"{page}:{number}", words)
        for page in PAGES
        for block in blocks((ROOT / page).read_text())
        for number, line in lines(block)
        for words in simple(line)
    ]


def blocks(text: str) -> Iterator[list[tuple[int, str]]]:
    """Yield the numbered lines of each block."""
    block: list[tuple[int, str]] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            if block:
                yield block
            block = [] if block is None else None
        elif block is not None:
            block.append((number, line))


def lines(block: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield the whole lines of a block of commands, which may go on in the next ones: behind `PROMPT`, where a block
    has that, because the others are output. A block is one of commands if one of its lines begins with a program that
    is ours or in `UNCHECKED`."""
    prompted = any(line.strip().startswith(PROMPT) for _, line in block)
    if not prompted and not any(begins(line) for _, line in block):
        return
    begun, whole = 0, ""
    for number, line in block:
        if not whole and prompted and not line.strip().startswith(PROMPT):
            continue
        begun = begun if whole else number
        whole += line if whole else line.strip().removeprefix(PROMPT)
        if whole.endswith("\\"):
            whole = whole[:-1]
        elif not closed(whole):
            whole += "\n"
        else:
            yield begun, whole
            whole = ""
    assert not whole, f"line {begun}: a quotation or a line does not end in its block"


def begins(line: str) -> bool:
    words = without_variables(line.split())
    return bool(words) and (words[0] in UNCHECKED or OURS.fullmatch(words[0]) is not None)


def closed(line: str) -> bool:
    """Return whether all quotations of a line have ended."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True


def simple(line: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands of a line, each up to a `--`: those behind it belong to another program."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words: list[str] = []
    for word in (*reader, ";"):
        if not BETWEEN.fullmatch(word):
            words.append(word)
            continue
        words = without_variables(words[1:] if words[:1] == ["do"] else words)
        if words:
            yield tuple(words[: words.index("--")] if "--" in words else words)
        words = []


def without_variables(words: list[str]) -> list[str]:
    return list(dropwhile(ASSIGNED.fullmatch, words))


def inline() -> list[ShownCommand]:
    """Return the commands with arguments that stand between backquotes in sentences, also over the end of a line."""
    shown = []
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        for quoted in re.findall(r"`([^`]+)`", prose):
            words = without_variables(split(" ".join(quoted.split())))
            if len(words) > 1 and OURS.fullmatch(words[0]):
                shown.append(ShownCommand(f"{page}: {' '.join(words)[:60]}", tuple(words)))
    return shown


def split(line: str) -> list[str]:
    """Return the words of a command without its comment; a quotation that goes on in the next line stays as it is."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.partition(" # ")[0].split()
    return words[: words.index("--")] if "--" in words else words


def program_of(words: tuple[str, ...]) -> str:
    """Return which program of ours a command starts; "" if it is one of `UNCHECKED` or of `PLAIN`."""
    name = words[0].removeprefix("./")
    if words[0] in UNCHECKED or words[0] in PLAIN:
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
    if not OURS.fullmatch(program):
        return f"{program} is not ours, and neither UNCHECKED nor PLAIN says why it may be here"
    if program == "vllm-ascend-pd":
        known_commands = subcommands(parser())
        if words[1] not in known_commands:
            return f"no command {words[1]}"
        known = " ".join(flags_of(known_commands[words[1]]))
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
    if command.words[0] not in UNCHECKED and command.words[0] not in PLAIN:
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
    assert {command.words[0] for command in commands()} >= UNCHECKED.keys() | PLAIN.keys()
    assert len(commands()) > 25


def test_each_command_of_a_block_is_found_and_no_output() -> None:
    text = """
```
A=1 make it   # and don't ask
(umask 077 && for name in a b; do sort x | scripts/test.sh "the & of a quotation" > $name; done)
curl 'over
two lines' \\
  --and three
```
```
$ scripts/test.sh --parts -- make
make no command
```
```
a picture, whose apostrophe doesn't end
```
"""
    numbered = [(number, words) for block in blocks(text) for number, line in lines(block) for words in simple(line)]
    assert [(number, words[0]) for number, words in numbered] == [
        (3, "make"),
        (4, "umask"),
        (4, "for"),
        (4, "sort"),
        (4, "scripts/test.sh"),
        (4, "done"),
        (5, "curl"),
        (10, "scripts/test.sh"),
    ]
    assert numbered[-2][1][1:] == ("over\ntwo lines", "--and", "three") and numbered[-1][1][1:] == ("--parts",)


@pytest.mark.parametrize(
    "line",
    [
        "make all",
        "/tmp/other/bin/python",
        "scripts/nothing.sh",
        "scripts/test.sh --everything",
        "vllm-ascend-pd nothing",
        "vllm-ascend-pd trace DIR --nothing",
        "python -m simulation.nothing",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    assert wrong(tuple(split(line)))
