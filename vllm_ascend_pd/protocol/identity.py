# SPDX-License-Identifier: Apache-2.0
"""Names that engines share: incarnations, transfers, pushes, endpoints and contributors.

Between engines only these names are used: vLLM's internal request ids never leave the engine that made them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from vllm_ascend_pd.geometry.layout import Name

PROTOCOL_VERSION = 2  # the version that this release writes; versions.py has those that it reads

_DP = "-dp"

Token = Annotated[str, msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class TransferId(msgspec.Struct, frozen=True, array_like=True):
    """One attempt to fill one request's blocks. `n` rises with every reservation of one D scheduler."""

    incarnation: Token
    n: Count
    uuid: Token

    def __str__(self) -> str:
        return f"{self.incarnation[:8]}/{self.n}/{self.uuid[:8]}"


def incarnation(drawn: str, dp_rank: int) -> str:
    """Return the name of one process of an engine.

    It contains the data-parallel rank, because a router may see several ranks behind one address.
    """
    return f"{drawn}{_DP}{dp_rank}" if dp_rank else drawn


def dp_rank_of(incarnation: str) -> str:
    """Return the data-parallel rank in the name of a process; empty for the first rank."""
    return incarnation.partition(_DP)[2]


def push_id(incarnation: str, uuid: str) -> str:
    """Return the name of a push: the incarnation of its P engine, and a uuid."""
    return f"{incarnation}.{uuid}"


def pushed_by(push: str) -> str:
    """Return the incarnation in the name of a push; empty if it is no such name."""
    incarnation, dot, _ = push.partition(".")
    return incarnation if dot else ""


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Address at which a process listens on the side channel."""

    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Contributor(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A P worker that writes to a D rank: pipeline stage, and rank within it."""

    stage: Rank
    rank: Rank

    def __str__(self) -> str:
        return f"P{self.stage}.{self.rank}"
