# SPDX-License-Identifier: Apache-2.0
"""Answers that go on with another D, over real sockets: D asks the metaserver for the tokens so far."""

from __future__ import annotations

from typing import Any

import pytest
from simulation.front.speech import understood

from tools.support.checks import front_counter
from unit.router.cluster import FakeCluster, cluster, until
from vllm_ascend_pd.protocol.auth import prompt_hash
from vllm_ascend_pd.router.core.decisions import Role
from vllm_ascend_pd.router.core.resume import MAX_STUCK

PROMPT = [1, 2, 3]
ANSWER = "/v1/metaserver/answer"


def stream(c: FakeCluster, **more: Any) -> dict[str, Any]:
    asked = {"temperature": 0.8, "max_tokens": 30, "min_tokens": 30, "return_token_ids": True, **more}
    return understood(c.complete(PROMPT, stream=True, **asked).content)


def test_a_sampled_stream_goes_on_with_another_d_by_the_same_body() -> None:
    with cluster(decode=2) as c:
        for d in c.decode:
            d.behaviour.speaks, d.behaviour.gap_s = True, 0.005
        c.decode[0].behaviour.break_after = 5
        until(lambda: c.complete(PROMPT, max_tokens=1).status_code == 200 and all(d.generations() for d in c.decode))
        before = len(c.decode[1].generations())
        while len(c.decode[1].generations()) == before or not any(
            s.body["kv_transfer_params"].get("continue") for s in c.decode[1].generations()[before:]
        ):
            answer = stream(c, stop_token_ids=[999])
            assert "error" not in answer and len(answer["ids"]) == 30 and answer["finish"][0] == "length"
        went_on = c.decode[1].generations()[-1].body
        params = went_on.pop("kv_transfer_params")
        assert params["continue"] is True and params["send_tokens"] is True and "first_token" not in params
        assert (went_on["prompt"], went_on["temperature"], went_on["stop_token_ids"]) == (PROMPT, 0.8, [999])


@pytest.mark.parametrize("seeded", [False, True])
def test_an_answer_whose_generator_begins_anew_is_counted(seeded: bool) -> None:
    with cluster() as c:
        c.decode[0].behaviour.speaks, c.decode[0].behaviour.drops_after, c.decode[0].behaviour.gap_s = True, 20, 0.005
        url = f"http://127.0.0.1:{c.served.port}"
        before = [front_counter(url, name) for name in ("resumes", "resumes_reseeded")]
        assert len(stream(c, **({"seed": 5} if seeded else {}))["ids"]) == 30
        went_on, anew = (
            front_counter(url, name) - had for name, had in zip(("resumes", "resumes_reseeded"), before, strict=True)
        )
        assert went_on == 1 and anew == seeded


def test_a_stream_that_its_only_d_drops_goes_on_there() -> None:
    with cluster() as c:
        c.decode[0].behaviour.speaks, c.decode[0].behaviour.drops_after, c.decode[0].behaviour.gap_s = True, 7, 0.005
        answer = stream(c)
        assert "error" not in answer and len(answer["ids"]) == 30
        assert [s.body["kv_transfer_params"].get("continue", False) for s in c.decode[0].generations()] == [False] + [
            True
        ] * 4


def test_an_answer_that_goes_on_may_take_another_p_behind_what_its_client_has() -> None:
    """D says what it was given before it asks for its KV: that is no answer yet."""
    with cluster(prefill=2, decode=2) as c:
        for d in c.decode:
            d.behaviour.speaks, d.behaviour.gap_s, d.behaviour.break_after = True, 0.002, 5
        c.prefill[0].behaviour.status = 429
        before = sum(len(d.generations()) for d in c.decode)
        for number in range(1, 7):
            answer = stream(c, max_tokens=8, min_tokens=8)
            assert "error" not in answer and len(answer["ids"]) == 8
            assert sum(len(d.generations()) for d in c.decode) == before + 2 * number
        assert c.prefill[0].generations() and not any(d.local_prefills for d in c.decode)


