# SPDX-License-Identifier: Apache-2.0
"""One client's request: D's leg, the prefill legs that D asks for, and what the client gets.

An attempt is one ticket: D is told the ticket and brings it back with its reservation. Until the client has seen a
byte, a failed attempt is given up and another one made, with a new ticket, so that a late write of the old one is
D's fence's business and never mixes with the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_pd.metaserver import bodies
from vllm_ascend_pd.metaserver.decisions import NOT_EXECUTED, Evidence, Failure, RetryBudget, Role
from vllm_ascend_pd.metaserver.service.faults import Answer, Headers, error_frame, fault
from vllm_ascend_pd.metaserver.service.fleet import Fleet, Instance
from vllm_ascend_pd.metaserver.service.settings import Settings
from vllm_ascend_pd.metaserver.service.upstream import Reply, Upstream, UpstreamError
from vllm_ascend_pd.observe.trace import emit

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_REPEATED_STATUS = {429: Failure.REFUSED, 503: Failure.REFUSED}
_WHOLE_ANSWER_BYTES = 64 << 20
_LATE_PREFILL_S = 10.0  # after D's good end, for P to finish by itself
OWN_HEADERS = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server"})


class AttemptFailed(Exception):
    """The attempt ended before the client saw anything. `answer`: what to say if it was the last."""

    def __init__(self, failure: Failure, answer: Answer) -> None:
        super().__init__(failure.value)
        self.failure = failure
        self.answer = answer


@dataclass(slots=True, eq=False)
class Attempt:
    """One ticket. `legs` are the prefill legs under way, by transfer; `seen` all transfers that ever came."""

    request: bodies.Request
    headers: Headers
    decode: Instance
    task: asyncio.Task[Any]
    ticket: str = field(default_factory=lambda: uuid.uuid4().hex)
    legs: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    bad_prefills: set[str] = field(default_factory=set)
    opening: bool = True  # the client has not seen a byte
    given_up: AttemptFailed | None = None
    may_restart: bool = True

    def give_up(self, why: AttemptFailed) -> None:
        """From a prefill leg: stop waiting for D, another attempt is better."""
        if self.opening and self.given_up is None:
            self.given_up = why
            self.task.cancel()

    def cancel_legs(self) -> None:
        for leg in self.legs.values():
            leg.cancel()


class Exchanges:
    """All requests under way in this process, and their tickets."""

    def __init__(self, settings: Settings, fleet: Fleet, upstream: Upstream, own_url: str) -> None:
        self.settings = settings
        self.fleet = fleet
        self.upstream = upstream
        self.own_url = own_url
        self.attempts: dict[str, Attempt] = {}
        self.budget = RetryBudget()

    async def serve(self, request: bodies.Request, headers: Headers, send: Send) -> None:
        """Answer the client. Cancelled when it leaves."""
        self.budget.request()
        tried: set[str] = set()
        bad_prefills: set[str] = set()
        number = 0
        while True:
            number += 1
            decode = self.fleet.choose(Role.DECODE, request.decode_tokens, frozenset(tried))
            if decode is None:
                await answer(send, fault(503, "No decode instance is available.", retry_after_s=2))
                return
            try:
                await self._attempt(request, headers, decode, bad_prefills, number, send)
                return
            except AttemptFailed as failed:
                delay = self.settings.retry.again(failed.failure, number, True, self.budget, random.random())
                if delay is None:
                    await answer(send, failed.answer)
                    return
                if failed.failure is not Failure.PREFILL:
                    tried.add(decode.name)
                emit("meta.retry", decode=decode.name, failure=failed.failure.value, attempt=number)
            await asyncio.sleep(delay)

    async def _attempt(
        self,
        request: bodies.Request,
        headers: Headers,
        decode: Instance,
        bad_prefills: set[str],
        number: int,
        send: Send,
    ) -> None:
        task = asyncio.current_task()
        if task is None:  # cannot be: we are in a coroutine of a task
            raise RuntimeError("no task")
        attempt = Attempt(request, headers, decode, task, bad_prefills=bad_prefills)
        attempt.may_restart = number < self.settings.retry.attempts
        params = self._params(attempt)
        self.attempts[attempt.ticket] = attempt
        well = False
        try:
            with self.fleet.leg(decode, request.decode_tokens):
                body = bodies.for_decode(request, params)
                reply, first = await self._open(attempt, body)
                with contextlib.closing(reply):
                    attempt.opening = False
                    await self._relay(attempt, reply, first, send)
                    well = True
        except asyncio.CancelledError:
            if attempt.given_up is None:
                raise
            _uncancel(task)
            raise attempt.given_up from None
        finally:
            self._close(attempt, well)

    def _params(self, attempt: Attempt) -> dict[str, Any] | None:
        request = attempt.request
        if not request.remote:
            return None
        if not self.fleet.usable(Role.PREFILL):
            if self.settings.without_prefill == "refuse":
                refusal = fault(503, "No prefill instance is available.", "PD-META-006", retry_after_s=2)
                raise AttemptFailed(Failure.REFUSED, refusal)
            return None
        params = {"do_remote_prefill": True, "metaserver": self.own_url, "ticket": attempt.ticket}
        if request.send_tokens:
            params["send_tokens"] = True
        return params

    def _close(self, attempt: Attempt, well: bool) -> None:
        """The attempt is over. A prefill still under way is cut, or after a good end given a moment to finish."""
        self.attempts.pop(attempt.ticket, None)
        if not attempt.legs:
            return
        if well:
            asyncio.get_running_loop().call_later(_LATE_PREFILL_S, attempt.cancel_legs)
        else:
            attempt.cancel_legs()

    async def _open(self, attempt: Attempt, body: bytes) -> tuple[Reply, bytes]:
        """Send D's leg and wait until there is something for the client. Raises AttemptFailed."""
        decode, request = attempt.decode, attempt.request
        timeout = self.settings.first_byte_timeout_s
        emit("meta.decode", ticket=attempt.ticket, decode=decode.name)
        try:
            reply = await self.upstream.send("POST", decode.base + request.route, attempt.headers, body, timeout)
        except UpstreamError as problem:
            raise self._broken(decode, problem.failure, problem.why) from problem
        try:
            first = await self._first(attempt, reply)
        except UpstreamError as problem:
            reply.close()
            raise self._broken(decode, problem.failure, problem.why) from problem
        except BaseException:
            reply.close()
            raise
        self.fleet.seen(decode, Evidence.SERVED)
        emit("meta.first_byte", ticket=attempt.ticket, decode=decode.name)
        return reply, first

    async def _first(self, attempt: Attempt, reply: Reply) -> bytes:
        timeout = self.settings.first_byte_timeout_s
        decode = attempt.decode
        if reply.status >= 500 or reply.status == 429:
            body = await reply.rest(1 << 20, timeout)
            failure = _REPEATED_STATUS.get(reply.status, Failure.SERVER)
            if failure is Failure.SERVER:
                self.fleet.seen(decode, Evidence.BROKE, f"status {reply.status}")
            passed = Answer(reply.status, body, [], _content_type(reply)) if body else fault(reply.status, "No body.")
            raise AttemptFailed(failure, passed)
        if not attempt.request.stream and reply.status == 200:
            first = await reply.rest(_WHOLE_ANSWER_BYTES, timeout)
        else:
            first = await reply.read(timeout)
        if reply.status == 200 and not first.strip():
            raise self._broken(decode, Failure.EMPTY, "its answer was empty")
        if first.startswith(b'data: {"error"'):
            raise AttemptFailed(Failure.SERVER, Answer(500, _frame(first)))
        return first

    def _broken(self, decode: Instance, failure: Failure, why: str) -> AttemptFailed:
        self.fleet.seen(decode, Evidence.BROKE if failure not in NOT_EXECUTED else Evidence.PROBE_FAILED, why)
        status = 504 if failure is Failure.TIMEOUT else 503 if failure is Failure.CONNECT else 502
        message = f"The decode instance could not answer ({failure.value}: {why})."
        return AttemptFailed(failure, fault(status, message, "PD-META-007", 2 if status == 503 else None))

    async def _relay(self, attempt: Attempt, reply: Reply, first: bytes, send: Send) -> None:
        """Pass on what came and what comes, untouched. A break after the first byte ends as an error frame."""
        head = [(name, value) for name, value in reply.headers if name not in OWN_HEADERS]
        stream = attempt.request.stream and reply.status == 200
        if not stream:
            rest = b"" if reply.status == 200 else await reply.rest(1 << 20)
            whole = first + rest
            head.append((b"content-length", str(len(whole)).encode()))
            await send({"type": "http.response.start", "status": reply.status, "headers": head})
            await send({"type": "http.response.body", "body": whole})
            return
        await send({"type": "http.response.start", "status": reply.status, "headers": head})
        piece = last = first
        try:
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                last = piece
                piece = await reply.read()
        except UpstreamError as problem:
            self.fleet.seen(attempt.decode, Evidence.BROKE, problem.why)
            gap = b"" if last.endswith(b"\n\n") else b"\n\n"
            frame = error_frame(f"The decode instance broke off ({problem.why}).", "PD-META-007")
            await send({"type": "http.response.body", "body": gap + frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def answer(send: Send, whole: Answer) -> None:
    await send({"type": "http.response.start", "status": whole.status, "headers": whole.head()})
    await send({"type": "http.response.body", "body": whole.body})


def _content_type(reply: Reply) -> bytes:
    return dict(reply.headers).get(b"content-type", b"application/json")


def _frame(first: bytes) -> bytes:
    return first.split(b"\n", 1)[0].removeprefix(b"data: ").strip()


def _uncancel(task: asyncio.Task[Any]) -> None:
    """From 3.11 on a task counts its cancellations; this one was ours and is dealt with."""
    uncancel = getattr(task, "uncancel", None)
    if uncancel is not None:
        uncancel()
