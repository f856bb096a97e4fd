# SPDX-License-Identifier: Apache-2.0
"""The cost of pushes for P: how long its steps take while it pushes to so many D's, and while it pushes nothing.

P has a core to itself and always has prompts to compute, so the tokens that it computes a second say how long a step
takes. In a turn each number of D's has its phase, and in one phase P is asked itself and pushes nothing; a ratio is
within a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence

import httpx

from tools.bench_load_parts.figures import ranged
from tools.bench_load_parts.pushed import ENDED_S, rotated
from tools.bench_load_parts.systems import CACHED, MODEL, TOKEN_BYTES, LoadedSystem, PairSettings, started
from tools.support.client import TIMEOUT, body_of, prompt, stream
from tools.support.cluster import STRICT, Cluster, fresh_directory, say
from tools.support.models import RECIPES

STEP_TOKENS = 2048
BACKLOG = 3  # times the prompts of a step are under way
FILLS = 0.2  # share of a phase in which the backlog builds up

PerDs = Mapping[int, float]  # tokens a second that P computes, by how many D's it pushes to; 0: it pushes nothing


def run(args: argparse.Namespace) -> int:
    """Measure P's steps. Return the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    most = max(args.destinations)
    tokens = STEP_TOKENS // most
    cache = BACKLOG * STEP_TOKENS * TOKEN_BYTES * 5 // 4
    shape = {"max_len": STEP_TOKENS, "chunk": STEP_TOKENS, "kv_bytes": cache, "max_seqs": BACKLOG * most}
    turns: list[PerDs] = []
    with (
        Cluster(fresh_directory("bench_load")) as cluster,
        started(cluster, "b", shape, PairSettings(decodes=most, alone="p")) as systems,
    ):
        pair = systems["b"]
        front, port = pair.front, int(pair.url.rpartition(":")[2])
        for turn in range(args.repeats):
            rates: dict[int, float] = {}
            for number in rotated((0, *args.destinations), turn):
                url = pair.prefills[0].url
                if number:
                    cluster.stop(*([front] if front is not None else []))
                    front = cluster.metaserver(pair.prefills, pair.decodes[:number], port, STRICT)
                    url = front.url
                with pair.running():
                    seed = 10**7 * (1 + turn) + 10**5 * number
                    rates[number] = asyncio.run(_rate(pair, url, tokens, BACKLOG * most, args.seconds, seed))
                say(f"turn {turn + 1}, {number} D's: P computes {rates[number]:.0f} tokens/s")
            turns.append(rates)
    about = f"{most} prompts of {tokens} tokens a step; {args.repeats} turns, {args.seconds:g} s a phase"
    rows = [f"{about}; medians (lowest–highest)", "", *table(turns)]
    say("\n".join(["", *rows]))
    (args.out / "destinations.md").write_text("\n".join(rows) + "\n")
    for line in cluster.leaks:
        say(f"left behind: {line}")
    return 3 if cluster.leaks else 0


async def _rate(pair: LoadedSystem, url: str, tokens: int, clients: int, seconds: float, seed: int) -> float:
    """Return the tokens a second that P computes while so many clients have one prompt after another for it."""
    vocab, begin = RECIPES[MODEL].vocab, time.monotonic()

    async def computed() -> tuple[float, float]:
        page = await asyncio.to_thread(pair.prefills[0].metrics)
        return time.monotonic(), page.get(CACHED, 0.0)

    async with httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None), trust_env=False) as client:

        async def ask(seed: int) -> None:
            while time.monotonic() < begin + seconds:
                await stream(client, f"{url}/v1/completions", body_of(prompt(tokens, seed, vocab), 1))
                seed += 1

        asking = [asyncio.create_task(ask(seed + 1000 * number)) for number in range(clients)]
        await asyncio.sleep(FILLS * seconds)
        began, before = await computed()
        await asyncio.sleep((1.0 - FILLS) * seconds)
        ended, after = await computed()
        await asyncio.wait_for(asyncio.gather(*asking), ENDED_S)
    return (after - before) / (ended - began)


def table(turns: Sequence[PerDs]) -> list[str]:
    """Return a table in Markdown: a step's time, and its ratio to that without a push in the same turn."""
    rows = [f"| D's | P's tokens/s | a step of {STEP_TOKENS} tokens, ms | step / without a push |", "|---" * 4 + "|"]
    for number in sorted(turns[0]):
        rates = [one[number] for one in turns]
        step = STEP_TOKENS / statistics.median(rates) * 1e3
        ratio = ranged([one[0] / one[number] for one in turns]) if number else ""
        rows.append(f"| {number or 'none'} | {statistics.median(rates):.0f} | {step:.0f} | {ratio} |")
    return rows
