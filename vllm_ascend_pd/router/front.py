# SPDX-License-Identifier: Apache-2.0
"""A client's request from its admission to its end: attempts until one answers, each over a chosen D."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import structs

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.observe.trace import emit
from vllm_ascend_pd.protocol.continuing import CONTINUE
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.router import relay, resuming
from vllm_ascend_pd.router.core import resume
from vllm_ascend_pd.router.core.accumulated import NotContinued
from vllm_ascend_pd.router.core.bodies import Request
from vllm_ascend_pd.router.core.decisions import Admission, Gatekeeper, Role
from vllm_ascend_pd.router.core.ends import ShutDown, StreamBroke, known_failure
from vllm_ascend_pd.router.core.stored import Stored, home_of
from vllm_ascend_pd.router.exchange import Attempt, AttemptFailed, HttpExchange
from vllm_ascend_pd.router.faults import Answer, known
from vllm_ascend_pd.router.fleet import Fleet, Instance, LegInFlight, among, both, pairing
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.router.shared import SHUTDOWN, Shared
from vllm_ascend_pd.router.spans import NoSpans
from vllm_ascend_pd.router.upstream import Upstream
from vllm_ascend_pd.shared.core.failures import HttpFailure

_LATE_PREFILL_S = 10.0  # after D has ended well, for P to finish by itself
_COME_BACK_S = 2.0
_LATE_REPORT_S = 2.0  # after the end of a request, for D's report on its KV
_MAX_CANARIES = 64
_MAX_COPIES = 1024  # of an answer that count: D refuses more
_CLOSING = known(503, SHUTDOWN.code, _COME_BACK_S)
_CLOSING.headers.append((b"connection", b"close"))


class AdmissionQueue:
    """Queue of the requests that `Gatekeeper` lets wait; the one that waited longest goes first."""

    def __init__(self, keeper: Gatekeeper) -> None:
        self.keeper = keeper
        self._queue: deque[asyncio.Future[bool]] = deque()

    async def enter(self, max_s: float) -> bool:
        """Wait for a place, if need be. Return False if there is none in time, or the queue was closed meanwhile."""
        said = self.keeper.ask()
        if said is Admission.QUEUE:
            return await self._wait(max_s)
        return said is Admission.NOW

    async def _wait(self, max_s: float) -> bool:
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        mine = False
        try:
            await asyncio.wait({turn}, timeout=max_s)
            mine = turn.done() and turn.result()
        finally:
            if not turn.done():
                self._queue.remove(turn)
                self.keeper.give_up()
            elif turn.result() and not mine:
                self.leave()  # its turn came at the moment when it left
        return mine

    def leave(self) -> None:
        if self.keeper.leave():
            self._queue.popleft().set_result(True)

    def close(self) -> None:
        """Refuse all requests that wait."""
        while self._queue:
            self.keeper.give_up()
            self._queue.popleft().set_result(False)


class Front(Shared):
    """Admission and attempts of every client's request."""

    def __init__(
        self, settings: Settings, fleet: Fleet, upstream: Upstream, own_url: str, spans: NoSpans | None = None
    ) -> None:
        super().__init__(settings, fleet, upstream, own_url, spans)
        self.turnstile = AdmissionQueue(Gatekeeper(settings.max_running, settings.max_waiting))
        self.polls = AdmissionQueue(Gatekeeper(settings.max_running, 0))  # for cheap requests: they never wait
        self.canaries = AdmissionQueue(Gatekeeper(_MAX_CANARIES, 0))  # apart: many clients must not stop canaries
        self.closing = False

    async def serve(self, exchange: HttpExchange) -> None:
        """Answer a client's generation, or a canary's."""
        gate = self.turnstile if exchange.pinned is None else self.canaries
        await self.admit(exchange, self._generate, gate)

    async def admit(
        self, exchange: HttpExchange, work: Callable[[HttpExchange], Awaitable[None]], gate: AdmissionQueue
    ) -> None:
        """Do `work` when its turn comes."""
        if self.closing:
            await relay.refuse(exchange, _CLOSING)
        elif not await gate.enter(self.settings.max_wait_s):
            await relay.refuse(exchange, _CLOSING if self.closing else known(429, "PD-META-009", _COME_BACK_S))
        else:
            self.journal.begin(exchange)
            try:
                # Its turn may have come at the moment when the shutdown began.
                await (relay.refuse(exchange, _CLOSING) if self.closing else work(exchange))
            except ShutDown:
                if exchange.streaming:
                    await resuming.break_off(self, exchange, SHUTDOWN)
                else:
                    await relay.refuse(exchange, _CLOSING)
            finally:
                resuming.let_go(self, exchange)
                self.journal.end(exchange)
                gate.leave()

    async def _generate(self, exchange: HttpExchange) -> None:
        with self.spans.request(exchange):
            if self.settings.resume_tokens and exchange.pinned is None:
                resuming.keep(self, exchange)
            follows = exchange.request.follows
            if follows is not None and (home := self._home(follows)) is not None:
                before = home.prompts.upto(follows.end)
                exchange.request = exchange.request.counted(exchange.request.prefill_tokens + before)
            await self._attempts(exchange)

    async def _attempts(self, exchange: HttpExchange) -> None:
        self.budget.request()
        while not exchange.closing:
            exchange.number += 1
            decode = self.decode(exchange)
            if decode is None:
                await self._refuse(exchange, self.no_decode(exchange), "none takes requests")
                return
            try:
                await self._attempt(exchange, decode)
                return
            except AttemptFailed as failed:
                if failed.failure is not HttpFailure.PREFILL:  # a failed prefill was noted where it happened
                    self.journal.trouble(failed.noted, decode.name, exchange.request_id)
                safe = not exchange.request.asks_again  # else tools may have acted
                delay = None if failed.final else self.delay_before_another(exchange, decode, failed.failure, safe)
                if delay is None:
                    await self._refuse(exchange, failed.answer, failed.noted.detail)
                    return
            except StreamBroke as broke:
                if not await self._goes_on(exchange, decode, broke):
                    return
                continue
            await asyncio.sleep(delay)
        raise ShutDown

    async def _refuse(self, exchange: HttpExchange, answer: Answer, why: str) -> None:
        if exchange.streaming:
            await resuming.break_off(self, exchange, known_failure(PdError("PD-META-025", why=why)))
        else:
            await relay.refuse(exchange, answer)

    async def _goes_on(self, exchange: HttpExchange, decode: Instance, broke: StreamBroke) -> bool:
        """Return whether another D is to be asked for the rest; if not, end the stream."""
        kept = exchange.kept
        if kept is None:
            raise RuntimeError("only a stream that is kept breaks this way")
        self.journal.trouble(broke.noted, decode.name, exchange.request_id)
        if kept.finished and not broke.final:
            await resuming.finish(exchange, kept)
            return False
        exchange.before = exchange.number
        exchange.broke_at = exchange.broke_at or time.monotonic()
        try:
            if broke.final:
                raise NotContinued(broke.final)
            came = kept.go_on() if exchange.streaming else True
        except NotContinued as why:
            ended = known_failure(PdError("PD-META-024", problem=broke.noted.detail, why=why))
            await resuming.break_off(self, exchange, ended, decode.name)
            return False
        # To be dropped speaks against no D, and one that has computed some tokens is as good as another.
        if came:
            exchange.tried.clear()
        if not (came and broke.failure is HttpFailure.DROPPED):
            exchange.tried.add(decode.name)
        if not self.fleet.another(Role.DECODE, exchange.tried, self.fleet.serving(exchange.request.model)):
            exchange.tried = {decode.name}  # one that broke before may be another process by now
        exchange.request = structs.replace(exchange.request, prefill_tokens=kept.length)
        exchange.stage("resume", f"after {kept.given} tokens")
        METRICS.resumes.labels(broke.failure.value).inc()
        if kept.given and resume.has_generator(exchange.request):
            METRICS.resumes_reseeded.inc()
        return True

    def delay_before_another(
        self, exchange: HttpExchange, decode: Instance, failure: HttpFailure, repeatable: bool = True
    ) -> float | None:
        """Return the delay before another attempt, on another D if D failed and there is one; None: it was the last.

        What one D refused is for others that have not refused lately: to repeat it would add to an overload.
        """
        if failure is not HttpFailure.PREFILL:
            exchange.tried.add(decode.name)
            if exchange.request.follows is not None and failure is not HttpFailure.DROPPED:
                return None  # no other D has that response
        serves = self.fleet.serving(exchange.request.model)
        refused = failure is HttpFailure.REFUSED and not exchange.streaming
        if refused and not self.fleet.another(Role.DECODE, exchange.tried, serves):
            return None
        delay = self.retry_delay(exchange, failure, exchange.number - exchange.before, repeatable)
        if delay is None:
            return None
        self.repeated(exchange, failure)
        return delay

    def no_decode(self, exchange: HttpExchange) -> Answer:
        """Return the refusal of a request for which there is no D, and note it."""
        if exchange.request.follows is not None:
            return known(404, "PD-META-034")
        self.journal.trouble(Failure("PD-META-008", "no decode instance"), request=exchange.request_id)
        return known(503, "PD-META-008", _COME_BACK_S, role="decode")

    def decode(self, exchange: HttpExchange) -> Instance | None:
        """Return the D for a request's next attempt; None if there is none."""
        if exchange.pinned is not None:
            return exchange.pinned[1]
        request, tried = exchange.request, frozenset(exchange.tried)
        if request.follows is not None:
            return self._home(request.follows)
        cost, marks = request.prefill_tokens + self._expected(request), request.marks
        serves = self.fleet.serving(request.model)
        if not request.remote:
            return self.fleet.choose(Role.DECODE, cost, tried, serves, marks)
        prefills = self.fleet.prefilling(request.model, exchange.prefills)
        return self.fleet.choose_decode(cost, tried, serves, marks, prefills, frozenset(exchange.bad_prefills))

    def _home(self, response: Stored) -> Instance | None:
        """Return the D that has a stored response; None if it is gone."""
        key, decodes = self.settings.engine_token, self.fleet.of(Role.DECODE)
        return next((one for one in decodes if home_of(one.name, key) == response.home), None)

    async def _attempt(self, exchange: HttpExchange, decode: Instance) -> None:
        attempt = Attempt(exchange, decode, restart=exchange.number < self.settings.retry.attempts)
        params = self._params(attempt)
        self.journal.tickets[attempt.ticket] = attempt
        emit("meta.decode", ticket=attempt.ticket, decode=decode.name)
        exchange.stage("decode", decode.name)
        well = False
        try:
            with (
                self._leg(decode, exchange.request) as exchange.call,
                self.spans.leg(exchange, "decode", decode.name, attempt=exchange.number) as headers,
            ):
                attempt.leg = exchange.call
                await relay.decode(self, attempt, params, headers)
            well = True
        finally:
            self._close(attempt, well)

    def _expected(self, request: Request) -> float:
        """Return how many tokens its answers are likely to have together."""
        return min(request.copies, _MAX_COPIES) * self.fleet.expected(request.model, request.stream, request.limit)

    def _leg(self, decode: Instance, request: Request) -> LegInFlight:
        limit = request.limit * request.copies
        return self.fleet.leg(decode, request.prefill_tokens, self._expected(request), limit)

    def _params(self, attempt: Attempt) -> dict[str, Any] | None:
        """Return D's parameters for its prefill; None: it prefills by itself. Raise AttemptFailed."""
        exchange = attempt.exchange
        request = exchange.request
        # How long the conversation is that it follows on, D says with its reservation.
        follows = request.follows is not None
        there = attempt.decode.cached_tokens(request.marks) if follows else attempt.decode.sent(request.marks)
        if not request.remote:
            return None
        params: dict[str, Any] = {"do_remote_prefill": True, "metaserver": self.own_url, "ticket": attempt.ticket}
        fits = both(self.fleet.prefilling(request.model, exchange.prefills), pairing(attempt.decode.fingerprint))
        usable, local = self.fleet.usable(Role.PREFILL, fits), self.settings.without_prefill == "local"
        # Without a P the load fails, and it is for D whether it computes prompt and answer: that is tried once, and
        # again where to begin anew would be another answer.
        first = exchange.number == exchange.before + 1
        tried = usable or (local and (first or resume.is_sampled(request)))
        if exchange.kept is not None and exchange.kept.given and tried:
            return params | {"send_tokens": True, CONTINUE: True}
        alone = self.settings.decode_alone
        short = request.prefill_tokens - there <= alone and (there or not follows)
        if alone and exchange.pinned is None and short:
            why = "short" if request.prefill_tokens <= alone else "cached"
            METRICS.decode_alone.labels(why).inc()
            exchange.stage("alone", why)
            return None
        if exchange.prefills is not None and not exchange.prefills:
            METRICS.decode_alone.labels("unnamed").inc()
            exchange.stage("alone", "unnamed")
            return None
        if exchange.pinned is None and not usable:
            if not local:
                refusal = known(503, "PD-META-008", _COME_BACK_S, role="prefill")
                raise AttemptFailed(HttpFailure.REFUSED, refusal, Failure("PD-META-008", "no prefill instance"))
            METRICS.decode_alone.labels("no prefill").inc()
            exchange.stage("local", "no prefill instance that fits")
            return None
        if request.send_tokens:
            params["send_tokens"] = True
        # An earlier prefill may have failed because of the first token; without it D can use any P.
        if not exchange.bad_prefills and self.fleet.all_send_first(
            fits if exchange.pinned is None else among(frozenset((exchange.pinned[0].name,)))
        ):
            params["first_token"] = True
        return params

    def _close(self, attempt: Attempt, well: bool) -> None:
        """End the attempt. A prefill in progress is cut; after a good end it first gets some time to finish."""
        self.journal.close(attempt)
        if attempt.watch is not None:
            attempt.watch.cancel()
        for transfer in attempt.transfers.values():  # if D never reports, another request tries that P
            if transfer.trial is not None:
                asyncio.get_running_loop().call_later(_LATE_REPORT_S, transfer.trial.returned)
        if not attempt.posts:
            return
        if well:
            asyncio.get_running_loop().call_later(_LATE_PREFILL_S, attempt.cancel_posts)
        else:
            attempt.cancel_posts()

    def lacks(self) -> list[str]:
        """Return what is missing for clients' requests to be served; nothing: they are."""
        if self.closing:
            return ["it shuts down"]
        needs_prefill = self.settings.without_prefill == "refuse" and not self.settings.sidecar
        roles = (Role.DECODE, Role.PREFILL) if needs_prefill else (Role.DECODE,)
        return [f"no {role.value} instance is usable" for role in roles if not self.fleet.serves(role)]

    async def drain(self) -> None:
        """Take no new requests, let those in progress finish, and cut what is left after the grace period."""
        self.closing = True
        self.turnstile.close()
        end = time.monotonic() + self.settings.grace_s
        while self.journal.exchanges and time.monotonic() < end:
            await asyncio.sleep(0.05)
        for exchange in tuple(self.journal.exchanges):
            exchange.close()
