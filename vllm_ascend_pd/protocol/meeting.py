# SPDX-License-Identifier: Apache-2.0
"""Messages between D's and P's schedulers when no metaserver brings them together.

They are a source that P holds, which P's answer carries, and the messages by which D offers its reservation to P. As on
the workers' channel, messages may be lost, duplicated and reordered, and carry durations, never clock times.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from vllm_ascend_pd.geometry.layout import Name
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstToken
from vllm_ascend_pd.protocol.identity import Count, Endpoint, Token, TransferId
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES, Needs, Seconds

OFFER_ROOM = 4096  # bytes of a frame for the fields of an OFFER beside its reservation


class SourceId(msgspec.Struct, frozen=True, array_like=True):
    """One request's blocks on one P scheduler. `n` rises with every source of this scheduler."""

    incarnation: Token
    n: Count
    uuid: Token

    def __str__(self) -> str:
        return f"{self.incarnation[:8]}/{self.n}/{self.uuid[:8]}"


class Source(msgspec.Struct, frozen=True):
    """Part of P's answer: a prompt that it holds, how long, and where D offers its reservation. Sealed as a whole."""

    version: int
    source: SourceId
    listens: Endpoint
    prompt_length: Count
    prompt_hash: Token
    hold_s: Seconds
    needs: Needs = ()


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """D → P: offer of a reservation, for this source or for the request of this name.

    It is repeated until D has learned how P's part has ended.
    """

    transfer: TransferId
    reservation: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]  # sealed
    source: SourceId | None = None
    meets: Name = ""


class Waits(msgspec.Struct, frozen=True, tag="waits"):
    """P → D: the request of that name has not arrived yet. The offer is kept."""

    transfer: TransferId


class Bound(msgspec.Struct, frozen=True, tag="bound"):
    """P → D: source and target are bound.

    With `ended`, P has also computed the whole prompt. `first` is then its token, if D asked for it and P has it.
    """

    transfer: TransferId
    push: Token
    ended: bool
    first: FirstToken | None = None


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Either → other: the sender's side of it is over. Final."""

    transfer: TransferId
    failure: Failure


class Unwanted(msgspec.Struct, frozen=True, tag="unwanted"):
    """D → P: no offer will come for this source, or for the request of this name.

    It is sent once. If it is lost, P holds the blocks until `hold_s` is over.
    """

    d_incarnation: Token
    source: SourceId | None = None
    meets: Name = ""


Meeting: TypeAlias = Offer | Waits | Bound | Gone | Unwanted
