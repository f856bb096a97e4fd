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

from vllm_ascend_pd.geometry.layout import MAX_GROUPS, MAX_LAYERS, CacheGeometry, Name
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import Seed
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Contributor, Count, Endpoint, Rank, Token, TransferId
from vllm_ascend_pd.protocol.layouts import MAX_COMPONENTS, MAX_COMPONENTS_OF_ALL, MAX_LAYOUT_BYTES, Index

MAX_MESSAGE_BYTES = 4 << 20

Sum = Annotated[int, msgspec.Meta(ge=0)]  # a 64-bit sum; msgpack itself holds it below 2**64
Checksum = tuple[Index, Index, Sum]  # of a layer's component, both by their place in the layout
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400.0)]
Needs = Annotated[tuple[Token, ...], msgspec.Meta(max_length=64)]


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """Where the layers of one worker lie: those of its stage. Groups share storage at the same addresses: an address never names a layer."""

    session: Name  # the transfer engine's own name
    blocks: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_GROUPS)]  # how many, by group
    bases: Annotated[  # by layer and component, in the layout's order
        tuple[Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_COMPONENTS)], ...],
        msgspec.Meta(max_length=MAX_LAYERS),
    ]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many components each layer has."""
        return tuple(map(len, self.bases))


def memory_hash(addresses: Memory) -> str:
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
    """Which blocks of D a prefill may fill, for which attempt, until when. Signed as a whole; forms.py has what travels."""

    version: int
    transfer: TransferId
    model: str  # fingerprint
    first: int  # tokens [first, end) are wanted, of each group those that matter
    end: int
    blocks: tuple[bytes, ...]  # by group: int32, from the block with the first token that is wanted of it
    geometry: CacheGeometry
    endpoints: tuple[Endpoint, ...]  # of D's workers, by rank
    deadline_s: float
    prompt_length: int
    prompt_hash: str
    needs: tuple[str, ...] = ()
    seed: Seed | None = None


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    transfer: TransferId
    push: Token
    p_incarnation: Token
    d_incarnation: Token
    contributor: Contributor
    d_rank: Rank  # D's worker, by its place in the layout: stage by stage
    seq: Count


class Begin(_Head, frozen=True, tag="begin", kw_only=True):
    """P rank → D rank: may I write? Repeated, with a new seq, until it is answered."""

    version: int = PROTOCOL_VERSION
    layout: Token  # hash of P's
    told: Annotated[bytes, msgspec.Meta(max_length=MAX_LAYOUT_BYTES)] = b""  # that layout, where D may not know it
    contributors: Token  # hash of who writes to this D rank
    plan_digest: Token
    quiet_s: Seconds  # how long a failed write of P may still land
    known_memory: Token = ""  # hash of the Memory that P has already
    needs: Needs = ()


class Renew(_Head, frozen=True, tag="renew", kw_only=True):
    """P rank → D rank: may I go on? With the seq of a BEGIN; what was agreed stays agreed."""


class Ready(_Head, frozen=True, tag="ready", kw_only=True):
    """D rank → P rank: you may, for `lease_s` from the moment you asked (echoed seq)."""

    lease_s: Seconds
    memory: Token  # hash of D's
    addresses: Memory | None = None  # that memory, where P does not know it


class Which(_Head, frozen=True, tag="which", kw_only=True):
    """D rank → P rank: the layout that your BEGIN names is not known here. Say it in full."""


class Refused(_Head, frozen=True, tag="refused", kw_only=True):
    """D rank → P rank: no. What differs is told with both values."""

    failure: Failure


class Done(_Head, frozen=True, tag="done", kw_only=True):
    """P rank → D rank: every byte that I owed is in your memory."""

    bytes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_GROUPS)]  # by group
    plan_digest: Token
    checksums: Annotated[tuple[Checksum, ...], msgspec.Meta(max_length=MAX_COMPONENTS_OF_ALL)] = ()
    cached: Count = 0  # tokens of the prompt that P had in its cache


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


Message: TypeAlias = Begin | Renew | Ready | Which | Refused | Done | Failed | Cancel | Ack
