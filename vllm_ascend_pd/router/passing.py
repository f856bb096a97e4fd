# SPDX-License-Identifier: Apache-2.0
"""Every other `/v1/*` route: passed to a D as it is, without `kv_transfer_params`, and its answer passed back.

A stored response comes from the D that has it. Such a request waits for admission, is shown on the status page and is
drained like a generation. Only a request that an engine must compute says anything about the engine: a wedged one still
lists its models.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from msgspec import structs

from vllm_ascend_pd.router import models
from vllm_ascend_pd.router.aside import AT_ONCE
from vllm_ascend_pd.router.core import bodies, stored
from vllm_ascend_pd.router.core.decisions import Evidence, Role
from vllm_ascend_pd.router.core.ends import LegEnd, ShutDown, decode_failed
from vllm_ascend_pd.router.core.pieces import Buffer
from vllm_ascend_pd.router.exchange import HttpExchange
from vllm_ascend_pd.router.fleet import LegInFlight
from vllm_ascend_pd.router.front import Front
from vllm_ascend_pd.router.intake import CallerRequest
from vllm_ascend_pd.router.relay import client_head, no_answer, refuse, send_whole, stripped_of
from vllm_ascend_pd.router.shared import SHUTDOWN
from vllm_ascend_pd.router.upstream import Reply
from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError
from vllm_ascend_pd.shared.core.gathered import Payload

OTHER = "/v1/*"  # one name for all paths that are not known here: a client must not make new label values
_COMPUTED = frozenset(
    (
        *("/v1/chat/completions/batch", "/v1/embeddings", "/v1/score", "/v1/rerank"),
        *("/v1/audio/transcriptions", "/v1/audio/translations"),
    )
)
_NAMED = _COMPUTED | {models.ROUTE, *bodies.ROUTES}
_EXECUTED_AND_FAILED = (500, 502, 504)  # 501: not for this model; 503: shutting down


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is passed on, without its headers."""

    method: str
    path: str
    target: bytes  # path and query as they came: decoded they could hold a line end
    body: bytes | memoryview = b""
    model: str = ""  # that it is for, if that matters and is known

    @property
    def route(self) -> str:
        return self.path if self.path in _NAMED else OTHER

    @property
    def repeatable(self) -> bool:
        """True if it may be repeated on another D. Any other may be only if it surely was not executed."""
        return self.method in ("GET", "HEAD", "OPTIONS")

    @property
    def cheap(self) -> bool:
        """True if it costs D nothing and is polled: it does not wait and is not kept among the last requests."""
        return self.method == "OPTIONS" or (self.repeatable and (self.path + "/").startswith(models.ROUTE + "/"))

    @property
    def lists(self) -> bool:
        return self.method == "GET" and self.path == models.ROUTE

    def evidence(self, status: int) -> Evidence | None:
        """Return what an answer with this status says about the engine; None if nothing."""
        if self.method != "POST" or self.path not in _COMPUTED:
            return None
        if status in _EXECUTED_AND_FAILED:
            return Evidence.BROKE
        return Evidence.SERVED if 200 <= status < 300 else None

    def request(self) -> bodies.Request:
        """Return it as the journal keeps it."""
        one = bodies.Request(self.route, {}, 0, False, bodies.Shape.ONE, 1, 0, 1, False, False, self.model, ())
        return structs.replace(one, follows=stored.of_path(self.path))


def is_canonical(target: bytes) -> bool:
    """Return whether its path, once decoded, has no backslash, no empty segment, no "." and no "..".

    An engine could take another route then. It is the very target that is forwarded.
    """
    path = unquote_to_bytes(target.partition(b"?")[0])
    return b"\\" not in path and not {b"", b".", b".."} & set(path.removesuffix(b"/").split(b"/")[1:])


def call_of(asked: CallerRequest, stripped: bytes | memoryview = b"", model: str = "") -> Call:
    return Call(asked.method, asked.path, asked.target, stripped, model)


def model_of(path: str, body: Buffer) -> str:
    """Return the model that a call is for; empty if neither path nor JSON names it (a form with audio does not)."""
    if path.startswith(models.ROUTE + "/"):
        return path.removeprefix(models.ROUTE + "/")
    try:
        return bodies.model_of(bodies.fields_of(body))
    except bodies.BodyError:
        return ""


