# SPDX-License-Identifier: Apache-2.0
"""The first token as it travels: what D asks for in its reservation, and what P says of the token that it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Count, Token, TransferId

MAX_LOGPROBS = 64
MAX_FIRST_BYTES = 8192  # of one, sealed

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
LogProb = tuple[Count, float, Rank]  # token, its log-probability, its rank
Sample: TypeAlias = tuple[int, str, Sequence[LogProb]]  # a token, how it was chosen (a digest), what is reported of it


class Seed(msgspec.Struct, frozen=True):
    """In a reservation: D would start with P's token, if it was chosen in this way and is reported in that."""

    digest: Token  # of the parameters that choose it (sampling.py)
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None  # beside the sampled token's own


class First(msgspec.Struct, frozen=True, kw_only=True):
    """P's scheduler → D's scheduler, once P has sampled. Signed as a whole: it travels through the router."""

    version: int = PROTOCOL_VERSION
    transfer: TransferId
    push: Token
    position: Count  # tokens before it: the prompt's length
    token: Count
    digest: Token
    logprobs: Annotated[tuple[LogProb, ...], msgspec.Meta(max_length=MAX_LOGPROBS + 1)] = ()  # the sampled one first
