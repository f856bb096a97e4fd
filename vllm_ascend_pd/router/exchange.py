# SPDX-License-Identifier: Apache-2.0
"""State of a client's request while it runs: its attempts, their tickets, what ends them from outside, its stages.

An attempt has one ticket: D gets it and sends it back with its reservation. Until the client has seen a byte, a failed
attempt is given up and another one is made, with a new ticket. So a late write of the old attempt never mixes with the
new one: D's fence deals with it.

If the client leaves, its task is cancelled, and that is never taken back. All else that ends a request's work from
outside stops its leg (`LegInFlight.stop`): who waits for the engine there gets the reason, as an exception of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.reports import LoadReport
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.ends import LegFailed, RequestOver, ShutDown
from vllm_ascend_pd.router.core.resume import StreamState, stops_at_recomputed
from vllm_ascend_pd.router.faults import Answer, remedy
from vllm_ascend_pd.router.fleet import Instance, LegInFlight, monotonic
from vllm_ascend_pd.router.upstream import Reply
from vllm_ascend_pd.shared.core.failures import HttpFailure
from vllm_ascend_pd.shared.http_session import Headers
from vllm_ascend_pd.shared.within import within

AsgiSend = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_MAX_ID = 128  # characters of a client's X-Request-Id
_UNPRINTED = re.compile(rb"[^!-~]+")
_LAST_REQUESTS = 100
_LAST_TROUBLES = 50
_PAST_ATTEMPTS = 1024
PAST_S = 60.0  # after an attempt, for reports of its loads; D gives up sending them long before


class AttemptFailed(LegFailed):
    """An attempt of which the client saw nothing. `answer`: for the client after the last one; `final`: it was."""

    def __init__(self, failure: HttpFailure, answer: Answer, noted: Failure, final: bool = False) -> None:
        super().__init__(failure, noted)
        self.answer = answer
        self.final = final


def id_of(headers: Headers) -> str:
    """Return the id by which a request is echoed, logged, shown and sent on: a word of the client's, or a new one."""
    given = [value for name, value in headers if name == b"x-request-id"]
    return _UNPRINTED.sub(b"", given[-1] if given else b"")[:_MAX_ID].decode("ascii") or secrets.token_hex(16)


def _nothing() -> None:
    """Do nothing: there is nothing to release."""


async def _dropped(message: MutableMapping[str, Any]) -> None:
    """Drop a message: the client is gone."""


def _wall() -> float:
    return time.time()


