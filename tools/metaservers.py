# SPDX-License-Identifier: Apache-2.0
"""Print what several metaservers cost that do not know each other's load: a simulation (`plan --load`), on a virtual
clock.

Chats of several turns come as a Poisson process; a turn's prompt has all before it. Each turn takes a metaserver at
random, as connections behind a Service do, or all turns of a chat the same one. Engines, lines of their steps and load
are the same in each row.
"""

from __future__ import annotations

import argparse
import random

import numpy as np

from tools.bench_load_parts.loads import new_tokens
from vllm_ascend_pd.cli.load.arrivals import Arrival, Limits
from vllm_ascend_pd.cli.load.engine import EngineSizes
from vllm_ascend_pd.cli.load.lines import StepLine, StepLines
from vllm_ascend_pd.cli.load.world import LoadedFleet, LoadedWorld

CHUNK, HEAD, TURN, ANSWER, TURNS, PAUSE_S = 128, 2048, 512, 256, 6, 8.0
# Of an engine of 16 NPUs in order of magnitude; no measurement.
LINES = StepLines(StepLine(0.010, 0.00004), StepLine(0.020, 0.0002))
SIZES = EngineSizes(step_tokens=16_384, at_once=256, cache_tokens=500_000, chunk=CHUNK)
LIMITS = Limits(1.0, 0.05)


def chats(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return the turns of chats of which `rate` begin in a second."""
    dice, turns, at, number = random.Random(seed), list[Arrival](), 0.0, 0
    while (at := at + dice.expovariate(rate)) < seconds:
        when, number = at, number + 1
        for turn in range(TURNS):
            tokens = HEAD + turn * (TURN + ANSWER)
            chunks = tuple(number * 10_000 + chunk for chunk in range(-(-tokens // CHUNK)))
            turns.append(Arrival(when, tokens, ANSWER, chunks))
            when += dice.expovariate(1 / PAUSE_S) + 1.0
    return sorted(turns, key=lambda one: one.at)


def row(metaservers: int, sticky: bool, load: list[Arrival], prefills: int, decodes: int) -> str:
    world = LoadedWorld(LoadedFleet(prefills, decodes, LINES, SIZES, 0.03, metaservers, sticky), load)
    world.run()
    done = [one for one in world.requests if not one.failed]
    good = sum(LIMITS.good(one.first, one.last, one.arrival.answer) for one in done)
    ttft = np.percentile([one.first * 1e3 for one in done], (50, 90, 99))
    tpot = np.percentile([(one.last - one.first) * 1e3 / (one.arrival.answer - 1) for one in done], (50, 99))
    shown = (", ".join(f"{value:.0f}" for value in values) for values in (ttft, tpot))
    return f"{good / len(load):.1%} | {' | '.join(shown)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--metaservers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 6.0], help="chats that begin in a second")
    parser.add_argument("--seconds", type=float, default=120.0, help="in which chats begin")
    parser.add_argument("--engines", type=int, nargs=2, default=[4, 4], metavar=("P", "D"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("| chats/s | metaservers | good | TTFT p50, p90, p99, ms | TPOT p50, p99, ms |\n|---|---|---|---|---|")
    for rate in args.rates:
        load = chats(rate, args.seconds, args.seed)
        for count, sticky in [(n, one) for n in args.metaservers for one in ((False, True) if n > 1 else (False,))]:
            name = f"{count}, a chat's turns at one" if sticky else f"{count}"
            print(f"| {rate:g} | {name} | {row(count, sticky, load, *args.engines)} |", flush=True)
    share = 1 - new_tokens(load, CHUNK) / sum(one.prompt for one in load)
    print(f"{len(load):,} requests at the last rate; {share:.0%} of their tokens were in an earlier one")


if __name__ == "__main__":
    main()
