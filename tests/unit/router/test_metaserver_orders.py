# SPDX-License-Identifier: Apache-2.0
"""Independence of the order in which two answers come: readiness, blame and retries follow D's reports."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import permutations
from typing import Any

import httpx
import pytest

from tools.support.process import free_port
from unit.router.cluster import FakeCluster, asked_until, cluster, data, events, texts, until
from unit.router.fake_engine import FakeEngine, reservation_of, words
from vllm_ascend_pd.protocol.versions import fingerprint
from vllm_ascend_pd.router import exchange, relay, reserve, resuming
from vllm_ascend_pd.router.core.decisions import (
    MAX_RANKS,
    PRINT_S,
    CircuitPolicy,
    CircuitState,
    Condition,
    PairProof,
    ProcessHistory,
    RetryPolicy,
    Role,
)
from vllm_ascend_pd.router.fleet import Fleet, Instance, parse_spec
from vllm_ascend_pd.router.upstream import Upstream
from vllm_ascend_pd.shared import http_session
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError
from vllm_ascend_pd.shared.http_session import Origin

LONG_S = 3600.0  # of an answer that comes after everything else, if at all


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit for D's report, which a loaded machine may exceed. Tests that need a missing report lower it."""
    monkeypatch.setattr(resuming, "REPORT_OF_LOAD_S", 30.0)
    monkeypatch.setattr(reserve, "_REPORT_OF_PUSH_S", 30.0)


def instance(c: FakeCluster, name: str) -> Instance:
    member = c.worker.fleet.get(name)
    assert member is not None
    return member


def blame(c: FakeCluster) -> dict[str, int]:
    return {i.name: i.broke for i in c.worker.fleet}


def readiness(c: FakeCluster) -> httpx.Response:
    return c.http.get("/readiness")


def chat(c: FakeCluster, stream: bool) -> httpx.Response:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    return c.http.post("/v1/chat/completions", json=body)


# -- readiness


def test_a_pair_is_proven_although_d_answers_long_before_p() -> None:
    with cluster(canary=True, prefill=0) as c, cluster(prefill=1, decode=0) as other:
        p = other.prefill[0]
        p.metaservers(c.served.url)
        p.behaviour.after_push_s = LONG_S
        c.worker.fleet.add(_spec(p.address), "a test")
        until(lambda: readiness(c).status_code == 200)
        assert readiness(c).json()["proven_pairs"] == [{"prefill": p.address, "decode": c.decode[0].address}]


def _spec(address: str) -> Any:
    return parse_spec(Role.PREFILL, address)


@pytest.mark.parametrize("posted", [True, False], ids=["report posted", "report in the answer only"])
def test_a_pair_over_which_no_kv_came_is_never_proven_in_any_order_of_answers(posted: bool) -> None:
    with cluster(canary=True) as c:
        restart(c, lambda p: setattr(p.behaviour, "push", False))
        c.decode[0].behaviour.reports = posted
        # A canary already sent to the previous P fails by another code, and is followed by one to this P.
        until(lambda: "computed the prompt by itself: PD-XFER-001" in readiness(c).json()["last_error"])
        assert readiness(c).status_code == 503


def restart(c: FakeCluster, change: Any) -> None:
    p = c.prefill[0]
    p.served.kill()
    until(lambda: readiness(c).status_code == 503)
    change(p)
    p.incarnation = "another"
    p.served.start()
    until(lambda: instance(c, p.address).condition() is Condition.READY)


def test_a_slow_probe_is_no_new_life() -> None:
    with cluster(canary=True, probe_timeout_s=0.3) as c:
        until(lambda: readiness(c).status_code == 200)
        legs = len(c.legs())
        c.prefill[0].behaviour.frozen = True
        until(lambda: instance(c, c.prefill[0].address).condition() is Condition.DOWN)
        c.prefill[0].behaviour.frozen = False
        until(lambda: readiness(c).status_code == 200)
        assert len(c.legs()) == legs, "no canary was needed: it is the same process"


