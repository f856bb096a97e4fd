# SPDX-License-Identifier: Apache-2.0
"""Effects of the events of P's requests: on their records, on messages for D, on workers. The table is last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group
from vllm_ascend_pd.metadata import Blocks, PushAbort, PushSlice, PushStart
from vllm_ascend_pd.prefill.scheduler.core.first_tokens import first_token
from vllm_ascend_pd.prefill.scheduler.core.orders import StepOrders
from vllm_ascend_pd.prefill.scheduler.core.request import Holding, PushRequest, PushTarget, RequestEvent, RequestState
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstToken
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.meeting import Bound, Gone, Meeting, SourceId, Waits
from vllm_ascend_pd.protocol.states import Cell, Table, idle, look_up
from vllm_ascend_pd.protocol.timing import Agenda

GroupTables: TypeAlias = Sequence[Sequence[int]]  # block tables, by group

MAX_WAITING = 4096  # targets without a source
REMEMBERED = 4096  # bound transfers of requests that have ended


class RequestRules:
    """Records of P's requests, and what events do to them."""

    table: ClassVar[Table[RequestState, RequestEvent]]  # below

    def __init__(
        self,
        incarnation: str = "",
        holding: Holding = Holding(),  # noqa: B008 -- it is frozen
        *,
        model: str,
        geometry: CacheGeometry | None = None,
        remembered: int = 65536,
    ) -> None:
        """`geometry` is that of this engine's cache, once its workers have reported it."""
        self._incarnation, self._holding, self.hold_s = incarnation, holding, holding.hold_s
        self.model, self.geometry = model, geometry
        self.counters: Counter[str] = Counter()
        self._n = 0
        self._requests: dict[str, PushRequest] = {}
        self._sources: dict[SourceId, PushRequest] = {}
        self._names: dict[str, PushRequest] = {}  # by the name under which the two meet
        self._targets: dict[TransferId, PushRequest] = {}  # offered; waiting or bound
        self._answers: dict[TransferId, Bound] = {}  # to offers whose request has ended; oldest first
        self._seen: dict[TransferId, None] = {}  # oldest first, bounded
        self._remembered = remembered
        self._agenda: Agenda[PushRequest] = Agenda()
        self._held_sources = self._held_blocks = self._waiting = 0
        self._outbox: list[tuple[Hashable, Meeting]] = []
        self._orders = StepOrders()
        self._number = self._looks = 0

    @property
    def _groups(self) -> tuple[Group, ...]:
        return self.geometry.tables if self.geometry is not None else ()

    def _on(self, record: PushRequest, event: RequestEvent, *cause: Any) -> None:
        cell, s = look_up(self.table, record.state, event, self.counters, record), RequestState
        before, record.state = record.state, cell.into
        self._count(before, record)
        cell.effect(self, record, *cause)
        if record.state in (s.LOCAL, s.RELEASING, s.OVER):
            self._unlist(record)
        if record.state is s.RELEASING:
            record.tables = []
        if record.state is s.OVER and self._requests.get(record.request_id) is record:
            del self._requests[record.request_id]
            if record.successor is not None:
                self._requests[record.request_id] = record.successor

    def _count(self, before: RequestState, record: PushRequest) -> None:
        s, after = RequestState, record.state
        if before is not after:
            change = (after is s.HELD) - (before is s.HELD)
            self._held_sources += change
            self._held_blocks += change * record.size
            self._waiting += (after is s.WAITING) - (before is s.WAITING)
            if record.until is not None:
                self._set_deadline(record, None)

    def _set_deadline(self, record: PushRequest, at: float | None) -> None:
        record.until = at
        self._agenda.set(record, at)

    def _unlist(self, record: PushRequest) -> None:
        """Remove a record from all indexes by which D finds it."""
        if self._names.get(record.meets) is record:
            del self._names[record.meets]
        if record.target is not None and self._targets.get(record.target.transfer) is record:
            del self._targets[record.target.transfer]
        if record.source is not None:
            self._sources.pop(record.source, None)

    def ignore(self, record: PushRequest, *cause: Any) -> None:
        """Change nothing else."""

    # -- effects: targets

    def wait(self, record: PushRequest, now: float, target: PushTarget) -> None:
        record.meets = target.meets
        self._names[target.meets] = self._targets[target.transfer] = record
        self._set_deadline(record, now + self._holding.meet_s)
        self._send(target, Waits(target.transfer))

    def collect(self, record: PushRequest) -> None:
        """Collect the request's blocks from now on, without a target that did not fit."""
        if record.target is not None:
            self._targets.pop(record.target.transfer, None)
            record.target = None

    def bind(self, record: PushRequest, *cause: Any) -> None:
        """Bind a running request: the next step pushes what is computed of it, later steps push the rest."""
        target = record.bound_to
        self._see(target)
        if target.peer is not None:
            self._targets[target.transfer] = record
            self._send(target, self._bound(record))

    def bind_held(self, record: PushRequest, now: float, target: PushTarget) -> None:
        """Bind a request that has ended: the next step pushes all of it, and then its blocks are freed."""
        self._see(target)
        self.push_past(record)
        self.end(record, now, "")

    def answer(self, record: PushRequest, now: float, target: PushTarget) -> None:
        """Repeat the last answer."""
        waits = record.state is RequestState.WAITING
        self._send(target, Waits(target.transfer) if waits else self._bound(record))

    def taken(self, record: PushRequest, now: float, target: PushTarget) -> None:
        self._refuse(target, "PD-META-027", why="another transfer already uses this source or name")

    def unknown(self, record: PushRequest, now: float, target: PushTarget) -> None:
        self._refuse(target, "PD-META-027", why="it is over, or of an engine that was restarted")

    def too_many(self, record: PushRequest, now: float, target: PushTarget) -> None:
        self._refuse(target, "PD-META-028", count=MAX_WAITING)

    def expired(self, record: PushRequest) -> None:
        self._refuse(record.bound_to, "PD-META-026", name=record.meets, seconds=f"{self._holding.meet_s:g}")

    def _see(self, target: PushTarget) -> None:
        self._seen[target.transfer] = None
        while len(self._seen) > self._remembered:
            del self._seen[next(iter(self._seen))]

    def _send(self, target: PushTarget, message: Meeting) -> None:
        if target.peer is not None:
            self._outbox.append((target.peer, message))

    def _refuse(self, target: PushTarget, code: str, **values: object) -> None:
        self._send(target, Gone(target.transfer, Failure.of(PdError(code, **values))))

    def _bound(self, record: PushRequest) -> Bound:
        return Bound(record.bound_to.transfer, record.push, ended=False)

    # -- effects: pushes

    def push_past(self, record: PushRequest) -> None:
        """Push what was computed before D's reservation came."""
        reservation = record.bound_to.reservation
        after, tables = min(record.computed, reservation.end), tuple(map(_ids, record.tables))
        final = record.computed >= reservation.end
        self._orders.starts.append(PushStart(record.request_id, record.push, reservation))
        self._orders.computed.append(PushSlice(record.push, 0, after, tables, restart=False, final=final))

    def begin(self, record: PushRequest, computed: int, count: int, blocks: GroupTables, ready: int) -> None:
        """Begin a push. What earlier steps have computed is pushed at once, if D wants any of it."""
        reservation, groups = record.bound_to.reservation, self._groups
        self._orders.starts.append(PushStart(record.request_id, record.push, reservation, computed))
        if reservation.first < ready < reservation.end:
            record.computed = ready
            tables = self._unreported(record, blocks)
            self._orders.computed.append(PushSlice(record.push, 0, ready, tables, restart=False, final=False))
            stateful = [group.stateful for group in groups] or [False]
            blocks = tuple(ids if moves else () for moves, ids in zip(stateful, blocks, strict=True))
        self._slice(record, computed + count, blocks, restart=False)

    def go_on(self, record: PushRequest, computed: int, count: int, blocks: GroupTables, *more: Any) -> None:
        self._slice(record, computed + count, blocks, restart=False)

    def start_over(self, record: PushRequest, computed: int, count: int, blocks: GroupTables, *more: Any) -> None:
        self._slice(record, computed + count, blocks, restart=True)

    def _slice(self, record: PushRequest, upto: int, blocks: GroupTables, *, restart: bool) -> None:
        before, record.computed = record.computed, upto
        after, final = min(upto, record.bound_to.reservation.end), record.state is RequestState.SEALED
        new = self._unreported(record, blocks)
        self._orders.slices.append(PushSlice(record.push, before, after, new, restart, final))

    def forget_past(self, record: PushRequest) -> None:
        record.computed, record.tables = 0, []

    def forget_push(self, record: PushRequest) -> None:
        record.computed = 0

    def drain(self, record: PushRequest) -> None:
        self._orders.preempted.append(record.push)
        record.computed = 0

    def fail(self, record: PushRequest) -> None:
        self.drain(record)
        self._abort_push(record, "the request was preempted after its last chunk")

    def hold(self, record: PushRequest, now: float, *cause: Any) -> None:
        self._set_deadline(record, now + self.hold_s)

    def release(self, record: PushRequest) -> None:
        """Free blocks that were held and are not pushed: the workers report the request like any other."""
        self._orders.freed.append(record.request_id)

    def end(self, record: PushRequest, now: float, why: str) -> None:
        """Answer that the prompt is computed. From now on D waits for the workers only; it may repeat its offer."""
        target = record.bound_to
        if target.peer is not None:
            first = self.first_of(record)
            bound = self._answers[target.transfer] = Bound(target.transfer, record.push, ended=True, first=first)
            while len(self._answers) > REMEMBERED:
                del self._answers[next(iter(self._answers))]
            self._send(target, bound)
        self._orders.end(record.push)

    def first_of(self, record: PushRequest) -> FirstToken | None:
        """Return P's first token for D, if this engine sends any."""
        sample = record.sample
        return first_token(record.bound_to.reservation, record.push, sample) if sample is not None else None

    def end_early(self, record: PushRequest, now: float, why: str) -> None:
        """The same of a push whose last chunk was never planned."""
        self.end(record, now, why)
        self._abort_push(record, why)

    def abort(self, record: PushRequest, *cause: Any) -> None:
        self._refuse(record.bound_to, "PD-XFER-002", why="the request ended on prefill")
        self._orders.end(record.push)

    def abort_push(self, record: PushRequest, now: float, why: str) -> None:
        self.abort(record)
        self._abort_push(record, why)

    def drop_push(self, record: PushRequest, now: float, why: str) -> None:
        """Abort a push of which there are no blocks to wait for."""
        self.abort_push(record, now, why)
        self._orders.ended.append(record.push)

    def drop(self, record: PushRequest, *cause: Any) -> None:
        """The same of a push that has failed."""
        self.abort(record)
        self._orders.ended.append(record.push)

    def close(self, record: PushRequest) -> None:
        """Tell the workers that nothing more is exchanged for a request that was pushed."""
        if record.target is not None:
            self._orders.ended.append(record.push)

    def _abort_push(self, record: PushRequest, why: str) -> None:
        self._orders.aborts.append(PushAbort(record.push, Failure("PD-XFER-002", why)))

    def _unreported(self, record: PushRequest, blocks: GroupTables) -> tuple[Blocks, ...]:
        """Return the blocks of each group as the workers receive them.

        In a group of states this is only the block of D's last token, once a step ends exactly there. If a step
        computes more, no block has the state that D wants: none is sent, and the push fails.
        """
        end, groups = record.bound_to.reservation.end, self._groups or (None,) * len(blocks)
        unreported = []
        for ids, group in zip(blocks, groups, strict=True):
            if group is not None and group.stateful:
                at = (end - 1) // group.block_size
                unreported.append(_ids(ids[at : at + 1] if record.computed == end else ()))
            else:
                unreported.append(_ids(ids))
        return tuple(unreported)


