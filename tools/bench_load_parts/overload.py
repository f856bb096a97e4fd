# SPDX-License-Identifier: Apache-2.0
"""A pair under more requests than it can do: what it accepts beside what it accepted at its limit, and what is refused.

In a turn each phase has its time: as many clients as the router lets in, each with one request after another, which is
what the pair can do; then Poisson arrivals at multiples of that. A refused request does not come again. Ratios are
within a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import numpy as np

from tools.bench_load_parts.figures import ranged
from tools.bench_load_parts.systems import MODEL, LoadedSystem, PairSettings, started
from tools.support.checks import settled_free_blocks, wait_for_free_blocks
from tools.support.client import TIMEOUT, RequestFailed, body_of, prompt, stream
from tools.support.cluster import Cluster, fresh_directory, say
from tools.support.models import RECIPES
from tools.support.soaking import OPEN, ResourceSample, SoakedServer, sample

AT_LIMIT = 0.0  # the phase of closed loops
FILLS = 0.2  # share of a phase in which the pair fills up
COME_AGAIN_S = 0.05  # a refused client of a closed loop: its place was not free yet
LOOK_S = 0.5
TIMES = ("ttft", "tpot")
USED = "vllm:kv_cache_usage_perc"
GROWS = ("threads", "sockets")  # a sample's fields that a leak shows in at once


class TimedEnd(NamedTuple):
    """The end of an answer, and how fast it was."""

    at: float
    ttft: float
    tpot: float


@dataclass
class Phase:
    """Requests of one phase, by what became of them."""

    factor: float  # of what the pair can do; AT_LIMIT: closed loops
    seconds: float  # of arrivals
    began: float = 0.0
    answers: list[TimedEnd] = field(default_factory=list)
    refused: int = 0  # 429 with Retry-After
    lost: Counter[str] = field(default_factory=Counter)  # every other end
    p_used: float = 0.0  # largest share of P's blocks that was seen
    left: list[str] = field(default_factory=list)  # behind it

    @property
    def counted(self) -> list[TimedEnd]:
        """Answers that ended while the pair was full: not in the first part, and not when no more requests came."""
        begin, end = self.began + FILLS * self.seconds, self.began + self.seconds
        return [one for one in self.answers if begin <= one.at <= end]

    @property
    def rate(self) -> float:
        """Counted answers a second."""
        return len(self.counted) / ((1.0 - FILLS) * self.seconds)

    def percentile(self, name: str, percent: float) -> float:
        return float(np.percentile([getattr(one, name) for one in self.counted] or [float("nan")], percent))


def run(args: argparse.Namespace) -> int:
    """Measure a pair at its limit and beyond. Return 1 if a request was lost, or anything was left behind or grows."""
    args.out.mkdir(parents=True, exist_ok=True)
    shape = {"max_len": 2048, "chunk": 2048, "kv_bytes": args.kv_mib << 20, "max_seqs": 32}
    limited = PairSettings(router=("--max-running", str(args.admit), "--max-waiting", str(args.waiting)))
    with Cluster(fresh_directory("bench_load")) as cluster, started(cluster, "b", shape, limited) as systems:
        pair = systems["b"]
        free = {engine.name: settled_free_blocks(engine) for engine in pair.engines}
        turns: list[dict[float, Phase]] = []
        servers: list[SoakedServer] = [*pair.engines, *([pair.front] if pair.front else [])]
        samples: dict[str, list[ResourceSample]] = {server.name: [] for server in servers}
        for turn in range(args.repeats):
            turns.append(asyncio.run(_turn(pair, args, turn, free)))
            for server in servers:
                samples[server.name].append(sample(server, turn))
    rows = [
        f"{args.prompt} tokens in, {args.answer} out; {args.admit} requests under way at most, {args.waiting} wait; "
        f"{args.repeats} turns, {args.seconds:g} s a phase; numbers of all turns, medians of rates and times (lowest–highest)",
        "",
        *table(turns),
        "",
        *resources(samples),
    ]
    say("\n".join(["", *rows]))
    (args.out / "overload.md").write_text("\n".join(rows) + "\n")
    (args.out / "overload.json").write_text(written(turns))
    wrong = [line for turn in turns for phase in turn.values() for line in (*phase.left, *phase.lost)]
    wrong += growth(samples)
    for line in (*dict.fromkeys(wrong), *(f"left behind: {leak}" for leak in cluster.leaks)):
        say(line[:1000])
    return 1 if wrong or cluster.leaks else 0


async def _turn(pair: LoadedSystem, args: argparse.Namespace, turn: int, free: Mapping[str, int]) -> dict[float, Phase]:
    """Run all phases. The first is the one at the limit, as the rates of the others follow from it."""
    phases: dict[float, Phase] = {}
    dice, vocab = random.Random(f"overload/{turn}"), RECIPES[MODEL].vocab

    def asked() -> dict[str, Any]:
        return body_of(prompt(args.prompt, dice.getrandbits(60), vocab), args.answer)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    for factor in (AT_LIMIT, *args.overload):
        phase = phases[factor] = Phase(factor, args.seconds)
        async with httpx.AsyncClient(
            timeout=TIMEOUT, limits=limits, trust_env=False, event_hooks={"response": [has_retry_after]}
        ) as client:

            async def one(phase: Phase = phase, client: httpx.AsyncClient = client) -> None:
                await ask(client, f"{pair.url}/v1/completions", asked(), phase)

            watching = asyncio.create_task(_watch(pair, phase))
            phase.began = time.monotonic()
            if factor == AT_LIMIT:
                await _closed(one, phase, args.admit)
            else:
                if not phases[AT_LIMIT].rate:
                    raise RuntimeError("nothing was answered at the limit: more --seconds")
                await _open(one, phases[AT_LIMIT].rate * factor, phase.began + args.seconds, dice)
            watching.cancel()
        phase.left = await asyncio.to_thread(_left, pair, free)
        name = "at its limit" if factor == AT_LIMIT else f"{factor:g} times that"
        say(
            f"turn {turn + 1}, {name}: {len(phase.answers)} answered ({phase.rate:.2f}/s), {phase.refused} refused, "
            f"{phase.lost.total()} lost, TTFT p50 {phase.percentile('ttft', 50):.2f} s"
        )
    return phases


async def has_retry_after(response: httpx.Response) -> None:
    """Raise RequestFailed for a refusal that does not say when to come back."""
    if response.status_code == 429 and not response.headers.get("retry-after", "").isdecimal():
        raise RequestFailed(429, "without Retry-After")


async def ask(client: httpx.AsyncClient, url: str, body: Mapping[str, Any], phase: Phase) -> None:
    """Send a request, and note what becomes of it."""
    try:
        answer = await stream(client, url, body)
    except RequestFailed as failed:
        if failed.status == 429 and "PD-META-009" in failed.text:
            phase.refused += 1
        else:
            phase.lost[f"lost: {failed}"] += 1
    except httpx.HTTPError as problem:
        phase.lost[f"lost: {problem!r}"] += 1
    else:
        if len(answer.tokens) != body["max_tokens"]:
            phase.lost[f"lost: {len(answer.tokens)} of {body['max_tokens']} tokens"] += 1
            return
        tpot = (answer.seconds - answer.ttft) / max(1, len(answer.tokens) - 1)
        phase.answers.append(TimedEnd(time.monotonic(), answer.ttft, tpot))


async def _closed(one: Callable[[], Coroutine[Any, Any, None]], phase: Phase, clients: int) -> None:
    async def loop() -> None:
        while time.monotonic() < phase.began + phase.seconds:
            refused = phase.refused
            await one()
            if phase.refused > refused:
                await asyncio.sleep(COME_AGAIN_S)

    await asyncio.gather(*(loop() for _ in range(clients)))


async def _open(one: Callable[[], Coroutine[Any, Any, None]], rate: float, until: float, dice: random.Random) -> None:
    """Send requests at random moments, and wait for the end of each."""
    sent: list[asyncio.Task[None]] = []
    at = time.monotonic()
    while (at := at + dice.expovariate(rate)) < until:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        sent.append(asyncio.create_task(one()))
    await asyncio.gather(*sent)


async def _watch(pair: LoadedSystem, phase: Phase) -> None:
    while True:
        with contextlib.suppress(httpx.HTTPError):  # it has much to do
            used = await asyncio.to_thread(lambda: max(p.metrics().get(USED, 0.0) for p in pair.prefills))
            phase.p_used = max(phase.p_used, used)
        await asyncio.sleep(LOOK_S)


def _left(pair: LoadedSystem, free: Mapping[str, int]) -> list[str]:
    """Wait until nothing is left of a phase. Return what is."""
    try:
        wait_for_free_blocks(pair.engines, free)
    except AssertionError as left:
        return [str(left)]
    return [f"{d.name}: {number:g} open" for d in pair.decodes if (number := d.metrics().get(OPEN, 0.0))]


def table(turns: Sequence[Mapping[float, Phase]]) -> list[str]:
    """Return a table in Markdown: sums and medians of the turns, and times as ratios to those at the limit."""
    rows = [
        "| requests | came | counted | answered, requests/s | refused | lost | TTFT p50, p99, s | TPOT p50, p99, ms |"
        " TTFT p50, p99 / at the limit | TPOT p50, p99 / at the limit | P's blocks in use, at most |",
        "|---" * 11 + "|",
    ]
    for factor in turns[0]:
        mine = [turn[factor] for turn in turns]

        def middle(name: str, percent: float, unit: float, digits: int, mine: Sequence[Phase] = mine) -> str:
            return f"{statistics.median(one.percentile(name, percent) for one in mine) * unit:.{digits}f}"

        def ratios(name: str, percent: float, factor: float = factor) -> str:
            return ranged(
                [one[factor].percentile(name, percent) / one[AT_LIMIT].percentile(name, percent) for one in turns]
            )

        cells = [
            "at the limit" if factor == AT_LIMIT else f"{factor:g} times",
            f"{sum(len(one.answers) + one.refused + one.lost.total() for one in mine)}",
            f"{sum(len(one.counted) for one in mine)}",
            ranged([one.rate for one in mine]),
            f"{sum(one.refused for one in mine)}",
            f"{sum(one.lost.total() for one in mine)}",
            f"{middle('ttft', 50, 1, 2)}, {middle('ttft', 99, 1, 2)}",
            f"{middle('tpot', 50, 1e3, 0)}, {middle('tpot', 99, 1e3, 0)}",
            *("" if factor == AT_LIMIT else f"{ratios(name, 50)}, {ratios(name, 99)}" for name in TIMES),
            f"{max(one.p_used for one in mine):.0%}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def resources(samples: Mapping[str, Sequence[ResourceSample]]) -> list[str]:
    """Return a table in Markdown of what each server holds behind each turn."""
    rows = ["| behind each turn | MiB | threads | sockets |", "|---|---|---|---|"]
    for name, mine in samples.items():
        cells = [[f"{one.host_mib + one.workers_mib:.0f}" for one in mine]]
        cells += [[f"{getattr(one, what)}" for one in mine] for what in GROWS]
        rows.append(f"| {name} | {' | '.join(', '.join(numbers) for numbers in cells)} |")
    return rows


def growth(samples: Mapping[str, Sequence[ResourceSample]]) -> list[str]:
    """Return what has become more in each turn, of three at least."""
    found: list[str] = []
    for name, mine in samples.items():
        for what in GROWS:
            counts = [getattr(one, what) for one in mine]
            if len(counts) > 2 and all(after > before for before, after in pairwise(counts)):
                found.append(f"{name}: {what} {counts}")
    return found


def written(turns: Sequence[Mapping[float, Phase]]) -> str:
    """Return all phases as JSON."""
    return json.dumps([[{**vars(one), "lost": dict(one.lost)} for one in turn.values()] for turn in turns], indent=1)
