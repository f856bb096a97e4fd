# SPDX-License-Identifier: Apache-2.0
"""The record of one request of D and of its load: its states, what moves it, and what then has to be done.

The table of its transitions is in book.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.decode.scheduler.core.routes import KvRoute
from vllm_ascend_pd.metadata import Bind
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstToken
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.states import IdentityEnum

TAKEN = "prefill"  # in a report: the first token is P's
GIVEN = "given"  # in a report: the answer goes on, behind tokens that were given
USELESS = "PD-XFER-008"  # the KV came, and the request cannot begin without P's token


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


class LoadState(IdentityEnum):
    OVER = "over"  # or unknown
    ARRIVED = "arrived"  # P may bring its KV
    LOCAL = "local"  # D computes its prompt
    LOADING = "loading"  # P computes, and writes
    LANDING = "landing"  # P has finished: what is missing must come soon
    FENCING = "fencing"  # no P brings its KV: it goes on once nothing can be written any more
    ABANDONED = "abandoned"  # it has ended, and its blocks are kept until nothing can be written any more
    HELD = "held"  # its KV is complete, and P's first token may still come
    FAILED = "failed"  # its load has failed, and vLLM does not know yet
    DROPPED = "dropped"  # it has ended while it was held, or had failed, and vLLM does not know of its load's end yet
    LOADED = "loaded"  # its load is over, and it runs


class LoadEvent(IdentityEnum):
    # from vLLM
    LOCAL = "local"  # it is scheduled, and loads nothing
    RESERVED = "reserved"  # it is scheduled, and there are blocks for its load
    ENDED = "ended"  # by its client, or its last token
    # from the metaserver, router or P that was asked for a prefill
    PREFILLED = "prefilled"
    NOT_PREFILLED = "not_prefilled"
    # all workers have reported
    RECEIVED = "received"  # nothing has to be waited for, or the load has failed
    RECEIVED_EARLY = "received_early"  # complete, and P's first token may still come
    RECEIVED_FAILED = "received_failed"  # failed, and this vLLM takes that only around its read of a step
    BEGUN = "begun"  # vLLM learns now that the load is over, which was withheld


@dataclass(slots=True, eq=False)
class RemoteLoad:
    """A request of D, and its load."""

    request_id: str
    route: KvRoute | None
    request: Any = None  # the engine's own
    given: tuple[int, ...] | None = None  # outputs with which it begins; None: not decided yet
    state: LoadState = LoadState.OVER
    first: int = -1  # the first token to load, once it is known; before it, what is in D's own cache
    tokens: int = 0
    transfer: TransferId | None = None
    bind: Bind | None = None
    failure: Failure | None = None  # why the KV did not come, or was of no use: the first that a rank reported
    push: str = ""  # that it came from
    cached: int = 0
    wanted: Wanted | None = None  # P's first token, as long as it may come
    answer: FirstToken | str = ""  # P's token, or why none comes
    complete: float = math.inf  # when the KV was
    source: str = ""  # of its first token, once that is known: P (TAKEN), or why D computes it

    def __repr__(self) -> str:
        """<RemoteLoad loading r, 100 tokens from 20 for d/3/u>"""
        load = f", {self.tokens} tokens from {self.first} for {self.transfer}" if self.transfer else ""
        return f"<RemoteLoad {self.state.value} {self.request_id}{load}>"

    @property
    def ended(self) -> bool:
        """True if the load is over, and the request is not."""
        return self.state in (LoadState.HELD, LoadState.FAILED, LoadState.LOADED)

    @property
    def p_waits(self) -> bool:
        """True if a P waits for D, and must be told that nothing more is wanted."""
        return self.route is not None and self.route.p_waits

    @property
    def whole(self) -> bool:
        """True if it can begin only with P's token."""
        return self.wanted is not None and self.wanted.whole


class LoadEffect(IdentityEnum):
    HANG_UP = "hang_up"  # its call or offer is of no use any more
    NOT_FETCHED = "not_fetched"  # a P may compute or hold what D will not fetch
    FIRST_COMPUTED = "first_computed"  # D computes its first token, or no token any more
    OVER = "over"  # time to report how it ended, which happens once
