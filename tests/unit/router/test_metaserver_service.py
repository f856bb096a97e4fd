# SPDX-License-Identifier: Apache-2.0
"""The metaserver as clients and engines use it, over real sockets, with fake engines behind it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from unit.router.cluster import FakeCluster, asked_until, cluster, events, streamed, texts, until
from unit.router.fake_engine import ids_of, words


@pytest.fixture(scope="module")
def pair() -> Iterator[FakeCluster]:
    with cluster() as c:
        yield c


def test_a_completion_comes_back_right_and_went_over_p(pair: FakeCluster) -> None:
    before = len(pair.legs())
    answer = pair.complete("one")
    assert answer.status_code == 200
    assert texts(answer) == ["".join(words("one", 3))]
    leg = pair.legs()[before]
    assert leg["max_tokens"] == 1 and leg["stream"] is False and leg["prompt"] == ids_of("one")
    assert leg["kv_transfer_params"]["do_remote_decode"] is True


def test_a_stream_comes_back_right_and_in_pieces(pair: FakeCluster) -> None:
    answer = pair.complete("two", stream=True, stream_options={"include_usage": True}, min_tokens=3)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert streamed(answer) == "".join(words("two", 3))
    assert not {"stream_options", "min_tokens"} & set(pair.legs()[-1])


def test_chat_is_served_with_and_without_a_stream(pair: FakeCluster) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "fake", "messages": messages, "max_completion_tokens": 3}
    whole = pair.http.post("/v1/chat/completions", json=body)
    assert whole.json()["choices"][0]["message"]["content"] == "".join(words(messages, 3))
    answer = pair.http.post("/v1/chat/completions", json={**body, "stream": True})
    pieces = [json.loads(e)["choices"][0]["delta"]["content"] for e in events(answer)[:-1]]
    assert "".join(pieces) == "".join(words(messages, 3))
    assert [leg["prompt"] for leg in pair.legs()[-2:]] == [ids_of(messages)] * 2


def test_a_clients_own_transfer_parameters_reach_no_engine(pair: FakeCluster) -> None:
    forged = {"do_remote_prefill": True, "metaserver": "http://127.0.0.1:1", "ticket": "x", "remote_host": "evil"}
    assert pair.complete("three", kv_transfer_params=forged).status_code == 200
    pair.http.post("/v1/embeddings", json={"input": "x", "kv_transfer_params": forged})
    pair.http.post("/v1/of/tomorrow", content=b'{"kv_transfer\\u005fparams": {"remote_host": "evil"}}')
    for engine in (*pair.prefill, *pair.decode):
        assert "evil" not in json.dumps([s.body for s in engine.seen])


def test_other_routes_go_to_a_d(pair: FakeCluster) -> None:
    assert pair.http.get("/v1/models").json()["data"][0]["id"] == "fake"
    answer = pair.http.post("/v1/embeddings", json={"input": "x"})
    assert answer.json() == {"route": "/v1/embeddings", "body": {"input": "x"}}


def test_an_engines_no_to_the_client_is_passed_on(pair: FakeCluster) -> None:
    answer = pair.complete(model="another")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The model does not exist."


def test_what_is_not_json_is_refused_in_the_openai_shape(pair: FakeCluster) -> None:
    for body in (b"{", b"[1]", b"", b"\xff"):
        answer = pair.http.post("/v1/completions", content=body)
        assert answer.status_code == 400
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_request_id_is_made_or_kept_and_both_legs_carry_it(pair: FakeCluster) -> None:
    pair.http.post(
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 1},
        headers={"X-Request-Id": "mine", "traceparent": "00-a-b-01", "Authorization": "Bearer k"},
    )
    for engine in (pair.prefill[0], pair.decode[0]):
        headers = engine.generations()[-1].headers
        assert (headers["x-request-id"], headers["traceparent"], headers["authorization"]) == (
            "mine",
            "00-a-b-01",
            "Bearer k",
        )


def test_an_unknown_ticket_is_refused(pair: FakeCluster) -> None:
    body = {"ticket": "invented", "transfer": "t", "reservation": ""}
    assert pair.http.post("/v1/metaserver", json=body).status_code == 404
    assert pair.http.post("/v1/metaserver", content=b"{}").status_code == 400


def test_a_client_that_leaves_cancels_both_legs() -> None:
    with cluster() as c:
        c.prefill[0].behaviour.prefill_s = 60
        with c.leaving("x"):
            until(c.legs)
        until(lambda: c.prefill[0].generations()[0].aborted and c.decode[0].generations()[0].aborted)
        until(lambda: not c.worker.front.journal.tickets)
        until(lambda: all(i.requests == 0 and i.load == 0 for i in c.worker.fleet))


def test_a_client_that_leaves_a_stream_cancels_d() -> None:
    with cluster() as c:
        c.decode[0].behaviour.gap_s, c.decode[0].behaviour.tokens = 0.1, 1000
        with c.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            next(answer.iter_bytes())
        until(lambda: c.decode[0].generations()[0].aborted)


def test_n_choices_bring_n_transfers_on_one_ticket() -> None:
    with cluster() as c:
        assert texts(c.complete("many", n=3)) == ["".join(words("many", 3))] * 3
        assert len(c.legs()) == 3 and all(leg["n"] == 1 for leg in c.legs())
        assert len({leg["kv_transfer_params"]["reservation"] for leg in c.legs()}) == 3


def test_list_prompts_are_prefilled_by_token_ids() -> None:
    with cluster() as c:
        assert texts(c.complete(["a", "b"])) == ["".join(words(p, 3)) for p in ("a", "b")]
        assert sorted(leg["prompt"] for leg in c.legs()) == sorted(ids_of(p) for p in ("a", "b"))
        c.decode[0].behaviour.posts_ids = False
        assert texts(c.complete(["c", "d"])) == ["".join(words(p, 3)) for p in ("c", "d")], "D computes them"
        assert len(c.legs()) == 2, "P would not know which of the prompts to compute"


SAID = [{"role": "user", "content": "hello"}]
TEXTS = [
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/completions", {"prompt": ["hello"]}),
    ("/v1/chat/completions", {"messages": SAID}),
    ("/v1/chat/completions", {"messages": SAID, "tools": [{"type": "function"}], "chat_template": "x"}),
    ("/v1/chat/completions", {"messages": SAID, "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": SAID, "response_format": {"type": "json_object"}}),
]


@pytest.mark.parametrize(("route", "asked"), TEXTS, ids=str)
def test_text_goes_to_p_as_the_token_ids_that_d_made_of_it(
    pair: FakeCluster, route: str, asked: dict[str, Any]
) -> None:
    known = len(pair.prefill[0].generations())
    body = {"model": "fake", "cache_salt": "s", "of_tomorrow": 1, "n": 1, "max_tokens": 3, **asked}
    assert pair.http.post(route, json=body).status_code == 200
    (leg,) = pair.prefill[0].generations()[known:]
    prompt = asked.get("messages") or (asked["prompt"] if isinstance(asked["prompt"], str) else asked["prompt"][0])
    assert leg.route == "/v1/completions" and leg.body.pop("kv_transfer_params")
    assert leg.body == {
        "model": "fake",
        "cache_salt": "s",
        "of_tomorrow": 1,
        "prompt": ids_of(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "n": 1,
        "stream": False,
    }


def test_a_prompt_that_is_token_ids_goes_to_p_as_it_came(pair: FakeCluster) -> None:
    for prompt in ([7, 8, 9], [[7, 8, 9]]):
        assert pair.complete(prompt).status_code == 200
        assert "send_tokens" not in pair.decode[0].generations()[-1].body["kv_transfer_params"]
        assert pair.legs()[-1]["prompt"] == prompt


def test_a_chat_of_which_d_sends_no_ids_goes_to_p_as_it_came() -> None:
    """D knows whether its ids are all of a prompt; with media they are not."""
    body = {"model": "fake", "messages": SAID, "response_format": {"type": "json_object"}, "max_completion_tokens": 3}
    with cluster() as c:
        c.decode[0].behaviour.posts_ids = False
        assert c.http.post("/v1/chat/completions", json=body).status_code == 200
        (leg,) = c.prefill[0].generations()
        assert leg.route == "/v1/chat/completions" and leg.body.pop("kv_transfer_params")
        assert leg.body == {**body, "max_completion_tokens": 1, "temperature": 0, "n": 1, "stream": False}


def test_load_spreads_over_all_instances() -> None:
    with cluster(prefill=2, decode=2) as c:
        for i in range(24):
            assert c.complete(f"p{i}").status_code == 200
        assert all(engine.generations() for engine in (*c.prefill, *c.decode))


def test_d_is_notified_at_once_when_p_fails_and_computes_by_itself() -> None:
    with cluster() as c:
        c.prefill[0].behaviour.status = 500
        answer = c.complete("alone")
        assert texts(answer) == ["".join(words("alone", 3))]
        assert c.decode[0].failed("PD-META-006")


def test_a_failed_prefill_is_repeated_on_another_p_under_a_new_ticket() -> None:
    with cluster(prefill=2) as c:
        c.decode[0].behaviour.policy = "fail"
        c.prefill[0].behaviour.status = 500
        count = asked_until(c, c.prefill[0].generations, least=8)
        failed = len(c.prefill[0].generations())
        tickets = [s.body["kv_transfer_params"]["ticket"] for s in c.decode[0].generations()]
        assert len(tickets) == len(set(tickets)) == count + failed


def test_a_request_survives_the_death_of_its_d_before_the_first_byte() -> None:
    with cluster(decode=2) as c:
        for engine in c.decode:
            engine.behaviour.before_first_s = 0.5
        got: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: got.append(c.complete("stay")), name="client")
        asking.start()
        until(lambda: any(e.generations() for e in c.decode))
        next(e for e in c.decode if e.generations()).served.kill()
        asking.join(20)
        assert texts(got[0]) == ["".join(words("stay", 3))]


def test_a_stream_that_breaks_ends_with_an_error_frame() -> None:
    for resume_tokens, code in ((0, "PD-META-007"), (1000, "PD-META-024")):
        with cluster(resume_tokens=resume_tokens) as c:
            c.decode[0].behaviour.break_after = 2
            answer = c.complete("x", stream=True)
            *pieces, error, done = events(answer)
            assert len(pieces) == 2 and done == "[DONE]"
            assert json.loads(error)["error"]["code"] == code
            assert ("no token ids" in error) is (resume_tokens > 0), "why no D goes on with it"


@pytest.mark.parametrize("speaks", [False, True], ids=["not kept", "kept"])
def test_nothing_follows_the_end_of_a_stream_whose_connection_breaks_then(speaks: bool) -> None:
    with cluster() as c:
        c.decode[0].behaviour.torn_at_end, c.decode[0].behaviour.speaks = True, speaks
        answer = c.complete([1, 2, 3], stream=True, **({"temperature": 0, "max_tokens": 5} if speaks else {}))
        *pieces, done = events(answer)
        assert done == "[DONE]" and pieces and not any(piece == "[DONE]" or "error" in piece for piece in pieces)


def test_an_empty_200_is_no_answer() -> None:
    with cluster() as c:
        c.decode[0].behaviour.empty = True
        for stream in (False, True):
            answer = c.complete("x", stream=stream)
            assert answer.status_code == 502 and answer.json()["error"]["message"]


def test_without_any_p_d_prefills_or_the_client_learns_when_to_come_back() -> None:
    with cluster(prefill=0) as c:
        until(lambda: c.complete("alone").status_code == 200)
        assert "kv_transfer_params" not in c.decode[0].generations()[-1].body
    with cluster(prefill=0, without_prefill="refuse") as c:
        answer = c.complete("alone")
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0


def test_prompt_logprobs_are_computed_by_d_alone() -> None:
    with cluster() as c:
        c.complete("x", prompt_logprobs=1)
        c.complete("x", echo=True, logprobs=1)
        assert not c.legs()


def test_a_stream_does_not_hold_its_prompt() -> None:
    with cluster() as c:
        c.decode[0].behaviour.paused = True
        with c.http.stream("POST", "/v1/completions", json={"prompt": "x" * 1_000_000, "stream": True}) as answer:
            pieces = answer.iter_bytes()
            next(pieces)
            (exchange,) = c.worker.front.journal.exchanges
            assert not exchange.request.fields
            c.decode[0].behaviour.paused = False
            assert b"[DONE]" in b"".join(pieces)
        until(lambda: c.worker.front.journal.last)
        assert "xxxx" not in repr(c.worker.front.journal.last)


def test_the_last_of_several_choices_still_finds_its_prompt() -> None:
    """With few running slots D posts for the second choice when the first one already streams."""
    with cluster() as c:
        c.decode[0].behaviour.late_choice = True
        answer = c.complete("two", n=2, stream=True)
        assert answer.status_code == 200
        until(lambda: len(c.legs()) == 2)
        assert all(leg["prompt"] == ids_of("two") for leg in c.legs())


def test_d_is_asked_for_token_ids_of_answers_that_can_go_on_and_p_is_not() -> None:
    for settings in ({"resume_tokens": 0}, {"resume_tokens": 1000}, {"resume_seeded": False}):
        with cluster(**settings) as c:
            for more in ({"stream": True, "temperature": 0}, {"stream": True}, {}, {"seed": 5}, {"n": 2}):
                assert c.complete("x", **more).status_code == 200
                asked = "return_token_ids" in c.decode[0].generations()[-1].body
                seeded = "seed" in more and "resume_seeded" in settings
                assert asked is (settings.get("resume_tokens") != 0 and "n" not in more and not seeded), more
            assert not any("return_token_ids" in leg for leg in c.legs())


def test_a_prompt_that_leaves_no_room_for_what_is_kept_is_not_kept() -> None:
    with cluster(resume_tokens=4) as c:
        for length, kept in ((4, True), (5, False)):
            assert c.complete([7] * length).status_code == 200
            assert ("return_token_ids" in c.decode[0].generations()[-1].body) is kept, length


def test_d_hears_that_a_first_token_will_come_where_each_p_tells_its_own() -> None:
    with cluster(prefill=2) as c:
        for engines, expected in (((0,), False), ((0, 1), True)):
            for index in engines:
                c.prefill[index].sends_first = True
            for _ in range(40):  # enough that each P has answered
                assert c.complete("x").status_code == 200
            assert c.decode[0].generations()[-1].body["kv_transfer_params"].get("first_token", False) is expected
        c.prefill[1].sends_first = False
        c.prefill[1].incarnation = "another life"
        until(lambda: c.complete("x") and "first_token" not in c.decode[0].generations()[-1].body["kv_transfer_params"])


def test_after_a_push_that_was_refused_d_is_not_sent_a_first_token() -> None:
    with cluster() as c:
        (p,), (d,) = c.prefill, c.decode
        p.sends_first, d.behaviour.policy = True, "fail"
        until(lambda: c.complete("x") and "first_token" in d.generations()[-1].body["kv_transfer_params"])
        p.behaviour.refuses_push, before = "PD-META-033", len(d.generations())
        c.complete("y")
        asked = ["first_token" in seen.body["kv_transfer_params"] for seen in d.generations()[before:]]
        assert asked[0] and len(asked) > 1 and not any(asked[1:])


def test_a_greedy_stream_of_a_d_that_tells_no_ids_says_so_when_it_breaks() -> None:
    with cluster(decode=2) as c:
        for decode in c.decode:
            decode.behaviour.break_after = 2
        *pieces, error, done = events(c.complete("x", stream=True, temperature=0))
        assert len(pieces) == 2 and done == "[DONE]"
        assert json.loads(error)["error"]["code"] == "PD-META-024" and "no token ids" in error


def test_the_kv_of_a_prefill_that_takes_several_heartbeats_is_waited_for() -> None:
    with cluster() as c:
        (p,), (d,) = c.prefill, c.decode
        p.behaviour.prefill_s, d.behaviour.policy = 1.0, "fail"  # five of them
        assert texts(c.complete("p")) == ["".join(words("p", 3))]
        assert len(p.generations()) == 1 and d.local_prefills == 0
