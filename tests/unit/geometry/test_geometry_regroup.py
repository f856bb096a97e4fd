# SPDX-License-Identifier: Apache-2.0
"""Regroup plans executed in numpy, exchange included: every wanted byte once, even shares, consistent plans on all
ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from unit.geometry.executed import clusters, exchange, jobs_of
from unit.geometry.kit import PlannedCluster, geometry, owner_share, range_of
from vllm_ascend_pd.geometry import ownership
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.ownership import granule
from vllm_ascend_pd.geometry.plan import Job
from vllm_ascend_pd.geometry.regroup import RegroupPlan, RegroupPlanner
from vllm_ascend_pd.geometry.shard import contributors

SETTINGS = settings(max_examples=9 * settings.default.max_examples, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def small_granules() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "GRANULE_BYTES", 16)
        yield


def check_shares(cluster: PlannedCluster, jobs: list[Job], plans: list[RegroupPlan]) -> None:
    p = cluster.p
    owned: Counter[tuple[object, ...]] = Counter()
    for plan in plans:
        for slot in plan.slots:
            d = cluster.ds[slot.instance]
            layout = (d.tp_size, d.block_size, d.regions)
            for member, part in slot.deliveries.items():
                assert jobs[member].lo <= part.lo < part.hi <= jobs[member].hi
                assert list(range(*part.heads)) == range_of(d.kv_heads, d.tp_size, slot.d_rank)
                owned[layout, slot.d_rank, plan.rank] += part.hi - part.lo
    totals: Counter[tuple[object, ...]] = Counter()
    for job in jobs:
        totals[job.d.tp_size, job.d.block_size, job.d.regions] += job.hi - job.lo
    for d in cluster.ds:
        layout = (d.tp_size, d.block_size, d.regions)
        for d_rank in range(d.tp_size):
            for rank in range(p.tp_size):
                ideal = owner_share(p, d, rank, d_rank) * totals[layout]
                assert abs(owned[layout, d_rank, rank] - ideal) <= granule(d)
                if owned[layout, d_rank, rank]:
                    assert rank in contributors(p, d, d_rank)


def run(cluster: PlannedCluster, steps: list[list[int]], step_number: int = 0) -> None:
    planners = [RegroupPlanner(cluster.p, rank) for rank in range(cluster.p.tp_size)]
    for number, advances in enumerate([*steps, [10**6] * len(cluster.requests)]):
        jobs = jobs_of(cluster, advances)
        plans = [planner.plan(jobs, step_number + number) for planner in planners]
        assert all((plan.matrix == plans[0].matrix).all() for plan in plans)
        exchange(cluster, jobs, plans)
        check_shares(cluster, jobs, plans)
    cluster.check()


@SETTINGS
@given(clusters())
def test_each_wanted_byte_is_written_once_and_nothing_else(drawn: tuple[PlannedCluster, list[list[int]]]) -> None:
    run(*drawn)


@pytest.mark.parametrize("kind", ["token", "head", "opaque"])
@pytest.mark.parametrize(
    ("heads", "p_tp", "d_tp"),
    [
        (8, 2, 1),
        (8, 4, 1),
        (8, 4, 2),
        (8, 8, 2),
        (6, 3, 2),
        (6, 6, 4),
        (2, 8, 1),
        (4, 16, 2),
        (8, 4, 8),
        (1, 4, 2),
        (3, 4, 1),
    ],
)
def test_every_ratio_of_ranks(kind: str, heads: int, p_tp: int, d_tp: int) -> None:
    p = geometry(kind, heads=heads, tp=p_tp, block=8)
    d = geometry(kind, heads=heads, tp=d_tp, block=8)
    other = geometry(kind, heads=heads, tp=p_tp, block=8)
    prompts = [(0, 0, 30), (1, 8, 17), (0, 16, 64), (2, 0, 1), (2, 0, 64)]
    run(PlannedCluster(p, [d, d, other], prompts, seed=5), [[8, 9, 20, 0, 7], [3, 9, 20, 0, 33]])


def test_nothing_is_exchanged_where_ranks_hold_all_that_they_own() -> None:
    for heads, p_tp, d_tp in ((8, 4, 8), (1, 16, 4), (4, 4, 4), (4, 1, 2)):
        p, d = (geometry("token", heads=heads, tp=tp, block=8) for tp in (p_tp, d_tp))
        table = np.arange(8, dtype=np.int32)
        plan = RegroupPlanner(p, 0).plan([Job(d, 0, 0, 64, table, table)])
        assert not plan.exchanges
        assert not len(plan.send)
        assert all(len(slot.own_rows) and not len(slot.received) for slot in plan.slots)


def test_replicas_share_the_sending() -> None:
    """16 -> 2 with 4 heads: each rank lacks one head, and gets it from the replica in its own place."""
    p, d = geometry("token", heads=4, tp=16, block=8), geometry("token", heads=4, tp=2, block=8)
    table = np.arange(8, dtype=np.int32)
    matrix = RegroupPlanner(p, 0).plan([Job(d, 0, 0, 64, table, table)]).matrix
    assert (matrix.sum(axis=0) == matrix.sum(axis=1)).all()
    assert {(int(a), int(b)) for a, b in np.argwhere(matrix)} == {(rank, rank ^ 4) for rank in range(16)}


def test_own_bytes_go_through_the_exchange_only_where_that_makes_splits_equal() -> None:
    p, d = geometry("token", heads=4, tp=4, block=8), geometry("token", heads=4, tp=1, block=8)
    table = np.arange(8, dtype=np.int32)
    even = RegroupPlanner(p, 0).plan([Job(d, 0, 0, 64, table, table)])
    assert even.equal_splits
    assert even.send_splits == [4 * 16] * 4
    assert not len(even.slots[0].own_rows)
    uneven = RegroupPlanner(p, 0).plan([Job(d, 0, 0, 50, table, table)])
    assert not uneven.equal_splits
    assert uneven.send_splits[0] == 0
    assert len(uneven.slots[0].own_rows)


def test_a_slot_is_written_in_long_spans() -> None:
    """8 -> 2 over token-major blocks: a rank's cells are 2 bytes apart, its writes are whole blocks of D."""
    p, d = geometry("token", heads=8, tp=8, block=8), geometry("token", heads=8, tp=2, block=8)
    table = np.arange(0, 32, 2, dtype=np.int32)
    plan = RegroupPlanner(p, 1).plan([Job(d, 0, 0, 128, table, table)])
    [slot] = plan.slots
    assert (slot.instance, slot.d_rank) == (0, 0)
    assert [spans.size.tolist() for spans in slot.writes[0]] == [[8 * 4 * 2] * 4] * 2
    assert len(slot.received) == 3 * 2  # one box for each other rank and region
    jobs = [Job(d, 0, 0, 128, table, table, instance) for instance in (0, 0, 1, 0)]
    first, second = RegroupPlanner(p, 1).plan([*jobs[:2], jobs[0]]).slots, RegroupPlanner(p, 2).plan(jobs).slots
    assert [len(slot.received) for slot in first] == [6]  # adjacent jobs share the boxes
    assert [(slot.instance, len(slot.received)) for slot in second] == [(1, 6)]


