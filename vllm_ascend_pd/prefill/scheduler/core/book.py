# SPDX-License-Identifier: Apache-2.0
"""P's requests: one record of each, from its arrival, or D's offer before it, until its blocks are free.

D's reservation comes with the request (D first), or as an offer before or after it. Each is bound to at most one of the
other, once; from then on all are pushed alike.

Which event comes is decided here, and what it does in rules.py. Pure: `now` is an argument; the adapter in ../role.py
and the simulator translate their engine's objects, hold a lock, and send the messages that `take_messages` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.metadata import MissedExchange, PrefillStep, PushSlice
from vllm_ascend_pd.prefill.scheduler.core.fitting import not_held, refusal_of
from vllm_ascend_pd.prefill.scheduler.core.in_flight import BlocksInFlight, Chunk
from vllm_ascend_pd.prefill.scheduler.core.orders import FORCED_STEPS, StepOrders
from vllm_ascend_pd.prefill.scheduler.core.request import (
    NewRequest,
    PushRequest,
    PushTarget,
    RequestEnding,
    RequestEvent,
    RequestState,
)
from vllm_ascend_pd.prefill.scheduler.core.rules import MAX_WAITING, GroupTables, RequestRules
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import Sample
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.meeting import Gone, Meeting, Offer, SourceId, Unwanted
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.protocol.versions import WHOLE

ENDED = (RequestState.OVER, RequestState.HELD, RequestState.RELEASING)


class PushBook(RequestRules):
    """P's requests. A transfer is pushed once, even if it is asked for again."""

    in_flight: ClassVar[type[BlocksInFlight]] = BlocksInFlight

    def find(self, request_id: str) -> PushRequest | None:
        return self._requests.get(request_id)

    def take_messages(self) -> list[tuple[Hashable, Meeting]]:
        """Return the messages to send, in order, each once."""
        outbox, self._outbox = self._outbox, []
        return outbox

    # -- requests

    def note_cached(self, request_id: str, computed: int) -> None:
        """Record how much of a request that may be scheduled is in the prefix cache."""
        self._running(request_id).cached = computed

    def knows(self, request_id: str) -> bool:
        """Return whether the request was taken or refused: vLLM announces it again when it resumes."""
        record = self._requests.get(request_id)
        return record is not None and record.state is not RequestState.ARRIVED

    def take(self, now: float, asked: NewRequest) -> PdError | None:
        """Take a request, once. A refusal is returned, and the request is prefilled all the same."""
        if asked.reservation is not None:
            refusal = self._unlike(asked) or self.refusal_of(asked.reservation, asked.prompt)
            if refusal is not None:
                return self.refuse(asked.request_id, refusal)
            record = self._arrived(asked.request_id)
            record.push, record.prompt, record.target = asked.push, asked.prompt, PushTarget(asked.reservation)
            self._on(record, RequestEvent.RESERVED)
            return None
        why = not_held(self.geometry) if self.geometry is not None else "no worker has reported its cache"
        if why:
            return self.refuse(asked.request_id, PdError("PD-META-031", why=why))
        self._take_source(asked)
        return None

    def refuse(self, request_id: str, why: PdError) -> PdError:
        """Record that a request is prefilled but not pushed, and return why."""
        record = self._arrived(request_id)
        record.refusal = why
        self._on(record, RequestEvent.LOCAL)
        return why

    def refusal_of(self, reservation: Reservation, prompt: tuple[int, str]) -> PdError | None:
        """Return why a prompt cannot be pushed for a reservation; None if it can."""
        return refusal_of(reservation, prompt, self.model, self.geometry, self._seen)

    def tracks(self, request_id: str) -> bool:
        """Return whether the request runs for a D."""
        record = self._requests.get(request_id)
        return record is not None and record.target is not None and record.state not in ENDED

    def ends(self, request_id: str) -> bool:
        """Return whether nothing may be computed behind the prompt: a state would be overwritten in place."""
        return self.geometry is not None and self.geometry.recomputes_last and self.tracks(request_id)

    def cuts(self, request_id: str) -> bool:
        """Return whether the prompt's last token is not computed here.

        D computes that token and needs the cache as it was before it, unless D begins with this engine's first token.
        """
        return self.ends(request_id) and WHOLE not in self._requests[request_id].bound_to.reservation.needs

    def step(self, chunks: Sequence[Chunk], tables: Callable[[str], GroupTables]) -> None:
        """Handle the chunks that a step computes.

        In groups of states, entries move within the block table; `tables` returns the tables as they are now.
        """
        planned = [self._planned(chunk) for chunk in chunks]
        self.flight = self.in_flight([(chunk, record.tables) for chunk, record in planned])
        for chunk, record in planned:
            if record.target is not None:
                self._push(record, chunk, tables)
            elif record.state is RequestState.COLLECTING:
                record.computed = chunk.computed + chunk.count

    def _planned(self, chunk: Chunk) -> tuple[Chunk, PushRequest]:
        record = self._running(chunk.request_id)
        if record.state is RequestState.ARRIVED:
            self._on(record, RequestEvent.LOCAL)
        if record.cached is not None:
            chunk, record.cached = replace(chunk, cached=record.cached), None
        if chunk.replaces or not record.tables:
            record.tables = [list(ids) for ids in chunk.new or ()]
        else:
            for ids, more in zip(record.tables, chunk.new or (), strict=False):
                ids.extend(more)
        return chunk, record

    def _push(self, record: PushRequest, chunk: Chunk, tables: Callable[[str], GroupTables]) -> None:
        groups = self._groups
        blocks = chunk.new or ((),) * max(1, len(groups))
        if any(group.stateful for group in groups):
            exact = zip(groups, tables(chunk.request_id), blocks, strict=True)
            blocks = [table if group.stateful else ids for group, table, ids in exact]
        ready = self.flight.ready(chunk, record.tables, groups) if chunk.replaces and chunk.computed else 0
        self.scheduled(chunk.request_id, chunk.computed, chunk.count, *blocks, replaces=chunk.replaces, ready=ready)

    def scheduled(
        self, request_id: str, computed: int, count: int, *blocks: Sequence[int], replaces: bool, ready: int = 0
    ) -> PushSlice | None:
        """Record that a step computes tokens [computed, computed + count) of a request that runs for a D.

        `blocks` of each group are new, or all if `replaces`. In a group of states they are always all, because entries
        move. The request's first `ready` tokens are in the cache already: all their layers are pushed at once.
        """
        record, s = self._requests.get(request_id), RequestState
        if record is not None and replaces and record.state is not s.LOST:
            self.preempted(request_id)  # no step has listed it, and resets.py has not reported it
        if record is None or record.state not in (s.BOUND, s.PUSHING, s.LOST):
            return None
        last = computed + count >= record.bound_to.reservation.end
        event = RequestEvent.LAST_CHUNK if last else RequestEvent.CHUNK
        self._on(record, event, computed, count, blocks, min(ready, computed))
        return self._orders.slices[-1]

    def preempted(self, request_id: str) -> None:
        """Have the writes that read a preempted request's blocks drained before the blocks are overwritten.

        The push starts over when the request resumes, but fails if its last chunk is out already: some ranks may have
        finished with it for good. What a rank owns differs by step, so the others would push something else than what
        they still owe.
        """
        if (record := self._requests.get(request_id)) is not None and record.state not in ENDED:
            self._withdraw(record)
            self._on(record, RequestEvent.PREEMPTED)

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
        record, s = self._requests.get(request_id), RequestState
        if record is None or record.state in ENDED:
            if record is not None:
                record.successor = None
            return RequestEnding()
        collected, sealed = record.state is s.COLLECTING, record.state is s.SEALED
        target, refusal = record.target, record.refusal
        if collected or (sealed and record.bound_to.reservation.seed is not None):
            record.sample = sampled()
        first = self.first_of(record) if target is not None else None
        if not (sealed and holds_blocks):
            self._withdraw(record)  # of a push that no worker has received D learns by the answer, or a message
        if collected and holds_blocks and well:
            refusal = PdError("PD-META-028", count=self._held_sources)
        self._on(record, self._end_event(record, holds_blocks=holds_blocks, well=well), now, why)
        if record.state is s.HELD:
            return RequestEnding(blocks_held=True, source=record)
        answered = first if target is not None and target.peer is None else None
        return RequestEnding(record.state is s.RELEASING, None, target is not None, refusal, answered)

    def _end_event(self, record: PushRequest, *, holds_blocks: bool, well: bool) -> RequestEvent:
        if not holds_blocks:
            return RequestEvent.ENDED_EMPTY
        if not well or (record.state is RequestState.COLLECTING and record.computed < record.prompt[0]):
            return RequestEvent.ABORTED
        h = self._holding
        room = self._held_sources < h.sources and self._held_blocks + record.size <= h.blocks
        return RequestEvent.ENDED if room or record.target is not None else RequestEvent.ENDED_TOO_MANY

    def released(self, request_id: str) -> bool:
        """Record that all workers have reported the request. Return whether its blocks were held."""
        if (record := self._requests.get(request_id)) is None or record.state is not RequestState.RELEASING:
            return False
        self._on(record, RequestEvent.REPORTED)
        return True

    def limit(self, now: float, hold_s: float) -> None:
        """Hold sources no longer than `hold_s` from now on, those that are held already too."""
        if hold_s != self.hold_s:
            self.hold_s = hold_s
            for record in self._held_requests():
                self._set_deadline(record, min(now + hold_s, record.until or math.inf))

    def reset(self) -> None:
        """Free all that is held: no D shall fetch it any more."""
        for record in self._held_requests():
            self._on(record, RequestEvent.RESET)

    def _held_requests(self) -> list[PushRequest]:
        return [record for record in self._requests.values() if record.state is RequestState.HELD]

    def _arrived(self, request_id: str) -> PushRequest:
        if (record := self._requests.get(request_id)) is None:
            record = self._requests[request_id] = PushRequest(request_id, RequestState.ARRIVED)
        return record

    def _running(self, request_id: str) -> PushRequest:
        record = self._arrived(request_id)
        if record.state in ENDED:
            record.successor = record.successor or PushRequest(request_id, RequestState.LOCAL)
            return record.successor
        return record

    def _unlike(self, asked: NewRequest) -> PdError | None:
        """Return why a D that can begin only with P's first token cannot have it; None if it can, or need not."""
        if asked.reservation is None or WHOLE not in asked.reservation.needs or asked.seed == asked.reservation.seed:
            return None
        return PdError("PD-META-033", why="none of this request's" if asked.seed is None else "other sampling")

    def _take_source(self, asked: NewRequest) -> None:
        """Take a request without a reservation. If its name is taken, only its source id finds it."""
        self._n += 1
        record, event = self._arrived(asked.request_id), RequestEvent.SOURCE
        waiting = self._names.get(asked.meets) if asked.meets else None
        if waiting is not None and waiting.state is RequestState.WAITING:
            target = waiting.bound_to
            error = self.refusal_of(target.reservation, asked.prompt)
            waiting.request_id, waiting.cached, record = asked.request_id, record.cached, waiting
            if error is not None:
                event = RequestEvent.SOURCE_UNFIT
                self._send(target, Gone(target.transfer, Failure.of(error)))
        elif asked.meets and waiting is None:
            record.meets = asked.meets
            self._names[asked.meets] = record
        record.source = SourceId(self._incarnation, self._n, asked.uuid)
        record.push, record.prompt = asked.push, asked.prompt
        self._requests[asked.request_id] = self._sources[record.source] = record
        self._on(record, event)

    def _withdraw(self, record: PushRequest) -> None:
        """Take back what no step has sent of a push: it was never begun."""
        if self._orders.begins(record.push):
            self._orders.withdraw(record.push)
            self._on(record, RequestEvent.UNSENT)

    # -- from D

    def message(self, now: float, peer: Hashable, message: Meeting, reservation: Reservation | None = None) -> None:
        """Handle a message of D. `reservation` is what an offer has sealed."""
        if isinstance(message, Gone):
            self.withdrawn(peer, message.transfer)
        elif isinstance(message, Unwanted):
            self.unwanted(message.source, message.meets)
        elif isinstance(message, Offer) and reservation is not None:
            self.offer(now, peer, message, reservation)

    def offer(self, now: float, peer: Hashable, offer: Offer, reservation: Reservation) -> None:
        """Handle an offer. `reservation` is what its sealed field contains."""
        bound = self._answers.get(offer.transfer)
        if bound is not None:
            self._outbox.append((peer, bound))
            return
        target = PushTarget(reservation, peer, offer.meets)
        record = self._targets.get(offer.transfer) or self._meant(offer.source, offer.meets)
        if record is None:
            record, event = PushRequest(target=target), RequestEvent.OFFER
            if offer.source is not None or not offer.meets:
                event = RequestEvent.OFFER_UNKNOWN
            elif self._waiting >= MAX_WAITING:
                event = RequestEvent.OFFER_TOO_MANY
        elif record.target is not None:
            repeated = record.target.transfer == offer.transfer
            event = RequestEvent.OFFER_AGAIN if repeated else RequestEvent.OFFER_TAKEN
        else:
            error = self.refusal_of(reservation, record.prompt)
            event = RequestEvent.OFFER if error is None else RequestEvent.OFFER_UNFIT
            if error is not None:
                self._send(target, Gone(offer.transfer, Failure.of(error)))
            else:
                record.target = target
        self._on(record, event, now, target)
        if record.state is RequestState.BOUND and record.computed:
            whole = record.computed >= reservation.end
            self._on(record, RequestEvent.PAST_WHOLE if whole else RequestEvent.PAST)

    def _meant(self, source: SourceId | None, meets: str) -> PushRequest | None:
        return self._sources.get(source) if source is not None else self._names.get(meets)

    def withdrawn(self, peer: Hashable, transfer: TransferId) -> None:
        """Record that D does not want a transfer any more."""
        if (record := self._targets.get(transfer)) is not None and record.bound_to.peer == peer:
            self._on(record, RequestEvent.WITHDRAWN)

    def unwanted(self, source: SourceId | None, meets: str) -> None:
        """Record that no offer will come: D has what it needs, or its request has ended."""
        if (record := self._meant(source, meets)) is not None and record.target is None:
            self._on(record, RequestEvent.UNWANTED)

    def gone(self, peer: Hashable) -> None:
        """Withdraw the targets of a D scheduler whose process has ended."""
        for record in [record for record in self._targets.values() if record.bound_to.peer == peer]:
            self._on(record, RequestEvent.WITHDRAWN)

    # -- time

    def tick(self, now: float) -> None:
        for record in self._agenda.due(now):
            is_held = record.state is RequestState.HELD
            self._on(record, RequestEvent.HELD_TOO_LONG if is_held else RequestEvent.WAITED_TOO_LONG)

    def next_wake(self) -> float | None:
        return self._agenda.next()

    # -- what a step tells the workers, and counts

    def missed(self, exchanges: Iterable[MissedExchange]) -> None:
        """Order exchanges again that workers could not stage and have room for now, on every rank in the next step."""
        self._orders.catch_ups.update(exchanges)

    def must_step(self) -> bool:
        """Return whether the workers wait for a step's metadata, or will soon have more to ask for."""
        return self._orders.urgent or self._looks > 0

    def take_step(self) -> PrefillStep:
        """Return this step's metadata; the next call starts anew."""
        orders, self._orders = self._orders, StepOrders()
        self._number += 1 + bool(orders.computed)
        self._looks = FORCED_STEPS if orders.catch_ups else max(0, self._looks - 1)
        return orders.step(self._number, self.geometry)

    def open_count(self) -> int:
        """Return the number of requests that are known, whether they are pushed or not."""
        return len(self._requests)

    def counts(self) -> Mapping[str, int]:
        return {
            "sources": len(self._sources),
            "held": self._held_sources,
            "held_blocks": self._held_blocks,
            "waiting": self._waiting,
            "names": len(self._names),
            "targets": len(self._targets),
        }
