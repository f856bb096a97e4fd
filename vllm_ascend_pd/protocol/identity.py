# SPDX-License-Identifier: Apache-2.0
"""Who is who: incarnations, transfers, pushes and rank pairs.

vLLM's request ids never leave the engine that made them; across engines only these names are used.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from vllm_ascend_pd.geometry.layout import Name

PROTOCOL_VERSION = 2  # in which this release writes; versions.py says what it reads

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
    """The name of one process of an engine. It tells which data-parallel rank it is: a router may see several behind one
    address."""
    return f"{drawn}{_DP}{dp_rank}" if dp_rank else drawn


def dp_rank_of(incarnation: str) -> str:
    """As it is in the name; empty for the first one."""
    return incarnation.partition(_DP)[2]


def push_id(incarnation: str, uuid: str) -> str:
    """The name of a push: whose it is, and which."""
    return f"{incarnation}.{uuid}"


def pushed_by(push: str) -> str:
    """The incarnation of the P engine whose push this is; empty for what is no such name."""
    incarnation, dot, _ = push.partition(".")
    return incarnation if dot else ""


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where a process listens on its side channel."""

    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Contributor(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A P worker that writes to a D rank: pipeline stage and tensor-parallel rank."""

    stage: Rank
    rank: Rank

    def __str__(self) -> str:
        return f"P{self.stage}.{self.rank}"
