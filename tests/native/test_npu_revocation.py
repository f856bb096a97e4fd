# SPDX-License-Identifier: Apache-2.0
"""Revocation between two NPUs, which is not proven yet. Over TCP the same program shows that it detects failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def revocation(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(HERE / "npu_revocation.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MC_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("figure: ")]
    assert lines, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.returncode, lines[-1]


def test_over_tcp_a_sleeper_hits_nothing_and_without_the_revocation_it_is_seen() -> None:
    pytest.importorskip("mooncake", reason="Mooncake is not installed")
    code, figure = revocation("--protocol", "tcp", "--megabytes", "64")
    assert code == 0 and figure.endswith("as it must be"), figure
    code, figure = revocation("--protocol", "tcp", "--megabytes", "64", "--keep")
    assert code == 1 and figure.endswith("WRONG") and " 0 bytes landed" not in figure, figure


@pytest.mark.npu
@pytest.mark.timeout(300)
def test_between_two_npus_a_sleeper_hits_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.npu.device_count() < 2:
        pytest.skip("needs two NPUs")
    code, figure = revocation("--protocol", "ascend")
    with capsys.disabled():
        print("", figure, sep="\n")
    assert code == 0, figure
