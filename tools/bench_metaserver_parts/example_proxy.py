# SPDX-License-Identifier: Apache-2.0
"""Example proxy for comparison: the common type of FastAPI and httpx.

It sends the same requests (D first, D asks for its prefill) without limits, retries and health checks.
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


def build(prefill: str, decode: str, proxy: str, way: str) -> FastAPI:
    app = FastAPI()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    clients = {url: httpx.AsyncClient(base_url=url, timeout=None, limits=limits) for url in (prefill, decode)}
    waiting: dict[str, dict[str, Any]] = {}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        ticket = uuid.uuid4().hex
        waiting[ticket] = body
        params = {"do_remote_prefill": True, "metaserver": proxy, "ticket": ticket}
        sent = {**body, "kv_transfer_params": params} if way == "whole" else body

        async def pieces() -> AsyncIterator[bytes]:
            async with clients[decode].stream("POST", "/v1/completions", json=sent) as answer:
                async for piece in answer.aiter_bytes():
                    yield piece
            waiting.pop(ticket, None)

        return StreamingResponse(pieces(), media_type="text/event-stream")

    @app.post("/v1/metaserver")
    async def metaserver(request: Request) -> dict[str, str]:
        posted = await request.json()
        body = {**waiting[posted["ticket"]], "max_tokens": 1, "stream": False}
        body["kv_transfer_params"] = {"do_remote_decode": True, "reservation": posted["reservation"]}
        answer = await clients[prefill].post("/v1/completions", json=body)
        answer.raise_for_status()
        return {"event": "prefilled"}

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("port", "prefill", "decode"):
        parser.add_argument(name, type=int)
    parser.add_argument("way", choices=("whole", "relay"))
    args = parser.parse_args()
    prefill, decode, proxy = (f"http://127.0.0.1:{port}" for port in (args.prefill, args.decode, args.port))
    uvicorn.run(
        build(prefill, decode, proxy, args.way), host="127.0.0.1", port=args.port, log_level="error", access_log=False
    )