@dataclass(slots=True, eq=False)
class HttpExchange:
    """A client's request in progress."""

    request: bodies.Request
    headers: Headers
    request_id: str
    send: AsgiSend
    started: float = field(default_factory=monotonic)
    started_wall: float = field(default_factory=_wall)
    number: int = 0  # of the attempt
    tried: set[str] = field(default_factory=set)  # D's that failed it
    bad_prefills: set[str] = field(default_factory=set)
    committed: bool = False  # the client has seen a byte
    pinned: tuple[Instance, Instance] | None = None  # P and D of a canary
    prefills: frozenset[str] | None = None  # the only P's that it may use; None: any
    status: int = 0
    call: LegInFlight | Reply | None = None  # to an engine, the last one
    closing: bool = False  # this server shuts down
    span: Any = None  # if spans are on
    kept: StreamState | None = None  # state by which another D can go on with its answer
    kept_bytes: int = 0
    unkept: str = ""  # why no D can; empty if it was not examined
    streaming: bool = False  # the head of a kept stream is out, and its end is not
    said_all: bool = False  # the last event of a stream is out, and nothing may follow it
    before: int = 0  # attempts before its stream broke last
    broke_at: float = 0.0  # when that was; 0 once the client gets something again
    release: Callable[[], None] = _nothing  # of the body, which is counted as long as it may be needed
    remembered: bool = True  # among the last requests; polls are not, as they would push out all others
    stages: list[tuple[str, float, str]] = field(default_factory=list)
    route: str = ""  # the client's
    tokens: int = 0  # of its prompt, about
    stops_at_recomputed: bool = False  # then an answer does not show whether D has dropped the request
    has_stop: bool = False  # a string of the client's may end its answer

    def __post_init__(self) -> None:
        self.route, self.tokens = self.request.route, self.request.prefill_tokens
        self.stops_at_recomputed = stops_at_recomputed(self.request.fields)
        self.has_stop = "stop" in self.request.fields

    def close(self) -> None:
        """End what it waits for, because this server shuts down."""
        self.closing = True
        if self.call is not None:
            self.call.stop(ShutDown())

    def stage(self, name: str, detail: str = "") -> None:
        self.stages.append((name, time.monotonic() - self.started, detail))

    def forget_prompt(self) -> None:
        """Free the body, which no attempt and no post of D needs any more: a stream may go on for long."""
        if self.request.fields:
            self.request = msgspec.structs.replace(self.request, fields={}, marks=())
        self.release()

    def forget_all(self) -> None:
        """Free what an ended request holds: reports of its loads may still come, but need no connection and no body."""
        self.forget_prompt()
        self.headers, self.send, self.release, self.call = [], _dropped, _nothing, None

    def facts(self) -> dict[str, Any]:
        """Return what the status page shows of it: not its prompt."""
        return {
            "id": self.request_id[:128],
            "route": self.route,
            "started": self.started_wall,
            "attempts": self.number,
            "status": self.status,
            "tokens": self.tokens,
            "stages": [{"stage": name, "at": round(at, 6), "detail": detail} for name, at, detail in self.stages],
        }


@dataclass(slots=True, eq=False)
class RoutedTransfer:
    """A transfer of D for an attempt: what was asked of which P, and what D reports of it."""

    id: str
    posted: bool = False  # D's POST is open
    ended: bool = False  # nobody needs its prefill any more
    prefill: Instance | None = None  # the P asked last
    asked: float = 0.0  # when it was
    leg: LegInFlight | None = None  # there
    failed: bool = False  # its prefill leg did
    blamed: bool = False  # its failure was counted against its P: only once
    report: LoadReport | None = None  # D's

    @property
    def received(self) -> bool:
        """True if D has the KV, whatever becomes of P's leg."""
        return self.report is not None and self.report.received > 0

    @property
    def trial(self) -> LegInFlight | None:
        """The trial of its P that D's report is to end, if there is one."""
        return self.leg if self.leg is not None and self.leg.kept and self.report is None else None

    def end(self) -> None:
        """End its prefill, as nobody needs it any more."""
        self.ended = True
        if self.leg is not None:
            self.leg.stop(RequestOver())


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt with its ticket, and the transfers that D makes for it."""

    exchange: HttpExchange
    decode: Instance
    leg: LegInFlight = field(init=False)  # at D
    ticket: str = field(default_factory=lambda: secrets.token_hex(16))
    transfers: dict[str, RoutedTransfer] = field(default_factory=dict)
    accused: str = ""  # how D failed, until it is clear whether a load was the reason
    began: float = field(default_factory=monotonic)
    restart: bool = True  # whether another attempt may follow
    answers: bool = False  # D does, all of what was asked
    news: asyncio.Event = field(default_factory=asyncio.Event)  # a report came, or a prefill leg failed
    watch: asyncio.Task[None] | None = None  # gives the attempt up unless a report says that its KV is there

    def count(self, tokens: int) -> None:
        """Note how long the prompt is with the conversation that it follows on, as D has counted it."""
        exchange = self.exchange
        exchange.request, exchange.tokens = exchange.request.counted(tokens), tokens
        self.leg.counts(tokens)
        self.decode.sent(exchange.request.marks)

    @property
    def posts(self) -> list[RoutedTransfer]:
        """Transfers whose POSTs are open."""
        return [transfer for transfer in self.transfers.values() if transfer.posted]

    @property
    def repeats(self) -> bool:
        """True if D begins with tokens that the client has, which says nothing of D yet."""
        kept = self.exchange.kept
        return kept is not None and kept.given > 0 and self.exchange.request.stream

    def wants(self, transfer: RoutedTransfer) -> bool:
        """Return whether another P may be asked: not if D has the KV, nor once it answers."""
        return not transfer.received and not self.answers

    @property
    def load_failed(self) -> bool:
        """True if KV did not come: D may have failed for that reason alone."""
        return any((one.failed or one.report) and not one.received for one in self.transfers.values())

    @property
    def reported(self) -> bool:
        """True if D has reported all that it posted."""
        return all(one.report for one in self.transfers.values())

    async def wait_reported(self, enough: Callable[[], bool], max_s: float) -> None:
        """Wait until `enough` is true, at most `max_s`: reports, legs and answers come in any order."""
        end = time.monotonic() + max_s
        while not enough() and (left := end - time.monotonic()) > 0:
            self.news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(left, self.news.wait())

    def explained(self) -> bool:
        """Return whether D has reported a failed load, or all. P's failed leg is not enough: the KV may be there."""
        return self.reported or any(one.report and not one.received for one in self.transfers.values())

    def cancel_posts(self) -> None:
        for transfer in self.posts:
            transfer.end()


