# SPDX-License-Identifier: Apache-2.0
"""The sets of test_pairs.py on NPUs: the same engines and the same cells, with the stand-ins left out.

No NPU has run them yet. What can be tested without one is here too: what would be started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_sets import NPUS, Engines, Machine
from host_build import OLDER
from pairs import Pair
from test_pairs import EVERY_COMMIT, MORE, Running, drafts

from tools.npu_selfcheck import ROOT, steps
from tools.support.cluster import Cluster
from tools.support.spec import EngineSpec

SETS = [engines for engines, _ in (*EVERY_COMMIT, *MORE)]
CELLS = [
    pytest.param(engines, cell, id=f"{engines}: {cell.__name__}")
    for engines, cells in (*EVERY_COMMIT, *MORE)
    for cell in cells
]
OF_STAND_INS = (
    "STAND_IN_",
    "ASCEND_HOST_",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "VLLM_ASCEND_PD_NPU_LIBRARY",
    "MC_FORCE_TCP",
)


@pytest.fixture(scope="module")
def running(progress: Callable[[str], None]) -> Iterator[Running]:
    with Running(lambda _release: NPUS, progress) as running:
        yield running


@pytest.mark.npu
@pytest.mark.engines
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("engines", "cell"), CELLS)
def test_tokens_are_one_engines_on_npus(
    engines: Engines, cell: Callable[[Engines, Pair], None], running: Running
) -> None:
    import torch

    if torch.npu.device_count() < engines.devices:
        pytest.skip(f"needs {engines.devices} NPUs, there are {torch.npu.device_count()}")
    if engines.d.repaired and (
        engines.release == OLDER or cell is drafts
    ):  # what is not alike there does not change text
        pytest.skip("needs a repair of vllm-ascend that is made for stand-ins alone (plugin/ascend_host/repairs.py)")
    cell(engines, running.pair(engines))


def specs(engines: Engines, machine: Machine, folder: Path) -> list[EngineSpec]:
    with Cluster(folder) as cluster:
        return [cluster._placed(spec) for spec in engines.specs(machine, cluster, "http://127.0.0.1:1")]


def keys(spec: EngineSpec) -> Mapping[str, Any]:
    """Return the configuration of our connector, which is the first one in a MultiConnector."""
    inside = spec.extra.get("connectors")
    return inside[0]["kv_connector_extra_config"] if inside else spec.extra


@pytest.mark.parametrize("engines", SETS, ids=str)
def test_on_npus_nothing_of_the_stand_ins_is_left(engines: Engines, tmp_path: Path) -> None:
    build: Any = SimpleNamespace(
        python=tmp_path / "python", plugins=(tmp_path,), variables=lambda: dict.fromkeys(OF_STAND_INS, "1")
    )
    host = Machine.host(build)
    here, there = specs(engines, host, tmp_path / "here"), specs(engines, NPUS, tmp_path / "there")
    assert len(here) == len(there)
    taken: list[str] = []
    for one, other in zip(here, there, strict=True):
        assert {"STAND_IN_LATE_US", *OF_STAND_INS} <= set(one.environment) and one.plugins
        assert not [name for name in other.environment if name.startswith(OF_STAND_INS)] and not other.plugins
        if one.role != "plain":  # the engine alone has no connector
            assert keys(one)["mooncake_protocol"] == "tcp" and "mooncake_protocol" not in keys(other)
        assert one.python != other.python and "float32" not in other.command()
        # Apart from these, the command lines differ in ports and folders.
        assert [word for word in one.command() if word.startswith("--")] == [
            word for word in other.command() if word.startswith("--")
        ]
        taken += other.environ()["ASCEND_RT_VISIBLE_DEVICES"].split(",")
    assert taken == [str(number) for number in range(engines.devices)], "each rank has a device of its own"
    assert engines.devices <= 8


def test_the_self_check_runs_them() -> None:
    (pair,) = [step for step in steps("python", ROOT / "out", given=True) if step.name == "pair"]
    assert ROOT / pair.commands[-1][-1] == Path(__file__)
