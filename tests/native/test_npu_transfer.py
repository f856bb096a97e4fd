# SPDX-License-Identifier: Apache-2.0
"""Mooncake between two NPUs: correct bytes, and the speed. Over TCP the same program shows that it detects failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def transfer(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(HERE / "npu_transfer.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MC_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    lines = done.stdout.strip().splitlines()
    assert lines[-1] == "ok"
    return [line for line in lines if line.startswith("figure: ")]


def test_the_program_writes_and_compares_over_tcp() -> None:
    pytest.importorskip("mooncake", reason="Mooncake is not installed")
    figures = transfer("--protocol", "tcp", "--megabytes", "16")
    assert len(figures) == 4
    assert all(line.endswith("checksums equal") for line in figures)


@pytest.mark.npu
@pytest.mark.timeout(300)
def test_writes_between_two_npus_arrive_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.npu.device_count() < 2:
        pytest.skip("needs two NPUs")
    figures = transfer("--protocol", "ascend")
    with capsys.disabled():
        print("", *figures, sep="\n")
