# SPDX-License-Identifier: Apache-2.0
"""Stored streams, and their continuation on another D: the client gets byte for byte what one engine would have
written."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from simulation.front.speech import HALF, AnswerOptions, Said, Speaker, speak, understood

from vllm_ascend_pd.router import resuming
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.resumable import (
    FIELD_RULES,
    FieldTreatment,
    NotContinued,
    ResumableRequest,
    resumable_request,
)
from vllm_ascend_pd.router.core.resume import MAX_AGAIN, Cut, StreamState, stops_at_recomputed

MAX_HELD = 4096
PROMPT = [9, 8, 7]


def resumable(chat: bool = False, ceiling: int = 0, **fields: Any) -> ResumableRequest:
    body = {"model": "m", "temperature": 0, "stream": True, "max_tokens": 40, **fields}
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    body = {name: value for name, value in body.items() if value != "left out"}
    request = bodies.parse(bodies.CHAT if chat else bodies.COMPLETIONS, json.dumps(body).encode())
    return resumable_request(request, ceiling)


def test_every_field_of_vllms_requests_has_a_fate() -> None:
    assert FIELD_RULES.keys() == bodies.FIELDS.keys()
    assert all(rule.why for rule in FIELD_RULES.values() if rule.treatment is FieldTreatment.REFUSED)


@pytest.mark.parametrize(
    ("chat", "fields", "why"),
    [
        (False, {"temperature": 0.7}, "samples"),
        (False, {"temperature": "left out"}, "samples"),
        (False, {"temperature": True}, "samples"),
        (False, {"temperature": 0.7, "seed": 3}, "samples"),
        (False, {"presence_penalty": 0.5}, "penalty"),
        (False, {"frequency_penalty": -1}, "penalty"),
        (False, {"n": 2}, "several choices"),
        (False, {"prompt": ["x", "y"]}, "several choices"),
        (False, {"echo": True}, "repeats the prompt"),
        (False, {"response_format": {"type": "json_object"}}, "grammar"),
        (True, {"structured_outputs": {"regex": "a*"}}, "grammar"),
        (True, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool calls"),
        (True, {"logprobs": True}, "another form"),
        (True, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]}, "more than tokens"),
        (False, {"bad_words": ["x"]}, "bad words"),
        (False, {"stop": "x" * 300}, "characters"),
        (False, {"stop": 3}, "stop strings"),
        (False, {"max_tokens": "12"}, "whole number"),
        (False, {"min_tokens": 1.5}, "whole number"),
        (False, {"prompt_logprobs": 1}, "D computes"),
        (False, {"of_a_later_release": 1}, "not known here"),
        (False, {"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        (False, {"user": "x" * (70 << 10)}, "too long"),
        (False, {"stream_options": 3}, "stream options"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_says_why(chat: bool, fields: dict[str, Any], why: str) -> None:
    fields = dict(fields)
    if "messages" in fields or "prompt" in fields:
        body = {"model": "m", "temperature": 0, "stream": True, **fields}
        request = bodies.parse(bodies.CHAT if chat else bodies.COMPLETIONS, json.dumps(body).encode())
        with pytest.raises(NotContinued, match=why):
            resumable_request(request, 0)
        return
    with pytest.raises(NotContinued, match=why):
        resumable(chat, **fields)


@pytest.mark.parametrize("part", bodies.MEDIA_PARTS)
def test_a_chat_that_is_more_than_token_ids_does_not_go_on(part: str) -> None:
    with pytest.raises(NotContinued, match="D computes" if part == "prompt_embeds" else "more than tokens"):
        content = [{"type": part, part: "x"}]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "stream": True}
        resumable_request(bodies.parse(bodies.CHAT, json.dumps(body).encode()), 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {"3": 1}},
        {"n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "presence_penalty": 0.0},
        {"echo": False, "bad_words": [], "vllm_xargs": None, "prompt_logprobs": None, "stop": None, "best_of": 1},
    ],
)
def test_what_means_nothing_does_not_stand_in_the_way(fields: dict[str, Any]) -> None:
    assert resumable(**fields).limit == 40
    assert resumable(chat=True, **fields).limit == 40


def test_the_limit_is_the_clients_or_the_engines() -> None:
    assert resumable(max_tokens=None).limit == 16
    assert resumable(chat=True, max_tokens=None).limit is None
    assert resumable(chat=True, max_tokens=None, ceiling=50).limit == 50
    assert resumable(chat=True, max_completion_tokens=5).limit == 5
    with pytest.raises(NotContinued, match="engines' own"):
        resumable(max_tokens=51, ceiling=50)


def test_the_models_own_limit_is_found_beside_its_adapters() -> None:
    """vLLM lists an adapter without a limit."""
    listed = {"data": [{"id": "m", "max_model_len": 4096}, {"id": "lora", "max_model_len": None}, {"id": "other"}]}
    assert resuming.least_room(json.dumps(listed).encode()) == 4096
    for none in ({"data": listed["data"][1:]}, {"data": []}, {}, {"data": [{"max_model_len": "x"}]}):
        with pytest.raises(NotContinued, match="no limit"):
            resuming.least_room(json.dumps(none).encode())


# ---- streams


def written(body: dict[str, Any], ids: list[int], dice: random.Random, name: str = "d1") -> list[bytes]:
    """Events of an engine; sometimes two tokens are one event."""
    speaker = Speaker(body, ids, name)
    events = [speaker.opening()] if speaker.chat else []
    group: list[Said] = []
    for said in speak(ids, AnswerOptions.of(body)):
        group.append(said)
        if said.finish or dice.random() > 0.1:
            events.append(speaker.event(group))
            group = []
    return [*events, *(event + b"\n\n" for event in speaker.end().split(b"\n\n")[:-1])]


def drawn(dice: random.Random) -> dict[str, Any]:
    chat = dice.random() < 0.5
    body: dict[str, Any] = {"model": "m", "temperature": 0, "stream": True, "max_tokens": dice.randrange(1, 60)}
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": PROMPT}
    if dice.random() < 0.5:
        body["stop"] = dice.choice(([" a b"], " 1 2 3", ["zzzzzz", " 4"], [" 5 ü"]))
        body["include_stop_str_in_output"] = dice.random() < 0.4
    if dice.random() < 0.3:
        body["min_tokens"] = dice.randrange(40)
    if dice.random() < 0.4:
        body["return_token_ids"] = True
    if dice.random() < 0.4:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": dice.random() < 0.5}
    if not chat and dice.random() < 0.3:
        body["logprobs"] = 1
    return body


@pytest.mark.parametrize("seed", range(400))
def test_a_stream_of_several_ds_is_that_of_one(seed: int) -> None:
    dice = random.Random(seed)
    body = drawn(dice)
    want = b"".join(written(body, PROMPT, random.Random(0)))
    request = bodies.parse(bodies.CHAT if "messages" in body else bodies.COMPLETIONS, json.dumps(body).encode())
    kept = StreamState(resumable_request(request, 0), MAX_HELD)
    got, events = b"", written({**body, "return_token_ids": True}, PROMPT, dice)
    for number in range(2, 9):
        last = number == 8
        for event in events if last else events[: dice.randrange(1, len(events) + 1)]:
            got += kept.take(event)
        if kept.done:
            break
        if kept.finished:
            got += kept.ending()
            break
        again = kept.next_request(0)
        said = json.loads(bodies.for_decode(again, None))  # type: ignore[arg-type]
        assert said["prompt"][: len(PROMPT)] == PROMPT and said["prompt"][-1] < HALF, "D would write the prompt again"
        assert len(said["prompt"]) + said["max_tokens"] == len(PROMPT) + body["max_tokens"]
        events = written(said, said["prompt"], dice, f"d{number}")
    assert understood(got) == understood(want)


def kept_of(body: dict[str, Any], seen: int, **more: Any) -> tuple[StreamState, bytes]:
    body = {"model": "m", "temperature": 0, "stream": True, "max_tokens": 40, "prompt": PROMPT, **body}
    kept = StreamState(resumable(**{k: v for k, v in body.items() if k != "prompt"}), more.get("max_length", MAX_HELD))
    events = written({**body, "return_token_ids": True}, PROMPT, random.Random(1))
    return kept, b"".join(map(kept.take, events[:seen]))


def test_the_client_gets_no_ids_that_it_did_not_ask_for() -> None:
    _, seen = kept_of({}, 4)
    assert (
        b'"token_ids":null' in seen
        and b'"prompt_token_ids":null' in seen
        and b":[" not in seen.replace(b'"choices":[', b"")
    )


def test_comments_pass_and_change_nothing() -> None:
    comment = b": keep-alive\n\n"
    (kept, seen), (spoken, _) = kept_of({}, 4), kept_of({}, 0)
    events = written(
        {"model": "m", "prompt": PROMPT, "max_tokens": 40, "return_token_ids": True}, PROMPT, random.Random(1)
    )
    got = b"".join(spoken.take(comment + event) for event in events[:4])
    assert got.count(comment) == 4 and got.replace(comment, b"") == seen
    assert spoken.point() == kept.point() and spoken.ids == kept.ids
    spoken.next_request(0)
    assert spoken.take(comment) == comment


def test_text_that_looks_like_ids_is_left_alone() -> None:
    kept, _ = kept_of({}, 3)
    text = 'x "token_ids":[1,2] \\"token_ids\\":[3]'
    event = {"id": "d1", "choices": [{"index": 0, "text": text, "token_ids": [5, 6]}]}
    (choice,) = sense_choices(kept.take(b"data: " + json.dumps(event).encode() + b"\n\n"))
    assert choice["text"] == text and choice["token_ids"] is None


def sense_choices(stream: bytes) -> list[dict[str, Any]]:
    return [choice for line in stream.decode().split("\n\n")[:-1] for choice in json.loads(line[6:])["choices"]]


def test_another_d_that_says_something_else_is_not_passed_on() -> None:
    kept, _ = kept_of({"stop": "zzzz"}, 12)
    request = kept.next_request(0)
    body = json.loads(bodies.for_decode(request, None))  # type: ignore[arg-type]
    assert len(body["prompt"]) < len(PROMPT) + len(kept.ids), "some tokens are computed again"
    events = written(body, [*body["prompt"][:-1], 1], random.Random(2))
    with pytest.raises(NotContinued, match="other tokens"):
        kept.take(b"".join(events))


def test_a_stream_that_grows_too_long_is_given_up_and_costs_nothing_more() -> None:
    kept, _ = kept_of({}, 30, max_length=len(PROMPT) + 10)
    assert "more than 13 tokens" in kept.unfit and not kept.ids
    with pytest.raises(NotContinued, match="more than 13"):
        kept.next_request(0)


def test_a_d_that_tells_no_ids_cannot_be_left() -> None:
    kept = StreamState(resumable(), MAX_HELD)
    event = b'data: {"id":"x","choices":[{"index":0,"text":" a"}]}\n\n'
    assert kept.take(event) == event
    with pytest.raises(NotContinued, match="returns no token ids"):
        kept.point()


@pytest.mark.parametrize(
    "delta", [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{}]}, {}], ids=lambda d: str(list(d))
)
def test_an_answer_that_is_parsed_is_not_continued(delta: dict[str, Any]) -> None:
    kept = StreamState(resumable(chat=True), MAX_HELD)
    first = {
        "id": "x",
        "prompt_token_ids": [1, 2],
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
    }
    event = {"id": "x", "choices": [{"index": 0, "delta": delta, "token_ids": [5]}]}
    for said in (first, event):
        passed = kept.take(b"data: " + json.dumps(said).encode() + b"\n\n")
    assert bool(passed) is bool(delta), "what the parser swallows is no event for a client that asked for no ids"
    with pytest.raises(NotContinued, match="state"):
        kept.point()


@pytest.mark.parametrize(
    ("said", "cut"),
    [
        ({"choices": [{"index": 0, "text": "", "finish_reason": "stop", "stop_reason": "recomputed"}]}, Cut.DROPPED),
        ({"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}, Cut.ABORTED),
        ({"error": {"message": "dead", "code": 500}}, Cut.FAILED),
        ({"error": {"message": "yours", "code": 400}}, None),
    ],
)
def test_the_ways_in_which_d_ends_a_stream_are_distinguished(said: dict[str, Any], cut: Cut | None) -> None:
    kept, _ = kept_of({}, 3)
    passed = kept.take(b"data: " + json.dumps(said).encode() + b"\n\ndata: [DONE]\n\n")
    assert kept.cut is cut and (passed == b"") is (cut is not None)


@pytest.mark.parametrize(
    ("stop", "found"),
    [
        ("recomputed", True),
        (["a", "recomputed"], True),
        ("\\u0072ecomputed", False),
        ("recomputed ", False),
        (['"recomputed"'], False),
        (["a"], False),
        ([], False),
        (None, False),
        (7, False),
        ({"recomputed": 1}, False),
        (["recomputed", "x" * (64 << 10)], False),
    ],
)
def test_a_stop_string_may_be_the_word_of_a_dropped_request(stop: object, found: bool) -> None:
    raw = msgspec.Raw(json.dumps(stop).encode())
    assert stops_at_recomputed({"stop": raw}) is found
    assert not stops_at_recomputed({})
    assert stops_at_recomputed({"stop": msgspec.Raw(b'["\\u0072ecomputed"]')})


def test_text_held_back_for_long_is_not_computed_again_for_ever() -> None:
    kept = StreamState(resumable(max_tokens=1000), MAX_HELD)
    half = {"id": "x", "choices": [{"index": 0, "text": "", "token_ids": [250], "prompt_token_ids": [1]}]}
    for _ in range(MAX_AGAIN + 1):
        kept.take(b"data: " + json.dumps(half).encode() + b"\n\n")
    with pytest.raises(NotContinued, match="held text back"):
        kept.point()


def test_events_of_several_tokens_are_named_as_the_reason() -> None:
    kept = StreamState(resumable(max_tokens=1000), MAX_HELD)
    ids = [7] * 32
    event = {"id": "x", "choices": [{"index": 0, "text": "g" * 32, "token_ids": ids, "prompt_token_ids": [1]}]}
    for _ in range(MAX_AGAIN // len(ids)):
        kept.take(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert kept.point().tokens == 0
    kept.take(b"data: " + json.dumps(event).encode() + b"\n\n")
    with pytest.raises(NotContinued, match="--stream-interval"):
        kept.point()
