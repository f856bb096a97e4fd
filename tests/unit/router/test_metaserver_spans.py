# SPDX-License-Identifier: Apache-2.0
"""Trace context of a request: both legs carry it, and with an endpoint each leg has a span that is its engine's
parent."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from unit.router.cluster import FakeCluster, cluster, until
from unit.router.fake_engine import ServedApp, _answer, read_body

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.sdk") is None, reason="vLLM brings OpenTelemetry"
)


class Collector:
    """Receiver of OTLP over HTTP, on a port of 127.0.0.1."""

    def __init__(self) -> None:
        self.spans: list[object] = []
        self.served = ServedApp(self._app, "collector")

    async def _app(self, scope: dict, receive: object, send: object) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest.FromString(await read_body(receive))
        self.spans += [s for r in request.resource_spans for scoped in r.scope_spans for s in scoped.spans]
        await _answer(send, 200, b"")

    def named(self, name: str) -> list:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    collector = Collector()
    yield collector
    collector.served.stop()


def ask(c: FakeCluster, **more: object) -> int:
    body = {"model": "fake", "prompt": "a secret prompt", "max_tokens": 2, **more}
    headers = {"traceparent": PARENT, "x-request-id": "mine"}
    return c.http.post("/v1/completions", json=body, headers=headers).status_code


def test_without_an_endpoint_the_clients_context_goes_to_both_legs_as_it_came() -> None:
    with cluster() as c:
        ask(c)
        for engine in (c.prefill[0], c.decode[0]):
            assert engine.generations()[-1].headers["traceparent"] == PARENT


def test_each_leg_has_a_span_below_the_requests_and_its_engine_gets_it(collector: Collector) -> None:
    with cluster(otlp_traces_endpoint=collector.served.url + "/v1/traces") as c:
        assert ask(c) == 200
        until(lambda: len(collector.spans) == 3)
        (request,), (prefill,), (decode,) = map(collector.named, ("/v1/completions", "prefill leg", "decode leg"))
        assert request.trace_id.hex() == PARENT.split("-")[1] and request.parent_span_id.hex() == PARENT.split("-")[2]
        for leg, engine in ((prefill, c.prefill[0]), (decode, c.decode[0])):
            assert leg.parent_span_id == request.span_id and leg.trace_id == request.trace_id
            parent = engine.generations()[-1].headers["traceparent"].split("-")
            assert (parent[1], parent[2]) == (leg.trace_id.hex(), leg.span_id.hex())
            assert decode.start_time_unix_nano <= leg.start_time_unix_nano <= leg.end_time_unix_nano
        names = [event.name for event in request.events]
        # P's answer and D's report may come at any time.
        in_order = [name for name in names if name not in ("prefilled", "loaded")]
        assert in_order == ["decode", "reserved", "prefill", "first byte", "end"] and "loaded" in names
        facts = {a.key: a.value for a in (*request.attributes, *prefill.attributes)}
        assert facts["ascend_pd.request_id"].string_value == "mine"
        assert facts["ascend_pd.transfer"].string_value.startswith("d/")
        assert "secret" not in str(collector.spans)


def test_a_leg_that_broke_is_an_error_and_the_next_attempt_a_span_of_its_own(collector: Collector) -> None:
    with cluster(decode=2, otlp_traces_endpoint=collector.served.url + "/v1/traces") as c:
        c.decode[0].behaviour.status = c.decode[1].behaviour.status = 500
        assert ask(c) == 500
        until(lambda: collector.named("/v1/completions"))
        assert len(collector.named("decode leg")) >= 2
        assert {span.status.code for span in (*collector.named("decode leg"), *collector.named("/v1/completions"))} == {
            2
        }
