# SPDX-License-Identifier: Apache-2.0
"""Answers that another D can go on with: what is kept of one, its relay, and its end if no other D can go on.

`Front` makes the attempts. For a stream that broke it makes one more, with the same body, for a client that has seen a
part of the answer. `router/core/resume.py` decides what is kept, and what of a later D's stream goes out.
"""

from __future__ import annotations

import time

import msgspec

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.router.core import resume
from vllm_ascend_pd.router.core.accumulated import NotContinued
from vllm_ascend_pd.router.core.blocks import TOKENS_EVENT, BlockStream
from vllm_ascend_pd.router.core.bodies import MESSAGES, RESPONSES
from vllm_ascend_pd.router.core.decisions import Evidence
from vllm_ascend_pd.router.core.ends import LegEnd, StreamBroke, decode_failed, known_failure
from vllm_ascend_pd.router.core.resume import Cut, StreamState
from vllm_ascend_pd.router.exchange import Attempt, HttpExchange
from vllm_ascend_pd.router.faults import error_frame
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.shared import Shared
from vllm_ascend_pd.router.upstream import Reply
from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError

REPORT_OF_LOAD_S = 2.0  # D reports a failed load before it answers; the two may overtake each other
LACKED_BLOCKS = known_failure(PdError("PD-META-022"))
_EVENT_BYTES = 16 << 20  # the first event has the ids of the prompt


def differs(why: str) -> StreamBroke:
    """Return the end of a stream with which another D does not go on as the first one began."""
    return StreamBroke(HttpFailure.BROKEN, decode_failed("The decode instance broke off."), why)


def broke_off(why: str) -> Failure:
    return decode_failed(f"The decode instance broke off: {why}.")


def keep(shared: Shared, exchange: HttpExchange) -> None:
    """Prepare an answer to go on elsewhere, if it can: D is asked for token ids from the start."""
    settings, request = shared.settings, exchange.request
    exchange.unkept = resume.refusal(request)
    if request.prefill_tokens > settings.resume_tokens:
        exchange.unkept = f"its prompt has more than {settings.resume_tokens} tokens"
    elif resume.has_generator(request) and not settings.resume_seeded:
        exchange.unkept = "it has a seed, and its random generator would begin anew"
    if exchange.unkept:
        return
    if request.route in (RESPONSES, MESSAGES):
        exchange.kept = BlockStream(request, settings.resume_tokens)
        return
    exchange.kept = StreamState(request, settings.resume_tokens)
    fields = {**request.fields, "return_token_ids": msgspec.Raw(b"true")}
    exchange.request = msgspec.structs.replace(request, fields=fields)


def let_go(shared: Shared, exchange: HttpExchange) -> None:
    """Free what is kept of a stream."""
    shared.kept_bytes -= exchange.kept_bytes
    exchange.kept_bytes, exchange.kept = 0, None


def count(shared: Shared, exchange: HttpExchange, kept: StreamState) -> None:
    """Count the memory of what is kept, and give it up where there is too much of it."""
    size = kept.size
    shared.kept_bytes += size - exchange.kept_bytes
    exchange.kept_bytes = size
    if shared.kept_bytes > shared.settings.resume_bytes:
        kept.give_up("too much is kept for other streams")


