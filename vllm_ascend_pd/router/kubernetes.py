# SPDX-License-Identifier: Apache-2.0
"""Instances that a Kubernetes Service selects: its EndpointSlices, listed once and then watched.

An engine enters when its pod is ready. It leaves when its pod terminates or is gone, and not when it is unready for a
moment: whether an engine takes requests is for the metaserver's own probes to say. While the API does not answer, all
stay. Each answer has a deadline, and each line and list a bound.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import quote

import msgspec

from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.router.core.decisions import Role
from vllm_ascend_pd.router.fleet import MAX_ENDPOINTS, Fleet, Spec, parse_spec
from vllm_ascend_pd.router.keys import bearer
from vllm_ascend_pd.router.upstream import Reply, Upstream
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError
from vllm_ascend_pd.shared.http_session import Origin
from vllm_ascend_pd.shared.settings import impossible
from vllm_ascend_pd.shared.tls_files import TlsFiles
from vllm_ascend_pd.shared.within import within

log = logging.getLogger(__name__)
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"  # where each pod has its token, CA and namespace
_CONNECT_S, _ANSWER_S = 3.0, 10.0
_WATCH_S = 60  # the API ends a watch then; the next one goes on where it ended
_SILENT_S = 90.0  # the API would have ended it before
_LIST_BYTES, _LINE_BYTES, _SLICES = 16 << 20, 4 << 20, 500
_AGAIN = Backoff(first_s=0.2, longest_s=10.0)
_SERVICE = re.compile(r"(?:([a-z0-9-]{1,63})/)?([a-z0-9-]{1,63})(?::([a-z0-9-]{1,63}))?")


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _PodEndpoint(msgspec.Struct, rename={"pod": "targetRef"}):
    addresses: list[str]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    pod: dict[str, str] | None = None


class _SlicePort(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _SliceFacts(msgspec.Struct, rename={"version": "resourceVersion", "more": "continue"}):
    name: str = ""
    version: str = ""
    more: str = ""


class EndpointSlice(msgspec.Struct, rename={"family": "addressType"}):
    metadata: _SliceFacts
    family: str = ""
    endpoints: list[_PodEndpoint] | None = None
    ports: list[_SlicePort] | None = None


class _SliceList(msgspec.Struct):
    metadata: _SliceFacts
    items: list[EndpointSlice]


class _ApiStatus(msgspec.Struct):
    code: int = 0
    message: str = ""


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class ApiUnusable(Exception):
    """Answer of the API that cannot be used."""


def api_from(environ: dict[str, str]) -> str:
    """Return the URL of the API that pods are given; empty outside of a cluster."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""


