# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses` and `/v1/messages`: transfers, load and prefixes as for chats, stored responses, ends of streams."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from tools.support.process import free_port
from unit.router.cluster import HEAD, FakeCluster, ServedWorker, cluster, until
from unit.router.fake_engine import FakeEngine, ids_of, words
from unit.router.fake_protocols import MESSAGES, RESPONSES
from vllm_ascend_pd.router import relay
from vllm_ascend_pd.router.app import WorkerProcess
from vllm_ascend_pd.router.core import bodies, stored
from vllm_ascend_pd.router.core.decisions import AnswerLengths, CircuitPolicy
from vllm_ascend_pd.router.core.prefixes import Marks
from vllm_ascend_pd.router.faults import status_of
from vllm_ascend_pd.shared.backoff import Backoff

ROUTES = [RESPONSES, MESSAGES]
PATIENT = CircuitPolicy(threshold=100)


def body_for(route: str, prompt: object, **more: Any) -> dict[str, Any]:
    asked = {"input": prompt, "max_output_tokens": 3} if route == RESPONSES else {"messages": prompt, "max_tokens": 3}
    return {"model": "fake", **asked, **more}


def ask(c: FakeCluster, route: str, prompt: object = "a prompt", **more: Any) -> httpx.Response:
    return c.http.post(route, json=body_for(route, prompt, **more))


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert said.get("kv_transfer_params") is None, "what D reports is not for clients"
    (part,) = said["output"][0]["content"] if "output" in said else said["content"]
    return str(part["text"])


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, each with its name."""
    read = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def streamed(answer: httpx.Response) -> str:
    said = events(answer)
    assert said[-1]["type"] in ("response.completed", "message_stop"), said[-1]
    deltas = (one["delta"] for one in said if one["type"].endswith(("text.delta", "block_delta")))
    return "".join(one if isinstance(one, str) else one["text"] for one in deltas)


def loads(c: FakeCluster) -> list[str]:
    """Return the requests whose KV came."""
    return [s.request_id for s in c.worker.front.journal.last if any(name == "loaded" for name, _, _ in s.stages)]


# -- transfers


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_p_computes_the_prompt_and_d_reports_its_load(route: str, stream: bool) -> None:
    with cluster() as c:
        answer = ask(c, route, stream=stream)
        assert (streamed if stream else text_of)(answer) == "".join(words("a prompt", 3))
        assert "pd_load" not in answer.text
        (leg,) = c.prefill[0].generations()
        assert leg.route == "/v1/completions" and leg.body["max_tokens"] == 1, "P gets the ids that D made"
        assert not {"input", "messages", "system", "max_output_tokens", "request_id"} & set(leg.body)
        (seen,) = c.decode[0].generations()
        assert seen.route == route and seen.body["kv_transfer_params"]["do_remote_prefill"]
        until(lambda: len(loads(c)) == 1)


@pytest.mark.parametrize("route", ROUTES)
def test_what_d_sends_no_ids_of_goes_to_p_as_it_came(route: str) -> None:
    picture: list[Any] = [{"role": "user", "content": [{"type": "image", "source": {"data": "A" * 2000}}]}]
    if route == RESPONSES:
        picture[0]["content"] = [{"type": "input_image", "image_url": "data:image/png;base64," + "A" * 2000}]
    with cluster() as c:
        c.decode[0].behaviour.posts_ids = False
        assert ask(c, route, picture, instructions="be brief", stop_sequences=["x"]).status_code == 200
        (leg,) = c.prefill[0].generations()
        assert leg.route == route and leg.body["instructions"] == "be brief" and "stop_sequences" not in leg.body
        assert leg.body["max_output_tokens" if route == RESPONSES else "max_tokens"] == 1
        assert leg.body.get("store") is (False if route == RESPONSES else None) and leg.body["stream"] is False
        until(lambda: len(loads(c)) == 1)


@pytest.mark.parametrize("route", ROUTES)
def test_its_load_and_prefix_count(route: str) -> None:
    with cluster(prefill=2, decode=2) as c:
        prompts = [[{"role": "user", "content": HEAD + str(turn)}] for turn in range(12)]
        for prompt in prompts:
            assert ask(c, route, prompt).status_code == 200
        served = [len(engine.generations()) for engine in (*c.prefill, *c.decode)]
        assert sorted(served) == [0, 0, 12, 12], "all that begin alike go to one P and one D"
        request = bodies.parse(route, json.dumps(body_for(route, prompts[0], system="s" * 4000)).encode())
        assert request.limit == 3 and request.prefill_tokens == pytest.approx((len(HEAD) + 4000) / 4, rel=0.05)
        assert request.remote and request.send_tokens and request.copies == 1


def test_what_claude_code_writes_anew_before_each_prompt_changes_no_prefix() -> None:
    def marks(header: str, system: str) -> Marks:
        blocks = [{"type": "text", "text": f"x-anthropic-billing-header: {header};"}, {"type": "text", "text": system}]
        said = body_for(MESSAGES, [{"role": "user", "content": HEAD}], system=blocks)
        return bodies.parse(MESSAGES, json.dumps(said).encode()).marks

    assert marks("cch=1a2b", "be brief") == marks("cch=3c4d", "be brief") != marks("cch=1a2b", "be long")


def test_a_picture_in_a_message_counts_as_one_not_by_its_bytes() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 200_000}}
    for content, media in (([picture], True), ("an " + "image " * 100, False)):
        said = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 3}).encode()
        request = bodies.parse(MESSAGES, said)
        assert request.has_media is media and request.prefill_tokens < 1200


def test_a_clients_own_fields_neither_multiply_nor_limit_it() -> None:
    assert bodies.parse(MESSAGES, b'{"messages": [], "n": 9}').copies == 1
    assert bodies.parse(MESSAGES, b'{"max_tokens": 900, "max_completion_tokens": 1}').limit == 900
    assert bodies.parse(RESPONSES, b'{"max_output_tokens": 900, "max_tokens": 1}').limit == 900
    assert bodies.parse(RESPONSES, b'{"max_tokens": 1}').limit == 0


@pytest.mark.parametrize("route", ROUTES)
def test_another_p_takes_the_place_of_one_that_fails(route: str) -> None:
    with cluster(prefill=2) as c:
        c.prefill[0].behaviour.wedged = True
        for number in range(6):
            prompt = f"one of several {number}"
            assert text_of(ask(c, route, prompt)) == "".join(words(prompt, 3))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_another_d_takes_the_place_of_one_that_fails_before_the_first_word(route: str, stream: bool) -> None:
    with cluster(decode=2, circuit=PATIENT) as c:
        c.decode[0].behaviour.break_after = 0
        c.decode[0].behaviour.wedged = not stream
        number = 0
        while not c.decode[0].generations() or number < 6:  # the choice of an engine is random
            number += 1
            answer = ask(c, route, f"one of several {number}", stream=stream)
            assert (streamed if stream else text_of)(answer) == "".join(words(f"one of several {number}", 3))


def test_tools_that_d_runs_itself_may_ask_for_further_prefills() -> None:
    tools = [{"type": "function", "name": "f"}, {"type": "web_search_preview"}]
    with cluster() as c:
        c.decode[0].behaviour.late_choice = True
        assert streamed(ask(c, RESPONSES, stream=True, tools=tools)) == "".join(words("a prompt", 3))
        assert [leg.body["prompt"] for leg in c.prefill[0].generations()] == [list(json.dumps("a prompt").encode())]
        assert [leg.body["model"] for leg in c.prefill[0].generations()] == ["fake"]
    for functions in (tools[:1], [], [{"type": "custom", "name": "patch"}, {"type": "namespace", "tools": []}]):
        assert not bodies.parse(RESPONSES, json.dumps({"input": "x", "tools": functions}).encode()).asks_again
    for length, read in ((1_000_000, True), (1_100_000, False)):
        long = [{"type": "function", "description": "x" * length}]
        assert bodies.parse(RESPONSES, json.dumps({"input": "x", "tools": long}).encode()).asks_again is not read


@pytest.mark.parametrize(
    ("who", "status", "tool", "once"),
    [
        *(("D", 500, "web_search_preview", True), ("P", 500, "web_search_preview", True)),
        *(("D", 500, "custom", False), ("D", 503, "web_search_preview", False)),
    ],
)
def test_what_may_run_tools_on_d_begins_once(who: str, status: int, tool: str, once: bool) -> None:
    """A D that refuses it has not begun."""
    with cluster(prefill=2, decode=2, circuit=PATIENT) as c:
        for engine in c.decode if who == "D" else c.prefill:
            engine.behaviour.status = status
        for engine in c.decode:
            engine.behaviour.recompute_s = 0.5  # else it may have answered before it could be given up
        answer = ask(c, RESPONSES, tools=[{"type": tool, "name": "x"}])
        assert answer.status_code == (status if who == "D" else 200)
        assert (len([seen for d in c.decode for seen in d.generations()]) == 1) is once


def test_a_response_in_the_background_is_ds_own() -> None:
    with cluster() as c:
        assert ask(c, RESPONSES, background=True, store=True).status_code == 200
        assert not c.prefill[0].generations()
        assert "kv_transfer_params" not in c.decode[0].generations()[0].body


# -- stored responses


def test_a_follow_up_goes_to_the_d_that_has_the_response() -> None:
    with cluster(prefill=2, decode=3) as c:
        names = set()
        for number in range(12):
            first = ask(c, RESPONSES, f"{number} begins {HEAD}").json()
            names.add(first["id"])
            (home,) = (d for d in c.decode if first["id"] in d.responses)
            prompt: object = [[f"{number} begins {HEAD}", *words(f"{number} begins {HEAD}", 3)], "and now?"]
            answer = ask(c, RESPONSES, "and now?", previous_response_id=first["id"])
            assert text_of(answer) == "".join(words(prompt, 3)) and answer.json()["id"] in home.responses
            for path in (f"{RESPONSES}/{first['id']}", f"{RESPONSES}/{first['id']}?stream=false"):
                assert c.http.get(path).json() == first and first["kv_transfer_params"] is None
            assert c.http.post(f"{RESPONSES}/{first['id']}/cancel", json={}).json()["id"] == first["id"]
        until(lambda: len(loads(c)) == 24)
        assert len(names) == 12 and len([d for d in c.decode if d.responses]) > 1


def test_a_follow_up_counts_all_of_its_conversation_and_finds_the_p_that_has_it() -> None:
    whole = bodies.parse(RESPONSES, json.dumps({"model": "m", "input": HEAD}).encode())
    name = stored.new_id("home", whole.marks, False)
    said = {"model": "m", "input": "more " * 1000, "previous_response_id": name.replace("home", "0" * 16)}
    alone = bodies.parse(RESPONSES, json.dumps(said).encode())
    later = alone.counted(alone.prefill_tokens + whole.prefill_tokens)
    assert alone.prefill_tokens == 1251 and later.prefill_tokens == whole.prefill_tokens + 1251
    assert later.marks[0] == whole.marks[-1]._replace(tokens=whole.prefill_tokens) and len(later.marks) > 3
    assert [mark.tokens for mark in later.marks] == sorted(mark.tokens for mark in later.marks)
    assert later.marks[-1].tokens <= later.prefill_tokens
    assert all(mark.tokens >= 0 for mark in alone.counted(1).marks), "what D counts is less than was expected"
    with cluster(prefill=3) as c:
        first = ask(c, RESPONSES, HEAD).json()["id"]
        for _ in range(6):
            assert ask(c, RESPONSES, "x" * 2000, previous_response_id=first).status_code == 200
        assert sorted(len(p.generations()) for p in c.prefill) == [0, 0, 7]


def in_flight(http: httpx.Client, engine: FakeEngine) -> float:
    """Return the tokens that a metaserver counts at an engine."""
    instances = http.get("/instances").json()["instances"]
    return float(next(one["tokens_in_flight"] for one in instances if one["name"] == engine.address))


def test_an_invented_id_counts_for_what_its_sender_has_sent() -> None:
    """Else a short body could weigh as millions of tokens, and keep a D of its sender's choice from all others."""
    with cluster(decode=2) as c, ThreadPoolExecutor() as clients:
        name = ask(c, RESPONSES, HEAD).json()["id"]
        (home,) = (d for d in c.decode if name in d.responses)
        begin = len("resp_" + stored.home_of(home.address, ""))
        forged = name[:begin] + re.sub("[0-9a-f]", "f", name[begin:])
        (instance,) = (i for i in c.worker.fleet if i.name == home.address)
        tokens_before = instance.prompts.tokens
        home.behaviour.frozen = True
        answer = clients.submit(ask, c, RESPONSES, "and now?", previous_response_id=forged)
        until(lambda: instance.requests)
        assert in_flight(c.http, home) < 100
        home.behaviour.frozen = False
        assert answer.result(20).status_code == 404
        assert instance.prompts.tokens == tokens_before and not in_flight(c.http, home)


