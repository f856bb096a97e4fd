# SPDX-License-Identifier: Apache-2.0
"""The record of one request of P: its states, what moves it (the table is in rules.py), and what it is taken with."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from vllm_ascend_pd.errors import LocalProtocolError, PdError
from vllm_ascend_pd.protocol.first import FirstToken, FirstTokenRequest, Sample
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.meeting import SourceId
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.states import IdentityEnum


class RequestState(IdentityEnum):
    OVER = "over"  # or unknown
    WAITING = "waiting"  # only D's offer is here: the request has not been scheduled
    ARRIVED = "arrived"  # it waits to be scheduled
    LOCAL = "local"  # it runs, and is not pushed
    COLLECTING = "collecting"  # it runs, and a D may ask for it
    HELD = "held"  # it has ended, and a D may ask for it
    BOUND = "bound"  # it runs for a D, and no step has begun its push
    PUSHING = "pushing"  # a step has begun its push
    SEALED = "sealed"  # a step has the last chunk of its push
    LOST = "lost"  # its blocks are lost: its push starts over when it is scheduled again
    FAILED = "failed"  # its blocks were lost after the last chunk: it runs, and its push has failed
    RELEASING = "releasing"  # it has ended, and its blocks are kept until all workers have reported it


class RequestEvent(IdentityEnum):
    # from our own scheduler
    LOCAL = "local"  # it is scheduled, and is not to be pushed, or cannot be
    RESERVED = "reserved"  # it is scheduled, with a reservation that fits
    SOURCE = "source"  # it is scheduled without a reservation; it fits the offer that waits for it, if there is one
    SOURCE_UNFIT = "source_unfit"
    CHUNK = "chunk"  # a step computes a part of what D wants
    LAST_CHUNK = "last_chunk"
    PAST = "past"  # a part of what D wants was computed before D asked
    PAST_WHOLE = "past_whole"  # all of it was
    PREEMPTED = "preempted"
    UNSENT = "unsent"  # its push has begun, and no step has sent that yet: it counts as not begun
    ENDED = "ended"  # the whole prompt is computed
    ENDED_TOO_MANY = "ended_too_many"  # the whole prompt is computed, and no more can be held
    ABORTED = "aborted"
    ENDED_EMPTY = "ended_empty"  # it has no blocks any more
    REPORTED = "reported"  # by all workers
    # an OFFER, by the record that it names, and whether it fits
    OFFER = "offer"  # fits the source, or names a request that may still come
    OFFER_AGAIN = "offer_again"  # of the transfer that is waiting or bound here
    OFFER_TAKEN = "offer_taken"  # of another transfer, while one is waiting or bound here
    OFFER_UNFIT = "offer_unfit"  # another prompt, model or cache, or a transfer that was pushed before
    OFFER_UNKNOWN = "offer_unknown"  # of a source that is over, or of another incarnation
    OFFER_TOO_MANY = "offer_too_many"
    # from D
    WITHDRAWN = "withdrawn"  # GONE, or the end of D's process
    UNWANTED = "unwanted"  # no offer will come for a source
    # from the engine
    RESET = "reset"  # its caches are cleared: what is held is of no use any more
    # time
    HELD_TOO_LONG = "held_too_long"
    WAITED_TOO_LONG = "waited_too_long"


@dataclass(frozen=True, slots=True)
class PushTarget:
    """D's reservation, and how it came."""

    reservation: Reservation
    peer: Hashable | None = None  # the sender of its OFFER; None: it came with the request, whose answer tells D
    meets: str = ""  # the name under which an offer waits for a request

    @property
    def transfer(self) -> TransferId:
        return self.reservation.transfer


@dataclass(slots=True, eq=False)
class PushRequest:
    """A request of P, or D's offer that waits for one."""

    request_id: str = ""
    state: RequestState = RequestState.OVER
    push: str = ""
    prompt: tuple[int, str] = (0, "")  # its length, and a hash of all that its KV depends on
    target: PushTarget | None = None
    source: SourceId | None = None  # of a request that was scheduled without a reservation
    meets: str = ""
    refusal: PdError | None = None  # why it is not pushed
    computed: int = 0  # tokens, up to the end of the last step that counted
    tables: list[list[int]] = field(default_factory=list)  # its blocks, by group
    cached: int | None = None  # tokens in the prefix cache, until it is scheduled
    sample: Sample | None = None  # its first token, once it has ended
    until: float | None = None  # when holding or waiting ends
    # A later one with its id, which runs before this one is over and is not pushed.
    successor: PushRequest | None = None

    def __repr__(self) -> str:
        """<PushRequest held r, 40 of 40 tokens, source p-1/3/u, until 20.0>"""
        words = [f"{self.state.value} {self.request_id}".rstrip()]
        words += [f"{self.computed} of {self.prompt[0]} tokens"] if self.prompt[0] else []
        words += [f"source {self.source}"] if self.source else []
        words += [f"target {self.target.transfer}"] if self.target else []
        words += [f"until {self.until:.1f}"] if self.until is not None else []
        return f"<PushRequest {', '.join(words)}>"

    @property
    def bound_to(self) -> PushTarget:
        if self.target is None:
            raise LocalProtocolError(f"{self!r} has no target")
        return self.target

    @property
    def size(self) -> int:
        """Blocks of all groups."""
        return sum(map(len, self.tables))


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that vLLM schedules for the first time."""

    request_id: str
    prompt: tuple[int, str]  # its length, and a hash of all that its KV depends on
    push: str
    reservation: Reservation | None = None  # None: it may come as an offer
    meets: str = ""
    uuid: str = ""
    # For a D that can begin only with P's first token: how it is chosen here. None: it is not sent, or D has a token.
    seed: FirstTokenRequest | None = None


@dataclass(frozen=True, slots=True)
class RequestEnding:
    """End of a request, for its answer."""

    blocks_held: bool = False  # whether its blocks are
    source: PushRequest | None = None  # what is held for a target that may still come
    pushed: bool = False
    refusal: PdError | None = None  # why it was not pushed
    first: FirstToken | None = None  # its token, for a D that asks for it and receives P's answer


@dataclass(frozen=True, slots=True)
class Holding:
    """Limits: how much is held for later targets, how long (`hold_s`), and how long targets wait (`meet_s`)."""

    sources: int = 256
    blocks: int = 1 << 30
    hold_s: float = 120.0
    meet_s: float = 30.0
