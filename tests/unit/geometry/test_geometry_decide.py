# SPDX-License-Identifier: Apache-2.0
"""The decision to regroup, and the division of a step so that no slot and no buffer overflows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unit.geometry.executed import clusters, exchange, jobs_of
from unit.geometry.kit import PlannedCluster, geometry
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.decide import _direct_span, _regroup_span, decide
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.plan import Job, StepPlanner
from vllm_ascend_pd.geometry.regroup import RegroupPlanner, Room
from vllm_ascend_pd.geometry.shard import contributors
from vllm_ascend_pd.geometry.substeps import room_for_a_block, sub_steps


def caches(
    kind: str, heads: int, p_tp: int, d_tp: int, cells: tuple[int, ...] = (256, 256), block: int = 128
) -> Iterator[CacheGeometry]:
    return (geometry(kind, heads=heads, tp=tp, block=block, cells=cells) for tp in (p_tp, d_tp))


@pytest.mark.parametrize(
    ("heads", "p_tp", "d_tp", "direct", "regrouped", "wanted"),
    [
        (8, 8, 2, 256, 128 << 10, True),  # Llama-70B
        (8, 8, 4, 256, 64 << 10, True),
        (8, 4, 8, 256, 32 << 10, True),  # packing only
        (4, 16, 2, 256, 64 << 10, True),  # Qwen3-235B
        (4, 16, 4, 32 << 10, 32 << 10, False),
        (8, 4, 4, 64 << 10, 64 << 10, False),
    ],
)
def test_token_major_caches_regroup_where_the_design_says(
    heads: int, p_tp: int, d_tp: int, direct: int, regrouped: int, wanted: bool
) -> None:
    decision = decide(*caches("token", heads, p_tp, d_tp))
    assert (decision.direct_span, decision.regroup_span, decision.regroup) == (direct, regrouped, wanted)
    assert decision.mode == ("regroup" if wanted else "direct")


def test_latents_and_planes_are_written_directly() -> None:
    assert not decide(*caches("token", 1, 16, 4, cells=(1152,))).regroup
    assert not decide(*caches("opaque", 4, 4, 2)).regroup
    assert not decide(*caches("head", 8, 8, 2)).regroup


def test_a_small_gain_is_worth_it_only_for_very_short_spans() -> None:
    halves = [decide(*caches("token", 2, 2, 1, cells=(cell,), block=1)) for cell in (2048, 4096)]
    assert [(each.direct_span, each.regroup_span) for each in halves] == [(2048, 4096), (4096, 8192)]
    assert [each.regroup for each in halves] == [True, False]


@settings(max_examples=150)
@given(
    kind=st.sampled_from(["token", "head", "opaque"]),
    heads=st.integers(1, 12),
    p_tp=st.integers(1, 12),
    d_tp=st.integers(1, 12),
)
def test_one_pair_of_ranks_of_each_kind_stands_for_all(kind: str, heads: int, p_tp: int, d_tp: int) -> None:
    p, d = caches(kind, heads, p_tp, d_tp)
    every = min(
        (_direct_span(p, d, rank, d_rank), _regroup_span(d, d_rank))
        for d_rank in range(d_tp)
        for rank in contributors(p, d, d_rank)
    )
    decision = decide(p, d)
    assert (decision.direct_span, decision.regroup_span) == every


def test_a_thousand_ranks_are_planned_as_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    monkeypatch.setattr(StepPlanner, "__init__", _counting(StepPlanner.__init__, planned))
    decide(*caches("token", 8, 1024, 1024))
    decide(*caches("token", 8, 512, 1024))
    assert 0 < len(planned) <= 8


def _counting(function: Callable[..., None], calls: list[int]) -> Callable[..., None]:
    def counted(*args: object, **kwargs: object) -> None:
        calls.append(1)
        function(*args, **kwargs)

    return counted


def test_the_contributor_with_the_shortest_spans_decides() -> None:
    """Three heads on two ranks: one rank's spans are one head long, the other's two."""
    decision = decide(*caches("token", 3, 2, 1))
    assert (decision.direct_span, decision.regroup_span) == (256, 3 * (32 << 10))


def test_the_configuration_overrides_the_rule() -> None:
    p, d = caches("token", 8, 8, 2)
    assert not decide(p, d, "never").regroup
    assert decide(p, p, "always").regroup
    assert not decide(p, d, "auto", min_span=256).regroup


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(clusters(), st.integers(0, 3), st.integers(0, 300), st.integers(0, 600))
def test_sub_steps_fit_and_together_are_the_step(
    drawn: tuple[PlannedCluster, list[list[int]]], step_number: int, slot: int, buffer: int
) -> None:
    cluster, _ = drawn
    jobs = jobs_of(cluster, [10**6] * len(cluster.requests))
    needs = [room_for_a_block(cluster.p, d) for d in cluster.ds]
    slot += max(need.slot for need in needs)
    buffer += max(max(need.send, need.receive) for need in needs)
    planners = [RegroupPlanner(cluster.p, rank) for rank in range(cluster.p.tp_size)]
    steps = sub_steps(planners[0], jobs, slot, buffer, step_number)
    for number, step in enumerate(steps):
        assert step.step_number == step_number + number
        plans = [planner.plan(step.jobs, step.step_number) for planner in planners]
        for plan in plans:
            assert all(each.nbytes <= slot for each in plan.slots)
            assert max(sum(plan.send_splits), sum(plan.receive_splits)) <= buffer
        exchange(cluster, step.jobs, plans)
    cluster.check()
    for index, job in enumerate(jobs):
        parts = [
            (part.lo, part.hi) for step in steps for part, n in zip(step.jobs, step.members, strict=True) if n == index
        ]
        assert [lo for lo, _ in parts] + [job.hi] == [job.lo] + [hi for _, hi in parts]


def test_a_step_that_fits_is_not_cut() -> None:
    p, d = caches("token", 4, 4, 1, cells=(4, 4), block=8)
    table = np.arange(8, dtype=np.int32)
    jobs = [Job(d, 0, 0, 64, table, table), Job(d, 0, 8, 30, table, table, 1)]
    [step] = sub_steps(RegroupPlanner(p, 0), jobs, 1 << 20, 1 << 20, 5)
    assert (step.jobs, step.members, step.step_number) == (jobs, [0, 1], 5)
    assert sub_steps(RegroupPlanner(p, 0), [Job(d, 0, 8, 8, table, table)], 1, 1) == []


def test_instances_count_separately_for_their_slots_and_together_for_the_buffers() -> None:
    p, d = caches("token", 4, 4, 1, cells=(4, 4), block=8)
    table = np.arange(8, dtype=np.int32)
    jobs = [Job(d, 0, 0, 64, table, table, instance) for instance in (0, 1, 0)]
    planner = RegroupPlanner(p, 0)
    row = 4 * 4 * 2  # bytes of one token with all its heads
    # 192 tokens in four shares of 48: the second rank has 16 tokens of instance 0 and 32 of instance 1.
    room = planner.room(jobs)
    assert room.slot == 48 * row
    assert room.send == room.receive == 4 * 48 * row // 4
    assert planner.room(jobs[:2]).slot == 32 * row
    assert planner.room([jobs[0], jobs[1], jobs[1]], step_number=0).slot == 48 * row
    narrow = [Job(d, 0, 0, 24, table, table, instance) for instance in (0, 1)] * 4
    assert planner.room(narrow).slot == 24 * row
    assert len(sub_steps(planner, narrow, 24 * row, 1 << 20)) == 1


def test_a_block_that_one_rank_owns_fills_its_receive_buffer() -> None:
    p, d = caches("opaque", 4, 4, 1, cells=(4,), block=8)
    plane = 4 * 8
    assert room_for_a_block(p, d) == Room(slot=4 * plane, send=plane, receive=3 * plane)
    table = np.arange(1, dtype=np.int32)
    with pytest.raises(LocalProtocolError, match="does not fit"):
        sub_steps(RegroupPlanner(p, 0), [Job(d, 0, 0, 8, table, table)], 4 * plane, 2 * plane)


def test_the_room_for_a_block_is_that_of_the_worst_rotation() -> None:
    """Five heads on three ranks, [1, 2, 2]: when the first rank owns the block it receives four."""
    assert room_for_a_block(*caches("opaque", 5, 3, 1, cells=(4,), block=10)).receive == 4 * 4 * 10


def test_a_slot_that_cannot_hold_a_block_is_refused() -> None:
    p, d = caches("token", 4, 4, 1, cells=(4, 4), block=8)
    table = np.arange(8, dtype=np.int32)
    with pytest.raises(LocalProtocolError, match="does not fit"):
        sub_steps(RegroupPlanner(p, 0), [Job(d, 0, 0, 64, table, table)], 16, 1 << 20)
