# SPDX-License-Identifier: Apache-2.0
"""Streams that another D can continue: what is kept of a stream, its relay, and its end if no other D can go on.

`Front` makes the attempts. For a stream that broke it makes one more, with another request, for a client that has seen
a part of the answer. `router/core/resume.py` decides what is kept and what is sent.
"""

from __future__ import annotations

import time

import msgspec

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.decisions import Evidence
from vllm_ascend_pd.router.core.resumable import NotContinued, resumable_request
from vllm_ascend_pd.router.core.resume import Cut, StreamState
from vllm_ascend_pd.router.exchange import Attempt, HttpExchange
from vllm_ascend_pd.router.faults import error_frame
from vllm_ascend_pd.router.fleet import Instance
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.shared import Shared
from vllm_ascend_pd.router.upstream import Reply
from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError

MAX_TIMES = 8  # that one stream is continued: a request that kills each D must not go on for ever
_EVENT_BYTES = 16 << 20  # the first event has the ids of the prompt
_MODELS_BYTES = 1 << 20
_MODELS_S = 10.0


class StreamBroke(Exception):
    """A kept stream that D broke off. `cause`: label of a metric; `final`: why no other D can continue it, if so."""

    def __init__(self, problem: str, cause: str, code: str = "PD-META-007", final: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.cause = cause
        self.code = code
        self.final = final


async def keep(shared: Shared, exchange: HttpExchange) -> None:
    """Prepare a stream to be continued, if it can be: D is asked for token ids from the start."""
    settings, request = shared.settings, exchange.request
    try:
        if request.prefill_tokens > settings.resume_tokens:
            raise NotContinued(f"its prompt has more than {settings.resume_tokens} tokens")
        original = resumable_request(request, settings.resume_ceiling)
    except NotContinued as why:
        exchange.unkept = str(why)
        return
    exchange.kept = StreamState(original, settings.resume_tokens)
    fields = {**request.fields, "return_token_ids": msgspec.Raw(b"true")}
    exchange.request = msgspec.structs.replace(request, fields=fields)


def let_go(shared: Shared, exchange: HttpExchange) -> None:
    """Free what is kept of a stream."""
    shared.kept_bytes -= exchange.kept_bytes
    exchange.kept_bytes, exchange.kept = 0, None


def _count(shared: Shared, exchange: HttpExchange, kept: StreamState) -> None:
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
        shared.leg_over(attempt.leg, "served" if kept.done else "broke", Evidence.BROKE, broken.why)
        if not kept.done:
            raise StreamBroke(f"The decode instance broke off: {broken.why}.", "broken") from broken
        await _end(exchange)  # its last event is out: nothing may follow it
    except NotContinued as why:
        shared.leg_over(attempt.leg, "broke")
        raise StreamBroke("The decode instance broke off.", "differs", final=str(why)) from why
    if kept.done:
        return
    if kept.cut is Cut.DROPPED:
        shared.leg_over(attempt.leg, "dropped")
        raise StreamBroke(PdError("PD-META-022").sentence, "dropped", "PD-META-022")
    said = kept.cut.value if kept.cut is not None else "its answer has no end"
    problem = f"The decode instance broke off: {said}."
    if kept.cut is Cut.ABORTED:  # it shuts down, which is no evidence against it
        shared.leg_over(attempt.leg, "ended")
        raise StreamBroke(problem, "ended")
    shared.leg_over(attempt.leg, "broke", Evidence.BROKE, said)
    raise StreamBroke(problem, "broken")


async def _relay(shared: Shared, attempt: Attempt, kept: StreamState, reply: Reply, first: bytes) -> None:
    exchange = attempt.exchange
    piece, held, send = first, b"", exchange.send
    while piece:
        whole, held = _bounded_events(held + piece if held else piece)
        attempt.leg.take(whole.count(b"\n\n"))
        said = kept.take(whole) if whole else b""
        _count(shared, exchange, kept)
        if said and exchange.broke_at:
            METRICS.resume_seconds.observe(time.monotonic() - exchange.broke_at)
            exchange.broke_at = 0.0
        if kept.done and not held and reply.at_end:
            await _end(exchange, said)
            return
        if said:
            await send({"type": "http.response.body", "body": said, "more_body": True})
            exchange.said_all = kept.done
        if kept.cut is not None:
            return
        piece = await reply.read()
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


class _Model(msgspec.Struct):
    max_model_len: int | None = None  # of an adapter null: the limit is its model's


class _Models(msgspec.Struct):
    data: list[_Model]


async def room(shared: Shared, exchange: HttpExchange, decode: Instance) -> int:
    """Return how many tokens the model takes in all, by a D's model list. Raise UpstreamError or NotContinued."""
    exchange.call = reply = shared.upstream.ask(decode.origin, "GET", b"/v1/models", exchange.headers, b"", _MODELS_S)
    async with reply:
        said = await reply.rest(_MODELS_BYTES, _MODELS_S)
    return least_room(said)


def least_room(listed: bytes) -> int:
    """Return the lowest limit of tokens in a model list. Raise NotContinued if it has none."""
    try:
        limits = [model.max_model_len for model in msgspec.json.decode(listed, type=_Models).data]
        return min(limit for limit in limits if limit is not None)
    except (*bodies.UNREADABLE, ValueError) as problem:
        raise NotContinued("it names no limit of tokens, and no D reports the model's") from problem


async def finish(exchange: HttpExchange, kept: StreamState) -> None:
    """End a stream whose tokens were all out before D broke off: what is missing is known."""
    exchange.stage("end")
    await _end(exchange, kept.ending())


async def break_off(shared: Shared, exchange: HttpExchange, problem: str, code: str, decode: str = "") -> None:
    """End a stream that no D continues, with an error."""
    if exchange.said_all:
        await _end(exchange)
        return
    shared.stream_broke(exchange, decode, problem, code)
    exchange.streaming = False
    await exchange.send({"type": "http.response.body", "body": error_frame(problem, code), "more_body": True})
    await exchange.send({"type": "http.response.body", "body": b""})
