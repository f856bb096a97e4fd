# SPDX-License-Identifier: Apache-2.0
"""The admin API: list, add, drain and remove instances; the state of everything as JSON.

With a token every call must carry it, except for the page. Without one only callers on this host are admitted, and only
under a loopback name, so that no web page that is opened there can reach the API.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from vllm_ascend_pd.channel.exposure import names_loopback
from vllm_ascend_pd.http.http1 import Upstream, UpstreamError
from vllm_ascend_pd.metaserver.bodies import UNREADABLE
from vllm_ascend_pd.metaserver.decisions import Role
from vllm_ascend_pd.metaserver.service.exchange import kept_id
from vllm_ascend_pd.metaserver.service.faults import known
from vllm_ascend_pd.metaserver.service.fleet import Fleet, Instance, parse_spec
from vllm_ascend_pd.metaserver.service.instances_file import Members
from vllm_ascend_pd.metaserver.service.page import HEADERS, PAGE, timeline

Operation = dict[str, Any]
Handler = Callable[[Request], Awaitable[Response]]
_MAX_BODY = 64 << 10
_RESET_S = 10.0


class AdminRefusal(Exception):
    def __init__(self, status: int, code: str, **values: object) -> None:
        self.answer = known(status, code, None, **values)
        super().__init__(code)


def apply(fleet: Members, operation: Operation) -> None:
    """Carry out one operation in this process; every worker applies the same ones in the same order."""
    kind, name = operation["op"], operation.get("name", "")
    if kind == "members":
        fleet.become(operation)
    elif kind == "add":
        fleet.add(parse_spec(Role(operation["role"]), operation["url"], operation["weight"]), "admin")
    elif kind == "remove":
        fleet.remove(name)
    elif kind == "forget":
        for each in fleet:
            each.prompts.forget()
    else:
        instance = fleet.get(name)
        if instance is not None:
            instance.draining = kind == "drain"


class Admin:
    """Routes of the admin API.

    `perform` applies an operation in all workers; `state` is the sum over them; engines' traces are in `trace_dir`.
    """

    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        token: str,
        perform: Callable[[Operation], Awaitable[None]],
        state: Callable[[], dict[str, Any]],
        trace_dir: str = "",
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._token = token
        self._perform = perform
        self._state = state
        self._trace_dir = trace_dir

    def routes(self) -> list[Route]:
        return [
            Route("/", self._page if self._token else self._guarded(self._page)),
            Route("/status", self._guarded(self._status)),
            Route("/timeline", self._guarded(self._timeline)),
            Route("/instances", self._guarded(self._instances), methods=["GET", "POST"]),
            Route("/instances/{name}", self._guarded(self._remove), methods=["DELETE"]),
            Route("/reset_prefix_cache", self._guarded(self._reset), methods=["POST"]),
            Route("/instances/{name}/{op}", self._guarded(self._drain), methods=["POST"]),
        ]

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self.check(request)
                return await handler(request)
            except AdminRefusal as refusal:
                answer = refusal.answer
                headers = {"x-request-id": id_of(request)}
                if answer.status == 401:
                    headers["www-authenticate"] = "Bearer"
                return Response(answer.body, answer.status, headers, media_type="application/json")

        return guarded

    def check(self, request: Request) -> None:
        """Raise AdminRefusal if the caller is not admitted."""
        if self._token:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                raise AdminRefusal(401, "PD-SEC-005")
            return
        caller = request.client.host if request.client else ""
        if not (names_loopback(caller) and names_loopback(request.url.hostname or "")):
            raise AdminRefusal(403, "PD-SEC-006")

    async def _status(self, _: Request) -> Response:
        return Response(msgspec.json.encode(self._state()), media_type="application/json")

    async def _page(self, _: Request) -> Response:
        """Return the page. With a token it is open to all: it asks for the token and shows nothing without it."""
        return HTMLResponse(PAGE, headers=HEADERS)

    async def _timeline(self, request: Request) -> Response:
        transfer = request.query_params.get("transfer", "")
        return JSONResponse(await asyncio.to_thread(timeline, self._trace_dir, transfer))

    async def _instances(self, request: Request) -> Response:
        """Handle GET and POST. With one route for each, the first alone would say which methods are allowed."""
        if request.method == "POST":
            return await self._add(request)
        return JSONResponse({"instances": self._state()["instances"]})

    async def _add(self, request: Request) -> Response:
        body = await _json(request)
        try:
            if unknown := set(body) - {"role", "url", "weight"}:
                raise ValueError(f"unknown key {min(unknown)!r}; role, url and weight are known")
            role = Role(body.get("role"))
            spec = parse_spec(role, body.get("url"), body.get("weight", 1.0))
        except ValueError as problem:
            raise AdminRefusal(400, "PD-META-012", why=problem) from problem
        there = self._fleet.get(spec.name)
        if there is not None and there.role is not role:
            raise AdminRefusal(409, "PD-META-019", name=spec.name, role=there.role.value)
        operation = {"op": "add", "name": spec.name, "role": role.value, "url": body["url"], "weight": spec.weight}
        await self._perform(operation)
        return JSONResponse(self._facts(spec.name), 200 if there else 201)

    async def _remove(self, request: Request) -> Response:
        name = self._known(request)
        await self._perform({"op": "remove", "name": name})
        return JSONResponse({"removed": name})

    async def _drain(self, request: Request) -> Response:
        name, op = self._known(request), request.path_params["op"]
        if op not in ("drain", "undrain"):
            raise AdminRefusal(404, "PD-META-016", path=request.url.path)
        _require_json(request)
        await self._perform({"op": op, "name": name})
        return JSONResponse(self._facts(name))

    async def _reset(self, request: Request) -> Response:
        """Make every engine forget its prefixes. The route is vllm-ascend's example proxy's."""
        _require_json(request)
        await self._perform({"op": "forget"})
        instances = list(self._fleet)
        ends = await asyncio.gather(*(self._reset_one(instance) for instance in instances))
        engines = {instance.name: end for instance, end in zip(instances, ends, strict=True)}
        return JSONResponse({"engines": engines}, 200 if all(end == "200" for end in ends) else 502)

    async def _reset_one(self, instance: Instance) -> str:
        try:
            reply = await self._upstream.send(instance.origin, "POST", b"/reset_prefix_cache", [], b"", _RESET_S)
            async with reply:
                await reply.rest(_MAX_BODY)
        except UpstreamError as problem:
            return problem.why
        return str(reply.status)

    def _known(self, request: Request) -> str:
        name: str = request.path_params["name"]
        if self._fleet.get(name) is None:
            raise AdminRefusal(404, "PD-META-018", name=name)
        return name

    def _facts(self, name: str) -> dict[str, Any]:
        return next((i for i in self._state()["instances"] if i["name"] == name), {"name": name})


def id_of(request: Request) -> str:
    """Return the id of a request that is answered here."""
    given = request.headers.getlist("x-request-id")
    return kept_id(given[-1].encode("latin-1") if given else b"")


def _require_json(request: Request) -> None:
    """Raise AdminRefusal for any other type. A web page cannot send JSON to another origin without a preflight."""
    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise AdminRefusal(415, "PD-META-020")


async def _json(request: Request) -> dict[str, Any]:
    _require_json(request)
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY:
            raise AdminRefusal(413, "PD-META-013", max=_MAX_BODY)
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE as problem:
        raise AdminRefusal(400, "PD-META-012", why=f"it is not a JSON object: {problem}") from problem
