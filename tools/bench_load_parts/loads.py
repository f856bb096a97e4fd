# SPDX-License-Identifier: Apache-2.0
"""Loads of a run: which requests come, and when. Pure: what is drawn follows from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

from vllm_ascend_pd.cli.load import arrivals
from vllm_ascend_pd.cli.load.arrivals import Arrival, beginnings

CHUNK = 32  # tokens with one identity: a block of the engines
TURNS = 8


@dataclass(frozen=True)
class LoadCase:
    """One load. `kind`: rate (Poisson arrivals), clients (closed loops), chats (closed loops of turns) or trace."""

    kind: str
    value: float  # requests a second; clients; chats at once; times a trace's own speed
    prefix: int = 0  # percent of each prompt that is common to all

    def __str__(self) -> str:
        name = {
            "rate": f"{self.value:g} requests/s",
            "clients": f"clients: {self.value:g}",
            "chats": f"chats of {TURNS} turns, {self.value:g} at once",
            "trace": f"trace, speed {self.value:g}",
        }[self.kind]
        return name + (f", prefix {self.prefix} %" if self.kind in ("rate", "clients") else "")


@dataclass(frozen=True)
class Lengths:
    """Sizes of a run's loads."""

    prompt: int  # tokens
    answer: int
    seconds: float  # of arrivals
    turn: int = 64  # tokens that a client adds to a chat
    trace_lengths: float = 1.0  # factor on a trace's lengths


def requests(
    case: LoadCase, lengths: Lengths, repeat: int, idle_s: float, trace: list[Arrival]
) -> tuple[list[Arrival], int]:
    """Return a load's requests, and the tokens of a chunk. Those of a repeat come at times of its own.

    `idle_s`: seconds of an answer alone, from which the length of closed loops follows.
    """
    if case.kind == "trace":
        cut = [one for one in scaled(trace, lengths.trace_lengths, case.value) if one.at <= lengths.seconds]
        return cut, max(1, round(arrivals.CHUNK * lengths.trace_lengths))
    dice = random.Random(f"{case}/{repeat}")
    if case.kind == "rate":
        count = max(4, round(case.value * lengths.seconds))
        at = at_rate(poisson((dice.expovariate(1.0) for _ in range(count)), case.value), case.value)
    else:
        count = max(2 * int(case.value), round(lengths.seconds / idle_s))
        at = [0.0] * count
    return alike(at, lengths.prompt, lengths.answer, lengths.prompt * case.prefix // 100, CHUNK), CHUNK


def scaled(load: Sequence[Arrival], lengths: float, speed: float) -> list[Arrival]:
    """Return the requests with all lengths times `lengths`, coming `speed` times as fast.

    They have as many chunks as their prompt begins, of a trace's tokens times `lengths`.
    """
    size, made = max(1, round(arrivals.CHUNK * lengths)), []
    for place, one in enumerate(load):
        prompt, answer = (max(1, round(tokens * lengths)) for tokens in (one.prompt, one.answer))
        count = -(-prompt // size)
        unique = (-1 - place,) * max(0, count - len(one.chunks))  # of a trace that says nothing of these
        made.append(Arrival(one.at / speed, prompt, answer, (*one.chunks[:count], *unique)))
    return made


def poisson(times: Iterable[float], rate: float) -> list[float]:
    """Return the times of as many arrivals, at `rate` a second. `times`: drawn from an exponential of mean 1."""
    return list(accumulate(gap / rate for gap in times))


def at_rate(at: Sequence[float], rate: float) -> list[float]:
    """Return the arrivals from 0 on, stretched so that they come at just this rate: a draw of few is far off."""
    stretch = (len(at) - 1) / rate / (at[-1] - at[0])
    return [(when - at[0]) * stretch for when in at]


def alike(at: Sequence[float], prompt: int, answer: int, prefix: int, chunk: int) -> list[Arrival]:
    """Return requests of one length of which the first `prefix` tokens, in whole chunks, are common to all."""
    count, common = -(-prompt // chunk), prefix // chunk
    return [
        Arrival(when, prompt, answer, (*range(common), *range((place + 1) * count + common, (place + 2) * count)))
        for place, when in enumerate(at)
    ]


def renamed(one: Arrival, number: int) -> Arrival:
    """Return the request with a prompt that no other number's has."""
    return replace(one, chunks=tuple((number << 30) + chunk for chunk in one.chunks))


def written(load: Iterable[Arrival]) -> str:
    """Return the text of a trace with these requests."""
    lines = (
        {"timestamp": round(one.at * 1e3, 3), "input_length": one.prompt, "output_length": one.answer}
        | {"hash_ids": list(one.chunks)}
        for one in load
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def new_tokens(load: Iterable[Arrival], chunk: int) -> int:
    """Return how many tokens of the prompts were in no earlier one."""
    seen: set[int] = set()
    total = 0
    for one in load:
        chain = beginnings(one.chunks)
        known = sum(1 for _ in takewhile(seen.__contains__, chain))
        seen.update(chain)
        total += max(0, one.prompt - known * chunk)
    return total