def test_an_engine_that_came_back_between_two_probes_is_found_out_by_its_own_word() -> None:
    with cluster(canary=True, probe_every_s=LONG_S) as c:
        c.http.get("/readiness")
        until(lambda: readiness(c).status_code == 200)
        c.decode[0].incarnation = "another one"
        c.prefill[0].behaviour.push = False
        assert c.complete().status_code == 200
        assert readiness(c).status_code == 503, "what was proven was proven of another process"


def test_clients_that_take_every_turn_do_not_make_it_unready() -> None:
    with cluster(canary=True, max_running=1, max_waiting=0) as c, ThreadPoolExecutor(1) as clients:
        until(lambda: readiness(c).status_code == 200)
        c.decode[0].behaviour.hold = True
        running = clients.submit(c.complete)
        until(lambda: c.worker.front.journal.exchanges)
        restart(c, lambda p: None)
        until(lambda: len(c.legs()) >= 2)
        assert c.complete("another").status_code == 429
        c.decode[0].behaviour.hold = False
        until(lambda: readiness(c).status_code == 200)
        running.result()


def test_an_engine_that_hangs_keeps_no_other_from_being_proven() -> None:
    with cluster(prefill=3, decode=2, canary=True) as c:
        until(lambda: len({p["prefill"] for p in readiness(c).json()["proven_pairs"]}) == 3)
        for p in c.prefill:
            p.served.kill()
        until(lambda: readiness(c).status_code == 503)
        for p in c.prefill[:2]:
            p.behaviour.hang = True
        for p in c.prefill:
            p.served.start()
        until(lambda: {p["prefill"] for p in readiness(c).json()["proven_pairs"]} == {c.prefill[2].address})


def test_before_the_first_canary_the_reason_says_so() -> None:
    with cluster(prefill=0, canary=True) as c:
        assert readiness(c).json()["last_error"] == "no prefill instance is usable: none is named"


def test_a_wrong_port_of_a_p_is_logged_and_named_by_readiness(caplog: pytest.LogCaptureFixture) -> None:
    wrong = f"127.0.0.1:{free_port()}"
    with caplog.at_level(logging.WARNING), cluster(prefill=0, canary=True) as c:
        assert c.http.post("/instances", json={"role": "prefill", "url": wrong}).status_code == 201
        until(lambda: f"prefill {wrong} has not answered yet: " in caplog.text)
        until(lambda: f"{wrong} is starting (/health: " in readiness(c).json()["last_error"])


def test_the_last_usable_p_that_goes_is_logged_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), cluster(prefill=1, canary=True) as c:
        until(lambda: c.http.get("/status").json()["prefills"] is True)
        until(lambda: "prefill instances are usable" in caplog.text)
        c.prefill[0].served.kill()
        until(lambda: "no prefill instance is usable: decode engines compute the prompts" in caplog.text)
        assert c.http.get("/status").json()["prefills"] is False
        assert c.complete("x").status_code == 200
        c.prefill[0].served.start()
        until(lambda: caplog.text.count("prefill instances are usable") == 2)
        assert caplog.text.count("no prefill instance is usable") == 1


# -- blame


