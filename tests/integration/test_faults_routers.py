# SPDX-License-Identifier: Apache-2.0
"""Kills in a real pair behind vLLM's own routers: P first (the toy proxy), and both at once (the demo of NIXL's push).

Prefill, decode and router are killed at each stage of the order; the same promises hold as behind our metaserver
(tools/support/cells.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.support.cells import AT_ONCE, KILL, P_FIRST, ROUTED, CellRun, FaultCell, FaultSite, start_routed
from tools.support.cluster import Cluster
from tools.support.compare import AnswerTally
from tools.support.sdist import Unreachable

pytestmark = [pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, cluster: Cluster, tally: AnswerTally) -> Iterator[FaultSite]:
    try:
        made = start_routed(cluster, f"routed-{request.param.mark}", 1, request.param, tally)
    except Unreachable as why:
        pytest.skip(str(why))
    try:
        yield made
    finally:
        made.close_front()
        cluster.stop(made.decode, made.prefill)


def test_each_role_is_killed_at_each_stage_of_each_order() -> None:
    routed = {(cell.order, cell.stage, cell.role) for cell in ROUTED}
    assert routed == {(order, stage, role) for order in (P_FIRST, AT_ONCE) for stage in order.stages for role in "PDM"}
    assert len(routed) == len(ROUTED) and {cell.fault for cell in ROUTED} == {KILL}
    assert set(P_FIRST.stages) - set(AT_ONCE.stages) == {2}, "P holds nothing where both are asked at once"


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize(
    ("site", "cell"), [(cell.order, cell) for cell in ROUTED], indirect=["site"], ids=[cell.name for cell in ROUTED]
)
def test_cell(site: FaultSite, cell: FaultCell) -> None:
    """Right tokens or a clear error in time; no other process dies; all blocks are freed; the pair keeps serving."""
    CellRun(site, cell)()
