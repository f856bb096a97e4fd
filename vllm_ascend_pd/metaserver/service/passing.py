# SPDX-License-Identifier: Apache-2.0
"""Every other `/v1/*` route: handed to a D as it is, without `kv_transfer_params`, and its answer handed back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import MutableMapping
from typing import Any

from vllm_ascend_pd.metaserver import bodies
from vllm_ascend_pd.metaserver.decisions import Evidence, Failure, Role
from vllm_ascend_pd.metaserver.http1 import Headers, Reply, UpstreamError
from vllm_ascend_pd.metaserver.service.exchange import Send
from vllm_ascend_pd.metaserver.service.faults import fault, known
from vllm_ascend_pd.metaserver.service.fleet import Instance
from vllm_ascend_pd.metaserver.service.front import Front
from vllm_ascend_pd.metaserver.service.metrics import METRICS
from vllm_ascend_pd.metaserver.service.relay import client_head, tell


async def pass_on(front: Front, scope: MutableMapping[str, Any], headers: Headers, body: bytes, send: Send) -> None:
    """A read may be repeated on another D; anything else only if it surely was not executed."""
    method, query = scope["method"], scope.get("query_string", b"")
    path = scope["raw_path"] + (b"?" + query if query else b"")  # as it came: decoded it could hold a line end
    try:
        body = bodies.strip(body)
    except bodies.BodyError as problem:
        await tell(send, fault(400, str(problem)))
        return
    tried: set[str] = set()
    number = 0
    while True:
        number += 1
        decode = front.fleet.choose(Role.DECODE, 1, frozenset(tried))
        if decode is None:
            await tell(send, known(503, "PD-META-008", 2, role="decode"))
            return
        with front.fleet.leg(decode, 1):
            try:
                reply = await front.upstream.send(
                    decode.origin, method, path, headers, body, front.settings.first_byte_timeout_s, method == "GET"
                )
            except UpstreamError as problem:
                evidence = Evidence.UNREACHED if problem.failure is Failure.CONNECT else Evidence.BROKE
                front.fleet.seen(decode, evidence, problem.why)
                delay = front.settings.retry.again(
                    problem.failure, number, method == "GET", front.budget, random.random()
                )
                if delay is None:
                    status = 504 if problem.failure is Failure.TIMEOUT else 502
                    message = f"The decode instance could not answer: {problem.why}."
                    await tell(send, fault(status, message, "PD-META-007"))
                    return
                METRICS.retries.labels(problem.failure.value).inc()
                tried.add(decode.name)
            else:
                await _relay(front, decode, reply, headers, send)
                return
        await asyncio.sleep(delay)


async def _relay(front: Front, decode: Instance, reply: Reply, headers: Headers, send: Send) -> None:
    """A break after the head cannot be told in words here: the connection to the client is cut short."""
    request_id = next(value for name, value in headers if name == b"x-request-id")
    async with reply:
        head = client_head(reply.headers, request_id.decode("latin-1"))
        head += [(name, value) for name, value in reply.headers if name == b"content-length"]
        await send({"type": "http.response.start", "status": reply.status, "headers": head})
        try:
            while piece := await reply.read():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except UpstreamError as problem:
            front.fleet.seen(decode, Evidence.BROKE, problem.why)
            raise ConnectionAbortedError(problem.why) from problem
        await send({"type": "http.response.body", "body": b""})
    front.fleet.seen(decode, Evidence.SERVED)
