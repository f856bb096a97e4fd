# SPDX-License-Identifier: Apache-2.0
"""Wire format of the first token: D's request for it in the reservation, and P's answer with the sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Count, Token, TransferId

MAX_LOGPROBS = 64
MAX_FIRST_BYTES = 8192  # of a sealed `FirstToken`

TokenRank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
LogProb = tuple[Count, float, TokenRank]  # token, its log-probability, its rank
Sample: TypeAlias = tuple[int, str, Sequence[LogProb]]  # token, digest of its choice, log-probabilities to report


class FirstTokenRequest(msgspec.Struct, frozen=True):
    """Part of a reservation: D will start with P's token if it was chosen and is reported as asked for here."""

    digest: Token  # of the parameters that choose it (sampling.py)
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None  # how many beside the sampled token's


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """P's scheduler → D's scheduler: the token that P has sampled.

    It is sealed as a whole if a router carries it. A `Bound` carries it as it is.
    """

    version: int = PROTOCOL_VERSION
    transfer: TransferId
    push: Token
    position: Count  # tokens before it: the prompt's length
    token: Count
    digest: Token
    logprobs: Annotated[tuple[LogProb, ...], msgspec.Meta(max_length=MAX_LOGPROBS + 1)] = ()  # the sampled token first
