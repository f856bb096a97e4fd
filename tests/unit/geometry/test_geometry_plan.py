# SPDX-License-Identifier: Apache-2.0
"""Plans executed as memory copies between numpy caches: every wanted byte once, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unit.geometry.context_parallel import GRID, ContextParallel
from unit.geometry.executed import PARTS, Parts, clusters, execute, jobs_of
from unit.geometry.kit import PlannedCluster, covers, dealt, geometry, owner_share, range_of, ranks_of, share
from vllm_ascend_pd.errors import LocalProtocolError, PdError
from vllm_ascend_pd.geometry import ownership
from vllm_ascend_pd.geometry.ownership import TokenLine, granule
from vllm_ascend_pd.geometry.plan import Job, JobPlan, StepPlanner
from vllm_ascend_pd.geometry.shard import Shares

SETTINGS = settings(max_examples=11 * settings.default.max_examples, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def small_granules() -> Iterator[None]:
    """Scale the granule's lower limit to the small cells; otherwise no granule would be smaller than a block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "GRANULE_BYTES", 16)
        yield


def run(cluster: PlannedCluster, steps: list[list[int]], step_number: int = 0) -> None:
    planners = [StepPlanner(cluster.p, rank) for rank in ranks_of(cluster.p)]
    for number, advances in enumerate([*steps, [10**6] * len(cluster.requests)]):
        jobs = jobs_of(cluster, advances)
        plans = [planner.plan(jobs, step_number + number) for planner in planners]
        for rank, mine in enumerate(plans):
            execute(cluster, rank, jobs, mine)
        if all(covers(g) == g.block_size for g in (cluster.p, *cluster.ds)):
            check_balance(cluster, jobs, plans)
    cluster.check()


def check_balance(cluster: PlannedCluster, jobs: list[Job], plans: list[list[JobPlan]]) -> None:
    """Check per line and D rank that the tokens of each P rank are within one granule of its share; bytes follow the
    tokens."""
    p = cluster.p
    lines: dict[tuple[object, ...], list[int]] = {}
    for index, job in enumerate(jobs):
        lines.setdefault((job.d.tp_size, job.d.block_size, job.d.regions), []).append(index)
    for members in lines.values():
        d = jobs[members[0]].d
        total = sum(jobs[index].hi - jobs[index].lo for index in members)
        for d_rank in range(d.tp_size):
            for rank in range(p.tp_size):
                heads = [h for h in range_of(p.kv_heads, p.tp_size, rank) if share(p, d, rank, d_rank, h)]
                parts = [plans[rank][i].deliveries[d_rank] for i in members if d_rank in plans[rank][i].deliveries]
                tokens = sum(part.hi - part.lo for part in parts)
                assert all(list(range(*part.heads)) == heads for part in parts)
                ideal = share(p, d, rank, d_rank, heads[0]) * total if heads else 0
                assert abs(tokens - ideal) <= granule(d)
                if not any(region.opaque for region in d.regions):
                    wanted = tokens * len(heads) * sum(region.cell_bytes for region in d.regions)
                    assert sum(plans[rank][i].nbytes(d_rank) for i in members) == wanted


@SETTINGS
@given(clusters(), st.integers(0, 100))
def test_each_wanted_byte_is_written_once_and_nothing_else(
    drawn: tuple[PlannedCluster, list[list[int]]], step_number: int
) -> None:
    run(*drawn, step_number=step_number)


@pytest.mark.parametrize("kind", ["token", "head", "opaque"])
@pytest.mark.parametrize(
    ("heads", "p_tp", "d_tp"),
    [
        (8, 2, 2),
        (8, 8, 2),
        (8, 4, 8),
        (8, 2, 4),
        (6, 3, 2),
        (2, 8, 2),
        (2, 8, 4),
        (2, 2, 8),
        (1, 4, 2),
        (1, 2, 4),
        (1, 16, 4),
        (8, 1, 1),
    ],
)
def test_every_ratio_of_ranks_on_every_layout(kind: str, heads: int, p_tp: int, d_tp: int) -> None:
    p = geometry(kind, heads=heads, tp=p_tp, block=8)
    d = geometry(kind, heads=heads, tp=d_tp, block=8)
    run(
        PlannedCluster(p, [d, d], [(0, 0, 30), (1, 8, 17), (0, 16, 64), (1, 0, 1)], seed=5),
        [[8, 9, 20, 0], [3, 9, 20, 0]],
    )


