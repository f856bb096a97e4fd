# SPDX-License-Identifier: Apache-2.0
"""HTTP endpoint at which routers of Mooncake's dialect ask a prefill engine for its ids, once.

The answer has one id per data-parallel rank. A router chooses a rank and hands its id to D unread. So the id is the
address at which that rank's scheduler takes offers (protocol/dialects.py reads it). Nothing else is served, and no
request changes anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from http import HTTPStatus

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.protocol.identity import Endpoint

MAX_HEAD = 8192  # bytes
MAX_OPEN = 64  # connections; further ones are closed unread
QUESTION_TIMEOUT_S = 5.0  # for one question and its answer


def answer(head: bytes, listeners: Sequence[Endpoint]) -> bytes:
    """Return the HTTP response to a request's head: the ids by data-parallel rank."""
    words = head.partition(b"\r\n")[0].split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _response(HTTPStatus.BAD_REQUEST, {})
    if words[0] != b"GET":
        return _response(HTTPStatus.METHOD_NOT_ALLOWED, {})
    if words[1].partition(b"?")[0] != b"/query":
        return _response(HTTPStatus.NOT_FOUND, {})
    return _response(HTTPStatus.OK, {str(rank): {"engine_id": str(it)} for rank, it in enumerate(listeners)})


def _response(status: HTTPStatus, content: object) -> bytes:
    body = json.dumps(content).encode()
    lines = f"HTTP/1.1 {status.value} {status.phrase}", "Content-Type: application/json", f"Content-Length: {len(body)}"
    return "\r\n".join((*lines, "Connection: close", "", "")).encode() + body


class Bootstrap:
    """Server of the endpoint. All of it runs on the loop that starts it."""

    def __init__(self, host: str, port: int, listeners: Sequence[Endpoint]) -> None:
        self._host, self._port, self._listeners = host, port, listeners
        self._server: asyncio.Server | None = None
        self.callers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Start listening. Raise PD-CTRL-001 if that fails."""
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=MAX_HEAD)
        except OSError as error:
            raise PdError("PD-CTRL-001", address=f"{self._host}:{self._port}", why=error.strerror or error) from error

    async def close(self) -> None:
        """Stop listening and abort open connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        for writer in self.callers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self.callers) >= MAX_OPEN:
            writer.transport.abort()
            return
        self.callers.add(writer)
        try:
            with contextlib.suppress(asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):
                await asyncio.wait_for(self._say(reader, writer), QUESTION_TIMEOUT_S)
        finally:
            self.callers.discard(writer)
            writer.close()

    async def _say(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            head = b""
        writer.write(answer(head, self._listeners))
        await writer.drain()
