# SPDX-License-Identifier: Apache-2.0
"""Nothing depends on which of two answers comes first: readiness, blame and retries follow what D reports."""

from __future__ import annotations

import errno
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from metaserver_cluster import Cluster, cluster, events, texts, until

from vllm_ascend_pd.metaserver import http1
from vllm_ascend_pd.metaserver.decisions import Condition, Failure, Life, Proof
from vllm_ascend_pd.metaserver.http1 import Origin, Upstream, UpstreamError
from vllm_ascend_pd.metaserver.service.fleet import Instance

LONG_S = 3600.0  # an answer that comes long after everything else, if at all


def instance(c: Cluster, name: str) -> Instance:
    found = c.worker.fleet.get(name)
    assert found is not None
    return found


def blame(c: Cluster) -> dict[str, int]:
    return {i.name: i.broke for i in c.worker.fleet}


def readiness(c: Cluster) -> httpx.Response:
    return c.http.get("/readiness")


def chat(c: Cluster, stream: bool) -> httpx.Response:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    return c.http.post("/v1/chat/completions", json=body)


# -- readiness


def test_a_pair_is_proven_although_d_answers_long_before_p() -> None:
    with cluster(canary=True, prefill=0) as c, cluster(prefill=1, decode=0) as other:
        p = other.prefill[0]
        p.metaservers(c.served.url)
        p.manner.after_push_s = LONG_S
        c.worker.fleet.add(_spec(p.address), "a test")
        until(lambda: readiness(c).status_code == 200)
        assert readiness(c).json()["proven_pairs"] == [{"prefill": p.address, "decode": c.decode[0].address}]


def _spec(address: str) -> Any:
    from vllm_ascend_pd.metaserver.decisions import Role
    from vllm_ascend_pd.metaserver.service.fleet import parse_spec

    return parse_spec(Role.PREFILL, address)


@pytest.mark.parametrize("posted", [True, False], ids=["report posted", "report in the answer only"])
def test_a_pair_over_which_no_kv_came_is_never_proven_whoever_answers_first(posted: bool) -> None:
    with cluster(canary=True) as c:
        restart(c, lambda p: setattr(p.manner, "push", False))
        c.decode[0].manner.reports = posted
        until(lambda: "computed the prompt by itself" in readiness(c).json()["last_error"])
        assert readiness(c).status_code == 503 and "PD-XFER-001" in readiness(c).json()["last_error"]


def restart(c: Cluster, change: Any) -> None:
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
        c.prefill[0].manner.frozen = True
        until(lambda: instance(c, c.prefill[0].address).condition() is Condition.DOWN)
        c.prefill[0].manner.frozen = False
        until(lambda: readiness(c).status_code == 200)
        assert len(c.legs()) == legs, "no canary was needed: it is the same process"


def test_an_engine_that_came_back_between_two_probes_is_found_out_by_its_own_word() -> None:
    with cluster(canary=True, probe_every_s=LONG_S) as c:
        c.http.get("/readiness")
        until(lambda: readiness(c).status_code == 200)
        c.decode[0].incarnation = "another one"
        c.prefill[0].manner.push = False
        assert c.complete().status_code == 200
        assert readiness(c).status_code == 503, "what was proven was proven of another process"


def test_clients_who_fill_the_house_do_not_make_it_unready() -> None:
    with cluster(canary=True, max_running=1, max_waiting=0) as c, ThreadPoolExecutor(1) as clients:
        until(lambda: readiness(c).status_code == 200)
        c.decode[0].manner.hold = True
        running = clients.submit(c.complete)
        until(lambda: c.worker.front.journal.exchanges)
        restart(c, lambda p: None)
        until(lambda: len(c.legs()) >= 2)
        assert c.complete("another").status_code == 429
        c.decode[0].manner.hold = False
        until(lambda: readiness(c).status_code == 200)
        running.result()


def test_an_engine_that_hangs_keeps_no_other_from_being_proven() -> None:
    with cluster(prefill=3, decode=2, canary=True) as c:
        until(lambda: len({p["prefill"] for p in readiness(c).json()["proven_pairs"]}) == 3)
        for p in c.prefill:
            p.served.kill()
        until(lambda: readiness(c).status_code == 503)
        for p in c.prefill[:2]:
            p.manner.hang = True
        for p in c.prefill:
            p.served.start()
        until(lambda: {p["prefill"] for p in readiness(c).json()["proven_pairs"]} == {c.prefill[2].address})


def test_before_the_first_canary_the_reason_says_so() -> None:
    with cluster(prefill=0, canary=True) as c:
        assert readiness(c).json()["last_error"] == "no canary has been answered yet"


# -- blame