@pytest.mark.parametrize(("p_kind", "d_kind"), [("token", "token"), ("head", "token"), ("token", "head")])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("blocks", [(8, 8), (16, 8), (8, 16)])
@pytest.mark.parametrize(("p_parts", "d_parts"), PARTS)
def test_tokens_that_are_divided_among_ranks(
    p_kind: str, d_kind: str, heads: int, blocks: tuple[int, int], p_parts: Parts, d_parts: Parts
) -> None:
    """Context parallelism of decode and of prefill, equal and unequal; with fewer heads than ranks, so that the
    other ranks divide the tokens, and with all of them."""
    p, d = (
        dealt(
            geometry(kind, heads=heads, tp=tp * (heads if dcp > 1 else 1), block=block),
            dcp=dcp,
            pcp=pcp,
            interleave=run,
        )
        for kind, block, (tp, dcp, pcp, run) in zip((p_kind, d_kind), blocks, (p_parts, d_parts), strict=True)
    )
    prompts = [(0, 0, 300), (1, 8 * 8, 201), (0, 16, 64), (1, 0, 1), (0, 37, 90)]
    run(PlannedCluster(p, [d, d], prompts, seed=5), [[40, 90, 20, 0, 50], [130, 9, 20, 0, 7]])


@pytest.mark.parametrize(("heads", "p_context", "d_context"), GRID, ids=str)
@pytest.mark.parametrize(("blocks", "runs"), [((8, 8), (8, 8)), ((8, 8), (1, 2)), ((16, 8), (4, 8)), ((8, 16), (1, 1))])
def test_every_division_of_prefill_meets_every_one_of_decode(
    heads: int, p_context: ContextParallel, d_context: ContextParallel, blocks: tuple[int, int], runs: tuple[int, int]
) -> None:
    """Equal divisions too, with runs of whole blocks, as vllm-ascend has them beside a connector, and with others."""
    p, d = (
        dealt(
            geometry("token", heads=heads, tp=context.tp(heads), block=block),
            **context._asdict(),
            interleave=length if context != ContextParallel() else 1,
        )
        for context, block, length in zip((p_context, d_context), blocks, runs, strict=True)
    )
    run(PlannedCluster(p, [d], [(0, 0, 300), (0, 37, 90), (0, 64, 65)], seed=5), [[40, 90, 0], [261, 9, 70]])


@pytest.mark.parametrize(("p_kind", "d_kind"), [("token", "head"), ("head", "token")])
@pytest.mark.parametrize(("p_block", "d_block"), [(8, 8), (16, 4), (4, 16), (12, 8)])
def test_layouts_and_block_sizes_may_differ(p_kind: str, d_kind: str, p_block: int, d_block: int) -> None:
    p = geometry(p_kind, heads=4, tp=2, block=p_block, cells=(4, 4), pad=8)
    d = geometry(d_kind, heads=4, tp=4, block=d_block, cells=(4, 4))
    run(PlannedCluster(p, [d], [(0, 3, 50), (0, 0, 16)], seed=7), [[17, 5], [17, 5]])


def test_a_cut_moves_to_the_nearest_granule_of_its_piece() -> None:
    line = TokenLine(np.array([0, 20]), np.array([16, 38]), 16, 4)
    assert line.tokens == 34
    cuts = {}
    for weights in ((10, 24), (13, 21), (14, 20), (17, 17), (19, 15), (33, 1)):
        cuts[weights[0]] = int(line.cuts(Shares((0, 1), weights))[1])
    # Places 10, 13, 14 are at tokens of the same number; 17, 19, 33 at tokens 21, 23, 37.
    assert cuts == {10: 12, 13: 12, 14: 16, 17: 16, 19: 20, 33: 32}