@pytest.mark.parametrize("report_s", [0.0, 0.3], ids=["report first", "answer first"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_what_p_failed_to_push_is_pushed_by_another_and_d_is_not_blamed(
    route: str, stream: bool, report_s: float
) -> None:
    with cluster(prefill=2) as c:
        c.decode[0].behaviour.policy, c.decode[0].behaviour.report_s = "fail", report_s
        bad = c.prefill[0]
        bad.behaviour.push = False
        for n in range(6):
            answer = c.complete(f"p{n}", stream=stream) if route == "completions" else chat(c, stream)
            assert answer.status_code == 200 and "error" not in answer.text
        assert blame(c)[c.decode[0].address] == 0 and blame(c)[c.prefill[1].address] == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_p_whose_pushes_never_arrive_is_left_alone_although_all_its_answers_are_good(stream: bool) -> None:
    with cluster(prefill=2) as c:
        bad = c.prefill[0]
        bad.behaviour.push = False
        until(
            lambda: (
                c.complete("p", stream=stream).status_code == 200
                and instance(c, bad.address).condition() is Condition.DOWN
            )
        )
        assert "PD-XFER-001" in instance(c, bad.address).last_error
        assert blame(c)[c.decode[0].address] == 0 and blame(c)[c.prefill[1].address] == 0


def test_a_d_that_fails_by_itself_is_blamed_as_before() -> None:
    with cluster(decode=2) as c:
        c.decode[0].behaviour.wedged = True
        asked_until(c, lambda: blame(c)[c.decode[0].address] > 0, least=6)
        assert blame(c)[c.prefill[0].address] == 0


def test_what_d_has_finished_is_kept_when_ps_answer_breaks_after_the_kv_came() -> None:
    with cluster(prefill=2) as c:
        for p in c.prefill:
            p.behaviour.breaks_after_push = True
        c.decode[0].behaviour.before_first_s = 0.3  # while D computes, P's answer breaks
        answer = c.complete()
        assert answer.status_code == 200
        assert len(c.decode[0].generations()) == 1 and len(c.legs()) == 1, "computed once"


@pytest.mark.parametrize("client", ["answered", "reading"])
def test_no_other_p_is_asked_for_what_d_has(client: str) -> None:
    """P answers with an error after its push, and D has the KV: no other P needs to compute, and its prompt is no
    longer kept."""
    with cluster(prefill=2) as c:
        for p in c.prefill:
            p.behaviour.hold_after_push = p.behaviour.refuses_after_push = True
        c.decode[0].behaviour.paused = client == "reading"
        with c.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            if client == "answered":
                list(pieces)
            for p in c.prefill:
                p.behaviour.hold_after_push = False
            until(lambda: not c.worker.heartbeats.open)  # D's call has ended, and P's leg with it
            c.decode[0].behaviour.paused = False
            list(pieces)
        assert len(c.legs()) == 1


def test_ds_own_failure_is_ds_although_ps_answer_broke_after_the_kv_came() -> None:
    with cluster(decode=2) as c:
        c.prefill[0].behaviour.breaks_after_push = True
        for d in c.decode:
            d.behaviour.report_s = 0.2  # P's leg breaks first, then the report comes, then D's failure
            d.behaviour.before_first_s = 0.4
            d.behaviour.fails_after_load = True
        assert c.complete().status_code == 500
        assert all(blame(c)[d.address] == len(d.generations()) for d in c.decode), "each of its failures is a D's own"


@pytest.mark.parametrize("comes", ["the KV", "no KV", "nothing"])
def test_ds_error_counts_against_it_by_its_report_however_late(comes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer comes first, and the request does not wait longer. P's answer was good in any case."""
    monkeypatch.setattr(resuming, "REPORT_OF_LOAD_S", 0.1)
    monkeypatch.setattr(exchange, "PAST_S", 2.0 if comes == "nothing" else 60.0)
    with cluster(retry=RetryPolicy(attempts=1)) as c:
        p, d = c.prefill[0], c.decode[0]
        p.behaviour.push = comes != "no KV"
        d.behaviour.policy, d.behaviour.fails_after_load = "fail", comes != "no KV"
        d.behaviour.report_s, d.behaviour.reports = 2.0, comes != "nothing"
        assert c.complete().status_code == 500
        assert set(blame(c).values()) == {0}, "it is not known yet"
        guilty = p if comes == "no KV" else d
        until(lambda: blame(c)[guilty.address] == 1)
        assert sum(blame(c).values()) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_d_is_not_blamed_for_the_time_in_which_it_waits_for_a_p(role: str) -> None:
    """P's limit may be the longer one, and P may have come late to its turn."""
    with cluster(first_byte_timeout_s=1.0, retry=RetryPolicy(attempts=1)) as c:
        p, d = c.prefill[0], c.decode[0]
        (p if role == "prefill" else d).behaviour.hold = True  # D has the KV then, and does not answer
        assert c.complete(stream=True).status_code == 504
        assert blame(c) == {p.address: 0, d.address: int(role == "decode")}


def test_a_p_that_is_tried_again_is_tried_until_d_has_reported_and_not_until_its_own_answer() -> None:
    with cluster(prefill=2, circuit=CircuitPolicy(wedged=Backoff(0.1, LONG_S, floor=0.8))) as c:
        bad = instance(c, c.prefill[0].address)
        c.prefill[0].behaviour.push = False
        until(lambda: c.complete("again").status_code == 200 and bad.circuit.trials > 1, 60)
        until(lambda: bad.circuit.state is CircuitState.WEDGED)
        assert bad.circuit.trips == 1 + bad.circuit.trials, "each trial in vain makes the next pause longer"
        tried = len(c.prefill[0].generations())
        assert tried <= 3 + bad.circuit.trials


# -- what D ends halfway


def test_a_whole_answer_that_d_dropped_is_asked_for_again() -> None:
    with cluster(decode=2) as c:
        c.decode[0].behaviour.drops_after = 1
        answers = [c.complete(f"p{n}") for n in range(6)]
        assert all("recomputed" not in a.text and a.status_code == 200 for a in answers)
        assert [texts(a) for a in answers] == [texts(c.complete(f"p{n}")) for n in range(6)]
        assert set(blame(c).values()) == {0}


def test_a_stream_that_d_dropped_ends_in_an_error_and_never_looks_complete() -> None:
    with cluster() as c:
        c.decode[0].behaviour.drops_after, c.decode[0].behaviour.paused = 2, True
        with c.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            pieces = answer.iter_raw()
            begun = next(pieces)
            c.decode[0].behaviour.paused = False
            *said, error, done = data(begun + b"".join(pieces))
        assert done == "[DONE]" and json.loads(error)["error"]["code"] == "PD-META-024"
        assert "for lack of KV blocks" in error and "no token ids" in error
        assert len(said) == 2 and not any("finish_reason" in piece for piece in said)


def test_a_stream_that_d_dropped_before_a_token_left_is_an_error_of_its_own() -> None:
    """All of D's output came in one read: the client's answer has not begun, so it gets an error status."""
    with cluster() as c:
        c.decode[0].behaviour.drops_after = 0
        answer = c.complete(stream=True)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "PD-META-022"


def test_a_stream_that_d_dropped_before_its_first_token_is_tried_again() -> None:
    with cluster(decode=2) as c:
        c.decode[0].behaviour.drops_after, c.decode[0].behaviour.cut_s = 0, 0.05
        for n in range(4):
            *said, done = events(c.complete(f"p{n}", stream=True))
            assert done == "[DONE]" and len(said) == 3 and "error" not in "".join(said)


# -- reports between engines


def test_clients_see_nothing_of_what_engines_report() -> None:
    with cluster() as c:
        answer = c.complete()
        assert answer.json()["kv_transfer_params"] is None and "pd_load" not in answer.text
        assert instance(c, c.prefill[0].address).served == 1


def test_clients_see_nothing_of_it_in_the_words_of_another_version_either() -> None:
    with cluster() as c:
        c.decode[0].behaviour.odd_report = True
        answer = c.complete()
        assert answer.json()["kv_transfer_params"] is None and texts(answer) == ["".join(words("a prompt", 3))]


def test_a_report_is_taken_once_and_of_known_requests_only() -> None:
    with cluster() as c:
        url = f"{c.served.url}/v1/metaserver/loads"
        unknown = {"transfer": "d/1/u", "ticket": "t", "decode": "d", "received": 1}
        assert httpx.post(url, json=unknown, trust_env=False).status_code == 404
        assert httpx.post(url, json={"transfer": 1}, trust_env=False).status_code == 400
        assert httpx.post(url, content=b"x" * 5000, trust_env=False).status_code == 413
        assert httpx.get(url, trust_env=False).status_code == 405
        c.complete()
        until(lambda: instance(c, c.prefill[0].address).served == 1)  # reported in the answer and by post, counted once


# -- what is no engine's fault


def test_a_metaserver_that_is_named_as_an_engine_is_found_out_and_never_calls_itself_for_ever() -> None:
    with cluster(decode=0) as c:
        c.worker.fleet.add(parse_spec(Role.DECODE, f"127.0.0.1:{c.served.port}"), "a test")
        first = c.complete()
        assert first.status_code in (502, 503, 508)
        name = f"127.0.0.1:{c.served.port}"
        until(lambda: "a metaserver answers there" in instance(c, name).last_error)
        until(lambda: instance(c, name).condition() in (Condition.STARTING, Condition.DOWN))
        assert c.complete().status_code == 503


async def test_our_own_lack_of_file_handles_says_nothing_about_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    async def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", full)
    upstream = Upstream(1.0, 1.0)
    with pytest.raises(UpstreamError) as failed:
        await upstream.ask(Origin("http", "127.0.0.1", 1), "GET", b"/", [], b"", 1.0).head()
    assert failed.value.failure is HttpFailure.OURS
    await upstream.close()
    assert {errno.EMFILE, errno.ENFILE} <= http_session.OURS


# -- lives and proofs


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_what_is_known_of_a_life_does_not_depend_on_the_order_in_which_it_is_heard(order: tuple[int, ...]) -> None:
    said: list[Callable[[ProcessHistory], ProcessHistory]] = [
        lambda life: life.reported("one", 1.0),
        lambda life: life.refuses(2.0),
        lambda life: life.reported("two", 3.0),
        lambda life: life.merged(life_of("one", 1.5, 1.7)),
    ]
    life = ProcessHistory()
    for word in order:
        life = said[word](life)
    assert life == life_of("two", 3.0, 2.0)
    assert not life.may_be("one", 2.5) and not life.may_be("two", 1.9), "of before it was gone"
    assert life.may_be("two", 2.1) and life.may_be("three", 3.5), "the first that is heard of a new one"


def test_a_proof_holds_in_the_lives_that_it_is_of() -> None:
    proof, p, d = PairProof("p", "p1", "d", "d1", 5.0), life_of("p1", 4.0), life_of("d1", 6.0)
    assert proof.holds(p, d) and proof.holds(ProcessHistory(), ProcessHistory())
    assert not proof.holds(p.reported("p2", 7.0), d) and not proof.holds(p, d.reported("d2", 7.0))
    assert not proof.holds(p, d.refuses(5.5)) and proof.holds(p, d.refuses(4.5))


def test_a_word_of_one_data_parallel_rank_says_nothing_about_the_others() -> None:
    """Requests to one address may reach different ranks."""
    d = life_of("d", 4.0).reported("e-dp1", 6.0).reported("d", 7.0)
    one, other = (PairProof("p", "p1", "d", life, 5.0) for life in ("d", "e-dp1"))
    assert one.holds(ProcessHistory(), d) and other.holds(ProcessHistory(), d)
    restarted = d.reported("f", 9.0)
    assert not one.holds(ProcessHistory(), restarted) and other.holds(ProcessHistory(), restarted), (
        "until its address refused a request"
    )
    assert not other.holds(ProcessHistory(), restarted.refuses(8.0))
    assert ProcessHistory.of([["d", 7.0], ["e-dp1", 6.0]], 0.0) == d


def test_an_engine_that_invents_ranks_fills_no_memory() -> None:
    life = ProcessHistory()
    for n in range(MAX_RANKS + 10):
        life = life.reported(f"x-dp{n}", float(n))
    assert len(life.statements) == MAX_RANKS and min(word.at for word in life.statements) == 10.0


def life_of(incarnation: str, at: float, refused: float = 0.0) -> ProcessHistory:
    return ProcessHistory.of([(incarnation, at)], refused)


def test_workers_come_to_know_the_same_whichever_probe_was_refused() -> None:
    """One worker's probe was refused while the engine restarted, the other's was not."""
    fleets = [Fleet(CircuitPolicy()) for _ in range(2)]
    for fleet in fleets:
        for role, name in ((Role.PREFILL, "p:1"), (Role.DECODE, "d:1")):
            fleet.add(parse_spec(role, name), "a test")
        fleet.prove(PairProof("p:1", "p1", "d:1", "d1", 5.0))
    refused = fleets[1].get("p:1")
    assert refused is not None
    refused.history = refused.history.refuses(6.0)

    def tell(one: Fleet, other: Fleet) -> None:
        other.merge({i.name: i.history for i in one}, one.proven())

    tell(fleets[1], fleets[0])
    assert not fleets[0].proven(), "so that the worker that sends canaries sends one"
    fleets[0].prove(PairProof("p:1", "p2", "d:1", "d1", 7.0))
    for _ in range(2):
        tell(fleets[0], fleets[1])
        tell(fleets[1], fleets[0])
    assert [[p.prefill_incarnation for p in fleet.proven()] for fleet in fleets] == [["p2"], ["p2"]]


# -- versions pair with versions

OLD, NEW = fingerprint("a model"), fingerprint("a model of another shape")


def versions(prefill: str, decode: str, **settings: Any) -> AbstractContextManager[FakeCluster]:
    """A cluster of engines of the old (o) and the new (n) version."""
    fingerprints = [{"o": OLD, "n": NEW}[letter] for letter in prefill + decode]
    return cluster(len(prefill), len(decode), fingerprints, **settings)


def shown(c: FakeCluster, engine: FakeEngine) -> str:
    (facts,) = (i for i in c.http.get("/status").json()["instances"] if i["name"] == engine.address)
    return str(facts["fingerprint"])


def learn(c: FakeCluster, engines: Iterable[FakeEngine]) -> None:
    """Send requests until the versions of these are known. All are answered, whichever pair was tried."""

    def all_known() -> bool:
        answer = c.complete()
        assert answer.status_code == 200 and texts(answer) == ["".join(words("a prompt", 3))]
        return all(shown(c, engine) == engine.fingerprint for engine in engines)

    until(all_known)


def mixed(c: FakeCluster) -> int:
    """Count the prefills that went to a P of another version than their D's."""
    asked = [(p, seen.body["kv_transfer_params"]) for p in c.prefill for seen in p.generations()]
    return sum(reservation_of(params)["fingerprint"] != p.fingerprint for p, params in asked)


@pytest.mark.parametrize("report_s", [0.0, 0.2], ids=["report first", "answer first"])
@pytest.mark.parametrize("after_push_s", [0.0, 0.2], ids=["P's answer first", "P's answer last"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_once_they_are_known_versions_pair_with_versions(stream: bool, after_push_s: float, report_s: float) -> None:
    with versions("onon", "no") as c:
        for engine in (*c.prefill, *c.decode):
            engine.behaviour.after_push_s, engine.behaviour.report_s = after_push_s, report_s
        learn(c, (*c.prefill, *c.decode))
        before, asked = mixed(c), len(c.legs())
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda n: c.complete(f"p{n}", stream=stream), range(16)))
        assert all(answer.status_code == 200 for answer in answers)
        until(lambda: len(c.legs()) == asked + 16)
        assert mixed(c) == before
        assert not any(blame(c).values()), "an engine that was asked before anything was known is not to blame"


def test_a_p_that_refuses_another_version_is_not_blamed_and_another_is_asked() -> None:
    with versions("on", "n") as c:
        c.prefill[1].behaviour.health = 500
        until(lambda: instance(c, c.prefill[1].address).condition() is Condition.DOWN)
        broke = blame(c)
        assert c.complete().status_code == 200 and mixed(c) == 1, "only asking shows what has not been reported"
        c.prefill[1].behaviour.health = 200
        until(lambda: instance(c, c.prefill[1].address).condition() is Condition.READY)
        for n in range(8):
            assert c.complete(f"p{n}").status_code == 200
        assert mixed(c) == 1 and len(c.prefill[1].generations()) == 8
        assert blame(c) == broke


def test_a_d_whose_version_has_no_p_is_left_alone_while_there_is_another() -> None:
    with versions("o", "on") as c:
        learn(c, (*c.prefill, *c.decode))
        old, new = c.decode
        before = len(new.generations())
        for n in range(8):
            assert c.complete(f"p{n}").status_code == 200
        assert len(new.generations()) == before
        old.behaviour.status = 503  # it refuses; the other one computes by itself
        legs = len(c.legs())
        assert c.complete().status_code == 200
        assert len(new.generations()) == before + 1 and len(c.legs()) == legs
        assert "kv_transfer_params" not in new.generations()[-1].body


def test_without_a_p_of_its_version_a_d_is_what_it_is_without_any() -> None:
    with versions("o", "n", without_prefill="refuse") as c:
        until(lambda: c.complete().status_code == 503)
        answer = c.complete()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "PD-META-008"
        assert mixed(c) == 1 and not any(blame(c).values())


def test_an_engine_that_is_gone_takes_its_version_along() -> None:
    with versions("o", "n") as c:
        learn(c, (*c.prefill, *c.decode))
        p, legs = c.prefill[0], len(c.legs())
        p.served.kill()
        until(lambda: not shown(c, p))
        p.incarnation, p.fingerprint = "another", NEW
        p.served.start()
        until(lambda: instance(c, p.address).condition() is Condition.READY)
        learn(c, [p])
        assert len(c.legs()) > legs and not any(blame(c).values())


def test_canaries_prove_each_version_over_its_own_pair() -> None:
    with versions("on", "no", canary=True) as c:
        (p_old, p_new), (d_new, d_old) = c.prefill, c.decode
        wanted = {(p_old.address, d_old.address), (p_new.address, d_new.address)}
        until(lambda: {(pair["prefill"], pair["decode"]) for pair in readiness(c).json()["proven_pairs"]} == wanted)
        # pairs of the next canaries; D may report on a pair shortly before P does
        until(lambda: {(p.name, d.name) for p, d in c.worker.canary._pairs()} == wanted)
        assert not any(blame(c).values())


@pytest.mark.parametrize("order", list(permutations(range(5))), ids=str)
def test_a_version_is_known_of_the_engine_that_sent_it_in_whatever_order_it_comes(order: tuple[int, ...]) -> None:
    said: list[Callable[[ProcessHistory], ProcessHistory]] = [
        lambda life: life.reported("one", 1.0, OLD),
        lambda life: life.refuses(2.0),
        lambda life: life.reported("two", 3.0, NEW),
        lambda life: life.reported("two", 4.0),  # reported by its peer
        lambda life: life.merged(ProcessHistory.of(json.loads(json.dumps([["three-dp1", 1.5, OLD]])), 1.6)),
    ]
    life = ProcessHistory()
    for word in order:
        life = said[word](life)
    assert life.fingerprint(5.0) == NEW
    assert ProcessHistory.of(*json.loads(json.dumps(life.as_sent()))).fingerprint(5.0) == NEW, (
        "as other workers hear it"
    )
    assert life.refuses(5.0).fingerprint(6.0) == "" == life.reported("four", 4.5).refuses(4.2).fingerprint(5.0)


def test_a_version_that_was_not_reported_for_long_is_not_believed_any_more() -> None:
    """At an address that never refuses, another engine may have taken its place, and an engine that gets no requests
    reports nothing."""
    life = ProcessHistory().reported("one", 1.0, OLD)
    assert life.fingerprint(0.9 + PRINT_S) == OLD and life.fingerprint(1.0 + PRINT_S) == ""
    assert life.reported("one", 50.0).fingerprint(1.0 + PRINT_S) == OLD, "it was asked since"


def test_what_comes_before_a_drop_is_whole_events() -> None:
    end = b'data: {"text": "data: x", "stop_reason": "recomputed"}\n\n'
    assert relay.up_to(relay.DROPPED, b"data: 1\n\n" + end) == b"data: 1\n\n"
    assert relay.up_to(relay.DROPPED, end) == b""