def test_a_follow_up_counts_as_d_counts_it_where_nothing_of_it_is_known() -> None:
    """Another worker or host has sent its beginning. D posts how long the prompt is, and that goes for P and D."""
    with cluster() as c, another_metaserver(c) as another, ThreadPoolExecutor() as clients:
        (d,), (p,) = c.decode, c.prefill
        name = ask(c, RESPONSES, HEAD).json()["id"]
        long = len(json.dumps([[HEAD, *words(HEAD, 3)], "and now?"]))
        for http, first in ((c.http, False), (another, True), (another, False)):
            p.seen.clear()
            p.behaviour.hold = True
            said = body_for(RESPONSES, "and now?", previous_response_id=name)
            answer = clients.submit(http.post, RESPONSES, json=said)
            until(p.generations)
            assert p.generations()[0].body["prompt"] == ids_of([[HEAD, *words(HEAD, 3)], "and now?"])
            assert long <= in_flight(http, d) < long + 10
            assert (in_flight(http, p) >= long) is first, "P has its beginning"
            p.behaviour.hold = False
            assert text_of(answer.result(20))


def test_what_follows_on_an_unknown_conversation_is_not_short() -> None:
    with cluster(decode_alone=100) as c, another_metaserver(c) as another:
        name = ask(c, RESPONSES, HEAD).json()["id"]
        for http, legs in ((another, 2), (another, 2), (c.http, 2)):
            said = body_for(RESPONSES, "and now?", previous_response_id=name)
            assert text_of(http.post(RESPONSES, json=said))
            assert len(c.prefill[0].generations()) == legs


