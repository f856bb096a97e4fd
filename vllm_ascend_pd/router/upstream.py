# SPDX-License-Identifier: Apache-2.0
"""The router's calls to engines: answers are passed on as the bytes arrive, and a call can be ended from outside."""

from __future__ import annotations

import asyncio
from types import TracebackType

import aiohttp

from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError
from vllm_ascend_pd.shared.core.gathered import Gathered, Payload
from vllm_ascend_pd.shared.http_session import Headers, HttpSession, HttpWire, Origin, read_piece
from vllm_ascend_pd.shared.tls_files import TlsFiles
from vllm_ascend_pd.shared.within import ended


def listed(value: bytes) -> list[bytes]:
    """Return the words of a header that lists some. They have no case."""
    return [word.strip().lower() for word in value.split(b",")]


class Reply:
    """An engine's answer, from the request on: its head is awaited first, then its body is read piece by piece.

    It ends by itself, or with the error that `stop` is given.
    """

    __slots__ = ("_asking", "_error", "_idle_s", "_response", "_suspicion", "_taken", "_upstream", "headers", "origin", "status")  # fmt: skip

    def __init__(
        self, upstream: Upstream, origin: Origin, asking: asyncio.Task[aiohttp.ClientResponse], idle_s: float
    ) -> None:
        self.origin = origin
        self.status = 0
        self.headers: Headers = []
        self._upstream, self._asking, self._idle_s = upstream, asking, idle_s
        self._response: aiohttp.ClientResponse | None = None
        self._error: Exception | None = None
        self._taken = 0
        self._suspicion: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Reply:
        return self if self._response is not None else await self.head()

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def head(self) -> Reply:
        """Wait for status and headers. Raise UpstreamError, or what `stop` was given, and be closed."""
        try:
            await ended(self._asking)
            if self._error is not None:
                raise self._error
            self._response = response = self._asking.result()
        except BaseException:
            self.close()
            raise
        self.trust_again()
        self.status = response.status
        self.headers = [(name.lower(), value) for name, value in response.raw_headers]
        return self

    @property
    def at_end(self) -> bool:
        """True if the next read is known to return the regular end."""
        return self._error is None and self._response is not None and self._response.content.at_eof()

    async def read(self, timeout_s: float | None = None) -> bytes:
        """Return what has come since the last read, b"" at the regular end.

        Raise UpstreamError if it broke off, or after a silence of `timeout_s`, or what `stop` was given.
        """
        if self._error is not None or self._response is None:
            raise self._error or UpstreamError(HttpFailure.BROKEN, "it has no answer")
        connection = self._response.connection
        if connection is not None and isinstance(connection.protocol, HttpWire):
            connection.protocol.limit_silence(timeout_s or self._idle_s)
        piece = await read_piece(self._response)
        self._taken += len(piece)
        self.trust_again()
        return piece

    async def rest(self, max_bytes: int, timeout_s: float | None = None) -> bytes:
        """Return the rest of the body. Raise UpstreamError if it broke off or is longer than `max_bytes`."""
        return bytes(await self.whole(max_bytes, timeout_s))

    async def whole(self, max_bytes: int, timeout_s: float | None = None) -> bytes | memoryview:
        """Return the rest of a body that may be long, without copying it as a whole. Raise as `rest` does."""
        gathered = Gathered(max_bytes)
        while piece := await self.read(timeout_s):
            try:
                gathered.add(piece)
            except ValueError:
                raise UpstreamError(HttpFailure.BROKEN, "its answer is too large") from None
            except OSError as problem:
                raise UpstreamError(HttpFailure.OURS, f"no memory for its answer: {problem}") from problem
        return gathered.whole()

    def stop(self, error: Exception) -> None:
        """End it: whoever waits for it, or will, gets `error`. The first one counts."""
        if self._error is not None:
            return
        self._error = error
        if self._response is not None:
            self._response.content.set_exception(error)
        else:
            self._asking.cancel()

    def close(self) -> None:
        """Cut the connection, unless the answer has ended. The engine sees its client disconnect."""
        self.trust_again()
        self._upstream.forget(self)
        if not self._asking.cancel() and not self._asking.cancelled() and self._asking.exception() is None:
            self._asking.result().close()

    def suspect(self, silence_s: float) -> None:
        """Fail after a silence of this length, until something comes or `trust_again` is called."""
        loop = asyncio.get_running_loop()
        if self._suspicion is None or loop.time() + silence_s < self._suspicion.when():
            self.trust_again()
            self._suspicion = loop.call_later(silence_s, self._confirmed)

    def trust_again(self) -> None:
        if self._suspicion is not None:
            self._suspicion.cancel()
            self._suspicion = None

    def _confirmed(self) -> None:
        """Fail, unless something waits to be read: then the caller is slow, and the engine may not go on."""
        self._suspicion = None
        if self._response is None or self._response.content.total_bytes == self._taken:
            self.stop(
                UpstreamError(HttpFailure.TIMEOUT, "no answer in time" if self._response is None else "no data in time")
            )


class Upstream:
    """All calls of this process to engines."""

    def __init__(self, connect_timeout_s: float, idle_timeout_s: float, tls: TlsFiles | None = None) -> None:
        self.session = HttpSession(connect_timeout_s, tls)
        self._idle_s = idle_timeout_s
        self._replies: dict[Reply, None] = {}

    def ask(
        self,
        origin: Origin,
        method: str,
        path: bytes,
        headers: Headers,
        body: Payload,
        timeout_s: float,
        repeatable: bool = True,
    ) -> Reply:
        """Begin to send a request. The answer's `head` is to be awaited, as its context does, and it is to be closed.

        `timeout_s`: longest silence before the head. `repeatable`: a request that a kept connection did not take may
        be sent again, so the engine may read it twice. That is harmless for a generation (no client has seen the first
        answer) and for a prefill (P refuses a transfer that it has), but not for every request.
        """
        asking = self.session.send(origin, method, path, headers, body, timeout_s, repeatable)
        reply = Reply(self, origin, asyncio.get_running_loop().create_task(asking), self._idle_s)
        self._replies[reply] = None
        return reply

    def forget(self, reply: Reply) -> None:
        self._replies.pop(reply, None)

    def suspect(self, origin: Origin, silence_s: float) -> None:
        """Fail requests to an engine that seems to be gone, each after a silence of this length."""
        for reply in self._replies:
            if reply.origin == origin:
                reply.suspect(silence_s)

    def trust_again(self, origin: Origin) -> None:
        """Undo `suspect`: the engine is there after all."""
        for reply in self._replies:
            if reply.origin == origin:
                reply.trust_again()

    async def close(self) -> None:
        await self.session.close()
