# SPDX-License-Identifier: Apache-2.0
"""`/v1/metaserver`: D brings its reservation, P is asked to prefill, D hears how it goes.

The answer is a stream of JSON lines: `accepted`, a heartbeat every two seconds, then `prefilled` or `failed`. When D
closes the call, the prefill is cancelled: P sees its connection close and drains.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec

from vllm_ascend_pd.metaserver import bodies
from vllm_ascend_pd.metaserver.decisions import NOT_EXECUTED, Affinity, Evidence, Failure, Role
from vllm_ascend_pd.metaserver.service.exchange import Attempt, AttemptFailed, Exchanges, Send, answer
from vllm_ascend_pd.metaserver.service.faults import Answer, fault
from vllm_ascend_pd.metaserver.service.fleet import Instance
from vllm_ascend_pd.metaserver.service.upstream import UpstreamError
from vllm_ascend_pd.observe.trace import emit

_HEARTBEAT = b'{"event":"heartbeat"}\n'
_PREFILL_ANSWER_BYTES = 16 << 20


class Reservation(msgspec.Struct, frozen=True):
    """What D posts. The envelope is P's to open; here it is only carried."""

    ticket: str
    transfer: str
    reservation: str
    prompt_token_ids: list[int] | None = None


_DECODER = msgspec.json.Decoder(Reservation)


class PrefillFailed(Exception):
    def __init__(self, failure: Failure, why: str) -> None:
        super().__init__(why)
        self.failure = failure


async def reserve(exchanges: Exchanges, body: bytes, send: Send) -> None:
    """Answer one POST of D. Cancelled when D closes it."""
    try:
        posted = _DECODER.decode(body)
    except msgspec.DecodeError as problem:
        await answer(send, fault(400, f"Not a reservation: {problem}", "PD-META-003"))
        return
    attempt = exchanges.attempts.get(posted.ticket)
    refusal = _refusal(attempt, posted)
    if attempt is None or refusal is not None:
        await answer(send, refusal or fault(404, "Unknown ticket."))
        return
    attempt.seen.add(posted.transfer)
    emit("meta.reserved", ticket=posted.ticket, transfer=posted.transfer)
    accepted: asyncio.Queue[str] = asyncio.Queue(16)
    leg = asyncio.create_task(_prefill(exchanges, attempt, posted, accepted), name=f"prefill {posted.transfer}")
    attempt.legs[posted.transfer] = leg
    try:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")],
            }
        )
        await _tell(leg, accepted, exchanges.settings.heartbeat_s, send)
        await _conclude(exchanges, attempt, posted, leg, send)
    finally:
        leg.cancel()
        attempt.legs.pop(posted.transfer, None)


def _refusal(attempt: Attempt | None, posted: Reservation) -> Answer | None:
    if attempt is None:
        return fault(404, "No request under way has this ticket: it is over, or its client has left.", "PD-XFER-002")
    if posted.transfer in attempt.seen:
        return fault(409, "This transfer was posted before.", "PD-META-003")
    if attempt.request.send_tokens and posted.prompt_token_ids is None:
        return fault(400, "prompt_token_ids are missing.", "PD-META-003")
    return None


