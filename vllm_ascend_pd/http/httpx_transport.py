# SPDX-License-Identifier: Apache-2.0
"""Transport of D's httpx client over `http1`: a reservation costs a fraction of the CPU time that httpcore spends.

The engine's scheduler shares its interpreter with these calls, so steps wait for their CPU time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from vllm_ascend_pd.http.core.failures import HttpFailure
from vllm_ascend_pd.http.http1 import Origin, Reply, Upstream, UpstreamError
from vllm_ascend_pd.http.tls_files import TlsFiles

REPEATABLE = "vllm_ascend_pd.repeatable"
SILENCE = "vllm_ascend_pd.silence"  # in seconds
_ERRORS: dict[HttpFailure, type[httpx.TransportError]] = {
    HttpFailure.CONNECT: httpx.ConnectError,
    HttpFailure.OURS: httpx.ConnectError,  # no handle or port for a connection: nothing was sent
    HttpFailure.TIMEOUT: httpx.ReadTimeout,
}


class _Body(httpx.AsyncByteStream):
    def __init__(self, reply: Reply, read_s: float) -> None:
        self._reply = reply
        self._read_s = read_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while piece := await self._reply.read(self._read_s):
                yield piece
        except UpstreamError as problem:
            raise _error(problem) from problem

    async def aclose(self) -> None:
        self._reply.close()


class Transport(httpx.AsyncBaseTransport):
    """httpx transport with the given time limits to connect and to read.

    If the server has closed a kept connection, only a request with the extension REPEATABLE is sent again on a fresh
    one. A request with the extension SILENCE has its own time limit to read.
    """

    def __init__(self, connect_s: float, read_s: float, tls: TlsFiles | None, max_connecting: int) -> None:
        self._read_s = read_s
        self._http = Upstream(connect_s, read_s, tls, max_connecting)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        origin = Origin(url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        headers = [(name.lower(), value) for name, value in request.headers.raw]
        headers = [(name, value) for name, value in headers if name not in (b"host", b"content-length")]
        read_s = request.extensions.get(SILENCE, self._read_s)
        try:
            reply = await self._http.send(
                *(origin, request.method, url.raw_path, headers, request.content, read_s),
                repeatable=REPEATABLE in request.extensions,
            )
        except UpstreamError as problem:
            raise _error(problem) from problem
        return httpx.Response(reply.status, headers=reply.headers, stream=_Body(reply, read_s))

    async def aclose(self) -> None:
        await self._http.close()


def _error(problem: UpstreamError) -> httpx.TransportError:
    return _ERRORS.get(problem.failure, httpx.RemoteProtocolError)(problem.why)
