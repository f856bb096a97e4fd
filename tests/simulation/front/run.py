# SPDX-License-Identifier: Apache-2.0
"""Run seeds of the metaserver's simulation: for tests, and `main` for scripts/simulate.sh --front."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context

from simulation.front.mutations import ALL
from simulation.front.world import FrontResult, run_seed

CHUNK = 4  # seeds that one process runs before it reports


@dataclass
class Total:
    seeds: int = 0
    said: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[FrontResult] = field(default_factory=list)
    resumed: int = 0
    cpu_s: float = 0.0

    @property
    def requests(self) -> int:
        return self.said.total()

    def add(self, other: Total) -> None:
        self.seeds += other.seeds
        self.said.update(other.said)
        self.faults.update(other.faults)
        self.violations += other.violations
        self.resumed += other.resumed
        self.cpu_s += other.cpu_s


def run_some(first: int, count: int, mutation: str = "") -> Total:
    total, began = Total(), time.process_time()
    logging.disable(logging.CRITICAL)  # engines fail all the time
    gc.disable()
    gc.freeze()  # what is older than the seeds is not searched for their garbage
    try:
        for seed in range(first, first + count):
            result = ALL[mutation].run(seed, taken_out=True) if mutation else run_seed(seed)
            total.add(Total(1, result.said, result.faults, [result] if result.violation else [], result.resumed))
            gc.collect()
            if result.violation:
                break
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
    total.cpu_s = time.process_time() - began
    return total


def run_seeds(first: int, count: int, mutation: str = "", *, jobs: int = 1, progress_s: float = 5.0) -> Total:
    """Run consecutive seeds until one breaks a promise. Prints its progress every `progress_s` seconds."""
    chunks = [(at, min(CHUNK, first + count - at), mutation) for at in range(first, first + count, CHUNK)]
    total, said = Total(), time.monotonic()
    with ProcessPoolExecutor(jobs, get_context("spawn")) if jobs > 1 else nullcontext() as pool:
        for part in pool.map(run_some, *zip(*chunks, strict=True)) if pool else (run_some(*chunk) for chunk in chunks):
            total.add(part)
            if total.violations:
                if pool:
                    pool.shutdown(wait=False, cancel_futures=True)
                break
            if time.monotonic() - said >= progress_s:
                said = time.monotonic()
                print(f"{total.seeds}/{count} seeds, {total.requests} requests, 0 violations", flush=True)
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="simulate.sh --front", description=(__doc__ or "").split(":", 1)[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="S")
    parser.add_argument("--seed", type=int, help="run only this one")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--mutation", default="", choices=["", *ALL])
    args = parser.parse_args(argv)
    first, count = (args.first, args.seeds) if args.seed is None else (args.seed, 1)
    total = run_seeds(first, count, args.mutation, jobs=args.jobs)
    print(
        f"{total.seeds} seeds, {total.requests} requests, {total.resumed} streams resumed, {total.cpu_s:.0f} s of one core"
    )
    for title, counts in (("clients", total.said), ("faults of engines", total.faults)):
        print(title)
        for what, count in sorted(counts.items()):
            print(f"  {count:10d}  {what}")
    for result in total.violations:
        print(f"seed {result.seed}: {result.violation}")
    print(f"violations: {len(total.violations)}")
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main())
