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
from urllib.parse import parse_qs, urlsplit

import msgspec

from vllm_ascend_pd.router.core.bodies import UNREADABLE
from vllm_ascend_pd.router.core.decisions import Role
from vllm_ascend_pd.router.exchange import AsgiSend
from vllm_ascend_pd.router.faults import Answer, json_answer, known
from vllm_ascend_pd.router.fleet import Fleet, Instance, parse_spec
from vllm_ascend_pd.router.instances_file import Members
from vllm_ascend_pd.router.intake import CallerRequest, Intake, NotTaken
from vllm_ascend_pd.router.page import HEADERS, PAGE, timeline
from vllm_ascend_pd.router.relay import send_answer
from vllm_ascend_pd.router.upstream import Upstream
from vllm_ascend_pd.shared.core.failures import UpstreamError
from vllm_ascend_pd.shared.exposure import names_loopback

Operation = dict[str, Any]
Handle = Callable[[CallerRequest, AsgiSend], Awaitable[None]]
Making = Callable[[CallerRequest], Awaitable[Answer]]
Routes = dict[str, Handle]  # by method
_MAX_BODY = 64 << 10
_RESET_S = 10.0


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
        intake: Intake,
        trace_dir: str = "",
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._token = token
        self._perform = perform
        self._state = state
        self._trace_dir = trace_dir
        self._intake = intake

        self._routes: dict[str, Routes] = {
            "/": reading(self._page if token else self._guarded(self._page)),
            "/status": reading(self._guarded(self._status)),
            "/timeline": reading(self._guarded(self._timeline)),
            "/instances": {**reading(self._guarded(self._list)), "POST": told(self._guarded(self._add))},
            "/reset_prefix_cache": {"POST": told(self._guarded(self._reset))},
        }
        self._of_one: Routes = {"DELETE": told(self._guarded(self._remove))}
        self._of_operation: Routes = {"POST": told(self._guarded(self._drain))}

    def routes_of(self, path: str) -> Routes | None:
        """Return what the admin API does at a path, by method."""
        if path.startswith("/instances/"):
            _, _, name, *operation = path.split("/")
            if name and len(operation) <= 1 and all(operation):
                return self._of_operation if operation else self._of_one
        return self._routes.get(path)

    def _guarded(self, make: Making) -> Making:
        async def guarded(asked: CallerRequest) -> Answer:
            self.check(asked)
            return await make(asked)

        return guarded

    def check(self, asked: CallerRequest) -> None:
        """Raise NotTaken if the caller is not admitted."""
        if self._token:
            given = _header(asked, b"authorization")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                answer = known(401, "PD-SEC-005")
                answer.headers.append((b"www-authenticate", b"Bearer"))
                raise NotTaken(answer)
        elif not (names_loopback(asked.peer) and names_loopback(_host(asked))):
            raise NotTaken(known(403, "PD-SEC-006"))

    async def _status(self, _: CallerRequest) -> Answer:
        return json_answer(self._state())

    async def _page(self, _: CallerRequest) -> Answer:
        """Return the page. With a token it is open to all: it asks for the token and shows nothing without it."""
        return Answer(200, PAGE.encode(), list(HEADERS), b"text/html; charset=utf-8")

    async def _timeline(self, asked: CallerRequest) -> Answer:
        query = parse_qs(asked.target.partition(b"?")[2].decode("utf-8", "replace"))
        transfer = query.get("transfer", [""])[-1]
        return json_answer(await asyncio.to_thread(timeline, self._trace_dir, transfer))

    async def _list(self, _: CallerRequest) -> Answer:
        return json_answer({"instances": self._state()["instances"]})

    async def _add(self, asked: CallerRequest) -> Answer:
        body = await self._json(asked)
        try:
            if unknown := set(body) - {"role", "url", "weight"}:
                raise ValueError(f"unknown key {min(unknown)!r}; role, url and weight are known")
            role = Role(body.get("role"))
            spec = parse_spec(role, body.get("url"), body.get("weight", 1.0))
        except ValueError as problem:
            raise NotTaken(known(400, "PD-META-012", why=problem)) from problem
        there = self._fleet.get(spec.name)
        if there is not None and there.role is not role:
            raise NotTaken(known(409, "PD-META-019", name=spec.name, role=there.role.value))
        operation = {"op": "add", "name": spec.name, "role": role.value, "url": body["url"], "weight": spec.weight}
        await self._perform(operation)
        return json_answer(self._facts(spec.name), 200 if there else 201)

    async def _remove(self, asked: CallerRequest) -> Answer:
        name, _ = self._known(asked)
        await self._perform({"op": "remove", "name": name})
        return json_answer({"removed": name})

    async def _drain(self, asked: CallerRequest) -> Answer:
        name, op = self._known(asked)
        if op not in ("drain", "undrain"):
            raise NotTaken(known(404, "PD-META-016", path=asked.path[:128]))
        _require_json(asked)
        await self._perform({"op": op, "name": name})
        return json_answer(self._facts(name))

    async def _reset(self, asked: CallerRequest) -> Answer:
        """Make every engine forget its prefixes. The route is vllm-ascend's example proxy's."""
        _require_json(asked)
        await self._perform({"op": "forget"})
        instances = list(self._fleet)
        ends = await asyncio.gather(*(self._reset_one(instance) for instance in instances))
        engines = {instance.name: end for instance, end in zip(instances, ends, strict=True)}
        return json_answer({"engines": engines}, 200 if all(end == "200" for end in ends) else 502)

    async def _reset_one(self, instance: Instance) -> str:
        try:
            asking = self._upstream.ask(instance.origin, "POST", b"/reset_prefix_cache", [], b"", _RESET_S)
            async with asking as reply:
                await reply.rest(_MAX_BODY)
        except UpstreamError as problem:
            return problem.why
        return str(reply.status)

    def _known(self, asked: CallerRequest) -> tuple[str, str]:
        """Return the instance and the operation that a path names. Raise NotTaken if there is no such instance."""
        _, _, name, *operation = asked.path.split("/")
        if self._fleet.get(name) is None:
            raise NotTaken(known(404, "PD-META-018", name=name[:128]))
        return name, "".join(operation)

    def _facts(self, name: str) -> dict[str, Any]:
        return next((i for i in self._state()["instances"] if i["name"] == name), {"name": name})

    async def _json(self, asked: CallerRequest) -> dict[str, Any]:
        _require_json(asked)
        with self._intake.body(asked) as body:
            posted = await body.read(_MAX_BODY)
            try:
                return msgspec.json.decode(posted, type=dict[str, Any])
            except UNREADABLE as problem:
                why = f"it is not a JSON object: {problem}"
                raise NotTaken(known(400, "PD-META-012", why=why)) from problem


def told(make: Making) -> Handle:
    """Return a handler that sends the answer which `make` returns."""

    async def handle(asked: CallerRequest, send: AsgiSend) -> None:
        await send_answer(send, await make(asked))

    return handle


def reading(make: Making) -> Routes:
    return dict.fromkeys(("GET", "HEAD"), told(make))


def _header(asked: CallerRequest, name: bytes) -> bytes:
    return next((value for each, value in asked.headers if each == name), b"")


def _host(asked: CallerRequest) -> str:
    """Return the host under which a caller knows us; empty if it names none."""
    try:
        return urlsplit("//" + _header(asked, b"host").decode("latin-1")).hostname or ""
    except ValueError:
        return ""


def _require_json(asked: CallerRequest) -> None:
    """Raise NotTaken for any other type. A web page cannot send JSON to another origin without a preflight."""
    if _header(asked, b"content-type").split(b";")[0].strip().lower() != b"application/json":
        raise NotTaken(known(415, "PD-META-020"))
