# SPDX-License-Identifier: Apache-2.0
"""A router that forwards D's post and records it, and a load of D's over it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from unit.kits.watching import until
from unit.router.fake_engine import ServedApp
from unit.schedulers.kit import SECRETS, WatchedSteps, decode, request
from unit.schedulers.rendezvous import D_ID
from vllm_ascend_pd.metadata import Bind

GIVEN = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": "http://10.0.0.1:8000/v1/metaserver"}


class RecordingRouter:
    """Router that records what D posts; answers only when P's request has ended, like vllm-ascend's."""

    def __init__(self, status: int = 200) -> None:
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.ended, self.left = False, False
        self.status = status
        self.served = ServedApp(self._app, "a router")
        self.url = f"http://{self.served.address}"

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        query = scope["query_string"].decode()
        self.posts.append((scope["path"] + (query and f"?{query}"), msgspec.json.decode(message["body"])))
        gone = asyncio.ensure_future(receive())
        while not self.ended and not gone.done():
            await asyncio.sleep(0.02)
        self.left = gone.done()
        gone.cancel()
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self.status, "headers": kind})
        await send({"type": "http.response.body", "body": b"null"})


@contextmanager
def loading(
    status: int = 200, name: str = D_ID, query: str = ""
) -> Iterator[tuple[RecordingRouter, WatchedSteps, Bind]]:
    router = RecordingRouter(status)
    scheduler = decode(router.url, secrets=SECRETS)
    try:
        asked = request(name, {**GIVEN, "metaserver": router.url + "/v1/metaserver" + query})
        assert scheduler.wanted(asked, 4) == 6
        scheduler.allocated(asked, [[40, 41, 42, 43]], 6)
        steps = WatchedSteps(scheduler)
        bind = steps.bound()
        until(lambda: router.posts, "the POST")
        yield router, steps, bind
    finally:
        scheduler.close()
        router.served.stop()
