# SPDX-License-Identifier: Apache-2.0
"""The CPU ops' core without torch: under the sanitizers, and for aarch64, the architecture of most Ascend hosts."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from native_build import built
from native_cases import CELLS, RATIOS, assemble_case, pair, regroup_cases

ROOT = Path(__file__).resolve().parents[2]
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def cases(folder: Path) -> list[Path]:
    """Write cases of every layout and cell, with half of the ratios each, and of rows with odd widths at odd places."""
    paths = []
    for index, kind in enumerate(("token", "head", "opaque")):
        for cells in CELLS:
            for heads, p_tp, d_tp in RATIOS[index % 2 :: 2]:
                cluster = pair(kind, heads, p_tp, d_tp, CELLS[cells], tokens=150)
                name = f"{kind}-{cells}-{heads}-{p_tp}to{d_tp}"
                paths += [case.write(folder) for case in regroup_cases(name, cluster, [p_tp - 1])]
    for width in (1, 63, 64, 65, 320, 1023, 1024, 1087, 70_000):
        rows = [[width, 1, 3, 5, 0, width, 7, 0, width + 9], [width, 1, 1, 0, 0, 0, 3 * width + 100, 0, 0]]
        received = np.random.default_rng(width).integers(0, 256, 3 * width + 5, dtype=np.uint8)
        case = assemble_case(f"width{width}", received, np.array(rows, dtype=np.int64), 4 * width + 101)
        paths.append(case.write(folder))
    return paths


def run(runner: Sequence[str | Path], threads: int, paths: Sequence[Path]) -> None:
    command = [str(word) for word in (*runner, threads, *paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert results == {str(path): "ok" for path in paths}


@pytest.mark.ci
@pytest.mark.parametrize("threads", [1, 3])
def test_the_core_is_right_under_the_sanitizers(threads: int, tmp_path: Path) -> None:
    run([built("cpu_runner.cpp", "asan")], threads, cases(tmp_path))


@pytest.mark.slow
def test_the_core_is_right_on_aarch64(tmp_path: Path) -> None:
    """Without x86 intrinsics: the portable variant of the streaming stores."""
    if QEMU is None:
        pytest.skip("qemu-user is not installed")
    run([QEMU, built("cpu_runner.cpp", "aarch64")], 2, cases(tmp_path))


@pytest.mark.slow
def test_the_kernels_run_on_aarch64(tmp_path: Path) -> None:
    """Tiling and emulation do not depend on the architecture."""
    if QEMU is None:
        pytest.skip("qemu-user is not installed")
    paths = cases(tmp_path)[::5]
    runner = [QEMU, built("kernel_runner.cpp", "aarch64"), "run", "--cores", "1,40", "--seeds", "1"]
    done = subprocess.run([str(word) for word in (*runner, *paths)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 2 * len(paths)
    assert all('"fault": ""' in line for line in done.stdout.splitlines())


@pytest.mark.slow
def test_the_extension_compiles_for_aarch64() -> None:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    torch = importlib.util.find_spec("torch")
    if compiler is None or torch is None or torch.origin is None:
        pytest.skip("aarch64-linux-gnu-g++ is not installed")
    headers = Path(torch.origin).parent / "include"
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    sources = sorted([*(ROOT / "csrc").glob("*.cpp"), *(ROOT / "csrc/cpu").glob("*.cpp")])
    assert sources
    subprocess.run([compiler, *flags, "-isystem", str(headers), *map(str, sources)], check=True, timeout=200)
