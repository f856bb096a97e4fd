# SPDX-License-Identifier: Apache-2.0
"""Answers that go on with another D: the client gets what one engine would have written, however the two cut it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from simulation.front.speech import AnswerOptions, Said, Speaker, speak, understood

from vllm_ascend_pd.protocol.auth import prompt_hash
from vllm_ascend_pd.router.core import bodies, resume
from vllm_ascend_pd.router.core.accumulated import Accumulated, NotContinued, RepeatedAnswer
from vllm_ascend_pd.router.core.resume import (
    MAX_STUCK,
    MAX_TIMES,
    Cut,
    StreamState,
    stops_at_recomputed,
    without_ids,
)

MAX_HELD = 4096
PROMPT = [9, 8, 7]
HASH = prompt_hash(PROMPT)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def request_of(chat: bool = False, **fields: Any) -> bodies.Request:
    body = {"model": "m", "stream": True, **({"messages": []} if chat else {"prompt": "x"}), **fields}
    return bodies.parse(bodies.CHAT if chat else bodies.COMPLETIONS, json.dumps(body).encode())


def media(part: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": part, part: "x"}]}]


@pytest.mark.parametrize(
    ("chat", "fields", "why"),
    [
        (False, {"prompt": ["x", "y"]}, "several prompts"),
        (False, {"n": 2}, "several choices"),
        (True, {"n": 2}, "several choices"),
        (False, {"best_of": 3}, "several choices"),
        (False, {"use_beam_search": True}, "beam search"),
        (False, {"echo": True}, "repeats the prompt"),
        (False, {"prompt_logprobs": 0}, "the prompt's own"),
        (False, {"prompt_embeds": "AAAA"}, "more than tokens"),
        (False, {"user": "x" * (8 << 20)}, "too long"),
        *((True, {"messages": media(part)}, "more than tokens") for part in bodies.MEDIA_PARTS),
    ],
)
def test_what_does_not_go_on_says_why(chat: bool, fields: dict[str, Any], why: str) -> None:
    assert why in resume.refusal(request_of(chat, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.8, "top_p": 0.9, "seed": 5},
        {"presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2, "bad_words": ["x"]},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a*"}},
        {"logprobs": 5, "stop": "x" * 300, "min_tokens": 3, "of_a_later_release": 1, "vllm_xargs": {"a": 1}},
        {"n": 1, "best_of": 1, "echo": False, "prompt_logprobs": None, "use_beam_search": False},
    ],
)
def test_all_else_goes_on(fields: dict[str, Any]) -> None:
    assert not resume.refusal(request_of(**fields))
    assert not resume.refusal(request_of(chat=True, tools=TOOLS, tool_choice="required", **fields))


def test_only_a_generator_that_is_used_begins_anew() -> None:
    assert resume.has_generator(request_of(seed=5)) and resume.has_generator(request_of(seed=0, temperature=0.7))
    assert not resume.has_generator(request_of()) and not resume.has_generator(request_of(seed=5, temperature=0.0))


# ---- any cut of the same answer


Leaf = tuple[tuple[str | int, ...], str | list[Any]]


def answer(dice: random.Random) -> list[Leaf]:
    """Draw an answer as its smallest pieces, in order."""
    said: list[Leaf] = []
    for name in dice.choice((("reasoning", "content"), ("content",), ("refusal",), ("reasoning_content", "content"))):
        said += [((name,), dice.choice(("a", "bc", "ü", "𝄞x"))) for _ in range(dice.randrange(6))]
    for index in range(dice.randrange(3)):
        at = ("tool_calls", index)
        said += [((*at, "id"), "an id"), ((*at, "type"), "function"), ((*at, "function", "name"), f"f{index}")]
        said += [((*at, "function", "arguments"), dice.choice(('{"', "ü"))) for _ in range(dice.randrange(5))]
    rows: list[Leaf] = [(("logprobs", "content"), [{"token": dice.choice("xyz")}]) for _ in said]
    ids: list[Leaf] = [(("token_ids",), [dice.randrange(99)]) for _ in said]
    return [piece for three in zip(said, rows, ids, strict=True) for piece in three]


def cut_up(said: list[Leaf], dice: random.Random, engine: str) -> Iterator[dict[str, Any]]:
    """Yield deltas of some pieces each. What an engine makes by itself differs between engines."""
    while said:
        many = dice.choice((1, 2, 3, 3, 3, 7, 20))
        delta: dict[str, Any] = {}
        for path, piece in said[:many]:
            put(delta, path, engine if path[-1] == "id" else piece)
        for row in delta.get("logprobs", {}).get("content", ()):
            row["logprob"] = dice.random()
        yield json.loads(json.dumps(delta))
        said = said[many:]


def put(place: dict[str, Any], path: tuple[str | int, ...], piece: Any) -> None:
    """Add a piece to a delta, as a client does."""
    for step, after in itertools.pairwise(path):
        if isinstance(step, int):
            continue
        inner: Any = place.setdefault(step, [] if isinstance(after, int) else {})
        if isinstance(after, int):
            entry = next((one for one in inner if one["index"] == after), None)
            if entry is None:
                inner.append(entry := {"index": after})
            inner = entry
        place = inner
    had = place.get(str(path[-1]))
    place[str(path[-1])] = [*(had or ()), *piece] if isinstance(piece, list) else (had or "") + piece


def merged(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a client has of some deltas: all strings joined, ids of calls too, so that none may come twice."""
    all_of: dict[str, Any] = {}

    def add(said: dict[str, Any], at: tuple[str | int, ...]) -> None:
        for name, value in said.items():
            if isinstance(value, dict):
                add(value, (*at, name))
            elif name == "tool_calls":
                for one in value:
                    add(one, (*at, name, one["index"]))
            elif name != "index":
                put(all_of, (*at, name), value)

    for delta in deltas:
        add(delta, ())
    for row in all_of.get("logprobs", {}).get("content", ()):
        row.pop("logprob")
    return all_of


