# SPDX-License-Identifier: Apache-2.0
"""The answer so far of a request that goes on here: the tokens with which it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ascend_pd.protocol.auth import prompt_hash

CONTINUE = "continue"  # in a request's transfer parameters, beside the ticket


def read_given(params: Mapping[str, Any], prompt: Sequence[int], vocabulary: int, room: int) -> tuple[int, ...] | str:
    """Return the tokens with which a request begins, or why they are not taken; () if there are none.

    `params` may be any JSON. `room`: tokens that the engine can hold behind the prompt. The same body may become
    another prompt on another engine (its template, the date in it), and then the answer does not belong to it.
    """
    asked = params.get(CONTINUE)
    if asked is None:
        return ()
    tokens = asked.get("tokens") if isinstance(asked, Mapping) else None
    if not isinstance(tokens, list) or not tokens:
        return "it has no list of tokens"
    if len(tokens) > room:
        return f"its {len(tokens)} tokens are more than the {max(0, room)} that can follow the prompt"
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        return "it has a token that is not in the vocabulary"
    if asked.get("prompt") != prompt_hash(prompt):
        return "the prompt is another one here"
    return tuple(tokens)