def test_slots_for_a_head_major_cache_are_written_in_whole_blocks_too() -> None:
    p, d = geometry("token", heads=8, tp=8, block=8), geometry("head", heads=8, tp=2, block=8)
    table = np.arange(0, 32, 2, dtype=np.int32)
    [slot] = RegroupPlanner(p, 1).plan([Job(d, 0, 0, 128, table, table)]).slots
    assert [spans.size.tolist() for spans in slot.writes[0]] == [[8 * 4 * 2] * 4] * 2


@pytest.mark.parametrize("odd", ["P", "D"])
def test_keys_and_values_may_lie_alike_on_one_side_alone(odd: str) -> None:
    """Rows of the keys are taken over for the values only where both sides lay both out alike."""

    def side(name: str, tp: int) -> CacheGeometry:
        keys, values = (geometry(kind, heads=8, tp=tp, block=8) for kind in ("token", "head"))
        regions = keys.regions[0], values.regions[1]
        return msgspec.structs.replace(keys, regions=regions) if name == odd else keys

    run(PlannedCluster(side("P", 2), [side("D", 1)], [(0, 0, 30), (0, 8, 17)], seed=3), [[9, 17]])


def test_instances_have_slots_of_their_own() -> None:
    p, d = geometry("token", heads=4, tp=4, block=8), geometry("token", heads=4, tp=2, block=8)
    table = np.arange(8, dtype=np.int32)
    jobs = [Job(d, 0, 0, 32, table, table, instance) for instance in (3, 1, 3)]
    slots = Counter(
        (slot.instance, slot.d_rank) for rank in range(4) for slot in RegroupPlanner(p, rank).plan(jobs).slots
    )
    assert set(slots) == {(3, 0), (3, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("kind", ["token", "head", "opaque"])
def test_jobs_of_two_instances_may_alternate(kind: str) -> None:
    p, d = geometry(kind, heads=4, tp=2, block=8), geometry(kind, heads=4, tp=1, block=8)
    run(PlannedCluster(p, [d, d], [(0, 0, 5), (1, 0, 4), (0, 0, 7), (1, 8, 40), (0, 0, 9)], seed=2), [])
