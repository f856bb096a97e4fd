# SPDX-License-Identifier: Apache-2.0
"""The metaserver's own metrics, at its /metrics. With several workers the numbers are the sum over them."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

PREFIX = "ascend_pd_metaserver_"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)


class Metrics:
    """One per process. Label values are routes, instances and words of this package: a client cannot make new ones."""

    def __init__(self) -> None:
        shared = bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))
        self.registry = registry = CollectorRegistry()
        self._shared = shared
        self.requests = Counter(
            PREFIX + "requests", "Requests of clients, by route and status", ("route", "status"), registry=registry
        )
        self.legs = Counter(
            PREFIX + "legs",
            "Requests sent to engines, by how they ended",
            ("role", "instance", "end"),
            registry=registry,
        )
        self.retries = Counter(PREFIX + "retries", "Attempts repeated, by what failed", ("failure",), registry=registry)
        self.broken_streams = Counter(
            PREFIX + "broken_streams", "Streams that ended with an error frame", registry=registry
        )
        self.client_left = Counter(PREFIX + "client_left", "Clients that left before the end", registry=registry)
        self.reservations = Counter(
            PREFIX + "reservations", "Reservations posted by D, by how the prefill ended", ("end",), registry=registry
        )
        self.ttft = Histogram(
            PREFIX + "ttft_seconds",
            "From a client's request to its first byte",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.leg_seconds = Histogram(
            PREFIX + "leg_ttft_seconds",
            "From sending a leg to its first byte (prefill: to its end)",
            ("role",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.running = self._gauge("requests_running", "Requests of clients under way")
        self.waiting = self._gauge("requests_waiting", "Requests of clients that wait for their turn")
        self.tokens = self._gauge("tokens_in_flight", "Estimated tokens at an instance", ("role", "instance"))
        self.up = self._gauge("instance_up", "1: takes requests", ("role", "instance"), "max")
        self.circuit = self._gauge("circuit_open", "Workers whose circuit is open", ("role", "instance"))
        self.ready = self._gauge("ready", "1: a pair has moved a block since it came up", (), "max")

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = (), across: str = "sum") -> Gauge:
        mode = "livemax" if across == "max" else "livesum"
        return Gauge(PREFIX + name, text, labels, registry=self.registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def instance(self, name: str, role: str) -> None:
        """Show an instance from its first moment on."""
        self.tokens.labels(role, name).set(0)
        self.up.labels(role, name).set(0)
        self.circuit.labels(role, name).set(0)

    def page(self) -> bytes:
        registry = self.registry
        if self._shared:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


METRICS = Metrics()
