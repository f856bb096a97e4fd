# SPDX-License-Identifier: Apache-2.0
"""The book of a D whose requests may begin with tokens that it did not compute: P's first one, or an answer so far.

P's first token comes apart from the end of the load, before or after it: a request whose KV is complete is held until
its token is there, or it is known that none comes, or the wait is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from vllm_ascend_pd.decode.scheduler.core.book import OPEN, LoadBook, table_of
from vllm_ascend_pd.decode.scheduler.core.load import (
    GIVEN,
    TAKEN,
    USELESS,
    LoadEffect,
    LoadEvent,
    LoadState,
    RemoteLoad,
    Start,
    Wanted,
)
from vllm_ascend_pd.decode.scheduler.core.routes import Ticket
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstToken
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.states import Cell, Table, idle


class TokenBook(LoadBook):
    """D's requests, some of which begin with tokens of others."""

    table: ClassVar[Table[LoadState, LoadEvent]]  # below

    def __init__(
        self, incarnation: str, wait_s: float = 0.2, whole_wait_s: float = 15.0, *, fails: bool = False
    ) -> None:
        """`wait_s`: for P's first token; `whole_wait_s`: for requests that can begin only with it."""
        super().__init__(incarnation, fails=fails)
        self._wait_s = {False: wait_s, True: max(wait_s, whole_wait_s)}

    # -- an answer so far

    def decides_beginning(self, request_id: str) -> bool:
        """Return, once, whether it is to be decided with which outputs a request begins: P may bring its KV."""
        load = self._loads.get(request_id)
        if load is None or load.state is not LoadState.ARRIVED or load.given is not None:
            return False
        load.given = ()
        return True

    def give(self, request_id: str, tokens: tuple[int, ...]) -> None:
        """Record the outputs with which a request begins."""
        load = self._loads[request_id]
        load.given, load.source = tokens, GIVEN

    def given(self, request_id: str) -> tuple[int, ...]:
        """Return the outputs with which a request begins."""
        load = self._loads.get(request_id)
        return load.given or () if load is not None else ()

    # -- P's first token

    def first_tokens_come(self, request_id: str) -> bool:
        """Return whether P's first token can come the same way as the KV."""
        load = self._loads.get(request_id)
        return load is not None and load.route is not None and load.route.carries_first

    def each_p_sends_first(self, request_id: str) -> bool:
        """Return whether the metaserver says that each P which it may ask sends its first token."""
        load = self._loads.get(request_id)
        return load is not None and isinstance(load.route, Ticket) and load.route.first_token

    def ask(self, request_id: str, wanted: Wanted | str) -> None:
        """Record the first token that a reservation asks for, or why it asks for none.

        The client has no token yet: a request loads only when it is first scheduled.
        """
        load = self._loads[request_id]
        if isinstance(wanted, Wanted):
            load.wanted = wanted
        else:
            self._compute_first(load, wanted)

    def expects(self, transfer: TransferId) -> bool:
        """Return whether P's token for a transfer may still come."""
        load = self._by_transfer.get(transfer)
        return load is not None and load.wanted is not None and not load.answer

    def token(self, transfer: TransferId, first: FirstToken | None, why: str = "", *, failed: bool = False) -> None:
        """Record P's token, or (None) why none comes. What comes first counts."""
        load = self._by_transfer.get(transfer)
        if load is None or load.wanted is None or load.answer:
            return
        if failed or first is None:
            load.answer = "prefill failed" if failed else why or "not sent"
        else:
            load.answer = fault(load.wanted, first) or first

    def received(self, now: float, request_id: str, *, starts: bool = True) -> RemoteLoad | None:
        """Do the same where P's token may still come. `starts`: held requests can be started."""
        load = self._loads.get(request_id)
        if load is None or load.state not in OPEN or load.wanted is None:
            return super().received(now, request_id)
        if load.failure is None and (starts or load.whole):
            load.complete = now
            self._on(load, LoadEvent.RECEIVED_EARLY)
            return load
        self._compute_first(load, "load failed" if load.failure else "scheduler")
        return super().received(now, request_id)

    def take(self, now: float, unfit: Callable[[str, FirstToken], str] = lambda request_id, first: "") -> list[Start]:
        """Return the requests that vLLM learns of now, each once.

        `unfit` returns why a request cannot begin with a token after all.
        """
        waiting = list(self._in[LoadState.HELD].values())
        starts = [start for load in waiting if (start := self._start(load, now, unfit)) is not None]
        return super().take(now) + self._begun(starts)

    def due_s(self, now: float) -> float:
        """Time until the first request that is held is not waited for any longer."""
        waited = map(self._waited_until, self._in[LoadState.HELD].values())
        return max(0.0, min([super().due_s(now), *(until - now for until in waited)]))

    def _start(self, load: RemoteLoad, now: float, unfit: Callable[[str, FirstToken], str]) -> Start | None:
        why, first = load.answer, load.answer
        if isinstance(first, FirstToken):
            why = "another push" if first.push != load.push else unfit(load.request_id, first)
            if not why:
                return Start(load.request_id, first)
        elif not why:
            why = "late" if now >= self._waited_until(load) else ""
        return Start(load.request_id, None, str(why), load.whole) if why else None

    def _waited_until(self, load: RemoteLoad) -> float:
        return load.complete + self._wait_s[load.whole]

    # -- transitions

    def forget(self, load: RemoteLoad) -> None:
        load.wanted = None
        super().forget(load)

    def hold(self, load: RemoteLoad) -> None:
        """Report the load, unless it shows only with P's token whether it was of use."""
        self.finish(load)
        if not load.whole:
            self._effects.append((LoadEffect.OVER, load))

    def begin(self, load: RemoteLoad, start: Start) -> None:
        whole = load.whole
        if start.first is not None:
            load.source, load.wanted = TAKEN, None
        else:
            self._compute_first(load, start.why)
            if start.fails:
                load.failure, load.cached = Failure(USELESS, start.why), 0
            if start.fails or load.p_waits:
                self._hang_up(load)
        if whole:
            self._effects.append((LoadEffect.OVER, load))

    def drop(self, load: RemoteLoad) -> None:
        if load.whole:
            self._effects.append((LoadEffect.OVER, load))
        self._effects.append((LoadEffect.FIRST_COMPUTED, load))
        load.wanted = None
        if load.p_waits:
            self._hang_up(load)

    def _compute_first(self, load: RemoteLoad, why: str) -> None:
        load.source, load.wanted = why, None
        self._effects.append((LoadEffect.FIRST_COMPUTED, load))


