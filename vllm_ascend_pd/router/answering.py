# SPDX-License-Identifier: Apache-2.0
"""The way of an answer to its caller: ASGI's messages become HTTP/1.1, in the words of aiohttp's server."""

from __future__ import annotations

import functools
import time
from collections.abc import MutableMapping
from email.utils import formatdate
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from vllm_ascend_pd.router.faults import Answer
from vllm_ascend_pd.shared.http_session import Headers


class Answering(web.StreamResponse):
    """An answer that goes out as it is made. The head waits for the first piece: both are one packet.

    aiohttp's own response would add headers that no engine gave. `lasting`: the connection may serve another request;
    `refusal`: the last answer of the connection, if no other is made; `ahead`: what of the head is out already.
    """

    def __init__(self, request: web.BaseRequest, lasting: bool = False) -> None:
        super().__init__()
        self.begun, self.ahead = False, ""
        self.refusal: Answer | None = None
        self._request, self._lasting = request, lasting
        self._whole = self._bodiless = self._in_chunks = False

    @property
    def keep_alive(self) -> bool:
        """Return whether the connection serves another request: an answer without an end is cut off."""
        return self._whole and self._lasting

    def sign_of_life(self) -> bytes:
        """Return what may be sent in this moment without changing the answer: a caller that has gone refuses it."""
        if not self.begun:
            self.ahead = "H"  # of HTTP/1.1: as clients of HTTP/1.0, and some others, take no interim answers
            return b"H"
        self._request.writer.send_headers()  # if they still wait
        return b"0" if self._in_chunks and not self._whole else b""  # of the size of the next chunk, or of the last

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Take one message of ASGI's. Wait while the caller reads more slowly than it is answered."""
        try:
            if message["type"] == "http.response.start":
                await self._open(message["status"], message["headers"])
            else:
                await self._add(message.get("body", b""), message.get("more_body", False))
        except ConnectionError:
            return  # the caller has gone: its request is cancelled, or will be

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Prepare nothing: aiohttp calls this when the handler has returned."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        if (refusal := self.refusal) is not None:
            self._lasting, length = False, b"%d" % len(refusal.body)
            await self._open(refusal.status, [(b"content-type", refusal.content_type), (b"content-length", length)])
            await self._add(refusal.body, more=False)

    async def _open(self, status: int, headers: Headers) -> None:
        request, writer = self._request, self._request.writer
        self.begun = True
        self.set_status(status)
        self._bodiless = request.method == "HEAD" or status in (204, 304)
        head, length = CIMultiDict[str](), None
        for name, value in headers:
            if name == b"connection":
                self._lasting = self._lasting and value.lower() != b"close"
                continue
            if name == b"content-length":
                length = int(value)
            head.add(name.decode("latin-1"), value.decode("utf-8", "replace"))
        current = request.version >= HttpVersion11
        if not self._bodiless:
            writer.length = length
            if length is None and current:
                self._in_chunks = True
                writer.enable_chunking()
                head["transfer-encoding"] = "chunked"
            elif length is None:
                self._lasting = False  # the end of the connection is that of the answer
        head["date"] = _date(int(time.time()))
        if not self._lasting:
            head["connection"] = "close"
        elif not current:
            head["connection"] = "keep-alive"
        first = f"HTTP/1.{int(current)} {self.status} {self.reason}"
        await writer.write_headers(first.removeprefix(self.ahead), head)

    async def _add(self, piece: bytes | memoryview, more: bool) -> None:
        writer = self._request.writer
        last = b"" if self._bodiless else piece
        if last and (more or not self._in_chunks):
            await writer.write(last)  # no more than the announced length
            last = b""
        if more:
            await writer.drain()
            return
        self._whole = self._bodiless or self._in_chunks or not writer.length
        await writer.write_eof(bytes(last))


@functools.lru_cache(maxsize=1)
def _date(now: int) -> str:
    return formatdate(now, usegmt=True)
