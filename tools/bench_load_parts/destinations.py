# SPDX-License-Identifier: Apache-2.0
"""The cost of pushes for P: how long its steps take while it pushes to so many D's, and while it pushes nothing.

P has a core to itself and always has prompts to compute: as many as D's make a step, and each D gets one of them. A
step's time is that from one end of a step to another one, over the steps between; tokens a step and how busy its core
is show that P never waits. In a turn each number of D's has its phase, and in one phase P is asked itself and pushes
nothing; a ratio is within a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import httpx

from tools.bench_load_parts.figures import ranged
from tools.bench_load_parts.pushed import ENDED_S, STEPS, cache_bytes, rotated
from tools.bench_load_parts.systems import CACHED, MODEL, LoadedSystem, PairSettings, extra_config, started
from tools.support.client import TIMEOUT, body_of, prompt, stream
from tools.support.cluster import STRICT, Cluster, fresh_directory, say, say_leaks
from tools.support.models import RECIPES

STEP_TOKENS = 2048
BACKLOG = 3  # times the prompts of a step are under way
FILLS = 0.2  # share of a phase in which the backlog builds up
LOOK_S = 0.1
FULL = 0.95  # of a step's tokens, and of the core's time; a phase with less had nothing to compute at times


class PLook(NamedTuple):
    """Counts of P at a moment."""

    at: float  # seconds
    steps: float
    tokens: float  # that it has computed
    used: float  # processor seconds of all its processes


class PSteps(NamedTuple):
    """Figures of P in a phase."""

    seconds: float  # a step
    tokens: float  # a step
    busy: float  # share of its core that its processes use


PerDs = Mapping[int, PSteps]  # by how many D's P pushes to; 0: it pushes nothing


def run(args: argparse.Namespace) -> int:
    """Measure P's steps. Return the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    most = max(args.destinations)
    tokens = STEP_TOKENS // most
    shape = {
        "max_len": tokens + 16,
        "chunk": STEP_TOKENS,
        "kv_bytes": cache_bytes(BACKLOG * (STEP_TOKENS + 64 * most)),
        "max_seqs": BACKLOG * most,
    }
    of_pair = PairSettings(args.p_tp, most, "p", config=extra_config(args))
    about = (
        f"P TP {args.p_tp}, {most} prompts of {tokens} tokens a step; {args.repeats} turns, {args.seconds:g} s a phase"
    )
    turns: list[PerDs] = []
    seeds = itertools.count()  # no two prompts are alike
    with Cluster(fresh_directory("bench_load")) as cluster, started(cluster, "b", shape, of_pair) as systems:
        pair = systems["b"]
        front, port = pair.front, int(pair.url.rpartition(":")[2])
        for turn in range(args.repeats):
            phases: dict[int, PSteps] = {}
            for number in rotated((0, *args.destinations), turn):
                url = pair.prefills[0].url
                if number:
                    if front is not None:
                        cluster.stop(front)
                    front = cluster.metaserver(pair.prefills, pair.decodes[:number], port, STRICT)
                    url = front.url
                with pair.running():
                    one = asyncio.run(_steps(pair, url, tokens, BACKLOG * most, args.seconds, seeds))
                phases[number] = one
                said = f"turn {turn + 1}, {number} D's: a step {one.seconds * 1e3:.0f} ms, {one.tokens:.0f} tokens"
                say(f"{said}, its core busy {one.busy:.0%}")
            turns.append(phases)
            rows = [f"{about}; medians (lowest–highest)", "", *table(turns)]
            (args.out / "destinations.md").write_text("\n".join(rows) + "\n")
    say("\n".join(["", *rows]))
    return say_leaks(cluster.leaks)


async def _steps(
    pair: LoadedSystem, url: str, tokens: int, clients: int, seconds: float, seeds: Iterator[int]
) -> PSteps:
    """Return how P computes while so many clients have one prompt after another for it."""
    vocab, begin = RECIPES[MODEL].vocab, time.monotonic()

    async def look() -> PLook:
        page = await asyncio.to_thread(pair.prefills[0].metrics)
        return PLook(
            time.monotonic(), page.get(STEPS, 0.0), page.get(CACHED, 0.0), pair.prefills[0].process.cpu_seconds()
        )

    async with httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None), trust_env=False) as client:

        async def ask() -> None:
            while time.monotonic() < begin + seconds:
                await stream(client, f"{url}/v1/completions", body_of(prompt(tokens, next(seeds), vocab), 1))

        asking = asyncio.gather(*(ask() for _ in range(clients)))
        await asyncio.sleep(FILLS * seconds)
        looks = [await look()]
        while time.monotonic() < begin + seconds:
            await asyncio.sleep(LOOK_S)
            looks.append(await look())
        await asyncio.wait_for(asking, ENDED_S)
    return between(looks)


def between(looks: Sequence[PLook]) -> PSteps:
    """Return the means from the first end of a step that was seen to the last one. Raise RuntimeError for too few."""
    ends = [after for before, after in pairwise(looks) if after.steps > before.steps]
    if len(ends) < 2:
        raise RuntimeError("P had no two steps within a phase: more --seconds")
    first, last = ends[0], ends[-1]
    steps, seconds = last.steps - first.steps, last.at - first.at
    return PSteps(seconds / steps, (last.tokens - first.tokens) / steps, (last.used - first.used) / seconds)


def table(turns: Sequence[PerDs]) -> list[str]:
    """Return a table in Markdown: a step's time, and its ratio to that without a push in the same turn."""
    columns = ["D's", "a step, ms", "step / without a push", "tokens a step", "P's core busy"]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for number in sorted(turns[0]):
        mine = [one[number] for one in turns]
        middle = PSteps(*(statistics.median(values) for values in zip(*mine, strict=True)))
        ratio = ranged([one[number].seconds / one[0].seconds for one in turns]) if number else ""
        waited = min(middle.tokens / STEP_TOKENS, middle.busy) < FULL
        cells = [f"{number or 'none'}", f"{middle.seconds * 1e3:.0f}", ratio, f"{middle.tokens:.0f}"]
        rows.append(f"| {' | '.join([*cells, f'{middle.busy:.0%}' + ', **it waited**' * waited])} |")
    return rows
