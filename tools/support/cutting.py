# SPDX-License-Identifier: Apache-2.0
"""Addresses in front of engines at which a stream ends after so many tokens, as where its engine dies.

A request says by its id (`cut-7-…`) after how many tokens its first stream ends, or (`hold-7-…`) where it waits for its
engine's death. What comes again under the same id is passed whole, and so is all else, each over a connection of its
own.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from tools.support.engine import RunningServer
from tools.support.process import free_port
from vllm_ascend_pd.shared.loop import LoopThread

_ID = re.compile(rb"(?im)^x-request-id: *((cut|hold)-(\d+)-[^\r\n]*)")
_LENGTH = re.compile(rb"(?im)^content-length: *(\d+)")
_KEPT = re.compile(rb"(?im)^connection:[^\r\n]*\r\n")
_IDS = re.compile(rb'"(?:token_)?ids":\[([^\]]+)\]')  # of a choice, or between the events of other streams
_DELTAS = re.compile(rb"(?m)^event: (?:response\.\w+_text\.delta|content_block_delta)$")
_END, _LIMIT = b"\n\n\r\n", 1 << 24  # of an event in a chunked answer


@dataclass
class CutStream:
    """Part of a request's first stream that has passed. `whole`: it has not come to the token that its name says."""

    answer: bytearray = field(default_factory=bytearray)
    tokens: int = 0
    whole: bool = True

    def said(self) -> bytes:
        """Return the events that passed."""
        rest, events = bytes(self.answer).partition(b"\r\n\r\n")[2], b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            count = int(size or b"0", 16)
            events, rest = events + rest[:count], rest[count + 2 :]
        return events


def _chunks(stream: bytes) -> int:
    return sum(match[1].count(b",") + 1 for match in _IDS.finditer(stream)) or len(_DELTAS.findall(stream))


class Cutter:
    """A port for each engine."""

    def __init__(self, engines: list[RunningServer]) -> None:
        self.streams: dict[str, CutStream] = {}
        self._loop, self._ended = LoopThread("cutter"), asyncio.Event()
        self.addresses: list[RunningServer] = []
        self._servers: list[asyncio.Server] = []
        for number, engine in enumerate(engines):
            port = free_port()
            target = int(engine.url.rpartition(":")[2])
            self._servers.append(self._loop.call(self._listen(port, target), 10))
            self.addresses.append(RunningServer(f"cut-{number}", port, Path("/dev/null")))

    def end(self) -> None:
        """End the streams that wait: their engine is dead."""
        self._loop.post(self._ended.set)

    def reached(self, names: list[str], within_s: float) -> bool:
        """Wait until all of these streams have as many tokens as their names say. Return False if one takes longer."""
        end = time.monotonic() + within_s
        while any(name not in self.streams or self.streams[name].whole for name in names):
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        for server in self._servers:
            self._loop.call(self._close(server), 10)
        self._loop.stop()

    async def _close(self, server: asyncio.Server) -> None:
        server.close()

    async def _listen(self, port: int, target: int) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._serve(target, reader, writer)
            writer.close()  # in order, so that what passed arrives

        return await asyncio.start_server(serve, "127.0.0.1", port, limit=_LIMIT)

    async def _serve(self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        theirs, ours = await asyncio.open_connection("127.0.0.1", target, limit=_LIMIT)
        left = asyncio.ensure_future(reader.read(1))
        try:
            ours.write(_KEPT.sub(b"", head)[:-2] + b"connection: close\r\n\r\n" + body)
            named, stream = _ID.search(head), CutStream()
            cuts = named is not None and bool(body) and self.streams.setdefault(named[1].decode(), stream) is stream
            while not left.done():
                more = asyncio.ensure_future(_event(theirs))
                await asyncio.wait({left, more}, return_when=asyncio.FIRST_COMPLETED)
                if not more.done() or not (piece := more.result()):
                    more.cancel()
                    return
                stream.answer += piece
                stream.tokens += _chunks(piece)
                writer.write(piece)
                await writer.drain()
                if named is not None and cuts and stream.tokens >= int(named[3]):
                    stream.whole = False
                    if named[2] == b"hold":
                        await self._ended.wait()
                    return
        finally:
            left.cancel()
            ours.transport.abort()


async def _event(reader: asyncio.StreamReader) -> bytes:
    """Return what comes up to the end of an event, or all that is left."""
    try:
        return await reader.readuntil(_END)
    except asyncio.IncompleteReadError as left:
        return left.partial
