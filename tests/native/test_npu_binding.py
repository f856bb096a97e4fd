# SPDX-License-Identifier: Apache-2.0
"""The NPU's code without an NPU: the binding built for the real torch_npu wheel, device/npu.py, regroup/'s NPU branch.

They run on stand-ins for CANN. This shows dispatch, checks, tiling, launch through the OpCommand queue, streams,
events, HCCL calls, and the order in which hooks launch them. It does not show that bisheng compiles the kernels, or
that a device does what the emulation does. The last test prints which lines ran.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from npu_build import ROOT, Build, interpreter

from tools.support.fork_server import ForkServers
from tools.support.process import Child

# Of a program. That of four ranks takes two minutes on two quiet cores, and more than four beside engines of six ranks.
DEADLINE_S = 800.0
pytestmark = pytest.mark.timeout(900)

HERE = Path(__file__).resolve().parent
Scenario = Callable[..., str]


@pytest.fixture(scope="module")
def build() -> Build:
    python = interpreter()
    if python is None:
        pytest.skip("needs torch 2.13.0, which the torch_npu of this test belongs to")
    build = Build(python).ensure()
    build.forget_counts()
    return build


SLOW_STREAMS = {"STAND_IN_DELAY_US": "200"}  # every task of a stream sleeps first, so a missing wait shows
DEVICES = {"STAND_IN_DEVICES": "4"}  # read by the import of torch_npu, which the programs share
# Scenarios that share a process and its environment.
PROGRAMS: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
    ({}, ("equal_to_cpu", "copies", "dtypes", "refusals", "schemas", "formats")),
    ({"VLLM_ASCEND_PD_NPU_LIBRARY": "/nowhere/_C_npu.so"}, ("no_silent_fallback",)),
    ({"STAND_IN_DELAY_US": "20000"}, ("streams", "threads", "let_go", "in_flight")),
    (SLOW_STREAMS, ("exchange2", "exchange2 by copies", "production 2", "decode", "devices")),
    (SLOW_STREAMS, ("production 4",)),
    (SLOW_STREAMS, ("exchange4", "production 4 with own kernels")),
)
SLOW = PROGRAMS[-1][1]  # no line that the others do not run


@pytest.fixture(scope="module")
def scenario(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenario]:
    """Return a function that returns a scenario's result; its program runs once, and counts its lines."""
    results: dict[str, str] = {}
    logs = tmp_path_factory.mktemp("programs")
    with ForkServers(("npu_program",), logs) as forks:

        def result(name: str) -> str:
            if name not in results:
                [(environment, names)] = [program for program in PROGRAMS if name in program[1]]
                results.update(_run(build, names, environment, logs, forks))
            return results[name]

        yield result


def _run(
    build: Build, names: tuple[str, ...], environment: dict[str, str], logs: Path, forks: ForkServers | None = None
) -> dict[str, str]:
    log = logs / f"{names[0]}.log"
    environment = build.environment() | DEVICES | environment
    program = Child(names[0], build.command("npu_program", *names), log, environment, ROOT, forks)
    try:
        code = program.wait(DEADLINE_S)
    finally:
        program.kill()
    said = log.read_text()
    results = dict(line.split(": ", 1) for line in said.splitlines() if line.split(": ", 1)[0] in names)
    failed = [name for name, result in results.items() if result.startswith("failed")]
    output = f"{names} ended with {code}\n{said[-6000:]}"
    assert results.keys() == set(names) and bool(failed) == bool(code), output
    return {name: output if name in failed else result for name, result in results.items()}


def test_every_op_computes_what_the_cpu_computes(scenario: Scenario) -> None:
    assert scenario("equal_to_cpu") == "ok"


def test_any_dtype_is_bytes(scenario: Scenario) -> None:
    assert scenario("dtypes") == "ok"


def test_what_the_cpu_refuses_the_npu_refuses(scenario: Scenario) -> None:
    assert scenario("refusals") == "ok"


def test_without_the_kernels_nothing_falls_back_to_the_cpu(scenario: Scenario) -> None:
    assert scenario("no_silent_fallback") == "ok"


def test_streams_are_ordered_by_events_only(scenario: Scenario) -> None:
    assert scenario("streams") == "ok"


@pytest.mark.parametrize(
    "name", ["exchange2", pytest.param("exchange4", marks=pytest.mark.slow), "exchange2 by copies"]
)
def test_gather_exchange_over_hccl_assemble(scenario: Scenario, name: str) -> None:
    assert scenario(name) == "ok"