def _ids(table: Sequence[int]) -> Blocks:
    return np.asarray(table, dtype=np.int32)


def _table(do: type[RequestRules]) -> Table[RequestState, RequestEvent]:
    s, e = RequestState, RequestEvent

    def bound(state: RequestState) -> dict[RequestEvent, Cell[RequestState]]:
        return {
            e.OFFER_AGAIN: Cell(state, do.answer),
            e.OFFER_TAKEN: Cell(state, do.taken, "offer_taken"),
            e.WITHDRAWN: Cell(state, do.ignore, "withdrawn"),
        }

    cut = {  # the ends of a push whose last chunk is not planned
        e.ENDED: Cell(s.RELEASING, do.end_early),
        e.ABORTED: Cell(s.RELEASING, do.abort_push),
        e.ENDED_EMPTY: Cell(s.OVER, do.drop_push),
    }
    ends = {event: Cell(s.OVER, do.ignore) for event in (e.ENDED, e.ENDED_TOO_MANY, e.ABORTED, e.ENDED_EMPTY)}
    return {
        s.OVER: {
            e.OFFER: Cell(s.WAITING, do.wait),
            e.OFFER_UNKNOWN: Cell(s.OVER, do.unknown, "offer_unknown"),
            e.OFFER_TOO_MANY: Cell(s.OVER, do.too_many, "offer_too_many"),
        },
        s.WAITING: {
            e.SOURCE: Cell(s.BOUND, do.bind),
            e.SOURCE_UNFIT: Cell(s.COLLECTING, do.collect, "offer_unfit"),
            e.OFFER_AGAIN: Cell(s.WAITING, do.answer),
            e.OFFER_TAKEN: Cell(s.WAITING, do.taken, "offer_taken"),
            e.WITHDRAWN: Cell(s.OVER, do.ignore, "withdrawn"),
            e.WAITED_TOO_LONG: Cell(s.OVER, do.expired, "waited_too_long"),
        },
        s.ARRIVED: {
            e.RESERVED: Cell(s.BOUND, do.bind),
            e.SOURCE: Cell(s.COLLECTING, do.collect),
            e.LOCAL: Cell(s.LOCAL, do.ignore),
            **ends,
            **idle(s.ARRIVED, do.ignore, e.PREEMPTED),
        },
        s.LOCAL: {**ends, **idle(s.LOCAL, do.ignore, e.PREEMPTED)},
        s.COLLECTING: {
            e.OFFER: Cell(s.BOUND, do.bind),
            e.OFFER_UNFIT: Cell(s.COLLECTING, do.ignore, "offer_unfit"),
            e.PREEMPTED: Cell(s.COLLECTING, do.forget_past),
            **ends,
            e.ENDED: Cell(s.HELD, do.hold),
            e.ENDED_TOO_MANY: Cell(s.OVER, do.ignore, "not_held"),
            e.UNWANTED: Cell(s.LOCAL, do.ignore, "unwanted"),
        },
        s.HELD: {
            e.OFFER: Cell(s.RELEASING, do.bind_held),
            e.OFFER_UNFIT: Cell(s.HELD, do.ignore, "offer_unfit"),
            e.HELD_TOO_LONG: Cell(s.RELEASING, do.release, "held_too_long"),
            e.UNWANTED: Cell(s.RELEASING, do.release, "unwanted"),
            e.RESET: Cell(s.RELEASING, do.release, "reset"),
            **idle(s.HELD, do.ignore, e.PREEMPTED),
        },
        s.BOUND: {
            e.CHUNK: Cell(s.PUSHING, do.begin),
            e.LAST_CHUNK: Cell(s.SEALED, do.begin),
            e.PAST: Cell(s.PUSHING, do.push_past),
            e.PAST_WHOLE: Cell(s.SEALED, do.push_past),
            **bound(s.BOUND),
            e.ENDED: Cell(s.OVER, do.end),
            e.ABORTED: Cell(s.OVER, do.abort),
            e.ENDED_EMPTY: Cell(s.OVER, do.abort),
            **idle(s.BOUND, do.ignore, e.PREEMPTED),
        },
        s.PUSHING: {
            e.CHUNK: Cell(s.PUSHING, do.go_on),
            e.LAST_CHUNK: Cell(s.SEALED, do.go_on),
            e.UNSENT: Cell(s.BOUND, do.forget_push),
            e.PREEMPTED: Cell(s.LOST, do.drain),
            **bound(s.PUSHING),
            **cut,
        },
        s.LOST: {
            e.CHUNK: Cell(s.PUSHING, do.start_over),
            e.LAST_CHUNK: Cell(s.SEALED, do.start_over),
            e.PREEMPTED: Cell(s.LOST, do.drain),
            **bound(s.LOST),
            **cut,
        },
        s.SEALED: {
            e.UNSENT: Cell(s.BOUND, do.forget_push),
            e.PREEMPTED: Cell(s.FAILED, do.fail),
            **bound(s.SEALED),
            **cut,
            e.ENDED: Cell(s.RELEASING, do.end),
            e.ABORTED: Cell(s.RELEASING, do.abort),
        },
        s.FAILED: {
            **bound(s.FAILED),
            e.ENDED: Cell(s.RELEASING, do.end),
            e.ABORTED: Cell(s.RELEASING, do.abort),
            e.ENDED_EMPTY: Cell(s.OVER, do.drop),
            **idle(s.FAILED, do.ignore, e.PREEMPTED),
        },
        s.RELEASING: {e.REPORTED: Cell(s.OVER, do.close), **idle(s.RELEASING, do.ignore, e.PREEMPTED)},
    }


RequestRules.table = _table(RequestRules)
