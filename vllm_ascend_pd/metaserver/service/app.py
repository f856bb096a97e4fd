# SPDX-License-Identifier: Apache-2.0
"""The ASGI application of one worker: routes, bodies read within limits, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

import msgspec
import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.http.http1 import Headers, Upstream
from vllm_ascend_pd.metaserver import bodies
from vllm_ascend_pd.metaserver.decisions import Role
from vllm_ascend_pd.metaserver.service import passing, spans, state
from vllm_ascend_pd.metaserver.service.admin import Admin, id_of
from vllm_ascend_pd.metaserver.service.cache_events import CacheEvents, parse_ports
from vllm_ascend_pd.metaserver.service.canary import Canary
from vllm_ascend_pd.metaserver.service.exchange import AsgiSend, HttpExchange, Interrupt, kept_id, uncancel
from vllm_ascend_pd.metaserver.service.faults import known
from vllm_ascend_pd.metaserver.service.fleet import Instance
from vllm_ascend_pd.metaserver.service.front import Front
from vllm_ascend_pd.metaserver.service.hub import CANARY_WORKER, Hub
from vllm_ascend_pd.metaserver.service.instances_file import InstancesFile, Members, configured
from vllm_ascend_pd.metaserver.service.intake import CONNECTION, Body, CallerLeft, Intake, NotTaken, Protocol
from vllm_ascend_pd.metaserver.service.keys import ClientKeys
from vllm_ascend_pd.metaserver.service.metrics import METRICS
from vllm_ascend_pd.metaserver.service.named import Named
from vllm_ascend_pd.metaserver.service.probes import Prober
from vllm_ascend_pd.metaserver.service.relay import OWN_MARK, send_answer
from vllm_ascend_pd.metaserver.service.reserve import Heartbeats, Reservations
from vllm_ascend_pd.metaserver.service.settings import Settings
from vllm_ascend_pd.protocol.reports import MAX_REPORT_BYTES
from vllm_ascend_pd.protocol.reports import ROUTE as LOADS

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Handle = Callable[[Scope, Receive, AsgiSend], Awaitable[None]]
# Headers that a proxy must not pass on. Accept-Encoding too: the relay reads the first bytes of an answer.
_NOT_FORWARDED = frozenset(
    b"host content-length connection keep-alive transfer-encoding te trailer upgrade proxy-connection "
    b"proxy-authorization proxy-authenticate expect accept-encoding "
    b"x-request-id x-forwarded-for".split()  # made anew
)
_MAX_RESERVATION_BYTES = 64 << 20
RESERVATIONS = "/v1/metaserver"
_PASSED_METHODS = [
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
]  # browsers send OPTIONS before they POST


class WorkerProcess:
    """One worker process: what its requests share, and the application."""

    def __init__(self, settings: Settings, own_url: str, hub: Hub | None = None) -> None:
        self.settings = settings
        self.fleet = Members(settings.circuit, self._lost, settings.prefix_tokens)
        self._file: InstancesFile | None = None
        if settings.members:
            self.fleet.become(msgspec.json.decode(settings.members))
        else:
            self._file = configured(settings, self.fleet)
        self.upstream = Upstream(settings.connect_timeout_s, settings.idle_timeout_s, settings.engine_tls())
        self.spans = spans.make(settings.otlp_traces_endpoint)
        self.front = Front(settings, self.fleet, self.upstream, own_url, self.spans)
        ports = parse_ports(settings.kv_events)
        self._cache_events = CacheEvents(self.fleet, ports) if ports else None
        self._named = Named(self.fleet, settings.prefill_allowed) if settings.sidecar else None
        self._intake = Intake()
        self._keys = ClientKeys(settings)
        self._page: asyncio.Task[bytes] | None = None  # of metrics, made last
        self.hub = hub or Hub(0)
        self.canary = Canary(self.front, proves=self.hub.worker == CANARY_WORKER)
        self.hub.attach(self.fleet, self.report)
        self._prober = Prober(settings, self.fleet, self.upstream)
        self._heartbeats = Heartbeats(settings.heartbeat_s)
        self._reservations = Reservations(self.front, self._heartbeats)
        self._admin = Admin(
            self.fleet, self.upstream, settings.admin_token, self.hub.perform, self.total, settings.trace_dir
        )

    def report(self, details: bool) -> dict[str, Any]:
        """Return the report to the other workers, and set `/metrics` from it, so that it agrees with `/status`."""
        report = state.worker_report(self.hub.worker, self.front, self.canary, self.fleet.file_problem, details)
        METRICS.running.set(report["running"])
        METRICS.waiting.set(report["waiting"])
        self.fleet.show()
        return report

    def _lost(self, instance: Instance, why: str) -> None:
        self.front.journal.trouble("PD-META-011", f"takes no requests: {why}", instance.name)

    def total(self) -> dict[str, Any]:
        return state.sum_of([self.report(details=True), *self.hub.others()])

    def app(self) -> Dispatcher:
        """Return the application. Busy routes bypass Starlette, whose middleware costs as much as the relay itself."""
        generate = AsgiEndpoint(self._generate)
        busy = {bodies.COMPLETIONS: generate, bodies.CHAT: generate, RESERVATIONS: AsgiEndpoint(self._reserve)}
        busy[LOADS] = AsgiEndpoint(self._loaded)
        return Dispatcher(busy, self._starlette())

    def _starlette(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/healthcheck", self._healthcheck),
                Route("/readiness", self._readiness),
                Route("/metrics", self._metrics),
                *self._admin.routes(),
                Route(RESERVATIONS, AsgiEndpoint(_only_posts)),
                Route(LOADS, AsgiEndpoint(_only_posts)),
                Route("/v1/{rest:path}", AsgiEndpoint(self._pass_on), methods=_PASSED_METHODS),
            ],
            exception_handlers={HTTPException: _no_route},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        running = {"probes": self._prober.run(), "all heartbeats": self._heartbeats.run(), "hub": self.hub.run()}
        running["canary"] = self.canary.run()
        if self._file is not None:
            running["instances file"] = self._file.watch()
        if self._cache_events is not None:
            running["cache events"] = self._cache_events.run()
        if self._named is not None:
            running["named"] = self._named.run()
        tasks = [asyncio.create_task(coroutine, name=name) for name, coroutine in running.items()]
        for task in tasks:
            task.add_done_callback(_end_if_failed)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.upstream.close()
            await asyncio.to_thread(self.spans.close)

    # -- what clients and D's send

    async def _generate(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        headers, request_id = forwarded(scope, self._keys)
        with self._intake.body() as body:
            try:  # no variable for the body: this frame would keep it as long as the stream
                request = await self.front.turns.run(
                    bodies.parsing(scope["path"], await self._read(body, scope, receive, scope["path"]))
                )
            except bodies.BodyError as problem:
                await _unusable(send, scope["path"], request_id, problem)
                return
            prefills = self._named.of(headers) if self._named is not None else None  # a whole request names them
            exchange = HttpExchange(
                request, headers, request_id, Interrupt(), send, prefills=prefills, release=body.release
            )
            del request
            await self._attend(scope, exchange, self.front.serve(exchange))

    async def _pass_on(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        headers, request_id = forwarded(scope, self._keys)
        if not passing.is_canonical(scope["path"]):
            raise NotTaken(known(404, "PD-META-016", path=one_line(scope["path"], 128)))
        route = passing.call_of(scope).route
        with self._intake.body() as body:
            try:
                stripped = await self.front.turns.run(bodies.stripping(await self._read(body, scope, receive, route)))
                model = ""
                if self.fleet.several_models:
                    model = await self.front.turns.run(passing.model_of(scope["path"], stripped))
                call = passing.call_of(scope, stripped, model)
            except bodies.BodyError as problem:
                await _unusable(send, route, request_id, problem)
                return
            exchange = HttpExchange(call.request(), headers, request_id, Interrupt(), send)
            await self._attend(scope, exchange, passing.pass_on(self.front, exchange, call))

    async def _read(self, body: Body, scope: Scope, receive: Receive, route: str) -> bytes | memoryview:
        try:
            return await body.read(scope, receive, self.settings.max_body_bytes)
        except CallerLeft:
            METRICS.client_left.inc()
            METRICS.requests.labels(route, "left").inc()
            raise
        except NotTaken as refused:
            METRICS.requests.labels(route, refused.answer.status).inc()
            raise

    async def _attend(self, scope: Scope, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        """Run a client's request from its body to its end, and count it."""
        interrupt = exchange.interrupt
        try:
            await while_connected(scope, interrupt, work)
        finally:
            if interrupt.left:
                METRICS.client_left.inc()
            METRICS.requests.labels(exchange.route, exchange.status if not interrupt.left else "left").inc()

    async def _reserve(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        with self._intake.body() as body:
            posted = await body.read(scope, receive, _MAX_RESERVATION_BYTES)
            interrupt = Interrupt()
            await while_connected(scope, interrupt, self._reservations.answer(posted, interrupt, send))

    async def _loaded(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        with self._intake.body() as body:
            await self._reservations.report(await body.read(scope, receive, MAX_REPORT_BYTES), send)

    # -- what operators ask

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200, headers={OWN_MARK.decode(): "1"})

    async def _healthcheck(self, _: Request) -> Response:
        """Answer in the form of vllm-ascend's example proxy."""
        counts = {f"{role.value}_instances": len(self.fleet.of(role)) for role in Role}
        return JSONResponse({"status": "ok", **counts})

    async def _readiness(self, _: Request) -> Response:
        ready = self.canary.ready()
        pairs = [{"prefill": p, "decode": d} for p, d in self.canary.proven()]
        body = {"ready": ready, "proven_pairs": pairs, "last_error": "" if ready else self.canary.last_error}
        return JSONResponse(body, 200 if ready else 503)

    async def _metrics(self, _: Request) -> Response:
        """Return the page. However many ask, one is made at a time."""
        if self._page is None or self._page.done():
            self.report(details=False)
            self._page = asyncio.create_task(METRICS.page(self.fleet.labels()), name="metrics")
        return Response(await asyncio.shield(self._page), media_type=prometheus_client.CONTENT_TYPE_LATEST)


async def _unusable(send: AsgiSend, route: str, request_id: str, problem: bodies.BodyError) -> None:
    METRICS.requests.labels(route, 400).inc()
    answer = known(400, "PD-META-012", why=problem)
    answer.headers.append((b"x-request-id", request_id.encode("latin-1")))
    await send_answer(send, answer)


async def _only_posts(scope: Scope, receive: Receive, send: AsgiSend) -> None:
    """Refuse any other method: `Dispatcher` handles POSTs to these routes."""
    raise HTTPException(405, headers={"Allow": "POST"})


async def _no_route(request: Request, problem: Exception) -> Response:
    """Answer with an error of our own: Starlette's is plain text."""
    wrong_method = isinstance(problem, HTTPException) and problem.status_code == 405
    path = request.url.path[:128]
    headers = {"x-request-id": id_of(request)}
    if isinstance(problem, HTTPException):
        headers.update(problem.headers or {})
    if wrong_method:
        answer = known(405, "PD-META-017", path=path, method=request.method)
    else:
        answer = known(404, "PD-META-016", path=path)
    return Response(answer.body, answer.status, headers, media_type="application/json")


def _end_if_failed(task: asyncio.Task[None]) -> None:
    """End the worker if a task of it failed: without probes or heartbeats it only looks alive."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("%s failed, so this worker ends", task.get_name(), exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)


class Dispatcher:
    """The ASGI application: POSTs to the busy routes go to their handlers, all else goes to Starlette."""

    def __init__(self, busy: dict[str, AsgiEndpoint], rest: Starlette) -> None:
        self._busy = busy
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        endpoint = self._busy.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (endpoint or self._rest)(scope, receive, send)


class AsgiEndpoint:
    """A bare ASGI handler that a Route takes as it is, without a Request object per call."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        try:
            await self._handle(scope, receive, send)
        except CallerLeft:
            return  # the caller is gone
        except NotTaken as refused:
            refused.answer.headers.append((b"x-request-id", id_of(Request(scope)).encode("latin-1")))
            await send_answer(send, refused.answer)


async def while_connected(scope: Scope, interrupt: Interrupt, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; interrupt it if the caller leaves before its end."""
    connection: Protocol = scope["extensions"][CONNECTION]
    gone = interrupt.caller_left
    connection.watch(gone)
    try:
        await work
    except asyncio.CancelledError:
        if not interrupt.left:
            raise
        uncancel(interrupt.task)
    finally:
        connection.unwatch(gone)


def forwarded(scope: Scope, keys: ClientKeys) -> tuple[Headers, str]:
    """Return the client's headers for an engine, and the request's id: the client's own, or a new one.

    Raise NotTaken for a request of another metaserver, and for one without an accepted key.
    """
    named: list[bytes] = []
    given, kind = b"", None
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value
        elif name == b"content-type":
            kind = value
        elif name == OWN_MARK:
            raise NotTaken(known(508, "PD-META-023"))
        elif name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            named += (part.strip().lower() for part in value.split(b","))
    drop = {*_NOT_FORWARDED, *named} if named else _NOT_FORWARDED
    headers = keys.for_engine(scope["method"], [header for header in scope["headers"] if header[0] not in drop])
    request_id = kept_id(given)
    headers.append((OWN_MARK, b"1"))
    headers.append((b"x-request-id", request_id.encode()))  # always, even if the client's Connection header lists it
    if kind is None:
        headers.append((b"content-type", b"application/json"))
    if scope.get("client"):
        before = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        headers.append((b"x-forwarded-for", b", ".join([*before, scope["client"][0].encode()])))
    return headers, request_id
