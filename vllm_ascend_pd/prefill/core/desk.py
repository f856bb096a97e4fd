# SPDX-License-Identifier: Apache-2.0
"""What P's scheduler does with requests, over its books of pushes and of sources and targets.

The adapter in scheduler.py translates vLLM's objects and D's messages, and holds a lock; the simulator calls the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.prefill.core.computing import Chunk, Computing
from vllm_ascend_pd.prefill.core.meetings import Meetings, Record, failure_of, not_held
from vllm_ascend_pd.prefill.decisions import PushBook
from vllm_ascend_pd.protocol.first import First, Sample, Seed
from vllm_ascend_pd.protocol.meeting import Gone, Meeting, Offer, Unwanted
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.versions import WHOLE


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that vLLM schedules for the first time."""

    request_id: str
    prompt: tuple[int, str]  # its length, and a hash of all that its KV depends on
    push: str
    reservation: Reservation | None = None  # None: a target may come by itself
    meets: str = ""
    uuid: str = ""
    tells: Seed | None = (
        None  # for a D that can begin with nothing else: how its first token will be chosen; None: it is not told
    )


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended, for its answer."""

    held: bool  # its blocks
    source: Record | None = None  # for a target that may still come
    pushed: bool = False
    refusal: PdError | None = None  # why it was not
    first: First | None = None  # its token, for a D that asks for it and hears P's answer


def opened(offer: Offer, unseal: Callable[[bytes], Reservation]) -> Reservation | Gone:
    """What an offer has sealed, or what is answered to it."""
    try:
        reservation = unseal(offer.reservation)
        if reservation.transfer != offer.transfer:
            raise PdError("PD-CTRL-002", why="an offer of another transfer than its reservation's")
    except PdError as refused:
        return Gone(offer.transfer, failure_of(refused))
    return reservation


class Desk:
    """Without `computing` nothing of a prompt that is cached leaves before the forward: what a step begins with may come while it runs."""

    def __init__(self, book: PushBook, meetings: Meetings, computing: Computing | None = None) -> None:
        self.book, self.meetings, self.computing = book, meetings, computing

    @property
    def engine(self) -> CacheGeometry | None:
        """This engine's cache, once its workers have told it."""
        return self.meetings.engine

    # -- requests

    def knows(self, request_id: str) -> bool:
        """Whether it was taken or refused: vLLM tells of a request again when it comes back."""
        return self.book.knows(request_id) or self.meetings.knows(request_id)

    def take(self, now: float, asked: Asked) -> PdError | None:
        """Once for each request: a refusal is returned, and the request is prefilled all the same."""
        engine = self.engine
        if asked.reservation is not None:
            if WHOLE in asked.reservation.needs and asked.tells != asked.reservation.seed:
                why = "other sampling" if asked.tells is not None else "none of this request's"
                return self.book.refuse(asked.request_id, PdError("PD-META-033", why=why))
            return self.book.admit(asked.request_id, asked.reservation, *asked.prompt, asked.push, engine)
        why = not_held(engine) if engine is not None else "no worker has told its cache"
        if why or engine is None:
            return self.book.refuse(asked.request_id, PdError("PD-META-031", why=why))
        facts = asked.request_id, asked.push, asked.meets, asked.uuid, asked.prompt
        self.meetings.source(now, *facts, len(engine.tables))
        return None

    def cuts(self, request_id: str) -> bool:
        """Whether the last token of its prompt is not computed here: D must find what it needs to run that one, but where it begins
        with this engine's token."""
        return self.ends(request_id) and not self.book.whole(request_id)

    def ends(self, request_id: str) -> bool:
        """Whether nothing may be computed behind its prompt: a state would change in its place."""
        return self.engine is not None and self.engine.leaves_last and self.book.tracks(request_id)

    def step(
        self,
        chunks: Sequence[Chunk],
        over: Iterable[str],
        tables: Callable[[str], Sequence[Sequence[int]]],
    ) -> None:
        """A step computes these. Entries of states move in their table, so of these it is the table as it is now."""
        if self.computing is not None:
            self.computing.step(chunks, over)
        for chunk in chunks:
            self._scheduled(chunk, tables)

    def _scheduled(self, chunk: Chunk, tables: Callable[[str], Sequence[Sequence[int]]]) -> None:
        request_id, computed, count = chunk.request_id, chunk.computed, chunk.count
        new, replaces = chunk.new, chunk.replaces
        collects = self.meetings.collects(request_id)
        if not collects and not self.book.tracks(request_id):
            return
        groups = self.engine.tables if self.engine is not None else ()
        blocks = new or ((),) * max(1, len(groups))
        if any(group.stateful for group in groups):
            exact = zip(groups, tables(request_id), blocks, strict=True)
            blocks = [table if group.stateful else ids for group, table, ids in exact]
        if collects:
            self.meetings.computes(request_id, computed + count, blocks, replaces=replaces)
        else:
            ready = 0
            if self.computing is not None and replaces and computed:
                ready = self.computing.ready(request_id, computed, groups)
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
    ) -> Ending:
        """The request ended, with its blocks or without; `well`: its prompt was computed. `sampled` is asked where D may want it."""
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
            return Ending(held, self.meetings.told(request_id))
        if collected and well:
            refusal = PdError("PD-META-028", count=self.meetings.counts()["held"])
        return Ending(held, pushed=pushed, refusal=refusal, first=first)

    # -- what D's schedulers say

    def heard(self, now: float, peer: Hashable, message: Meeting, reservation: Reservation | None = None) -> None:
        """`reservation` is what an offer has sealed."""
        if isinstance(message, Gone):
            self.meetings.withdrawn(now, peer, message.transfer)
        elif isinstance(message, Unwanted):
            self.meetings.unwanted(now, message.source, message.meets)
        elif isinstance(message, Offer) and reservation is not None:
            self.meetings.offer(now, peer, message, reservation)
