# SPDX-License-Identifier: Apache-2.0
"""Clients' answers when engines fail, hang, refuse, come back, and when there is overload."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from unit.router.cluster import FakeCluster, asked_until, cluster, events, streamed, texts, until
from unit.router.fake_engine import EngineBehaviour, words
from vllm_ascend_pd.router.core.decisions import (
    CircuitPolicy,
    CircuitState,
    Condition,
    Evidence,
    Gatekeeper,
    RetryPolicy,
    Role,
)
from vllm_ascend_pd.router.front import AdmissionQueue
from vllm_ascend_pd.shared.backoff import Backoff


def condition(c: FakeCluster, name: str) -> Condition:
    instance = c.worker.fleet.get(name)
    assert instance is not None
    return instance.condition()


def test_one_of_two_ps_killed_under_load_loses_no_request_and_comes_back() -> None:
    with cluster(prefill=2, probe_every_s=0.2) as c:
        for engine in c.prefill:
            engine.behaviour.prefill_s = 0.3
        c.decode[0].behaviour.gap_s = 0.01
        with ThreadPoolExecutor(50) as clients:
            asked = [clients.submit(c.complete, f"p{i}", stream=True) for i in range(50)]
            until(lambda: len(c.prefill[0].generations()) > 10)
            c.prefill[0].served.kill()
            for i, answer in enumerate(asked):
                assert streamed(answer.result()) == "".join(words(f"p{i}", 3))
        until(lambda: condition(c, c.prefill[0].address) is Condition.DOWN)
        before = len(c.prefill[0].generations())
        for engine in c.prefill:
            engine.behaviour.prefill_s = 0.0
        c.prefill[0].served.start()
        until(lambda: condition(c, c.prefill[0].address) is Condition.READY)
        for i in range(20):
            assert c.complete(f"q{i}").status_code == 200
        assert len(c.prefill[0].generations()) > before


def test_d_killed_under_load_loses_no_request_that_had_no_byte_yet() -> None:
    with cluster(decode=2) as c:
        for engine in c.decode:
            engine.behaviour.hold = True
        with ThreadPoolExecutor(20) as clients:
            asked = [clients.submit(c.complete, f"p{i}", stream=True) for i in range(20)]
            until(lambda: len(c.decode[0].generations()) > 5)
            c.decode[0].served.kill()
            c.decode[1].behaviour.hold = False
            for i, answer in enumerate(asked):
                assert streamed(answer.result()) == "".join(words(f"p{i}", 3))


def test_a_refusing_d_is_left_for_another_one() -> None:
    with cluster(decode=2) as c:
        c.decode[0].behaviour.status = 503
        for i in range(10):
            assert c.complete(f"p{i}").status_code == 200
        assert condition(c, c.decode[0].address) is Condition.READY  # a refusal is not a failure


def test_the_last_no_is_passed_on_with_its_status_and_words() -> None:
    with cluster() as c:
        for status in (429, 500, 503):
            c.decode[0].behaviour.status = status
            answer = c.complete("x")
            assert answer.status_code == status and answer.json()["error"]["message"] == "as set"
            assert len(answer.headers["x-request-id"]) == 32


def test_a_stream_that_fails_before_its_first_token_is_an_error_not_a_200() -> None:
    with cluster() as c:
        c.decode[0].behaviour.policy = "fail"
        c.prefill[0].behaviour.status = 500
        answer = c.complete("x", stream=True)
        assert answer.status_code in (500, 503) and "error" in answer.json()
        decode = c.worker.fleet.get(c.decode[0].address)
        assert decode is not None and decode.broke == 0  # the failure was P's


def test_a_client_error_is_no_evidence_and_is_not_repeated() -> None:
    with cluster() as c:
        assert c.complete(model="another").status_code == 404
        assert len(c.decode[0].generations()) == 1
        assert condition(c, c.decode[0].address) is Condition.READY


@pytest.mark.parametrize("code", [400, 404, 422])
@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"chat": True}], ids=["", "kept", "chat"])
def test_a_client_error_within_a_stream_is_passed_on_as_it_is(more: dict[str, object], code: int) -> None:
    """vLLM validates some parameters only when it has sent the status 200: `{"stream": true, "logprobs": 100}`."""
    asked: dict[str, object] = {"model": "fake", "stream": True, "max_tokens": 3, **more}
    route = "/v1/chat/completions" if asked.pop("chat", False) else "/v1/completions"
    asked |= {"messages": [{"role": "user", "content": "p"}]} if "chat" in route else {"prompt": "p"}
    with cluster() as c:
        c.decode[0].behaviour.stream_error = code
        alone = httpx.post(f"http://{c.decode[0].address}{route}", json=asked).content
        answer = c.http.post(route, json=asked)
        assert (answer.status_code, answer.content) == (200, alone) and f'"code": {code}'.encode() in alone
        assert len(c.decode[0].generations()) == 2, "it must not be repeated"
        decode = c.worker.fleet.get(c.decode[0].address)
        assert decode is not None and (decode.served, decode.broke) == (1, 0)


@pytest.mark.parametrize(("code", "status", "broke"), [(500, 500, 3), ("dead", 500, 3), (429, 429, 0), (503, 503, 0)])
def test_any_other_error_that_begins_a_stream_is_that_of_its_code(code: int | str, status: int, broke: int) -> None:
    with cluster() as c:
        c.decode[0].behaviour.stream_error = code
        answer = c.complete("p", stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert len(c.decode[0].generations()) == (3 if broke else 1), "no other D can take what this one refused"
        decode = c.worker.fleet.get(c.decode[0].address)
        assert decode is not None and (decode.served, decode.broke) == (0, broke)


def test_a_stream_that_another_d_refuses_to_continue_ends_in_an_error_of_the_metaserver() -> None:
    with cluster(decode=2) as c:
        for engine in c.decode:
            engine.behaviour.speaks, engine.behaviour.break_after = True, 1

        def fails_from_now_on() -> EngineBehaviour:
            began = any(len(engine.generations()) for engine in c.decode)
            return replace(c.decode[0].usual, stream_error=400 if began else 0)

        for engine in c.decode:
            engine.mood = fails_from_now_on
        *_, error, done = events(c.complete([1, 2, 3], stream=True, temperature=0))
        assert json.loads(error)["error"]["code"] == "PD-META-025" and done == "[DONE]"
        fleet = [c.worker.fleet.get(engine.address) for engine in c.decode]
        assert sum(decode.broke for decode in fleet if decode is not None) == 1  # the break alone


def test_p_that_refuses_is_replaced_within_the_same_transfer() -> None:
    with cluster(prefill=2) as c:
        c.prefill[0].behaviour.status = 503
        count = asked_until(c, c.prefill[0].generations, least=10)
        assert len(c.decode[0].generations()) == count  # no new attempt on D
        assert c.decode[0].local_prefills == 0


def test_d_hears_when_p_answered_well_but_refused_to_push() -> None:
    with cluster() as c:
        c.prefill[0].behaviour.refuses_push = "PD-META-005"
        assert c.complete("x").status_code == 200
        failed = c.decode[0].outcomes[-1].failure
        assert failed is not None and failed.code == "PD-META-005" and "not mine" in failed.detail
        assert c.decode[0].local_prefills == 1


def test_d_that_posts_a_transfer_twice_is_refused() -> None:
    with cluster() as c:
        c.prefill[0].behaviour.hold = True
        asking = threading.Thread(target=c.complete, args=("x",), name="client")
        asking.start()
        until(c.legs)
        ticket = next(iter(c.worker.front.journal.tickets.values()))
        body = {"ticket": ticket.ticket, "transfer": next(iter(ticket.transfers)), "reservation": ""}
        assert c.http.post("/v1/metaserver", json=body).status_code == 409
        c.prefill[0].behaviour.hold = False
        asking.join()


def test_a_wedged_d_is_left_out_and_tried_again_by_one_request_at_a_time() -> None:
    with cluster(decode=2, circuit=CircuitPolicy(threshold=3, wedged=Backoff(0.3, 30.0, floor=0.8))) as c:
        wedged = c.worker.fleet.get(c.decode[0].address)
        assert wedged is not None
        c.decode[0].behaviour.status = 500
        asked_until(c, lambda: wedged.circuit.open)  # although /health answers 200
        for i in range(12):
            assert c.complete(f"q{i}").status_code == 200
        assert len(c.decode[0].generations()) == 3 + wedged.circuit.trials
        c.decode[0].behaviour.status = 200
        until(lambda: c.complete("again").status_code == 200 and wedged.circuit.state is CircuitState.CLOSED)


def test_one_poisonous_request_does_not_shut_the_door_for_all() -> None:
    with cluster() as c:
        c.decode[0].behaviour.status = 500
        for _ in range(4):
            c.complete("poison")
        c.decode[0].behaviour.status = 200
        assert c.complete("food").status_code == 200


def test_an_engine_that_says_it_is_ill_gets_nothing() -> None:
    with cluster(decode=2) as c:
        c.decode[0].behaviour.health = 503
        until(lambda: condition(c, c.decode[0].address) is Condition.DOWN)
        for i in range(6):
            assert c.complete(f"p{i}").status_code == 200
        assert not c.decode[0].generations()


def test_a_d_that_hangs_is_given_up_in_time() -> None:
    with cluster(first_byte_timeout_s=0.5, retry=RetryPolicy(attempts=1)) as c:
        c.decode[0].behaviour.hang = True
        while not c.decode[0].generations():  # unless it timed out before D had read it
            answer = c.complete("x")
            assert answer.status_code == 504 and answer.json()["error"]["code"] == "PD-META-007"
        until(lambda: c.decode[0].generations()[0].aborted)


def test_a_stream_that_falls_silent_ends_with_an_error_frame() -> None:
    with cluster(idle_timeout_s=0.5) as c:
        c.decode[0].behaviour.gap_s = 30
        *_, error, done = events(c.complete("x", stream=True))
        assert "no data in time" in json.loads(error)["error"]["message"] and done == "[DONE]"


def test_a_p_that_hangs_is_cancelled_when_d_gives_up() -> None:
    with cluster() as c:
        c.prefill[0].behaviour.hang = True
        asking = threading.Thread(target=c.complete, args=("x",), name="client")
        asking.start()
        until(c.legs)
        (key,) = list(c.decode[0]._waiting)
        c.decode[0]._client.forget(key)
        until(lambda: c.prefill[0].generations()[0].aborted)
        c.decode[0].served.kill()
        asking.join()


def test_a_client_that_leaves_cancels_the_prefill_though_d_keeps_its_post_open() -> None:
    with cluster() as c:
        c.decode[0].behaviour.deaf = c.prefill[0].behaviour.hang = True
        with c.leaving("x"):
            until(c.legs)
        until(lambda: c.prefill[0].generations()[0].aborted)
        until(lambda: c.decode[0].failed("PD-XFER-002"))


def test_another_p_beats_ds_own_prefill() -> None:
    with cluster(prefill=2) as c:
        c.prefill[0].behaviour.status = 500
        c.decode[0].behaviour.recompute_s = 60

        def a_bad_one_was_asked() -> bool:  # the choice of an engine is random
            assert texts(c.complete("p")) == ["".join(words("p", 3))]
            return bool(c.prefill[0].generations())

        until(a_bad_one_was_asked, 30)
        failed = len(c.prefill[0].generations())
        until(lambda: sum(s.aborted for s in c.decode[0].generations()) == failed)


async def test_a_turn_that_comes_in_the_moment_of_leaving_is_passed_on() -> None:
    turnstile = AdmissionQueue(Gatekeeper(1, 5))
    assert await turnstile.enter(1.0)
    waits = asyncio.create_task(turnstile.enter(10.0))
    await asyncio.sleep(0)
    turnstile.leave()
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    assert (turnstile.keeper.running, turnstile.keeper.waiting) == (0, 0)


def test_a_d_that_dies_cancels_its_prefill() -> None:
    with cluster(retry=RetryPolicy(attempts=1)) as c:
        c.prefill[0].behaviour.hang = True
        asking = threading.Thread(target=c.complete, args=("x",), name="client")
        asking.start()
        until(c.legs)
        c.decode[0].served.kill()
        until(lambda: c.prefill[0].generations()[0].aborted)
        asking.join()


def test_overload_waits_then_says_when_to_come_back() -> None:
    with cluster(max_running=2, max_waiting=2, max_wait_s=20) as c:
        c.decode[0].behaviour.hold = True
        with ThreadPoolExecutor(6) as clients:
            asked = [clients.submit(c.complete, f"p{i}") for i in range(6)]
            until(lambda: sum(a.done() for a in asked) == 2)
            c.decode[0].behaviour.hold = False
        answers = [a.result() for a in asked]
        statuses = sorted(a.status_code for a in answers)
        assert statuses == [200, 200, 200, 200, 429, 429]
        refused = next(a for a in answers if a.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["type"] == "RateLimitError"


@pytest.mark.parametrize("max_wait_s", [0.3, 600.0], ids=["waits too long", "leaves"])
def test_a_request_that_waits_too_long_or_leaves_the_queue_keeps_no_place(max_wait_s: float) -> None:
    with cluster(max_running=1, max_waiting=5, max_wait_s=max_wait_s) as c:
        keeper = c.worker.front.turnstile.keeper
        c.decode[0].behaviour.hold = True
        with ThreadPoolExecutor(2) as clients:
            first = clients.submit(c.complete, "first")
            until(c.decode[0].generations)
            if max_wait_s < 600.0:
                assert c.complete("waits").status_code == 429
            else:
                with c.leaving("leaves"):
                    until(lambda: keeper.waiting)
                until(lambda: not keeper.waiting)
            c.decode[0].behaviour.hold = False
            assert first.result().status_code == 200
        until(lambda: (keeper.running, keeper.waiting) == (0, 0))
        assert c.complete("then").status_code == 200


def test_nothing_is_left_after_all_sorts_of_ends() -> None:
    with cluster(prefill=2, decode=2) as c:
        c.decode[0].behaviour.break_after = 1
        c.prefill[0].behaviour.status = 500
        with ThreadPoolExecutor(10) as clients:
            for i in range(40):
                clients.submit(c.complete, f"p{i}", stream=bool(i % 2))
        front = c.worker.front
        until(lambda: not front.journal.tickets and not front.journal.exchanges)
        until(lambda: all(i.load == 0 and i.requests == 0 for i in c.worker.fleet))
        until(lambda: not c.worker.heartbeats.open)


def test_readiness_needs_a_block_that_moved_and_again_after_an_engine_came_back() -> None:
    with cluster(canary=True) as c:
        assert c.http.get("/readiness").json()["ready"] is True
        canary = c.decode[0].generations()
        assert len(canary) == 1 and canary[0].body["max_tokens"] == 1 and len(c.legs()) == 1
        time.sleep(0.6)
        assert len(c.legs()) == 1  # not repeated without a reason
        c.prefill[0].served.kill()
        until(lambda: c.http.get("/readiness").status_code == 503)
        assert c.http.get("/health").status_code == 200
        c.prefill[0].served.start()
        until(lambda: c.http.get("/readiness").status_code == 200)
        assert len(c.legs()) == 2


@pytest.mark.parametrize("without", ["local", "refuse"])
def test_serving_is_denied_only_where_clients_are_not_served(without: str) -> None:
    """A probe that took the router away whenever no pair is proven would end what D serves by itself."""
    with cluster(without_prefill=without) as c:
        until(lambda: c.http.get("/serving").status_code == 200)
        assert c.complete().status_code == 200
        c.prefill[0].served.kill()
        until(lambda: condition(c, c.prefill[0].address) is Condition.DOWN)
        until(lambda: c.http.get("/readiness").status_code == 503)
        if without == "local":
            assert c.http.get("/serving").json() == {"serving": True, "lacks": []}
            assert c.complete().status_code == 200
        else:
            assert c.http.get("/serving").json() == {"serving": False, "lacks": ["no prefill instance is usable"]}
            assert c.http.get("/serving").status_code == c.complete().status_code == 503
        c.decode[0].served.kill()
        until(lambda: condition(c, c.decode[0].address) is Condition.DOWN)
        assert c.http.get("/serving").status_code == 503
        assert "no decode instance is usable" in c.http.get("/serving").json()["lacks"]
        c.decode[0].served.start()
        c.prefill[0].served.start()
        until(lambda: c.http.get("/serving").status_code == 200)
        assert c.complete().status_code == 200


def test_readiness_outlives_one_of_two_engines_because_each_was_proven() -> None:
    with cluster(prefill=2, canary=True) as c:
        until(lambda: all(engine.generations() for engine in c.prefill))
        until(lambda: len(c.http.get("/readiness").json()["proven_pairs"]) == 2)
        c.prefill[0].served.kill()
        until(lambda: condition(c, c.prefill[0].address) is Condition.DOWN)
        assert c.http.get("/readiness").status_code == 200
        assert len(c.legs()) == 2  # each engine once, no other pairs


def test_an_engine_that_cannot_be_proven_keeps_no_other_from_it() -> None:
    with cluster(prefill=2, canary=True) as c:
        until(lambda: len(c.http.get("/readiness").json()["proven_pairs"]) == 2)
        c.prefill[0].served.kill()
        until(lambda: condition(c, c.prefill[0].address) is Condition.DOWN)
        c.prefill[0].behaviour.refuses_push = "PD-META-005"
        c.prefill[0].served.start()
        until(lambda: len(c.prefill[0].generations()) > 1)  # its canary, which fails
        c.prefill[1].served.kill()
        until(lambda: c.http.get("/readiness").status_code == 503)
        c.prefill[1].served.start()
        until(lambda: c.http.get("/readiness").status_code == 200)


def test_readiness_is_denied_when_no_kv_arrives() -> None:
    with cluster(canary=True) as c:
        c.prefill[0].served.kill()
        until(lambda: c.http.get("/readiness").status_code == 503)
        c.prefill[0].behaviour.push = False
        c.decode[0].behaviour.policy = "fail"
        c.prefill[0].served.start()
        until(lambda: condition(c, c.prefill[0].address) is Condition.READY and len(c.legs()) > 1)
        until(lambda: c.http.get("/readiness").json()["last_error"])
        assert c.http.get("/readiness").status_code == 503


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_works_again_is_ready_again_without_any_client(role: str) -> None:
    """Without readiness no client's request comes, which is what else would find out that the engine works again."""
    with cluster(canary=True, circuit=CircuitPolicy(wedged=Backoff(0.1, 30.0))) as c:
        engine = (c.prefill if role == "prefill" else c.decode)[0]
        instance = c.worker.fleet.get(engine.address)
        assert instance is not None
        engine.behaviour.wedged = True
        while not instance.circuit.trips:
            c.complete("x")
        until(lambda: instance.circuit.trials)
        engine.behaviour.wedged = False
        until(lambda: c.http.get("/readiness").status_code == 200)
        assert instance.circuit.state is CircuitState.CLOSED


