# SPDX-License-Identifier: Apache-2.0
"""`/v1/metaserver`: D posts its reservation, P is asked to prefill, D is notified of the progress.

The answer is a stream of JSON lines: `accepted`, a heartbeat every two seconds, then `prefilled` or `failed`. When D
closes the call, the prefill is cancelled: P sees its connection close and drains.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Container
from functools import partial
from typing import Any, TypeVar

import msgspec

from vllm_ascend_pd.observe.trace import emit
from vllm_ascend_pd.protocol import continuing
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.reports import Fingerprint, read_answer, read_posted
from vllm_ascend_pd.router import resuming
from vllm_ascend_pd.router.core import bodies, pieces
from vllm_ascend_pd.router.core.decisions import Evidence, Role
from vllm_ascend_pd.router.core.ends import LegEnd, PrefillFailed, RequestOver
from vllm_ascend_pd.router.core.pieces import Buffer
from vllm_ascend_pd.router.exchange import AsgiSend, Attempt, AttemptFailed, RoutedTransfer
from vllm_ascend_pd.router.faults import brief, fault, json_answer
from vllm_ascend_pd.router.fleet import Fits, Instance, LegInFlight, both, pairing
from vllm_ascend_pd.router.front import Front
from vllm_ascend_pd.router.intake import NotTaken
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.relay import aborted, send_answer
from vllm_ascend_pd.shared.core.failures import NOT_EXECUTED, HttpFailure, UpstreamError

T = TypeVar("T")
_HEARTBEAT = {"type": "http.response.body", "body": b'{"event":"heartbeat"}\n', "more_body": True}
_HEAD = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
_PREFILL_ANSWER_BYTES = 16 << 20
_MAX_ENVELOPE = 1 << 20  # bytes of D's post beside the prompt; it names a request's blocks
_OF_D = b"x-data-parallel-rank"  # a client names a rank of the engine that answers it, and P may have fewer
_REPORT_OF_PUSH_S = 1.0  # wait for D's report that the KV is there, after P's leg has failed


class ReservationPost(msgspec.Struct):
    """D's post. The sealed `reservation` and the prompt are for P: here they are only passed on."""

    ticket: str
    transfer: str
    reservation: str
    decode: str = ""  # D's incarnation
    fingerprint: Fingerprint = ""  # decides which P's it can pair with
    first_token: dict[str, msgspec.Raw] | None = None  # fields by which P chooses it, if D starts with P's
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    tokens: int = 0  # number of those ids, counted here


_DECODER = msgspec.json.Decoder(ReservationPost)
_OVER = Failure("PD-XFER-002", str(RequestOver()))


