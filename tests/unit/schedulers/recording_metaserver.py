# SPDX-License-Identifier: Apache-2.0
"""A metaserver that records what D posts, and answers when the test says so."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from unit.router.fake_engine import ServedApp, read_body
from vllm_ascend_pd.protocol import continuing
from vllm_ascend_pd.protocol.reports import ROUTE

PREFILLED = b'{"event":"prefilled"}\n'


class RecordingMetaserver:
    """Keeps the answer to a reservation open until `end` is set, which is its last line.

    `so_far`: its answer to each question for an answer so far; while it is None, a question is kept open.
    """

    def __init__(self, end: bytes = b"") -> None:
        self.bodies: list[dict[str, Any]] = []
        self.reports: list[dict[str, Any]] = []
        self.questions: list[dict[str, Any]] = []
        self.so_far: tuple[int, bytes] | None = (404, b"")
        self.left = 0  # questions that were not waited for any longer
        self.end = end
        self.served = ServedApp(self._app, "a metaserver")
        self.url = f"http://{self.served.address}"

    def __enter__(self) -> RecordingMetaserver:
        return self

    def __exit__(self, *_: object) -> None:
        self.end = self.end or PREFILLED
        self.served.stop()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(receive)
        if scope["path"] == ROUTE:
            self.reports.append(msgspec.json.decode(body))
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        if scope["path"] == continuing.ROUTE:
            self.questions.append(msgspec.json.decode(body))
            gone = asyncio.ensure_future(receive())
            while self.so_far is None and not gone.done():
                await asyncio.wait({gone}, timeout=0.02)
            self.left += gone.done()
            gone.cancel()
            status, said = self.so_far or (503, b"")
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": said})
            return
        self.bodies.append(msgspec.json.decode(body))
        kind = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        left = asyncio.ensure_future(receive())
        while not self.end and not left.done():
            await send({"type": "http.response.body", "body": b'{"event":"heartbeat"}\n', "more_body": True})
            await asyncio.wait({left}, timeout=0.02)
        left.cancel()
        await send({"type": "http.response.body", "body": self.end})
