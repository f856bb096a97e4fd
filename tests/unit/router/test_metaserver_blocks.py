# SPDX-License-Identifier: Apache-2.0
"""Responses and messages that go on with another D: the client gets what one engine would have written."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from simulation.front.speech import Said, speak
from simulation.front.typed_speech import MESSAGES, RESPONSES, TYPED, TypedSpeaker, options_of

from tools.support.speech import Spoken, read
from vllm_ascend_pd.protocol.auth import prompt_hash
from vllm_ascend_pd.router.core import bodies, resume
from vllm_ascend_pd.router.core.accumulated import NotContinued
from vllm_ascend_pd.router.core.blocks import BlockStream
from vllm_ascend_pd.router.core.resume import MAX_STUCK, Cut

PROMPT = [9, 8, 7]
ASKED = {"kv_transfer_params": {"report_tokens": True}}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"input": "x"} if path == RESPONSES else {"messages": [{"role": "user", "content": "x"}]}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return {"model": "m", "stream": True, limit: 40, **prompt, **fields}


def state_of(path: str, body: dict[str, Any], max_length: int = 4096) -> BlockStream:
    return BlockStream(bodies.parse(path, json.dumps(body).encode()), max_length)


def written(
    path: str, body: dict[str, Any], dice: random.Random, name: str = "d1", given: Any = (), *, sampled: bool = False
) -> list[bytes]:
    """Return the events of an engine; sometimes several tokens come at once."""
    speaker, group = TypedSpeaker(path, {**body, **ASKED, "request_id": f"resp_{name}"}, PROMPT, name), list[Said]()
    pieces = [speaker.opening()]
    for said in speak(PROMPT, options_of(body), given, dice if sampled else None):
        group.append(said)
        if said.finish or dice.random() > 0.2:
            pieces.append(speaker.event(group))
            group = []
    pieces.append(speaker.end({"pd_load": None}))
    return [event + b"\n\n" for piece in pieces for event in piece.split(b"\n\n")[:-1]]


def alone(path: str, body: dict[str, Any], tokens: list[int]) -> Spoken:
    return read(b"".join(e for e in written(path, body, random.Random(1), "one", tokens) if b"pd.tokens" not in e))


@pytest.mark.parametrize("path", TYPED)
@pytest.mark.parametrize("seed", range(300))
def test_a_stream_of_several_ds_is_that_of_one(seed: int, path: str) -> None:
    dice, sampled = random.Random(f"{path} {seed}"), seed % 2 == 0
    body = body_of(path, **({"tools": [{"type": "function", "name": "f"}]} if seed % 3 else {}))
    kept, got, stuck = state_of(path, body), b"", 0
    events = written(path, body, dice, sampled=sampled)
    for number in range(2, 9):
        last = number == 8 or stuck == MAX_STUCK - 1
        for event in events if last else events[: dice.randrange(3, len(events) + 1)]:
            got += kept.take(event)
        if kept.done:
            break
        stuck = 0 if kept.moved else stuck + 1
        kept.go_on()
        given = kept.tokens(prompt_hash(PROMPT))
        assert given == list(kept.ids)
        if not (sampled or dice.random() < 0.5):
            given = []  # as an older D, which begins anew
        events = written(path, body, dice, f"d{number}", given, sampled=sampled)
    client = read(got)
    assert not client.problem and len(client.names) == 1
    assert client.same() == alone(path, body, list(kept.ids)).same()
    assert b"pd." not in got and b"pd_load" not in got


def broken(path: str, seed: int = 3, **fields: Any) -> tuple[BlockStream, list[bytes], bytes]:
    """Return the state of a stream that goes on, all events of its first D, and what the client has."""
    body = body_of(path, tools=[{"type": "function", "name": "f"}], **fields)
    events = written(path, body, random.Random(seed))
    kept = state_of(path, body)
    got = b"".join(map(kept.take, events[: len(events) // 2]))
    kept.go_on()
    return kept, events, got


@pytest.mark.parametrize("path", TYPED)
def test_another_answer_is_found_wherever_it_differs(path: str) -> None:
    """A later D that says one thing less, another thing, or one thing twice of what the client has is not passed on."""
    _, events, _ = broken(path)
    *had, last = [at for at in range(len(events) // 2) if b"pd.tokens" not in events[at]]
    for at in (*had[2:], last):
        changes = [[], [events[at].replace(b'":" ', b'":" x').replace(b"f1", b"f9")]]
        if at != last:  # which may be the beginning of what is new
            changes.append([events[at], events[at]])
        for changed in changes:
            if changed == [events[at]]:
                continue
            kept, _, _ = broken(path)
            with pytest.raises(NotContinued):
                for event in (*events[:at], *changed, *events[at + 1 :]):
                    kept.take(event)


@pytest.mark.parametrize("path", TYPED)
def test_other_tokens_another_prompt_or_none_are_not_passed_on(path: str) -> None:
    for change, why in (
        (lambda said: {**said, "prompt": [1]} if "prompt" in said else said, "prompt"),
        (lambda said: {**said, "ids": [1 + one for one in said["ids"]]}, "tokens differ"),
        (lambda _: None, "no token ids"),
    ):
        kept, events, _ = broken(path)
        with pytest.raises(NotContinued, match=why):
            for event in events:
                name, _, data = event.partition(b"\ndata: ")
                said = json.loads(data)
                if name == b"event: pd.tokens":
                    said = change(said)
                if said is not None:
                    kept.take(name + b"\ndata: " + json.dumps(said).encode() + b"\n\n")


@pytest.mark.parametrize(("path", "last"), [(RESPONSES, b"response.completed"), (MESSAGES, b"message_stop")])
def test_an_answer_that_its_d_ends_halfway_ends_before_what_is_made_of_it(path: str, last: bytes) -> None:
    for finish, stop, cut in (
        ("stop", "recomputed", Cut.DROPPED),
        ("abort", None, Cut.ABORTED),
        ("error", None, Cut.FAILED),
    ):
        body = body_of(path)
        speaker = TypedSpeaker(path, {**body, **ASKED}, PROMPT, "d")
        first, *_ = speak(PROMPT, options_of(body))
        kept = state_of(path, body)
        begun = kept.take(speaker.opening() + speaker.event([first]))
        rest = kept.take(speaker.tokens([], finish, stop) + speaker.flushed() + speaker.end())
        assert kept.cut is cut and not rest and last not in begun and not kept.done
    stops = state_of(path, {**body, "stop": "recomputed"})
    assert stops.take(speaker.tokens([], "stop", "recomputed")) == b"" and stops.cut is None, "a client's own word"


def test_ids_of_the_first_d_are_those_of_the_rest_and_events_are_numbered_on() -> None:
    kept, events, got = broken(RESPONSES)
    continued = b"".join(kept.take(event.replace(b"-d1-", b"-d2-").replace(b"resp_d1", b"resp_d2")) for event in events)
    ids = {word for word in (got + continued).split(b'"') if b"-d" in word or word.startswith(b"resp_")}
    assert b"resp_d1" in ids and b"resp_d2" not in ids
    said = read(got + continued)
    assert not said.problem and said.end == "completed" and said.events == kept.number


@pytest.mark.parametrize("sampling", [{}, {"seed": 5, "temperature": 1}])
def test_a_responses_metrics_say_that_its_generator_began_anew(sampling: dict[str, Any]) -> None:
    """Those of the D that went on are of its own part alone."""
    body = body_of(RESPONSES, **sampling)
    kept = state_of(RESPONSES, body)
    for event in written(RESPONSES, body, random.Random(3))[:12]:
        kept.take(event)
    kept.go_on()
    *events, last = written(RESPONSES, body, random.Random(4), "d2", kept.tokens(prompt_hash(PROMPT)))
    got = b"".join(
        map(kept.take, [*events, last.replace(b'"response":{', b'"response":{"metrics":{"mean_itl_ms":1.0},')])
    )
    assert kept.done and b"mean_itl_ms" not in got
    assert (b'"metrics":{"generator_began_anew":true}' in got) is bool(sampling)


def test_what_a_d_keeps_for_others_does_not_go_on() -> None:
    kept = state_of(RESPONSES, body_of(RESPONSES))
    kept.take(b'event: pd.tokens\ndata: {"ids":[1],"prompt":[2],"stored":true}\n\n')
    assert kept.gave_up and "follow on it" in kept.unfit


def test_what_is_kept_is_counted_and_given_up_when_it_is_too_much() -> None:
    body = body_of(RESPONSES, instructions="i" * 5000)
    kept, sizes = state_of(RESPONSES, body, 12), []
    for event in written(RESPONSES, body, random.Random(1)):
        assert kept.take(event) or event.startswith(b"event: pd.tokens")
        sizes.append(kept.size)
    assert kept.done and "more than 12 tokens" in kept.unfit and max(sizes) > sizes[-1] < 5000
    comment = b": keep-alive\n\n"
    assert kept.take(comment) == comment


@pytest.mark.parametrize("odd", [b"{", b"[]", b'{"ids":["x"]}', b'{"prompt":[1]}', b'{"ids":[-1]}'])
def test_an_event_that_is_not_understood_ends_what_is_kept(odd: bytes) -> None:
    kept = state_of(MESSAGES, body_of(MESSAGES))
    event = b"event: pd.tokens\ndata: " + odd + b"\n\n"
    kept.take(event)
    assert "not understood" in kept.unfit
    later, _, _ = broken(MESSAGES)
    with pytest.raises(NotContinued, match="not understood"):
        later.take(event)


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (RESPONSES, {"stream": False}, "of a whole answer"),
        (MESSAGES, {"stream": False}, "of a whole answer"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "one D has"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"tools": [{"type": "web_search_preview"}]}, "tools of its D's"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "log-probabilities"),
        (RESPONSES, {}, ""),
        (RESPONSES, {"include": ["reasoning.encrypted_content"], "store": False, "temperature": 1}, ""),
        (MESSAGES, {"stop_sequences": ["x"], "tools": [{"name": "f", "input_schema": {}}]}, ""),
    ],
)
def test_what_does_not_go_on_says_why(path: str, fields: dict[str, Any], why: str) -> None:
    said = resume.refusal(bodies.parse(path, json.dumps(body_of(path, **fields)).encode()))
    assert why in said and bool(why) == bool(said)
