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
from vllm_ascend_pd.protocol.reports import Fingerprint, read_answer, read_posted
from vllm_ascend_pd.router import resuming
from vllm_ascend_pd.router.core import bodies, pieces
from vllm_ascend_pd.router.core.decisions import Evidence, Role
from vllm_ascend_pd.router.core.pieces import Buffer
from vllm_ascend_pd.router.exchange import AsgiSend, Attempt, AttemptFailed, Post, RequestOver
from vllm_ascend_pd.router.faults import brief, fault, json_answer
from vllm_ascend_pd.router.fleet import Fits, Instance, LegInFlight, both, pairing
from vllm_ascend_pd.router.front import Front
from vllm_ascend_pd.router.intake import NotTaken
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.relay import aborted, send_answer
from vllm_ascend_pd.router.shared import leg_end
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


class PrefillFailed(Exception):
    """A failed prefill leg. `brief`: for the status page, without P's own text."""

    def __init__(self, failure: HttpFailure, why: str, code: str = "PD-META-006", brief: str = "") -> None:
        super().__init__(why)
        self.failure = failure
        self.code = code
        self.brief = brief or why


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
        if posted.transfer in attempt.seen:
            raise NotTaken(fault(409, "This transfer was posted before.", "PD-META-003"))
        if attempt.exchange.request.shape is bodies.Shape.BATCH and not posted.tokens:
            raise NotTaken(fault(400, "prompt_token_ids are missing.", "PD-META-003"))
        attempt.seen.add(posted.transfer)
        if posted.decode:
            attempt.decode.life = attempt.decode.life.reported(posted.decode, attempt.began, posted.fingerprint)
        if attempt.exchange.request.follows is not None and posted.tokens:
            attempt.count(posted.tokens)
        post = attempt.posts[posted.transfer] = Post()
        emit("meta.reserved", ticket=posted.ticket, transfer=posted.transfer)
        attempt.exchange.stage("reserved", posted.transfer)
        await send({"type": "http.response.start", "status": 200, "headers": _HEAD})
        self._heartbeats.add(send)
        try:
            last = await self._prefilled(attempt, posted, post, send)
        finally:
            self._heartbeats.remove(send)
            attempt.posts.pop(posted.transfer, None)
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

    async def _prefilled(self, attempt: Attempt, posted: ReservationPost, post: Post, send: AsgiSend) -> dict[str, str]:
        """Run the prefill and return the last line of the answer."""
        code, why, reason, first = "PD-META-006", "", "", ""
        try:
            first = await self._prefill(attempt, posted, post, send)
        except PrefillFailed as failed:
            self._front.journal.trouble(failed.code, failed.brief, request=attempt.exchange.request_id)
            if not attempt.received(posted.transfer):  # else D has the KV: what became of P's answer changes nothing
                code, why, reason = failed.code, str(failed), failed.brief
                attempt.failed.add(posted.transfer)
                attempt.news.set()
                self._restart(attempt, posted.transfer, why)
        except RequestOver as over:
            code, why, reason = "PD-XFER-002", str(over), str(over)
        except asyncio.CancelledError:
            _note_failure(attempt, posted, "cancelled", str(RequestOver()), str(RequestOver()))
            raise
        if why:
            _note_failure(attempt, posted, "cancelled" if code == "PD-XFER-002" else "failed", why, reason)
            return {"event": "failed", "code": code, "detail": why}
        emit("meta.prefilled", ticket=posted.ticket, transfer=posted.transfer)
        attempt.exchange.stage("prefilled", posted.transfer)
        METRICS.reservations.labels("prefilled").inc()
        return {"event": "prefilled", "first": first} if first else {"event": "prefilled"}

    def _restart(self, attempt: Attempt, transfer: str, why: str) -> None:
        """Give up the attempt for a new one if another P is there; else D's own policy for failed loads decides.

        D may have the KV although P's answer broke. It reports at once then, so its report is awaited for a moment.
        """
        exchange = attempt.exchange
        fleet = self._front.fleet
        serves = fleet.prefilling(exchange.request.model, exchange.prefills)
        another = any(map(fleet.has_prefill(frozenset(exchange.bad_prefills), serves), fleet.of(Role.DECODE)))
        if exchange.committed or not attempt.restart or not another or exchange.pinned is not None:
            return
        if exchange.request.asks_again:  # its tools may have acted
            return
        refusal = fault(503, f"Prefill failed: {why}.", "PD-META-006", retry_after_s=2)
        failed = AttemptFailed(HttpFailure.PREFILL, refusal)
        if attempt.watch is None:
            watch = self._give_up(attempt, transfer, failed)
            attempt.watch = asyncio.create_task(watch, name=f"restart of {attempt.ticket}")

    async def _give_up(self, attempt: Attempt, transfer: str, failed: AttemptFailed) -> None:
        await attempt.wait_reported(lambda: transfer in attempt.reports, _REPORT_OF_PUSH_S)
        current = self._front.journal.tickets.get(attempt.ticket) is attempt
        if current and not attempt.exchange.committed and not attempt.received(transfer):
            attempt.leg.stop(failed)

    async def _prefill(self, attempt: Attempt, posted: ReservationPost, post: Post, send: AsgiSend) -> str:
        """Run the prefill leg; return P's first token. Raise PrefillFailed, or RequestOver.

        Try another P only if the last one surely did nothing.
        """
        front, exchange = self._front, attempt.exchange
        several = exchange.request.shape is bodies.Shape.BATCH
        cost = float(posted.tokens if several else exchange.request.prefill_tokens)
        number = 0
        while not post.over:
            number += 1
            prefill = self._choose(attempt, posted, cost)
            there = prefill.sent(exchange.request.marks)
            METRICS.prompt_tokens.inc(cost)
            METRICS.prompt_tokens_there.inc(there)
            attempt.sources[posted.transfer] = prefill, time.monotonic()
            await _line(send, {"event": "accepted", "prefill": prefill.name})
            try:
                with front.fleet.leg(prefill, max(1.0, cost - there)) as leg:
                    post.leg = leg
                    first = await self._ask(attempt, posted, leg)
                    awaited = front.journal.tickets.get(posted.ticket) is attempt
                    if leg.trial and awaited and posted.transfer not in attempt.reports:
                        attempt.trials[posted.transfer], leg.kept = leg, True
                return first
            except PrefillFailed as failed:
                exchange.bad_prefills.add(prefill.name)
                if failed.failure not in NOT_EXECUTED:
                    raise
                delay = front.again(exchange, failed.failure, number)
                if failed.failure is HttpFailure.REFUSED and not self._another(attempt, posted):
                    raise
                if delay is None:
                    raise
                await asyncio.sleep(delay)
                if post.over:
                    break
                if not attempt.wants(posted.transfer):
                    raise
                front.repeated(exchange, failed.failure)
        raise RequestOver

    def _fits(self, attempt: Attempt, posted: ReservationPost) -> Fits:
        exchange, fleet = attempt.exchange, self._front.fleet
        return both(fleet.prefilling(exchange.request.model, exchange.prefills), pairing(posted.fingerprint))

    def _another(self, attempt: Attempt, posted: ReservationPost) -> bool:
        """Return whether a P is left that may not refuse."""
        fits = self._fits(attempt, posted)
        return self._front.fleet.another(Role.PREFILL, attempt.exchange.bad_prefills, fits)

    def _choose(self, attempt: Attempt, posted: ReservationPost, cost: float) -> Instance:
        exchange, front = attempt.exchange, self._front
        if exchange.pinned is not None:
            return exchange.pinned[0]
        fits, marks = self._fits(attempt, posted), exchange.request.marks
        prefill = front.fleet.choose_prefill(attempt.decode, cost, fits, marks, exchange.bad_prefills)
        if prefill is None:
            other = f" that fits {posted.fingerprint}" if front.fleet.usable(Role.PREFILL) else ""
            raise PrefillFailed(HttpFailure.REFUSED, f"no prefill instance{other} is available")
        attempt.decode.loads.tried(prefill.name, time.monotonic(), random.random())
        return prefill

    async def _ask(self, attempt: Attempt, posted: ReservationPost, leg: LegInFlight) -> str:
        """Ask one P to prefill. Return its first token, sealed for D; empty if it sends none. Raise PrefillFailed."""
        front, exchange, prefill = self._front, attempt.exchange, leg.instance
        params: dict[str, Any] = {"do_remote_decode": True, "reservation": posted.reservation}
        ids = posted.prompt_token_ids if posted.tokens else None
        route, body = bodies.for_prefill(exchange.request, params, ids, posted.first_token)
        emit("meta.prefill", ticket=posted.ticket, transfer=posted.transfer, prefill=prefill.name)
        exchange.stage("prefill", prefill.name)
        timeout, sent = front.settings.prefill_timeout_s, attempt.sources[posted.transfer][1]
        try:
            with front.spans.leg(exchange, "prefill", prefill.name, transfer=posted.transfer) as headers:
                to_p = [(name, value) for name, value in headers if name != _OF_D]
                asking = front.upstream.ask(prefill.origin, "POST", route.encode(), to_p, body, timeout)
                async with leg.attach(asking) as reply:
                    text = await reply.rest(_PREFILL_ANSWER_BYTES, timeout)
        except UpstreamError as problem:
            front.leg_broke(leg, problem)
            attempt.blamed.add(posted.transfer)
            raise PrefillFailed(problem.failure, f"{prefill.name}: {problem.why}") from problem
        METRICS.leg_seconds.labels("prefill").observe(time.monotonic() - sent)
        if reply.status == 200:
            front.leg_over(leg, "served")  # without evidence: D's report will say if the KV came
            return _check_push(prefill, text, sent)
        why = f"{prefill.name} answered {reply.status}: {text[:300].decode(errors='replace')}"
        end, said = leg_end(reply.status), brief(reply.status, text)
        refused, failed = end == "refused", end == "broke"
        # Whatever else P answers, the leg has not brought the KV; it is evidence against P only if P failed.
        if refused:
            leg.refused()
        else:
            front.leg_over(leg, "broke", Evidence.BROKE if failed else None, said)
        if failed:
            attempt.blamed.add(posted.transfer)
        failure = HttpFailure.REFUSED if refused else HttpFailure.PREFILL
        raise PrefillFailed(failure, why, brief=f"{prefill.name} {said}")


