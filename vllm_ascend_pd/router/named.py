# SPDX-License-Identifier: Apache-2.0
"""P's that requests name in a header, for the sidecar of a D, which has no list of P's.

llm-d's picker sets the header, but every client that reaches the sidecar can set it too: only allowed addresses are
accepted. A P is added to the fleet when a request names it, and removed when none has named it for a while. Of the
addresses at which nothing has answered yet, only a few are kept: each is probed, and must push out no P.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.router.core.decisions import Role
from vllm_ascend_pd.router.faults import known
from vllm_ascend_pd.router.fleet import NAMED, Fleet, Instance, Spec, parse_spec
from vllm_ascend_pd.router.intake import NotTaken
from vllm_ascend_pd.shared.http_session import Headers

HEADER = b"x-prefiller-host-port"
MAX_OF_ONE = 16  # P's of one request; further ones are ignored
MAX_PREFILLS = 1024  # P's that are kept at a time
MAX_SILENT = 128  # of these, P's that have not answered yet
KEPT_S = 600.0  # after the last request that named a P; a P that is kept is probed
_LOOK_EVERY_S = 10.0

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Allowed:
    """Allowed addresses: a network or one host, with every port or one."""

    network: Network | None
    host: str
    port: int  # 0: any

    @classmethod
    def parse(cls, text: str) -> Allowed:
        """Parse `host`, `host:port`, `10.0.0.0/8`, `10.0.0.0/8:8000`, `[fd00::/8]:8000`. Raise ValueError."""
        host, port = text, ""
        if text.startswith("["):
            host, _, port = text[1:].partition("]")
            if port and not port.startswith(":"):
                raise ValueError(f"{text!r} has something behind its bracket that is no port")
            port = port[1:]
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        if (port or text.endswith(":")) and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{text!r} has no port behind its colon")
        try:
            network: Network | None = ipaddress.ip_network(host)
        except ValueError:
            network = None
            if not host or "/" in host or ":" in host:
                raise ValueError(f"{text!r} is neither a host nor a network") from None
        return cls(network, host.lower(), int(port or 0))

    def holds(self, spec: Spec) -> bool:
        if self.port and spec.origin.port != self.port:
            return False
        if self.network is None:
            return spec.origin.host.lower() == self.host
        try:
            return ipaddress.ip_address(spec.origin.host) in self.network
        except ValueError:
            return False  # a name: it may resolve to any address


class Named:
    """P's that requests name. Each is an ordinary instance, until no request has named it for `KEPT_S`."""

    def __init__(self, fleet: Fleet, allowed: Iterable[str]) -> None:
        self._fleet = fleet
        self._allowed = [Allowed.parse(text) for text in allowed]
        self._last: OrderedDict[str, float] = OrderedDict()  # when each was named last
        self._silent: OrderedDict[str, Instance] = OrderedDict()  # had not answered when they were added

    def of(self, headers: Headers) -> frozenset[str]:
        """Return the P's that a request names, now in the fleet; if none, its D prefills by itself. Raise NotTaken."""
        texts = [one.strip() for name, value in headers if name == HEADER for one in value.decode("latin-1").split(",")]
        return frozenset(self._known(text) for text in texts[:MAX_OF_ONE] if text)

    def _known(self, text: str) -> str:
        try:
            spec = parse_spec(Role.PREFILL, text)
            if not any(one.holds(spec) for one in self._allowed):
                raise NotTaken(known(403, "PD-META-032", address=one_line(spec.name, 128)))
            instance = self._fleet.get(spec.name)
            if instance is None or instance.origin != spec.origin:
                self._silent[spec.name] = self._fleet.add(spec, NAMED)
        except ValueError as problem:
            raise NotTaken(known(400, "PD-META-012", why=f"{HEADER.decode()}: {one_line(str(problem), 200)}")) from None
        self._last[spec.name] = time.monotonic()
        self._last.move_to_end(spec.name)
        if spec.name in self._silent:
            self._silent.move_to_end(spec.name)
        while len(self._silent) > MAX_SILENT:
            name, instance = self._silent.popitem(last=False)
            if not instance.answered:
                self._forget(name)
        while len(self._last) > MAX_PREFILLS:
            self._forget(next(iter(self._last)))
        return spec.name

    def _forget(self, name: str) -> None:
        """Remove a P, unless an operator has added it."""
        del self._last[name]
        self._silent.pop(name, None)
        instance = self._fleet.get(name)
        if instance is not None and instance.source == NAMED:
            self._fleet.remove(name)

    async def run(self) -> None:
        """Remove P's that are not named any more."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            before = time.monotonic() - KEPT_S
            while self._last and next(iter(self._last.values())) < before:
                self._forget(next(iter(self._last)))
