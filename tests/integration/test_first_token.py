# SPDX-License-Identifier: Apache-2.0
"""P's first token in a real pair: every answer is as one engine's, and requests start with P's token where possible."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from continued import answers_of_another, behind
from pairs import Pair, PairMaker, counter, fresh_prompt, settled_free_blocks, wait_for_free_blocks

from tools.support.checks import eventually, first_tokens
from tools.support.client import TIMEOUT, body_of, chat_body_of, leave_after, post
from tools.support.cluster import Cluster
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.spec import EngineSpec, MetaserverSpec

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FLOPS = "vllm:estimated_flops_per_gpu_total"
TEMPLATES = "--trust-request-chat-template"
_REASON = re.compile(r'vllm:ascend_pd_num_first_tokens_computed_total\{.*reason="([^"]*)".*\} (\S+)')


@dataclass(frozen=True)
class FirstTokenCase:
    """A request, and the origin of its first token: P, or D for a reason."""

    name: str
    more: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    tokens: int = 9
    choices: int = 1
    chat: bool = False
    ends: str = ""  # it ends at the first token, by "id" or "text"
    same: bool = True  # whether the answer must equal one engine's token for token

    def body(self, prompt: list[int], first: tuple[int, str]) -> dict[str, Any]:
        more = dict(self.more)
        if self.ends == "id":
            more |= {"stop_token_ids": [first[0]], "ignore_eos": False}
        if self.ends == "text":
            more |= {"stop": [first[1]]}
        if self.chat:
            return chat_body_of(" ".join(map(str, prompt[:60])), self.tokens, **more)
        return body_of(prompt, self.tokens, **more)


LIKELIEST = {"temperature": 0.8, "top_k": 1}  # sampled, but always the same
CASES = [
    FirstTokenCase("greedy"),
    FirstTokenCase("a chat", chat=True),
    FirstTokenCase("one token", tokens=1),
    FirstTokenCase("one token with logprobs", {"logprobs": 3}, tokens=1),
    FirstTokenCase("two tokens", tokens=2),
    FirstTokenCase("logprobs", {"logprobs": 5}),
    FirstTokenCase("logprobs of the sampled token alone", {"logprobs": 0}),
    FirstTokenCase("logprobs of a chat", {"logprobs": True, "top_logprobs": 4}, chat=True),
    FirstTokenCase("sampled", LIKELIEST),
    FirstTokenCase("two choices", {**LIKELIEST, "n": 2}, choices=2),
    FirstTokenCase("ended by the first token's id", ends="id"),
    FirstTokenCase("ended by the first token's id, with logprobs", {"logprobs": 2}, ends="id"),
    FirstTokenCase("ended by the first token's text", ends="text"),
    FirstTokenCase("may not end before four tokens", {"min_tokens": 4}, ends="id"),
    FirstTokenCase("repetition penalty", {"repetition_penalty": 1.7}, tokens=16),
    FirstTokenCase("biased", {"logit_bias": {"77": 100, "78": 99.5}}),
    FirstTokenCase("allowed tokens", {"allowed_token_ids": [11, 12, 13, 14]}),
    FirstTokenCase("filters", {"temperature": 0.6, "top_k": 1, "top_p": 0.9, "min_p": 0.05, "logprobs": 1}),
    FirstTokenCase("greedy with a seed", {"seed": 7}),
    FirstTokenCase("sampled at will", {"temperature": 1.0}, same=False),
    FirstTokenCase("sampled with a seed", {"temperature": 1.0, "seed": 7}, "seed"),
    FirstTokenCase("presence penalty", {"presence_penalty": 1.5}, tokens=24),
    FirstTokenCase("frequency penalty", {"frequency_penalty": 1.5}, tokens=24),
    FirstTokenCase(
        "all penalties", {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3}, tokens=24
    ),
    FirstTokenCase("bad words", {"bad_words": ["a", "b c"]}, tokens=16),
    FirstTokenCase("structured output", {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}),
    FirstTokenCase(
        "a grammar", {"structured_outputs": {"regex": "[a-z]{3}[0-9]{3}"}, "ignore_eos": False, "logprobs": 2}
    ),
    FirstTokenCase("JSON in a chat", {"response_format": {"type": "json_object"}, "ignore_eos": False}, chat=True),
    FirstTokenCase("loops end", {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}}, tokens=24),
]


@pytest.fixture(scope="module")
def decode(cluster: Cluster, allowed: list[str]) -> Iterator[EngineProcess]:
    extra = cluster.push_config(*allowed)
    spec = EngineSpec("first-d", ensure("gqa"), role="kv_consumer", policy="fail", extra=extra)
    (d,) = cluster.start(dataclasses.replace(spec, arguments=("--enable-mfu-metrics", TEMPLATES)))
    yield d
    cluster.stop(d)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one to one", "two to one"])
def pair(
    request: pytest.FixtureRequest, cluster: Cluster, decode: EngineProcess, make_pair: PairMaker
) -> Iterator[Pair]:
    tp = request.param
    spec = EngineSpec(f"first-p{tp}", ensure("gqa"), role="kv_producer", tp=tp, extra=cluster.push_config())
    (p,) = cluster.start(dataclasses.replace(spec, arguments=(TEMPLATES,)))
    made = make_pair(p, decode)
    free = made.free_counts()
    yield made
    wait_for_free_blocks((p, decode), free)
    cluster.stop(made.front, p)


def taken(pair: Pair) -> int:
    (d,) = pair.decode
    settled_free_blocks(d)
    return first_tokens(d)


def computed(pair: Pair) -> dict[str, int]:
    """Return how many first tokens D computed, by reason."""
    (d,) = pair.decode
    settled_free_blocks(d)
    text = httpx.get(f"{d.url}/metrics", timeout=10.0, trust_env=False, verify=False).text
    return {reason: int(float(value)) for reason, value in _REASON.findall(text)}


def essence(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of an answer that must be equal on two engines."""
    choices = [
        {key: value for key, value in choice.items() if key not in ("prompt_token_ids", "routed_experts")}
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
    ]
    usage = {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": choices, "usage": usage}


def rounded(value: Any) -> Any:
    """Round log-probabilities: two engines differ in the last digits by the order of additions."""
    if isinstance(value, float):
        return pytest.approx(value, abs=2e-3)
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def streamed(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, the last of which is its usage."""
    whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
    text = httpx.post(url + path, json=whole, timeout=TIMEOUT, trust_env=False, verify=False).text
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a stream of completions by choice: ids, text, log-probabilities, end; and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in event["choices"]:
            choice = choices.setdefault(
                part["index"], {"ids": [], "text": "", "logprobs": [], "end": None, "reason": None}
            )
            choice["ids"] += part.get("token_ids") or []
            choice["text"] += part.get("text") or (part.get("delta") or {}).get("content") or ""
            logprobs = part.get("logprobs") or {}
            choice["logprobs"] += logprobs.get("token_logprobs") or [
                one["logprob"] for one in logprobs.get("content") or ()
            ]
            choice["end"] = part.get("finish_reason") or choice["end"]
            choice["reason"] = part.get("stop_reason") or choice["reason"]
    usage = {key: events[-1]["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    return {"choices": choices, "usage": usage}


def readable(pair: Pair) -> tuple[list[int], tuple[int, str]]:
    """Return a prompt, and the first token of its answer, which has a readable text.

    Some tokens are parts of a character, or have no text.
    """
    for _ in range(50):
        prompt = fresh_prompt(70)
        choice = post(pair.prefill.url, body_of(prompt, 1))["choices"][0]
        if choice["text"].strip("\ufffd"):
            return prompt, (choice["token_ids"][0], choice["text"])
    raise AssertionError("no answer begins with a text")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_request_is_answered_as_by_one_engine(pair: Pair, case: FirstTokenCase) -> None:
    path, (prompt, first) = CHAT if case.chat else COMPLETIONS, readable(pair)
    body = case.body(prompt, first)
    one, events = post(pair.prefill.url, body, path), streamed(pair.prefill.url, path, body)
    before, reasons = taken(pair), computed(pair)
    answer = post(pair.front.url, body, path)
    stream = streamed(pair.front.url, path, {**body, "cache_salt": "again"})  # otherwise D has the prompt already
    if case.same:
        assert essence(answer) == rounded(essence(one))
        assert joined(stream) == rounded(joined(events))
    else:
        assert essence(answer)["usage"] == essence(one)["usage"]
    assert "kv_transfer_params" not in json.dumps(answer) or answer["kv_transfer_params"] is None
    requests = 2 * case.choices
    if case.reason:
        assert taken(pair) == before, "a first token was taken that must not be"
        assert computed(pair)[case.reason] - reasons.get(case.reason, 0) == requests
    else:
        assert computed(pair) == reasons, "D computed a first token itself"
        assert taken(pair) - before == requests


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
# Each looks different once it is rendered by another template, or by one that does not get the tools.
TEXTS: dict[str, dict[str, Any]] = {
    "a text": {},
    "a list of one text": {},
    "a chat": {"messages": []},
    "a chat with tools and a template": {
        "messages": [],
        "tools": [LOOK],
        "tool_choice": "none",
        "chat_template": "{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %} and now:",
    },
    "a chat with a format": {
        "messages": [],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "string", "enum": ["left", "right"]}},
        },
        "ignore_eos": False,
    },
}
_CALLS = re.compile(r'http_requests_total\{handler="(/v1/[a-z/]*completions)".*\} (\S+)')


def calls(p: EngineProcess) -> dict[str, int]:
    """Return how many generations a server has answered, by route."""
    text = httpx.get(f"{p.url}/metrics", timeout=10.0, trust_env=False, verify=False).text
    return {route: int(float(count)) for route, count in _CALLS.findall(text)}


@pytest.mark.parametrize("name", TEXTS)
def test_p_computes_the_token_ids_that_d_made_of_a_text(pair: Pair, name: str) -> None:
    """P renders and tokenises nothing. What it has computed of the same text is in its prefix cache under these ids."""
    words, p = " ".join(map(str, fresh_prompt(60))), pair.prefill
    path, body = COMPLETIONS, body_of(words, 9)
    if more := TEXTS[name]:
        path, body = CHAT, chat_body_of(words, 9, **{**more, "messages": [{"role": "user", "content": words}]})
    elif "list" in name:
        body = body_of([], 9, prompt=[words])
    one = post(p.url, body, path)
    before, hits = calls(p), counter(p, "vllm:prefix_cache_hits_total")
    reasons, failed = computed(pair), pair.failed_transfers()
    answer = post(pair.front.url, body, path)
    assert essence(answer) == rounded(essence(one))
    assert pair.failed_transfers() == failed and computed(pair) == reasons, "D computed by itself"
    expected = {**before, COMPLETIONS: before.get(COMPLETIONS, 0) + 1}
    eventually(lambda: calls(p) == expected, "P has answered one completion, and no chat")
    whole = (one["usage"]["prompt_tokens"] - 1) // 32 * 32
    assert counter(p, "vllm:prefix_cache_hits_total") - hits == whole > 0


SHAPE = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["n", "s"]}
_GOES_ON = (
    *("a chat", "two tokens", "logprobs", "logprobs of a chat", "filters", "sampled at will", "sampled with a seed"),
    *("ended by the first token's id, with logprobs", "ended by the first token's text", "bad words", "all penalties"),
    *("may not end before four tokens", "a grammar", "JSON in a chat", "loops end"),
)
GOES_ON = [case for case in CASES if case.name in _GOES_ON] + [
    FirstTokenCase("a schema", {"structured_outputs": {"json": SHAPE}, "ignore_eos": False, "logprobs": 5}, tokens=30),
    FirstTokenCase("sampled by a schema", {"temperature": 0.8, "structured_outputs": {"json": SHAPE}}, same=False),
    FirstTokenCase("at each of many tokens", tokens=40),
]


@pytest.mark.parametrize("case", GOES_ON, ids=lambda case: case.name)
def test_an_answer_goes_on_behind_what_another_engine_has_begun(
    pair: Pair, ports: list[int], case: FirstTokenCase
) -> None:
    """Its first tokens are given to D, which loads their KV with the prompt's. Text and all come from D, as ever.

    What is drawn by a seed goes on by other numbers: those of a generator that begins anew.
    """
    (d,), path = pair.decode, CHAT if case.chat else COMPLETIONS
    body = case.body(*readable(pair))
    one, events = post(pair.prefill.url, body, path), streamed(pair.prefill.url, path, body)
    (choice,) = one["choices"]
    prompt, ids = one.get("prompt_token_ids") or choice["prompt_token_ids"], choice["token_ids"]
    some = {1, 2, len(ids) // 2, len(ids) - 1, len(ids)} if case.tokens < 40 else range(1, 40, 3)
    counts = sorted(count for count in some if 0 < count <= len(ids))
    before = taken(pair)
    with answers_of_another(pair.prefill, ports[-1]) as router:
        for count in counts:
            given = ids[:count]
            answer = post(d.url, router.body(body, prompt, given), path)
            stream = streamed(d.url, path, router.body(body, prompt, given))
            if case.same and not case.reason:
                assert behind(essence(answer), count) == rounded(behind(essence(one), count))
                assert behind(joined(stream), count) == rounded(behind(joined(events), count))
            else:
                for got in (answer["choices"][0]["token_ids"], joined(stream)["choices"][0]["ids"]):
                    assert got[:count] == given and len(got) == len(ids)
        router.check(2 * sum(count < len(ids) for count in counts))  # of one that has ended nothing is loaded
    wait_for_free_blocks((pair.prefill, d), pair.free_counts())
    assert taken(pair) == before


def test_a_stop_string_ends_an_answer_across_the_break(pair: Pair, ports: list[int]) -> None:
    (d,) = pair.decode
    with answers_of_another(pair.prefill, ports[-1]) as router:
        for _ in range(4):
            body, count, stop = broken_word(pair)
            ending = {**body, "stop": [stop]}
            one, events = post(pair.prefill.url, ending), streamed(pair.prefill.url, COMPLETIONS, ending)
            assert one["choices"][0]["stop_reason"] == stop
            ids = post(pair.prefill.url, body)["choices"][0]["token_ids"][:count]
            assert essence(post(d.url, router.body(ending, body["prompt"], ids))) == essence(one)
            stream = streamed(d.url, COMPLETIONS, router.body(ending, body["prompt"], ids))
            assert joined(stream) == joined(events)
        router.check(8)


def broken_word(pair: Pair) -> tuple[dict[str, Any], int, str]:
    """Return a request, a number of tokens of its answer, and characters on both sides of that place, new there."""
    for _ in range(50):
        body = body_of(fresh_prompt(70), 16)
        events = streamed(pair.prefill.url, COMPLETIONS, body)[:-1]
        texts = [event["choices"][0]["text"] for event in events]
        for count in range(2, len(texts) - 2):
            stop = texts[count - 1][-1:] + texts[count][:1]
            if len(stop) == 2 and "\ufffd" not in stop and "".join(texts).find(stop) == len("".join(texts[:count])) - 1:
                return body, count, stop
    raise AssertionError("no answer has two such characters")


def test_a_router_that_does_not_know_the_answer_gets_another_one(pair: Pair, ports: list[int]) -> None:
    """D's server begins the answer anew: it is a whole one, and P's token begins it."""
    (d,), body = pair.decode, body_of(fresh_prompt(70), 9)
    one, before = post(pair.prefill.url, body), counter(d, "vllm:ascend_pd_num_answers_begun_anew_total")
    with answers_of_another(pair.prefill, ports[-1]) as router:
        asked = router.body(body, [1, 2, 3], one["choices"][0]["token_ids"][:3])
        asked["kv_transfer_params"] |= {"send_tokens": True}
        assert essence(post(d.url, asked)) == essence(one)
    assert counter(d, "vllm:ascend_pd_num_answers_begun_anew_total") - before == 1


def test_a_sidecar_of_d_brings_the_token_too(pair: Pair, ports: list[int]) -> None:
    (d,), p = pair.decode, pair.prefill
    address = p.url.removeprefix("http://")
    how = MetaserverSpec(("--prefill-allowed", f"127.0.0.0/8:{address.partition(':')[2]}"), sidecar=True)
    front = pair.cluster.metaserver([], [d], ports[-1], how)
    try:
        before, reasons = taken(pair), computed(pair)
        for tokens in (1, 9):
            prompt = fresh_prompt(70)
            body, headers = body_of(prompt, tokens), {"x-prefiller-host-port": address}
            answer = post(front.url, body, COMPLETIONS, headers)
            assert essence(answer) == rounded(essence(post(p.url, body)))
        assert computed(pair) == reasons and taken(pair) - before == 2
    finally:
        pair.cluster.stop(front)


def test_decode_computes_one_step_fewer_of_each_request(pair: Pair) -> None:
    """By vLLM's own estimate of computed work: D computes nothing for an answer of P's token alone.

    For six tokens it saves what the first one costs.
    """
    (d,) = pair.decode

    def computed_for(tokens: int, **more: Any) -> float:
        before, _, between = d.metrics()[FLOPS], settled_free_blocks(d), d.metrics()[FLOPS]
        post(pair.front.url, body_of(fresh_prompt(90), tokens, **more))
        settled_free_blocks(d)
        return d.metrics()[FLOPS] - between - (between - before)

    barred = {"seed": 7, "temperature": 1.0}
    one, six = computed_for(1, **barred), computed_for(6, **barred)
    assert 0 < one < six
    assert computed_for(1) == 0
    assert six - computed_for(6) == pytest.approx(one)


def test_clients_that_leave_between_give_all_blocks_back(pair: Pair) -> None:
    free = pair.free_counts()
    for seconds in (0.05, 0.1, 0.15, 0.2, 0.3):
        leavers = [
            threading.Thread(target=leave_after, args=(pair.front.url, body_of(fresh_prompt(600), 40), seconds))
            for _ in range(3)
        ]
        for leaver in leavers:
            leaver.start()
        for leaver in leavers:
            leaver.join()
    wait_for_free_blocks((pair.prefill, *pair.decode), free)
    before = taken(pair)
    pair.check([fresh_prompt(100 + i) for i in range(8)], name="after clients left, 8 at once")
    assert taken(pair) - before == 8