def test_the_default_path_of_copies_computes_what_the_cpu_computes(scenario: Scenario) -> None:
    assert scenario("copies") == "ok"


def test_the_op_of_the_default_path_is_declared_as_expected(scenario: Scenario) -> None:
    schema = scenario("schemas")
    assert schema.startswith(
        "npu::npu_gather_pa_kv_cache(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
        "Tensor(a!) key, Tensor(b!) value, *, "
    )


def test_a_thread_that_reads_the_device_does_not_wait_for_the_model(scenario: Scenario) -> None:
    assert scenario("threads") == "ok"


def test_a_call_keeps_its_memory_until_it_has_run(scenario: Scenario) -> None:
    assert scenario("let_go") == "ok"


def test_a_thread_works_on_its_ranks_device(scenario: Scenario) -> None:
    assert scenario("devices") == "ok"


def test_plain_formats_are_plain_and_fractal_ones_are_not(scenario: Scenario) -> None:
    assert scenario("formats") == "ok"


@pytest.mark.parametrize(
    "name",
    [
        "production 2",
        pytest.param("production 4", marks=pytest.mark.ci),
        pytest.param("production 4 with own kernels", marks=pytest.mark.slow),
    ],
)
def test_a_prefill_engine_on_npus_pushes_what_its_hooks_announce(scenario: Scenario, name: str) -> None:
    """PrefillWorker, NpuDevice, Exchanger and HCCL as in production, D in host memory."""
    assert scenario(name) == "ok"


def test_a_decode_engine_on_an_npu_takes_and_checks_what_is_pushed(scenario: Scenario) -> None:
    assert scenario("decode") == "ok"


def test_what_a_step_in_flight_computes_is_pushed_when_it_is_there(scenario: Scenario) -> None:
    assert scenario("in_flight") == "ok"


# Code that no scenario runs, by function, with the reasons in docs/ops.md. None of it is specific to the NPU.
ELSEWHERE: dict[str, set[str]] = {
    "regroup/ops.py": {"cell_view", "enable_npu"},  # the latter by the import
    "regroup/exchange.py": {
        "absent",
        "_slot",
        "_blocks",
        "run",
        "_invalidate_sent",
        "_all_to_all",
        "new_group",
        "break_off",
        "_hang_up_gloo",
    },
    "regroup/resources.py": {"allocate", "of"},
    "regroup/core/staging.py": {"__repr__", "taken", "wait_left", "take", "exchanges_possible"},
    "device/current.py": {"current"},
}
COMPLETE = (
    "csrc/npu/binding.cpp",
    "csrc/npu/programs.h",
    "csrc/tensors.h",
    "csrc/rows.h",
    "device/npu.py",
    "regroup/copies.py",
)
SHOWN = ("csrc/", "regroup/", "device/npu.py", "device/current.py")  # the rest of device/ is not specific to the NPU


def function_of(file: str, line: int) -> str:
    """Return the innermost function around a line."""
    tree = ast.parse((HERE.parents[1] / "vllm_ascend_pd" / file).read_text())
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(around, key=lambda node: node.lineno).name if around else "(module)"


@pytest.mark.ci  # it takes all scenarios that are not slow
def test_every_line_that_only_an_npu_would_run_has_run(
    build: Build, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {name: scenario(name) for _, names in PROGRAMS for name in names if name not in ("schemas", *SLOW)}
    assert set(results.values()) == {"ok"}, results
    coverage = {f"csrc/{name}": facts for name, facts in build.uncovered().items()} | build.uncovered_python()
    coverage = {
        file: facts for file, facts in coverage.items() if file.startswith(SHOWN) and not file.endswith("__init__.py")
    }
    with capsys.disabled():
        print()
        for file, (share, missed) in sorted(coverage.items()):
            print(f"  {file}: {share:.1%} of the lines ran", *(f"    {line}" for line in missed), sep="\n")
    assert {file: coverage[file][1] for file in COMPLETE} == {file: [] for file in COMPLETE}
    missed = {(file, function_of(file, int(line.split(":")[0]))) for file in ELSEWHERE for line in coverage[file][1]}
    assert missed <= {(file, name) for file, names in ELSEWHERE.items() for name in names}


@pytest.mark.slow
def test_setup_py_builds_a_library_that_works(build: Build, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    library = build.setup_py(tmp_path)
    assert _run(build, ("dtypes",), {"VLLM_ASCEND_PD_NPU_LIBRARY": str(library)}, tmp_path) == {"dtypes": "ok"}
