# SPDX-License-Identifier: Apache-2.0
"""P's first token through vLLM's parsers on D's server: tool calls and reasoning, complete and streamed.

The model is random, so a grammar makes it call a tool, and the Granite parser, which looks for words in the text, takes
all of its text for the answer or for the reasoning. Each answer is compared with that of P's own server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from continued import answers_of_another
from pairs import Pair, PairMaker
from test_first_token import CHAT, computed, streamed, taken

from tools.support.client import chat_body_of, post
from tools.support.cluster import Cluster
from tools.support.models import ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
REASONING = ("--reasoning-parser", "granite")
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,  # else the grammar lets any JSON be the arguments
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string", "enum": ["left", "right"]}},
            "required": ["where"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "look"}}
# Such a grammar allows any white space between the parts of JSON. The tokens of the model's vocabulary that are some:
CALLS = {"ignore_eos": False, "logit_bias": {str(token): -100 for token in (200, 201, 204, 223)}}
CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}


@dataclass(frozen=True)
class ParserCase:
    """A chat, which part of the answer must not be empty, and D's reason where P's token does not begin it."""

    name: str
    has: str
    more: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


WITH_TOOLS = [
    ParserCase("tools that are not called", "content", {"tools": [TOOL], "tool_choice": "auto"}),
    ParserCase("tools that are not called, or a choice", "content", {"tools": [TOOL], "tool_choice": "auto", **CHOICE}),
    ParserCase("no tool allowed", "content", {"tools": [TOOL], "tool_choice": "none"}),
    ParserCase("a named tool", "tool_calls", {"tools": [TOOL], "tool_choice": NAMED, **CALLS}),
    ParserCase("some tool", "tool_calls", {"tools": [TOOL], "tool_choice": "required", **CALLS}),
]
WITH_REASONING = [
    ParserCase("a chat", "content"),
    ParserCase("a chat with log-probabilities", "content", {"logprobs": True, "top_logprobs": 2}),
    ParserCase("a choice", "content", CHOICE, "reasoning"),
]


@pytest.fixture(scope="module", params=[TOOLS, REASONING], ids=["tools", "reasoning"])
def pair(request: pytest.FixtureRequest, cluster: Cluster, allowed: list[str], make_pair: PairMaker) -> Iterator[Pair]:
    name, flags = request.param[0].strip("-").partition("-")[0], request.param
    p, d = cluster.start(
        EngineSpec(f"{name}-p", ensure("gqa"), role="kv_producer", extra=cluster.push_config(), arguments=flags),
        EngineSpec(
            f"{name}-d",
            ensure("gqa"),
            role="kv_consumer",
            policy="fail",
            extra=cluster.push_config(*allowed),
            arguments=flags,
        ),
    )
    made = make_pair(p, d)
    yield made
    cluster.stop(made.front, d, p)


def message(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a complete answer's message without what is made up per request."""
    chat_message = choice["message"]
    calls = [call["function"] for call in chat_message.get("tool_calls") or ()]
    return {
        "content": chat_message["content"] or "",
        "reasoning": chat_message.get("reasoning") or "",
        "tool_calls": [(call["name"], call["arguments"]) for call in calls],
        "end": choice["finish_reason"],
    }


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the same of a stream."""
    reply: dict[str, Any] = {"content": "", "reasoning": "", "end": None}
    calls: dict[int, tuple[str, str]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice["delta"]
        for key in ("content", "reasoning"):
            reply[key] += delta.get(key) or ""
        for call in delta.get("tool_calls") or ():
            name, arguments = calls.get(call["index"], ("", ""))
            more = call.get("function") or {}
            calls[call["index"]] = name + (more.get("name") or ""), arguments + (more.get("arguments") or "")
        reply["end"] = choice.get("finish_reason") or reply["end"]
    return {**reply, "tool_calls": [calls[index] for index in sorted(calls)]}


def check(pair: Pair, case: ParserCase) -> None:
    body = chat_body_of(f"please answer this: {case.name} " * 8, 80, **case.more)
    one, events = post(pair.prefill.url, body, CHAT), streamed(pair.prefill.url, CHAT, body)
    before, reasons = taken(pair), computed(pair)
    answer = post(pair.front.url, body, CHAT)
    stream = streamed(pair.front.url, CHAT, {**body, "cache_salt": "again"})  # otherwise D has the prompt already
    expected = message(one["choices"][0])
    assert expected[case.has], repr(one)[:1500]
    assert message(answer["choices"][0]) == expected
    assert answer["usage"]["completion_tokens"] == one["usage"]["completion_tokens"]
    assert joined(stream) == joined(events)
    if case.reason:
        assert taken(pair) == before
        assert computed(pair)[case.reason] - reasons.get(case.reason, 0) == 2
    else:
        assert computed(pair) == reasons and taken(pair) - before == 2


@pytest.mark.parametrize("pair", [TOOLS], indirect=True, ids=["tools"])
@pytest.mark.parametrize("case", WITH_TOOLS, ids=lambda case: case.name)
def test_tool_calls_are_as_one_engines(pair: Pair, case: ParserCase) -> None:
    check(pair, case)


@pytest.mark.parametrize("pair", [REASONING], indirect=True, ids=["reasoning"])
@pytest.mark.parametrize("case", WITH_REASONING, ids=lambda case: case.name)
def test_reasoning_is_as_one_engines(pair: Pair, case: ParserCase) -> None:
    check(pair, case)


def check_goes_on(pair: Pair, ports: list[int], case: ParserCase) -> None:
    """Check answers that D goes on with: its parsers make of all tokens what one engine's do."""
    (d,) = pair.decode
    body = chat_body_of(f"please go on with this: {case.name} " * 8, 80, **case.more)
    one, events = post(pair.prefill.url, body, CHAT), streamed(pair.prefill.url, CHAT, body)
    (choice,), prompt = one["choices"], one["prompt_token_ids"]
    expected, ids = message(choice), choice["token_ids"]
    assert expected[case.has], repr(one)[:1500]
    counts = sorted({1, 2, len(ids) // 3, len(ids) // 2, len(ids) - 1} - {0})
    with answers_of_another(pair.prefill, ports[-1]) as router:
        for count in counts:
            answer = post(d.url, router.body(body, prompt, ids[:count]), CHAT)
            assert message(answer["choices"][0]) == expected, count
            assert answer["usage"]["completion_tokens"] == len(ids)
            assert joined(streamed(d.url, CHAT, router.body(body, prompt, ids[:count]))) == joined(events), count
        router.check(2 * len(counts))


@pytest.mark.parametrize("pair", [TOOLS], indirect=True, ids=["tools"])
@pytest.mark.parametrize("case", WITH_TOOLS, ids=lambda case: case.name)
def test_tool_calls_go_on(pair: Pair, ports: list[int], case: ParserCase) -> None:
    check_goes_on(pair, ports, case)


@pytest.mark.parametrize("pair", [REASONING], indirect=True, ids=["reasoning"])
@pytest.mark.parametrize("case", WITH_REASONING, ids=lambda case: case.name)
def test_reasoning_goes_on(pair: Pair, ports: list[int], case: ParserCase) -> None:
    """A grammar, which begins behind the reasoning, is advanced over given tokens by vLLM itself."""
    check_goes_on(pair, ports, case)