class Heartbeats:
    """Sender of heartbeats to all open reservations at once, so that none of them needs a timer."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.open: dict[AsgiSend, asyncio.Task[None] | None] = {}

    def add(self, send: AsgiSend) -> None:
        self.open[send] = None

    def remove(self, send: AsgiSend) -> None:
        beat = self.open.pop(send, None)
        if beat is not None and not beat.done():
            beat.cancel()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._every_s)
            for send, beat in tuple(self.open.items()):
                if beat is None or beat.done():  # a D that does not read gets no second one
                    self.open[send] = loop.create_task(_beat(send), name="heartbeat")


async def _beat(send: AsgiSend) -> None:
    await send(dict(_HEARTBEAT))


class Reservations:
    """The handler of D's POSTs."""

    def __init__(self, front: Front, heartbeats: Heartbeats) -> None:
        self._front = front
        self._heartbeats = heartbeats

    async def answer(self, body: Buffer, send: AsgiSend) -> None:
        """Answer one POST. It is cancelled if D closes it. Raise NotTaken."""
        try:
            posted = await self._front.aside.run(partial(reading, tickets=self._front.journal.tickets), body)
        except (*bodies.UNREADABLE, bodies.BodyError) as problem:
            raise NotTaken(fault(400, f"Not a reservation: {problem}", "PD-META-003")) from problem
        attempt = self._attempt(posted.ticket)
        if posted.transfer in attempt.transfers:
            raise NotTaken(fault(409, "This transfer was posted before.", "PD-META-003"))
        if attempt.exchange.request.shape is bodies.Shape.BATCH and not posted.tokens:
            raise NotTaken(fault(400, "prompt_token_ids are missing.", "PD-META-003"))
        transfer = attempt.transfers[posted.transfer] = RoutedTransfer(posted.transfer, posted=True)
        if posted.decode:
            attempt.decode.history = attempt.decode.history.reported(posted.decode, attempt.began, posted.fingerprint)
        if attempt.exchange.request.follows is not None and posted.tokens:
            attempt.count(posted.tokens)
        emit("meta.reserved", ticket=posted.ticket, transfer=posted.transfer)
        attempt.exchange.stage("reserved", posted.transfer)
        await send({"type": "http.response.start", "status": 200, "headers": _HEAD})
        self._heartbeats.add(send)
        try:
            last = await PostedPrefill(self._front, attempt, transfer, posted).run(send)
        finally:
            self._heartbeats.remove(send)
            transfer.posted = False
        await _line(send, last, more=False)

    async def report(self, body: Buffer, send: AsgiSend) -> None:
        """Take in D's report of a load that is over. Raise NotTaken."""
        if not self._front.loaded(_read(read_posted, body, "a report")):
            raise NotTaken(fault(404, "No request known here has this ticket and transfer.", "PD-XFER-002"))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def so_far(self, body: Buffer, send: AsgiSend) -> None:
        """Answer D's question for the tokens with which its request begins. Raise NotTaken."""
        wanted = _read(continuing.read_wanted, body, "a question")
        attempt = self._attempt(wanted.ticket)
        kept = attempt.exchange.kept
        tokens = kept.tokens(wanted.prompt) if kept is not None else []
        if tokens is None:
            if attempt.exchange.streaming:  # else D begins anew, for a client that has nothing
                attempt.leg.stop(resuming.differs("the prompt is another one there"))
            raise NotTaken(fault(continuing.OTHER_PROMPT, "The prompt is another one.", "PD-META-024"))
        attempt.exchange.stage("given", f"{len(tokens)} tokens")
        await send_answer(send, json_answer(continuing.AnswerSoFar(tokens)))

    def _attempt(self, ticket: str) -> Attempt:
        """Return the attempt with this ticket. Raise NotTaken if it is over."""
        attempt = self._front.journal.tickets.get(ticket)
        if attempt is None:
            says = "No request under way has this ticket: it is over, or its client has left."
            raise NotTaken(fault(continuing.UNKNOWN, says, "PD-XFER-002"))
        return attempt