class KubernetesService:
    """The instances of one role, by a Service: `NAME`, `NAMESPACE/NAME`, either with `:PORT`, a port's name."""

    def __init__(self, role: Role, text: str, fleet: Fleet, api: str = "", account: str = ACCOUNT) -> None:
        """Raise ConfigError if `text` names no Service, or no API is known."""
        self._role, self._fleet, self._account = role, fleet, Path(account)
        flag, match = f"--{role.value}-service", _SERVICE.fullmatch(text)
        if match is None:
            impossible(flag, text, "it is not [NAMESPACE/]NAME[:PORT]", "Name a Service, as in pd-decode:http.")
            return
        self.source = f"service {text}"
        self._namespace, self._name, self._port = match[1] or "", match[2], match[3] or ""
        url = api or api_from(dict(os.environ))
        if not url:
            why = "this process is in no pod: KUBERNETES_SERVICE_HOST is not set"
            impossible(flag, text, why, "Start it in the cluster, or give --kubernetes-api.")
        self._origin: Origin = parse_spec(role, url).origin
        ca = str(self._account / "ca.crt")
        tls = TlsFiles(lambda: _context_of(ca), ca)
        self._upstream = Upstream(_CONNECT_S, _SILENT_S, tls)
        self._slices: dict[str, EndpointSlice] = {}
        self._here: set[str] = set()
        self._shown = ""  # in the log
        self._version = ""  # where the next watch begins; empty: with a list
        self._said = ""
        self._rounds = 0  # without a use, the present one too

    async def watch(self, changed: Callable[[], None] = lambda: None) -> None:
        """Follow the Service without end. Call `changed` after each change of the instances."""
        try:
            while True:
                self._rounds += 1
                try:
                    if not self._version:
                        await self._list(changed)
                    await self._follow(changed)
                except (UpstreamError, ApiUnusable, msgspec.MsgspecError, OSError, ValueError) as problem:
                    if not isinstance(problem, UpstreamError | OSError):
                        self._version = ""  # what cannot be used would come again
                    self._say(one_line(problem, 300))
                await asyncio.sleep(_AGAIN.delay(max(1, self._rounds), 0.5 + random.random() / 2))
        finally:
            await self._upstream.close()

    def _say(self, problem: str) -> None:
        """Log a problem once, and its end."""
        if problem and problem != self._said:
            log.warning("%s: the Kubernetes API cannot be used, its instances stay: %s", self.source, problem)
        elif self._said and not problem:
            log.info("%s: the Kubernetes API answers again", self.source)
        self._said = problem

    def _ask(self, more: str) -> Reply:
        """Begin a request. Token and namespace are read each time: the kubelet replaces the token."""
        token = (self._account / "token").read_text().strip()
        namespace = self._namespace or (self._account / "namespace").read_text().strip()
        path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace)}/endpointslices"
        query = f"labelSelector=kubernetes.io%2Fservice-name%3D{self._name}&{more}"
        headers = [(b"accept", b"application/json"), *bearer(token)]
        return self._upstream.ask(self._origin, "GET", f"{path}?{query}".encode(), headers, b"", _ANSWER_S)

    async def _list(self, changed: Callable[[], None]) -> None:
        async with self._ask(f"limit={_SLICES}") as reply:
            body = await _body(reply)
            if reply.status != 200:
                raise ApiUnusable(f"it answered {reply.status}: {body[:200].decode(errors='replace')}")
        listed = msgspec.json.decode(body, type=_SliceList)
        if listed.metadata.more:
            raise ApiUnusable(f"the Service has more than {_SLICES} EndpointSlices")
        self._slices = {one.metadata.name: one for one in listed.items}
        self._take(changed)
        self._version = listed.metadata.version

    async def _follow(self, changed: Callable[[], None]) -> None:
        """Apply what a watch brings until it ends. If its beginning is too old, the next round lists again."""
        more = f"watch=1&allowWatchBookmarks=true&timeoutSeconds={_WATCH_S}&resourceVersion={quote(self._version)}"
        async with self._ask(more) as reply:
            if reply.status == 410:
                self._version = ""
                return
            if reply.status != 200:
                body = await _body(reply)
                raise ApiUnusable(f"a watch was answered {reply.status}: {body[:200].decode(errors='replace')}")
            self._say("")
            async for line in _lines(reply):
                event = msgspec.json.decode(line, type=_WatchEvent)
                if event.type == "ERROR":
                    status = msgspec.json.decode(event.object, type=_ApiStatus)
                    if status.code == 410:
                        self._version = ""
                        return
                    raise ApiUnusable(f"a watch ended with {status.code}: {status.message}")
                one = msgspec.json.decode(event.object, type=EndpointSlice)
                if event.type in ("ADDED", "MODIFIED"):
                    self._slices[one.metadata.name] = one
                elif event.type == "DELETED":
                    self._slices.pop(one.metadata.name, None)
                if event.type != "BOOKMARK":
                    self._take(changed)
                self._version, self._rounds = one.metadata.version, 0
        self._rounds = 0

    def _take(self, changed: Callable[[], None]) -> None:
        """Make the fleet's instances of this source those of the slices. Raise ValueError and change nothing if one of
        them cannot be an instance."""
        wanted: dict[str, Spec] = {}
        unlike = False  # whether a slice has other ports only
        families: dict[str, str] = {}  # by pod; of the addresses of both IPv4 counts
        for one in sorted(self._slices.values(), key=lambda one: one.family):
            port = self._port_of(one)
            if port is None:
                unlike = unlike or bool(one.ports and self._port)
                continue
            for endpoint in one.endpoints or ():
                address = endpoint.addresses[0] if endpoint.addresses else ""
                scheme = "https" if port.name == "https" else "http"
                host = f"[{address}]" if ":" in address else address
                spec = parse_spec(self._role, f"{scheme}://{host}:{port.port}")
                if families.setdefault((endpoint.pod or {}).get("uid", spec.name), one.family) != one.family:
                    continue
                ready = endpoint.conditions.ready is not False or spec.name in self._here
                if ready and not endpoint.conditions.terminating:
                    wanted[spec.name] = spec
        if len(wanted) > MAX_ENDPOINTS:
            raise ApiUnusable(f"{len(wanted)} instances are more than {MAX_ENDPOINTS}")
        self._fleet.replace(wanted.values(), self.source)
        shown = ", ".join(sorted(wanted)) or f"none{f': no port is named {self._port}' if unlike else ''}"
        if shown != self._shown:
            log.info("%s: its %s instances are %s", self.source, self._role.value, one_line(shown, 1000))
            self._shown = shown
        if wanted.keys() != self._here:
            self._here = set(wanted)
            changed()

    def _port_of(self, one: EndpointSlice) -> _SlicePort | None:
        """Return the slice's port that is meant. Several are in no order: without a name it is http or https."""
        ports = [port for port in one.ports or () if port.port and self._port in ("", port.name)]
        if len(ports) > 1:
            ports = [port for port in ports if port.name in ("http", "https")]
            if len(ports) != 1:
                raise ApiUnusable("the Service has several ports: name one, behind a colon")
        return ports[0] if ports else None


def _context_of(ca: str) -> ssl.SSLContext:
    """Return a context for the API. From Python 3.13 on the default asks more of a CA than what many clusters have."""
    context = ssl.create_default_context(cafile=ca)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


async def _body(reply: Reply) -> bytes:
    """Return the rest of an answer, which has one deadline for all of it."""
    try:
        return await within(_ANSWER_S, reply.rest(_LIST_BYTES))
    except asyncio.TimeoutError:
        raise UpstreamError(HttpFailure.TIMEOUT, f"its answer was not whole after {_ANSWER_S:g} s") from None


async def _lines(reply: Reply) -> AsyncIterator[bytes]:
    """Yield the lines of an answer that never needs to end."""
    rest = b""
    while piece := await reply.read(_SILENT_S):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                yield line
        if len(rest) > _LINE_BYTES:
            raise ApiUnusable(f"a line of a watch has more than {_LINE_BYTES} bytes")