@pytest.mark.parametrize("seed", range(300))
def test_however_two_engines_cut_an_answer_a_client_gets_it_once(seed: int) -> None:
    dice = random.Random(seed)
    said = answer(dice)
    want = merged(list(cut_up(said, random.Random(1), "d1")))
    first, had, got = list(cut_up(said, dice, "d1")), Accumulated(), []
    for delta in first[: dice.randrange(len(first) + 1)]:
        had.take(delta)
        got.append(delta)
    repeats = RepeatedAnswer(had)
    for delta in cut_up(said, dice, "d2"):
        if repeats.caught_up:
            got.append(had.renamed(delta))
        else:
            got.append(repeats.beyond(delta))
    seen = merged(got)
    for call in [*want.get("tool_calls", ()), *seen.get("tool_calls", ())]:
        assert call.pop("id") in ("d1", "d2"), "it came once"
    assert seen == want


@pytest.mark.parametrize(
    "other",
    [
        {"content": "abX"},
        {"content": "ab", "reasoning": "no"},
        {"content": "abc", "logprobs": {"content": [{"token": "y"}]}},
        {"content": "abc", "token_ids": [1, 3]},
        {"content": "abc", "tool_calls": [{"index": 0, "function": {"name": "g"}}]},
        {"content": "abc", "tool_calls": [{"index": 0, "function": {"arguments": "[]"}}]},
        {"content": ["abc"]},
    ],
)
def test_another_answer_is_found_in_whatever_part_it_differs(other: dict[str, Any]) -> None:
    had = Accumulated()
    call = {"index": 0, "id": "x", "function": {"name": "f", "arguments": "{}"}}
    rows = {"content": [{"token": "x", "logprob": -1.0}]}
    had.take({"content": "abc", "reasoning": "hm", "tool_calls": [call], "logprobs": rows, "token_ids": [1, 2]})
    with pytest.raises(NotContinued, match="differs"):
        RepeatedAnswer(had).beyond(other)


