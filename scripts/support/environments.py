# SPDX-License-Identifier: Apache-2.0
"""Interpreters of environments beside the main one: other releases of vLLM, and Ray."""

from __future__ import annotations

import os
import subprocess

from scripts.support.models import ROOT

NEWEST = "0.32.0"  # the main environment's vLLM
RELEASES = ("0.23.0", "0.26.0", "0.29.0", "0.31.0", "0.33.0")  # that others have
# A scheduled job asks for the newest wheel, whichever that is by then.
ASKED = (*RELEASES, "latest") if os.environ.get("PD_LATEST") else RELEASES
SETUP_S = 1200.0  # longer than the set-up waits for another one


def beside(name: str, *options: str) -> str:
    """Set it up if need be; tests/environment.sh has the names. Raises RuntimeError with what went wrong."""
    command = [str(ROOT / "tests" / "environment.sh"), name, *options]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SETUP_S)
    if made.returncode:
        raise RuntimeError(made.stderr)
    return made.stdout.strip()
