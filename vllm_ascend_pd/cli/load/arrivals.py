# SPDX-License-Identifier: Apache-2.0
"""Requests of a load, read from or written to a file in the form of Mooncake's public traces.

Each line is a JSON object: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`,
one number for each chunk of the prompt. Equal first numbers stand for equal first tokens. Pure, except for the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Annotated

import msgspec

CHUNK = 512  # tokens of a hash in Mooncake's traces
MOST = 100_000  # requests
LONGEST = 4_194_304  # tokens of a prompt

_Length = Annotated[int, msgspec.Meta(ge=1, le=LONGEST)]


class _TraceLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0.0)]
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, its tokens, and the identities of its prompt's chunks."""

    at: float  # seconds after the first one
    prompt: int
    answer: int
    chunks: tuple[int, ...] = ()


def read(text: str) -> list[Arrival]:
    """Return the requests in the order of their times. Raise ValueError with the line's number."""
    found: list[Arrival] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if len(found) == MOST:
            raise ValueError(f"it has more than {MOST:,} requests")
        try:
            said = msgspec.json.decode(line, type=_TraceLine)
        except msgspec.MsgspecError as problem:
            raise ValueError(f"line {number}: {problem}") from None
        found.append(Arrival(said.timestamp / 1e3, said.input_length, said.output_length, said.hash_ids))
    if not found:
        raise ValueError("it has no requests")
    found.sort(key=lambda one: one.at)
    first = found[0].at
    return [Arrival(one.at - first, one.prompt, one.answer, one.chunks) for one in found]


def written(arrivals: Iterable[Arrival]) -> str:
    """Return the text of a trace with these requests."""
    lines = (
        {"timestamp": round(one.at * 1e3, 3), "input_length": one.prompt, "output_length": one.answer}
        | {"hash_ids": list(one.chunks)}
        for one in arrivals
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def scaled(arrivals: Sequence[Arrival], lengths: float, speed: float, chunk: int = CHUNK) -> list[Arrival]:
    """Return the requests with all lengths times `lengths`, coming `speed` times as fast.

    They have as many chunks as their prompt begins, of `chunk` times `lengths` tokens.
    """
    size, made = max(1, round(chunk * lengths)), []
    for place, one in enumerate(arrivals):
        prompt, answer = (max(1, round(tokens * lengths)) for tokens in (one.prompt, one.answer))
        count = -(-prompt // size)
        own = (-1 - place,) * max(0, count - len(one.chunks))  # of a trace that says nothing of these
        made.append(Arrival(one.at / speed, prompt, answer, (*one.chunks[:count], *own)))
    return made


def poisson(times: Iterable[float], rate: float) -> list[float]:
    """Return the times of as many arrivals, at `rate` a second. `times`: drawn from an exponential of mean 1."""
    return list(accumulate(gap / rate for gap in times))


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


def beginnings(chunks: Sequence[int]) -> list[int]:
    """Return a number for each chunk that stands for it and all before it."""
    return list(accumulate(chunks, lambda before, chunk: hash((before, chunk)), initial=0))[1:]


def new_tokens(arrivals: Iterable[Arrival], chunk: int) -> int:
    """Return how many tokens of the prompts were in no earlier one."""
    seen: set[int] = set()
    total = 0
    for one in arrivals:
        chain = beginnings(one.chunks)
        known = sum(1 for _ in takewhile(seen.__contains__, chain))
        seen.update(chain)
        total += max(0, one.prompt - known * chunk)
    return total


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a good answer: seconds to its first token, and seconds a token after that."""

    ttft: float
    tpot: float

    def good(self, ttft: float, seconds: float, tokens: int) -> bool:
        """Return whether an answer was good. `seconds`: to its last token."""
        return ttft <= self.ttft and (seconds - ttft) / max(1, tokens - 1) <= self.tpot
