# SPDX-License-Identifier: Apache-2.0
"""The cost of a push for D: gaps between tokens of its running streams, with prompts pushed into it and without.

In a turn each number of prompts at once has its phase, and one phase has none; a ratio is within a turn. With --alone
each number has a second phase, in which P computes as many prompts that nobody pushes: what they cost D's streams
without a transfer, as its host's memory and caches are P's too. D has a core to itself.
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
from typing import NamedTuple, TypeVar

import httpx
import numpy as np

from tools.bench_load_parts.figures import ranged
from tools.bench_load_parts.systems import MODEL, NAMES, TOKEN_BYTES, LoadedSystem, PairSettings, started
from tools.support.client import TIMEOUT, TimedAnswer, body_of, prompt, stream
from tools.support.cluster import Cluster, fresh_directory, say
from tools.support.models import RECIPES

TALK = 640  # tokens of an answer of a stream, which then begins another one
TALK_PROMPT = 32
BEGUN_S, ENDED_S = 240.0, 240.0  # until all streams have begun, and until the last prompts of a phase are done
LOOK_S = 0.05
WORKER = "VLLM::Worker"  # as vLLM names its processes

T = TypeVar("T")


class Phase(NamedTuple):
    """So many prompts at once."""

    prompts: int
    pushed: bool = True  # else P alone is asked for them


NONE = Phase(0)


class Used(NamedTuple):
    """Processor seconds of D."""

    worker: float = 0.0  # the model, the copies, what this package does around them
    others: float = 0.0  # engine core and server

    def since(self, before: Used) -> Used:
        return Used(self.worker - before.worker, self.others - before.others)


@dataclass(frozen=True)
class PushedTurn:
    """Gaps between tokens in one turn, seconds, by phase."""

    streams: int
    gaps: Mapping[Phase, Sequence[float]]
    answered: Mapping[Phase, int]  # prompts
    used: Mapping[Phase, Used]

    def ratio(self, phase: Phase, percent: float, other: Phase = NONE) -> float:
        """Return a percentile of the gaps over that of another phase."""
        of_phase, of_other = (float(np.percentile(self.gaps[one], percent)) for one in (phase, other))
        return of_phase / of_other

    def used_a_step(self, phase: Phase) -> Used:
        """Return D's processor milliseconds for a token of each stream."""
        steps = max(1, len(self.gaps[phase])) / self.streams
        return Used(*(1e3 * seconds / steps for seconds in self.used[phase]))


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
    kinds = (True, False) if args.alone else (True,)
    phases = [NONE, *(Phase(number, pushed) for number in args.push for pushed in kinds)]
    config = {"regroup": "always"} if args.regroup else {}
    pair = PairSettings(args.p_tp, alone="d", config={**config, "verify": "full" if args.verify else "off"})
    with (
        Cluster(fresh_directory("bench_load")) as cluster,
        started(cluster, "".join(letter for letter in args.systems if letter != "a"), shape, pair) as systems,
    ):
        for letter, system in systems.items():
            for streams in args.streams:
                say(f"({letter}) {NAMES[letter]}, {streams} streams: {args.repeats} turns")
                with system.running():
                    measured = measure(system, streams, phases, args.pushed, args.seconds, args.repeats)
                turns += [(letter, one) for one in measured]
    about = f"P TP {args.p_tp}, {args.pushed} tokens a prompt; {args.repeats} turns, {args.seconds:g} s a phase"
    about += "; regrouped" * args.regroup + "; every block verified" * args.verify
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


def measure(
    system: LoadedSystem, streams: int, phases: Sequence[Phase], tokens: int, seconds: float, turns: int
) -> list[PushedTurn]:
    """Let streams run on a system, and push prompts of so many tokens into its D, phase by phase."""
    return asyncio.run(_measure(system, streams, phases, tokens, seconds, turns))


