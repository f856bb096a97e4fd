# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans: one for a client's request, and below it one for each leg, whose context the engine gets.

If they are off, nothing of OpenTelemetry is imported, and the client's own `traceparent` goes to both engines as it
came. If they are on (the flag is the same as vLLM's), vLLM's `llm_request` span of either engine is a child of its leg.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd import __version__
from vllm_ascend_pd.shared.http_session import Headers
from vllm_ascend_pd.shared.settings import impossible
from vllm_ascend_pd.shared.threads import aside

if TYPE_CHECKING:
    from vllm_ascend_pd.router.exchange import HttpExchange

_CONTEXT = (b"traceparent", b"tracestate")


class NoSpans:
    """Spans that are off."""

    def request(self, exchange: HttpExchange) -> AbstractContextManager[None]:
        return nullcontext()

    def leg(
        self, exchange: HttpExchange, kind: str, instance: str, **facts: str | int
    ) -> AbstractContextManager[Headers]:
        """Return the context of a request to an engine, with the headers to send."""
        return nullcontext(exchange.headers)

    async def close(self) -> None:
        """Send what is left, within seconds."""


class RequestSpans(NoSpans):
    def __init__(self, endpoint: str) -> None:
        self._provider, self._propagator, self._trace = _provider(endpoint)
        self._tracer = self._provider.get_tracer("vllm_ascend_pd.metaserver", __version__)

    @contextmanager
    def request(self, exchange: HttpExchange) -> Iterator[None]:
        brought = {name.decode(): value.decode("latin-1") for name, value in exchange.headers if name in _CONTEXT}
        kind = self._trace.SpanKind.SERVER
        facts: dict[str, str | int] = {
            "http.route": exchange.request.route,
            "ascend_pd.request_id": exchange.request_id,
        }
        facts |= {"ascend_pd.prompt_tokens": exchange.request.prefill_tokens}
        context = self._propagator.extract(brought)
        exchange.span = span = self._tracer.start_span(exchange.request.route, context, kind, facts)
        try:
            yield
        finally:
            span.set_attribute("http.response.status_code", exchange.status)
            span.set_attribute("ascend_pd.attempts", exchange.number)
            for name, at, _ in exchange.stages:  # a stage's details are only for the status page
                span.add_event(name, timestamp=int((exchange.started_wall + at) * 1e9))
            if exchange.status >= 500:
                span.set_status(self._trace.StatusCode.ERROR)
            span.end()

    @contextmanager
    def leg(self, exchange: HttpExchange, kind: str, instance: str, **facts: str | int) -> Iterator[Headers]:
        context = self._trace.set_span_in_context(exchange.span)
        attributes = {"server.address": instance, **{f"ascend_pd.{name}": value for name, value in facts.items()}}
        span = self._tracer.start_span(f"{kind} leg", context, self._trace.SpanKind.CLIENT, attributes)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        headers = [(name, value) for name, value in exchange.headers if name not in _CONTEXT]
        well = False
        try:
            yield [*headers, *((name.encode(), value.encode("latin-1")) for name, value in carrier.items())]
            well = True
        finally:
            if not well:
                span.set_status(self._trace.StatusCode.ERROR)
            span.end()

    async def close(self) -> None:
        await aside(self._provider.shutdown)


def make(endpoint: str) -> NoSpans:
    return RequestSpans(endpoint) if endpoint else NoSpans()


def _provider(endpoint: str) -> tuple[Any, Any, Any]:
    """Return provider, propagator and trace API. Raise ConfigError if OpenTelemetry, which vLLM brings, is missing."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc") == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter: Any = OTLPSpanExporter(endpoint=endpoint)
        else:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            exporter = Grpc(endpoint=endpoint, insecure=not endpoint.startswith("https"))
    except ImportError as missing:
        why, remedy = (
            f"OpenTelemetry is not installed ({missing})",
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp",
        )
        impossible("--otlp-traces-endpoint", endpoint, why, remedy, missing)
    name = os.environ.get("OTEL_SERVICE_NAME", "vllm-ascend-pd-metaserver")
    provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, TraceContextTextMapPropagator(), trace