def test_numbers_of_another_engine_are_its_own() -> None:
    had, row = (
        Accumulated(),
        {"text_offset": [0], "tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"token": -1.0}]},
    )
    had.take({"logprobs": row})
    repeats = RepeatedAnswer(had)
    two = {
        "text_offset": [7, 8],
        "tokens": ["a", "b"],
        "token_logprobs": [0.0, -2.0],
        "top_logprobs": [{"token": 0.0}, {"b": -2.0}],
    }
    assert repeats.beyond({"logprobs": two}) == {
        "logprobs": {"text_offset": [8], "tokens": ["b"], "token_logprobs": [-2.0], "top_logprobs": [{"b": -2.0}]}
    }


def test_a_likely_token_may_be_the_word_for_a_token() -> None:
    """In a completion's log-probabilities a text is a key, in a chat's it stands under that word."""
    kept, _ = kept_of({"logprobs": 1}, 4)
    row = {"text_offset": [9], "tokens": ["x"], "token_logprobs": [-1.0], "top_logprobs": [{"token": -0.5, "x": -1.0}]}
    choice = {"index": 0, "text": "x", "token_ids": [7], "logprobs": row}
    before = len(kept.ids)
    assert b"top_logprobs" in kept.take(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    assert len(kept.ids) == before + 1 and not kept.unfit


# ---- streams


def written(
    body: dict[str, Any], dice: random.Random, name: str = "d1", given: list[int] | None = None, sampled: bool = False
) -> list[bytes]:
    """Events of an engine; sometimes several tokens are one event."""
    speaker = Speaker(body, PROMPT, name, len(given or ()))
    events = [speaker.opening()] if speaker.chat else []
    group: list[Said] = []
    for said in speak(PROMPT, AnswerOptions.of(body), given or (), dice if sampled else None):
        group.append(said)
        if said.finish or dice.random() > 0.1:
            events.append(speaker.event(group))
            group = []
    return [*filter(None, events), *(event + b"\n\n" for event in speaker.end().split(b"\n\n")[:-1])]


def drawn(dice: random.Random) -> dict[str, Any]:
    chat = dice.random() < 0.6
    body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": dice.randrange(1, 60)}
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": PROMPT}
    if chat and dice.random() < 0.5:
        body["tools"] = TOOLS
    if dice.random() < 0.5:
        body["stop"] = dice.choice(([" a b"], " 1 2 3", ["zzzzzz", " 4"], [" 5 ü"]))
        body["include_stop_str_in_output"] = dice.random() < 0.4
    if dice.random() < 0.3:
        body["min_tokens"] = dice.randrange(40)
    if dice.random() < 0.4:
        body["return_token_ids"] = True
    if dice.random() < 0.4:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": dice.random() < 0.5}
    if dice.random() < 0.3:
        body["logprobs"] = True if chat else 1
    return body


def state_of(body: dict[str, Any], max_length: int = MAX_HELD) -> StreamState:
    route = bodies.CHAT if "messages" in body else bodies.COMPLETIONS
    return StreamState(bodies.parse(route, json.dumps(body).encode()), max_length)


@pytest.mark.parametrize("seed", range(600))
def test_a_stream_of_several_ds_is_that_of_one(seed: int) -> None:
    """Each D goes on with the tokens so far, or, where nothing is sampled, begins anew as an older one does."""
    dice = random.Random(seed)
    body, sampled = drawn(dice), seed % 3 == 0
    kept, got, stuck = state_of(body), b"", 0
    asked = {**body, "return_token_ids": True}
    events = written(asked, dice, sampled=sampled)
    for number in range(2, 9):
        last = number == 8 or stuck == MAX_STUCK - 1
        for event in events if last else events[: dice.randrange(1, len(events) + 1)]:
            got += kept.take(event)
        if kept.done or (kept.finished and dice.random() < 0.5):
            got += b"" if kept.done else kept.ending()
            break
        stuck = 0 if kept.moved else stuck + 1
        kept.go_on()
        given = kept.tokens(HASH)
        assert given == list(kept.ids), "all that the client has"
        if not (sampled or dice.random() < 0.5):
            given = []
        events = written(asked, dice, f"d{number}", given, sampled)
    tokens = list(kept.ids) if sampled else []
    one = Speaker(body, PROMPT, "one")
    alone = [one.event([said]) for said in speak(PROMPT, AnswerOptions.of(body), tokens)]
    assert understood(got) == understood(b"".join((one.opening(), *alone, one.end())))


def kept_of(body: dict[str, Any], seen: int, max_length: int = MAX_HELD) -> tuple[StreamState, bytes]:
    body = {"model": "m", "stream": True, "max_tokens": 40, "prompt": PROMPT, **body}
    kept = state_of(body, max_length)
    events = written({**body, "return_token_ids": True}, random.Random(1))
    return kept, b"".join(map(kept.take, events[:seen]))


def test_the_client_gets_no_ids_that_it_did_not_ask_for() -> None:
    _, seen = kept_of({}, 4)
    assert b'"token_ids":null' in seen and b'"prompt_token_ids":null' in seen
    assert b":[" not in seen.replace(b'"choices":[', b"")


def test_no_ids_of_several_choices_in_an_event_go_to_the_client() -> None:
    kept, _ = kept_of({}, 4)
    two = {"choices": [{"index": index, "text": "x", "token_ids": [7]} for index in range(2)]}
    seen = kept.take(b"data: " + json.dumps(two, separators=(",", ":")).encode() + b"\n\n")
    assert [choice["token_ids"] for choice in json.loads(seen.removeprefix(b"data: "))["choices"]] == [None, None]
    assert kept.unfit == "it has several choices"


def test_comments_pass_and_change_nothing() -> None:
    comment = b": keep-alive\n\n"
    (kept, seen), (spoken, _) = kept_of({}, 4), kept_of({}, 0)
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 40, "return_token_ids": True}
    got = b"".join(spoken.take(comment + event) for event in written(body, random.Random(1))[:4])
    assert got.count(comment) == 4 and got.replace(comment, b"") == seen and spoken.ids == kept.ids
    spoken.go_on()
    assert spoken.take(comment) == comment


def test_text_that_looks_like_ids_is_left_alone() -> None:
    kept, _ = kept_of({}, 3)
    text = 'x "token_ids":[1,2] \\"token_ids\\":[3] token_ids'
    event = {"id": "d1", "choices": [{"index": 0, "text": text, "token_ids": [5, 6]}]}
    for separators in ((",", ":"), (", ", ": ")):
        said = kept.take(b"data: " + json.dumps(event, separators=separators).encode() + b"\n\n")
        (choice,) = json.loads(said[6:])["choices"]
        assert choice["text"] == text and choice["token_ids"] is None
    whole = {"choices": [{"prompt_token_ids": [1, 2], "message": {"content": text}, "token_ids": [3]}], "x": [4]}
    assert json.loads(without_ids(json.dumps(whole, separators=(",", ":")).encode())) == {
        "choices": [{"prompt_token_ids": None, "message": {"content": text}, "token_ids": None}],
        "x": [4],
    }


def test_only_a_d_with_the_same_prompt_gets_the_tokens() -> None:
    kept, _ = kept_of({}, 4)
    assert kept.tokens(HASH) == kept.tokens("") == [], "nothing is to go on yet"
    before = list(kept.ids)
    kept.go_on()
    assert kept.tokens(HASH) == before and kept.tokens(prompt_hash([*PROMPT, 1])) is None
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 40, "return_token_ids": True}
    for event in written(body, random.Random(2), given=before)[:-1]:
        kept.take(event)
    assert len(kept.ids) > len(before) and kept.tokens(HASH) == before, "a question may be repeated"