class PostedPrefill:
    """The prefill for one POST of D: one P after another is asked, until one may have begun."""

    def __init__(self, front: Front, attempt: Attempt, transfer: RoutedTransfer, posted: ReservationPost) -> None:
        self._front, self._attempt, self._exchange = front, attempt, attempt.exchange
        self._transfer, self._posted = transfer, posted

    async def run(self, send: AsgiSend) -> dict[str, str]:
        """Run the prefill and return the last line of the answer."""
        first = ""
        try:
            first = await self._prefill(send)
        except PrefillFailed as failed:
            self._front.journal.trouble(failed.noted, request=self._exchange.request_id)
            if not self._transfer.received:  # else D has the KV: what became of P's answer changes nothing
                self._transfer.failed = True
                self._attempt.news.set()
                self._restart(failed)
                return self._failed(failed.noted, str(failed))
        except (RequestOver, asyncio.CancelledError) as ended:
            last = self._failed(_OVER, _OVER.detail)
            if isinstance(ended, RequestOver):
                return last
            raise
        emit("meta.prefilled", ticket=self._attempt.ticket, transfer=self._transfer.id)
        self._exchange.stage("prefilled", self._transfer.id)
        METRICS.reservations.labels("prefilled").inc()
        return {"event": "prefilled", "first": first} if first else {"event": "prefilled"}

    def _failed(self, noted: Failure, why: str) -> dict[str, str]:
        """Note that there is no prefill. Return the last line of the answer."""
        emit("meta.prefill_failed", ticket=self._attempt.ticket, transfer=self._transfer.id, why=why)
        self._exchange.stage("prefill failed", noted.detail)
        METRICS.reservations.labels("cancelled" if noted.code == _OVER.code else "failed").inc()
        return {"event": "failed", "code": noted.code, "detail": why}

    def _restart(self, cause: PrefillFailed) -> None:
        """Give up the attempt for a new one if another P is there; else D's own policy for failed loads decides.

        D may have the KV although P's answer broke. It reports at once then, so its report is awaited for a moment.
        """
        attempt, exchange, fleet = self._attempt, self._exchange, self._front.fleet
        serves = fleet.prefilling(exchange.request.model, exchange.prefills)
        another = any(map(fleet.has_prefill(frozenset(exchange.bad_prefills), serves), fleet.of(Role.DECODE)))
        if exchange.committed or not attempt.restart or not another or exchange.pinned is not None:
            return
        if exchange.request.asks_again:  # its tools may have acted
            return
        refusal = fault(503, f"Prefill failed: {cause}.", "PD-META-006", retry_after_s=2)
        failed = AttemptFailed(HttpFailure.PREFILL, refusal, cause.noted)
        if attempt.watch is None:
            attempt.watch = asyncio.create_task(self._give_up(failed), name=f"restart of {attempt.ticket}")

    async def _give_up(self, failed: AttemptFailed) -> None:
        await self._attempt.wait_reported(lambda: self._transfer.report is not None, _REPORT_OF_PUSH_S)
        if self._under_way and not self._exchange.committed and not self._transfer.received:
            self._attempt.leg.stop(failed)

    @property
    def _under_way(self) -> bool:
        return self._front.journal.tickets.get(self._attempt.ticket) is self._attempt

    async def _prefill(self, send: AsgiSend) -> str:
        """Run the prefill leg; return P's first token. Raise PrefillFailed, or RequestOver.

        Try another P only if the last one surely did nothing.
        """
        front, exchange, transfer = self._front, self._exchange, self._transfer
        several = exchange.request.shape is bodies.Shape.BATCH
        cost = float(self._posted.tokens if several else exchange.request.prefill_tokens)
        number = 0
        while not transfer.ended:
            number += 1
            prefill = self._choose(cost)
            there = prefill.sent(exchange.request.marks)
            METRICS.prompt_tokens.inc(cost)
            METRICS.prompt_tokens_there.inc(there)
            transfer.prefill, transfer.asked = prefill, time.monotonic()
            await _line(send, {"event": "accepted", "prefill": prefill.name})
            try:
                with front.fleet.leg(prefill, max(1.0, cost - there)) as transfer.leg:
                    first = await self._ask(transfer.leg)
                    transfer.leg.kept = bool(transfer.leg.trial) and self._under_way and transfer.report is None
                return first
            except PrefillFailed as failed:
                exchange.bad_prefills.add(prefill.name)
                if failed.failure not in NOT_EXECUTED:
                    raise
                delay = front.retry_delay(exchange, failed.failure, number)
                another = front.fleet.another(Role.PREFILL, exchange.bad_prefills, self._fits())
                if delay is None or (failed.failure is HttpFailure.REFUSED and not another):
                    raise
                await asyncio.sleep(delay)
                if transfer.ended:
                    break
                if not self._attempt.wants(transfer):
                    raise
                front.repeated(exchange, failed.failure)
        raise RequestOver

    def _fits(self) -> Fits:
        prefilling = self._front.fleet.prefilling(self._exchange.request.model, self._exchange.prefills)
        return both(prefilling, pairing(self._posted.fingerprint))

    def _choose(self, cost: float) -> Instance:
        exchange, fleet, decode = self._exchange, self._front.fleet, self._attempt.decode
        if exchange.pinned is not None:
            return exchange.pinned[0]
        prefill = fleet.choose_prefill(decode, cost, self._fits(), exchange.request.marks, exchange.bad_prefills)
        if prefill is None:
            other = f" that fits {self._posted.fingerprint}" if fleet.usable(Role.PREFILL) else ""
            raise _failed_prefill(HttpFailure.REFUSED, f"no prefill instance{other} is available")
        decode.loads.tried(prefill.name, time.monotonic(), random.random())
        return prefill

    async def _ask(self, leg: LegInFlight) -> str:
        """Ask one P to prefill. Return its first token, sealed for D; empty if it sends none. Raise PrefillFailed."""
        front, posted, prefill = self._front, self._posted, leg.instance
        params: dict[str, Any] = {"do_remote_decode": True, "reservation": posted.reservation}
        ids = posted.prompt_token_ids if posted.tokens else None
        route, body = bodies.for_prefill(self._exchange.request, params, ids, posted.first_token)
        emit("meta.prefill", ticket=posted.ticket, transfer=posted.transfer, prefill=prefill.name)
        self._exchange.stage("prefill", prefill.name)
        timeout, sent = front.settings.prefill_timeout_s, self._transfer.asked
        try:
            with front.spans.leg(self._exchange, "prefill", prefill.name, transfer=posted.transfer) as headers:
                to_p = [(name, value) for name, value in headers if name != _OF_D]
                asking = front.upstream.ask(prefill.origin, "POST", route.encode(), to_p, body, timeout)
                async with leg.attach(asking) as reply:
                    text = await reply.rest(_PREFILL_ANSWER_BYTES, timeout)
        except UpstreamError as problem:
            front.leg_broke(leg, problem)
            self._transfer.blamed = True
            raise _failed_prefill(problem.failure, f"{prefill.name}: {problem.why}") from problem
        METRICS.leg_seconds.labels("prefill").observe(time.monotonic() - sent)
        if reply.status == 200:
            front.leg_over(leg, LegEnd.SERVED)  # without evidence: D's report will say if the KV came
            return _check_push(prefill, text, sent)
        why = f"{prefill.name} answered {reply.status}: {text[:300].decode(errors='replace')}"
        end, said = LegEnd.of(reply.status), brief(reply.status, text)
        noted = Failure("PD-META-006", f"{prefill.name} {said}")
        # Whatever else P answers, the leg has not brought the KV; it is evidence against P only if P failed.
        if end is LegEnd.REFUSED:
            leg.refused()
            raise PrefillFailed(HttpFailure.REFUSED, noted, why)
        self._transfer.blamed = self._transfer.blamed or end is LegEnd.BROKE
        front.leg_over(leg, LegEnd.BROKE, Evidence.BROKE if end is LegEnd.BROKE else None, said)
        raise PrefillFailed(HttpFailure.PREFILL, noted, why)


