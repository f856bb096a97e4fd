# SPDX-License-Identifier: Apache-2.0
"""The NPU binding, compiled against the real torch_npu wheel and run on stand-ins for CANN beneath it.

What this shows: dispatch, checks, tiling, launch through the OpCommand queue, streams, events, HCCL calls. What it does
not: that bisheng compiles the kernels, or that a device does what the emulation does.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from npu_build import Build, interpreter

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def build() -> Build:
    python = interpreter()
    if python is None:
        pytest.skip("needs torch 2.13.0, which the torch_npu of this test belongs to")
    return Build(python).ensure()


def scenario(build: Build, name: str, **environment: str) -> str:
    done = subprocess.run(
        [str(build.python), "-W", "ignore", str(HERE / "npu_program.py"), name],
        env=build.environment() | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{name} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def counted(build: Build) -> dict[str, str]:
    """Two scenarios during which the binding counts its lines."""
    build.forget_counts()
    return {name: scenario(build, name) for name in ("equal_to_cpu", "refusals")}


def test_every_op_computes_what_the_cpu_computes(counted: dict[str, str]) -> None:
    assert counted["equal_to_cpu"] == "ok"


def test_any_dtype_is_bytes(build: Build) -> None:
    assert scenario(build, "dtypes") == "ok"


def test_what_the_cpu_refuses_the_npu_refuses(counted: dict[str, str]) -> None:
    assert counted["refusals"] == "ok"


def test_every_line_of_the_binding_runs(
    build: Build, counted: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(counted.values()) == {"ok"}
    found = build.uncovered()
    with capsys.disabled():
        print()
        for file, (share, missed) in sorted(found.items()):
            print(f"  {file}: {share:.0%} of the lines ran", *(f"    {line}" for line in missed), sep="\n")
    assert found["npu/binding.cpp"][0] == 1


def test_without_the_kernels_nothing_falls_back_to_the_cpu(build: Build) -> None:
    assert scenario(build, "no_silent_fallback", VLLM_ASCEND_PD_NPU_LIBRARY="/nowhere/_C_npu.so") == "ok"


def test_streams_are_ordered_by_events_only(build: Build) -> None:
    assert scenario(build, "streams", STAND_IN_DELAY_US="3000") == "ok"


@pytest.mark.parametrize("name", ["exchange2", "exchange4", "exchange2 by copies"])
def test_gather_exchange_over_hccl_assemble(build: Build, name: str) -> None:
    assert scenario(build, name, STAND_IN_DEVICES="4", STAND_IN_DELAY_US="200") == "ok"


def test_the_default_path_of_copies_computes_what_the_cpu_computes(build: Build) -> None:
    assert scenario(build, "copies") == "ok"


def test_the_op_of_the_default_path_is_declared_as_expected(build: Build) -> None:
    schema = scenario(build, "schemas")
    assert schema.startswith(
        "npu::npu_gather_pa_kv_cache(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
        "Tensor(a!) key, Tensor(b!) value, *, "
    )


@pytest.mark.slow
def test_setup_py_builds_a_library_that_works(build: Build, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    library = build.setup_py(tmp_path)
    assert scenario(build, "dtypes", VLLM_ASCEND_PD_NPU_LIBRARY=str(library)) == "ok"
