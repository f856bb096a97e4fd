# SPDX-License-Identifier: Apache-2.0
"""Routes that are passed to a D unchanged: blame, admission, shutdown, headers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from unit.router.cluster import FakeCluster, cluster, until
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.decisions import CircuitPolicy, CircuitState
from vllm_ascend_pd.router.exchange import HttpExchange
from vllm_ascend_pd.router.fleet import Fleet, Instance
from vllm_ascend_pd.router.front import Front
from vllm_ascend_pd.router.metrics import METRICS, PREFIX
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.router.upstream import Upstream


def instance(c: FakeCluster) -> Instance:
    member = c.worker.fleet.get(c.decode[0].address)
    assert member is not None
    return member


def counted(route: str, status: object) -> float:
    return METRICS.registry.get_sample_value(PREFIX + "requests_total", {"route": route, "status": str(status)}) or 0.0


class Asking:
    """A client that waits on a thread of its own."""

    def __init__(self, ask: Callable[[], httpx.Response]) -> None:
        self.answer: httpx.Response | None = None
        self.problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(ask,), name="client")
        self._thread.start()

    def _run(self, ask: Callable[[], httpx.Response]) -> None:
        try:
            self.answer = ask()
        except httpx.HTTPError as problem:
            self.problem = problem

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def status(self) -> int | None:
        self._thread.join(20)
        return self.answer.status_code if self.answer is not None else None


def embed(c: FakeCluster, **more: Any) -> httpx.Response:
    return c.http.post("/v1/embeddings", json={"input": "x", **more})


# -- evidence in an answer about the engine


def test_a_wedged_d_that_lists_its_models_stays_out() -> None:
    with cluster() as c:
        c.decode[0].behaviour.wedged = True
        until(lambda: c.complete().status_code == 500 and instance(c).circuit.open)
        for _ in range(5):
            assert c.http.get("/v1/models").status_code == 200
        assert instance(c).circuit.state is CircuitState.WEDGED and instance(c).circuit.broke


def test_a_failed_computation_is_a_bad_end_and_no_service() -> None:
    with cluster() as c:
        before = instance(c).served
        c.decode[0].behaviour.wedged = True
        assert embed(c).status_code == 500
        until(lambda: instance(c).broke == 1)
        assert instance(c).served == before and instance(c).circuit.broke == 1


def test_a_computed_answer_closes_the_circuit() -> None:
    with cluster() as c:
        c.decode[0].behaviour.wedged = True
        until(lambda: embed(c).status_code == 500 and instance(c).circuit.open)
        c.decode[0].behaviour.wedged = False
        until(lambda: embed(c).status_code == 200 and instance(c).circuit.state is CircuitState.CLOSED)


@pytest.mark.parametrize("status", [400, 404, 429, 501, 503])
def test_what_an_engine_declines_says_nothing_about_it(status: int) -> None:
    with cluster() as c:
        served, broke = instance(c).served, instance(c).broke
        c.decode[0].behaviour.status = status
        for _ in range(4):
            assert embed(c).status_code == status
        assert (instance(c).served, instance(c).broke) == (served, broke)
        assert instance(c).circuit.state is CircuitState.CLOSED


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("ask", [embed, lambda c: c.http.get("/v1/models")], ids=["embed", "models"])
def test_what_one_d_declines_another_one_does(status: int, ask: Callable[[FakeCluster], httpx.Response]) -> None:
    with cluster(decode=2) as c:
        c.decode[0].behaviour.status = status
        count = 0
        while count < 12 or not any(
            seen.route.startswith("/v1/") for seen in c.decode[0].seen
        ):  # the choice of an engine is random
            assert ask(c).status_code == 200
            count += 1


def test_an_empty_answer_is_never_passed_on() -> None:
    patient = CircuitPolicy(threshold=100)
    with cluster(decode=2, circuit=patient) as c:
        c.decode[0].behaviour.empty = True
        for _ in range(12):
            listed = c.http.get("/v1/models")
            assert listed.status_code == 200 and listed.json()["data"]
        answers: list[httpx.Response] = []  # possibly executed: not tried elsewhere
        while len(answers) < 12 or {answer.status_code for answer in answers} != {200, 502}:
            answers.append(embed(c))
            assert answers[-1].status_code in (200, 502)
        assert {a.json()["error"]["code"] for a in answers if a.status_code == 502} == {"PD-META-007"}


def test_a_redirect_leads_back_to_the_metaserver() -> None:
    with cluster() as c:
        c.decode[0].behaviour.moved = True
        for answer in (embed(c), c.complete()):
            assert (answer.status_code, answer.headers["location"]) == (307, "/v1/elsewhere?a=b")


# -- its turn


def test_it_waits_for_its_turn_like_a_generation() -> None:
    with cluster(max_running=1, max_waiting=0) as c:
        c.decode[0].behaviour.hold = True
        first = Asking(lambda: embed(c))
        until(lambda: c.decode[0].seen[-1:] and c.decode[0].seen[-1].route == "/v1/embeddings")
        refused = embed(c)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "PD-META-009"
        assert refused.headers["retry-after"] and refused.headers["x-request-id"]
        assert c.complete().status_code == 429
        assert c.http.get("/v1/models").status_code == 200, "a poll costs nothing"
        assert len([s for s in c.decode[0].seen if s.route == "/v1/embeddings"]) == 1
        c.decode[0].behaviour.hold = False
        assert first.status() == 200


def test_polls_are_bounded_too() -> None:
    with cluster(max_running=1) as c:
        c.decode[0].behaviour.hang = True
        first = Asking(lambda: c.http.get("/v1/models"))
        until(lambda: c.worker.front.polls.keeper.running)
        assert c.http.get("/v1/models").status_code == 429
        c.decode[0].behaviour.hang = False
        c.decode[0].served.kill()
        first.status()


def test_it_is_seen_while_it_runs_and_after() -> None:
    with cluster() as c:
        c.decode[0].behaviour.hold = True
        asking = Asking(lambda: c.http.post("/v1/embeddings", json={"input": "x"}, headers={"x-request-id": "mine"}))

        def flight() -> dict[str, Any]:
            return {e["id"]: e for e in c.http.get("/status").json()["in_flight"]}

        until(lambda: [s["stage"] for s in flight().get("mine", {"stages": []})["stages"]] == ["decode"])
        assert flight()["mine"]["route"] == "/v1/embeddings"
        c.decode[0].behaviour.hold = False
        assert asking.status() == 200
        until(lambda: "mine" in {e["id"] for e in c.http.get("/status").json()["last"]})


def test_polls_push_nothing_out_of_the_last_requests() -> None:
    with cluster() as c:
        c.http.post("/v1/embeddings", json={"input": "x"}, headers={"x-request-id": "mine"})
        until(lambda: [exchange.request_id for exchange in c.worker.front.journal.last] == ["mine"])
        c.http.get("/v1/models")
        c.http.post("/v1/embeddings", json={"input": "x"}, headers={"x-request-id": "other"})
        until(lambda: [exchange.request_id for exchange in c.worker.front.journal.last] == ["mine", "other"])


def test_each_is_counted_and_a_client_cannot_make_new_labels() -> None:
    with cluster() as c:
        routes = {"/v1/models": "/v1/models", "/v1/models/fake": "/v1/*", "/v1/what/ever": "/v1/*"}
        before = {route: counted(route, 200) for route in set(routes.values())}
        for path in routes:
            c.http.get(path)
        until(lambda: counted("/v1/*", 200) - before["/v1/*"] == 2)
        assert counted("/v1/models", 200) - before["/v1/models"] == 1
        bad = counted("/v1/*", 400)
        c.http.post("/v1/what", content=b"[" * 100_000)
        until(lambda: counted("/v1/*", 400) == bad + 1)


# -- the end of the metaserver


def drain(c: FakeCluster) -> Any:
    return c.served.loop.submit(c.worker.front.drain())


def test_at_the_end_it_is_waited_for_and_nothing_new_is_taken() -> None:
    with cluster() as c:
        c.decode[0].behaviour.hold = True
        asking = Asking(lambda: embed(c))
        until(lambda: any(s.route == "/v1/embeddings" for s in c.decode[0].seen))
        draining = drain(c)
        until(lambda: c.worker.front.closing)
        for refused in (embed(c), c.http.get("/v1/models"), c.complete()):
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "PD-META-010"
        assert not asking.ended() and not draining.done()
        c.decode[0].behaviour.hold = False
        assert asking.status() == 200
        draining.result(10)


def test_what_is_left_when_the_grace_is_over_is_cut() -> None:
    with cluster(grace_s=0.3) as c:
        c.decode[0].behaviour.gap_s = 30.0
        streaming = Asking(lambda: c.http.post("/v1/of/tomorrow", json={"prompt": "x", "stream": True}))
        until(lambda: any(e.committed for e in c.worker.front.journal.exchanges))
        c.decode[0].behaviour.hold = True
        waiting = Asking(lambda: embed(c))
        until(lambda: any(s.route == "/v1/embeddings" for s in c.decode[0].seen))
        broken = METRICS.registry.get_sample_value(PREFIX + "broken_streams_total")
        drain(c).result(10)
        assert waiting.status() == 503
        assert streaming.status() is None and isinstance(streaming.problem, httpx.RemoteProtocolError)
        until(lambda: not c.worker.front.journal.exchanges)
        assert METRICS.registry.get_sample_value(PREFIX + "broken_streams_total") == (broken or 0.0) + 1
        troubles = [(each["code"], each["instance"]) for each in c.worker.front.journal.troubles]
        assert troubles == [("PD-META-010", "")], "a part of an answer is a trouble, and no D is to blame"
        until(lambda: c.decode[0].running == 0)


def test_a_request_that_waits_for_a_turn_hears_of_the_end_at_once() -> None:
    with cluster(max_running=1, max_waiting=5) as c:
        c.decode[0].behaviour.hold = True
        running = Asking(lambda: c.complete("first"))
        until(c.decode[0].generations)
        keeper = c.worker.front.turnstile.keeper
        waiting = [Asking(lambda: c.complete("more")), Asking(lambda: embed(c))]
        until(lambda: keeper.waiting == 2)
        draining = drain(c)
        until(lambda: all(asking.ended() for asking in waiting))
        assert not running.ended() and not draining.done(), "they did not wait for the turn"
        for asking in waiting:
            assert asking.answer is not None and asking.answer.json()["error"]["code"] == "PD-META-010"
        c.decode[0].behaviour.hold = False
        assert running.status() == 200
        draining.result(10)
        assert (keeper.waiting, keeper.running) == (0, 0)


async def test_a_turn_that_comes_in_the_moment_of_the_end_is_not_taken() -> None:
    front = Front(Settings(max_running=1), Fleet(CircuitPolicy()), Upstream(1.0, 1.0), "http://127.0.0.1:1")
    said: list[Any] = []
    worked: list[HttpExchange] = []

    async def send(message: Any) -> None:
        said.append(message)

    async def work(exchange: HttpExchange) -> None:
        worked.append(exchange)

    async def ask() -> None:
        request = bodies.parse(bodies.COMPLETIONS, b'{"prompt": "x"}')
        await front.admit(HttpExchange(request, [], "mine", send), work, front.turnstile)

    assert await front.turnstile.enter(1.0)
    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    front.turnstile.leave()  # admits the request, which does not know it yet
    draining = asyncio.create_task(front.drain())
    await asyncio.gather(asking, draining)
    assert not worked and said[0]["status"] == 503
    assert (front.turnstile.keeper.running, front.turnstile.keeper.waiting) == (0, 0)


# -- headers


def test_the_clients_id_stays_whatever_its_connection_header_names() -> None:
    mine = {"connection": "x-request-id, close", "x-request-id": "abc"}
    with cluster() as c:
        for answer in (c.http.get("/v1/models", headers=mine), embed_with(c, mine), complete_with(c, mine)):
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, "abc")
        (prefill,) = c.prefill[0].generations()
        for seen in (*c.decode[0].seen, prefill):
            assert seen.headers["x-request-id"] == "abc", seen.route


def embed_with(c: FakeCluster, headers: dict[str, str]) -> httpx.Response:
    return c.http.post("/v1/embeddings", json={"input": "x"}, headers=headers)


def complete_with(c: FakeCluster, headers: dict[str, str]) -> httpx.Response:
    return c.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers)


def test_a_stream_that_breaks_is_cut_short_for_the_client() -> None:
    with cluster() as c:
        c.decode[0].behaviour.break_after = 1
        with pytest.raises(httpx.RemoteProtocolError):
            c.http.post("/v1/of/tomorrow", json={"prompt": "x", "stream": True})
        until(lambda: instance(c).broke == 1)
