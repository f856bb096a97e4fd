# SPDX-License-Identifier: Apache-2.0
"""Instant imitations of engines: a P and a D in one process, as cheap as Python allows.

D asks for its prefill when the request says so, like the real one, then sends `pieces` events, `gap_ms` apart.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
from urllib.parse import urlsplit

import uvloop

from tools.bench_metaserver_parts.wire import ClientPool, ServerProtocol, post

EVENT = b'data: {"id":"cmpl-1","object":"text_completion","model":"m","choices":[{"index":0,"text":" word"}]}\n\n'
PROMPT_IDS = ",".join(str(1000 + i) for i in range(200)).encode()
# With what the metaserver asks for in streams that another D can resume.
KEPT = EVENT.replace(b"}]}", b',"token_ids":[12345]}]}')
KEPT_FIRST = KEPT.replace(b',"token', b',"prompt_token_ids":[' + PROMPT_IDS + b'],"token')
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ENVELOPE = base64.b64encode(os.urandom(1500)).decode()


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n" % len(piece) + piece + b"\r\n"


def answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


class BenchEngines:
    def __init__(self) -> None:
        self._pools: dict[str, ClientPool] = {}
        self._count = 0

    def prefill(self, path: bytes, body: bytes, connection: ServerProtocol) -> None:
        connection.write(answer(b'{"id":"cmpl-1","choices":[{"index":0,"text":" x"}]}' if b"complet" in path else b""))

    async def decode(self, path: bytes, body: bytes, connection: ServerProtocol) -> None:
        if b"complet" not in path:
            connection.write(answer(b""))
            return
        request = json.loads(body)
        params = request.get("kv_transfer_params")
        if params and not await self._prefilled(params):
            connection.write(answer(b'{"error":{"message":"no prefill"}}', b"500 No"))
            return
        pieces, gap = request["max_tokens"], float(request.get("user") or 0) / 1000
        first, event = (KEPT_FIRST, KEPT) if request.get("return_token_ids") else (EVENT, EVENT)
        connection.write(HEAD + chunk(first))
        for _ in range(pieces - 1):
            await asyncio.sleep(gap)
            connection.write(chunk(event))
        connection.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def _prefilled(self, params: dict[str, str]) -> bool:
        where = urlsplit(params["metaserver"])
        assert where.hostname is not None and where.port is not None
        pool = self._pools.setdefault(where.netloc, ClientPool(where.hostname, where.port))
        self._count += 1
        posted = {"ticket": params["ticket"], "transfer": f"d/{self._count}", "reservation": ENVELOPE}
        done = await pool.ask(post("/v1/metaserver", where.netloc, json.dumps(posted).encode()))
        return done.status == 200 and b"prefilled" in done.tail


async def main(prefill_port: int, decode_port: int) -> None:
    engines, loop = BenchEngines(), asyncio.get_running_loop()
    await loop.create_server(lambda: ServerProtocol(engines.prefill), "127.0.0.1", prefill_port, backlog=4096)
    await loop.create_server(lambda: ServerProtocol(engines.decode), "127.0.0.1", decode_port, backlog=4096)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("prefill", type=int)
    parser.add_argument("decode", type=int)
    args = parser.parse_args()
    uvloop.install()
    asyncio.run(main(args.prefill, args.decode))
