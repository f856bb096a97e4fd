# SPDX-License-Identifier: Apache-2.0
"""Loads of a run: which requests come, and when. Pure: what is drawn follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from vllm_ascend_pd.cli.load.arrivals import Arrival, alike, poisson, scaled

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
        return cut, max(1, round(512 * lengths.trace_lengths))
    dice = random.Random(f"{case}/{repeat}")
    if case.kind == "rate":
        count = max(4, round(case.value * lengths.seconds))
        at = poisson((dice.expovariate(1.0) for _ in range(count)), case.value)
    else:
        count = max(2 * int(case.value), round(lengths.seconds / idle_s))
        at = [0.0] * count
    return alike(at, lengths.prompt, lengths.answer, lengths.prompt * case.prefix // 100, CHUNK), CHUNK
