# SPDX-License-Identifier: Apache-2.0
"""D's requests: one record of each, from its arrival until the request and its load are over.

A load ends when all workers have reported it. A D whose requests may begin with tokens that it did not compute has the
book of first_tokens.py.

The table at the end defines all transitions. Pure: `now` is an argument; the adapter in ../role.py and the simulator
translate their engine's objects, and act on what `take_effects` returns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from vllm_ascend_pd.decode.scheduler.core.load import LoadEffect, LoadEvent, LoadState, RemoteLoad, Start
from vllm_ascend_pd.decode.scheduler.core.routes import KvRoute
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group, in_kernel_blocks
from vllm_ascend_pd.metadata import Bind, DecodeStep, LoadCancel, LoadEnd
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.states import Cell, Table, idle, look_up

AWAITED = (LoadState.LOADING, LoadState.LANDING, LoadState.FENCING)  # loads that requests wait for
OPEN = (*AWAITED, LoadState.ABANDONED)
WITHHELD = (LoadState.HELD, LoadState.FAILED, LoadState.DROPPED)  # over, and vLLM learns of it only by `take`


@dataclass(slots=True)
class _PendingLoads:
    binds: list[Bind] = field(default_factory=list)
    cancels: list[LoadCancel] = field(default_factory=list)
    settles: list[TransferId] = field(default_factory=list)
    overs: list[TransferId] = field(default_factory=list)


class LoadBook:
    """D's requests. Each loads once."""

    table: ClassVar[Table[LoadState, LoadEvent]]  # below

    def __init__(self, incarnation: str, *, fails: bool = False) -> None:
        """`fails`: this vLLM does not take failed loads by request, so they are withheld until its read of a step."""
        self._incarnation, self._fails = incarnation, fails
        self._n = 0
        self._loads: dict[str, RemoteLoad] = {}
        self._in: dict[LoadState, dict[str, RemoteLoad]] = {state: {} for state in LoadState}  # the same by state
        self._by_transfer: dict[TransferId, RemoteLoad] = {}
        self._pending = _PendingLoads()
        self._effects: list[tuple[LoadEffect, RemoteLoad]] = []

    def take_effects(self) -> list[tuple[LoadEffect, RemoteLoad]]:
        """Return the effects, in order, each once."""
        effects, self._effects = self._effects, []
        return effects

    def find(self, request_id: str) -> RemoteLoad | None:
        return self._loads.get(request_id)

    # -- requests

    def route(self, request_id: str, read: Callable[[], KvRoute | None], request: Any = None) -> KvRoute | None:
        """Return who brings a request's KV, which is `read` once; None: it is prefilled here."""
        load = self._loads.get(request_id)
        if load is None:
            load = self._loads[request_id] = RemoteLoad(request_id, read(), request)
            self._move(load, LoadState.LOCAL if load.route is None else LoadState.ARRIVED)
        return load.route

    def wanted(
        self,
        request_id: str,
        length: int,
        computed: int,
        *,
        recomputes_last: bool = False,
        states: bool = False,
        single: bool = False,
    ) -> int:
        """Return how many tokens to load of a prompt of `length`, of which `computed` are here. Repeatable.

        A single token is not worth it, as D computes the last one anyway, unless D cannot compute it with the next one
        (`single`). With `recomputes_last` the last one is never loaded. With `states` it comes with the state, which
        may be all that D lacks.
        """
        load = self._loads.get(request_id)
        few = 0 if single or (states and computed and not recomputes_last) else 1
        if load is None or load.state is not LoadState.ARRIVED or length - computed <= few:
            return 0
        load.first = computed
        return length - computed - recomputes_last

    def loads_nothing(self, request_id: str) -> None:
        """Record that D computes a request itself.

        Perhaps it has loaded, and lost its blocks in the middle of the answer, and its prompt is not cached any more.
        """
        self._on(self._loads[request_id], LoadEvent.LOCAL)

    def reserve(
        self,
        request_id: str,
        count: int,
        blocks: Sequence[Sequence[int]],
        groups: Sequence[Group],
        deadline_s: float,
        uuid: str,
        kernel_blocks: tuple[int, ...] = (),
    ) -> Bind:
        """Reserve for `count` tokens. `blocks` are those that vLLM has allocated: the whole table of each group.

        `kernel_blocks`: how many of the groups' blocks are one of vLLM's; none: they are the same.
        """
        load = self._loads.get(request_id)
        if load is None or load.first < 0 or load.transfer is not None or count <= 0:
            raise LocalProtocolError(f"reserve({request_id!r}, {count}) without a wanted load")
        end = load.first + count
        kernel_blocks = kernel_blocks or (1,) * len(groups)
        begins = [group.begins(load.first, end) for group in groups]
        ranges = [group.blocks(load.first, end) for group in groups]
        wanted = tuple(
            np.asarray(table[some.start : some.stop], dtype=np.int32)
            for table, some in zip(in_kernel_blocks(blocks, kernel_blocks), ranges, strict=True)
        )
        for ids, group, begin, some in zip(wanted, groups, begins, ranges, strict=True):
            if group.partial and (not ids.all() or len(ids) < len(some)):
                raise LocalProtocolError(
                    f"vLLM keeps no block for some of [{begin}, {end}), of {group}: {ids.tolist()}"
                )
        self._n += 1
        load.transfer = transfer = TransferId(self._incarnation, self._n, uuid)
        load.first, load.tokens = min(begins), count
        bind = Bind(request_id, transfer, load.first, end, wanted, deadline_s, kernel_blocks)
        load.bind = bind
        self._by_transfer[transfer] = load
        self._pending.binds.append(bind)
        self._on(load, LoadEvent.RESERVED)
        return bind

    def request_finished(self, request_id: str) -> None:
        """Handle the end of a request. A load that is still open is cancelled."""
        if (load := self._loads.get(request_id)) is not None:
            self._on(load, LoadEvent.ENDED)

    # -- loads

    def answered(self, transfer: TransferId, failure: Failure | None = None) -> None:
        """Record how the call for a prefill, and with it P's request, has ended."""
        if (load := self._by_transfer.get(transfer)) is not None:
            event = LoadEvent.PREFILLED if failure is None else LoadEvent.NOT_PREFILLED
            self._on(load, event, failure)

    def ended(self, ends: Iterable[LoadEnd]) -> None:
        """Record how workers' parts of loads ended, which comes before the load as a whole is reported."""
        for end in sorted(ends, key=_order):
            load = self._loads.get(end.request_id)
            if load is not None and load.state in OPEN:
                load.failure, load.push = load.failure or end.failure, load.push or end.push
                load.cached = max(load.cached, end.cached)

    def received(self, now: float, request_id: str) -> RemoteLoad | None:
        """Record that all workers have reported a request. None if it is no load of ours (any more)."""
        load = self._loads.get(request_id)
        if load is None or load.state not in OPEN:
            return None
        if load.failure is not None:
            load.cached = 0
        self._on(load, LoadEvent.RECEIVED_FAILED if load.failure and self._fails else LoadEvent.RECEIVED)
        return load

    # -- loads that are over, and of which vLLM learns around its read of a step

    def take(self, now: float) -> list[Start]:
        """Return the requests that vLLM learns of now, each once."""
        starts = [Start(load.request_id, None, "aborted") for load in self._in[LoadState.DROPPED].values()]
        starts += [Start(load.request_id, None, fails=True) for load in self._in[LoadState.FAILED].values()]
        return self._begun(starts)

    def _begun(self, starts: list[Start]) -> list[Start]:
        for start in starts:
            self._on(self._loads[start.request_id], LoadEvent.BEGUN, start)
        return starts

    def withholds(self, request_id: str) -> bool:
        """Return whether vLLM learns of the end of a load only by `take`."""
        load = self._loads.get(request_id)
        return load is not None and load.state in WITHHELD

    def due_s(self, now: float) -> float:
        """Time until vLLM must learn of a load that is over."""
        return 0.0 if self._in[LoadState.DROPPED] or self._in[LoadState.FAILED] else math.inf

    # -- what a step tells the workers, and counts

    def take_step(self, wake: tuple[str, int] | None, geometry: CacheGeometry | None) -> DecodeStep:
        """Return this step's metadata; the next call starts anew."""
        pending, self._pending = self._pending, _PendingLoads()
        return DecodeStep(
            binds=tuple(pending.binds),
            cancels=tuple(pending.cancels),
            settles=tuple(pending.settles),
            overs=tuple(pending.overs),
            wake=wake,
            incarnation=self._incarnation,
            geometry=geometry if pending.binds else None,
        )

    def count(self, *states: LoadState) -> int:
        """Return the number of requests in any of the states."""
        return sum(len(self._in[state]) for state in states)

    def fencing_blocks(self) -> int:
        """Return the number of blocks of cancelled loads whose writers are not known to be quiet yet."""
        open_ = (load.bind for s in (LoadState.FENCING, LoadState.ABANDONED) for load in self._in[s].values())
        return sum(len(bind.taken()) for bind in open_ if bind is not None)

    # -- transitions

    def _on(self, load: RemoteLoad, event: LoadEvent, *cause: Any) -> None:
        cell = look_up(self.table, load.state, event, Counter(), load)
        self._move(load, cell.into)
        cell.effect(self, load, *cause)

    def _move(self, load: RemoteLoad, state: LoadState) -> None:
        self._in[load.state].pop(load.request_id, None)
        load.state = state
        if state is not LoadState.OVER:
            self._in[state][load.request_id] = load
            return
        del self._loads[load.request_id]
        if load.transfer is not None:
            del self._by_transfer[load.transfer]

    def ignore(self, load: RemoteLoad, *cause: Any) -> None:
        """Change nothing else."""

    def leave(self, load: RemoteLoad) -> None:
        if load.p_waits:
            self._effects.append((LoadEffect.NOT_FETCHED, load))

    def settle(self, load: RemoteLoad, *failure: Failure | None) -> None:
        self._pending.settles.append(_transfer(load))

    def cancel(self, load: RemoteLoad, failure: Failure) -> None:
        """Have the load fenced before the request goes on."""
        self._pending.cancels.append(LoadCancel(_transfer(load), failure))

    def abandon(self, load: RemoteLoad) -> None:
        self.cancel(load, Failure("PD-XFER-002", "the request ended on decode"))
        self.forget(load)

    def forget(self, load: RemoteLoad) -> None:
        """Want nothing more of a load."""
        self._hang_up(load)

    def finish(self, load: RemoteLoad) -> None:
        """Tell the workers that the load is over."""
        self._pending.overs.append(_transfer(load))

    def go_on(self, load: RemoteLoad) -> None:
        """After a complete load a metaserver's call ends by itself, with P. An offer would bring only a first token."""
        self.finish(load)
        if load.failure or load.p_waits:
            self._hang_up(load)
        self._effects.append((LoadEffect.OVER, load))

    def _hang_up(self, load: RemoteLoad) -> None:
        self._effects.append((LoadEffect.HANG_UP, load))