def test_what_follows_on_a_picture_is_ds_own() -> None:
    """D sends no ids of such a prompt, and no P has the beginning of the conversation."""
    name = stored.new_id("0" * 16, (), True)
    said = {"input": "and now?", "previous_response_id": name}
    assert not bodies.parse(RESPONSES, json.dumps(said).encode()).remote
    of_text = {**said, "previous_response_id": stored.new_id("0" * 16, (), False)}
    assert bodies.parse(RESPONSES, json.dumps(of_text).encode()).remote
    picture = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]
    theirs = {"input": picture, "previous_response_id": "resp_" + "0" * 32}
    assert not bodies.parse(RESPONSES, json.dumps(theirs).encode()).remote


@pytest.mark.parametrize("how", ["follow-up", "get", "cancel"])
def test_a_response_whose_d_is_no_instance_any_more_is_refused_with_a_remedy(how: str) -> None:
    with cluster(decode=2) as c:
        name = ask(c, RESPONSES).json()["id"]
        (home,) = (d for d in c.decode if name in d.responses)
        assert c.http.delete(f"/instances/{home.address}").status_code == 200
        path = f"{RESPONSES}/{name}"
        asking = {
            "follow-up": lambda: ask(c, RESPONSES, previous_response_id=name),
            "get": lambda: c.http.get(path),
            "cancel": lambda: c.http.post(path + "/cancel", json={}),
        }
        answer = asking[how]()
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "PD-META-034"
        assert ask(c, RESPONSES).status_code == 200


