# SPDX-License-Identifier: Apache-2.0
"""Interpreters of the environments beside the main one: other releases of vLLM, and Ray."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tools.support.models import ROOT

NEWEST = "0.32.0"  # the main environment's vLLM
RELEASES = ("0.23.0", "0.30.0", "0.33.0")  # with environments of their own
# A scheduled job also tests the newest wheel of the day.
ASKED = (*RELEASES, "latest") if os.environ.get("PD_LATEST") else RELEASES
SETUP_S = 1200.0  # longer than the set-up waits for another set-up to end


def beside(name: str, *options: str) -> str:
    """Return the interpreter of an environment, and set that up if needed.

    tests/environment.sh lists the names. Raises RuntimeError with the output of a set-up that failed.
    """
    return _made("tests/environment.sh", name, *options)


def second_runner() -> tuple[Path, Path]:
    """Return the folders in front of PYTHONPATH with which vLLM's second model runner runs on a CPU, by Triton."""
    (packages,) = Path(beside("triton")).parents[1].glob("lib/python*/site-packages")
    return ROOT / "tests/integration/plugins/interpreted", packages


def of_vllm_ascend(release: str) -> str:
    """Return the same of an environment of vllm-ascend, which runs on a CANN in host memory."""
    return _made("tests/ascend_host/environment.sh", release)


def _made(script: str, *words: str) -> str:
    made = subprocess.run([str(ROOT / script), *words], capture_output=True, text=True, check=False, timeout=SETUP_S)
    if made.returncode:
        raise RuntimeError(made.stderr)
    return made.stdout.strip()
