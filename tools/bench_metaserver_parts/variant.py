# SPDX-License-Identifier: Apache-2.0
"""The metaserver with another HTTP client, for comparison with its own: aiohttp or httpx."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import aiohttp
import httpx
import uvloop

from vllm_ascend_pd.http.core.failures import HttpFailure
from vllm_ascend_pd.http.http1 import UpstreamError
from vllm_ascend_pd.router.app import WorkerProcess
from vllm_ascend_pd.router.server import HttpServer, listen
from vllm_ascend_pd.router.settings import Settings

Headers = list[tuple[bytes, bytes]]


class AiohttpReply:
    async def __aenter__(self) -> AiohttpReply:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = [(name.lower(), value) for name, value in response.raw_headers]

    @property
    def at_end(self) -> bool:
        return self._response.content.at_eof()

    async def read(self, timeout_s: float | None = None) -> bytes:
        return await self._response.content.readany()

    async def rest(self, max_bytes: int, timeout_s: float | None = None) -> bytes:
        return await self._response.read()

    def close(self) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class AiohttpUpstream:
    _session: aiohttp.ClientSession | None = None

    async def send(
        self,
        origin: Any,
        method: str,
        path: bytes,
        headers: Headers,
        body: bytes,
        timeout_s: float,
        repeatable: bool = True,
    ) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            )
        url = f"{origin.scheme}://{origin.netloc}{path.decode()}"
        named = [(name.decode(), value.decode()) for name, value in headers]
        try:
            return AiohttpReply(await self._session.request(method, url, headers=named, data=body or None))
        except aiohttp.ClientError as problem:
            raise UpstreamError(HttpFailure.CONNECT, str(problem)) from problem

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class HttpxReply:
    async def __aenter__(self) -> HttpxReply:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __init__(self, response: httpx.Response) -> None:
        self._response, self._pieces = response, response.aiter_raw()
        self.status = response.status_code
        self.headers = [(name.lower(), value) for name, value in response.headers.raw]

    async def read(self, timeout_s: float | None = None) -> bytes:
        async for piece in self._pieces:
            return piece
        await self._response.aclose()
        return b""

    async def rest(self, max_bytes: int, timeout_s: float | None = None) -> bytes:
        body = b"".join([piece async for piece in self._pieces])
        await self._response.aclose()
        return body

    def close(self) -> None:
        if not self._response.is_closed:
            self._closing = asyncio.ensure_future(self._response.aclose())


class HttpxUpstream:
    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4)
        self._client = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)

    async def send(
        self,
        origin: Any,
        method: str,
        path: bytes,
        headers: Headers,
        body: bytes,
        timeout_s: float,
        repeatable: bool = True,
    ) -> Any:
        url = f"{origin.scheme}://{origin.netloc}{path.decode()}"
        request = httpx.Request(method, url, headers=[*headers, (b"host", origin.netloc.encode())], content=body)
        try:
            return HttpxReply(await self._client.send(request, stream=True))
        except httpx.TransportError as problem:
            raise UpstreamError(HttpFailure.CONNECT, str(problem)) from problem

    async def close(self) -> None:
        await self._client.aclose()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=("aiohttp", "httpx"))
    for name in ("port", "prefill", "decode"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    settings = Settings(
        port=args.port,
        prefill=(f"127.0.0.1:{args.prefill}",),
        decode=(f"127.0.0.1:{args.decode}",),
        canary=False,
    )
    worker = WorkerProcess(settings, f"http://127.0.0.1:{args.port}")
    upstream: Any = AiohttpUpstream() if args.library == "aiohttp" else HttpxUpstream()
    worker.upstream = worker.front.upstream = worker._prober._upstream = upstream
    uvloop.run(HttpServer(worker, [listen("127.0.0.1", args.port)]).serve())


if __name__ == "__main__":
    main()
