# SPDX-License-Identifier: Apache-2.0
"""Time to plan a step of 100 requests with 100 new blocks each, in milliseconds per 1,000 blocks.

One core, no engine. Every case is planned by a P rank as in production; block ids are random, so no writes merge. Shows
that the time does not grow with the blocks that earlier steps have sent. `--strict` fails above the wanted figures.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tools.support.planning import (
    BLOCK,
    CASES,
    CELL,
    LATENT,
    How,
    Plan,
    best,
    case,
    descriptors,
    direct,
    regroup,
    step,
)
from vllm_ascend_pd.geometry.layout import ALL, WINDOW, CacheGeometry, Group, LayerKind, Region
from vllm_ascend_pd.geometry.pairing import pairings
from vllm_ascend_pd.geometry.plan import Job

ROOT = Path(__file__).resolve().parents[1]
TURNS = 5
PREDECESSOR = 10.6  # the predecessor's milliseconds per 1,000 blocks, which grow with the blocks already sent


def kinds(components: dict[str, int], windows: tuple[int, ...], heads: int, tp: int, token: bool) -> CacheGeometry:
    """Return a cache with a group for each window (0: all tokens), each a layer with all components.

    Token by token, or head by head.
    """
    rank_heads = max(1, heads // tp)
    regions = tuple(
        Region(
            name,
            BLOCK * rank_heads * cell,
            (cell if token else BLOCK * cell) if rank_heads > 1 else 0,
            rank_heads * cell if token else cell,
            cell,
        )
        for name, cell in components.items()
    )
    groups = tuple(Group(BLOCK, WINDOW if n else ALL, n) for n in windows)
    others = tuple(LayerKind(heads, "int8", "plain", regions, index) for index in range(1, len(groups)))
    indices = tuple(range(len(groups)))
    return CacheGeometry(
        block_size=BLOCK,
        kv_heads=heads,
        tp_size=tp,
        dtype="int8",
        packing="plain",
        regions=regions,
        stages=(tuple(f"layer.{index}" for index in indices),),
        others=others,
        kind_of=indices if others else (),
        groups=groups,
    )


def of_all_kinds(how: How, p: CacheGeometry, d: CacheGeometry) -> Callable[[list[Job], int], None]:
    """Plan a step as P does: kind by kind."""
    planners = [(how(pair.p, 0), pair.d) for pair in pairings(p, d)]

    def plan(jobs: list[Job], step_number: int) -> None:
        for planner, kind in planners:
            planner([msgspec.structs.replace(job, d=kind) for job in jobs], step_number)

    return plan


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
        least = [float("inf")] * 2
        for _ in range(args.rounds):  # processor time: the longer of the two would be interrupted more often
            least = [min(had, best(plan, jobs, 1)) for had, (plan, jobs) in zip(least, plans, strict=True)]
        times = least[1] / least[0]
        late |= times > MAX_TIMES
        print(
            f"{name:42} {least[0] * 1e3:8.2f} {least[1] * 1e3:8.2f} {times:7.1f}{'   ABOVE' if times > MAX_TIMES else ''}"
        )
    return late


def beside_commit(commit: str, args: argparse.Namespace) -> None:
    """Print the times of one plain group beside those of an older commit's planner, measured in turns."""
    print(f"\nOne plain group beside the planner of {commit}, {TURNS} turns")
    print(f"{'P -> D':42} {commit[:8]:>8} {'now':>8} {'times':>7}   ms of the processor a step, best")
    archive = subprocess.run(["git", "archive", commit, "vllm_ascend_pd"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    sizes = map(str, (args.requests, args.new_blocks, args.rounds))
    command = [sys.executable, "-m", "tools.support.planning", *sizes]
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as package:
            package.extractall(folder, filter="data")
        times: dict[str, list[float]] = {}
        # Memory is kept: else whether the C library returns it between two plans decides more than the planner.
        kept = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **kept}
        for _ in range(TURNS):
            for which, place in enumerate((Path(folder), ROOT)):  # `-m` puts this folder before all others
                done = subprocess.run(command, cwd=place, env=environment, check=True, stdout=subprocess.PIPE)
                result = json.loads(done.stdout)
                if not Path(result["package"]).is_relative_to(place):
                    raise RuntimeError(f"{result['package']} was measured, which is not in {place}")
                for name, seconds in result["times"].items():
                    least = times.setdefault(name, [float("inf")] * 2)
                    least[which] = min(least[which], seconds)
    for name, (before, now) in times.items():
        print(f"{name:42} {before * 1e3:8.2f} {now * 1e3:8.2f} {now / before:7.2f}")


def measure(plan: Plan, jobs: list[Job], rounds: int) -> tuple[float, float, int]:
    """Return the best and the median seconds, and the descriptors of a layer."""
    times = []
    for step_number in range(rounds):
        begin = time.perf_counter()
        planned = plan(jobs, step_number)
        times.append(time.perf_counter() - begin)
    return min(times), statistics.median(times), descriptors(planned)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--new-blocks", type=int, default=100, help="per request and step")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--strict", action="store_true", help="exit 1 when a figure is above the wanted one")
    parser.add_argument("--beside", metavar="COMMIT", help="also measure the planner of this commit, in turns")
    args = parser.parse_args()
    thousands = args.requests * args.new_blocks / 1000
    print(
        f"{args.requests} requests x {args.new_blocks} new blocks; the predecessor took {PREDECESSOR} ms per 1,000 blocks"
    )
    print(f"{'P -> D':32} {'best':>8} {'median':>8} {'wanted':>8} {'descriptors':>12}   ms per 1,000 blocks, one rank")
    late = False
    for one in CASES:
        least, median, count = measure(*one.step(args.requests, args.new_blocks, 0), args.rounds)
        least, median = least * 1e3 / thousands, median * 1e3 / thousands
        above = least > one.wanted
        late |= above
        row = f"{one.name:32} {least:8.3f} {median:8.3f} {one.wanted:8.2f} {count:12,}"
        print(row + ("   ABOVE" if above else ""))
    late |= beside(args)
    if args.beside:
        beside_commit(args.beside, args)
    print("\nThe same step when each request has already sent so many blocks (8 -> 2):")
    print(f"{'sent per request':>18} {'direct':>10} {'regroup':>10}   ms per 1,000 blocks, best")
    for sent in (0, 100, 1000, 5000):
        figures = []
        for how, kind in ((direct, "head"), (regroup, "token")):
            least, _, _ = measure(*case(how, 8, kind, 8, 2, args.requests, args.new_blocks, sent), args.rounds)
            figures.append(least * 1e3 / thousands)
        print(f"{sent:18,} {figures[0]:10.3f} {figures[1]:10.3f}")
    return 1 if late and args.strict else 0


if __name__ == "__main__":
    sys.exit(main())
