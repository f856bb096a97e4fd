# SPDX-License-Identifier: Apache-2.0
"""The cost of a push for D: gaps between tokens of its running streams, with prompts pushed into it and without.

In a turn each number of prompts at once has its phase, for which the streams begin anew, and one phase has none; a
ratio is within a turn. P computes a prompt of --pushed tokens in about a step, so that numbers above one say how many
wait for it. With --cached P has the prompts in its prefix cache: all of a phase are asked for at once and leave P in
few steps, and the phase ends with the last of them. D has a core to itself.

With --alone each number has a second phase, in which P is asked for as many prompts that nobody pushes: what they cost
D's streams without a transfer, as its host's memory and caches are P's too. That of no prompts is the first one once
more, and shows the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import httpx
import numpy as np

from tools.bench_load_parts.figures import ranged
from tools.bench_load_parts.systems import MODEL, NAMES, TOKEN_BYTES, LoadedSystem, PairSettings, extra_config, started
from tools.support.client import TIMEOUT, TimedAnswer, body_of, prompt, stream
from tools.support.cluster import Cluster, fresh_directory, say, say_leaks
from tools.support.engine import EngineProcess
from tools.support.models import RECIPES
from tools.support.processor_time import parts, scheduled

TALK = 2048  # tokens of an answer of a stream: more than there are in a phase
TALK_PROMPT = 32
BEGUN_S, ENDED_S = 240.0, 480.0  # until all streams have begun, and until a phase's prompts are done
LOOK_S = 0.05
STEPS = "vllm:iteration_tokens_total_count"
UNDER_WAY = ("vllm:num_requests_running", "vllm:num_requests_waiting")

T = TypeVar("T")


class PushPhase(NamedTuple):
    """So many prompts at once."""

    prompts: int
    pushed: bool = True  # else P alone is asked for them

    def __str__(self) -> str:
        if not self.prompts:
            return "none" if self.pushed else "none, once more"
        return f"{self.prompts}" + (" on P alone" * (not self.pushed))


NONE = PushPhase(0)


class Used(NamedTuple):
    """Processor time of an engine, by its processes and the thread that computes."""

    steps: float = 0.0  # the worker's first thread: the model, and what the connector does around it
    links: float = 0.0  # its other threads: copies from sockets, the side channel
    core: float = 0.0  # the engine core: vLLM's scheduler, and the connector's calls
    server: float = 0.0  # HTTP


class MeasuredPhase(NamedTuple):
    """Figures of a phase."""

    gaps: Sequence[float]  # seconds between two tokens of a stream
    answered: int  # prompts, before its end
    used: Used  # milliseconds a step


@dataclass(frozen=True)
class PushedTurn:
    """One turn of all phases with so many streams."""

    streams: int
    phases: Mapping[PushPhase, MeasuredPhase]

    def percentile(self, phase: PushPhase, percent: float) -> float:
        return float(np.percentile(self.phases[phase].gaps, percent))

    def ratio(self, phase: PushPhase, percent: float, other: PushPhase = NONE) -> float:
        """Return a percentile of the gaps over that of another phase."""
        return self.percentile(phase, percent) / self.percentile(other, percent)


@dataclass(frozen=True)
class PhaseLoad:
    """Sizes that all phases have in common."""

    tokens: int  # of a prompt
    seconds: float  # of a phase
    cached: bool  # P has computed the prompts before
    seeds: Iterator[int]  # no two prompts of a run are alike


def run(args: argparse.Namespace) -> int:
    """Measure what pushes cost D's streams, in each wanted system that has a D. Return the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    shape = {
        "max_len": max(args.pushed + 16, TALK + TALK_PROMPT),
        "chunk": 2048,
        "kv_bytes": cache_bytes(max(args.streams) * (TALK + TALK_PROMPT) + (max(args.push) + 1) * args.pushed),
        "max_seqs": max(args.streams) + max(args.push),
    }
    of_p = cache_bytes(max(args.streams) * TALK_PROMPT + (2 * max(args.push) + 1) * args.pushed) // args.p_tp
    pair = PairSettings(args.p_tp, alone="d", p_kv_bytes=of_p, config=extra_config(args))
    kinds = (True, False) if args.alone else (True,)
    phases = [NONE, *(PushPhase(number, pushed) for number in args.push for pushed in kinds)]
    phases += [PushPhase(0, False)] * args.alone
    load = PhaseLoad(args.pushed, args.seconds, args.cached, itertools.count())
    about = f"P TP {args.p_tp}, {args.pushed} tokens a prompt; {args.repeats} turns"
    about += "; P has cached them" if args.cached else f", {args.seconds:g} s a phase"
    about += "; this package regroups" * args.regroup + "; this package verifies every block" * args.verify
    turns: list[tuple[str, PushedTurn]] = []
    names = {letter: f"({letter}) {NAMES[letter]}" for letter in args.systems}
    with (
        Cluster(fresh_directory("bench_load")) as cluster,
        started(cluster, args.systems, shape, pair) as systems,
    ):
        for letter, system in systems.items():
            for streams in args.streams:
                say(f"({letter}) {NAMES[letter]}, {streams} streams: {args.repeats} turns")
                with system.running():
                    for measured in measure(system, streams, phases, load, args.repeats):
                        turns.append((letter, measured))
                        rows = [about, "", *table(turns, names)]
                        (args.out / "push.md").write_text("\n".join(rows) + "\n")
    say("\n".join(["", *rows]))
    return say_leaks(cluster.leaks)