class Journal:
    """Requests in progress in this process, the last that ended, and recent troubles."""

    def __init__(self) -> None:
        self.tickets: dict[str, Attempt] = {}
        # Past attempts and since when they are, oldest first: their reports may still come.
        self._past: OrderedDict[str, tuple[Attempt, float]] = OrderedDict()
        self._forgetting: asyncio.TimerHandle | None = None
        self.exchanges: set[HttpExchange] = set()
        self.last: deque[HttpExchange] = deque(maxlen=_LAST_REQUESTS)
        self.troubles: deque[dict[str, Any]] = deque(maxlen=_LAST_TROUBLES)

    def trouble(self, noted: Failure, instance: str = "", request: str = "") -> None:
        """Note a trouble for the status page. It must not quote an engine, whose text may contain a prompt."""
        facts = {"at": time.time(), "code": noted.code, "what": noted.detail, "remedy": remedy(noted.code)}
        self.troubles.append({**facts, "instance": instance, "request": request[:128]})

    def close(self, attempt: Attempt) -> None:
        """End the attempt. Its ticket is void, but D's reports of it are still taken."""
        self.tickets.pop(attempt.ticket, None)
        if not attempt.reported:
            self._past[attempt.ticket] = attempt, asyncio.get_running_loop().time()
            if len(self._past) > _PAST_ATTEMPTS:
                self._past.popitem(last=False)
            if self._forgetting is None:
                self._forget()

    def notify(self, attempt: Attempt) -> None:
        """Note that a report came. After its last one a past attempt is forgotten."""
        if attempt.reported:
            self._past.pop(attempt.ticket, None)

    def attempt(self, ticket: str) -> Attempt | None:
        return self.tickets.get(ticket) or self._past.get(ticket, (None, 0.0))[0]

    def _forget(self) -> None:
        """Forget the attempts that are past for long enough, and set a timer for the oldest of the rest.

        There is one timer for all: a minute's worth of timers would be work for the garbage collector, which stops
        everything else.
        """
        loop, self._forgetting = asyncio.get_running_loop(), None
        while self._past:
            _, since = next(iter(self._past.values()))
            if (left := since + PAST_S - loop.time()) > 0:
                self._forgetting = loop.call_later(left, self._forget)
                return
            self._past.popitem(last=False)

    def begin(self, exchange: HttpExchange) -> None:
        self.exchanges.add(exchange)

    def end(self, exchange: HttpExchange) -> None:
        self.exchanges.discard(exchange)
        exchange.forget_all()
        if exchange.remembered:
            self.last.append(exchange)