def test_canaries_try_a_wedged_engine_one_at_a_time_and_it_is_not_ready_meanwhile() -> None:
    with cluster(prefill=3, canary=True, circuit=CircuitPolicy(wedged=Backoff(0.1, 30.0))) as c:
        until(lambda: len(c.http.get("/readiness").json()["proven_pairs"]) == 3)
        decode = c.worker.fleet.get(c.decode[0].address)
        assert decode is not None
        asked = len(c.decode[0].generations())
        c.decode[0].behaviour.hold = True
        for _ in range(3):
            c.worker.fleet.record(decode, Evidence.BROKE, "as set")
        until(lambda: decode.circuit.trials and len(c.decode[0].generations()) > asked)
        time.sleep(0.6)  # more than two looks
        assert len(c.decode[0].generations()) == asked + 1
        assert c.http.get("/readiness").status_code == 503
        c.decode[0].behaviour.hold = False
        until(lambda: c.http.get("/readiness").status_code == 200)


def test_only_one_workers_canaries_prove_pairs_and_each_workers_try_its_wedged_engines() -> None:
    with cluster(canary=True) as c:
        c.worker.canary._proves = False
        decode = c.worker.fleet.get(c.decode[0].address)
        assert decode is not None
        c.decode[0].behaviour.hold = True  # the canary that heals it comes at any time
        for _ in range(3):
            c.worker.fleet.record(decode, Evidence.BROKE, "as set")
        assert c.http.get("/readiness").status_code == 503
        c.decode[0].behaviour.hold = False
        until(lambda: c.http.get("/readiness").status_code == 200)
        asked = len(c.legs())
        c.prefill[0].served.kill()
        until(lambda: c.http.get("/readiness").status_code == 503)
        c.prefill[0].served.start()
        until(lambda: condition(c, c.prefill[0].address) is Condition.READY)
        time.sleep(0.6)  # more than two looks
        assert len(c.legs()) == asked


