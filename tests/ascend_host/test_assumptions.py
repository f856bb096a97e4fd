# SPDX-License-Identifier: Apache-2.0
"""The package's assumptions about vllm-ascend, checked in its own environment (assumptions.py). No engine is started.

docs/decisions/vllm-ascend-in-tests.md lists the assumptions that turned out wrong.
"""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest
from host_build import BASE, OLDER, HostBuild

from tools.support.spec import child_environment

# 80 s of processor time on a quiet machine: beside twenty busy processes on two cores it had not ended after 500 s.
LONGEST_S = 1500
pytestmark = pytest.mark.timeout(LONGEST_S + 100)
HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "assumptions.py"
FORKS = HERE.parent / "integration" / "plugins" / "forked"
OF = "of"  # its decorator for one release


def names(release: str) -> list[str]:
    """Return the assumptions about a release."""
    assumptions = []
    for function in ast.parse(PROGRAM.read_text()).body:
        for decorator in function.decorator_list if isinstance(function, ast.FunctionDef) else ():
            if isinstance(decorator, ast.Call):
                about = [argument.value for argument in decorator.args if isinstance(argument, ast.Constant)]
                assert isinstance(decorator.func, ast.Name) and decorator.func.id == OF and len(about) == 1
                assumptions += [function.name] if about == [release] else []
            else:
                assumptions.append(function.name)
    return assumptions


def checked(build: HostBuild) -> dict[str, str]:
    """Return the assumptions by name, with what is wrong with each."""
    env = child_environment((*build.plugins, FORKS), npu=True) | build.variables()
    for name in ("VLLM_PLUGINS", "VLLM_VERSION"):  # assumptions are about the plug-ins and the release as installed
        env.pop(name, None)
    command = [str(build.python), "-W", "ignore", str(PROGRAM)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    return {answer["name"]: answer["wrong"] for answer in map(json.loads, lines)}


@pytest.fixture(scope="module")
def wrong(build: HostBuild) -> dict[str, str]:
    return checked(build)


@pytest.fixture(scope="module")
def wrong_before(older: HostBuild) -> dict[str, str]:
    return checked(older)


@pytest.mark.parametrize("name", names(BASE))
def test_it_is_so(name: str, wrong: dict[str, str]) -> None:
    assert wrong[name] == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", names(OLDER))
def test_it_is_so_of_the_release_before(name: str, wrong_before: dict[str, str]) -> None:
    assert wrong_before[name] == ""