@pytest.mark.parametrize("report_s", [0.0, 0.3], ids=["report first", "answer first"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ["completions", "chat"])
def test_what_p_failed_to_push_is_pushed_by_another_and_d_is_not_blamed(
    route: str, stream: bool, report_s: float
) -> None:
    with cluster(prefill=2) as c:
        c.decode[0].manner.policy, c.decode[0].manner.report_s = "fail", report_s
        bad = c.prefill[0]
        bad.manner.push = False
        for n in range(6):
            answer = c.complete(f"p{n}", stream=stream) if route == "completions" else chat(c, stream)
            assert answer.status_code == 200 and "error" not in answer.text
        assert blame(c)[c.decode[0].address] == 0 and blame(c)[c.prefill[1].address] == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_p_whose_pushes_never_arrive_is_left_alone_although_all_its_answers_are_good(stream: bool) -> None:
    with cluster(prefill=2) as c:
        bad = c.prefill[0]
        bad.manner.push = False
        for n in range(40):
            assert c.complete(f"p{n}", stream=stream).status_code == 200
            if instance(c, bad.address).condition() is Condition.DOWN:
                break
        assert instance(c, bad.address).condition() is Condition.DOWN
        assert "PD-XFER-001" in instance(c, bad.address).last_error
        assert blame(c)[c.decode[0].address] == 0 and blame(c)[c.prefill[1].address] == 0


def test_a_d_that_fails_by_itself_is_blamed_as_before() -> None:
    with cluster(decode=2) as c:
        c.decode[0].manner.wedged = True
        for n in range(6):
            assert c.complete(f"p{n}").status_code == 200
        assert blame(c)[c.decode[0].address] > 0 and blame(c)[c.prefill[0].address] == 0


def test_what_d_has_finished_is_kept_when_ps_answer_breaks_after_the_kv_came() -> None:
    with cluster(prefill=2) as c:
        for p in c.prefill:
            p.manner.breaks_after_push = True
        c.decode[0].manner.before_first_s = 0.3  # D computes: P's end comes first
        answer = c.complete()
        assert answer.status_code == 200
        assert len(c.decode[0].generations()) == 1 and len(c.legs()) == 1, "computed once"


# -- what D ends halfway


def test_a_whole_answer_that_d_dropped_is_asked_for_again() -> None:
    with cluster(decode=2) as c:
        c.decode[0].manner.drops_after = 1
        answers = [c.complete(f"p{n}") for n in range(6)]
        assert all("recomputed" not in a.text and a.status_code == 200 for a in answers)
        assert [texts(a) for a in answers] == [texts(c.complete(f"p{n}")) for n in range(6)]
        assert set(blame(c).values()) == {0}


def test_a_stream_that_d_dropped_ends_in_an_error_and_never_looks_complete() -> None:
    with cluster() as c:
        c.decode[0].manner.drops_after = 2
        *said, error, done = events(c.complete(stream=True))
        assert done == "[DONE]" and json.loads(error)["error"]["code"] == "PD-META-022"
        assert len(said) == 2 and not any("finish_reason" in piece for piece in said)


def test_a_stream_that_d_dropped_before_its_first_token_is_tried_again() -> None:
    with cluster(decode=2) as c:
        c.decode[0].manner.drops_after = 0
        for n in range(4):
            *said, done = events(c.complete(f"p{n}", stream=True))
            assert done == "[DONE]" and len(said) == 3 and "error" not in "".join(said)


# -- what engines say to each other


def test_clients_see_nothing_of_what_engines_report() -> None:
    with cluster() as c:
        answer = c.complete()
        assert answer.json()["kv_transfer_params"] is None and "pd_load" not in answer.text
        assert instance(c, c.prefill[0].address).served == 1


def test_a_report_is_taken_once_and_of_known_requests_only() -> None:
    with cluster() as c:
        url = f"{c.served.url}/v1/metaserver/loads"
        unknown = {"transfer": "d/1/u", "ticket": "t", "decode": "d", "received": 1}
        assert httpx.post(url, json=unknown, trust_env=False).status_code == 404
        assert httpx.post(url, json={"transfer": 1}, trust_env=False).status_code == 400
        assert httpx.post(url, content=b"x" * 5000, trust_env=False).status_code == 413
        assert httpx.get(url, trust_env=False).status_code == 405
        c.complete()
        until(lambda: instance(c, c.prefill[0].address).served == 1)  # by answer and post: once


# -- what is no engine's fault


def test_a_metaserver_that_is_named_as_an_engine_is_found_out_and_never_calls_itself_for_ever() -> None:
    with cluster(decode=0) as c:
        from vllm_ascend_pd.metaserver.decisions import Role
        from vllm_ascend_pd.metaserver.service.fleet import parse_spec

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
        await upstream.send(Origin("http", "127.0.0.1", 1), "GET", b"/", [], b"", 1.0)
    assert failed.value.failure is Failure.OURS
    await upstream.close()
    assert {errno.EMFILE, errno.ENFILE} <= http1._OURS


# -- lives and proofs


def test_lives() -> None:
    fresh = Life()
    known = fresh.heard("one")
    assert fresh.may_be("one") and known.may_be("one") and not known.may_be("two")
    gone = known.refused()
    assert not gone.may_be("one") and gone.may_be("two"), "it may be another process by now, and not the same unproven"
    assert gone.heard("one").may_be("one"), "it has spoken again: only its port was shut"
    assert not gone.heard("two").may_be("one")
    assert gone.refused() == gone and Life().refused() == Life()


def test_a_proof_holds_in_the_lives_that_it_is_of() -> None:
    proof, p, d = Proof("p", "p1", "d", "d1"), Life().heard("p1"), Life().heard("d1")
    assert proof.holds(p, d) and proof.holds(Life(), Life())
    assert not proof.holds(p.heard("p2"), d) and not proof.holds(p, d.heard("d2")) and not proof.holds(p, d.refused())
