# SPDX-License-Identifier: Apache-2.0
"""One worker's answers: routes, bodies read within limits, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from functools import partial
from typing import Any

import msgspec
import prometheus_client

from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.protocol import continuing
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.reports import MAX_REPORT_BYTES
from vllm_ascend_pd.protocol.reports import ROUTE as LOADS
from vllm_ascend_pd.router import passing, spans, state
from vllm_ascend_pd.router.admin import Admin, Handle, Routes, reading
from vllm_ascend_pd.router.cache_events import CacheEvents, parse_ports
from vllm_ascend_pd.router.canary import Canary
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.decisions import Role
from vllm_ascend_pd.router.exchange import AsgiSend, HttpExchange, id_of
from vllm_ascend_pd.router.faults import Answer, json_answer, known
from vllm_ascend_pd.router.fleet import Instance
from vllm_ascend_pd.router.front import Front
from vllm_ascend_pd.router.hub import CANARY_WORKER, Hub
from vllm_ascend_pd.router.instances_file import InstancesSource, Members, configured
from vllm_ascend_pd.router.intake import Body, CallerLeft, CallerRequest, Intake, NotTaken
from vllm_ascend_pd.router.keys import ClientKeys
from vllm_ascend_pd.router.metrics import METRICS
from vllm_ascend_pd.router.named import Named
from vllm_ascend_pd.router.probes import Prober
from vllm_ascend_pd.router.relay import OWN_MARK, send_answer
from vllm_ascend_pd.router.reserve import Heartbeats, Reservations
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.router.upstream import Upstream, listed
from vllm_ascend_pd.shared.http_session import Headers
from vllm_ascend_pd.shared.within import ended

log = logging.getLogger(__name__)

# Headers that a proxy must not pass on. Accept-Encoding too: the relay reads the first bytes of an answer.
NOT_FORWARDED = frozenset(
    b"host content-length connection keep-alive transfer-encoding te trailer upgrade proxy-connection "
    b"proxy-authorization proxy-authenticate expect accept-encoding "
    b"x-request-id x-forwarded-for".split()  # made anew
)
_MAX_RESERVATION_BYTES = 64 << 20
RESERVATIONS = "/v1/metaserver"
_PASSED_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # browsers send OPTIONS before they POST


class WorkerProcess:
    """One worker process: what its requests share, and its routes."""

    def __init__(self, settings: Settings, own_url: str, hub: Hub | None = None) -> None:
        self.settings = settings
        self.fleet = Members(settings.circuit, self._lost, settings.prefix_tokens)
        self._sources: list[InstancesSource] = []
        if settings.members:
            self.fleet.become(msgspec.json.decode(settings.members))
        else:
            self._sources = configured(settings, self.fleet)
        self.upstream = Upstream(settings.connect_timeout_s, settings.idle_timeout_s, settings.engine_tls())
        self.spans = spans.make(settings.otlp_traces_endpoint)
        self.front = Front(settings, self.fleet, self.upstream, own_url, self.spans)
        ports = parse_ports(settings.kv_events)
        self._cache_events = CacheEvents(self.fleet, ports) if ports else None
        self._named = Named(self.fleet, settings.prefill_allowed) if settings.sidecar else None
        self.intake = Intake()
        self._keys = ClientKeys(settings)
        self._page: asyncio.Task[bytes] | None = None  # of metrics, made last
        self.hub = hub or Hub(0)
        self.canary = Canary(self.front, proves=self.hub.worker == CANARY_WORKER)
        self.hub.attach(self.fleet, self.report)
        self._prober = Prober(settings, self.fleet, self.upstream)
        self.heartbeats = Heartbeats(settings.heartbeat_s)
        self._reservations = Reservations(self.front, self.heartbeats)
        shared = (settings.admin_token, self.hub.perform, self.total, self.intake, settings.trace_dir)
        self._admin = Admin(self.fleet, self.upstream, *shared)
        self._passed: Routes = dict.fromkeys(_PASSED_METHODS, self._pass_on)
        reads = {"/health": self._health, "/healthcheck": self._healthcheck, "/readiness": self._readiness}
        reads["/serving"] = self._serving
        reads["/metrics"] = self._metrics
        self._routes: dict[str, Routes] = {
            **{route: {**self._passed, "POST": self._generate} for route in bodies.ROUTES},
            RESERVATIONS: {"POST": self._reserve},
            LOADS: {"POST": self._loaded},
            continuing.ROUTE: {"POST": self._asked},
            **{path: reading(make) for path, make in reads.items()},
        }

    def report(self, details: bool) -> dict[str, Any]:
        """Return the report to the other workers, and set `/metrics` from it, so that it agrees with `/status`."""
        report = state.worker_report(self.hub.worker, self.front, self.canary, self.fleet.file_problem, details)
        METRICS.running.set(report["running"])
        METRICS.waiting.set(report["waiting"])
        self.fleet.show()
        return report

    def _lost(self, instance: Instance, why: str) -> None:
        self.front.journal.trouble(Failure("PD-META-011", f"takes no requests: {why}"), instance.name)

    def total(self) -> dict[str, Any]:
        return state.sum_of([self.report(details=True), *self.hub.others()])

    async def answer(self, asked: CallerRequest, send: AsgiSend) -> None:
        """Answer a request. It is the handler of all connections."""
        try:
            await self._handler(asked)(asked, send)
        except CallerLeft:
            return
        except NotTaken as refused:
            refused.answer.headers.append((b"x-request-id", id_of(asked.headers).encode()))
            await send_answer(send, refused.answer)

    def _handler(self, asked: CallerRequest) -> Handle:
        """Return what answers a request. Raise NotTaken if nothing does."""
        passed = self._passed if asked.path.startswith("/v1/") else {}
        routes = self._routes.get(asked.path) or self._admin.routes_of(asked.path) or passed
        if (handle := routes.get(asked.method)) is not None:
            return handle
        path = asked.path[:128]
        if not routes:
            raise NotTaken(known(404, "PD-META-016", path=path))
        answer = known(405, "PD-META-017", path=path, method=asked.method)
        answer.headers.append((b"allow", ", ".join(routes).encode()))
        raise NotTaken(answer)

    @contextlib.asynccontextmanager
    async def standing(self) -> AsyncIterator[None]:
        """Run what a worker does beside its requests."""
        running = {"probes": self._prober.run(), "all heartbeats": self.heartbeats.run(), "hub": self.hub.run()}
        running["canary"] = self.canary.run()
        for source in self._sources:
            running[source.source] = source.watch()
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
            await self.spans.close()
            self.front.aside.close()

    # -- what clients and D's send

    async def _generate(self, asked: CallerRequest, send: AsgiSend) -> None:
        with _counted_if_refused(asked.path), self.intake.body(asked) as body:
            headers, request_id = forwarded(asked.method, asked.headers, asked.peer, self._keys)
            try:  # no variable for the body: this frame would keep it as long as the stream
                parse = partial(bodies.parse, asked.path)
                request = await self.front.aside.run(parse, await self._read(body))
            except bodies.BodyError as problem:
                raise NotTaken(known(400, "PD-META-012", why=problem)) from problem
            prefills = self._named.of(headers) if self._named is not None else None  # a whole request names them
            exchange = HttpExchange(request, headers, request_id, send, prefills=prefills, release=body.release)
            del request
            await self._attend(asked, exchange, self.front.serve(exchange))

    async def _pass_on(self, asked: CallerRequest, send: AsgiSend) -> None:
        with _counted_if_refused(passing.call_of(asked).route), self.intake.body(asked) as body:
            headers, request_id = forwarded(asked.method, asked.headers, asked.peer, self._keys)
            if not passing.is_canonical(asked.target):
                raise NotTaken(known(404, "PD-META-016", path=one_line(asked.path, 128)))
            try:
                stripped = await self.front.aside.run(bodies.stripped, await self._read(body))
                model = ""
                if self.fleet.several_models:
                    model = await self.front.aside.run(partial(passing.model_of, asked.path), stripped)
                call = passing.call_of(asked, stripped, model)
            except bodies.BodyError as problem:
                raise NotTaken(known(400, "PD-META-012", why=problem)) from problem
            exchange = HttpExchange(call.request(), headers, request_id, send)
            await self._attend(asked, exchange, passing.pass_on(self.front, exchange, call))

    async def _read(self, body: Body) -> bytes | memoryview:
        return await body.read(self.settings.max_body_bytes)

    async def _attend(self, asked: CallerRequest, exchange: HttpExchange, work: Coroutine[Any, Any, None]) -> None:
        """Run a client's request from its body to its end, and count it."""
        left = False
        try:
            left = await while_connected(asked, work) and not exchange.said_all
        finally:
            if left:
                METRICS.client_left.inc()
            METRICS.requests.labels(exchange.route, "left" if left else exchange.status).inc()

    async def _reserve(self, asked: CallerRequest, send: AsgiSend) -> None:
        with self.intake.body(asked, of_engine=True) as body:
            posted = await body.read(_MAX_RESERVATION_BYTES)
            await while_connected(asked, self._reservations.answer(posted, send))

    async def _loaded(self, asked: CallerRequest, send: AsgiSend) -> None:
        with self.intake.body(asked, of_engine=True) as body:
            await self._reservations.report(await body.read(MAX_REPORT_BYTES), send)

    async def _asked(self, asked: CallerRequest, send: AsgiSend) -> None:
        with self.intake.body(asked, of_engine=True) as body:
            await self._reservations.so_far(await body.read(continuing.MAX_QUESTION_BYTES), send)

    # -- what operators ask

    async def _health(self, _: CallerRequest) -> Answer:
        return Answer(200, b"", [(OWN_MARK, b"1")])

    async def _healthcheck(self, _: CallerRequest) -> Answer:
        """Answer in the form of vllm-ascend's example proxy."""
        counts = {f"{role.value}_instances": len(self.fleet.of(role)) for role in Role}
        return json_answer({"status": "ok", **counts})

    async def _serving(self, _: CallerRequest) -> Answer:
        """Answer whether clients' requests are served: a usable D, and a usable P where D does not stand in for one."""
        lacks = self.front.lacks()
        return json_answer({"serving": not lacks, "lacks": lacks}, 503 if lacks else 200)

    async def _readiness(self, _: CallerRequest) -> Answer:
        ready = self.canary.ready()
        pairs = [{"prefill": p, "decode": d} for p, d in self.canary.proven()]
        body = {"ready": ready, "proven_pairs": pairs, "last_error": "" if ready else self.canary.last_error}
        return json_answer(body, 200 if ready else 503)

    async def _metrics(self, _: CallerRequest) -> Answer:
        """Return the page. However many ask, one is made at a time."""
        if self._page is None or self._page.done():
            self.report(details=False)
            self._page = asyncio.create_task(METRICS.page(self.fleet.labels()), name="metrics")
        page = await asyncio.shield(self._page)
        return Answer(200, page, content_type=prometheus_client.CONTENT_TYPE_LATEST.encode())