def test_a_d_that_cannot_be_reached_is_not_replaced_for_a_follow_up() -> None:
    with cluster(decode=2) as c:
        name = ask(c, RESPONSES).json()["id"]
        (home,) = (d for d in c.decode if name in d.responses)
        (other,) = (d for d in c.decode if d is not home)
        before = len(other.generations())
        home.served.kill()
        for _ in range(3):
            answer = ask(c, RESPONSES, previous_response_id=name)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "PD-META-007"
        assert len(other.generations()) == before


def test_a_follow_up_that_d_drops_is_asked_of_it_again() -> None:
    with cluster(decode=2, circuit=PATIENT) as c:
        name = ask(c, RESPONSES).json()["id"]
        (home,) = (d for d in c.decode if name in d.responses)
        home.behaviour.drops_after = 1
        answer = ask(c, RESPONSES, previous_response_id=name)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "PD-META-022"
        assert len(home.generations()) == 1 + c.worker.settings.retry.attempts
        assert not [d for d in c.decode if d is not home and d.generations()]


def test_a_long_stored_response_is_not_gathered() -> None:
    """Any number of callers may ask for it, and read it slowly."""
    with cluster() as c:
        name = ask(c, RESPONSES, metadata={"x": "y" * (1 << 20)}).json()["id"]
        answer = c.http.get(f"{RESPONSES}/{name}")
        assert answer.json()["metadata"] == {"x": "y" * (1 << 20)} and "pd_load" in answer.text