def test_another_d_that_says_something_else_is_not_passed_on() -> None:
    for change in ({"prompt": [*PROMPT, 1]}, {"max_tokens": 5}):
        kept, _ = kept_of({}, 12)
        kept.go_on()
        body: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 40, "return_token_ids": True, **change}
        speaker = Speaker(body, body["prompt"], "d2")
        events = [speaker.event([said]) for said in speak(body["prompt"], AnswerOptions.of(body))]
        with pytest.raises(NotContinued, match=r"another one there|earlier"):
            kept.take(b"".join(events))
    kept, _ = kept_of({}, 12)
    kept.go_on()
    with pytest.raises(NotContinued, match="earlier"):
        kept.take(b"data: [DONE]\n\n")


def test_an_answer_goes_on_so_many_times_and_says_whether_it_came_further() -> None:
    kept, _ = kept_of({}, 12)
    assert [kept.go_on() for _ in range(MAX_STUCK)] == [True] + [False] * (MAX_STUCK - 1)
    with pytest.raises(NotContinued, match="3 D's broke off without a new token"):
        kept.go_on()


def one_further(kept: StreamState) -> None:
    """Let another D repeat what the client has, and say something new."""
    before = list(kept.ids)
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 40, "return_token_ids": True}
    for event in written(body, random.Random(2), given=before):
        kept.take(event)
        if len(kept.ids) > len(before):
            return


