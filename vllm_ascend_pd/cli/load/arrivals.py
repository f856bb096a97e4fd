# SPDX-License-Identifier: Apache-2.0
"""Requests of a load, read from a file in the form of Mooncake's public traces.

Each line is a JSON object: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`,
one number for each chunk of the prompt. Equal first numbers stand for equal first tokens. Pure, except for the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    arrivals: list[Arrival] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if len(arrivals) == MOST:
            raise ValueError(f"it has more than {MOST:,} requests")
        try:
            row = msgspec.json.decode(line, type=_TraceLine)
        except msgspec.MsgspecError as problem:
            raise ValueError(f"line {number}: {problem}") from None
        arrivals.append(Arrival(row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids))
    if not arrivals:
        raise ValueError("it has no requests")
    arrivals.sort(key=lambda one: one.at)
    began = arrivals[0].at
    return [Arrival(one.at - began, one.prompt, one.answer, one.chunks) for one in arrivals]


def beginnings(chunks: Sequence[int]) -> list[int]:
    """Return a number for each chunk that stands for it and all before it."""
    return list(accumulate(chunks, lambda before, chunk: hash((before, chunk)), initial=0))[1:]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a good answer: seconds to its first token, and seconds a token after that."""

    ttft: float
    tpot: float

    def good(self, ttft: float, seconds: float, tokens: int) -> bool:
        """Return whether an answer was good. `seconds`: to its last token."""
        return ttft <= self.ttft and (seconds - ttft) / max(1, tokens - 1) <= self.tpot