def gaps_within(times: Iterable[Sequence[float]], begin: float, end: float) -> list[float]:
    """Return the gaps between two tokens of one stream that lie between two moments."""
    return [after - before for one in times for before, after in pairwise(one) if begin <= before and after <= end]


def cache_bytes(tokens: int) -> int:
    """Return the cache that so many tokens need, so that none waits for blocks."""
    return tokens * TOKEN_BYTES * 5 // 4


def measure(
    system: LoadedSystem, streams: int, phases: Sequence[PushPhase], load: PhaseLoad, turns: int
) -> Iterator[PushedTurn]:
    """Let streams run on a system, and push prompts into its D, phase by phase."""
    warm = [PushPhase(1)]  # the first push makes connections and plans
    for turn, order in enumerate([warm, *(rotated(phases, turn) for turn in range(turns))]):
        measured: dict[PushPhase, MeasuredPhase] = {}
        for phase in order:
            now = load if turn else replace(load, cached=True)  # until it has arrived
            one = measured[phase] = asyncio.run(_phase(system, streams, phase, now))
            if turn:
                p50, p99 = (float(np.percentile(one.gaps, percent)) * 1e3 for percent in (50, 99))
                say(f"  turn {turn}, prompts: {phase}; {one.answered} answered, gap p50 {p50:.1f}, p99 {p99:.1f} ms")
        if turn:
            yield PushedTurn(streams, measured)


async def _phase(system: LoadedSystem, streams: int, phase: PushPhase, load: PhaseLoad) -> MeasuredPhase:
    vocab = RECIPES[MODEL].vocab
    path, of_p = (f"{url}/v1/completions" for url in (system.url, system.prefills[0].url))

    def fresh(tokens: int, answer: int) -> dict[str, Any]:
        return body_of(prompt(tokens, next(load.seeds), vocab), answer)

    answers = [TimedAnswer() for _ in range(streams)]
    ends: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits, trust_env=False) as client:
        prompts = [fresh(load.tokens, 1) for _ in range(phase.prompts)]
        if load.cached:
            await asyncio.gather(*(stream(client, of_p, one) for one in prompts))

        async def ask(body: Mapping[str, Any]) -> None:
            while True:
                await stream(client, path if phase.pushed else of_p, body)
                ends.append(time.monotonic())
                if load.cached:
                    return
                body = fresh(load.tokens, 1)

        bodies = [fresh(TALK_PROMPT, TALK) for _ in answers]
        asking: list[asyncio.Task[None]] = []
        talks = [asyncio.create_task(stream(client, path, *one)) for one in zip(bodies, answers, strict=True)]
        try:
            await _begun(answers, talks)
            before, steps = used(system.decodes[0]), await _steps(system)
            begin = time.monotonic()
            asking += [asyncio.create_task(ask(one)) for one in prompts]
            if load.cached and prompts:
                await asyncio.wait_for(asyncio.gather(*asking), ENDED_S)
            else:
                await asyncio.sleep(load.seconds)
            end = time.monotonic()
            after, steps = used(system.decodes[0]), await _steps(system) - steps
            gaps = gaps_within([_moments(one) for one in answers], begin, end)
            for failed in (one for one in asking if one.done()):
                await failed
            for ended in (one for one in talks if one.done()):
                await ended  # raises what has ended it
                raise RuntimeError(f"a stream of {TALK} tokens ended within a phase: fewer --seconds")
            if not gaps:
                raise RuntimeError("no stream had two tokens within a phase: more --seconds")
        finally:
            for one in (*talks, *asking):
                one.cancel()
            await asyncio.gather(*talks, *asking, return_exceptions=True)
        await _idle(system)
    a_step = Used(*((there - here) * 1e3 / max(1.0, steps) for here, there in zip(before, after, strict=True)))
    return MeasuredPhase(gaps, sum(at <= end for at in ends), a_step)


