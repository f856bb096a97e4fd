# SPDX-License-Identifier: Apache-2.0
"""The cost of a push for D: gaps between tokens of its running streams, with prompts pushed into it and without.

In a turn each number of prompts at once has its phase, and one phase has none; a ratio is within a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx
import numpy as np

from tools.bench_load_parts.figures import ranged
from tools.bench_load_parts.systems import MODEL, NAMES, TOKEN_BYTES, started
from tools.support.client import TIMEOUT, TimedAnswer, body_of, prompt, stream
from tools.support.cluster import Cluster, fresh_directory, say
from tools.support.models import RECIPES

TALK = 640  # tokens of an answer of a stream, which then begins another one
TALK_PROMPT = 32
BEGUN_S, ENDED_S = 240.0, 240.0  # until all streams have begun, and until the last prompts of a phase are done
LOOK_S = 0.05


@dataclass(frozen=True)
class PushedTurn:
    """Gaps between tokens in one turn, seconds, by how many prompts were pushed at once."""

    streams: int
    gaps: Mapping[int, Sequence[float]]
    pushed: Mapping[int, int]  # prompts that arrived

    def ratio(self, pushes: int, percent: float) -> float:
        """Return a percentile of the gaps over that without any push."""
        with_, without = (float(np.percentile(self.gaps[number], percent)) for number in (pushes, 0))
        return with_ / without


def run(args: argparse.Namespace) -> int:
    """Measure what pushes cost D's streams, in each wanted system that has a D. Return the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    shape = {
        "max_len": max(args.pushed + 16, TALK + TALK_PROMPT),
        "chunk": 2048,
        "kv_bytes": cache_bytes(max(args.streams), max(args.push), args.pushed, TOKEN_BYTES),
        "max_seqs": max(args.streams) + max(args.push),
    }
    turns: list[tuple[str, PushedTurn]] = []
    with (
        Cluster(fresh_directory("bench_load")) as cluster,
        started(cluster, "".join(letter for letter in args.systems if letter != "a"), shape) as systems,
    ):
        for letter, system in systems.items():
            for streams in args.streams:
                say(f"({letter}) {NAMES[letter]}, {streams} streams: {args.repeats} turns")
                with system.running():
                    measured = measure(system.url, streams, args.push, args.pushed, args.seconds, args.repeats)
                turns += [(letter, one) for one in measured]
    about = f"{args.pushed} tokens a prompt; {args.repeats} turns, {args.seconds:g} s a phase"
    rows = [about, "", *table(turns, {letter: f"({letter}) {NAMES[letter]}" for letter in args.systems})]
    say("\n".join(["", *rows]))
    (args.out / "push.md").write_text("\n".join(rows) + "\n")
    for line in cluster.leaks:
        say(f"left behind: {line}")
    return 3 if cluster.leaks else 0


def gaps_within(times: Iterable[Sequence[float]], begin: float, end: float) -> list[float]:
    """Return the gaps between two tokens of one stream that lie between two moments."""
    return [after - before for one in times for before, after in pairwise(one) if begin <= before and after <= end]


def cache_bytes(streams: int, pushes: int, tokens: int, token_bytes: int) -> int:
    """Return the cache that D needs so that no stream waits for blocks."""
    return (streams * (TALK + TALK_PROMPT) + (pushes + 1) * tokens) * token_bytes * 5 // 4


def measure(url: str, streams: int, pushes: Sequence[int], tokens: int, seconds: float, turns: int) -> list[PushedTurn]:
    """Let streams run on a system, and push prompts of so many tokens into its D, phase by phase."""
    return asyncio.run(_measure(url, streams, pushes, tokens, seconds, turns))


async def _measure(
    url: str, streams: int, pushes: Sequence[int], tokens: int, seconds: float, turns: int
) -> list[PushedTurn]:
    vocab, path = RECIPES[MODEL].vocab, f"{url}/v1/completions"
    answers: list[TimedAnswer] = []
    measured_turns: list[PushedTurn] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits, trust_env=False) as client:

        async def talk(place: int) -> None:
            for number in range(turns * 1000):
                answer = TimedAnswer()
                answers.append(answer)
                await stream(client, path, body_of(prompt(TALK_PROMPT, place * 1000 + number, vocab), TALK), answer)

        async def push(seed: int, until: float) -> int:
            count = 0
            while time.monotonic() < until:
                await stream(client, path, body_of(prompt(tokens, seed + count, vocab), 1))
                count += 1
            return count

        talks = [asyncio.create_task(talk(place)) for place in range(streams)]
        try:
            await _begun(answers, talks)
            for turn in range(turns):
                gaps: dict[int, Sequence[float]] = {}
                pushed: dict[int, int] = {}
                for number in rotated((0, *pushes), turn):
                    begin = time.monotonic()
                    seeds = (10**6 * (1 + turn) + 10**5 * number + 1000 * place for place in range(number))
                    sending = [asyncio.create_task(push(seed, begin + seconds)) for seed in seeds]
                    await asyncio.sleep(seconds)
                    gaps[number] = gaps_within([_moments(one) for one in answers], begin, time.monotonic())
                    pushed[number] = sum(await asyncio.wait_for(asyncio.gather(*sending), ENDED_S))
                    if ended := [one for one in talks if one.done()]:
                        await ended[0]  # raises what has ended a stream
                measured_turns.append(PushedTurn(streams, gaps, pushed))
        finally:
            for one in talks:
                one.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*talks, return_exceptions=True)
    return measured_turns


async def _begun(answers: Sequence[TimedAnswer], talks: Sequence[asyncio.Task[None]]) -> None:
    until = time.monotonic() + BEGUN_S
    while sum(len(one.times) > 1 for one in answers) < len(talks):
        for one in talks:
            if one.done():
                await one
        if time.monotonic() > until:
            raise TimeoutError(f"{len(talks)} streams have not begun within {BEGUN_S:.0f} s")
        await asyncio.sleep(LOOK_S)


def _moments(answer: TimedAnswer) -> list[float]:
    return [answer.started + at for at in answer.times]


def rotated(numbers: Sequence[int], turn: int) -> Sequence[int]:
    start = turn % len(numbers)
    return (*numbers[start:], *numbers[:start])


def table(turns: Sequence[tuple[str, PushedTurn]], names: Mapping[str, str]) -> list[str]:
    """Return a table in Markdown: gaps as ratios to those without pushes, medians and (lowest–highest)."""
    rows = ["| | streams | prompts at once | pushed | gap p50, ms | gap p99, ms | p50 / none | p99 / none |"]
    rows.append("|---" * 8 + "|")
    for system, streams in dict.fromkeys((system, one.streams) for system, one in turns):
        mine = [one for letter, one in turns if (letter, one.streams) == (system, streams)]
        for number in sorted(mine[0].gaps):
            times = [
                statistics.median(float(np.percentile(one.gaps[number], percent)) for one in mine) * 1e3
                for percent in (50, 99)
            ]
            ratios = [ranged([one.ratio(number, percent) for one in mine]) for percent in (50, 99)]
            pushed = sum(one.pushed[number] for one in mine)
            cells = [names[system], f"{streams}", f"{number}", f"{pushed}", f"{times[0]:.1f}", f"{times[1]:.1f}"]
            rows.append(f"| {' | '.join([*cells, *(ratios if number else ('', ''))])} |")
    return rows