def test_a_load_that_fails_behind_given_tokens_is_no_evidence_against_d() -> None:
    with cluster(decode=2) as c:
        for d in c.decode:
            d.behaviour.speaks, d.behaviour.gap_s, d.behaviour.break_after = True, 0.03, 5
        asked = {"prompt": PROMPT, "stream": True, "max_tokens": 9, "min_tokens": 9, "temperature": 0}
        with c.http.stream("POST", "/v1/completions", json=asked) as answer:
            pieces = answer.iter_bytes()
            assert next(pieces)
            for d in c.decode:
                d.behaviour.loads_fail, d.behaviour.policy = "PD-XFER-001", "fail"
            assert b"PD-META-024" in b"".join(pieces)
        broke = sorted(instance.broke for instance in c.worker.fleet if instance.role is Role.DECODE)
        assert broke == [0, 1], "one has broken off an answer; no other has failed by itself"
        asked_of = sum(len(d.generations()) for d in c.decode)
        assert asked_of == 1 + MAX_STUCK, "and a request without a new token does not go round for ever"


@pytest.mark.parametrize("sampled", [True, False])
def test_without_a_p_what_is_sampled_is_never_begun_anew(sampled: bool) -> None:
    """A D with the policy `fail` cannot go on then. The next one gets the tokens too, unless it would say the same."""
    with cluster(decode=3) as c:
        for d in c.decode:
            d.behaviour.speaks, d.behaviour.gap_s = True, 0.02
        c.prefill[0].behaviour.health = 503
        until(lambda: not c.worker.fleet.usable(Role.PREFILL))
        asked = {"prompt": PROMPT, "stream": True, "max_tokens": 20, "min_tokens": 20}
        asked |= {"temperature": 0.8 if sampled else 0, "return_token_ids": True}
        with c.http.stream("POST", "/v1/completions", json=asked) as answer:
            pieces = answer.iter_bytes()
            said = next(pieces)
            for d in c.decode:
                if d.generations():
                    d.behaviour.break_after = 5
                d.behaviour.status = 500
            answered = understood(said + b"".join(pieces))
        asks = [s.body.get("kv_transfer_params") for d in c.decode for s in d.generations()]
        given = [bool(params and params.get("continue")) for params in asks]
        assert "error" in answered and len(given) > 2
        assert given.count(True) == (len(given) - 1 if sampled else 1)


def test_a_question_is_answered_to_who_has_the_ticket_and_the_prompt() -> None:
    with cluster() as c:
        c.decode[0].behaviour.speaks, c.decode[0].behaviour.gap_s = True, 0.03
        asked = {"prompt": PROMPT, "stream": True, "max_tokens": 60, "min_tokens": 60, "temperature": 0}
        with c.http.stream("POST", "/v1/completions", json=asked) as answer:
            pieces = answer.iter_bytes()
            assert next(pieces)
            ticket = c.decode[0].generations()[-1].body["kv_transfer_params"]["ticket"]
            first = c.http.post(ANSWER, json={"ticket": ticket, "prompt": prompt_hash(PROMPT)})
            assert first.status_code == 200 and first.json() == {"tokens": []}, "nothing has gone on"
            assert c.http.post(ANSWER, json={"ticket": "x", "prompt": "y"}).status_code == 404
        for odd in (b"", b"{}", b"[1]", b'{"ticket": 1, "prompt": "x"}', b'{"ticket":"' + b"x" * 300 + b'"}'):
            assert c.http.post(ANSWER, content=odd).status_code == 400
        assert c.http.post(ANSWER, content=b" " * 5000).status_code == 413
        assert c.http.get(ANSWER).status_code == 405


def test_a_clients_own_continue_reaches_no_engine() -> None:
    params = {"do_remote_prefill": True, "ticket": "x", "continue": True, "metaserver": "http://elsewhere"}
    with cluster() as c:
        for more in ({"kv_transfer_params": params}, {"vllm_xargs": {"kv_transfer_params": params}}):
            assert c.complete("x", **more).status_code == 200
            assert "continue" not in str(c.decode[0].generations()[-1].body)
            c.http.post("/v1/embeddings", json={"input": "x", **more})
            assert "continue" not in str(c.decode[0].seen[-1].body)
