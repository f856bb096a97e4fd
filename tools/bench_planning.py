# SPDX-License-Identifier: Apache-2.0
"""Time to plan a step of 100 requests with 100 new blocks each, in milliseconds per 1,000 blocks.

One core, no engine. Every case is planned by a P rank as in production; block ids are random, so no writes merge. Shows
that the time does not grow with the blocks that earlier steps have sent. `--strict` fails above the wanted figures.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable

import msgspec
import numpy as np

from vllm_ascend_pd.geometry.layout import ALL, WINDOW, CacheGeometry, Group, Kind, Region
from vllm_ascend_pd.geometry.pairing import pairings
from vllm_ascend_pd.geometry.plan import Job, JobPlan, StepPlanner
from vllm_ascend_pd.geometry.regroup import RegroupPlan, RegroupPlanner

Plan = Callable[[list[Job], int], list[JobPlan] | RegroupPlan]
How = Callable[[CacheGeometry, int], Plan]  # P's geometry, and its rank

BLOCK = 128
CELL = 128 * 2  # head dimension 128, two bytes
LATENT = 576 * 2
PREDECESSOR = 10.6  # the predecessor's milliseconds per 1,000 blocks, which grow with the blocks already sent


def cache(kind: str, heads: int, tp: int) -> CacheGeometry:
    held = max(1, heads // tp)
    cells = {"k": CELL, "v": CELL} if heads > 1 else {"latent": LATENT}
    regions = []
    for name, cell in cells.items():
        head, token = (cell, held * cell) if kind == "token" else (BLOCK * cell, cell)
        regions.append(Region(name, BLOCK * held * cell, head, token, cell))
    return CacheGeometry(BLOCK, heads, tp, "bfloat16", "plain", tuple(regions), (("layer",),))


def kinds(components: dict[str, int], windows: tuple[int, ...], heads: int, tp: int, token: bool) -> CacheGeometry:
    """Return a cache with a group for each window (0: all tokens), each a layer with all components.

    Token by token, or head by head.
    """
    held = max(1, heads // tp)
    regions = tuple(
        Region(
            name,
            BLOCK * held * cell,
            (cell if token else BLOCK * cell) if held > 1 else 0,
            held * cell if token else cell,
            cell,
        )
        for name, cell in components.items()
    )
    groups = tuple(Group(BLOCK, WINDOW if n else ALL, n) for n in windows)
    others = tuple(Kind(heads, "int8", "plain", regions, (f"layer.{index}",), index) for index in range(1, len(groups)))
    layers = tuple(f"layer.{index}" for index in range(len(groups)))
    return CacheGeometry(BLOCK, heads, tp, "int8", "plain", regions, (layers,), others=others, groups=groups, group=0)


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


def of_all_kinds(how: How, p: CacheGeometry, d: CacheGeometry) -> Callable[[list[Job], int], None]:
    """Plan a step as P does: kind by kind."""
    planners = [(how(pair.p, 0), pair.d) for pair in pairings(p, d)]

    def plan(jobs: list[Job], rotation: int) -> None:
        for planner, kind in planners:
            planner([msgspec.structs.replace(job, d=kind) for job in jobs], rotation)

    return plan


def descriptors(plan: list[JobPlan] | RegroupPlan) -> int:
    """Return the number of writes of one layer."""
    if isinstance(plan, RegroupPlan):
        regions = [regions for slot in plan.slots for regions in slot.writes.values()]
    else:
        regions = [regions for job in plan for regions in job.by_rank.values()]
    return sum(len(spans) for some in regions for spans in some)


CASES = (
    # name, how, heads, layout, P ranks, D ranks, wanted milliseconds per 1,000 blocks
    ("8 -> 2, head-major, direct", direct, 8, "head", 8, 2, 0.1),
    ("8 -> 2, token-major, regroup", regroup, 8, "token", 8, 2, 0.1),
    ("4 -> 8, head-major, direct", direct, 8, "head", 4, 8, 0.25),
    ("4 -> 8, token-major, regroup", regroup, 8, "token", 4, 8, 0.25),
    ("8 -> 8, head-major, direct", direct, 8, "head", 8, 8, 0.1),
    ("MLA 16 -> 4, direct", direct, 1, "token", 16, 4, 0.1),
)


# Three groups of four components, beside one group of one: the most by which the time may grow, in one run.
MAX_TIMES = 10.0
SCALED = {"k": 128, "v": 128, "k_scale": 4, "v_scale": 4}
SPARSE = {"latent": 1024, "rope": 128, "index": 128, "index_scale": 4}
WINDOWS = (0, 1 << 20, 1 << 20)  # longer than the prompts, so all tokens of every group are pushed
BESIDE = (
    # name, how, heads, P ranks, D ranks, components of the plain group, components of each of three groups
    ("8 -> 2, k and v with scales, direct", direct, 8, 8, 2, {"k": CELL, "v": CELL}, SCALED),
    ("8 -> 2, k and v with scales, regroup", regroup, 8, 8, 2, {"k": CELL, "v": CELL}, SCALED),
    ("MLA 16 -> 4, with rope, index and scale", direct, 1, 16, 4, {"latent": LATENT}, SPARSE),
)


def beside(args: argparse.Namespace) -> bool:
    """Return whether a case takes more than it may. The two are measured in turns, in processor time."""
    print(f"\nThree groups of four components beside one plain group; wanted: at most {MAX_TIMES:.0f} times as long")
    print(f"{'P -> D':42} {'plain':>8} {'3 x 4':>8} {'times':>7}   ms of the processor a step, best")
    late = False
    for name, how, heads, p_tp, d_tp, plain, components in BESIDE:
        plans = []
        for cells, windows in ((plain, (0,)), (components, WINDOWS)):
            p, d = (kinds(cells, windows, heads, tp, how is regroup) for tp in (p_tp, d_tp))
            plans.append((of_all_kinds(how, p, d), step(d, args.requests, args.new_blocks, 0)))
        best = [math.inf, math.inf]
        for _ in range(args.rounds):
            for which, (plan, jobs) in enumerate(plans):
                began = time.thread_time()  # processor time: the longer of the two would be interrupted more often
                plan(jobs, 0)
                best[which] = min(best[which], time.thread_time() - began)
        times = best[1] / best[0]
        late |= times > MAX_TIMES
        print(
            f"{name:42} {best[0] * 1e3:8.2f} {best[1] * 1e3:8.2f} {times:7.1f}{'   ABOVE' if times > MAX_TIMES else ''}"
        )
    return late


def measure(plan: Plan, jobs: list[Job], rounds: int) -> tuple[float, float, int]:
    """Return the best and the median seconds, and the descriptors of a layer."""
    times = []
    for rotation in range(rounds):
        begin = time.perf_counter()
        found = plan(jobs, rotation)
        times.append(time.perf_counter() - begin)
    return min(times), statistics.median(times), descriptors(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--new-blocks", type=int, default=100, help="per request and step")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--strict", action="store_true", help="exit 1 when a figure is above the wanted one")
    args = parser.parse_args()
    thousands = args.requests * args.new_blocks / 1000
    print(
        f"{args.requests} requests x {args.new_blocks} new blocks; the predecessor took {PREDECESSOR} ms per 1,000 blocks"
    )
    print(f"{'P -> D':32} {'best':>8} {'median':>8} {'wanted':>8} {'descriptors':>12}   ms per 1,000 blocks, one rank")
    late = False
    for name, how, heads, kind, p_tp, d_tp, wanted in CASES:
        p, d = cache(kind, heads, p_tp), cache(kind, heads, d_tp)
        best, median, count = measure(how(p, 0), step(d, args.requests, args.new_blocks, 0), args.rounds)
        best, median = best * 1e3 / thousands, median * 1e3 / thousands
        late |= best > wanted
        print(f"{name:32} {best:8.3f} {median:8.3f} {wanted:8.2f} {count:12,}{'   ABOVE' if best > wanted else ''}")
    late |= beside(args)
    print("\nThe same step when each request has already sent so many blocks (8 -> 2):")
    print(f"{'sent per request':>18} {'direct':>10} {'regroup':>10}   ms per 1,000 blocks, best")
    for sent in (0, 100, 1000, 5000):
        figures = []
        for how, kind in ((direct, "head"), (regroup, "token")):
            d = cache(kind, 8, 2)
            best, _, _ = measure(how(cache(kind, 8, 8), 0), step(d, args.requests, args.new_blocks, sent), args.rounds)
            figures.append(best * 1e3 / thousands)
        print(f"{sent:18,} {figures[0]:10.3f} {figures[1]:10.3f}")
    return 1 if late and args.strict else 0


if __name__ == "__main__":
    sys.exit(main())
