# SPDX-License-Identifier: Apache-2.0
"""Plans of one plain group, and how long they take. As a program: the best time of each case, as JSON.

bench_planning.py runs it with the package of an older commit too, so it uses only what the planner has had from the
beginning.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from vllm_ascend_pd.geometry import layout
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.geometry.plan import Job, JobPlan, StepPlanner
from vllm_ascend_pd.geometry.regroup import RegroupPlan, RegroupPlanner

Plan = Callable[[list[Job], int], list[JobPlan] | RegroupPlan]
How = Callable[[CacheGeometry, int], Plan]  # P's geometry, and its rank

BLOCK = 128
CELL = 128 * 2  # head dimension 128, two bytes
LATENT = 576 * 2


def cache(kind: str, heads: int, tp: int) -> CacheGeometry:
    rank_heads = max(1, heads // tp)
    cells = {"k": CELL, "v": CELL} if heads > 1 else {"latent": LATENT}
    regions = []
    for name, cell in cells.items():
        head, token = (cell, rank_heads * cell) if kind == "token" else (BLOCK * cell, cell)
        regions.append(Region(name, BLOCK * rank_heads * cell, head, token, cell))
    return CacheGeometry(BLOCK, heads, tp, "bfloat16", "plain", tuple(regions), (("layer",),))


def step(d: CacheGeometry, requests: int, new: int, sent: int) -> list[Job]:
    """Return the jobs of requests whose first `sent` blocks have been sent and whose next `new` blocks are sent now."""
    noise = np.random.default_rng(1)
    pool = 1 << 20
    tables = noise.integers(0, pool, (2, requests, sent + new), dtype=np.int32)
    return [Job(d, 0, sent * BLOCK, (sent + new) * BLOCK, tables[0, n], tables[1, n]) for n in range(requests)]


def direct(p: CacheGeometry, rank: int) -> Plan:
    return StepPlanner(p, rank).plan


def regroup(p: CacheGeometry, rank: int) -> Plan:
    return RegroupPlanner(p, rank).plan


def descriptors(plan: list[JobPlan] | RegroupPlan) -> int:
    """Return the number of writes of one layer."""
    if isinstance(plan, RegroupPlan):
        regions = [regions for slot in plan.slots for regions in slot.writes.values()]
    else:
        regions = [regions for job in plan for regions in job.by_rank.values()]
    return sum(len(spans) for some in regions for spans in some)


class PlanCase(NamedTuple):
    name: str
    how: How
    heads: int
    layout: str
    p_tp: int
    d_tp: int
    wanted: float  # milliseconds per 1,000 blocks

    def step(self, *sizes: int) -> tuple[Plan, list[Job]]:
        return case(self.how, self.heads, self.layout, self.p_tp, self.d_tp, *sizes)


CASES = (
    PlanCase("8 -> 2, head-major, direct", direct, 8, "head", 8, 2, 0.1),
    PlanCase("8 -> 2, token-major, regroup", regroup, 8, "token", 8, 2, 0.1),
    PlanCase("4 -> 8, head-major, direct", direct, 8, "head", 4, 8, 0.25),
    PlanCase("4 -> 8, token-major, regroup", regroup, 8, "token", 4, 8, 0.25),
    PlanCase("8 -> 8, head-major, direct", direct, 8, "head", 8, 8, 0.1),
    PlanCase("MLA 16 -> 4, direct", direct, 1, "token", 16, 4, 0.1),
)


def case(how: How, heads: int, kind: str, p_tp: int, d_tp: int, *sizes: int) -> tuple[Plan, list[Job]]:
    """Return a planner and its step. `sizes`: requests, new blocks, and blocks that were sent before."""
    return how(cache(kind, heads, p_tp), 0), step(cache(kind, heads, d_tp), *sizes)


def best(plan: Callable[[list[Job], int], object], jobs: list[Job], rounds: int) -> float:
    """Return the least seconds of the processor."""
    least = math.inf
    for step_number in range(rounds):
        began = time.thread_time()
        plan(jobs, step_number)
        least = min(least, time.thread_time() - began)
    return least


if __name__ == "__main__":
    requests, new, rounds = map(int, sys.argv[1:])
    prepared = {one.name: one.step(requests, new, 0) for one in CASES}
    times = dict.fromkeys(prepared, math.inf)
    for _ in range(rounds):  # in turns: what is measured first in a process would be measured cold
        times = {name: min(times[name], best(*made, 1)) for name, made in prepared.items()}
    print(json.dumps({"package": layout.__file__, "times": times}))