@pytest.mark.parametrize(
    ("asked", "metrics"), [({}, None), ({"seed": 5, "temperature": 1}, {"generator_began_anew": True})]
)
def test_an_answers_metrics_say_that_its_generator_began_anew(
    asked: dict[str, Any], metrics: dict[str, Any] | None
) -> None:
    """Those of the D that went on are of its own part alone, so none of them are passed on."""
    kept, _ = kept_of(asked, 4)
    kept.go_on()
    one_further(kept)
    last = {"choices": [], "usage": {"total_tokens": 9}, "metrics": {"queue_time_ms": 1.0}}
    (said,) = kept.take(b"data: " + json.dumps(last).encode() + b"\n\n").strip().split(b"\n\n")
    assert json.loads(said.removeprefix(b"data: ")).get("metrics") == metrics


def test_only_drops_behind_new_tokens_are_without_a_limit() -> None:
    for cut in (None, Cut.DROPPED):
        kept, _ = kept_of({}, 2)
        for _ in range(MAX_TIMES):
            kept.cut = cut
            assert kept.go_on()
            one_further(kept)
        kept.cut = cut
        if cut is None:
            with pytest.raises(NotContinued, match="8 times"):
                kept.go_on()
        else:
            assert kept.go_on()


def test_a_d_that_never_says_what_the_client_has_is_left() -> None:
    kept = state_of({"messages": [], "stream": True})
    head = {"id": "x", "prompt_token_ids": PROMPT}

    def said(delta: dict[str, Any], *ids: int) -> bytes:
        return b"data: " + json.dumps({**head, "choices": [{"index": 0, "delta": delta, "token_ids": ids}]}).encode()

    kept.take(said({"reasoning_content": "hm"}, 1, 2) + b"\n\n")
    kept.go_on()
    assert kept.take(said({"reasoning": "hm"}, 1, 2) + b"\n\n") == b"" and not kept.moved
    with pytest.raises(NotContinued, match="does not say what the client has"):
        for token in range(1000):
            assert kept.take(said({"reasoning": "x"}, token) + b"\n\n") == b""


def test_a_stream_that_grows_too_long_is_given_up_and_costs_nothing_more() -> None:
    kept, _ = kept_of({}, 30, max_length=len(PROMPT) + 10)
    full, _ = kept_of({}, 30)
    assert "more than 13 tokens" in kept.unfit and not kept.ids and kept.size < full.size
    with pytest.raises(NotContinued, match="more than 13"):
        kept.go_on()


