# SPDX-License-Identifier: Apache-2.0
"""HTTP to the engines: pooled keep-alive connections, answers handed on as the bytes arrive."""

from __future__ import annotations

import asyncio
from types import TracebackType

import aiohttp

from vllm_ascend_pd.metaserver.decisions import Failure
from vllm_ascend_pd.metaserver.service.faults import Headers

_KEEPALIVE_S = 4.0  # below the engines' own 5 s, so that a connection they are closing is not taken


class UpstreamError(Exception):
    """An exchange with an engine that did not work out, and how far it may have got."""

    def __init__(self, failure: Failure, why: str) -> None:
        super().__init__(why)
        self.failure = failure
        self.why = why


class Reply:
    """An engine's answer: the head is there, the body is read piece by piece."""

    def __init__(self, response: aiohttp.ClientResponse, idle_s: float) -> None:
        self._response = response
        self._idle_s = idle_s
        self.status = response.status
        self.headers: Headers = [(name.lower(), value) for name, value in response.raw_headers]

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def read(self, timeout_s: float | None = None) -> bytes:
        """The next piece, b"" at the regular end. Raises UpstreamError when it breaks off or falls silent."""
        try:
            return await asyncio.wait_for(self._response.content.readany(), timeout_s or self._idle_s)
        except asyncio.TimeoutError as problem:
            raise UpstreamError(Failure.TIMEOUT, "it fell silent") from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise UpstreamError(Failure.BROKEN, _why(problem)) from problem

    async def rest(self, most: int, timeout_s: float | None = None) -> bytes:
        pieces = []
        size = 0
        while piece := await self.read(timeout_s):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise UpstreamError(Failure.BROKEN, f"its answer is larger than {most} bytes")
        return b"".join(pieces)

    def close(self) -> None:
        """Gives the connection back when the answer was read to its end; else closes it, which the engine sees."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Upstream:
    def __init__(self, connect_timeout_s: float, idle_timeout_s: float) -> None:
        self._idle_s = idle_timeout_s
        self._connect_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, url: str, headers: Headers, body: bytes, timeout_s: float, query: bytes = b""
    ) -> Reply:
        """Send a request, wait for the head of its answer. Raises UpstreamError."""
        session = self._session or self._open()
        target = url + ("?" + query.decode("latin-1") if query else "")
        named = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        try:
            response = await asyncio.wait_for(
                session.request(method, target, headers=named, data=body or None, allow_redirects=False), timeout_s
            )
        except aiohttp.ClientConnectorError as problem:
            raise UpstreamError(Failure.CONNECT, _why(problem)) from problem
        except aiohttp.ConnectionTimeoutError as problem:
            raise UpstreamError(Failure.CONNECT, "no connection in time") from problem
        except asyncio.TimeoutError as problem:
            raise UpstreamError(Failure.TIMEOUT, f"no answer within {timeout_s:g} s") from problem
        except (aiohttp.ClientError, OSError) as problem:
            raise UpstreamError(Failure.BROKEN, _why(problem)) from problem
        return Reply(response, self._idle_s)

    def _open(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, enable_cleanup_closed=False),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s, sock_read=None),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
        )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _why(problem: Exception) -> str:
    return f"{type(problem).__name__} {problem}".strip()[:300]
