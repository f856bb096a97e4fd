# SPDX-License-Identifier: Apache-2.0
"""scripts/test.sh: which tests each of its tiers selects, shown by an interpreter that prints its arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORKING = ["-m", "not slow and not ci", "--seeds", "few"]
CI = ["-m", "not slow", "--seeds", "ci", "--skips", "listed"]
ALL = ["--skips", "listed"]
ONE = "tests/unit/test_config.py"


PYTHON = '#!/usr/bin/env bash\nprintf \'%s\\n\' "$@" "left out: $PD_LEFT_OUT"\n'
NO_ROOM = {"uname": "echo x86_64", "df": "printf 'Avail\\n  19G\\n'"}
ARM = {"uname": "echo aarch64", "df": "printf 'Avail\\n 100G\\n'"}
NEITHER = ("19 GB are free", "this machine is aarch64")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone with an environment for tests/ascend_host, and an interpreter that prints its arguments."""
    root = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "tests/ascend_host").mkdir(parents=True)
    shutil.copy(ROOT / "tests/ascend_host/environment.sh", root / "tests/ascend_host")
    for name in ("integration", "simulation", "native", "unit"):
        (root / "tests" / name).symlink_to(ROOT / "tests" / name)
    (root / ".venv-ascend-host").mkdir()
    (root / ".venv-ascend-host/.stamp").touch()
    program(tmp_path / "python", PYTHON)
    return root


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(clone: Path, *words: str, tools: dict[str, str] | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script; `tools`: programs of the host, in place of its own."""
    for name, body in (tools or {}).items():
        program(clone.parent / "bin" / name, f"#!/bin/sh\n{body}\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("PD_ASCEND_HOST", "PD_LEFT_OUT")}
    environment |= {"PD_PYTHON": str(clone.parent / "python"), "PD_DEVICE": "cpu", **more}
    environment["PATH"] = f"{clone.parent / 'bin'}:{environment['PATH']}"
    command = [str(clone / "scripts/test.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def arguments(clone: Path, *words: str, **more: str) -> list[str]:
    """Return what pytest would get, and what its summary would say is left out."""
    done = run(clone, "--no-setup", *words, **more)
    assert done.returncode == 0 and done.stdout.splitlines()[:2] == ["-m", "pytest"], done
    return done.stdout.splitlines()[2:]


@pytest.mark.parametrize(
    ("flag", "selection", "ascend"), [("", WORKING, False), ("--ci", CI, True), ("--all", ALL, True)]
)
def test_each_tier_selects_more_than_the_one_before(clone: Path, flag: str, selection: list[str], ascend: bool) -> None:
    pytest_args = arguments(clone, *([flag] if flag else []))
    assert pytest_args[: len(selection)] == selection and pytest_args[len(selection)] == "-n"
    assert ("tests/ascend_host" in pytest_args) is ascend
    assert {f"tests/{name}" for name in ("integration", "simulation", "native", "unit")} <= set(pytest_args)


def test_what_is_named_runs_as_in_ci(clone: Path) -> None:
    assert arguments(clone, ONE, "-x") == [*CI, "-x", ONE, "left out: "]
    assert arguments(clone, "--all", ONE) == [*ALL, ONE, "left out: "]


@pytest.mark.parametrize(
    ("tools", "why"), list(zip((NO_ROOM, ARM), NEITHER, strict=True)), ids=["no room", "another machine"]
)
@pytest.mark.parametrize("words", [("--ci",), ("tests/ascend_host",), ("--all",), ("--parts",)], ids=" ".join)
def test_what_has_them_fails_where_the_tests_under_vllm_ascend_cannot_run(
    clone: Path, words: tuple[str, ...], tools: dict[str, str], why: str
) -> None:
    shutil.rmtree(clone / ".venv-ascend-host")
    done = run(clone, *words, tools=tools)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and not done.stdout, done
    assert "tests/ascend_host" in last and why in last and "or set PD_ASCEND_HOST=0" in last, last


def test_without_set_up_a_missing_environment_is_a_failure_that_says_what_to_do(clone: Path) -> None:
    shutil.rmtree(clone / ".venv-ascend-host")
    done = run(clone, "--no-setup", "--all")
    assert done.returncode == 1 and not done.stdout
    assert "--no-setup makes none. Run tests/ascend_host/environment.sh, or set PD_ASCEND_HOST=0" in done.stderr


@pytest.mark.parametrize("word", ["--list", "--help"])
def test_what_runs_nothing_needs_no_environment(clone: Path, word: str) -> None:
    shutil.rmtree(clone / ".venv-ascend-host")
    done = run(clone, "--parts", word)
    assert done.returncode == 0 and done.stdout.splitlines()[:3] == ["-m", "tools.parts", word], done


def test_they_are_left_out_by_one_word_only(clone: Path) -> None:
    done = run(clone, "--no-setup", "--ci", PD_ASCEND_HOST="where-possible")
    assert done.returncode == 1 and "PD_ASCEND_HOST=where-possible: 0 or 1 is wanted" in done.stderr, done
    assert arguments(clone, "--ci", PD_ASCEND_HOST="1")[-1] == "left out: "


def test_left_out_on_purpose_is_no_failure_but_is_said(clone: Path) -> None:
    shutil.rmtree(clone / ".venv-ascend-host")
    for tools in ({}, NO_ROOM):
        for words in (["--ci"], ["--all"]):
            pytest_args = arguments(clone, *words, tools=tools, PD_ASCEND_HOST="0")
            assert "tests/ascend_host" not in pytest_args and "tests/unit" in pytest_args
            assert pytest_args[-1].startswith("left out: tests/ascend_host, on purpose")
    assert arguments(clone, PD_ASCEND_HOST="0")[-1] == "left out: ", "the quick tier never runs them"
    alone = run(clone, "tests/ascend_host", PD_ASCEND_HOST="0")
    assert alone.returncode == 1 and "nothing is left to run" in alone.stderr


def test_an_environment_that_is_there_needs_no_room(clone: Path) -> None:
    assert arguments(clone, "--ci", tools=NO_ROOM)[-1] == "left out: "
    done = subprocess.run(
        [clone / "tests/ascend_host/environment.sh", "--why-not"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PATH": f"{clone.parent / 'bin'}:{os.environ['PATH']}"},
    )
    assert done.stdout == ""


@pytest.mark.parametrize("left_out", ["", "tests/ascend_host: no room. Make room."])
def test_the_summary_ends_with_what_is_left_out(tmp_path: Path, left_out: str) -> None:
    (tmp_path / "test_one.py").write_text("import warnings\ndef test_one():\n    warnings.warn('w')\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "conftest", "-c", "/dev/null"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PD_LEFT_OUT": left_out},
    )
    *_, title, words, last = done.stdout.splitlines()  # behind warnings, failures and durations
    assert "1 passed" in last
    assert (words == left_out and " LEFT OUT " in title) if left_out else "LEFT OUT" not in done.stdout


def test_ci_runs_its_own_tier() -> None:
    assert (ROOT / ".ci" / "run").read_text().endswith("exec ./scripts/test.sh --ci\n")


@pytest.fixture
def checked(clone: Path) -> Path:
    """Return the clone as .ci/run needs it: what it would set up and check is there and good, and says so."""
    shutil.rmtree(clone / ".venv-ascend-host")
    shutil.copytree(ROOT / ".ci", clone / ".ci")
    (clone / ".github/actionlint").mkdir(parents=True)
    program(clone / ".github/actionlint/run.sh", "#!/bin/sh\nexit 0\n")
    (clone / "tests/environment.sh").touch()
    for tool in ("clang-format", "shellcheck"):
        program(clone.parent / "bin" / tool, "#!/bin/sh\n")
    subprocess.run(["git", "init", "-q", clone], check=True, timeout=60)
    return clone


def ci(clone: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/run, whose end is the arguments that pytest would get."""
    environment = {**os.environ, "PD_PYTHON": str(clone.parent / "python"), "PD_DEVICE": "cpu", **more}
    environment["PATH"] = f"{clone.parent / 'bin'}:{environment['PATH']}"
    return subprocess.run([clone / ".ci/run"], capture_output=True, text=True, check=False, timeout=60, env=environment)


@pytest.mark.parametrize(("tools", "why"), list(zip((NO_ROOM, ARM), NEITHER, strict=True)), ids=["no room", "machine"])
def test_ci_itself_fails_at_once_where_they_cannot_run(checked: Path, tools: dict[str, str], why: str) -> None:
    for name, body in tools.items():
        program(checked.parent / "bin" / name, f"#!/bin/sh\n{body}\n")
    done = ci(checked)
    assert done.returncode == 1 and why in done.stderr and "or set PD_ASCEND_HOST=0" in done.stderr, done
    assert "[lint]" not in done.stdout, "before anything that takes time"
    left_out = ci(checked, PD_ASCEND_HOST="0")
    assert left_out.returncode == 0 and "left out: tests/ascend_host, on purpose" in left_out.stdout, left_out


def test_ci_fails_where_a_linter_cannot_run(checked: Path) -> None:
    program(
        checked / ".github/actionlint/run.sh",
        "#!/bin/sh\necho 'actionlint is skipped: there is no node here'\nexit 77\n",
    )
    done = ci(checked, PD_ASCEND_HOST="0")
    assert done.returncode == 1 and "there is no node here" in done.stdout, done
    assert "[lint] failed: actionlint" in done.stdout
