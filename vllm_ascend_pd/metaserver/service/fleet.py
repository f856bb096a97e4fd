# SPDX-License-Identifier: Apache-2.0
"""The instances this process knows: their load, their circuits, and who is chosen."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from vllm_ascend_pd.metaserver.decisions import (
    Affinity,
    Candidate,
    Circuit,
    CircuitPolicy,
    Condition,
    Evidence,
    Role,
    choose,
    condition,
    prefer,
)


@dataclass(slots=True, eq=False)
class Instance:
    """One engine as this process sees it."""

    role: Role
    scheme: str
    host: str
    port: int
    weight: float = 1.0
    circuit: Circuit = field(default_factory=Circuit)
    answered: bool = False
    healthy: bool = False  # its last probe was good
    draining: bool = False
    load: float = 0.0  # tokens in flight
    requests: int = 0  # legs in flight
    served: int = 0
    last_error: str = ""

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def base(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    def condition(self, now: float) -> Condition:
        return condition(self.circuit, now, self.answered, self.draining)

    def usable(self, now: float) -> bool:
        return not self.draining and self.weight > 0 and self.circuit.admits(now)

    def last_resort(self) -> bool:
        """Its circuit is open for bad answers, but it answers: better than nobody, and a poisonous request that fails
        everywhere must not shut the door for all others."""
        return not self.draining and self.weight > 0 and self.circuit.wedged and self.healthy


def parse_instance(role: Role, text: str, policy: CircuitPolicy) -> Instance:
    """`host:port`, or a URL. Raises ValueError with the text in it."""
    parts = urlsplit(text if "://" in text else "http://" + text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise ValueError(f"{role.value} instance {text!r} is not host:port or http(s)://host:port")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Instance(role, parts.scheme, parts.hostname, port, circuit=Circuit(policy))


class Fleet:
    def __init__(self, policy: CircuitPolicy) -> None:
        self.policy = policy
        self._instances: dict[tuple[Role, str], Instance] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(tuple(self._instances.values()))

    def add(self, instance: Instance) -> Instance:
        return self._instances.setdefault((instance.role, instance.name), instance)

    def of(self, role: Role) -> list[Instance]:
        return [i for i in self._instances.values() if i.role is role]

    def usable(self, role: Role, avoid: frozenset[str] = frozenset()) -> bool:
        now = time.monotonic()
        return any(i.name not in avoid and i.usable(now) for i in self.of(role))

    def choose(
        self, role: Role, cost: float, avoid: frozenset[str] = frozenset(), affinity: Affinity | None = None
    ) -> Instance | None:
        """The instance for `cost` more tokens; those in `avoid` only when there is no other."""
        now = time.monotonic()
        names = prefer((i.name for i in self.of(role) if i.usable(now)), avoid)
        usable = [self._instances[role, name] for name in names]
        if not usable:
            usable = [i for i in self.of(role) if i.last_resort()]
        answered = [i for i in usable if i.answered] or usable
        name = choose([Candidate(i.name, i.load, i.weight) for i in answered], cost, random.random(), affinity)
        return self._instances[role, name] if name is not None else None

    @contextmanager
    def leg(self, instance: Instance, cost: float) -> Iterator[None]:
        """A request is at the instance."""
        instance.circuit.sent(time.monotonic())
        instance.load += cost
        instance.requests += 1
        try:
            yield
        finally:
            instance.load -= cost
            instance.requests -= 1

    def seen(self, instance: Instance, evidence: Evidence, why: str = "") -> None:
        """Something was learned about it: the circuit moves."""
        instance.circuit.seen(time.monotonic(), evidence, random.random())
        if evidence in (Evidence.PROBE_OK, Evidence.PROBE_FAILED):
            instance.healthy = evidence is Evidence.PROBE_OK
        if evidence in (Evidence.SERVED, Evidence.PROBE_OK):
            instance.answered = True
            instance.served += evidence is Evidence.SERVED
        else:
            instance.last_error = why
