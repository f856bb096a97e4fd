# SPDX-License-Identifier: Apache-2.0
"""Every other `/v1/*` route: handed to a D as it is, without `kv_transfer_params`, and its answer handed back."""

from __future__ import annotations

import random
from collections.abc import MutableMapping
from typing import Any

from vllm_ascend_pd.metaserver import bodies
from vllm_ascend_pd.metaserver.decisions import NOT_EXECUTED, Evidence, Role
from vllm_ascend_pd.metaserver.service.exchange import OWN_HEADERS, Exchanges, Send, answer
from vllm_ascend_pd.metaserver.service.faults import Headers, fault
from vllm_ascend_pd.metaserver.service.fleet import Instance
from vllm_ascend_pd.metaserver.service.upstream import Reply, UpstreamError


async def pass_on(
    exchanges: Exchanges, scope: MutableMapping[str, Any], headers: Headers, body: bytes, send: Send
) -> None:
    """A read may be repeated on another D; anything else only if it surely was not executed."""
    body = bodies.strip(body)
    fleet, settings = exchanges.fleet, exchanges.settings
    tried: set[str] = set()
    number = 0
    while True:
        number += 1
        decode = fleet.choose(Role.DECODE, 1, frozenset(tried))
        if decode is None:
            await answer(send, fault(503, "No decode instance is available.", retry_after_s=2))
            return
        with fleet.leg(decode, 1):
            try:
                reply = await exchanges.upstream.send(
                    scope["method"],
                    decode.base + scope["path"],
                    headers,
                    body,
                    settings.first_byte_timeout_s,
                    scope.get("query_string", b""),
                )
            except UpstreamError as problem:
                evidence = Evidence.PROBE_FAILED if problem.failure in NOT_EXECUTED else Evidence.BROKE
                fleet.seen(decode, evidence, problem.why)
                repeatable = scope["method"] == "GET"
                if settings.retry.again(problem.failure, number, repeatable, exchanges.budget, random.random()) is None:
                    await answer(send, fault(502, f"The decode instance could not answer ({problem.why})."))
                    return
                tried.add(decode.name)
                continue
            await _relay(exchanges, decode, reply, send)
            return


async def _relay(exchanges: Exchanges, decode: Instance, reply: Reply, send: Send) -> None:
    exchanges.fleet.seen(decode, Evidence.SERVED)
    head = [(name, value) for name, value in reply.headers if name not in OWN_HEADERS]
    await send({"type": "http.response.start", "status": reply.status, "headers": head})
    try:
        while piece := await reply.read():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        reply.close()