async def _tell(leg: asyncio.Task[None], accepted: asyncio.Queue[str], heartbeat_s: float, send: Send) -> None:
    """`accepted` for each P that is taken, heartbeats in between, until the leg is over."""
    while not leg.done():
        news = asyncio.create_task(accepted.get())
        both: set[asyncio.Task[Any]] = {leg, news}
        await asyncio.wait(both, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
        if news.done():
            await _line(send, {"event": "accepted", "prefill": news.result()})
            continue
        news.cancel()
        if not leg.done():
            await send({"type": "http.response.body", "body": _HEARTBEAT, "more_body": True})


async def _conclude(
    exchanges: Exchanges, attempt: Attempt, posted: Reservation, leg: asyncio.Task[None], send: Send
) -> None:
    if leg.cancelled():
        problem: BaseException | None = PrefillFailed(Failure.PREFILL, "the client has left or D gave up")
        code = "PD-XFER-002"
    else:
        problem, code = leg.exception(), "PD-META-006"
    if problem is None:
        emit("meta.prefilled", ticket=posted.ticket, transfer=posted.transfer)
        await _line(send, {"event": "prefilled"}, last=True)
        return
    if not isinstance(problem, PrefillFailed):
        raise problem
    emit("meta.prefill_failed", ticket=posted.ticket, transfer=posted.transfer, why=str(problem))
    await _line(send, {"event": "failed", "code": code, "detail": str(problem)}, last=True)
    another = exchanges.fleet.usable(Role.PREFILL, frozenset(attempt.bad_prefills))
    if not leg.cancelled() and attempt.may_restart and another:
        refusal = fault(503, f"Prefill failed: {problem}.", code, retry_after_s=2)
        attempt.give_up(AttemptFailed(Failure.PREFILL, refusal))


async def _prefill(exchanges: Exchanges, attempt: Attempt, posted: Reservation, accepted: asyncio.Queue[str]) -> None:
    """The prefill leg; tries another P only where this one surely did nothing. Raises PrefillFailed."""
    policy = exchanges.settings.retry
    cost = _cost(attempt, posted)
    number = 0
    while True:
        number += 1
        affinity = Affinity(attempt.request.affinity) if exchanges.settings.affinity else None
        prefill = exchanges.fleet.choose(Role.PREFILL, cost, frozenset(attempt.bad_prefills), affinity)
        if prefill is None:
            raise PrefillFailed(Failure.REFUSED, "no prefill instance is available")
        if not accepted.full():
            accepted.put_nowait(prefill.name)
        try:
            with exchanges.fleet.leg(prefill, cost):
                await _ask(exchanges, attempt, posted, prefill)
            return
        except PrefillFailed as failed:
            attempt.bad_prefills.add(prefill.name)
            if failed.failure not in NOT_EXECUTED:
                raise
            delay = policy.again(failed.failure, number, False, exchanges.budget, random.random())
            if delay is None:
                raise
        await asyncio.sleep(delay)


def _cost(attempt: Attempt, posted: Reservation) -> float:
    return len(posted.prompt_token_ids) if posted.prompt_token_ids is not None else attempt.request.prefill_tokens


async def _ask(exchanges: Exchanges, attempt: Attempt, posted: Reservation, prefill: Instance) -> None:
    params: dict[str, Any] = {"do_remote_decode": True, "reservation": posted.reservation}
    route, body = bodies.for_prefill(attempt.request, params, posted.prompt_token_ids)
    emit("meta.prefill", ticket=posted.ticket, transfer=posted.transfer, prefill=prefill.name)
    timeout = exchanges.settings.prefill_timeout_s
    try:
        reply = await exchanges.upstream.send("POST", prefill.base + route, attempt.headers, body, timeout)
        try:
            text = await reply.rest(_PREFILL_ANSWER_BYTES, timeout)
        finally:
            reply.close()
    except UpstreamError as problem:
        evidence = Evidence.PROBE_FAILED if problem.failure in NOT_EXECUTED else Evidence.BROKE
        exchanges.fleet.seen(prefill, evidence, problem.why)
        raise PrefillFailed(problem.failure, f"{prefill.name}: {problem.why}") from problem
    if reply.status == 200:
        exchanges.fleet.seen(prefill, Evidence.SERVED)
        return
    why = f"{prefill.name} answered {reply.status}: {text[:300].decode(errors='replace')}"
    if reply.status in (429, 503):
        raise PrefillFailed(Failure.REFUSED, why)
    if reply.status >= 500:
        exchanges.fleet.seen(prefill, Evidence.BROKE, why)
    raise PrefillFailed(Failure.PREFILL, why)


async def _line(send: Send, event: dict[str, str], last: bool = False) -> None:
    await send({"type": "http.response.body", "body": msgspec.json.encode(event) + b"\n", "more_body": not last})