def test_a_response_counts_as_its_request_until_its_client_has_it() -> None:
    """It repeats that, however long it is."""
    said = json.dumps(body_for(RESPONSES, "a prompt", metadata={"x": "y" * (24 << 20)})).encode()
    with cluster() as c, socket.create_connection(("127.0.0.1", c.served.port), 20) as client:
        held_bytes = partial(getattr, c.worker.intake, "held_bytes")
        head = f"POST {RESPONSES} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(said)}\r\n\r\n"
        client.sendall(head.encode() + said)
        until(lambda: [seen for seen in c.decode[0].generations() if seen.finished])
        assert client.recv(12) == b"HTTP/1.1 200" and held_bytes() >= len(said)
        while client.recv(1 << 20):
            pass
        until(lambda: not held_bytes())


def test_a_d_that_has_restarted_says_itself_that_it_has_nothing() -> None:
    with cluster() as c:
        name = ask(c, RESPONSES).json()["id"]
        c.decode[0].responses.clear()
        c.decode[0].conversations.clear()
        assert ask(c, RESPONSES, previous_response_id=name).status_code == 404
        assert c.http.get(f"{RESPONSES}/{name}").status_code == 404


def test_a_d_that_only_says_it_has_nothing_is_not_proven_to_work() -> None:
    """Its HTTP server says so, and follow-ups come to it although it is wedged: any client can invent one."""
    with cluster(circuit=CircuitPolicy(threshold=1, wedged=Backoff(600.0, 600.0, 1.0))) as c:
        (instance,) = (i for i in c.worker.fleet if i.name == c.decode[0].address)
        c.decode[0].behaviour.wedged = True
        assert ask(c, RESPONSES).status_code == 500 and instance.circuit.open
        c.decode[0].behaviour.wedged = False
        name = stored.new_id(stored.home_of(c.decode[0].address, ""), (), False)
        assert ask(c, RESPONSES, previous_response_id=name).status_code == 404
        assert instance.circuit.open
        assert text_of(ask(c, RESPONSES)) == "".join(words("a prompt", 3)) and not instance.circuit.open