def test_what_is_kept_is_counted() -> None:
    small, large = (state_of({"prompt": PROMPT, "user": "x" * size, "max_tokens": 40}) for size in (0, 100_000))
    assert large.size - small.size >= 100_000
    event = {"id": "x", "choices": [{"index": 0, "text": "y" * 1000, "token_ids": [7] * 100, "prompt_token_ids": [1]}]}
    before = small.size
    small.take(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert small.size - before >= 1000 + 400


@pytest.mark.parametrize("delta", [{"content": "a"}, {"reasoning": "a"}, {"tool_calls": [{"index": 0}]}])
def test_a_d_that_tells_no_ids_cannot_be_left(delta: dict[str, Any]) -> None:
    kept = state_of({"messages": [], "stream": True})
    opening = {
        "id": "x",
        "prompt_token_ids": [1],
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
    }
    for choices in (opening["choices"], [{"index": 0, "delta": delta}]):
        assert kept.take(b"data: " + json.dumps({**opening, "choices": choices}).encode() + b"\n\n")
    with pytest.raises(NotContinued, match="returns no token ids"):
        kept.go_on()


@pytest.mark.parametrize("odd", [{"token_ids": [-1]}, {"token_ids": [1 << 40]}, {"token_ids": "x"}, {"logprobs": 3}])
def test_an_event_that_is_not_understood_passes_and_ends_what_is_kept(odd: dict[str, Any]) -> None:
    kept, _ = kept_of({}, 3)
    event = b"data: " + json.dumps({"id": "d1", "choices": [{"index": 0, "text": "a", **odd}]}).encode() + b"\n\n"
    assert kept.take(event) == event and "not understood" in kept.unfit


def test_what_a_parser_swallows_is_no_event_for_a_client_that_asked_for_no_ids() -> None:
    kept = state_of({"messages": [], "stream": True})
    event = {"id": "x", "prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {}, "token_ids": [5]}]}
    assert kept.take(b"data: " + json.dumps(event).encode() + b"\n\n") == b"" and list(kept.ids) == [5]


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


def dropped(ids: list[int] | None, **more: Any) -> bytes:
    choice = {"index": 0, "text": "ab", "token_ids": ids, "prompt_token_ids": PROMPT, "finish_reason": "stop"}
    return json.dumps({"id": "x", "choices": [{**choice, "stop_reason": "recomputed", **more}]}).encode()


def test_a_whole_answer_that_was_dropped_goes_on_behind_its_tokens() -> None:
    kept = state_of({"prompt": "x"})
    assert kept.take_whole(dropped([1, 2])) and kept.tokens(HASH) == [1, 2]
    assert not kept.take_whole(dropped([1, 2])), "nothing came: another D begins anew"
    assert kept.take_whole(dropped([1, 2, 3])) and kept.tokens(HASH) == [1, 2, 3] and not kept.finished
    for no in (dropped(None), dropped([]), dropped([1, 2, 3, 4], prompt_token_ids=None), b"{", b"[]"):
        assert not state_of({"prompt": "x"}).take_whole(no)
    rows = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -1.0], "text_offset": [0, 1], "top_logprobs": None}
    assert not state_of({"prompt": "x"}).take_whole(dropped([1, 2], logprobs=rows)), "the next D has placeholders"
    other = [*PROMPT, 9]  # the second D renders another prompt, and has begun anew
    assert not kept.take_whole(dropped([7, 8], prompt_token_ids=other))
    assert kept.tokens(HASH) is None and kept.tokens(prompt_hash(other)) == [7, 8]
    assert not kept.take_whole(b"{") and kept.tokens(HASH) == []


@pytest.mark.parametrize(
    ("stop", "expected"),
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
def test_a_stop_string_may_be_the_word_of_a_dropped_request(stop: object, expected: bool) -> None:
    raw = msgspec.Raw(json.dumps(stop).encode())
    assert stops_at_recomputed({"stop": raw}) is expected
    assert not stops_at_recomputed({})
    assert stops_at_recomputed({"stop": msgspec.Raw(b'["\\u0072ecomputed"]')})