async def _measure(
    system: LoadedSystem, streams: int, phases: Sequence[Phase], tokens: int, seconds: float, turns: int
) -> list[PushedTurn]:
    vocab = RECIPES[MODEL].vocab
    path, of_p = (f"{url}/v1/completions" for url in (system.url, system.prefills[0].url))
    answers: list[TimedAnswer] = []
    measured_turns: list[PushedTurn] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits, trust_env=False) as client:

        async def talk(place: int) -> None:
            for number in range(turns * 1000):
                answer = TimedAnswer()
                answers.append(answer)
                await stream(client, path, body_of(prompt(TALK_PROMPT, place * 1000 + number, vocab), TALK), answer)

        async def ask(phase: Phase, seed: int, until: float) -> int:
            count = 0
            while time.monotonic() < until:
                await stream(client, path if phase.pushed else of_p, body_of(prompt(tokens, seed + count, vocab), 1))
                count += 1
            return count

        talks = [asyncio.create_task(talk(place)) for place in range(streams)]
        try:
            await _begun(answers, talks)
            for turn in range(turns):
                gaps: dict[Phase, Sequence[float]] = {}
                answered: dict[Phase, int] = {}
                used: dict[Phase, Used] = {}
                for place, phase in enumerate(rotated(phases, turn)):
                    before, begin = _used(system), time.monotonic()
                    seeds = (10**7 * (1 + turn) + 10**5 * place + 1000 * number for number in range(phase.prompts))
                    asking = [asyncio.create_task(ask(phase, seed, begin + seconds)) for seed in seeds]
                    await asyncio.sleep(seconds)
                    gaps[phase] = gaps_within([_moments(one) for one in answers], begin, time.monotonic())
                    used[phase] = _used(system).since(before)
                    answered[phase] = sum(await asyncio.wait_for(asyncio.gather(*asking), ENDED_S))
                    if ended := [one for one in talks if one.done()]:
                        await ended[0]  # raises what has ended a stream
                    p99 = float(np.percentile(gaps[phase], 99)) * 1e3
                    say(f"  turn {turn + 1}, {_named(phase)}: {answered[phase]} answered, gap p99 {p99:.1f} ms")
                measured_turns.append(PushedTurn(streams, gaps, answered, used))
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


def _used(system: LoadedSystem) -> Used:
    worker = others = 0.0
    for process in system.decodes[0].process.members():
        times = process.cpu_times()
        seconds = times.user + times.system
        if process.name().startswith(WORKER):
            worker += seconds
        else:
            others += seconds
    return Used(worker, others)


def _moments(answer: TimedAnswer) -> list[float]:
    return [answer.started + at for at in answer.times]


def _named(phase: Phase) -> str:
    return f"{phase.prompts} prompts at once" + ("" if phase.pushed else ", computed on P alone")


def rotated(phases: Sequence[T], turn: int) -> Sequence[T]:
    start = turn % len(phases)
    return (*phases[start:], *phases[:start])


def table(turns: Sequence[tuple[str, PushedTurn]], names: Mapping[str, str]) -> list[str]:
    """Return a table in Markdown: gaps as ratios to those of other phases, medians and (lowest–highest)."""
    rows = [
        "| | streams | prompts at once | answered | gap p50, ms | gap p99, ms | D's CPU a step, ms: worker, others |"
    ]
    rows[0] += " p50 / none | p99 / none |"
    alone = any(not phase.pushed for _, one in turns for phase in one.gaps)
    rows[0] += " p99 / computed alone |" * alone
    rows.append("|---" * (10 if alone else 9) + "|")
    for system, streams in dict.fromkeys((system, one.streams) for system, one in turns):
        mine = [one for letter, one in turns if (letter, one.streams) == (system, streams)]
        for phase in sorted(mine[0].gaps):
            times = [
                statistics.median(float(np.percentile(one.gaps[phase], percent)) for one in mine) * 1e3
                for percent in (50, 99)
            ]
            ratios = ["", ""] if phase == NONE else [ranged([one.ratio(phase, at) for one in mine]) for at in (50, 99)]
            if alone:
                other, has_other = Phase(phase.prompts, False), phase.pushed and phase != NONE
                ratios.append(ranged([one.ratio(phase, 99, other) for one in mine]) if has_other else "")
            cells = [names[system], f"{streams}", f"{phase.prompts}" + (" on P alone" * (not phase.pushed))]
            cells += [f"{sum(one.answered[phase] for one in mine)}", f"{times[0]:.1f}", f"{times[1]:.1f}"]
            cpu = [one.used_a_step(phase) for one in mine]
            cells.append(", ".join(f"{statistics.median(values):.1f}" for values in zip(*cpu, strict=True)))
            rows.append(f"| {' | '.join([*cells, *ratios])} |")
    return rows