@contextmanager
def another_metaserver(c: FakeCluster) -> Iterator[httpx.Client]:
    """Start a second one in front of the same engines."""
    port = free_port()
    served = ServedWorker(WorkerProcess(replace(c.worker.settings, port=port), f"http://127.0.0.1:{port}"), port)
    for engine in c.decode:
        engine.metaservers(c.served.url, served.url)
    try:
        with httpx.Client(base_url=served.url, timeout=30, trust_env=False) as http:
            until(lambda: http.get("/serving").status_code == 200)
            yield http
    finally:
        served.stop()


def test_each_metaserver_finds_what_another_one_has_named() -> None:
    """Workers and hosts share nothing for this."""
    with cluster(decode=3) as c, another_metaserver(c) as another:
        for number in range(8):
            name = ask(c, RESPONSES, f"prompt {number}").json()["id"]
            assert another.get(f"{RESPONSES}/{name}").json()["id"] == name


def test_a_name_that_is_not_ours_goes_to_any_d() -> None:
    with cluster() as c:
        mine = ask(c, RESPONSES, request_id="resp_mine").json()["id"]
        assert mine == "resp_mine", "a client's own name stays"
        assert text_of(ask(c, RESPONSES, "more", previous_response_id=mine))
        for odd in ("resp_" + "0" * 32, "", "x", "resp_%2e"):
            assert c.http.get(f"{RESPONSES}/{odd}").status_code == 404
    for name in (None, 7, "", "resp_" + "0" * 55, "resp_" + "g" * 55, "\ud800"):
        assert stored.read(name) is None


def test_a_client_cannot_name_a_response_as_the_metaserver_does() -> None:
    """The name would send others to a D."""
    forged = stored.new_id(stored.home_of("elsewhere:1", ""), (), False)
    with cluster() as c:
        for name in (json.dumps(forged), '"' + "".join(f"\\u{ord(letter):04x}" for letter in forged) + '"', "null"):
            said = json.dumps(body_for(RESPONSES, "a prompt"))[:-1] + f', "request_id": {name}}}'
            read = stored.read(c.http.post(RESPONSES, content=said).json()["id"])
            assert read is not None and read.home == stored.home_of(c.decode[0].address, "")


def test_a_name_says_what_it_was_given() -> None:
    marks = bodies.parse(RESPONSES, json.dumps({"input": HEAD}).encode()).marks
    home = stored.home_of("10.0.0.1:8200", "a key")
    for media in (False, True):
        name = stored.new_id(home, marks, media)
        read = stored.read(name)
        assert read is not None and read.home == home and read.has_media is media
        assert read.marks[0].digest == marks[-1].digest
        assert len(name) <= 62
    short = stored.read(stored.new_id(home, (), False))
    assert short is not None and not short.marks
    assert stored.new_id(home, (), False) != stored.new_id(home, (), False)


def test_only_who_has_the_engines_key_can_tell_from_a_name_which_address_it_means() -> None:
    """Addresses are few: whoever can compute the digest of each would find the one in a name."""
    one, other = "10.0.0.1:8200", "10.0.0.2:8200"
    names = {stored.home_of(address, key) for address in (one, other) for key in ("", "a key", "another", "k" * 200)}
    assert len(names) == 8
    with cluster(engine_token="a key") as c, another_metaserver(c) as another:
        name = ask(c, RESPONSES).json()["id"]
        assert stored.home_of(c.decode[0].address, "") not in name
        assert stored.home_of(c.decode[0].address, "a key") in name
        assert another.get(f"{RESPONSES}/{name}").json()["id"] == name


