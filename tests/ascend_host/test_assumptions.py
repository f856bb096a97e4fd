# SPDX-License-Identifier: Apache-2.0
"""The package's assumptions about vllm-ascend, checked in its own environment (assumptions.py). No engine is started.

docs/decisions.md lists the assumptions that turned out wrong.
"""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest
from host_build import INTERPRETER, HostBuild

from tools.support.spec import child_environment

# 80 s of processor time on a quiet machine: beside twenty busy processes on two cores it had not ended after 500 s.
LONGEST_S = 1500
pytestmark = pytest.mark.timeout(LONGEST_S + 100)
PROGRAM = Path(__file__).resolve().parent / "assumptions.py"
FUNCTIONS = [node for node in ast.parse(PROGRAM.read_text()).body if isinstance(node, ast.FunctionDef)]
NAMES = [node.name for node in FUNCTIONS if node.decorator_list]


@pytest.fixture(scope="module")
def wrong(build: HostBuild) -> dict[str, str]:
    """Return the failed assumptions by name, with the reason."""
    env = child_environment(build.plugins, npu=True) | build.variables()
    for name in ("VLLM_PLUGINS", "VLLM_VERSION"):  # assumptions are about the plug-ins and the release as installed
        env.pop(name, None)
    command = [str(INTERPRETER), "-W", "ignore", str(PROGRAM)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert done.returncode == 0 and lines, done.stdout[-2000:] + done.stderr[-4000:]
    return {answer["name"]: answer["wrong"] for answer in map(json.loads, lines)}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_so(name: str, wrong: dict[str, str]) -> None:
    assert wrong[name] == ""
