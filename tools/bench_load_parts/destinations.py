# SPDX-License-Identifier: Apache-2.0
"""The cost of pushes for P: how long its steps take while it pushes to so many D's, and while it pushes nothing.

P has a core to itself and always has prompts to compute: as many as D's make a step, and each D gets one of them. In a
turn each number of D's has its phase, and in one phase P is asked itself and pushes nothing; a ratio is within a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import httpx

from tools.bench_load_parts.figures import ranged
from tools.bench_load_parts.pushed import ENDED_S, STEPS, cache_bytes, rotated
from tools.bench_load_parts.systems import CACHED, MODEL, LoadedSystem, PairSettings, started
from tools.support.client import TIMEOUT, body_of, prompt, stream
from tools.support.cluster import STRICT, Cluster, fresh_directory, say
from tools.support.models import RECIPES

STEP_TOKENS = 2048
BACKLOG = 3  # times the prompts of a step are under way
FILLS = 0.2  # share of a phase in which the backlog builds up
LOOK_S = 0.5
FULL = 0.95  # of a step's tokens; a phase with less had nothing to compute at times
WAITING = "vllm:num_requests_waiting"
PREFILL_S, PREFILLS = "vllm:request_prefill_time_seconds_sum", "vllm:request_prefill_time_seconds_count"


class PSteps(NamedTuple):
    """What P's metrics say of a phase."""

    seconds: float  # from the schedule of a prompt to its token: each is computed in one step
    rate: float  # tokens a second
    tokens: float  # a step
    fewest_waiting: float  # prompts, of all looks


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
    config = {"verify": "full" if args.verify else "off", **({"regroup": "always"} if args.regroup else {})}
    of_pair = PairSettings(args.p_tp, most, "p", config=config)
    about = (
        f"P TP {args.p_tp}, {most} prompts of {tokens} tokens a step; {args.repeats} turns, {args.seconds:g} s a phase"
    )
    turns: list[PerDs] = []
    with Cluster(fresh_directory("bench_load")) as cluster, started(cluster, "b", shape, of_pair) as systems:
        pair = systems["b"]
        front, port = pair.front, int(pair.url.rpartition(":")[2])
        for turn in range(args.repeats):
            phases: dict[int, PSteps] = {}
            for number in rotated((0, *args.destinations), turn):
                url = pair.prefills[0].url
                if number:
                    cluster.stop(*([front] if front is not None else []))
                    front = cluster.metaserver(pair.prefills, pair.decodes[:number], port, STRICT)
                    url = front.url
                with pair.running():
                    seed = 10**7 * (1 + turn) + 10**5 * number
                    one = asyncio.run(_steps(pair, url, tokens, BACKLOG * most, args.seconds, seed))
                phases[number] = one
                said = f"turn {turn + 1}, {number} D's: a step {one.seconds * 1e3:.0f} ms, {one.rate:.0f} tokens/s"
                say(f"{said}, {one.tokens:.0f} a step, at least {one.fewest_waiting:.0f} prompts waited")
            turns.append(phases)
            rows = [f"{about}; medians (lowest–highest)", "", *table(turns)]
            (args.out / "destinations.md").write_text("\n".join(rows) + "\n")
    say("\n".join(["", *rows]))
    for line in cluster.leaks:
        say(f"left behind: {line}")
    return 3 if cluster.leaks else 0


async def _steps(pair: LoadedSystem, url: str, tokens: int, clients: int, seconds: float, seed: int) -> PSteps:
    """Return how P computes while so many clients have one prompt after another for it."""
    vocab, begin = RECIPES[MODEL].vocab, time.monotonic()

    async def page() -> tuple[float, Mapping[str, float]]:
        metrics = await asyncio.to_thread(pair.prefills[0].metrics)
        return time.monotonic(), metrics

    async with httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None), trust_env=False) as client:

        async def ask(seed: int) -> None:
            while time.monotonic() < begin + seconds:
                await stream(client, f"{url}/v1/completions", body_of(prompt(tokens, seed, vocab), 1))
                seed += 1

        asking = asyncio.gather(*(ask(seed + 1000 * number) for number in range(clients)))
        await asyncio.sleep(FILLS * seconds)
        began, before = await page()
        waiting = [before.get(WAITING, 0.0)]
        while time.monotonic() < begin + seconds - LOOK_S:
            await asyncio.sleep(LOOK_S)
            ended, after = await page()
            waiting.append(after.get(WAITING, 0.0))
        await asyncio.wait_for(asking, ENDED_S)
    return p_steps(before, after, ended - began, waiting)


def p_steps(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float, waiting: Sequence[float]
) -> PSteps:
    """Return what two readings of P's metrics say of the time between them."""
    prefills, took, computed, steps = (after[name] - before[name] for name in (PREFILLS, PREFILL_S, CACHED, STEPS))
    return PSteps(took / max(1.0, prefills), computed / seconds, computed / max(1.0, steps), min(waiting))


def table(turns: Sequence[PerDs]) -> list[str]:
    """Return a table in Markdown: a step's time, and its ratio to that without a push in the same turn."""
    columns = ["D's", "a step, ms", "step / without a push", "P's tokens/s", "tokens a step", "prompts that waited"]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for number in sorted(turns[0]):
        mine = [one[number] for one in turns]
        middle = PSteps(*(statistics.median(values) for values in zip(*mine, strict=True)))
        ratio = ranged([one[number].seconds / one[0].seconds for one in turns]) if number else ""
        full = "" if middle.tokens >= FULL * STEP_TOKENS else ", **not full**"
        cells = [f"{number or 'none'}", f"{middle.seconds * 1e3:.0f}", ratio, f"{middle.rate:.0f}"]
        cells += [f"{middle.tokens:.0f}{full}", f"at least {min(one.fewest_waiting for one in mine):.0f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows
