# SPDX-License-Identifier: Apache-2.0
"""Sources and targets of P's scheduler, and the limits for holding them.

A source is a request that is computed before D has sent a reservation for it. A target is a reservation that comes
before its request. Each is bound to at most one of the other, once; from then on it is a push like any other.

The table at the end defines all transitions. `now` is an argument; the caller holds its own lock, and sends the
messages that `take` returns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm_ascend_pd.errors import LocalProtocolError, PdError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.protocol.failure import MAX_TEXT, Failure
from vllm_ascend_pd.protocol.first import Sample
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.meeting import Bound, Gone, Meeting, Offer, SourceId, Waits
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.states import Cell, IdentityEnum, Table, look_up
from vllm_ascend_pd.protocol.timing import Agenda

MAX_WAITING = 4096  # targets without a source
REMEMBERED = 4096  # bound transfers of requests that have ended


class MeetingState(IdentityEnum):
    OVER = "over"  # or unknown
    WAITING = "waiting"  # a target without a source
    COLLECTING = "collecting"  # a source without a target, of a request that runs
    HELD = "held"  # a source without a target, of a request that has ended
    BOUND = "bound"  # both, and the request runs


class MeetingEvent(IdentityEnum):
    # an OFFER, by the record that it names, and whether it fits
    OFFER = "offer"  # fits the source, or names a request that may still come
    OFFER_AGAIN = "offer_again"  # of the transfer that is waiting or bound here
    OFFER_TAKEN = "offer_taken"  # of another transfer, while one is waiting or bound here
    OFFER_UNFIT = "offer_unfit"  # another prompt, model or cache, or a transfer that was pushed before
    OFFER_UNKNOWN = "offer_unknown"  # of a source that is over, or of another incarnation
    OFFER_TOO_MANY = "offer_too_many"
    # from our own scheduler
    SOURCE = "source"  # a request without a reservation is scheduled; it fits the target, if there is one
    SOURCE_UNFIT = "source_unfit"
    ENDED = "ended"  # the whole prompt is computed
    ENDED_TOO_MANY = "ended_too_many"  # the whole prompt is computed, and no more can be held
    ABORTED = "aborted"
    # from D
    WITHDRAWN = "withdrawn"  # GONE, or the end of D's process
    UNWANTED = "unwanted"  # no offer will come for a source
    # from the engine
    RESET = "reset"  # its caches are cleared: what is held is of no use any more
    # time
    HELD_TOO_LONG = "held_too_long"
    WAITED_TOO_LONG = "waited_too_long"


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """A target: the sender of its OFFER, D's reservation, and the name under which it waits for a request."""

    peer: Hashable
    reservation: Reservation
    meets: str

    @property
    def transfer(self) -> TransferId:
        return self.reservation.transfer


@dataclass(slots=True, eq=False)
class Record:
    """A source, a target, or both."""

    state: MeetingState = MeetingState.OVER
    target: OfferedLoad | None = None
    source: SourceId | None = None
    request_id: str = ""
    push: str = ""
    meets: str = ""
    prompt_length: int = 0
    prompt_hash: str = ""
    blocks: list[list[int]] = field(default_factory=list)  # by group
    computed: int = 0
    sample: Sample | None = None  # the first token, once the request has ended
    until: float | None = None  # when holding or waiting ends
    timed: SourceId | TransferId | None = None  # its key in the agenda

    def __repr__(self) -> str:
        """<Record held, source p-1/3/u of r, 40 of 40 tokens, until 20.0>"""
        words = [self.state.value]
        if self.source:
            done = f"{self.computed} of {self.prompt_length} tokens"
            words.append(f"source {self.source} of {self.request_id}, {done}")
        words += [f"target {self.target.transfer}"] if self.target else []
        words += [f"until {self.until:.1f}"] if self.until is not None else []
        return f"<Record {', '.join(words)}>"

    @property
    def bound_to(self) -> OfferedLoad:
        if self.target is None:
            raise LocalProtocolError(f"{self!r} has no target")
        return self.target

    @property
    def size(self) -> int:
        """Blocks of all groups."""
        return sum(map(len, self.blocks))