def test_without_canaries_a_healthy_engine_is_ready_whatever_its_circuit() -> None:
    with cluster() as c:
        decode = c.worker.fleet.get(c.decode[0].address)
        assert decode is not None
        c.decode[0].behaviour.wedged = True
        c.complete("x")
        assert decode.circuit.open and c.http.get("/readiness").status_code == 200
        c.decode[0].behaviour.health = 503
        until(lambda: c.http.get("/readiness").status_code == 503)


def test_shutdown_lets_requests_finish_and_takes_no_new_ones() -> None:
    with cluster(grace_s=10) as c:
        c.decode[0].behaviour.hold = True
        with ThreadPoolExecutor(1) as clients:
            running = clients.submit(c.complete, "x", stream=True)
            until(c.decode[0].generations)
            drained = c.served.loop.submit(c.worker.front.drain())
            until(lambda: c.worker.front.closing)
            assert c.complete("late").status_code == 503
            assert c.http.get("/readiness").status_code == 503
            c.decode[0].behaviour.hold = False
            assert streamed(running.result()) == "".join(words("x", 3))
        drained.result(5)


def test_shutdown_cuts_what_takes_too_long_with_an_error_frame_or_503() -> None:
    with cluster(grace_s=0.5) as c:
        c.decode[0].behaviour.gap_s = 30
        with ThreadPoolExecutor(2) as clients:
            streams = clients.submit(c.complete, "x", stream=True)
            waits = clients.submit(c.complete, "y")
            until(lambda: len(c.decode[0].generations()) == 2)
            until(lambda: any(exchange.committed for exchange in c.worker.front.journal.exchanges))
            c.served.loop.call(c.worker.front.drain(), 10)
            *_, error, done = events(streams.result())
            said = json.loads(error)["error"]
            assert ("shutting down" in said["message"], said["code"], done) == (True, "PD-META-010", "[DONE]")
            assert waits.result().status_code == 503
            troubles = [each for each in c.worker.front.journal.troubles if each["code"] == "PD-META-010"]
            assert troubles and not any(each["instance"] for each in troubles), "no D is to blame"
        until(lambda: all(s.aborted for s in c.decode[0].generations()))