def _order(end: LoadEnd) -> tuple[str, str, str]:
    return end.request_id, end.why.code, end.why.detail


def _transfer(load: RemoteLoad) -> TransferId:
    if load.transfer is None:
        raise LocalProtocolError(f"{load!r} has no transfer")
    return load.transfer


def table_of(do: type[LoadBook]) -> Table[LoadState, LoadEvent]:
    s, e = LoadState, LoadEvent
    answered = (e.PREFILLED, e.NOT_PREFILLED)  # also where an answer is under way when its call is hung up
    received = {
        e.RECEIVED: Cell(s.LOADED, do.go_on),
        e.RECEIVED_FAILED: Cell(s.FAILED, do.go_on),
    }
    return {
        s.ARRIVED: {
            e.LOCAL: Cell(s.LOCAL, do.leave),
            e.RESERVED: Cell(s.LOADING, do.ignore),
            e.ENDED: Cell(s.OVER, do.leave),
        },
        s.LOCAL: {e.ENDED: Cell(s.OVER, do.ignore), **idle(s.LOCAL, do.ignore, e.LOCAL)},
        s.LOADING: {
            e.PREFILLED: Cell(s.LANDING, do.settle),
            e.NOT_PREFILLED: Cell(s.FENCING, do.cancel),
            e.ENDED: Cell(s.ABANDONED, do.abandon),
            **received,
        },
        s.LANDING: {e.ENDED: Cell(s.ABANDONED, do.abandon), **received, **idle(s.LANDING, do.ignore, *answered)},
        s.FENCING: {e.ENDED: Cell(s.ABANDONED, do.forget), **received, **idle(s.FENCING, do.ignore, *answered)},
        s.ABANDONED: {
            e.RECEIVED: Cell(s.OVER, do.finish),
            e.RECEIVED_FAILED: Cell(s.OVER, do.finish),
            **idle(s.ABANDONED, do.ignore, *answered, e.ENDED),
        },
        s.FAILED: {
            e.BEGUN: Cell(s.LOADED, do.ignore),
            e.ENDED: Cell(s.DROPPED, do.ignore),
            **idle(s.FAILED, do.ignore, *answered),
        },
        s.DROPPED: {e.BEGUN: Cell(s.OVER, do.ignore), **idle(s.DROPPED, do.ignore, *answered, e.ENDED)},
        s.LOADED: {e.ENDED: Cell(s.OVER, do.ignore), **idle(s.LOADED, do.ignore, *answered, e.LOCAL)},
    }


LoadBook.table = table_of(LoadBook)
