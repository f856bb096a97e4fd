# SPDX-License-Identifier: Apache-2.0
"""Handling of requests by P's scheduler, on top of its two books: pushes, and sources and targets.

The adapter in ../role.py translates vLLM's objects and D's messages, and holds a lock. The simulator calls this too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.in_flight import BlocksInFlight, Chunk
from vllm_ascend_pd.prefill.scheduler.core.meetings import Meetings, Record, failure_of, not_held
from vllm_ascend_pd.protocol.first import First, Sample, Seed
from vllm_ascend_pd.protocol.meeting import Gone, Meeting, Offer, Unwanted
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.versions import WHOLE


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
    seed: Seed | None = None


@dataclass(frozen=True, slots=True)
class RequestEnding:
    """End of a request, for its answer."""

    held: bool  # whether its blocks are
    source: Record | None = None  # what is held for a target that may still come
    pushed: bool = False
    refusal: PdError | None = None  # why it was not pushed
    first: First | None = None  # its token, for a D that asks for it and receives P's answer


def opened(offer: Offer, unseal: Callable[[bytes], Reservation]) -> Reservation | Gone:
    """Return the reservation that an offer has sealed, or the answer that refuses the offer."""
    try:
        reservation = unseal(offer.reservation)
        if reservation.transfer != offer.transfer:
            raise PdError("PD-CTRL-002", why="an offer of another transfer than its reservation's")
    except PdError as refused:
        return Gone(offer.transfer, failure_of(refused))
    return reservation


class PushRequests:
    """Requests of P's scheduler."""

    def __init__(self, book: PushBook, meetings: Meetings, computing: BlocksInFlight) -> None:
        self.book, self.meetings, self.computing = book, meetings, computing

    @property
    def geometry(self) -> CacheGeometry | None:
        """Geometry of this engine's cache, once its workers have reported it."""
        return self.meetings.geometry

    # -- requests

    def knows(self, request_id: str) -> bool:
        """Return whether the request was taken or refused: vLLM announces it again when it resumes."""
        return self.book.knows(request_id) or self.meetings.knows(request_id)

    def take(self, now: float, asked: NewRequest) -> PdError | None:
        """Take a request, once. A refusal is returned, and the request is prefilled all the same."""
        geometry = self.geometry
        if asked.reservation is not None:
            if WHOLE in asked.reservation.needs and asked.seed != asked.reservation.seed:
                why = "other sampling" if asked.seed is not None else "none of this request's"
                return self.book.refuse(asked.request_id, PdError("PD-META-033", why=why))
            return self.book.admit(asked.request_id, asked.reservation, *asked.prompt, asked.push, geometry)
        why = not_held(geometry) if geometry is not None else "no worker has reported its cache"
        if why or geometry is None:
            return self.book.refuse(asked.request_id, PdError("PD-META-031", why=why))
        facts = asked.request_id, asked.push, asked.meets, asked.uuid, asked.prompt
        self.meetings.source(now, *facts, len(geometry.tables))
        return None

    def cuts(self, request_id: str) -> bool:
        """Return whether the prompt's last token is not computed here.

        D computes that token and needs the cache as it was before it, unless D begins with this engine's first token.
        """
        return self.ends(request_id) and not self.book.whole(request_id)

    def ends(self, request_id: str) -> bool:
        """Return whether nothing may be computed behind the prompt: a state would be overwritten in place."""
        return self.geometry is not None and self.geometry.recomputes_last and self.book.tracks(request_id)

    def step(
        self,
        chunks: Sequence[Chunk],
        over: Iterable[str],
        tables: Callable[[str], Sequence[Sequence[int]]],
    ) -> None:
        """Handle the chunks that a step computes.

        In groups of states, entries move within the block table; `tables` returns the tables as they are now.
        """
        self.computing.step(chunks, over)
        for chunk in chunks:
            self._scheduled(chunk, tables)

    def _scheduled(self, chunk: Chunk, tables: Callable[[str], Sequence[Sequence[int]]]) -> None:
        request_id, computed, count = chunk.request_id, chunk.computed, chunk.count
        new, replaces = chunk.new, chunk.replaces
        collects = self.meetings.collects(request_id)
        if not collects and not self.book.tracks(request_id):
            return
        groups = self.geometry.tables if self.geometry is not None else ()
        blocks = new or ((),) * max(1, len(groups))
        if any(group.stateful for group in groups):
            exact = zip(groups, tables(request_id), blocks, strict=True)
            blocks = [table if group.stateful else ids for group, table, ids in exact]
        if collects:
            self.meetings.computes(request_id, computed + count, blocks, replaces=replaces)
        else:
            ready = self.computing.ready(chunk, groups) if replaces and computed else 0
            self.book.scheduled(request_id, computed, count, *blocks, replaces=replaces, ready=ready)

    def preempted(self, request_id: str) -> None:
        self.meetings.preempted(request_id)
        self.book.preempted(request_id)

    def finished(
        self,
        now: float,
        request_id: str,
        *,
        holds_blocks: bool,
        well: bool,
        why: str,
        sampled: Callable[[], Sample | None] = lambda: None,
    ) -> RequestEnding:
        """Handle a request's end. `well`: its prompt was computed. `sampled` is called if D may want the token."""
        refusal, pushed = self.book.refusal(request_id), self.book.tracks(request_id)
        met, collected, well = (
            self.meetings.knows(request_id),
            self.meetings.collects(request_id),
            holds_blocks and well,
        )
        sample = sampled() if collected or self.book.asks(request_id) is not None else None
        first = self.book.first(request_id, sample) if not met else None
        waits = self.meetings.finished(now, request_id, well=well, sample=sample)
        held = self.book.finished(request_id, holds_blocks=holds_blocks, why=why) or waits
        if waits:
            return RequestEnding(held, self.meetings.held_record(request_id))
        if collected and well:
            refusal = PdError("PD-META-028", count=self.meetings.counts()["held"])
        return RequestEnding(held, pushed=pushed, refusal=refusal, first=first)

    # -- messages of D's schedulers

    def message(self, now: float, peer: Hashable, message: Meeting, reservation: Reservation | None = None) -> None:
        """Handle a message of D. `reservation` is what an offer has sealed."""
        if isinstance(message, Gone):
            self.meetings.withdrawn(now, peer, message.transfer)
        elif isinstance(message, Unwanted):
            self.meetings.unwanted(now, message.source, message.meets)
        elif isinstance(message, Offer) and reservation is not None:
            self.meetings.offer(now, peer, message, reservation)
