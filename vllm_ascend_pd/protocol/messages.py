# SPDX-License-Identifier: Apache-2.0
"""Everything that crosses between P and D on the side channel, and the reservation.

Messages may be lost, doubled and reordered, so each is idempotent and carries the full identity.
Durations cross the wire, never clock times. Sizes are bounded: a decoder refuses what is larger. Fields that it does not
know it ignores; `needs` names what may not be ignored (versions.py).
"""

from __future__ import annotations

import enum
import hashlib
from typing import Annotated, TypeAlias

import msgspec

from vllm_ascend_pd.geometry.layout import MAX_LAYERS, MAX_REGIONS, CacheGeometry, Name
from vllm_ascend_pd.protocol.failure import Failure, Text
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Contributor, Count, Rank, Token, TransferId

MAX_MESSAGE_BYTES = 4 << 20

Sum = Annotated[int, msgspec.Meta(ge=0)]  # a 64-bit sum; msgpack itself holds it below 2**64
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400.0)]
Needs = Annotated[tuple[Token, ...], msgspec.Meta(max_length=64)]


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where a process listens on its side channel."""

    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class LayerAddresses(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank's layers lie: base addresses by layer (in `layers` order) and region."""

    session: Name  # the transfer engine's own name
    num_blocks: Count
    bases: Annotated[
        tuple[Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_REGIONS)], ...],
        msgspec.Meta(max_length=MAX_LAYERS),
    ]


def layout_hash(addresses: LayerAddresses) -> str:
    """Names one rank's addresses, so that they need not be told twice."""
    return hashlib.sha256(msgspec.msgpack.encode(addresses)).hexdigest()[:32]


class RefusalCode(str, enum.Enum):
    """Why D says no to a BEGIN or a RENEW."""

    OVER = "over"  # the transfer is complete, or no longer known
    CANCELLED = "cancelled"
    BOUND = "bound"  # the transfer belongs to another push
    MISMATCH = "mismatch"  # the detail names each field and both values
    STALE = "stale"  # meant for another incarnation of D


class Versioned(msgspec.Struct, frozen=True):
    """Of a reservation of any version: what it is written in."""

    version: int


class Reservation(msgspec.Struct, frozen=True):
    """Which blocks of D a prefill may fill, for which attempt, until when. Signed as a whole."""

    version: int
    transfer: TransferId
    d_engine: Name
    model: Text  # fingerprint
    first: Count  # tokens [first, end) are wanted
    end: Count
    blocks: Annotated[bytes, msgspec.Meta(max_length=4 << 20)]  # int32, block index first//block_size onwards
    geometry: CacheGeometry
    endpoints: Annotated[tuple[Endpoint, ...], msgspec.Meta(max_length=1024)]  # of D's workers, by rank
    deadline_s: Seconds
    prompt_length: Count
    prompt_hash: Token
    needs: Needs = ()


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    transfer: TransferId
    push: Token
    p_incarnation: Token
    d_incarnation: Token
    contributor: Contributor
    d_rank: Rank
    seq: Count


class Begin(_Head, frozen=True, tag="begin", kw_only=True):
    """P rank → D rank: may I write? Repeated, with a new seq, until it is answered."""

    version: int = PROTOCOL_VERSION
    model: Text
    geometry: CacheGeometry
    contributors: tuple[Contributor, ...]
    plan_digest: Token
    quiet_s: Seconds  # how long a failed write of P may still land
    known_layout: Token = ""  # hash of the LayerAddresses that P has already
    needs: Needs = ()


class Renew(_Head, frozen=True, tag="renew", kw_only=True):
    """P rank → D rank: may I go on? With the seq of a BEGIN; what was agreed stays agreed."""


class Ready(_Head, frozen=True, tag="ready", kw_only=True):
    """D rank → P rank: you may, for `lease_s` from the moment you asked (echoed seq)."""

    lease_s: Seconds
    layout: Token
    addresses: LayerAddresses | None = None


class Refused(_Head, frozen=True, tag="refused", kw_only=True):
    """D rank → P rank: no. What differs is told with both values."""

    failure: Failure


class Done(_Head, frozen=True, tag="done", kw_only=True):
    """P rank → D rank: every byte that I owed is in your memory."""

    layers: Count
    tokens: Count
    bytes: Count
    plan_digest: Token
    checksums: Annotated[tuple[tuple[Name, Sum], ...], msgspec.Meta(max_length=MAX_LAYERS)] = ()


class Failed(_Head, frozen=True, tag="failed", kw_only=True):
    """P rank → D rank: it will not be complete. `quiescent`: and nothing of mine can land any more."""

    quiescent: bool
    failure: Failure


class Cancel(_Head, frozen=True, tag="cancel", kw_only=True):
    """D rank → P rank: stop. Answered by Failed(quiescent=True) or Done."""

    failure: Failure


class Ack(_Head, frozen=True, tag="ack", kw_only=True):
    """D rank → P rank: I have your `kind` of `seq`."""

    kind: Token


Message: TypeAlias = Begin | Renew | Ready | Refused | Done | Failed | Cancel | Ack
