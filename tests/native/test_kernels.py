# SPDX-License-Identifier: Apache-2.0
"""The NPU kernels' source on the emulated AI cores: right bytes, no fault, and planted faults detected by name."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from native_build import built
from native_cases import CELLS, RATIOS, OpCase, assemble_case, pair, regroup_cases
from unit.geometry.kit import PlannedCluster, geometry

Result = dict[str, object]
KINDS = ["token", "head", "opaque", "token>head", "head>token"]  # P>D where they differ


def runner(flavour: str, *arguments: str | Path, timeout: float = 200) -> list[Result]:
    command = [str(built("kernel_runner.cpp", flavour)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def run(paths: Sequence[Path], *, cores: str, seeds: int = 4, flavour: str = "plain") -> list[Result]:
    results = runner(flavour, "run", "--cores", cores, "--seeds", str(seeds), *paths)
    faults = [result for result in results if result["fault"]]
    assert not faults, faults[:3]
    assert len(results) == len(paths) * len(cores.split(",")) * seeds
    return results


def written(cases: Sequence[OpCase], folder: Path) -> list[Path]:
    return [case.write(folder) for case in cases]


@pytest.mark.parametrize("cells", CELLS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compute_what_the_plan_says(kind: str, cells: str, tmp_path: Path) -> None:
    """Every ratio of ranks, gather, assemble and scatter, on 1 to 48 cores; 8:3 is a program for 8 cores run on 3."""
    paths = []
    for heads, p_tp, d_tp in RATIOS:
        cluster = pair(kind, heads, p_tp, d_tp, CELLS[cells], tokens=333)
        paths += written([*regroup_cases(f"{cells}-{heads}-{p_tp}to{d_tp}", cluster, [0, p_tp - 1])], tmp_path)
    run(paths, cores="1,3,40,48,8:3", seeds=2)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["token", "head", "head>token"])
def test_kernels_under_the_address_sanitizer(kind: str, tmp_path: Path) -> None:
    paths = []
    for heads, p_tp, d_tp in RATIOS[2:8:2]:
        for cells in CELLS:
            cluster = pair(kind, heads, p_tp, d_tp, CELLS[cells], tokens=150)
            paths += written([*regroup_cases(f"{cells}-{heads}-{p_tp}to{d_tp}", cluster, [1])], tmp_path)
    run(paths, cores="1,7,48", seeds=2, flavour="asan")


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["plain", pytest.param("asan", marks=pytest.mark.ci)])
@pytest.mark.parametrize("cells", CELLS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_on_every_number_of_cores(kind: str, cells: str, flavour: str, tmp_path: Path) -> None:
    """1 to 48 cores with the ratios in turn.

    Each of these tests begins at another ratio, so that together every ratio meets every number. (All with all takes
    hours under the sanitizer.)
    """
    shift = KINDS.index(kind) * len(CELLS) + list(CELLS).index(cells)
    for turn, (heads, p_tp, d_tp) in enumerate(RATIOS):
        cluster = pair(kind, heads, p_tp, d_tp, CELLS[cells])
        paths = written([*regroup_cases(f"{heads}-{p_tp}to{d_tp}", cluster, range(p_tp))], tmp_path)
        cores = [str(n) for n in range(1, 49) if (n + shift) % len(RATIOS) == turn]
        run(paths, cores=",".join(cores), seeds=2 if flavour == "asan" else 4, flavour=flavour)


@pytest.mark.parametrize("flavour", ["plain", pytest.param("asan", marks=pytest.mark.ci)])
def test_random_boxes_of_all_widths(flavour: str, tmp_path: Path) -> None:
    """Widths that are no multiple of 32, rows longer than a tile, gaps that one copy cannot step over."""
    random = np.random.default_rng(11)
    cases = []
    for index in range(40 if flavour == "plain" else 12):
        cell = int(random.choice([1, 31, 32, 33, 80, 128, 256, 1152, 5000, 100_000]))
        heads, tokens = (int(random.integers(1, 4)), int(random.integers(1, 6 if cell > 4000 else 300)))
        rows, source, target = [], 0, 0
        for _ in range(int(random.integers(1, 6))):
            orders = [(cell, heads * cell) if random.integers(2) else (tokens * cell, cell) for _ in range(2)]
            source += int(random.integers(0, 3)) * 13
            target += int(random.integers(0, 3)) * 32
            rows.append((cell, heads, tokens, source, *orders[0], target, *orders[1]))
            source, target = source + heads * tokens * cell, target + heads * tokens * cell
        received = random.integers(0, 256, source, dtype=np.uint8)
        cases.append(assemble_case(f"box{index}", received, np.array(rows, dtype=np.int64), target + 5))
    run(written(cases, tmp_path), cores="1,2,48", seeds=3, flavour=flavour)


def test_sources_that_one_copy_cannot_step_through(tmp_path: Path) -> None:
    """Blocks that overlap in the source, on the inner axis and on the outer one."""
    received = np.random.default_rng(2).integers(0, 256, 40_000, dtype=np.uint8)
    boxes = [(64, 3, 100, 0, 9000, 16, 0, 6400, 64), (64, 3, 100, 0, 16, 192, 20_000, 64, 192)]
    boxes += [(96, 2, 90, 40, 32, 96, 40_000, 90 * 128, 128), (50, 3, 7, 1, 10, 2, 70_000, 7 * 50, 50)]
    case = assemble_case("overlapping", received, np.array(boxes, dtype=np.int64), 72_000)
    run([case.write(tmp_path)], cores="1,2,48", seeds=4)


def llama_70b(tp: int) -> object:
    return geometry("token", heads=8, tp=tp, block=128, cells=(256, 256))


def test_copies_are_long_and_shared_evenly(tmp_path: Path) -> None:
    """Llama-70B 8 -> 2, 8,192 tokens: a rank sends whole blocks, and assembles with 4 heads interleaved."""
    cluster = PlannedCluster(llama_70b(8), [llama_70b(2)], [(0, 0, 8192)], seed=4)
    cases = {case.name.split("-")[-1]: case for case in regroup_cases("llama", cluster, [1])}
    for name in ("send", "slot0"):
        [result] = run([cases[name].write(tmp_path)], cores="40", seeds=1)
        copies = result["loads"] + result["stores"] - 40  # without each core's read of its part of the program
        print(name, result, "bytes per copy:", 2 * result["bytes"] // copies)
        assert result["busiest"] <= result["bytes"] / 40 + 20 * 1024  # its share and one tile
        assert result["ub"] <= 192 * 1024
        assert result["unaligned"] <= 40
        if name == "send":
            assert 2 * result["bytes"] / copies >= 16 * 1024


def test_long_steps_move_whole_tiles(tmp_path: Path) -> None:
    """With enough work for each core a copy is as long as UB allows, or as a source's part if heads interleave."""
    cluster = PlannedCluster(llama_70b(8), [llama_70b(2)], [(0, 0, 8192)], seed=4)
    for case in regroup_cases("long", cluster, [1]):
        if case.name.endswith(("send", "slot0")):
            [result] = run([case.write(tmp_path)], cores="6", seeds=1)
            copies = result["loads"] + result["stores"] - 6
            print(case.name, result, "bytes per copy:", 2 * result["bytes"] // copies)
            assert 2 * result["bytes"] / copies >= 32 * 1024


@pytest.mark.parametrize("flavour", ["plain", pytest.param("asan", marks=pytest.mark.ci)])
def test_offsets_are_64_bit(flavour: str) -> None:
    """A block behind 4 GiB of its cache arrives; with offsets cut to 32 bits the fault is detected."""
    assert [result["fault"] for result in runner(flavour, "far", "none")] == [""]
    [cut] = runner(flavour, "far", "offset cut to 32 bits")
    assert str(cut["fault"]).startswith("wrong data")


# ---- planted faults: the emulation has to name them

FAULTY_KERNELS = {
    "store does not wait for its load": "UB race|UB uninitialised",
    "load does not wait for the store before it": "UB race|event reused",
    "event raised twice": "event reused",
    "event left set at the end": "event left set",
    "wait for an event that is never set": "event never set",
    "more UB than there is": "UB capacity",
    "store of what was never loaded": "UB uninitialised",
    "copy of 33 bytes": "copy limits",
    "tensor indexed past its end": "UB out of bounds",
    "buffer freed twice": "queue misuse",
    "three buffers of two": "queue misuse",
    "window read before it is loaded": "UB race|UB uninitialised",
    "window overwritten before it is read": "UB race",
    "cores write the same place": "GM overlap between cores",
}

CORRUPTIONS = {
    "tail stored short": "wrong data",
    "tail stored long": "UB uninitialised|GM write out of bounds",
    "tail loaded short": "UB uninitialised",
    "read past the end": "GM read out of bounds",
    "read before the start": "GM read out of bounds",
    "write past the end": "GM write out of bounds",
    "write to what is only read": "GM write to read-only memory",
    "unaligned UB address": "UB alignment",
    "tile longer than its buffer": "UB out of bounds",
    "wrong stride of a load": "wrong data",
    "wrong stride of a store": "wrong data|GM written twice",
    "wrong stride in UB": "UB uninitialised",
    "strip forgotten": "UB uninitialised",
    "too many blocks": "copy limits",
    "two cores share a tile": "GM overlap between cores",
    "tile done twice": "GM written twice",
    "count cut to 16 bits": "wrong data",
}


def test_the_shape_of_the_faulty_kernels_is_right() -> None:
    assert all(not result["fault"] for result in runner("plain", "faulty", "right"))


@pytest.mark.parametrize("name", FAULTY_KERNELS)
def test_a_faulty_kernel_is_caught_by_name(name: str) -> None:
    expected = FAULTY_KERNELS[name].split("|")
    for result in runner("plain", "faulty", name):  # with every seed
        assert str(result["fault"]).split(":")[0] in expected, result


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four sources' heads side by side, and a separate stretch: strips, strides, several tiles per core."""
    tokens, cell = 900, 256
    rows = [[cell, 1, tokens, s * tokens * cell, 0, cell, s * cell, 0, 4 * cell + 32] for s in range(4)]
    rows.append([50_000, 1, 1, 0, 0, 0, tokens * (4 * cell + 32) + 64, 0, 0])
    received = np.random.default_rng(1).integers(0, 256, 4 * tokens * cell, dtype=np.uint8)
    size = rows[-1][6] + 50_000
    case = assemble_case("interleaved", received, np.array(rows, dtype=np.int64), size)
    return case.write(tmp_path_factory.mktemp("faults"))


def test_the_program_to_be_damaged_is_right(interleaved: Path) -> None:
    assert all(not result["fault"] for result in runner("plain", "corrupt", "none", interleaved))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_mistake_in_the_program_is_caught_by_name(name: str, interleaved: Path) -> None:
    expected = CORRUPTIONS[name].split("|")
    for result in runner("plain", "corrupt", name, interleaved):
        assert str(result["fault"]).split(":")[0] in expected, result