def _failed_prefill(failure: HttpFailure, why: str) -> PrefillFailed:
    return PrefillFailed(failure, Failure("PD-META-006", why))


def reading(body: Buffer, tickets: Container[str]) -> ReservationPost:
    """Read a reservation. Raise BodyError or msgspec's errors.

    Every client can post, so the prompt is only examined if the ticket is known.
    """
    if len(body) <= pieces.PIECE:
        posted = _DECODER.decode(body)
        ids = memoryview(posted.prompt_token_ids)
    else:
        fields = bodies.fields_of(body)
        ids = memoryview(fields.pop("prompt_token_ids", b""))
        if sum(len(memoryview(value)) for value in fields.values()) > _MAX_ENVELOPE:
            raise msgspec.DecodeError(f"longer than {_MAX_ENVELOPE} bytes beside the prompt")
        posted = _DECODER.decode(msgspec.json.encode(fields))
    posted.prompt_token_ids, posted.tokens = msgspec.Raw(), 0
    if bytes(ids[:5]) in (b"", b"null") or posted.ticket not in tickets:
        return posted
    if bytes(ids[:1]) != b"[" or pieces.holds(ids[1:-1], _no_ids):
        raise msgspec.DecodeError("prompt_token_ids is no list of numbers")
    posted.tokens = pieces.count(ids, b",") + 1 if len(ids) > 2 else 0
    posted.prompt_token_ids = msgspec.Raw(ids)
    return posted


def _no_ids(text: bytes) -> bool:
    return bool(text.translate(None, b"0123456789, \t\r\n"))


def _check_push(prefill: Instance, text: bytes, asked: float) -> str:
    """Return P's first token from its answer. Raise PrefillFailed if P did not push.

    P may answer 200 although it refused to push (another prompt, another model) or ended the request by itself (it
    shuts down): its answer says so.
    """
    if aborted(text):
        raise _failed_prefill(HttpFailure.PREFILL, f"{prefill.name} ended the request: it is shutting down")
    try:
        _, push = read_answer(text)
    except bodies.UNREADABLE as problem:
        raise _failed_prefill(
            HttpFailure.PREFILL, f"{prefill.name}: its answer is not understood ({problem})"
        ) from problem
    if push is None:
        return ""
    prefill.history = prefill.history.reported(push.prefill, asked, push.fingerprint, push.sends_first)
    if push.code:
        raise PrefillFailed(HttpFailure.PREFILL, Failure(push.code, f"{prefill.name}: {push.detail}"))
    return push.first


def _read(read: Callable[[bytes], T], body: Buffer, what: str) -> T:
    """Return a short post. Raise NotTaken if it is none."""
    try:
        return read(bytes(body))
    except bodies.UNREADABLE as problem:
        raise NotTaken(fault(400, f"Not {what}: {problem}", "PD-META-003")) from problem


async def _line(send: AsgiSend, event: dict[str, str], more: bool = True) -> None:
    await send({"type": "http.response.body", "body": msgspec.json.encode(event) + b"\n", "more_body": more})
