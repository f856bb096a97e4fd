# SPDX-License-Identifier: Apache-2.0
"""What D's and P's schedulers say to each other where no metaserver brings them together: a source that P holds, as its
answer carries it, and the messages by which D offers its reservation to P.

As on the workers' channel, messages may be lost, doubled and reordered, and durations travel, never clock times.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from vllm_ascend_pd.geometry.layout import Name
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import First
from vllm_ascend_pd.protocol.identity import Count, Endpoint, Token, TransferId
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES, Needs, Seconds

OFFER_ROOM = 4096  # of a frame, for what an OFFER says beside its reservation


class SourceId(msgspec.Struct, frozen=True, array_like=True):
    """One request's blocks on one P scheduler; `n` rises with every source of it."""

    incarnation: Token
    n: Count
    uuid: Token

    def __str__(self) -> str:
        return f"{self.incarnation[:8]}/{self.n}/{self.uuid[:8]}"


class Source(msgspec.Struct, frozen=True):
    """P's answer: what it holds of a prompt, how long, and where D offers its reservation for it. Sealed as a whole."""

    version: int
    source: SourceId
    listens: Endpoint
    prompt_length: Count
    prompt_hash: Token
    hold_s: Seconds
    needs: Needs = ()


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """D → P: here is my reservation, for this source, or for the request of this name. Repeated until the request of D
    knows how P's part has ended."""

    transfer: TransferId
    reservation: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]  # sealed
    source: SourceId | None = None
    meets: Name = ""


class Waits(msgspec.Struct, frozen=True, tag="waits"):
    """P → D: the request of that name has not come yet. The offer is kept."""

    transfer: TransferId


class Bound(msgspec.Struct, frozen=True, tag="bound"):
    """P → D: source and target have met. `ended`: and P has computed the whole prompt, and sampled `first` as D asks for."""

    transfer: TransferId
    push: Token
    ended: bool
    first: First | None = None


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """Either → other: my side of it is over. Final."""

    transfer: TransferId
    failure: Failure


class Unwanted(msgspec.Struct, frozen=True, tag="unwanted"):
    """D → P: no offer will come for this source, or for the request of this name. Said once: `hold_s` ends it too."""

    d_incarnation: Token
    source: SourceId | None = None
    meets: Name = ""


Meeting: TypeAlias = Offer | Waits | Bound | Gone | Unwanted