# -- ends of streams


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_that_breaks_ends_in_an_error_event_of_its_protocol(route: str) -> None:
    with cluster() as c:
        c.decode[0].behaviour.break_after = 2
        *before, last = in_the_middle(c, route)
        assert last["type"] == "error" and len(before) > 2
        if route == RESPONSES:
            assert last["code"] == "PD-META-024" and last["sequence_number"] == before[-1]["sequence_number"] + 1
        else:
            last = last["error"]
            assert last["type"] and last["code"] == "PD-META-024"
        assert "its D returns no token ids" in last["message"]


def in_the_middle(c: FakeCluster, route: str) -> list[dict[str, Any]]:
    """Return the events of a stream of which D says what follows only when the client has something."""
    c.decode[0].behaviour.paused = True
    with c.http.stream("POST", route, json=body_for(route, "a prompt", stream=True)) as answer:
        pieces = answer.iter_raw()
        stream = next(pieces)
        c.decode[0].behaviour.paused = False
        return events(httpx.Response(200, content=stream + b"".join(pieces)))


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_that_d_drops_never_looks_complete(route: str) -> None:
    with cluster(circuit=PATIENT) as c:
        c.decode[0].behaviour.drops_after = 2
        said = in_the_middle(c, route)
        last = said[-1] if route == RESPONSES else said[-1]["error"]
        assert last["code"] == "PD-META-022" and "recomputed" not in json.dumps(said)
        assert route == MESSAGES or [one["sequence_number"] for one in said] == list(range(len(said)))
        assert not {"response.completed", "message_stop", "message_delta"} & {one["type"] for one in said}
        answer = ask(c, route)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "PD-META-022"
        (instance,) = (i for i in c.worker.fleet if i.name == c.decode[0].address)
        assert not instance.broke, "it does not count against D"
        c.decode[0].behaviour.drops_after = None
        assert text_of(ask(c, route)) == "".join(words("a prompt", 3))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_that_a_d_ends_as_it_shuts_down_is_no_answer(route: str, stream: bool) -> None:
    with cluster(decode=2, circuit=PATIENT) as c:
        c.decode[0].behaviour.ends = True
        number = 0
        while not c.decode[0].generations() or number < 6:
            number += 1
            answer = ask(c, route, f"prompt {number}", stream=stream)
            if stream and events(answer)[-1]["type"] == "error":
                assert "shutting down" in answer.text and route == MESSAGES, "a response's stream has only its end"
            else:
                assert (streamed if stream else text_of)(answer) == "".join(words(f"prompt {number}", 3))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_that_a_stop_string_ends_is_an_answer(stream: bool) -> None:
    with cluster() as c:
        answer = ask(c, RESPONSES, stop=["x"], stream=stream)
        assert (streamed if stream else text_of)(answer) == "".join(words("a prompt", 3))
        assert len(c.decode[0].generations()) == 1 and c.prefill[0].generations()


@pytest.mark.parametrize("route", ROUTES)
def test_a_parameter_that_d_refuses_in_a_stream_says_nothing_of_d(route: str) -> None:
    with cluster() as c:
        c.decode[0].behaviour.stream_error = 400
        for _ in range(4):
            answer = ask(c, route, stream=True)
            assert answer.status_code == (502 if route == RESPONSES else 200)
            assert "without stream it may say why" in answer.text or events(answer)[-1]["type"] == "error"
        (instance,) = (i for i in c.worker.fleet if i.name == c.decode[0].address)
        assert not instance.broke and not instance.circuit.open
        c.decode[0].behaviour.stream_error = 500
        assert ask(c, route, stream=True).status_code == (502 if route == RESPONSES else 500)


def test_only_a_short_quotation_says_the_status_of_a_message() -> None:
    for between, status in ((30, 400), (300, 500)):
        message = "input_value={'error': " + "x" * between + "'code': 400}}"
        assert status_of(json.dumps({"error": {"type": "internal_error", "message": message}}).encode()) == status