def test_load_is_counted_in_tokens_not_in_requests() -> None:
    with cluster(prefill=2) as c:
        for engine in c.prefill:
            engine.behaviour.hold = True
        with ThreadPoolExecutor(5) as clients:
            clients.submit(c.complete, "long " * 20_000)
            until(c.legs)
            for i in range(4):
                clients.submit(c.complete, f"short {i}")
            until(lambda: len(c.legs()) == 5)
            for engine in c.prefill:
                engine.behaviour.hold = False
        assert sorted(len(p.generations()) for p in c.prefill) == [1, 4]
        assert {i.role for i in c.worker.fleet} == set(Role)


def test_engines_whose_names_resolve_slowly_are_starting_and_delay_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    system, gate = socket.getaddrinfo, threading.Event()
    slow = [f"slow-{i}.test:9" for i in range(40)]  # more than the event loop has threads of its own

    def resolve(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if str(host).startswith("slow-"):
            gate.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        return system("127.0.0.1" if host == "quick.test" else host, port, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with cluster(decode=2, connect_timeout_s=0.5) as c:
        try:
            one, other = c.decode
            for name in slow:
                assert c.http.post("/instances", json={"role": "decode", "url": name}).status_code == 201
            waiting = [c.worker.fleet.get(name) for name in slow]
            until(lambda: all(instance is not None and instance.last_error for instance in waiting))
            assert c.http.delete(f"/instances/{other.address}").status_code == 200
            quick = f"quick.test:{other.address.rpartition(':')[2]}"
            assert c.http.post("/instances", json={"role": "decode", "url": quick}).status_code == 201
            until(lambda: (added := c.worker.fleet.get(quick)) is not None and added.answered, 20)
            assert c.http.delete(f"/instances/{one.address}").status_code == 200
            for i in range(10):
                assert c.complete(f"prompt {i}").status_code == 200
            states = {i["name"]: (i["state"], i["broke"]) for i in c.http.get("/instances").json()["instances"]}
            assert {states[name] for name in slow} == {("starting", 0)}
            assert states[quick] == ("ready", 0) and len(other.generations()) >= 10
        finally:
            gate.set()