@dataclass(frozen=True, slots=True)
class Holding:
    """Limits: how much is held for later targets, how long (`hold_s`), and how long targets wait (`meet_s`)."""

    sources: int = 256
    blocks: int = 1 << 30
    hold_s: float = 120.0
    meet_s: float = 30.0


def not_held(geometry: CacheGeometry) -> str:
    """Return why sources of this cache are not held; empty if they are.

    Draft layers: only steps with a push check that the draft model has run. Windows and states: P frees or overwrites
    what a later target would need.
    """
    if geometry.drafts:
        return "its cache has layers of a draft model"
    return (
        "its cache does not keep every token (sliding windows, or recurrent states)" if geometry.recomputes_last else ""
    )


def failure_of(error: PdError) -> Failure:
    return Failure(error.code, error.sentence[:MAX_TEXT])


class Meetings:
    """Sources and targets of one P scheduler. `book` has the pushes, and decides what fits."""

    table: ClassVar[Table[MeetingState, MeetingEvent]]  # below

    def __init__(self, book: PushBook, incarnation: str, holding: Holding) -> None:
        self._book, self._incarnation, self._holding = book, incarnation, holding
        self.hold_s = holding.hold_s
        self.geometry: CacheGeometry | None = None
        self.counters: Counter[str] = Counter()
        self._n = 0
        self._requests: dict[str, Record] = {}  # with a source here, running or held
        self._sources: dict[SourceId, Record] = {}
        self._names: dict[str, Record] = {}  # by the name under which the two meet
        self._targets: dict[TransferId, Record] = {}  # waiting or bound
        self._ended: dict[TransferId, Bound] = {}  # bound, and the request has ended; oldest first
        self._agenda: Agenda[SourceId | TransferId] = Agenda()
        self._timed: dict[SourceId | TransferId, Record] = {}
        self._held = self._held_blocks = self._waiting = 0
        self._outbox: list[tuple[Hashable, Meeting]] = []

    def take(self) -> list[tuple[Hashable, Meeting]]:
        """Return the messages to send, in order, each once."""
        outbox, self._outbox = self._outbox, []
        return outbox

    # -- from our own scheduler

    def source(
        self, now: float, request_id: str, push: str, meets: str, uuid: str, prompt: tuple[int, str], groups: int
    ) -> SourceId:
        """Add a request that is scheduled without a reservation. If its name is taken, only its source id finds it."""
        self._n += 1
        waiting = self._names.get(meets) if meets else None
        source = SourceId(self._incarnation, self._n, uuid)
        record, event = Record(), MeetingEvent.SOURCE
        if waiting is not None and waiting.target is not None and waiting.state is MeetingState.WAITING:
            error = self._book.refusal_of(waiting.target.reservation, *prompt, self.geometry)
            record, event = waiting, MeetingEvent.SOURCE if error is None else MeetingEvent.SOURCE_UNFIT
            if error is not None:
                self._send(waiting, Gone(waiting.target.transfer, failure_of(error)))
        elif meets and waiting is None:
            record.meets = meets
            self._names[meets] = record
        record.source, record.request_id, record.push = source, request_id, push
        record.prompt_length, record.prompt_hash = prompt
        record.blocks = [[] for _ in range(groups)]
        self._requests[request_id] = self._sources[source] = record
        self._on(now, record, event)
        return source

    def knows(self, request_id: str) -> bool:
        """Return whether the request has a source here, bound or not."""
        return request_id in self._requests

    def collects(self, request_id: str) -> bool:
        record = self._requests.get(request_id)
        return record is not None and record.state is MeetingState.COLLECTING

    def computes(self, request_id: str, computed: int, blocks: Iterable[Sequence[int]], *, replaces: bool) -> None:
        """Record that a step computes a collected request up to `computed`. `blocks` are new; all if `replaces`."""
        record = self._requests[request_id]
        for known, more in zip(record.blocks, blocks, strict=True):
            known[:] = [*([] if replaces else known), *more]
        record.computed = computed

    def preempted(self, request_id: str) -> None:
        """Forget the blocks of a request that lost them, and will resume."""
        if self.collects(request_id):
            record = self._requests[request_id]
            record.computed, record.blocks = 0, [[] for _ in record.blocks]

    def finished(self, now: float, request_id: str, *, well: bool, sample: Sample | None = None) -> bool:
        """Handle the end of a request. Return whether its blocks are held here for a target that may still come.

        `well`: its prompt was computed, and it still has its blocks.
        """
        record = self._requests.get(request_id)
        if record is None:
            return False
        record.sample = sample
        event = MeetingEvent.ABORTED
        if well and (record.state is MeetingState.BOUND or record.computed >= record.prompt_length):
            event = MeetingEvent.ENDED if self._room(record) else MeetingEvent.ENDED_TOO_MANY
        self._on(now, record, event)
        return record.state is MeetingState.HELD

    def limit(self, now: float, hold_s: float) -> None:
        """Hold sources no longer than `hold_s` from now on, those that are held already too."""
        if hold_s != self.hold_s:
            self.hold_s = hold_s
            for record in self._held_records():
                self._set_deadline(record, record.source, min(now + hold_s, record.until or math.inf))

    def reset(self, now: float) -> None:
        """Free all that is held: no D shall fetch it any more."""
        for record in self._held_records():
            self._on(now, record, MeetingEvent.RESET)

    def _held_records(self) -> list[Record]:
        return [record for record in self._requests.values() if record.state is MeetingState.HELD]

    def held_record(self, request_id: str) -> Record | None:
        """Return the record that P's answer names: that of a held request."""
        record = self._requests.get(request_id)
        return record if record is not None and record.state is MeetingState.HELD else None

    def _room(self, record: Record) -> bool:
        if record.state is MeetingState.BOUND:
            return True
        h = self._holding
        return self._held < h.sources and self._held_blocks + record.size <= h.blocks

    # -- from D

    def offer(self, now: float, peer: Hashable, offer: Offer, reservation: Reservation) -> None:
        """Handle an offer. `reservation` is what its sealed field contains."""
        bound = self._ended.get(offer.transfer)
        if bound is not None:
            self._outbox.append((peer, bound))
            return
        target = OfferedLoad(peer, reservation, offer.meets)
        record = self._targets.get(offer.transfer) or self._meant(offer.source, offer.meets)
        if record is None:
            record, event = Record(target=target), MeetingEvent.OFFER
            if offer.source is not None or not offer.meets:
                event = MeetingEvent.OFFER_UNKNOWN
            elif self._waiting >= MAX_WAITING:
                event = MeetingEvent.OFFER_TOO_MANY
        elif record.target is not None:
            again = record.target.transfer == offer.transfer
            event = MeetingEvent.OFFER_AGAIN if again else MeetingEvent.OFFER_TAKEN
        else:
            prompt = record.prompt_length, record.prompt_hash
            error = self._book.refusal_of(reservation, *prompt, self.geometry)
            event = MeetingEvent.OFFER if error is None else MeetingEvent.OFFER_UNFIT
            if error is not None:
                self._outbox.append((peer, Gone(offer.transfer, failure_of(error))))
            else:
                record.target = target
        self._on(now, record, event, target)

    def _meant(self, source: SourceId | None, meets: str) -> Record | None:
        return self._sources.get(source) if source is not None else self._names.get(meets)

    def withdrawn(self, now: float, peer: Hashable, transfer: TransferId) -> None:
        """Record that D does not want a transfer any more."""
        record = self._targets.get(transfer)
        if record is not None and record.target is not None and record.target.peer == peer:
            self._on(now, record, MeetingEvent.WITHDRAWN)

    def unwanted(self, now: float, source: SourceId | None, meets: str) -> None:
        """Record that no offer will come: D has what it needs, or its request has ended."""
        record = self._meant(source, meets)
        if record is not None and record.target is None:
            self._on(now, record, MeetingEvent.UNWANTED)

    def gone(self, now: float, peer: Hashable) -> None:
        """Withdraw the targets of a D scheduler whose process has ended."""
        for record in [r for r in self._targets.values() if r.target is not None and r.target.peer == peer]:
            self._on(now, record, MeetingEvent.WITHDRAWN)

    # -- time

    def tick(self, now: float) -> None:
        for key in self._agenda.due(now):
            record = self._timed.pop(key)
            held = record.state is MeetingState.HELD
            self._on(now, record, MeetingEvent.HELD_TOO_LONG if held else MeetingEvent.WAITED_TOO_LONG)

    def next_wake(self) -> float | None:
        return self._agenda.next()

    # -- counts, for metrics and tests

    def counts(self) -> Mapping[str, int]:
        return {
            "sources": len(self._requests),
            "held": self._held,
            "held_blocks": self._held_blocks,
            "waiting": self._waiting,
            "names": len(self._names),
            "targets": len(self._targets),
        }

    # -- effects

    def _on(self, now: float, record: Record, event: MeetingEvent, *more: Any) -> None:
        cell = look_up(self.table, record.state, event, self.counters, record)
        before, record.state = record.state, cell.into
        self._update_counts(before, record)
        cell.effect(self, now, record, *more)
        if record.state is MeetingState.OVER:
            self._forget(record)

    def _update_counts(self, before: MeetingState, record: Record) -> None:
        s, after = MeetingState, record.state
        if before is not after:
            held = (after is s.HELD) - (before is s.HELD)
            self._held += held
            self._held_blocks += held * record.size
            self._waiting += (after is s.WAITING) - (before is s.WAITING)
            if s.HELD in (before, after) or s.WAITING in (before, after):
                self._set_deadline(record)

    def _set_deadline(self, record: Record, key: SourceId | TransferId | None = None, at: float | None = None) -> None:
        """Set a record's deadline; without a key there is none."""
        if record.timed is not None:
            self._agenda.set(record.timed, None)
            self._timed.pop(record.timed, None)
        record.timed, record.until = key, at
        if key is not None:
            self._agenda.set(key, at)
            self._timed[key] = record

    def _forget(self, record: Record) -> None:
        """Remove a record from all indexes."""
        if self._names.get(record.meets) is record:
            del self._names[record.meets]
        if record.target is not None and self._targets.get(record.target.transfer) is record:
            del self._targets[record.target.transfer]
        if record.source is not None:
            self._sources.pop(record.source, None)
            self._requests.pop(record.request_id, None)

    def _send(self, record: Record, message: Meeting) -> None:
        if record.target is not None:
            self._outbox.append((record.target.peer, message))

    def _bound(self, record: Record) -> Bound:
        return Bound(record.bound_to.transfer, record.push, ended=False)

    def ignore(self, now: float, record: Record, *more: Any) -> None:
        return None

    def collect(self, now: float, record: Record) -> None:
        """Collect the request's blocks from now on, without a target that did not fit."""
        if record.target is not None:
            self._targets.pop(record.target.transfer, None)
            record.target = None

    def wait(self, now: float, record: Record, target: OfferedLoad) -> None:
        record.meets = target.meets
        self._names[target.meets] = self._targets[target.transfer] = record
        self._set_deadline(record, target.transfer, now + self._holding.meet_s)
        self._send(record, Waits(target.transfer))

    def answer(self, now: float, record: Record, target: OfferedLoad) -> None:
        """Repeat the last answer."""
        waits = record.state is MeetingState.WAITING
        self._send(record, Waits(target.transfer) if waits else self._bound(record))

    def bind(self, now: float, record: Record, *more: Any) -> None:
        """Bind a running request: the next step pushes what is computed of it, later steps push the rest."""
        self._attach(record)
        self._send(record, self._bound(record))

    def bind_held(self, now: float, record: Record, target: OfferedLoad) -> None:
        """Bind a request that has ended: the next step pushes all of it, and then its blocks are freed."""
        self._attach(record)
        self.end(now, record)
        self._book.finished(record.request_id, holds_blocks=True, why="its last chunk was never planned")

    def _attach(self, record: Record) -> None:
        target = record.bound_to
        self._targets[target.transfer] = record
        facts = target.reservation, record.push, record.computed, record.blocks, self.geometry
        self._book.attach(record.request_id, *facts)

    def hold(self, now: float, record: Record) -> None:
        self._set_deadline(record, record.source, now + self.hold_s)

    def release(self, now: float, record: Record) -> None:
        """Free the blocks of a held request to which no target was bound."""
        self._book.free(record.request_id)

    def end(self, now: float, record: Record) -> None:
        """Answer that the prompt is computed. From now on D waits for the workers only; it may repeat its offer."""
        first = self._book.first(record.request_id, record.sample)
        bound = Bound(record.bound_to.transfer, record.push, ended=True, first=first)
        self._ended[bound.transfer] = bound
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self._send(record, bound)

    def abort(self, now: float, record: Record) -> None:
        self._refuse_target(record, "PD-XFER-002", why="the request ended on prefill")

    def expired(self, now: float, record: Record) -> None:
        self._refuse_target(record, "PD-META-026", name=record.meets, seconds=f"{self._holding.meet_s:g}")

    def taken(self, now: float, record: Record, target: OfferedLoad) -> None:
        self._refuse(target, "PD-META-027", why="another transfer already uses this source or name")

    def unknown(self, now: float, record: Record, target: OfferedLoad) -> None:
        self._refuse(target, "PD-META-027", why="it is over, or of an engine that was restarted")

    def too_many(self, now: float, record: Record, target: OfferedLoad) -> None:
        self._refuse(target, "PD-META-028", count=MAX_WAITING)

    def _refuse(self, target: OfferedLoad, code: str, **values: object) -> None:
        self._outbox.append((target.peer, Gone(target.transfer, failure_of(PdError(code, **values)))))

    def _refuse_target(self, record: Record, code: str, **values: object) -> None:
        if record.target is not None:
            self._refuse(record.target, code, **values)


def _table(do: type[Meetings]) -> Table[MeetingState, MeetingEvent]:
    s, e = MeetingState, MeetingEvent
    nothing: Callable[..., None] = do.ignore
    return {
        s.OVER: {
            e.SOURCE: Cell(s.COLLECTING, do.collect),
            e.OFFER: Cell(s.WAITING, do.wait),
            e.OFFER_UNKNOWN: Cell(s.OVER, do.unknown, "offer_unknown"),
            e.OFFER_TOO_MANY: Cell(s.OVER, do.too_many, "offer_too_many"),
        },
        s.WAITING: {
            e.SOURCE: Cell(s.BOUND, do.bind),
            e.SOURCE_UNFIT: Cell(s.COLLECTING, do.collect, "offer_unfit"),
            e.OFFER_AGAIN: Cell(s.WAITING, do.answer),
            e.OFFER_TAKEN: Cell(s.WAITING, do.taken, "offer_taken"),
            e.WITHDRAWN: Cell(s.OVER, nothing, "withdrawn"),
            e.WAITED_TOO_LONG: Cell(s.OVER, do.expired, "waited_too_long"),
        },
        s.COLLECTING: {
            e.OFFER: Cell(s.BOUND, do.bind),
            e.OFFER_UNFIT: Cell(s.COLLECTING, nothing, "offer_unfit"),
            e.ENDED: Cell(s.HELD, do.hold),
            e.ENDED_TOO_MANY: Cell(s.OVER, nothing, "not_held"),
            e.ABORTED: Cell(s.OVER, nothing),
            e.UNWANTED: Cell(s.OVER, nothing, "unwanted"),
        },
        s.HELD: {
            e.OFFER: Cell(s.OVER, do.bind_held),
            e.OFFER_UNFIT: Cell(s.HELD, nothing, "offer_unfit"),
            e.HELD_TOO_LONG: Cell(s.OVER, do.release, "held_too_long"),
            e.UNWANTED: Cell(s.OVER, do.release, "unwanted"),
            e.RESET: Cell(s.OVER, do.release, "reset"),
        },
        s.BOUND: {
            e.OFFER_AGAIN: Cell(s.BOUND, do.answer),
            e.OFFER_TAKEN: Cell(s.BOUND, do.taken, "offer_taken"),
            e.ENDED: Cell(s.OVER, do.end),
            e.ABORTED: Cell(s.OVER, do.abort),
            e.WITHDRAWN: Cell(s.BOUND, nothing, "withdrawn"),
        },
    }


Meetings.table = _table(Meetings)