@contextlib.contextmanager
def _counted_if_refused(route: str) -> Iterator[None]:
    """Count a client's request that is refused, or whose client leaves, before it is attended to."""
    try:
        yield
    except CallerLeft:
        METRICS.client_left.inc()
        METRICS.requests.labels(route, "left").inc()
        raise
    except NotTaken as refused:
        METRICS.requests.labels(route, refused.answer.status).inc()
        raise


def _end_if_failed(task: asyncio.Task[None]) -> None:
    """End the worker if a task of it failed: without probes or heartbeats it only looks alive."""
    if not task.cancelled() and task.exception() is not None:
        log.critical("%s failed, so this worker ends", task.get_name(), exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)


async def while_connected(asked: CallerRequest, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, and cancel it if the caller leaves before its end. Return whether the caller has left."""
    task, left = asyncio.get_running_loop().create_task(work), False

    def gone() -> None:
        nonlocal left
        left = True
        task.cancel()

    asked.connection.watch(gone)
    try:
        await ended(task)
    finally:
        asked.connection.unwatch(gone)
        if not task.done():  # the server does not wait any longer
            task.cancel()
            await ended(task)
    if not (left and task.cancelled()):
        task.result()
    return left


def forwarded(method: str, given: Headers, peer: str, keys: ClientKeys) -> tuple[Headers, str]:
    """Return a client's headers for an engine, and the request's id.

    Raise NotTaken for a request of another metaserver, and for one without an accepted key.
    """
    named: list[bytes] = []
    kind = None
    for name, value in given:
        if name == b"content-type":
            kind = value
        elif name == OWN_MARK:
            raise NotTaken(known(508, "PD-META-023"))
        elif name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            named += listed(value)
    drop = {*NOT_FORWARDED, *named} if named else NOT_FORWARDED
    headers = keys.for_engine(method, [header for header in given if header[0] not in drop])
    request_id = id_of(given)
    headers.append((OWN_MARK, b"1"))
    headers.append((b"x-request-id", request_id.encode()))  # always, even if the client's Connection header lists it
    if kind is None:
        headers.append((b"content-type", b"application/json"))
    if peer:
        before = [value for name, value in given if name == b"x-forwarded-for"]
        headers.append((b"x-forwarded-for", b", ".join([*before, peer.encode()])))
    return headers, request_id
