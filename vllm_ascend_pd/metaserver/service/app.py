# SPDX-License-Identifier: Apache-2.0
"""The ASGI application: routes to handlers, request bodies read within bounds, a client that leaves is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_ascend_pd.metaserver import bodies
from vllm_ascend_pd.metaserver.decisions import Condition, Role
from vllm_ascend_pd.metaserver.service.exchange import Exchanges, Send, answer
from vllm_ascend_pd.metaserver.service.faults import Headers, fault
from vllm_ascend_pd.metaserver.service.fleet import Fleet, parse_instance
from vllm_ascend_pd.metaserver.service.passing import pass_on
from vllm_ascend_pd.metaserver.service.probes import Prober
from vllm_ascend_pd.metaserver.service.reserve import reserve
from vllm_ascend_pd.metaserver.service.settings import Settings
from vllm_ascend_pd.metaserver.service.upstream import Upstream

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
# What a proxy keeps to itself. Accept-Encoding too: the relay looks at the first bytes of an answer.
_NOT_FORWARDED = frozenset(
    b"host content-length connection keep-alive transfer-encoding te trailer upgrade "
    b"proxy-authorization proxy-authenticate expect accept-encoding content-type".split()
)


class TooLarge(Exception):
    pass


class Front:
    """The handlers, and what they share."""

    def __init__(self, settings: Settings, own_url: str) -> None:
        self.settings = settings
        self.fleet = Fleet(settings.circuit)
        for role, texts in ((Role.PREFILL, settings.prefill), (Role.DECODE, settings.decode)):
            for text in texts:
                self.fleet.add(parse_instance(role, text, settings.circuit))
        self.upstream = Upstream(settings.connect_timeout_s, settings.idle_timeout_s)
        self.exchanges = Exchanges(settings, self.fleet, self.upstream, own_url)
        self.prober = Prober(settings, self.fleet, self.upstream)

    def app(self) -> Starlette:
        generate = _Endpoint(self._generate)
        return Starlette(
            routes=[
                Route(bodies.COMPLETIONS, generate, methods=["POST"]),
                Route(bodies.CHAT, generate, methods=["POST"]),
                Route("/v1/metaserver", _Endpoint(self._reserve), methods=["POST"]),
                Route("/health", self._health),
                Route("/healthcheck", self._health),
                Route("/readiness", self._readiness),
                Route("/v1/{rest:path}", _Endpoint(self._pass_on), methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        probing = asyncio.create_task(self.prober.run(), name="probes")
        try:
            yield
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            await self.upstream.close()

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = bodies.parse(scope["path"], await self._body(receive))
        except bodies.BodyError as problem:
            await answer(send, fault(400, str(problem)))
            return
        headers = forwarded(scope)
        await while_connected(receive, self.exchanges.serve(request, headers, send))

    async def _reserve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._body(receive)
        await while_connected(receive, reserve(self.exchanges, body, send))

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._body(receive)
        await while_connected(receive, pass_on(self.exchanges, scope, forwarded(scope), body, send))

    async def _body(self, receive: Receive) -> bytes:
        message = await receive()
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return body
        pieces, size = [body], len(body)
        while message.get("more_body", False):
            message = await receive()
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self.settings.max_body_bytes:
                raise TooLarge
        return b"".join(pieces)

    async def _health(self, _: StarletteRequest) -> Response:
        return Response(status_code=200)

    async def _readiness(self, _: StarletteRequest) -> Response:
        loop_time = asyncio.get_running_loop().time()
        ready = {
            role.value: [i.name for i in self.fleet.of(role) if i.condition(loop_time) is Condition.READY]
            for role in Role
        }
        return JSONResponse({"ready": ready}, 200 if all(ready.values()) else 503)


class _Endpoint:
    """A bare ASGI handler that a Route takes as it is, without a Request object per call."""

    def __init__(self, handle: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._handle(scope, receive, send)
        except TooLarge:
            await answer(send, fault(413, "The request body is too large."))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end; it is cancelled when the client leaves before."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def forwarded(scope: Scope) -> Headers:
    """The client's headers for an engine; every request gets an id."""
    headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_FORWARDED]
    if not any(name == b"x-request-id" for name, _ in headers):
        headers.append((b"x-request-id", uuid.uuid4().hex.encode()))
    headers.append((b"content-type", dict(scope["headers"]).get(b"content-type", b"application/json")))
    return headers
