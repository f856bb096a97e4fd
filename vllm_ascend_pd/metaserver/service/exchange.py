# SPDX-License-Identifier: Apache-2.0
"""One client's request as it is known while it runs: its attempts, their tickets, what interrupts it, its stages.

An attempt is one ticket: D is told the ticket and brings it back with its reservation. Until the client has seen a
byte, a failed attempt is given up and another one made, with a new ticket, so that a late write of the old one is
D's fence's business and never mixes with the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_ascend_pd.metaserver import bodies
from vllm_ascend_pd.metaserver.decisions import Failure
from vllm_ascend_pd.metaserver.http1 import Headers
from vllm_ascend_pd.metaserver.reports import LoadReport
from vllm_ascend_pd.metaserver.resume import Kept
from vllm_ascend_pd.metaserver.service.faults import Answer, remedy
from vllm_ascend_pd.metaserver.service.fleet import Instance, Trial
from vllm_ascend_pd.metaserver.within import within

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_LAST_REQUESTS = 100
_LAST_TROUBLES = 50
_PAST_ATTEMPTS = 1024
PAST_S = 60.0  # after an attempt, for reports of its loads; D gives up telling long before


class AttemptFailed(Exception):
    """The attempt ended before the client saw anything. `answer`: what to say if it was the last; `brief`: what the
    status page says of it, without an engine's words."""

    def __init__(self, failure: Failure, answer: Answer, brief: str = "", code: str = "PD-META-007") -> None:
        super().__init__(failure.value)
        self.failure = failure
        self.answer = answer
        self.brief = brief or failure.value
        self.code = code


class Interrupt:
    """Why a task is cancelled from outside; without a reason it is the server's own cancellation."""

    __slots__ = ("closing", "failed", "left", "task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an interrupt belongs to a task")
        self.task: asyncio.Task[Any] = task
        self.left = False
        self.closing = False
        self.failed: AttemptFailed | None = None

    def client_left(self) -> None:
        self.left = True
        self.task.cancel()

    def close(self) -> None:
        """The server's time is up."""
        self.closing = True
        self.task.cancel()

    def give_up(self, failed: AttemptFailed) -> None:
        """Another attempt is better than to wait for this one."""
        if not (self.left or self.closing or self.failed):
            self.failed = failed
            self.task.cancel()

    def take_failure(self) -> AttemptFailed | None:
        """In the handler of a CancelledError: the failed attempt, when the request itself goes on."""
        failed, self.failed = self.failed, None
        if failed is None or self.left or self.closing:
            return None
        uncancel(self.task)
        return failed


def uncancel(task: asyncio.Task[Any]) -> None:
    """From 3.11 on a task counts its cancellations; one that was ours and is dealt with is taken back."""
    method = getattr(task, "uncancel", None)
    if method is not None:
        method()


def _nothing() -> None:
    """Nothing is held."""


async def _nobody(message: MutableMapping[str, Any]) -> None:
    """Nobody is there to be answered any more."""


def _now() -> float:
    """Looked up when it is called: a simulation has another clock."""
    return time.monotonic()


def _wall() -> float:
    return time.time()


@dataclass(slots=True, eq=False)
class Exchange:
    """A client's request under way."""

    request: bodies.Request
    headers: Headers
    request_id: str
    interrupt: Interrupt
    send: Send
    started: float = field(default_factory=_now)
    started_wall: float = field(default_factory=_wall)
    number: int = 0  # of the attempt
    tried: set[str] = field(default_factory=set)  # D's that failed it
    bad_prefills: set[str] = field(default_factory=set)
    committed: bool = False  # the client has seen a byte
    pinned: tuple[Instance, Instance] | None = None  # P and D of a canary
    prefills: frozenset[str] | None = None  # the only P's that it may have; None: any
    status: int = 0
    span: Any = None  # where spans are wanted
    kept: Kept | None = None  # so that another D can go on with its stream
    kept_bytes: int = 0
    unkept: str = ""  # why none can; empty where nobody asked
    streaming: bool = False  # the head of a stream that is kept is out, and its end is not
    said_all: bool = False  # the last word of such a stream is out, and nothing may follow it
    before: int = 0  # attempts before its stream broke last
    broke_at: float = 0.0  # when that was, until the client hears something again
    release: Callable[[], None] = _nothing  # of the body, which is counted as long as it may be needed
    remembered: bool = True  # among the last requests: polls would push out all others
    stages: list[tuple[str, float, str]] = field(default_factory=list)
    route: str = ""  # the client's
    tokens: int = 0  # of its prompt, about

    def __post_init__(self) -> None:
        self.route, self.tokens = self.request.route, self.request.prefill_tokens

    def stage(self, name: str, detail: str = "") -> None:
        self.stages.append((name, time.monotonic() - self.started, detail))

    def forget_prompt(self) -> None:
        """No attempt and no post of D can need it any more: a stream may go on for long."""
        if self.request.fields:
            self.request = msgspec.structs.replace(self.request, fields={}, marks=())
        self.release()

    def over(self) -> None:
        """It has ended. Reports of its loads may come for a minute, and its connection and its body are not kept for those."""
        self.forget_prompt()
        self.headers, self.send, self.release = [], _nobody, _nothing

    def story(self) -> Story:
        return Story(
            self.request_id[:128], self.route, self.started_wall, self.number, self.status, self.tokens, self.stages
        )