def _note_failure(attempt: Attempt, posted: ReservationPost, end: str, why: str, reason: str) -> None:
    emit("meta.prefill_failed", ticket=posted.ticket, transfer=posted.transfer, why=why)
    attempt.exchange.stage("prefill failed", reason)
    METRICS.reservations.labels(end).inc()


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
        raise PrefillFailed(HttpFailure.PREFILL, f"{prefill.name} ended the request: it is shutting down")
    try:
        _, push = read_answer(text)
    except bodies.UNREADABLE as problem:
        raise PrefillFailed(
            HttpFailure.PREFILL, f"{prefill.name}: its answer is not understood ({problem})"
        ) from problem
    if push is None:
        return ""
    prefill.life = prefill.life.reported(push.prefill, asked, push.fingerprint, push.sends_first)
    if push.code:
        raise PrefillFailed(HttpFailure.PREFILL, f"{prefill.name}: {push.detail}", push.code)
    return push.first


def _read(read: Callable[[bytes], T], body: Buffer, what: str) -> T:
    """Return a short post. Raise NotTaken if it is none."""
    try:
        return read(bytes(body))
    except bodies.UNREADABLE as problem:
        raise NotTaken(fault(400, f"Not {what}: {problem}", "PD-META-003")) from problem


async def _line(send: AsgiSend, event: dict[str, str], more: bool = True) -> None:
    await send({"type": "http.response.body", "body": msgspec.json.encode(event) + b"\n", "more_body": more})