def _table(do: type[TokenBook]) -> Table[LoadState, LoadEvent]:
    s, e, table = LoadState, LoadEvent, dict(table_of(do))
    for state in (s.LOADING, s.LANDING, s.FENCING):
        table[state] = {**table[state], e.RECEIVED_EARLY: Cell(s.HELD, do.hold)}
    table[s.HELD] = {
        e.BEGUN: Cell(s.LOADED, do.begin),
        e.ENDED: Cell(s.DROPPED, do.drop),
        **idle(s.HELD, do.ignore, e.PREFILLED, e.NOT_PREFILLED),
    }
    return table


TokenBook.table = _table(TokenBook)


def fault(wanted: Wanted, first: FirstToken) -> str:
    """Return why a token is not the one that was asked for; empty if it is."""
    if first.transfer != wanted.transfer:
        return "another transfer"
    if first.position != wanted.position:
        return "another prompt"
    if first.digest != wanted.digest:
        return "other sampling"
    tokens = (first.token, *(token for token, _, _ in first.logprobs))
    if max(tokens) >= wanted.vocabulary:
        return "not in the vocabulary"
    if wanted.logprobs is None:
        return "logprobs" if first.logprobs else ""
    well = len(first.logprobs) == wanted.logprobs + 1 and first.logprobs[0][0] == first.token
    return "" if well and all(value <= 0.0 for _, value, _ in first.logprobs) else "logprobs"  # no NaN passes
