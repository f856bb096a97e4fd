# SPDX-License-Identifier: Apache-2.0
"""P's first token: what D asks for, what it takes, and how a request that waits for it goes on."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_pd.protocol.first import FirstToken
from vllm_ascend_pd.protocol.identity import TransferId


@dataclass(frozen=True, slots=True)
class Wanted:
    """The first token that D asks P for in the reservation of a transfer."""

    transfer: TransferId
    position: int  # the prompt's length
    digest: str
    logprobs: int | None
    vocabulary: int
    whole: bool = False  # D can begin only with it: the prompt's last token cannot be computed again in its cache


@dataclass(frozen=True, slots=True)
class Start:
    """Release of a request whose end of load was withheld from vLLM: with P's token, or without one, and then why.

    `fails`: its KV is of no use.
    """

    request_id: str
    first: FirstToken | None
    why: str = ""
    fails: bool = False


def fault(wanted: Wanted, first: FirstToken) -> str:
    """Return why a token is not the one that was asked for; empty if it is."""
    if first.transfer != wanted.transfer:
        return "another transfer"
    if first.position != wanted.position:
        return "another prompt"
    if first.digest != wanted.digest:
        return "other sampling"
    tokens = (first.token, *(token for token, _, _ in first.logprobs))
    if max(tokens) >= wanted.vocabulary:
        return "not in the vocabulary"
    if wanted.logprobs is None:
        return "logprobs" if first.logprobs else ""
    well = len(first.logprobs) == wanted.logprobs + 1 and first.logprobs[0][0] == first.token
    return "" if well and all(value <= 0.0 for _, value, _ in first.logprobs) else "logprobs"  # no NaN passes
