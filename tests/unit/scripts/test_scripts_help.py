# SPDX-License-Identifier: Apache-2.0
"""--help of every script that a person types: it shows each flag; it installs, starts and writes nothing."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TYPED = {path.stem: path.read_text() for path in sorted(ROOT.glob("scripts/*.sh")) if os.access(path, os.X_OK)}
OTHER = {"test": ["--parts"], "simulate": ["--front"]}  # a first word with which a script has another parser
NOT_OF = {"prefill": {"--metaserver", "--policy", "--side-channel-port"}}  # lines of engine.sh's table for D
CALLED = ("apt-get", "flock", "nginx", "pip", "python", "python3", "python3.11", "setsid")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone without an environment, and beside it programs that only note that they were called."""
    root, programs = tmp_path / "clone", tmp_path / "bin"
    programs.mkdir()
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("docs", "tests", "tools", "vllm_ascend_pd"):
        (root / name).symlink_to(ROOT / name)
    for program in CALLED:
        (programs / program).write_text(f'#!/bin/sh\necho "{program} $*" >>"{tmp_path}/called"\nexit 1\n')
        (programs / program).chmod(0o755)
    return root


def state(clone: Path) -> dict[Path, int]:
    """Return what a script could write, with the time for a file: of the clone, and where its links lead.

    A folder's time also changes with the compiled modules that other tests' imports put there.
    """
    roots = (clone, *(ROOT / name for name in ("docs", "tools", "vllm_ascend_pd")), Path(sys.prefix) / ".stamps")
    paths = (path for root in roots for path in root.rglob("*") if "__pycache__" not in path.parts)
    return {path: 0 if path.is_dir() else path.lstat().st_mtime_ns for path in paths}


def shown(clone: Path, name: str, *words: str) -> str:
    """Return what --help prints, and check that nothing else has happened."""
    before = state(clone)
    quiet = ("PD_", "VLLM_ASCEND_PD_", "ASCEND_", "PYTHON")
    env = {key: value for key, value in os.environ.items() if not key.startswith(quiet)}
    env |= {"PATH": f"{clone.parent / 'bin'}:{env['PATH']}", "PYTHONDONTWRITEBYTECODE": "1", "VLLM_ASCEND_PD_NPU": "0"}
    command = [clone / "scripts" / f"{name}.sh", *words, "--help"]
    done = subprocess.run(command, env=env, cwd=clone.parent, check=False, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert state(clone) == before
    assert not (called := clone.parent / "called").exists(), called.read_text()
    return done.stdout


def flags(name: str) -> set[str]:
    """Return the flags of a script: of its table, of its `case`, and of the parsers of its programs."""
    text = TYPED[name] + ((ROOT / "scripts/engine.sh").read_text() if "engine.sh" in TYPED[name] else "")
    accepted = {f"--{flag}" for flag in re.findall(r'"([a-z][a-z-]*)[*!]?\|', text)} - NOT_OF.get(name, set())
    accepted |= set(re.findall(r"^ +(--[a-z-]+)\)", TYPED[name], re.MULTILINE))
    for module in re.findall(
        r"(?:tools[./]|simulation\.)[a-z_.]+", re.sub(r"^#.*", "", TYPED[name], flags=re.MULTILINE)
    ):
        path = module.removesuffix(".py").replace(".", "/") + ".py"
        accepted |= of_parser((ROOT / path if (ROOT / path).is_file() else ROOT / "tests" / path).read_text())
    return accepted


def of_parser(source: str) -> set[str]:
    return {
        word.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument")
        if "argparse.SUPPRESS" not in map(ast.unparse, (given.value for given in node.keywords))
        for word in node.args
        if isinstance(word, ast.Constant) and isinstance(word.value, str) and word.value.startswith("--")
    }


def missing(name: str, text: str) -> set[str]:
    return {flag for flag in flags(name) if not re.search(rf"(?<![\w-]){flag}(?![\w-])", text)}


@pytest.mark.parametrize("name", TYPED)
def test_help_shows_every_flag_and_does_nothing_else(name: str, clone: Path) -> None:
    (clone / ".venv").symlink_to(sys.prefix)
    assert flags(name) or name == "setup", "the test does not find the script's flags"
    text = shown(clone, name) + (shown(clone, name, *OTHER[name]) if name in OTHER else "")
    assert missing(name, text) == set()


@pytest.mark.parametrize("name", TYPED)
def test_help_in_a_new_clone_says_what_is_known_without_an_environment(name: str, clone: Path) -> None:
    text = shown(clone, name)
    assert len(text.splitlines()) > 1
    assert "The flags are known once scripts/setup.sh" in text or not missing(name, text)


def test_help_in_half_an_environment_says_so(clone: Path) -> None:
    """A set-up was interrupted: its interpreter is there, and nothing that a parser imports."""
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/python").symlink_to(sys.executable)
    (clone / ".venv/pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    assert "The flags are known once scripts/setup.sh test has run." in shown(clone, "matrix")
