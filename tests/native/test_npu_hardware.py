# SPDX-License-Identifier: Apache-2.0
"""Real NPUs: the ops against the CPU's, by both paths, and the exchange over HCCL among all local devices.

The scenarios are those of test_npu_binding.py, without stand-ins.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

pytestmark = [pytest.mark.npu, pytest.mark.timeout(900)]


def devices() -> int:
    import torch

    return int(torch.npu.device_count())


@pytest.fixture
def scenario(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    def run(name: str) -> str:
        done = subprocess.run(
            [sys.executable, str(HERE / "npu_program.py"), name],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}"},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        lines = done.stdout.strip().splitlines()
        with capsys.disabled():  # the self-check collects these lines
            print(*(f"\n{line}" for line in lines if line.startswith("figure: ")), sep="", end="\n")
        return lines[-1].removeprefix(f"{name}: ")

    return run


@pytest.mark.parametrize("name", ["copies", "formats", "schemas"])
def test_the_default_path_is_right(scenario: Callable[[str], str], name: str) -> None:
    """torch_npu's gather of pages, and copies."""
    said = scenario(name)
    assert said == "ok" or said.startswith("npu::npu_gather_pa_kv_cache(")


@pytest.mark.parametrize("name", ["equal_to_cpu", "dtypes"])
def test_the_kernels_are_right(scenario: Callable[[str], str], name: str) -> None:
    assert scenario(name) == "ok"


def test_the_kernels_refuse_what_the_cpu_refuses(scenario: Callable[[str], str]) -> None:
    if devices() < 2:
        pytest.skip("needs two NPUs: it names a cache on another one")
    assert scenario("refusals") == "ok"


def test_the_speed_of_the_ops_is_reported(scenario: Callable[[str], str]) -> None:
    assert scenario("speed") == "ok"


@pytest.mark.parametrize("name", ["exchange over all devices", "exchange over all devices, own kernels"])
def test_the_exchange_over_hccl_is_right(scenario: Callable[[str], str], name: str) -> None:
    if devices() < 2:
        pytest.skip("needs two NPUs")
    assert scenario(name) == "ok"