class Story(msgspec.Struct, frozen=True):
    """What is told about a request. No prompt in it."""

    request_id: str
    route: str
    started: float
    attempts: int
    status: int
    tokens: int
    stages: list[tuple[str, float, str]]

    def facts(self) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "route": self.route,
            "started": self.started,
            "attempts": self.attempts,
            "status": self.status,
            "tokens": self.tokens,
            "stages": [{"stage": name, "at": round(at, 6), "detail": detail} for name, at, detail in self.stages],
        }


@dataclass(slots=True, eq=False)
class Attempt:
    """One ticket. `legs` are the prefill legs under way, by transfer; `seen` all transfers that ever came."""

    exchange: Exchange
    decode: Instance
    ticket: str = field(default_factory=lambda: secrets.token_hex(16))
    legs: dict[str, Interrupt] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    sources: dict[str, tuple[Instance, float]] = field(default_factory=dict)  # by transfer, the P asked last, and when
    reports: dict[str, LoadReport] = field(default_factory=dict)  # by transfer, how D says that its KV came
    blamed: set[str] = field(default_factory=set)  # transfers whose failure was counted against their P: once
    failed: set[str] = field(default_factory=set)  # transfers whose prefill leg failed
    trials: dict[str, Trial] = field(default_factory=dict)  # by transfer, of P's: D's report ends them
    began: float = field(default_factory=_now)
    restart: bool = True  # whether another attempt may follow
    news: asyncio.Event = field(default_factory=asyncio.Event)  # a report came, or a prefill leg failed
    watch: asyncio.Task[None] | None = None  # gives the attempt up unless a report says that its KV is there

    def received(self, transfer: str) -> bool:
        """D has the KV, whatever else happens to P's leg."""
        report = self.reports.get(transfer)
        return report is not None and report.received > 0

    def wants(self, transfer: str) -> bool:
        """Whether another P may be asked: not when D has the KV, nor when the client has been answered (D reports later)."""
        return not self.received(transfer) and bool(self.exchange.request.fields)

    @property
    def load_failed(self) -> bool:
        """KV did not come: D may have failed for that, and only for that."""
        return any(not self.received(transfer) for transfer in self.failed.union(self.reports))

    async def told(self, enough: Callable[[], bool], most_s: float) -> None:
        """Wait until what has been told is enough, at most so long: reports, legs and answers come in any order."""
        end = time.monotonic() + most_s
        while not enough() and (left := end - time.monotonic()) > 0:
            self.news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(left, self.news.wait())

    async def explained(self, most_s: float) -> None:
        """Wait until D has told of a load that failed, or of all. (P's leg alone says not enough: the KV may be there.)"""
        await self.told(
            lambda: any(not r.received for r in self.reports.values()) or self.seen <= self.reports.keys(), most_s
        )

    def cancel_legs(self) -> None:
        for leg in tuple(self.legs.values()):
            leg.client_left()


class Journal:
    """What is under way in this process, the last that ended, and what went wrong lately."""

    def __init__(self) -> None:
        self.tickets: dict[str, Attempt] = {}
        # Since when they are past, oldest first: their reports may still be on their way.
        self._past: OrderedDict[str, tuple[Attempt, float]] = OrderedDict()
        self._forgetting: asyncio.TimerHandle | None = None
        self.exchanges: set[Exchange] = set()
        self.last: deque[Story] = deque(maxlen=_LAST_REQUESTS)
        self.troubles: deque[dict[str, Any]] = deque(maxlen=_LAST_TROUBLES)

    def trouble(self, code: str, what: str, instance: str = "", request: str = "") -> None:
        """For the status page. `what` has no words of an engine in it: they may quote a prompt."""
        facts = {"at": time.time(), "code": code, "what": what, "remedy": remedy(code)}
        self.troubles.append({**facts, "instance": instance, "request": request[:128]})

    def close(self, attempt: Attempt) -> None:
        """The ticket is void. What D reports of it is still taken."""
        self.tickets.pop(attempt.ticket, None)
        if not attempt.seen <= attempt.reports.keys():
            self._past[attempt.ticket] = attempt, asyncio.get_running_loop().time()
            if len(self._past) > _PAST_ATTEMPTS:
                self._past.popitem(last=False)
            if self._forgetting is None:
                self._forget()

    def told(self, attempt: Attempt) -> None:
        """A report came. After the last one nothing is expected of a past attempt."""
        if attempt.seen <= attempt.reports.keys():
            self._past.pop(attempt.ticket, None)

    def attempt(self, ticket: str) -> Attempt | None:
        return self.tickets.get(ticket) or self._past.get(ticket, (None, 0.0))[0]

    def _forget(self) -> None:
        """What has been past for long enough; the rest when the oldest of it has. One timer for all: a minute's worth of timers
        would be work for the garbage collector, during which everything else stands still."""
        loop, self._forgetting = asyncio.get_running_loop(), None
        while self._past:
            _, since = next(iter(self._past.values()))
            if (left := since + PAST_S - loop.time()) > 0:
                self._forgetting = loop.call_later(left, self._forget)
                return
            self._past.popitem(last=False)

    def begin(self, exchange: Exchange) -> None:
        self.exchanges.add(exchange)

    def end(self, exchange: Exchange) -> None:
        self.exchanges.discard(exchange)
        exchange.over()
        if exchange.remembered:
            self.last.append(exchange.story())