async def relay(shared: Shared, attempt: Attempt, kept: StreamState, reply: Reply, first: bytes) -> None:
    """Relay D's answer, or the rest of it. Raise StreamBroke."""
    exchange = attempt.exchange
    try:
        await _relay(shared, attempt, kept, reply, first)
    except UpstreamError as broken:
        if not attempt.answers and broken.failure is HttpFailure.TIMEOUT and attempt.posts:
            attempt.leg.end = LegEnd.NO_PREFILL  # P has not answered, so D may only wait for it
        else:
            shared.leg_over(attempt.leg, LegEnd.SERVED if kept.done else LegEnd.BROKE, Evidence.BROKE, broken.why)
        if not kept.done:
            raise StreamBroke(HttpFailure.BROKEN, broke_off(broken.why)) from broken
        await _end(exchange)  # its last event is out: nothing may follow it
    except NotContinued as why:
        shared.leg_over(attempt.leg, LegEnd.BROKE)
        raise differs(str(why)) from why
    if kept.done:
        return
    if kept.cut is Cut.DROPPED:
        shared.leg_over(attempt.leg, LegEnd.DROPPED)
        raise StreamBroke(HttpFailure.DROPPED, LACKED_BLOCKS)
    said = kept.cut.value if kept.cut is not None else "its answer has no end"
    if kept.cut is Cut.ABORTED:  # it shuts down, which is no evidence against it
        shared.leg_over(attempt.leg, LegEnd.ENDED)
        raise StreamBroke(HttpFailure.ENDED, broke_off(said))
    if kept.cut is Cut.FAILED and not attempt.answers:  # perhaps only because its load failed
        await attempt.wait_reported(attempt.explained, REPORT_OF_LOAD_S)
        shared.accuse(attempt, said)
        attempt.leg.end = LegEnd.NO_PREFILL if attempt.load_failed else LegEnd.BROKE
    else:
        shared.leg_over(attempt.leg, LegEnd.BROKE, Evidence.BROKE, said)
    raise StreamBroke(HttpFailure.BROKEN, broke_off(said))


async def _relay(shared: Shared, attempt: Attempt, kept: StreamState, reply: Reply, first: bytes) -> None:
    exchange = attempt.exchange
    piece, tail, send = first, b"", exchange.send
    while piece:
        whole, tail = _bounded_events(tail + piece if tail else piece)
        attempt.leg.take(whole.count(b"\n\n") - whole.count(TOKENS_EVENT))
        said = kept.take(whole) if whole else b""
        count(shared, exchange, kept)
        if kept.gave_up:
            exchange.forget_prompt()
        if not attempt.answers and (kept.moved or kept.gave_up):  # what it was given before says nothing of D
            attempt.answers = True
            shared.leg_over(attempt.leg, LegEnd.SERVED, Evidence.SERVED)
        if said and exchange.broke_at:
            METRICS.resume_seconds.observe(time.monotonic() - exchange.broke_at)
            exchange.broke_at = 0.0
        if kept.done and not tail and reply.at_end:
            await _end(exchange, said)
            return
        if said:
            await send({"type": "http.response.body", "body": said, "more_body": True})
            exchange.said_all = kept.done
        if kept.cut is not None:
            return
        piece = await reply.read(None if attempt.answers else shared.settings.first_byte_timeout_s)
    if kept.done:
        await _end(exchange)


async def _end(exchange: HttpExchange, last: bytes = b"") -> None:
    """Send the end of a kept stream, with what is left to send."""
    exchange.streaming = False
    await exchange.send({"type": "http.response.body", "body": last})


def _bounded_events(stream: bytes) -> tuple[bytes, bytes]:
    """Return the complete events, and the beginning of the next. Raise UpstreamError for one that does not end."""
    end = stream.rfind(b"\n\n") + 2
    if end > 1:
        return stream[:end], stream[end:]
    if len(stream) > _EVENT_BYTES:
        raise UpstreamError(HttpFailure.BROKEN, "an event of its answer does not end")
    return b"", stream


async def finish(exchange: HttpExchange, kept: StreamState) -> None:
    """End a stream whose tokens were all out before D broke off: what is missing is known."""
    exchange.stage("end")
    await _end(exchange, kept.ending())


async def break_off(shared: Shared, exchange: HttpExchange, noted: Failure, decode: str = "") -> None:
    """End a stream that no D continues, with an error."""
    if exchange.said_all:
        await _end(exchange)
        return
    shared.stream_broke(exchange, decode, noted)
    exchange.streaming = False
    number = exchange.kept.number if exchange.kept is not None else 0
    frame = error_frame(noted, exchange.route, number)
    await exchange.send({"type": "http.response.body", "body": frame, "more_body": True})
    await exchange.send({"type": "http.response.body", "body": b""})
