# SPDX-License-Identifier: Apache-2.0
"""D's that answer well and cannot load KV, from one P or from any: who is asked then, and until when."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unit.router.cluster import FakeCluster, asked_until, cluster, streamed, texts, until
from unit.router.fake_engine import FakeEngine, words
from vllm_ascend_pd.router.core.decisions import Condition, LoadRecord, RetryPolicy
from vllm_ascend_pd.router.fleet import Instance


def clients(engine: FakeEngine) -> int:
    """Return how many requests of clients an engine has got; canaries are others."""
    return sum(not seen.headers["x-request-id"].startswith("canary") for seen in engine.generations())


def instance(c: FakeCluster, engine: FakeEngine) -> Instance:
    member = c.worker.fleet.get(engine.address)
    assert member is not None
    return member


@pytest.mark.parametrize("stream", [False, True])
def test_after_a_failed_load_another_d_is_asked(stream: bool) -> None:
    with cluster(prefill=2, decode=2) as c:
        c.decode[0].behaviour.loads_fail, c.decode[0].behaviour.policy = "PD-XFER-003", "fail"
        for i in range(40):
            answer = c.complete(f"p{i}", stream=stream)
            assert answer.status_code == 200
            assert (streamed(answer) if stream else texts(answer)[0]) == "".join(words(f"p{i}", 3))
        assert instance(c, c.decode[0]).broke == 0, "its answers are not its own failure"


def test_why_a_load_failed_is_in_the_metaserver_s_log(caplog: pytest.LogCaptureFixture) -> None:
    with cluster(prefill=1, decode=1) as c, caplog.at_level(logging.WARNING):
        c.decode[0].behaviour.loads_fail = "PD-XFER-003"
        assert c.complete("p").status_code == 200, "D computes the prompt"
        until(lambda: f"its KV did not come to {c.decode[0].address}: PD-XFER-003 as set" in caplog.text)


def test_the_attempt_behind_a_failed_load_is_another_d_s_though_it_has_more_to_do() -> None:
    with cluster(prefill=2, decode=2, retry=RetryPolicy(attempts=2)) as c:
        for d in c.decode:
            d.behaviour.paused = True  # streams
        asked = {"prompt": "x", "stream": True, "max_tokens": 200}
        with c.http.stream("POST", "/v1/completions", json=asked) as answer:
            until(lambda: any(d.generations() for d in c.decode))
            (idle,) = (d for d in c.decode if not d.generations())
            idle.behaviour.loads_fail, idle.behaviour.policy = "PD-XFER-003", "fail"
            assert texts(c.complete("p")) == ["".join(words("p", 3))]
            assert len(idle.generations()) == 1, "it was asked first"
            for d in c.decode:
                d.behaviour.paused = False
            assert b"[DONE]" in answer.read()


@pytest.mark.parametrize("code", ["PD-XFER-003", "PD-XFER-001", "PD-META-001"])
def test_a_d_whose_loads_fail_gets_no_requests_until_a_canary_has_loaded(code: str) -> None:
    with cluster(prefill=2, decode=2, canary=True) as c:
        bad = instance(c, c.decode[0])
        c.decode[0].behaviour.loads_fail = code
        asked_until(c, lambda: len(bad.loads.failed) == 2)  # not the P's fault: both fail
        asked = clients(c.decode[0])
        for i in range(12):
            assert texts(c.complete(f"q{i}")) == ["".join(words(f"q{i}", 3))]
        assert clients(c.decode[0]) == asked
        assert bad.condition() is Condition.SUSPECT and code in bad.facts()["last_error"]
        c.decode[0].behaviour.loads_fail = ""
        until(lambda: not bad.loads.failed)
        assert bad.condition() is Condition.READY
        asked_until(c, lambda: clients(c.decode[0]) > asked)


def test_of_a_pair_that_cannot_move_kv_both_are_asked_with_others() -> None:
    with cluster(prefill=2, decode=2, canary=True) as c:
        c.decode[0].behaviour.loads_fail = "PD-XFER-005"
        c.decode[0].behaviour.loads_fail_from = c.prefill[0].incarnation
        d0 = instance(c, c.decode[0])
        asked_until(c, lambda: d0.loads.failed)
        assert set(d0.loads.failed) == {c.prefill[0].address}
        before, failed, all_before = clients(c.decode[0]), c.decode[0].local_prefills, len(c.decode[0].generations())
        asked_until(c, lambda: clients(c.decode[0]) > before + 5 and clients(c.prefill[0]) > 5)
        canaries = len(c.decode[0].generations()) - all_before - (clients(c.decode[0]) - before)
        assert c.decode[0].local_prefills - failed <= canaries, "it loads clients' prompts from the other P"


def test_a_router_whose_only_d_cannot_load_is_not_ready() -> None:
    with cluster(canary=True) as c:
        c.decode[0].behaviour.loads_fail = "PD-XFER-003"
        assert c.complete("p").status_code == 200
        until(lambda: c.http.get("/readiness").status_code == 503)
        assert c.complete("q").status_code == 200, "who comes all the same is served"
        c.decode[0].behaviour.loads_fail = ""
        until(lambda: c.http.get("/readiness").status_code == 200)


def test_a_d_that_cannot_even_ask_for_kv_is_left_for_another() -> None:
    """It does not list the metaserver: it reports the code in its answer, of a transfer that it has not posted."""
    with cluster(decode=2, canary=True) as c:
        bad = instance(c, c.decode[0])
        c.decode[0].metaservers("http://127.0.0.1:1")
        asked_until(c, lambda: bad.loads.failed)
        assert "PD-META-001" in bad.last_error
        asked = clients(c.decode[0])
        for i in range(12):
            assert c.complete(f"q{i}").status_code == 200
        assert clients(c.decode[0]) == asked
        c.decode[0].metaservers(str(c.http.base_url).rstrip("/"))
        until(lambda: not bad.loads.failed)


def test_without_canaries_one_request_at_a_time_tries_a_d_again() -> None:
    with cluster(decode=2) as c:
        bad = instance(c, c.decode[0])
        c.decode[0].behaviour.loads_fail = "PD-XFER-003"
        asked_until(c, lambda: bad.loads.failed)
        c.decode[0].behaviour.loads_fail = ""
        asked = clients(c.decode[0])
        asked_until(c, lambda: not bad.loads.failed)
        assert clients(c.decode[0]) > asked


# ---- the rule alone

MOMENTS = st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 9)), max_size=40)


@given(MOMENTS, st.booleans())
def test_a_d_is_to_blame_when_loads_from_several_failed_with_none_between(
    events: list[tuple[str, bool, float]], canaries: bool
) -> None:
    loads, now, failing, since = LoadRecord(), 1.0, set[str](), set[str]()
    for prefill, well, later in events:
        now += later + 0.001
        if well:
            loads.receive(prefill, now)
            failing.discard(prefill)
            since = set()
        else:
            loads.fail(prefill, now, now, 0.5, canaries)
            failing.add(prefill)
            since.add(prefill)
        for one in "abcd":
            assert loads.avoids(one, now) or not canaries or (one not in failing and len(since) < 2)
            assert not loads.avoids(one, now) or one in failing or len(since) > 1
            assert loads.avoids(one, now + 31.0) is (canaries and (one in failing or len(since) > 1))
    assert set(loads.failed) == failing


def test_failures_of_requests_that_were_under_way_together_count_once() -> None:
    loads = LoadRecord()
    for _ in range(50):
        loads.fail("p", 1.0, 2.0, 0.5, canaries=True)
    assert loads.failed["p"].times == 1 and not loads.broken("p", 2)
    loads.fail("p", 3.0, 4.0, 0.5, canaries=True)
    assert loads.broken("p", 2) and not loads.broken("q", 2)


def test_while_one_request_tries_a_pair_again_others_wait_for_its_result() -> None:
    loads = LoadRecord()
    loads.fail("p", 1.0, 2.0, 0.5, canaries=False)
    retry_at = loads.failed["p"].until
    assert loads.avoids("p", 2.0) and not loads.avoids("p", retry_at)
    loads.tried("p", retry_at, 0.5)
    assert loads.avoids("p", retry_at)
