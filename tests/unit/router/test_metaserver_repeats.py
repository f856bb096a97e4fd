# SPDX-License-Identifier: Apache-2.0
"""Repetitions that would only add work: of whole answers that take long, and of what every D refuses."""

from __future__ import annotations

import pytest

from unit.router.cluster import FakeCluster, asked_until, cluster, until
from vllm_ascend_pd.router import fleet
from vllm_ascend_pd.router.core.decisions import Condition


def attempts(c: FakeCluster) -> list[int]:
    return [exchange.number for exchange in c.worker.front.journal.last]


def asked(c: FakeCluster) -> list[int]:
    return [len(engine.generations()) for engine in c.decode]


def test_a_whole_answer_that_takes_too_long_is_computed_once_and_blames_nobody() -> None:
    with cluster(decode=2, first_byte_timeout_s=0.5) as c:
        for engine in c.decode:
            engine.behaviour.hang = True  # it still answers probes
        for i in range(6):
            answer = c.complete(f"p{i}")
            assert answer.status_code == 504 and "--first-byte-timeout" in answer.json()["error"]["message"]
        until(lambda: attempts(c) == [1] * 6)
        for engine in c.decode:
            instance = c.worker.fleet.get(engine.address)
            assert instance is not None and instance.broke == 0 and instance.condition() is Condition.READY


def test_a_stream_without_a_first_byte_is_repeated_as_before() -> None:
    with cluster(decode=2, first_byte_timeout_s=0.5) as c:
        for engine in c.decode:
            engine.behaviour.hang = True
        assert c.complete("p", stream=True).status_code == 504
        until(lambda: attempts(c) == [3])
        assert sum(i.broke for i in c.worker.fleet) == 3


def test_another_route_that_takes_too_long_blames_nobody() -> None:
    with cluster(first_byte_timeout_s=0.5) as c:
        c.decode[0].behaviour.hang = True
        for _ in range(4):
            assert c.http.post("/v1/embeddings", json={"model": "fake", "input": "x"}).status_code == 504
        assert sum(i.broke for i in c.worker.fleet) == 0


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/embeddings"])
def test_when_every_d_refuses_each_request_is_refused_once(
    status: int, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "REST_S", 1e9)  # so that the test may be slow
    with cluster(decode=3) as c:
        for engine in c.decode:
            engine.behaviour.status = status
        for i in range(30):
            answer = c.http.post(route, json={"model": "fake", "prompt": f"p{i}", "input": "x"})
            assert answer.status_code == status and answer.json()["error"]["message"] == "as set"
        assert sum(len([s for s in d.seen if s.route == route]) for d in c.decode) == 30 + 2


def test_a_d_that_refuses_is_asked_again_later() -> None:
    with cluster(decode=2) as c:
        c.decode[0].behaviour.status = 503
        asked_until(c, lambda: asked(c)[0])
        c.decode[0].behaviour.status = 200
        before = asked(c)[0]
        asked_until(c, lambda: asked(c)[0] > before)


def test_all_requests_under_way_at_a_d_that_refuses_them_go_to_another() -> None:
    """However many: that D shuts down, and the other has room."""
    with cluster(decode=2) as c:
        c.worker.front.budget.tokens = 0.0
        c.decode[0].behaviour.status = 503
        for i in range(20):
            assert c.complete(f"p{i}").status_code == 200


def test_a_p_that_refuses_alone_is_asked_once() -> None:
    with cluster() as c:
        c.prefill[0].behaviour.status = 503
        for i in range(5):
            assert c.complete(f"p{i}").status_code == 200
        assert len(c.legs()) == 5
