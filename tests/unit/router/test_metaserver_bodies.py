# SPDX-License-Identifier: Apache-2.0
"""Processing of a client's body: the bodies for D and for P, and what neither gets."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.bodies import CHAT, COMPLETIONS, Shape, Use

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def parse(route: str = COMPLETIONS, **body: Any) -> bodies.Request:
    return bodies.parse(route, json.dumps(body).encode())


@given(st.dictionaries(st.text(), JSON, max_size=6))
def test_d_gets_the_clients_body_and_its_ticket(body: dict[str, Any]) -> None:
    sent = json.loads(bodies.for_decode(bodies.parse(COMPLETIONS, json.dumps(body).encode()), {"ticket": "t"}))
    assert sent == {**body, "kv_transfer_params": {"ticket": "t"}}


@given(st.dictionaries(st.text(), JSON, max_size=6), JSON)
def test_a_clients_transfer_parameters_never_get_through(body: dict[str, Any], forged: object) -> None:
    request = bodies.parse(CHAT, json.dumps({**body, "kv_transfer_params": forged}).encode())
    body.pop("kv_transfer_params", None)
    assert json.loads(bodies.for_decode(request, None)) == body
    _, for_p = bodies.for_prefill(request, {"mine": 1}, None)
    assert json.loads(for_p)["kv_transfer_params"] == {"mine": 1}


@given(JSON, JSON)
def test_other_routes_lose_the_forbidden_field_and_nothing_else(body: Any, forged: object) -> None:
    assert json.loads(bodies.stripped(json.dumps(body).encode())) == body or "kv_transfer_params" in json.dumps(body)
    if isinstance(body, dict):
        stripped = json.loads(bodies.stripped(json.dumps({**body, "kv_transfer_params": forged}).encode()))
        assert "kv_transfer_params" not in stripped


def test_the_field_is_found_however_it_is_written() -> None:
    for raw in (
        b'{"kv_transfer\\u005fparams": {"x": 1}}',
        b'{"kv_transfer_params": 1, "kv_transfer_params": {"x": 1}}',
        b'[{"kv_transfer_params": {"x": 1}}]',
        b'{"temperature": NaN, "kv_transfer_params": {"x": 1}}',
        b'\xef\xbb\xbf{"kv_transfer_params": {"x": 1}}',
        '{"kv_transfer_params": {"x": 1}}'.encode("utf-16"),
        b'{"text": "\\ud800", "kv_transfer_params": {"x": 1}}',
    ):
        assert b"params" not in bodies.stripped(raw)


@pytest.mark.parametrize("blank", [b" ", b"\r\n", b"\t\n "], ids=repr)
@pytest.mark.parametrize("length", [63, 64, 1000, 70_000])
def test_nothing_hides_behind_white_space(blank: bytes, length: int) -> None:
    before = (blank * length)[:length]
    hidden, harmless = before + b'{"kv_transfer_params": {"x": 1}, "a": 1}', before + b'{"a": 1}'
    if length < bodies.READ_WHOLE:
        assert json.loads(bodies.stripped(hidden)) == {"a": 1}
        utf16 = bodies.stripped(hidden.decode().encode("utf-16"))
        assert b"params" not in utf16 and json.loads(utf16) == {"a": 1}
    else:
        with pytest.raises(bodies.BodyError, match="kv_transfer_params"):
            bodies.stripped(hidden)
    assert bodies.stripped(harmless) == harmless
    with pytest.raises(bodies.BodyError, match="nested"):
        bodies.stripped(before + b'{"a":' * 15_000 + b"1" + b"}" * 15_000)
    for items, several, asks in (
        (b'"a", "b"]', 2, True),
        (b"[1], [2, 3]]", 2, True),
        (b'"a"]', 1, True),
        (b"1, 2]", 1, False),
        (b"]", 1, False),
    ):
        request = bodies.parse(COMPLETIONS, b'{"prompt": [' + before + items + b"}")
        assert request.copies == several and request.send_tokens is asks


def test_a_body_nested_without_end_is_refused() -> None:
    with pytest.raises(bodies.BodyError):
        bodies.stripped(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
    with pytest.raises(bodies.BodyError):
        bodies.stripped(b'{"a":' * 15_000 + b"1" + b"}" * 15_000)


def test_what_is_no_json_is_passed_on_untouched() -> None:
    assert bodies.stripped(b"--boundary\r\nkv_transfer_params") == b"--boundary\r\nkv_transfer_params"
    assert bodies.stripped(b"") == b""


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{", b'"x"', b"\xff", b'{"a": }', b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(bodies.BodyError):
        bodies.parse(COMPLETIONS, body)


def test_a_prompt_that_is_no_json_is_refused_in_a_long_body_too() -> None:
    with pytest.raises(bodies.BodyError):
        bodies.parse(COMPLETIONS, b'{"user": "' + b"x" * 70_000 + b'", "prompt": ["a" "b"]}')


@pytest.mark.parametrize(
    ("limits", "output"),
    [
        ({"max_completion_tokens": 7, "max_tokens": 900}, 7),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 900}, 900),
        ({"max_completion_tokens": None, "max_tokens": 900}, 900),
        ({"max_completion_tokens": 1}, 1),
        ({}, 0),
        ({"max_tokens": 7, "n": 3}, 7),
    ],
    ids=str,
)
def test_the_limit_of_an_answer_is_the_one_that_the_engine_takes(limits: dict[str, Any], output: int) -> None:
    """The newer name counts before the older one, and neither is required."""
    request = parse(CHAT, messages=[{"role": "user", "content": "x" * 400}], **limits)
    assert request.limit == output and request.copies == limits.get("n", 1)


def test_p_is_asked_for_one_token_and_nothing_else() -> None:
    asked = {"stream": True, "stream_options": {}, "n": 4, "min_tokens": 7, "logprobs": 3, "stop": ["x"], "best_of": 2}
    request = parse(prompt="p", max_tokens=100, temperature=0.5, **asked)
    route, body = bodies.for_prefill(request, {"k": 1}, None)
    expected = {
        "prompt": "p",
        "temperature": 0.0,
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": {"k": 1},
    }
    assert (route, json.loads(body)) == (COMPLETIONS, expected)


def test_chat_on_p_is_limited_by_its_own_field() -> None:
    request = parse(CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=100, max_completion_tokens=50)
    route, body = bodies.for_prefill(request, {}, None)
    assert route == CHAT
    assert json.loads(body)["max_completion_tokens"] == 1 and "max_tokens" not in json.loads(body)


def test_token_ids_go_to_p_as_a_completion_with_what_changes_their_kv() -> None:
    asked = dict.fromkeys(bodies.FIELDS, 1) | {"messages": [], "model": "lora-a", "vllm_xargs": {}}
    route, body = bodies.for_prefill(parse(CHAT, **asked, of_tomorrow=1), {"k": 1}, msgspec.Raw(b"[1,2]"))
    beside = {name: asked[name] for name, use in bodies.FIELDS.items() if use is Use.TOKENS} | {"of_tomorrow": 1}
    asks = {"prompt": [1, 2], "max_tokens": 1, "temperature": 0, "n": 1, "stream": False}
    assert (route, json.loads(body)) == (COMPLETIONS, {**beside, **asks, "kv_transfer_params": {"k": 1}})
    assert {"model", "cache_salt", "priority"} < set(beside)


@pytest.mark.parametrize(
    ("prompt", "shape", "tokens", "asks"),
    [
        ("x" * 400, Shape.ONE, 101, True),
        ([1, 2, 3], Shape.ONE, 3, False),
        (["x" * 400], Shape.ONE, 101, True),
        ([[1, 2, 3]], Shape.ONE, 3, False),
        (["a", "b"], Shape.BATCH, 2, True),
        ([[1, 2], [3, 4, 5]], Shape.BATCH, 5, True),
        ("[not a list", Shape.ONE, 4, True),
    ],
)
def test_prompts_of_every_shape_are_understood(prompt: object, shape: Shape, tokens: int, asks: bool) -> None:
    request = parse(prompt=prompt)
    assert request.shape is shape
    assert abs(request.prefill_tokens - tokens) <= 1
    assert request.send_tokens is asks


@given(JSON, JSON, JSON, JSON)
def test_wrong_values_are_the_engines_to_refuse(prompt: object, n: object, limit: object, stream: object) -> None:
    request = parse(prompt=prompt, n=n, max_tokens=limit, stream=stream, echo=n, logprobs=limit)
    assert request.prefill_tokens >= 0 and request.limit >= 0


@pytest.mark.parametrize(
    ("more", "remote"),
    [
        ({}, True),
        ({"prompt_logprobs": 0}, False),
        ({"prompt_logprobs": None}, True),
        ({"echo": True}, True),
        ({"echo": True, "logprobs": 0}, False),
        ({"use_beam_search": True}, False),
        ({"prompt_embeds": "AAAA"}, False),
    ],
)
def test_a_request_for_the_prompts_own_results_is_prefilled_by_d(more: dict[str, Any], remote: bool) -> None:
    assert parse(prompt="x", **more).remote is remote


TEXT_PARTS = {"text", "input_text", "output_text", "thinking", "refusal", "tool_reference"}


def test_every_part_of_a_chat_that_the_installed_vllm_knows_is_text_or_media() -> None:
    parts = set(pytest.importorskip("vllm.renderers.chat_utils").MM_PARSER_MAP)
    assert parts - TEXT_PARTS == set(bodies.MEDIA_PARTS), "a stream with such a part cannot go on from token ids"


def chat_with(part: str, **more: Any) -> bodies.Request:
    return parse(CHAT, messages=[{"role": "user", "content": [{"type": part, part: "x"}]}], **more)


@pytest.mark.parametrize("part", bodies.MEDIA_PARTS)
def test_a_forced_tool_call_is_never_asked_of_a_p_that_gets_the_chat_as_it_came(part: str) -> None:
    assert not chat_with(part, tool_choice="required").remote, "P would fail: its one token is no tool call"
    assert chat_with(part, tool_choice="auto").remote is (part != "prompt_embeds")
    assert parse(CHAT, messages=[1], tool_choice="required").remote


@pytest.mark.parametrize(
    "name", [r"prompt\u005fembeds", r"\u0070rompt_embed\u0073", r"prompt_em\u0062eds", r"pr\u006Fmpt_embeds"]
)
def test_embeddings_are_found_however_their_name_is_written(name: str) -> None:
    said = '{"messages": [{"role": "user", "content": [{"type": "%s", "data": "x"}]}]}'
    assert not bodies.parse(CHAT, (said % name).encode()).remote
    assert parse(CHAT, messages=[{"role": "user", "content": f'what is "prompt_embeds", or "{name}"?'}]).remote


def test_first_marks_are_alike_when_model_salt_and_beginning_are() -> None:
    head = "h" * 4000
    one, two = parse(prompt=head + "a", model="m"), parse(prompt=head + "b" * 2000, model="m")
    assert [mark.digest for mark in one.marks] == [mark.digest for mark in two.marks[:3]] and len(two.marks) == 5
    others = (
        parse(prompt=head, model="n"),
        parse(prompt=head, model="m", cache_salt="s"),
        parse(prompt="x" + head, model="m"),
    )
    assert not {mark.digest for mark in one.marks} & {mark.digest for other in others for mark in other.marks}
    assert not parse(prompt=[head, head], model="m").marks, "of several prompts none is the request's"


def test_what_stands_before_a_chat_is_part_of_its_beginning() -> None:
    messages = [{"role": "user", "content": "h" * 2000}]
    plain, tooled = parse(CHAT, messages=messages), parse(CHAT, messages=messages, tools=[{"type": "function"}])
    later = parse(CHAT, messages=[*messages, {"role": "assistant", "content": "yes"}])
    assert plain.marks[0].digest == later.marks[0].digest != tooled.marks[0].digest


@pytest.mark.parametrize("named", ["m", "", None, 7, "n" * 2000, ["m"]])
def test_a_model_is_what_can_be_one(named: object) -> None:
    assert parse(prompt="x", model=named).model == (named if named == "m" else "")


def test_every_field_that_the_installed_vllm_knows_has_its_use() -> None:
    completion = pytest.importorskip("vllm.entrypoints.openai.completion.protocol").CompletionRequest
    chat = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol").ChatCompletionRequest
    response = pytest.importorskip("vllm.entrypoints.openai.responses.protocol").ResponsesRequest
    message = pytest.importorskip("vllm.entrypoints.anthropic.protocol").AnthropicMessagesRequest
    known = {name for made in (completion, chat, response, message) for name in made.model_fields}
    assert known <= set(bodies.FIELDS), f"say what they are for: {sorted(known - set(bodies.FIELDS))}"


def test_p_gets_what_makes_the_prompt_and_nothing_that_chooses_tokens() -> None:
    asked = {name: {} for name in bodies.FIELDS} | {"messages": [{"role": "user", "content": "x"}], "of_tomorrow": 1}
    _, body = bodies.for_prefill(parse(CHAT, **asked), {"k": 1}, None)
    sent = json.loads(body)
    assert set(sent) - set(bodies.FIELDS) == {"of_tomorrow"}
    uses = {name: bodies.FIELDS[name] for name in sent if name in bodies.FIELDS}
    assert [name for name, use in uses.items() if use in (Use.FIRST, Use.ANSWER)] == ["temperature"] and sent[
        "temperature"
    ] == 0
    assert {"chat_template_kwargs", "tools", "documents", "mm_processor_kwargs"} <= set(sent)
    assert not {"seed", "structured_outputs", "logit_bias", "min_tokens"} & set(sent)


LAX = st.one_of(
    st.sampled_from(
        [True, False, 0, 1, 2, 2.0, 2.5, 0.0, 1.0, -1, "2", "2.0", " 2 ", "2.", "+2", "1_0", "1__0", "2e0", "two", ""]
    ),
    st.sampled_from(["yes", "YES", "on", "off", "t", "F", "n", "True", " true", None, [], {}, [1]]),
    st.integers(-5, 10**9 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)


@given(LAX)
def test_counts_and_flags_are_read_as_the_engine_reads_them(value: object) -> None:
    pydantic = pytest.importorskip("pydantic")
    count, flag = pydantic.TypeAdapter(int), pydantic.TypeAdapter(bool)
    raw = json.dumps(value).encode()

    def read(adapter: object, default: object) -> object:
        try:
            return adapter.validate_json(raw)  # type: ignore[attr-defined]
        except pydantic.ValidationError:
            return default

    number = read(count, 7)
    fields = {"n": msgspec.Raw(raw)}
    assert bodies._number(fields, "n", 7) == (number if 0 <= number < 10**9 else 7)  # type: ignore[operator]
    assert bodies.flag(fields, "n") is read(flag, False)


ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("length", [1, 70_000])
def test_a_body_is_read_in_every_encoding_that_engines_read(encoding: str, length: int) -> None:
    """vLLM reads bodies with the standard library, which takes these and a byte order mark before them."""
    said = {"model": "m", "prompt": "ü" * length, "kv_transfer_params": {"forged": 1}}
    body = json.dumps(said, ensure_ascii=False).encode(encoding)
    assert json.loads(body) == said
    request = bodies.parse(COMPLETIONS, body)
    sent = bodies.for_decode(request, None)
    whole = sent if isinstance(sent, bytes) else b"".join(sent)
    assert json.loads(whole.decode()) == {"model": "m", "prompt": "ü" * length} and request.model == "m"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_long_body_for_another_route_is_passed_in_every_encoding(encoding: str) -> None:
    harmless, hidden = (
        json.dumps({"input": "x" * 70_000, name: 1}).encode(encoding) for name in ("n", "kv_transfer_params")
    )
    assert bodies.stripped(harmless) == harmless
    with pytest.raises(bodies.BodyError, match="kv_transfer_params"):
        bodies.stripped(hidden)


@pytest.mark.parametrize(
    "broken", [b"\xff\xfe{", b"\xff\xfe\x00\xd8{}", b"\x00", b"{\x00", b"\xef\xbb\xbf", b"\x00\x00\xfe\xff{"]
)
def test_a_body_that_no_encoding_fits_is_refused(broken: bytes) -> None:
    with pytest.raises(bodies.BodyError):
        bodies.parse(COMPLETIONS, broken)
