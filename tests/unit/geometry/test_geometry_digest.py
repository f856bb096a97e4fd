# SPDX-License-Identifier: Apache-2.0
"""Checksums of P's parts add up to D's, however the work is divided, and change with every byte and every place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unit.geometry.executed import PARTS, Parts, clusters, execute, jobs_of, staged
from unit.geometry.kit import CountedMemory, PlannedCluster, covers, dealt, geometry, ranks_of
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.digest import MASK, cache_digest, slot_digest
from vllm_ascend_pd.geometry.plan import Job, JobPlan, StepPlanner
from vllm_ascend_pd.geometry.regroup import RegroupPlanner

Sums = dict[tuple[int, int], tuple[int, ...]]  # (request, d rank) → sum of each region


def sums_on_d(cluster: PlannedCluster) -> Sums:
    """Sums that each D rank finds in its memory for each request."""
    sums: Sums = {}
    for number, request in enumerate(cluster.requests):
        for cache in cluster.engines[request.instance]:
            heads, first = cache.geometry.head_range(cache.rank), request.first // covers(cache.geometry)
            wanted = range(request.first, request.end)
            sums[number, cache.rank] = cache_digest(
                cache.memory.__getitem__, cache.geometry, cache.rank, heads, wanted, request.d_blocks, first
            )
    return sums


def add(total: Sums, number: int, d_rank: int, values: tuple[int, ...]) -> None:
    known = total.get((number, d_rank), (0,) * len(values))
    total[number, d_rank] = tuple((a + b) & MASK for a, b in zip(known, values, strict=True))


def push_directly(cluster: PlannedCluster, rank: int, jobs: list[Job], plans: list[JobPlan], total: Sums) -> None:
    execute(cluster, rank, jobs, plans)
    memory = cluster.ranks[rank].memory.__getitem__
    for number, (job, plan) in enumerate(zip(jobs, plans, strict=True)):
        for d_rank, part in plan.deliveries.items():
            peer = job.d.token_split, job.d.ranks.part(d_rank)
            tokens = range(part.lo, part.hi)
            value = cache_digest(memory, cluster.p, rank, range(*part.heads), tokens, job.p_blocks, peer=peer)
            add(total, number, d_rank, value)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(clusters(), st.booleans())
def test_the_sums_of_all_contributors_are_the_sum_of_d(
    drawn: tuple[PlannedCluster, list[list[int]]], regroup: bool
) -> None:
    cluster, steps = drawn
    total: Sums = {}
    ranks = ranks_of(cluster.p)
    for advances in [*steps, [10**6] * len(cluster.requests)]:
        jobs = jobs_of(cluster, advances)
        if regroup:
            plans = [RegroupPlanner(cluster.p, rank).plan(jobs) for rank in ranks]
            for slot, memory in staged(cluster, jobs, plans):
                for number, value in slot_digest(slot, cluster.ds[slot.instance], jobs, memory).items():
                    add(total, number, slot.d_rank, value)
        else:
            for rank in ranks:
                push_directly(cluster, rank, jobs, StepPlanner(cluster.p, rank).plan(jobs), total)
    cluster.check()
    assert total == sums_on_d(cluster)


@pytest.mark.parametrize(("p_parts", "d_parts"), PARTS)
def test_the_sums_of_all_parts_are_the_sum_of_d(p_parts: Parts, d_parts: Parts) -> None:
    """With divided tokens each sum covers the tokens that both have."""
    p, d = (
        dealt(geometry("token", heads=1, tp=tp, block=8, cells=(4,)), dcp=dcp, pcp=pcp, interleave=run)
        for tp, dcp, pcp, run in (p_parts, d_parts)
    )
    cluster, total = PlannedCluster(p, [d], [(0, 0, 150), (0, 64, 201), (0, 0, 3)], seed=4), Sums()
    for advances in ([40, 90, 0], [10**6] * 3):
        jobs = jobs_of(cluster, advances)
        for rank in ranks_of(p):
            push_directly(cluster, rank, jobs, StepPlanner(p, rank).plan(jobs), total)
    cluster.check()
    assert total == {place: sums for place, sums in sums_on_d(cluster).items() if any(sums)}


def one_cache(kind: str) -> tuple[CountedMemory, np.ndarray]:
    return CountedMemory(geometry(kind, heads=2, tp=1, block=4, cells=(3, 9)), 0, 5), np.array(
        [3, 0, 2], dtype=np.int32
    )


def digest(cache: CountedMemory, table: np.ndarray, first: int = 0, end: int = 10) -> tuple[int, ...]:
    return cache_digest(cache.memory.__getitem__, cache.geometry, 0, range(2), range(first, end), table)


def test_no_tokens_have_the_sum_of_nothing() -> None:
    assert digest(*one_cache("token"), first=4, end=4) == (0, 0)


@pytest.mark.parametrize("kind", ["token", "head"])
def test_every_wanted_byte_counts_and_no_other_does(kind: str) -> None:
    cache, table = one_cache(kind)
    right = digest(cache, table)
    for region in range(2):
        wanted = {place for head in range(2) for place in cache.offsets(region, table, 0, head, 0, 10).ravel().tolist()}
        for place in range(len(cache.memory[region])):
            cache.memory[region][place] ^= 0x10
            assert (digest(cache, table) != right) == (place in wanted)
            cache.memory[region][place] ^= 0x10
    assert digest(cache, table) == right


@pytest.mark.parametrize(("region", "head", "token"), [(0, 1, 5), (0, 0, 4), (1, 1, 4)])
def test_equal_bytes_in_another_place_are_a_difference(region: int, head: int, token: int) -> None:
    """The same cell moved by one token, one head, one region."""
    cache, table = (
        CountedMemory(geometry("token", heads=2, tp=1, block=4, cells=(3, 3)), 0, 5),
        np.array([3, 0, 2], np.int32),
    )
    for memory in cache.memory:
        memory[:] = 7
    first, second = cache.offsets(0, table, 0, 1, 4, 5), cache.offsets(region, table, 0, head, token, token + 1)
    cache.memory[0][first] = 9
    before = digest(cache, table)
    cache.memory[0][first] = 7
    cache.memory[region][second] = 9
    assert digest(cache, table) != before


def test_ranges_add_up_whatever_the_split() -> None:
    for kind, cut in (("token", 5), ("head", 7), ("opaque", 8)):
        cache, table = one_cache(kind)
        total: Sums = {}
        add(total, 0, 0, digest(cache, table, 0, cut))
        add(total, 0, 0, digest(cache, table, cut, 10))
        assert total[0, 0] == digest(cache, table)


def test_blocks_outside_the_memory_are_never_read() -> None:
    cache, _ = one_cache("token")
    for table in (
        np.array([3, 9, 1], dtype=np.int32),
        np.array([3, -1, 1], dtype=np.int32),
        np.array([1], dtype=np.int32),
    ):
        with pytest.raises(LocalProtocolError):
            digest(cache, table)