def test_neighbouring_blocks_become_one_span() -> None:
    p = d = geometry("token", heads=4, tp=2, block=8)
    table = np.arange(3, 7, dtype=np.int32)
    [plan] = StepPlanner(p, 1).plan([Job(d, 0, 0, 32, table, table + 4)])
    [spans, _] = plan.by_rank[1]
    assert (spans.src.tolist(), spans.dst.tolist(), spans.size.tolist()) == ([3 * 32], [7 * 32], [4 * 32])


def test_descending_blocks_become_one_span_too() -> None:
    p = d = geometry("head", heads=4, tp=2, block=8)
    table = np.arange(6, 2, -1, dtype=np.int32)
    [plan] = StepPlanner(p, 0).plan([Job(d, 0, 0, 32, table, table + 4)])
    assert [len(spans) for spans in plan.by_rank[0]] == [1, 1]


def test_jobs_are_never_merged_with_each_other() -> None:
    p = d = geometry("token", heads=4, tp=2, block=8)
    tables = np.arange(4, dtype=np.int32)
    jobs = [Job(d, 0, 0, 16, tables[:2], tables[:2]), Job(d, 0, 0, 16, tables[2:], tables[2:])]
    plans = StepPlanner(p, 0).plan(jobs)
    assert [spans.size.tolist() for plan in plans for spans in plan.by_rank[0]] == [[64]] * 4


def test_ranks_with_a_replica_divide_the_blocks() -> None:
    p, d = geometry("token", heads=1, tp=16, block=8, cells=(4,)), geometry("token", heads=1, tp=4, block=8, cells=(4,))
    table = np.arange(8, dtype=np.int32)[::-1].copy()
    got = Counter()
    for rank in range(16):
        [plan] = StepPlanner(p, rank).plan([Job(d, 0, 0, 64, table, table)])
        for d_rank in plan.by_rank:
            got[rank, d_rank] += plan.nbytes(d_rank)
    assert got == {(rank, rank // 4): 64 for rank in range(16)}


def test_rotation_moves_what_rounding_leaves_over() -> None:
    p, d = (
        geometry("head", heads=1, tp=4, block=8, cells=(64,)),
        geometry("opaque", heads=1, tp=1, block=8, cells=(64,)),
    )
    p = geometry("opaque", heads=1, tp=4, block=8, cells=(64,))
    table = np.arange(1, dtype=np.int32)
    served = [
        rank
        for step_number in range(4)
        for rank in range(4)
        if StepPlanner(p, rank).plan([Job(d, 0, 0, 8, table, table)], step_number)[0].by_rank
    ]
    assert sorted(served) == [0, 1, 2, 3]


def test_a_block_table_that_is_too_short_is_our_bug() -> None:
    g = geometry("token", heads=2, tp=1, block=8)
    short = np.arange(1, dtype=np.int32)
    with pytest.raises(LocalProtocolError):
        StepPlanner(g, 0).plan([Job(g, 0, 0, 16, short, np.arange(2, dtype=np.int32))])


def test_an_opaque_block_is_never_begun_in_the_middle() -> None:
    g = geometry("opaque", heads=2, tp=1, block=8)
    table = np.arange(2, dtype=np.int32)
    with pytest.raises(LocalProtocolError):
        StepPlanner(g, 0).plan([Job(g, 4, 4, 16, table, table)])


def test_caches_that_do_not_fit_are_not_planned() -> None:
    p, d = geometry("opaque", heads=2, tp=1, block=8), geometry("opaque", heads=2, tp=1, block=16)
    table = np.arange(2, dtype=np.int32)
    with pytest.raises(PdError, match="PD-GEO-002"):
        StepPlanner(p, 0).plan([Job(d, 0, 0, 16, table, table)])


def test_owner_shares_add_up() -> None:
    p, d = geometry("token", heads=3, tp=4, block=8), geometry("token", heads=3, tp=2, block=8)
    assert sum(owner_share(p, d, rank, 1) for rank in range(4)) == 1
