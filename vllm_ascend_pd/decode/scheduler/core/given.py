# SPDX-License-Identifier: Apache-2.0
"""The answer so far of a request that goes on here: the tokens with which it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """D's question for the answer so far of one request. Each is its own: ids of requests may come again."""

    request_id: str
    until: float  # afterwards the request begins anew
    room: int  # tokens that the engine can hold behind its prompt


def unfit(tokens: Sequence[int], vocabulary: int, room: int) -> str:
    """Return why a request cannot begin with these tokens; empty: it can."""
    if len(tokens) > room:
        return f"{len(tokens)} tokens are more than the {max(0, room)} that can follow the prompt"
    return "" if all(0 <= token < vocabulary for token in tokens) else "a token is not in the vocabulary"
