# SPDX-License-Identifier: Apache-2.0
"""Run seeds, one after the other: `run_seed` for tests, `main` for scripts/simulate.sh."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from simulation.cluster import SimulatedCluster
from simulation.mutations import ALL, Mutation
from simulation.settings import SimulationSettings, draw
from simulation.world import Violation
from vllm_ascend_pd.errors import LocalProtocolError

CHUNK = 8  # seeds that one process runs before it reports


@dataclass(slots=True)
class SeedResult:
    seed: int
    transfers: int
    violation: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    stats: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)


def run_seed(
    seed: int, mutation: Mutation | None = None, settings: SimulationSettings | None = None, *, tracing: bool = False
) -> SeedResult:
    """Run one cluster from its start until nothing happens any more."""
    mutation = mutation or Mutation()
    cluster = SimulatedCluster(seed, settings or mutation.settings(seed), mutation, tracing=tracing)
    world = cluster.world
    violation = ""
    try:
        last = cluster.load()
        t = cluster.settings.timers
        world.run(last + 20 * (cluster.landed_s + t.recv_deadline_s) + 3000)
        if not world.idle:
            raise Violation("promise 4: it never becomes quiet")
        cluster.check_end()
    except (Violation, LocalProtocolError) as problem:
        violation = f"{type(problem).__name__}: {problem}"
        world.log("", "VIOLATION", violation)
    return SeedResult(seed, cluster.transfers, violation, world.faults, world.stats, world.reasons, world.trace)


@dataclass(slots=True)
class Sum:
    """Total of many seeds."""

    seeds: int = 0
    transfers: int = 0
    violations: list[SeedResult] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    stats: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, other: Sum) -> None:
        self.seeds += other.seeds
        self.transfers += other.transfers
        self.faults += other.faults
        self.reasons += other.reasons
        longest = max(self.stats["longest ms"], other.stats["longest ms"])
        self.stats += other.stats
        self.stats["longest ms"] = longest
        self.violations += other.violations


def run_some(first: int, count: int, mutation: str = "", stop_at: int = 1, plain: bool = False) -> Sum:
    """Run consecutive seeds in this process, or only those of plain worlds."""
    total = Sum()
    gc.disable()  # a cluster lives for a tenth of a second; its garbage is collected between seeds
    gc.freeze()  # and older objects are not searched for it
    try:
        for seed in range(first, first + count):
            if plain and not draw(seed).plain:
                continue
            result = run_seed(seed, ALL[mutation] if mutation else None)
            violations = [result] if result.violation else []
            total.add(Sum(1, result.transfers, violations, result.faults, result.stats, result.reasons))
            if len(total.violations) >= stop_at:
                break
            if seed % 8 == 7:
                gc.collect()
    finally:
        gc.enable()
    return total


def run_seeds(
    first: int,
    count: int,
    mutation: str = "",
    *,
    jobs: int = 1,
    progress_s: float = 5.0,
    stop_at: int = 1,
    plain: bool = False,
) -> Sum:
    """Run consecutive seeds on `jobs` cores. Prints its progress every `progress_s` seconds."""
    total = Sum()
    began = said = time.monotonic()
    for part in _run_chunks(first, count, mutation, jobs, stop_at, plain):
        total.add(part)
        for result in part.violations:
            print(f"seed {result.seed}: {result.violation}", flush=True)
        if len(total.violations) >= stop_at:
            break
        now = time.monotonic()
        if now - said >= progress_s:
            said = now
            print(
                f"{total.seeds}/{count} seeds, {total.transfers} transfers, {total.transfers / (now - began):.0f}/s, "
                f"{sum(total.faults.values())} faults, {len(total.violations)} violations",
                flush=True,
            )
    return total


def _run_chunks(first: int, count: int, mutation: str, jobs: int, stop_at: int, plain: bool) -> Iterator[Sum]:
    """Run the seeds in chunks, and yield the total of each."""
    starts = range(first, first + count, CHUNK)
    chunks = [(at, min(CHUNK, first + count - at), mutation, stop_at, plain) for at in starts]
    if jobs == 1:
        yield from (run_some(*chunk) for chunk in chunks)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        try:
            yield from pool.map(run_some, *zip(*chunks, strict=True))
        finally:
            pool.shutdown(cancel_futures=True)


def print_total(total: Sum, cpu_s: float, wall_s: float) -> None:
    ended = {key: total.stats[key] for key in ("transfers ok", "transfers failed", "revocations", "writes landed")}
    died = total.transfers - ended["transfers ok"] - ended["transfers failed"]
    print(f"\n{total.seeds} seeds, {total.transfers} transfers, {total.stats['events']} events")
    print(
        f"  {ended['transfers ok']} ended well, {ended['transfers failed']} failed and fenced, {died} died with their D"
    )
    print(f"  {ended['writes landed']} writes landed, {ended['revocations']} revocations")
    print(f"  {total.stats['exchanges']} exchanges, {total.stats['catch-ups']} asked for again (counted by rank)")
    print(f"  longest transfer {total.stats['longest ms'] / 1000:.1f} simulated seconds, not counting stops of its D")
    print(
        f"  {cpu_s:.1f} s of one core ({total.transfers / max(cpu_s, 1e-9):.0f} transfers/s), {wall_s:.1f} s by the clock"
    )
    print("faults injected")
    for kind, number in sorted(total.faults.items()):
        print(f"  {number:8d}  {kind}")
    print("why pushes were given up (P) and transfers fenced (D), the most frequent")
    for reason, number in total.reasons.most_common(24):
        print(f"  {number:8d}  {reason}")
    print(f"violations: {len(total.violations)}")


def replay(seed: int, mutation: Mutation, lines: int) -> SeedResult:
    """Run one seed again, with its trace; `lines` 0 prints all of it."""
    result = run_seed(seed, mutation, tracing=True)
    print("\n".join(result.trace[-lines:]))
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="simulate.sh", description="Simulated clusters, one per seed.")
    parser.add_argument("--seeds", type=int, default=50, help="number of seeds (default 50, about 35 transfers each)")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in (default 1)")
    parser.add_argument("--seed", type=int, help="run only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: print everything that happened")
    parser.add_argument("--lines", type=int, default=60, help="lines of the trace shown for a violation (default 60)")
    parser.add_argument("--mutation", choices=sorted(ALL), help="take this rule out of the protocol")
    parser.add_argument("--plain", action="store_true", help="only worlds of one group, without drafts, D always first")
    parser.add_argument("--violations", type=int, default=1, help="stop after this many violations (default 1)")
    args = parser.parse_args(argv)
    mutation = ALL[args.mutation] if args.mutation else Mutation()
    if args.trace and args.seed is None:
        parser.error("--trace shows one seed: which one, by --seed")
    if args.seed is not None:
        print(draw(args.seed))
        result = replay(args.seed, mutation, 0) if args.trace else run_seed(args.seed, mutation)
        print(result.violation or f"seed {args.seed}: {result.transfers} transfers, no violation")
        return 1 if result.violation else 0
    wall = time.monotonic()
    total = run_seeds(args.first, args.seeds, mutation.name, jobs=args.jobs, stop_at=args.violations, plain=args.plain)
    times = os.times()
    print_total(total, times.user + times.system + times.children_user + times.children_system, time.monotonic() - wall)
    for result in total.violations[:1]:
        print(
            f"\nseed {result.seed}: {result.violation}\nthe end of its trace (scripts/simulate.sh --seed {result.seed} --trace shows all):"
        )
        replay(result.seed, mutation, args.lines)
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main())
