# SPDX-License-Identifier: Apache-2.0
"""Interpreters of environments beside the main one: other releases of vLLM, and Ray."""

from __future__ import annotations

import subprocess

from scripts.support.models import ROOT

SETUP_S = 800.0


def beside(name: str, *options: str) -> str:
    """Set it up if need be; tests/environment.sh has the names. Raises RuntimeError with what went wrong."""
    command = [str(ROOT / "tests" / "environment.sh"), name, *options]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SETUP_S)
    if made.returncode:
        raise RuntimeError(made.stderr)
    return made.stdout.strip()