async def _begun(answers: Sequence[TimedAnswer], talks: Sequence[asyncio.Task[TimedAnswer]]) -> None:
    until = time.monotonic() + BEGUN_S
    while not all(len(one.times) > 1 for one in answers):
        for ended in (one for one in talks if one.done()):
            await ended
        if time.monotonic() > until:
            raise TimeoutError(f"{len(talks)} streams have not begun within {BEGUN_S:.0f} s")
        await asyncio.sleep(LOOK_S)


async def _idle(system: LoadedSystem) -> None:
    """Wait until no engine has anything left of a phase. Those who asked have left."""
    until = time.monotonic() + ENDED_S
    while True:
        pages = [await asyncio.to_thread(engine.metrics) for engine in system.engines]
        if not any(page.get(name, 0.0) for page in pages for name in UNDER_WAY):
            return
        if time.monotonic() > until:
            raise TimeoutError(f"requests of a phase are under way {ENDED_S:.0f} s after their clients have left")
        await asyncio.sleep(LOOK_S)


async def _steps(system: LoadedSystem) -> float:
    """Return how many steps D has had."""
    return (await asyncio.to_thread(system.decodes[0].metrics)).get(STEPS, 0.0)


def used(engine: EngineProcess) -> Used:
    """Return an engine's processor time so far, seconds."""
    by_part = parts(engine)
    worker, core, server = (scheduled(by_part[name]).ran for name in ("worker", "core", "server"))
    steps = scheduled(by_part["worker"], first=True).ran
    return Used(steps, worker - steps, core, server)


def _moments(answer: TimedAnswer) -> list[float]:
    return [answer.started + at for at in answer.times]


def rotated(phases: Sequence[T], turn: int) -> Sequence[T]:
    start = turn % len(phases)
    return (*phases[start:], *phases[:start])


def table(turns: Sequence[tuple[str, PushedTurn]], names: Mapping[str, str]) -> list[str]:
    """Return a table in Markdown: gaps as ratios to those of other phases, medians and (lowest–highest)."""
    columns = ["", "streams", "prompts at once", "answered", "gaps", "gap p50, ms", "gap p99, ms"]
    columns += ["D's CPU a step, ms: model, links, core, server", "p50 / none", "p99 / none"]
    alone = any(not phase.pushed for _, one in turns for phase in one.phases)
    columns += ["p99 / on P alone"] * alone
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for system, streams in dict.fromkeys((system, one.streams) for system, one in turns):
        mine = [one for letter, one in turns if (letter, one.streams) == (system, streams)]
        for phase in sorted(mine[0].phases, key=lambda one: (one.prompts, one.pushed == (one.prompts > 0))):
            cells = [names[system], f"{streams}", f"{phase}", f"{sum(one.phases[phase].answered for one in mine)}"]
            cells.append(f"{sum(len(one.phases[phase].gaps) for one in mine)}")
            times = (statistics.median(one.percentile(phase, percent) for one in mine) for percent in (50, 99))
            cells += [f"{seconds * 1e3:.1f}" for seconds in times]
            cpu = zip(*(one.phases[phase].used for one in mine), strict=True)
            cells.append(", ".join(f"{statistics.median(values):.1f}" for values in cpu))
            ratios = (ranged([one.ratio(phase, percent) for one in mine]) for percent in (50, 99))
            cells += ["", ""] if phase == NONE else ratios
            if alone:
                other = PushPhase(phase.prompts, False)
                has_other = phase.pushed and phase.prompts
                cells.append(ranged([one.ratio(phase, 99, other) for one in mine]) if has_other else "")
            rows.append(f"| {' | '.join(cells)} |")
    return rows
