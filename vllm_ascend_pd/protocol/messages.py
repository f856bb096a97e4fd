# SPDX-License-Identifier: Apache-2.0
"""Messages between P's and D's workers on the side channel, and the reservation.

Messages may be lost, duplicated and reordered, so each is idempotent and carries the full identity.
Durations cross the wire, never clock times. Sizes are bounded: a decoder refuses what is larger. It ignores fields that
it does not know; `needs` names what must not be ignored (versions.py).
"""

from __future__ import annotations

import enum
import hashlib
from typing import Annotated, TypeAlias

import msgspec

from vllm_ascend_pd.geometry.layout import MAX_COMPONENTS, MAX_GROUPS, MAX_LAYERS, CacheGeometry, Name
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstTokenRequest
from vllm_ascend_pd.protocol.identity import PROTOCOL_VERSION, Contributor, Count, Endpoint, Rank, Token, TransferId
from vllm_ascend_pd.protocol.layouts import MAX_COMPONENTS_OF_ALL, MAX_LAYOUT_BYTES

MAX_MESSAGE_BYTES = 4 << 20

Sum = Annotated[int, msgspec.Meta(ge=0)]  # a 64-bit sum; msgpack itself holds it below 2**64
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_LAYERS)]
Checksum = tuple[Index, Index, Sum]  # layer and component, by their places in the layout, and the sum
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400.0)]
Needs = Annotated[tuple[Token, ...], msgspec.Meta(max_length=64)]


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """Addresses of one worker's layers, which are those of its stage.

    Groups share storage at the same addresses, so an address does not identify a layer.
    """

    session: Name  # the transfer engine's own name
    blocks: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_GROUPS)]  # number of blocks, by group
    bases: Annotated[  # by layer and component, in the layout's order
        tuple[Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_COMPONENTS)], ...],
        msgspec.Meta(max_length=MAX_LAYERS),
    ]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of components of each layer."""
        return tuple(map(len, self.bases))


def memory_hash(addresses: Memory) -> str:
    """Return the name of one rank's addresses, which lets them be sent only once."""
    return hashlib.sha256(msgspec.msgpack.encode(addresses)).hexdigest()[:32]


class RefusalCode(str, enum.Enum):
    """Reason for which D refuses a BEGIN or a RENEW."""

    OVER = "over"  # the transfer is complete, or no longer known
    CANCELLED = "cancelled"
    BOUND = "bound"  # the transfer belongs to another push
    MISMATCH = "mismatch"  # the detail names each field and both values
    STALE = "stale"  # meant for another incarnation of D


class Versioned(msgspec.Struct, frozen=True):
    """The version of a reservation or source, readable in every version."""

    version: int


class Reservation(msgspec.Struct, frozen=True):
    """Blocks of D that P may fill in one transfer, with a deadline. Sealed as a whole; its format is in
    reservation_format.py.
    """

    version: int
    transfer: TransferId
    model: str  # fingerprint
    first: int  # tokens [first, end) are wanted, in each group those that matter
    end: int
    blocks: tuple[bytes, ...]  # by group: ids as int32, from the block of its first wanted token
    geometry: CacheGeometry
    endpoints: tuple[Endpoint, ...]  # of D's workers, by rank
    deadline_s: float
    prompt_length: int
    prompt_hash: str
    needs: tuple[str, ...] = ()
    seed: FirstTokenRequest | None = None


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    transfer: TransferId
    push: Token
    p_incarnation: Token
    d_incarnation: Token
    contributor: Contributor
    d_rank: Rank  # D's worker, by its place in the layout: stage by stage
    seq: Count


class Begin(_Head, frozen=True, tag="begin", kw_only=True):
    """P rank → D rank: request to write. Repeated, with a new seq, until it is answered."""

    version: int = PROTOCOL_VERSION
    layout: Token  # hash of P's layout
    # That layout, if D may not know it. Its name on the wire is older.
    layout_bytes: Annotated[bytes, msgspec.Meta(max_length=MAX_LAYOUT_BYTES)] = msgspec.field(default=b"", name="told")
    contributors: Token  # hash of the contributors to this D rank
    plan_digest: Token
    quiet_s: Seconds  # how long a failed write of P may still land
    known_memory: Token = ""  # hash of the Memory that P has already
    needs: Needs = ()


class Renew(_Head, frozen=True, tag="renew", kw_only=True):
    """P rank → D rank: request to go on writing. `seq` counts on from the BEGIN's; what was agreed stays agreed."""


class Ready(_Head, frozen=True, tag="ready", kw_only=True):
    """D rank → P rank: permission to write for `lease_s`, from when P sent the BEGIN or RENEW of this (echoed) seq."""

    lease_s: Seconds
    memory: Token  # hash of D's memory
    addresses: Memory | None = None  # that memory, if P does not know it


class LayoutRequest(_Head, frozen=True, tag="which", kw_only=True):
    """D rank → P rank, WHICH on the wire: request for the layout that the BEGIN names, which is not known here."""


class Refused(_Head, frozen=True, tag="refused", kw_only=True):
    """D rank → P rank: refusal of a BEGIN or RENEW. Its failure lists what differs, with both values."""

    failure: Failure


class Done(_Head, frozen=True, tag="done", kw_only=True):
    """P rank → D rank: every byte that this P rank owed is in D's memory."""

    bytes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_GROUPS)]  # by group
    plan_digest: Token
    checksums: Annotated[tuple[Checksum, ...], msgspec.Meta(max_length=MAX_COMPONENTS_OF_ALL)] = ()
    cached: Count = 0  # tokens of the prompt that P had in its cache


class Failed(_Head, frozen=True, tag="failed", kw_only=True):
    """P rank → D rank: the KV will not be complete. `quiescent`: nothing of this P rank can land any more."""

    quiescent: bool
    failure: Failure


class Cancel(_Head, frozen=True, tag="cancel", kw_only=True):
    """D rank → P rank: request to stop. Answered by Failed(quiescent=True) or Done."""

    failure: Failure


class Ack(_Head, frozen=True, tag="ack", kw_only=True):
    """D rank → P rank: receipt of the `kind` (done or failed) with this `seq`."""

    kind: Token


Message: TypeAlias = Begin | Renew | Ready | LayoutRequest | Refused | Done | Failed | Cancel | Ack


def message_name(message: Message) -> str:
    """Return the message's name on the wire, by which counters and logs know it too."""
    return str(message.__struct_config__.tag)
