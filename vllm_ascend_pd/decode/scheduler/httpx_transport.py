# SPDX-License-Identifier: Apache-2.0
"""Transport of D's httpx client over aiohttp: a reservation costs a fraction of the CPU time that httpcore spends.

The engine's scheduler shares its interpreter with these calls, so steps wait for their CPU time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import httpx

from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError
from vllm_ascend_pd.shared.http_session import HttpSession, Origin, read_piece
from vllm_ascend_pd.shared.tls_files import TlsFiles

REPEATABLE = "vllm_ascend_pd.repeatable"
_ERRORS: dict[HttpFailure, type[httpx.TransportError]] = {
    HttpFailure.CONNECT: httpx.ConnectError,
    HttpFailure.OURS: httpx.ConnectError,  # no handle or port for a connection: nothing was sent
    HttpFailure.TIMEOUT: httpx.ReadTimeout,
}


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while piece := await read_piece(self._response):
                yield piece
        except UpstreamError as problem:
            raise _error(problem) from problem

    async def aclose(self) -> None:
        self._response.close()


class Transport(httpx.AsyncBaseTransport):
    """httpx transport: of a request's time limits `read` counts, and `connect_s` for all.

    If the server has closed a kept connection, only a request with the extension REPEATABLE is sent again on a fresh
    one.
    """

    def __init__(self, connect_s: float, tls: TlsFiles | None, max_connecting: int) -> None:
        self._http = HttpSession(connect_s, tls, max_connecting)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url, extensions = request.url, request.extensions
        origin = Origin(url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        headers = [header for header in request.headers.raw if header[0].lower() not in (b"host", b"content-length")]
        try:
            response = await self._http.send(
                *(origin, request.method, url.raw_path, headers, request.content),
                silence_s=extensions["timeout"]["read"],
                repeatable=REPEATABLE in extensions,
            )
        except UpstreamError as problem:
            raise _error(problem) from problem
        return httpx.Response(response.status, headers=response.raw_headers, stream=_Body(response))

    async def aclose(self) -> None:
        await self._http.close()


def _error(problem: UpstreamError) -> httpx.TransportError:
    return _ERRORS.get(problem.failure, httpx.RemoteProtocolError)(problem.why)