async def pass_on(front: Front, exchange: HttpExchange, call: Call) -> None:
    async def work(exchange: HttpExchange) -> None:
        await _attempts(front, exchange, call)

    exchange.remembered = not call.cheap
    await front.admit(exchange, work, front.polls if call.cheap else front.turnstile)


async def _attempts(front: Front, exchange: HttpExchange, call: Call) -> None:
    while not exchange.closing:
        exchange.number += 1
        decode = front.decode(exchange)
        if decode is None:
            await refuse(exchange, front.no_decode(exchange))
            return
        exchange.stage("decode", decode.name)
        with front.fleet.leg(decode, 1) as leg:
            exchange.call = leg
            try:
                asking = front.upstream.ask(
                    *(decode.origin, call.method, call.target, exchange.headers, call.body),
                    *(front.settings.first_byte_timeout_s, call.repeatable),
                )
                async with leg.attach(asking) as reply:
                    first = await _first(front, call, reply)
                    delay = None
                    if LegEnd.of(reply.status) is LegEnd.REFUSED:
                        leg.refused()
                        delay = front.delay_before_another(exchange, decode, HttpFailure.REFUSED, call.repeatable)
                    body = await _whole(front, call, reply, first) if delay is None and reply.status == 200 else None
                    if body is not None:
                        exchange.committed, exchange.status = True, 200
                        head = client_head([(b"content-type", b"application/json")], decode, exchange.request_id)
                        await send_whole(exchange.send, 200, head, body)
                        exchange.stage("end")
                        front.leg_over(leg, LegEnd.SERVED)
                        return
                    if delay is None:
                        await _relay(front, exchange, leg, reply, first, call)
                        return
            except UpstreamError as problem:
                if front.is_late(leg, problem):
                    front.journal.trouble(decode_failed(problem.why), decode.name, exchange.request_id)
                    await refuse(exchange, no_answer(problem))
                    return
                front.leg_broke(leg, problem, exchange.request_id)
                delay = front.delay_before_another(exchange, decode, problem.failure, call.repeatable)
                if delay is None:
                    await refuse(exchange, no_answer(problem))
                    return
        await asyncio.sleep(delay)
    raise ShutDown


async def _whole(front: Front, call: Call, reply: Reply, first: bytes) -> Payload | None:
    """Return what takes the place of D's answer, if anything does."""
    if call.lists and front.fleet.several_models:  # this D has accepted the key, and does not know what others serve
        return models.listed(front.fleet.of(Role.DECODE))
    size = next((int(value) for name, value in reply.headers if name == b"content-length"), AT_ONCE)
    # D's report is still in what it has stored. A long one goes out as it comes: many callers may read it slowly.
    if call.path.startswith(bodies.RESPONSES + "/") and first[:1] == b"{" and size < AT_ONCE:
        return stripped_of(first + await reply.rest(AT_ONCE))[0]
    return None


async def _first(front: Front, call: Call, reply: Reply) -> bytes:
    """Return the first piece of the answer. Until then the client sees nothing, and another D can be asked."""
    first = await reply.read(front.settings.first_byte_timeout_s)
    if not first and reply.status == 200 and call.method in ("GET", "POST"):
        raise UpstreamError(HttpFailure.EMPTY, "its answer was empty")
    return first


async def _relay(
    front: Front, exchange: HttpExchange, leg: LegInFlight, reply: Reply, first: bytes, call: Call
) -> None:
    """Relay the answer. No error can be sent after the head: the server cuts an answer that has no end."""
    seen, decode = call.evidence(reply.status), leg.instance
    send, answered = exchange.send, f"{call.route} answered {reply.status}"
    exchange.committed, exchange.status = True, reply.status
    exchange.stage("first byte")
    head = client_head(reply.headers, decode, exchange.request_id)
    head += [(name, value) for name, value in reply.headers if name == b"content-length"]
    await send({"type": "http.response.start", "status": reply.status, "headers": head})
    try:
        piece = first
        while piece:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await reply.read()
    except UpstreamError as problem:
        front.leg_broke(leg, problem)
        front.stream_broke(exchange, decode.name, decode_failed(problem.why))
        return
    except ShutDown:
        front.leg_over(leg, LegEnd.CUT)
        front.stream_broke(exchange, decode.name, SHUTDOWN)
        return
    await send({"type": "http.response.body", "body": b""})
    exchange.stage("end")
    if reply.status >= 500:
        front.journal.trouble(decode_failed(answered), decode.name, exchange.request_id)
    front.leg_over(leg, LegEnd.of(reply.status), seen, answered)
