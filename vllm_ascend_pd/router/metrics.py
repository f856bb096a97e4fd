# SPDX-License-Identifier: Apache-2.0
"""The metaserver's own metrics, at its /metrics. With several workers the numbers are the sum over them.

An engine's series end with it. With several workers each has its values in a file, from which no series can be taken
out: there the page leaves them out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest, multiprocess

from vllm_ascend_pd.shared.threads import aside

PREFIX = "ascend_pd_metaserver_"
_ENGINES = frozenset({"engine", "prefill"})  # labels that name an engine
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)


class Children:
    """A metric family whose children are looked up in a dict: the library's `labels` costs several times as much."""

    def __init__(self, family: Any, labels: tuple[str, ...]) -> None:
        self._family = family
        self._engines = [place for place, label in enumerate(labels) if label in _ENGINES]
        self._children: dict[tuple[object, ...], Any] = {}

    def labels(self, *values: object) -> Any:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._family.labels(*values)
        return child

    def keep(self, live: frozenset[str]) -> None:
        """Remove the children of engines that are not in `live`."""
        gone = [values for values in self._children if not live.issuperset(values[place] for place in self._engines)]
        for values in gone:
            del self._children[values]
            self._family.remove(*values)


class _Living:
    """Collector of another's series, without those of engines that are gone."""

    def __init__(self, families: Iterable[Metric], live: frozenset[str]) -> None:
        self._families, self._live = families, live

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            family.samples = [
                sample
                for sample in family.samples
                if self._live.issuperset(sample.labels[label] for label in _ENGINES & sample.labels.keys())
            ]
            yield family


class Metrics:
    """The metrics of one process.

    An engine's label is `engine`: Prometheus uses `instance` for the scraped address and renames a label of that name.
    Label values are routes, instances that an operator has added, and fixed names: a caller cannot make new ones.
    """

    def __init__(self) -> None:
        self._shared = bool(os.environ.get("PROMETHEUS_MULTIPROC_DIR"))
        self.registry = CollectorRegistry()
        self._of_engines: list[Children] = []
        self.requests = self._counter("requests", "Requests of clients, by route and status", "route", "status")
        self.legs = self._counter("legs", "Requests sent to engines, by how they ended", "role", "engine", "end")
        self.retries = self._counter("retries", "Legs repeated, by what failed", "failure")
        self.reservations = self._counter("reservations", "Reservations posted by D, by how they ended", "end")
        self.loads = self._counter("loads", "Loads as D reported them: received, or the code", "prefill", "end")
        self.tokens_received = self._counter("tokens_received", "Prompt tokens whose KV came from P, as D reports")
        self.tokens_cached = self._counter("tokens_cached", "Prompt tokens that P had in its cache, as D reports")
        self.tokens_recomputed = self._counter("tokens_recomputed", "Prompt tokens whose KV did not come, as D reports")
        self.decode_alone = self._counter(
            "decode_alone",
            "Prompts that D computes: short, cached, no usable P, or of a request that names none",
            "why",
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens sent to P's, about")
        self.prompt_tokens_there = self._counter("prompt_tokens_there", "Of these, what P is thought to have cached")
        self.cache_events = self._counter(
            "cache_events", "Batches of KV events received from an engine", "role", "engine"
        )
        self.broken_streams = self._counter("broken_streams", "Answers of which the client got a part only")
        self.resumes = self._counter("resumes", "Answers that another D was to go on with, by what ended them", "cause")
        self.resumes_reseeded = self._counter("resumes_reseeded", "Of these, those whose random generator began anew")
        self.resume_seconds = self._histogram(
            "resume_seconds", "From a stream's break to the next byte that its client gets"
        )
        self.client_left = self._counter("client_left", "Clients that left before the end")
        self.ttft = self._histogram("ttft_seconds", "From a client's request to its first byte", "route")
        self.leg_seconds = self._histogram(
            "leg_ttft_seconds", "From sending a leg to D's first byte, or to P's whole answer", "role"
        )
        self.running = self._gauge("requests_running", "Requests of clients under way")
        self.waiting = self._gauge("requests_waiting", "Requests of clients that wait for their turn")
        self.tokens = self._gauge("tokens_in_flight", "Estimated tokens at an instance", "role", "engine")
        self.up = self._gauge("instance_up", "1: takes requests", "role", "engine", across="livemax")
        self.circuit = self._gauge("circuit_open", "Workers whose circuit is open", "role", "engine")
        self.ready = self._gauge("ready", "1: a pair has moved a block since it came up", across="livemax")

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._family(Counter(PREFIX + name, text, labels, registry=self.registry), labels)

    def _histogram(self, name: str, text: str, *labels: str) -> Any:
        return self._family(Histogram(PREFIX + name, text, labels, buckets=_SECONDS, registry=self.registry), labels)

    def _gauge(self, name: str, text: str, *labels: str, across: Any = "livesum") -> Any:
        gauge = Gauge(PREFIX + name, text, labels, registry=self.registry, multiprocess_mode=across)
        return self._family(gauge, labels)

    def _family(self, family: Any, labels: tuple[str, ...]) -> Any:
        if not labels:
            return family
        children = Children(family, labels)
        if not _ENGINES.isdisjoint(labels):
            self._of_engines.append(children)
        return children

    async def page(self, live: frozenset[str]) -> bytes:
        """Return the page, made in a thread: many series must not hold up requests. `live`: all engines' labels."""
        if not self._shared:
            for children in self._of_engines:
                children.keep(live)
        return await aside(self._page, live)

    def _page(self, live: frozenset[str]) -> bytes:
        registry = self.registry
        if self._shared:
            registry = CollectorRegistry()
            everyone = multiprocess.MultiProcessCollector(None)  # type: ignore[no-untyped-call]
            registry.register(_Living(everyone.collect(), live))  # type: ignore[no-untyped-call]
        return generate_latest(registry)


METRICS = Metrics()