def test_what_the_model_gives_to_a_tool_is_no_end_of_its_message() -> None:
    with cluster() as c:
        answer = ask(c, MESSAGES, tools=[{"name": "f", "input_schema": {}}])
        assert answer.status_code == 200
        assert answer.json()["content"][1]["input"] == {"stop_sequence": "recomputed", "finish_reason": "abort"}


def test_what_a_client_says_beside_a_response_is_no_end_of_it() -> None:
    said = {"stop_reason": "recomputed", "finish_reason": "abort"}
    with cluster() as c:
        for stream in (False, True):
            answer = ask(c, RESPONSES, metadata=said, stream=stream)
            assert (streamed if stream else text_of)(answer) == "".join(words("a prompt", 3))


def test_what_a_client_says_beside_a_response_is_not_its_length() -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"output_tokens": 999_999_999}}]
    with cluster() as c:
        assert ask(c, RESPONSES, tools=tools).status_code == 200
        until(lambda: loads(c))
        assert c.worker.fleet.expected("fake", False, 0) == AnswerLengths.FIRST


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_recomputed_is_the_clients(stream: bool) -> None:
    with cluster() as c:
        c.decode[0].behaviour.drops_after = 2
        answer = ask(c, MESSAGES, stop_sequences=["recomputed"], stream=stream)
        assert answer.status_code == 200 and '"recomputed"' in answer.text and "PD-META" not in answer.text


@pytest.mark.parametrize("route", ROUTES)
def test_a_connection_that_breaks_after_the_last_event_is_no_break(route: str) -> None:
    with cluster() as c:
        c.decode[0].behaviour.torn_at_end = True
        assert streamed(ask(c, route, stream=True)) == "".join(words("a prompt", 3))


@pytest.mark.parametrize("before", [b"", b'data: {"a": 1}\n\n'], ids=["alone", "behind another"])
def test_the_last_event_of_each_protocol_is_known(before: bytes) -> None:
    last = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    completed = b'event: response.completed\ndata: {"response":{}}\n\n'
    for event in (b"data: [DONE]\n\n", last, completed):
        assert relay.has_last_event(before + event) and not relay.has_last_event(before + event[:-1])
        assert not relay.has_last_event(event + b'data: {"a": 1}\n\n')
    assert not relay.has_last_event(before)


def test_events_go_out_whole_wherever_the_stream_is_cut() -> None:
    stream = b"".join(b"event: x\ndata: %d\n\n" % number for number in range(3))
    for size in range(1, len(stream)):
        out, tail = b"", bytearray()
        for at in range(0, len(stream), size):
            whole = relay._whole_events(tail, stream[at : at + size], 1 << 20)
            assert not whole or whole.endswith(b"\n\n")
            out += whole
        assert out == stream and not tail


def test_a_long_response_is_read_to_its_end() -> None:
    with cluster() as c:
        long = {"x": "y" * (2 << 20)}
        answer = ask(c, RESPONSES, metadata=long, stream=True)
        assert streamed(answer) == "".join(words("a prompt", 3)) and "pd_load" not in answer.text


def test_a_long_opening_is_no_answer_yet() -> None:
    """It repeats instructions and tools, and vLLM sends it before it asks for the prompt's KV."""
    with cluster() as c:
        c.decode[0].behaviour.late_choice = True
        answer = ask(c, RESPONSES, metadata={"x": "y" * (2 << 20)}, cache_salt="s", stream=True)
        assert streamed(answer) == "".join(words("a prompt", 3))
        (leg,) = c.prefill[0].generations()
        assert leg.body["model"] == "fake" and leg.body["cache_salt"] == "s"


@pytest.mark.parametrize("route", ROUTES)
def test_refusals_have_a_form_that_both_clients_read(route: str) -> None:
    with cluster(decode=0) as c:
        said = ask(c, route).json()
        assert said["type"] == "error" and said["error"]["code"] == "PD-META-008" and said["error"]["message"]
