# SPDX-License-Identifier: Apache-2.0
"""Real faults in a real pair: the cells in tools/support/cells.py, and their traces in the metrics.

Only cells that kill an engine start one; those are slow. `scripts/fault_matrix.sh` runs all 27 with prefill TP 2;
docs/reliability.md has its table.
"""

from __future__ import annotations

from collections import Counter

import pytest
from pairs import counter

from tools.support.cells import CELLS, KILL, REFUSE, STAGES, STOP, STOPPED_S, CellRun, FaultCell, FaultSite
from tools.support.stops import PROCESSES, Stops

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

EXPIRED = "vllm:ascend_pd_num_kv_expired_reqs_total"
QUICK = {"4D", "5P", "6M"}  # a stopped process costs ten seconds, so CI has one for each role


def _marked(cell: FaultCell) -> object:
    slow = cell.starts_an_engine or (cell.fault == STOP and cell.name not in QUICK)
    return pytest.param(cell, id=cell.name, marks=[pytest.mark.slow] if slow else [])


def test_every_stage_and_role_has_one_fault_and_each_fault_comes_nine_times() -> None:
    assert {(cell.stage, cell.role) for cell in CELLS} == {(stage, role) for stage in STAGES for role in "PDM"}
    assert Counter(cell.fault for cell in CELLS) == {KILL: 9, STOP: 9, REFUSE: 9}
    assert Counter((cell.role, cell.fault) for cell in CELLS) == {
        (r, f): 3 for r in "PDM" for f in (KILL, STOP, REFUSE)
    }


@pytest.mark.parametrize("cell", [_marked(cell) for cell in CELLS])
def test_cell(cell: FaultCell, faulty: FaultSite) -> None:
    """Right tokens or a clear error in time; no other process dies; all blocks are freed; the pair keeps serving."""
    expired = {role: counter(faulty.servers[role], EXPIRED) for role in "PD"}
    row = CellRun(faulty, cell)()
    if cell.name == "4D":  # without READY P gives up, and D learns of it once it continues
        assert counter(faulty.prefill, EXPIRED) > expired["P"]
    if cell.name == "5P":
        assert counter(faulty.decode, EXPIRED) > expired["D"]
        assert row.answers == "3 right", "a D that recomputes has an answer although P sleeps"
    if cell.role != "M" and cell.fault == REFUSE and cell.refusal != "503":
        assert row.answers == "3 right"


@pytest.fixture(scope="module")
def stops(faulty: FaultSite) -> Stops:
    return Stops(faulty)


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("role", "PD")
def test_one_process_that_stands_still(role: str, process: str, stops: Stops) -> None:
    """Beside clients that stream: right tokens or a code in time, then all is as before."""
    assert stops(role, process, STOPPED_S).ended["right"]
