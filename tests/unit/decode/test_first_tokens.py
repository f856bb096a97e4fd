# SPDX-License-Identifier: Apache-2.0
"""P's first token: requests that may start with it, what P is sent, what D accepts, and when vLLM is left unchanged."""

from __future__ import annotations

import functools
import gc
import math
import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu_input_batch import InputBatch

from tools.support.environments import NEWEST, RELEASES
from unit.decode import worker_batch
from unit.kits.loads import book_with
from vllm_ascend_pd.decode.scheduler.core import answers
from vllm_ascend_pd.decode.scheduler.core.first_tokens import TokenBook, fault
from vllm_ascend_pd.decode.scheduler.core.load import USELESS, Start, Wanted
from vllm_ascend_pd.errors import RemoteProtocolError
from vllm_ascend_pd.geometry.layout import Group
from vllm_ascend_pd.metadata import LoadEnd
from vllm_ascend_pd.protocol import reports, sampling
from vllm_ascend_pd.protocol.auth import Secrets, seal_first, unseal_first
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import MAX_FIRST_BYTES, FirstToken
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.sampling import PARAMETERS, ParameterRole
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.vllm_patches import first_token, step_hooks, tried
from vllm_ascend_pd.vllm_patches.wrapping import WRAPPED

# -- the table


def test_every_parameter_of_the_installed_vllm_is_in_the_table() -> None:
    assert set(SamplingParams().__struct_fields__) - set(PARAMETERS) == set()


def given(**changes: Any) -> dict[str, Any]:
    return first_token.given(SamplingParams(**{"max_tokens": 8, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"temperature": 0.0, "seed": 4},
        {"repetition_penalty": 1.3},
        {"logit_bias": {5: 1.5}},
        {"allowed_token_ids": [1, 2]},
        {"min_tokens": 3, "stop_token_ids": [7]},
        {"logprobs": 0},
        {"logprobs": 20},
        {"stop": ["x"], "ignore_eos": True, "max_tokens": 1, "n": 2},
        {"extra_args": {"kv_transfer_params": {}}},
        {"presence_penalty": 0.1, "frequency_penalty": -0.1},
        {"bad_words": ["x", "y z"]},
        {"structured_outputs": StructuredOutputsParams(choice=["yes", "no"])},
    ],
    ids=str,
)
def test_requests_that_start_with_p_s_token(changes: dict[str, Any]) -> None:
    assert sampling.refusal(given(**changes)) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seed": 4}, "seed"),
        ({"thinking_token_budget": 10}, "thinking budget"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt"),
        ({"logprob_token_ids": [4]}, "logprobs"),
        ({"allowed_token_ids": list(range(1025))}, "long lists"),
        ({"structured_outputs": StructuredOutputsParams(choice=["x" * 17000])}, "long lists"),
        ({"bad_words": ["x" * 17000]}, "long lists"),
        ({"extra_args": {"kv_transfer_params": {}, "mine": 1}}, "extra arguments"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_requests_whose_first_token_d_computes(changes: dict[str, Any], why: str) -> None:
    assert sampling.refusal(given(**changes)) == why


def test_a_parameter_of_a_later_release_is_not_passed_over() -> None:
    assert sampling.refusal({"of_tomorrow": 1}) == sampling.OTHER


ASKED = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "logprobs": 3},
    {"temperature": 0.7, "logit_bias": {"5": 1.5, "77": -100}, "repetition_penalty": 1.1},
    {"allowed_token_ids": [3, 1, 2], "temperature": 1e-3},
    {"min_tokens": 5, "stop_token_ids": [9, 8], "max_tokens": 20},
    {"min_tokens": 5, "stop_token_ids": [9, 8], "ignore_eos": True, "max_tokens": 20},
    {"structured_outputs": {"json": {"type": "object", "properties": {"b": {}, "a": {}}}, "whitespace_pattern": " "}},
    {"structured_outputs": {"regex": "a+"}, "presence_penalty": 1.0},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string"}}}},
]


def resolved(request: Any, defaults: dict[str, Any]) -> SamplingParams:
    params = request.to_sampling_params(1 if request.max_tokens == 1 else 20, defaults)
    params.update_from_generation_config({"eos_token_id": [2, 6]}, 2)  # as vLLM's input processor does
    return params


# Fields of `first_token` when D posts a reservation: names of the completions API.
SENT = frozenset(
    ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids", "min_tokens")
) | {"stop_token_ids", "ignore_eos", "logprobs", "bad_words", "structured_outputs"}


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("ids", [None, msgspec.Raw(b"[1,2]")], ids=["as it came", "token ids"])
@pytest.mark.parametrize("chat", [False, True], ids=["a completion", "a chat"])
def test_p_samples_as_d_would_have_whatever_its_own_defaults_are(
    asked: dict[str, Any], chat: bool, ids: msgspec.Raw | None
) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    if chat and "logprobs" in asked:
        asked = {**asked, "logprobs": True, "top_logprobs": asked["logprobs"]}
    kind: Any = ChatCompletionRequest if chat else CompletionRequest
    ours = first_token.given(resolved(kind(model="m", **prompt, **asked), {"temperature": 0.6, "top_k": 20}))
    assert sampling.refusal(ours) == ""
    sent = sampling.sent(ours)
    assert set(sent) <= SENT
    route = bodies.CHAT if chat else bodies.COMPLETIONS
    request = bodies.parse(route, msgspec.json.encode({"model": "m", **prompt, **asked}))
    fields = msgspec.json.decode(msgspec.json.encode(sent), type=dict[str, msgspec.Raw])
    to, body = bodies.for_prefill(request, {}, ids, fields)
    made = msgspec.json.decode(bytes(body))
    if chat and ids is None:  # it has media: D begins with its own token, and a chat's fields have another form
        assert to == bodies.CHAT and {name for name in SENT if name in made} == {"temperature"}
        return
    theirs = first_token.given(resolved(CompletionRequest(**made), {"temperature": 0.9, "top_p": 0.5}))
    assert to == bodies.COMPLETIONS and sampling.refusal(theirs) == ""
    assert sampling.digest(theirs) == sampling.digest(ours)
    assert theirs.get("logprobs") == ours.get("logprobs")


def test_p_is_sent_nothing_of_how_to_choose_where_its_token_is_not_used() -> None:
    fields = {"prompt": "x", "temperature": 0.7, "logprobs": 3, "min_tokens": 4, "stop_token_ids": [1]}
    request = bodies.parse(bodies.COMPLETIONS, msgspec.json.encode({"model": "m", **fields}))
    _, body = bodies.for_prefill(request, {}, None, None)
    sent = msgspec.json.decode(bytes(body))
    assert sent["temperature"] == 0 and not {"logprobs", "min_tokens", "stop_token_ids"} & set(sent)


def test_p_gets_of_d_s_post_only_what_chooses_and_reports_the_token() -> None:
    request = bodies.parse(bodies.COMPLETIONS, b'{"model": "m", "prompt": "x"}')
    hostile = {name: msgspec.Raw(b"1") for name in (*bodies.FIELDS, "of_tomorrow")}
    _, body = bodies.for_prefill(request, {"a": 1}, None, hostile)
    sent = msgspec.json.decode(bytes(body))
    assert (
        sent["prompt"] == "x" and sent["max_tokens"] == 1 and sent["n"] == 1 and sent["kv_transfer_params"] == {"a": 1}
    )
    allowed = {name for name, use in bodies.FIELDS.items() if use is bodies.Use.FIRST}
    assert set(sent) == allowed | {"model", "prompt", "max_tokens", "n", "stream", "kv_transfer_params"}
    assert allowed == SENT, "the metaserver passes on exactly what D posts"


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.8},
        {"top_p": 0.8},
        {"top_k": 3},
        {"min_p": 0.2},
        {"repetition_penalty": 1.2},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1]},
        {"min_tokens": 1},
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
        {"structured_outputs": StructuredOutputsParams(json_object=True)},
    ],
    ids=str,
)
def test_what_chooses_differently_has_another_digest(other: dict[str, Any]) -> None:
    assert sampling.digest(given(temperature=0.7, **other) if "temperature" not in other else given(**other)) != (
        sampling.digest(given(temperature=0.7))
    )


def test_a_grammar_read_by_another_library_is_another() -> None:
    shape = StructuredOutputsParams(json_object=True)
    shape._backend = "auto"

    def asked(grammar: object) -> Any:
        shaped = None if grammar is None else SimpleNamespace(grammar=grammar)
        return SimpleNamespace(
            sampling_params=SamplingParams(structured_outputs=shape), structured_output_request=shaped
        )

    kinds = [sampling.digest(first_token.chosen(asked(grammar))) for grammar in (None, Grammar(), object())]
    assert len(set(kinds)) == 3
    assert sampling.refusal(first_token.chosen(asked(Grammar()))) == ""
    assert sampling.sent({"structured_outputs": shape})["structured_outputs"] == {"json_object": True}


def test_what_ends_an_answer_has_a_say_where_a_grammar_may_end_it_at_once() -> None:
    shape = {"structured_outputs": StructuredOutputsParams(regex="(abc)?")}
    assert sampling.digest(shape) != sampling.digest({**shape, "_all_stop_token_ids": {198}})
    assert sampling.digest(shape) != sampling.digest({**shape, "min_tokens": 1})
    assert sampling.sent({**shape, "_all_stop_token_ids": {198}})["stop_token_ids"] == [198]
    assert sampling.digest({}) == sampling.digest({"_all_stop_token_ids": {198}})


TOOLS = {"tools": [{"type": "function", "function": {"name": "look", "strict": True}}]}


@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"structured_outputs": {"regex": "b"}, **TOOLS},
        {"response_format": {"type": "json_object"}, "tool_choice": "none", **TOOLS},
        {"tool_choice": "required", **TOOLS},
    ],
    ids=str,
)
def test_p_is_sent_the_grammar_that_d_made_and_nothing_to_make_another_from(beside: dict[str, Any]) -> None:
    grammar = {"structural_tag": "made from all of these"}
    request = bodies.parse(bodies.CHAT, msgspec.json.encode({"model": "m", "messages": [], **beside}))
    fields = {"structured_outputs": msgspec.Raw(msgspec.json.encode(grammar))}
    _, body = bodies.for_prefill(request, {}, msgspec.Raw(b"[1,2]"), fields)
    sent = msgspec.json.decode(bytes(body))
    assert sent["structured_outputs"] == grammar and not {"tools", "tool_choice", "response_format"} & set(sent)


def test_bad_words_are_compared_as_tokens() -> None:
    one, other, swapped = ({"_bad_words_token_ids": ids} for ids in ([[1], [2, 3]], [[1], [3, 2]], [[2, 3], [1]]))
    assert sampling.digest(one) == sampling.digest(swapped) != sampling.digest(other)


def test_greedy_requests_choose_alike_whatever_their_filters_say() -> None:
    assert sampling.digest({"temperature": 0.0, "top_k": 5}) == sampling.digest({"temperature": 0})
    assert all(part in ParameterRole for part, _ in PARAMETERS.values())


# -- what D takes

TRANSFER, PUSH = TransferId("d", 1, "u"), "p.1"
WANTED = Wanted(TRANSFER, 10, "how", None, 100)
FIRST = FirstToken(transfer=TRANSFER, push=PUSH, position=10, token=7, digest="how")
REPORTED = msgspec.structs.replace(FIRST, logprobs=((7, -0.5, 1), (7, -0.5, 1), (9, -1.0, 2)))


def book(wanted: Wanted = WANTED) -> TokenBook:
    made = book_with("r")
    assert made.wanted("r", 10, 0) == 10
    assert made.reserve("r", 10, [[1, 2, 3]], [Group(4)], 30.0, "u").transfer == TRANSFER
    made.ask("r", wanted)
    return made


def complete(loads: TokenBook) -> None:
    """Report the request's KV as complete, by one push, at 1.0."""
    loads.ended([LoadEnd("r", None, PUSH)])
    assert loads.received(1.0, "r") is not None


@pytest.mark.parametrize("order", ["token first", "KV first"])
def test_a_request_goes_on_once_token_and_kv_are_there(order: str) -> None:
    first_tokens = book()
    if order == "token first":
        first_tokens.token(TRANSFER, FIRST)
        assert first_tokens.take(1.0) == [] and not first_tokens.withholds("r")
        complete(first_tokens)
    else:
        complete(first_tokens)
        assert first_tokens.take(1.1) == [] and first_tokens.withholds("r")
        first_tokens.token(TRANSFER, FIRST)
    assert first_tokens.take(1.1) == [Start("r", FIRST)]
    first_tokens.token(TRANSFER, FIRST)
    assert first_tokens.take(99.0) == [] and not first_tokens.expects(TRANSFER)


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"transfer": TransferId("d", 2, "u")}, "another transfer"),
    ({"transfer": TransferId("e", 1, "u")}, "another transfer"),
    ({"position": 9}, "another prompt"),
    ({"digest": "else"}, "other sampling"),
    ({"token": 100}, "not in the vocabulary"),
    ({"token": 1 << 61}, "not in the vocabulary"),
    ({"push": "q.1"}, "another push"),
    ({"logprobs": ((7, -1.0, 1),)}, "logprobs"),
]


@pytest.mark.parametrize(("changes", "why"), CHANGED, ids=[f"{why} {i}" for i, (_, why) in enumerate(CHANGED)])
def test_a_token_that_was_not_asked_for_is_not_taken(changes: dict[str, Any], why: str) -> None:
    first_tokens = book()
    first_tokens.token(TRANSFER, msgspec.structs.replace(FIRST, **changes))
    first_tokens.token(TRANSFER, FIRST)  # the first one counts
    complete(first_tokens)
    assert first_tokens.take(1.0) == [Start("r", None, why)]


@pytest.mark.parametrize(
    "logprobs",
    [
        (),
        REPORTED.logprobs[:2],
        (*REPORTED.logprobs, (1, -2.0, 3)),
        ((8, -0.5, 1), *REPORTED.logprobs[1:]),
        ((7, math.nan, 1), *REPORTED.logprobs[1:]),
        ((7, 0.5, 1), *REPORTED.logprobs[1:]),
        ((7, -0.5, 1), (7, -0.5, 1), (100, -1.0, 2)),
    ],
    ids=str,
)
def test_what_is_reported_of_a_token_must_be_what_was_asked(logprobs: Any) -> None:
    wanted = Wanted(TRANSFER, 10, "how", 2, 100)
    assert fault(wanted, REPORTED) == ""
    assert fault(wanted, msgspec.structs.replace(REPORTED, logprobs=logprobs)) in ("logprobs", "not in the vocabulary")


def test_a_token_that_does_not_come_is_not_waited_for() -> None:
    first_tokens = book()
    complete(first_tokens)
    assert first_tokens.take(1.19) == []
    assert first_tokens.take(1.2) == [Start("r", None, "late")]
    first_tokens.token(TRANSFER, FIRST)
    assert first_tokens.take(1.3) == []
    first_tokens = book()
    complete(first_tokens)
    first_tokens.token(TRANSFER, None, failed=True)
    assert first_tokens.take(1.0) == [Start("r", None, "prefill failed")], "it is known that none will come"


WHOLE_WANTED = Wanted(TRANSFER, 10, "how", None, 100, whole=True)


def test_a_request_that_can_begin_with_nothing_else_waits_longer_and_then_has_failed() -> None:
    first_tokens = book(WHOLE_WANTED)
    complete(first_tokens)
    assert first_tokens.take(15.9) == []
    assert first_tokens.take(16.0) == [Start("r", None, "late", fails=True)]
    for first, why in ((None, "not sent"), (msgspec.structs.replace(FIRST, push="q.1"), "another push")):
        first_tokens = book(WHOLE_WANTED)
        complete(first_tokens)
        first_tokens.token(TRANSFER, first)
        (start,) = first_tokens.take(1.0)
        assert start.fails and start.why == why
    first_tokens = book(WHOLE_WANTED)
    complete(first_tokens)
    first_tokens.token(TRANSFER, FIRST)
    (start,) = first_tokens.take(1.0)
    assert not start.fails and start.first == FIRST
    first_tokens = book(WHOLE_WANTED)
    complete(first_tokens)
    first_tokens.request_finished("r")
    assert not first_tokens.take(1.0)[0].fails, "its client has left: there is nothing to compute again"


def test_the_scheduler_has_to_look_when_a_held_request_is_not_waited_for_any_longer() -> None:
    first_tokens = book()
    assert first_tokens.due_s(1.0) == math.inf, "its KV has not come"
    complete(first_tokens)
    assert first_tokens.due_s(1.05) == pytest.approx(0.15) and first_tokens.due_s(9.0) == 0.0
    first_tokens.request_finished("r")
    assert first_tokens.due_s(1.05) == 0.0, "it has ended"
    first_tokens.take(1.05)
    assert first_tokens.due_s(1.05) == math.inf


def test_an_aborted_request_is_let_go_without_a_token() -> None:
    first_tokens = book()
    complete(first_tokens)
    first_tokens.token(TRANSFER, FIRST)
    first_tokens.request_finished("r")
    first_tokens.request_finished("r")
    assert first_tokens.withholds("r") and first_tokens.take(1.0) == [Start("r", None, "aborted")]
    first_tokens = book()
    first_tokens.request_finished("r")
    assert first_tokens.take(9.0) == [] and not first_tokens.expects(TRANSFER), "its load was not over"


def test_a_token_that_the_engine_cannot_begin_with_is_not_taken() -> None:
    for wanted in (WANTED, WHOLE_WANTED):
        first_tokens = book(wanted)
        first_tokens.token(TRANSFER, FIRST)
        complete(first_tokens)
        assert first_tokens.take(1.0, lambda request_id, first: "grammar") == [
            Start("r", None, "grammar", fails=wanted.whole)
        ]
        load = first_tokens.find("r")
        failure = Failure(USELESS, "grammar") if wanted.whole else None
        assert load is not None and (load.source, load.failure) == ("grammar", failure)


# -- on its way

SECRETS = Secrets(b"s" * 32, b"t" * 32)


@pytest.mark.parametrize("secrets", [None, SECRETS])
def test_a_token_travels_sealed(secrets: Secrets | None) -> None:
    assert unseal_first(seal_first(REPORTED, secrets), secrets) == REPORTED
    assert len(seal_first(REPORTED, secrets)) < 300


def test_a_sealed_token_that_is_not_p_s_is_refused() -> None:
    signed, plain = seal_first(FIRST, SECRETS), seal_first(FIRST, None)
    forged = signed[:-1] + bytes([signed[-1] ^ 1])
    hostile = [
        (signed, None),
        (plain, SECRETS),
        (forged, SECRETS),
        (signed, Secrets(b"x" * 32)),
        (b"", None),
        (b"PDX\0" + plain[4:], None),
    ]
    hostile += [(plain + b"\0" * MAX_FIRST_BYTES, None), (plain[:-2], None), (b"PDR\0\xc0", None)]
    hostile += [
        (seal_first(msgspec.structs.replace(FIRST, **changes), None), None)
        for changes in ({"token": -1}, {"token": 1 << 63}, {"version": 1})
    ]
    hostile.append((seal_first(msgspec.structs.replace(FIRST, logprobs=((1, -1.0, 1),) * 66), None), None))
    for sealed, secrets in hostile:
        with pytest.raises(RemoteProtocolError):
            unseal_first(sealed, secrets)


# -- vLLM


def config(**changes: Any) -> Any:
    facts = {
        "kv_transfer_config": SimpleNamespace(is_kv_consumer=True),
        "model_config": SimpleNamespace(logits_processors=None),
        "speculative_config": None,
        "watermark_config": None,
        "scheduler_config": SimpleNamespace(get_scheduler_cls=lambda: AsyncScheduler),
    }
    return SimpleNamespace(**{**facts, **changes})


class Grammar:
    """Grammar whose answers begin with one token."""

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens if token == 7]


def test_a_token_that_the_grammar_does_not_let_pass_is_not_taken() -> None:
    plain, shaped = (
        SimpleNamespace(structured_output_request=one, num_output_tokens=0)
        for one in (None, SimpleNamespace(grammar=Grammar()))
    )
    assert first_token.unfit(plain, 8) == first_token.unfit(shaped, 7) == ""
    assert first_token.unfit(shaped, 8) == "grammar"
    plain.num_output_tokens = 1
    assert first_token.unfit(plain, 8) == "preempted"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, ""),
        ({"reasoning_parser": "qwen3"}, "reasoning"),
        ({"disable_any_whitespace": True}, "grammar settings"),
        ({"disable_additional_properties": True}, "grammar settings"),
    ],
    ids=str,
)
def test_grammars_that_may_begin_otherwise_on_another_engine_are_left_to_d(settings: dict[str, Any], why: str) -> None:
    reason = first_token.why_no_grammar(SimpleNamespace(structured_outputs_config=SimpleNamespace(**settings)))
    assert reason == why
    facts = {"sampling_params": object(), "prompt_token_ids": [1], "resumable": False, "mm_features": ()}
    for shaped in (False, True):
        asked = SimpleNamespace(**facts, lora_request=None, structured_output_request=object() if shaped else None)
        assert first_token.refusal(asked, reason) == (why if shaped else "")


class Own(Scheduler):
    """Scheduler of another package, which returns no outputs."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        return {}


class Sparing(AsyncScheduler):
    """Scheduler of another package, whose workers get a new request's prompt alone."""

    def schedule(self, *given: Any, **named: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"model_config": SimpleNamespace(logits_processors=["mine"])}, "logits processors"),
        ({"speculative_config": object()}, ""),
        ({"use_v2_model_runner": True}, ""),
        ({"watermark_config": object()}, "watermarks"),
        (
            {"scheduler_config": SimpleNamespace(get_scheduler_cls=lambda: Own)},
            "the scheduler Own reads a step's outputs without vLLM's own",
        ),
        (
            {"use_v2_model_runner": True, "scheduler_config": SimpleNamespace(get_scheduler_cls=lambda: Sparing)},
            "the scheduler Sparing does not hand all tokens of a new request to the workers",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_where_it_was_not_tried_vllm_stays_as_it_is(changes: dict[str, Any], why: str) -> None:
    reason = first_token.unproven(config(**changes))
    assert reason.startswith(why) and bool(reason) == bool(why)


class Adding(AsyncScheduler):
    """Scheduler of another package, which adds to what vLLM's own returns: vllm-ascend's from 0.30 on."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        outputs[7] = "dropped"
        return outputs


def test_a_scheduler_that_calls_vllm_s_own_method_is_wrapped_around_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, scheduler_output, model_runner_output: {})
    monkeypatch.setattr(Adding, "update_from_output", Adding.update_from_output)
    adding = config(scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: Adding))
    assert first_token.unproven(adding) == first_token.install(adding) == ""
    seen: list[Any] = []

    class Seeing(step_hooks.StepHooks):
        def after(self, scheduler: Any, outputs: Any) -> None:
            seen.append(dict(outputs))

    class OneOfOurs(step_hooks.HasStepHooks):
        step_hooks = (Seeing(),)

    for connector in (
        OneOfOurs(),
        SimpleNamespace(_connectors=[object(), OneOfOurs()]),
    ):  # also inside a MultiConnector
        made = object.__new__(Adding)
        made.connector = connector
        assert made.update_from_output(None, None) == {7: "dropped"}
    assert seen == [{7: "dropped"}, {7: "dropped"}]


def test_another_version_and_another_shape_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.24.0", "0.26.0", "0.29.0", "0.99.0"):
        monkeypatch.setattr("vllm.__version__", version)
        assert first_token.unproven(config()) == f"vLLM {version} was not tried"
    monkeypatch.undo()
    monkeypatch.setattr("vllm.v1.core.sched.utils.check_stop", lambda request: True)
    assert "check_stop" in first_token.unproven(config()) or "differ" in first_token.unproven(config())
    monkeypatch.undo()
    monkeypatch.delattr("vllm.v1.request.Request.take_prefill_stats")
    assert "take_prefill_stats" in first_token.unproven(config())


def test_releases_of_which_pairs_are_tested_are_those_that_were_tried() -> None:
    """0.31 had such pairs until 0.30, which vllm-ascend needs, took their place."""
    tested = {release.rpartition(".")[0] for release in (*RELEASES, NEWEST)}
    assert {*tried.TRIED[tried.VLLM]} == tested | {"0.31"}


def test_a_grammar_of_another_shape_is_left_to_d(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SimpleNamespace(structured_outputs_config=SimpleNamespace())
    assert first_token.other_grammars() == first_token.why_no_grammar(plain) == ""
    monkeypatch.setattr(StructuredOutputGrammar, "accept_tokens", lambda self, tokens: True)
    assert first_token.other_grammars().endswith(" differ")
    assert first_token.why_no_grammar(plain) == "version"
    monkeypatch.undo()
    monkeypatch.delattr(StructuredOutputGrammar, "validate_tokens")
    assert "validate_tokens" in first_token.other_grammars()
    monkeypatch.undo()
    monkeypatch.setattr(StructuredOutputManager, "accept_tokens", lambda self, request: True)
    assert first_token.other_grammars().endswith(" differ")


def test_the_second_runner_s_workers_get_the_token_from_vllm_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    second = config(use_v2_model_runner=True)
    assert first_token.install_on_worker(second) == ""
    assert not hasattr(RequestState.add_request, WRAPPED)
    monkeypatch.setattr(RequestState, "add_request", lambda self, req_id, tokens: 0)
    assert first_token.install_on_worker(second).endswith(" differ")
    monkeypatch.undo()

    class OtherStates(RequestState):
        def add_request(self, *given: Any, **named: Any) -> Any:
            return None

    assert first_token.install_on_worker(second) == "the batch OtherStates was not tried"
    del OtherStates
    gc.collect()  # else it stays among the subclasses


def test_drafts_and_grammars_are_on_with_what_they_were_tried_with(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting, plain = config(speculative_config=object()), SimpleNamespace(structured_outputs_config=SimpleNamespace())
    for version, drafts, grammars in (
        ("0.23.0", "vLLM 0.23.0 was not tried with drafts", "version"),
        ("0.30.0", "", ""),
        ("0.31.1", "vLLM 0.31.1 was not tried with drafts", "version"),
        ("0.32.0", "", ""),
        ("0.33.0", "vLLM 0.33.0 was not tried with drafts", ""),
    ):
        monkeypatch.setattr("vllm.__version__", version)
        assert first_token.unproven(config()) == ""
        assert (first_token.unproven(drafting), first_token.why_no_grammar(plain)) == (drafts, grammars), version


@pytest.mark.parametrize("version", ["0.23.0", "0.31.1"])
def test_the_second_runner_is_off_where_it_was_not_tried(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    assert (
        first_token.unproven(config(use_v2_model_runner=True))
        == f"vLLM {version} was not tried with the second model runner"
    )


def test_drafts_are_off_with_the_second_runner() -> None:
    both = config(use_v2_model_runner=True, speculative_config=object())
    assert first_token.unproven(both) == "drafts were not tried with the second model runner"


def test_vllm_ascends_second_runner_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried, "installed", {tried.VLLM: "0.30.0", tried.VLLM_ASCEND: "0.30.0rc2"}.__getitem__)
    assert first_token.unproven(config()) == first_token.unproven(config(speculative_config=object())) == ""
    assert first_token.other_grammars() == ""
    assert "second model runner" in first_token.unproven(config(use_v2_model_runner=True))
    assert "second model runner" in first_token.install_on_worker(config(use_v2_model_runner=True))


@pytest.mark.parametrize(("mode", "logprobs", "why"), [("raw_logprobs", 2, ""), ("raw_logits", 2, "logprobs"), ("processed_logprobs", 0, "logprobs"), ("raw_logits", None, "")])  # fmt: skip
def test_other_numbers_than_log_probabilities_are_left_to_d(mode: str, logprobs: int | None, why: str) -> None:
    around, models = first_token.FirstTokenHooks(), SimpleNamespace(logprobs_mode=mode)
    around.settle(SimpleNamespace(model_config=models, structured_outputs_config=SimpleNamespace()))
    assert around.refusal(Request("r", [1, 2], SamplingParams(logprobs=logprobs), None)) == why


def test_what_p_runs_on_is_no_matter() -> None:
    p = SimpleNamespace(is_kv_consumer=False)
    assert first_token.unproven(config(kv_transfer_config=p, use_v2_model_runner=True)) == ""


@pytest.mark.parametrize(
    ("token", "outputs", "there"),
    [(None, [], []), (9, [], [9]), (9, [9, 8], [9, 8]), (0, [], [0]), ((9, 8, 7), [], [9, 8, 7]), ((9, 8), [9], [9])],
    ids=str,
)
def test_a_worker_s_batch_takes_the_token_as_an_output(
    monkeypatch: pytest.MonkeyPatch, token: int | tuple[int, ...] | None, outputs: list[int], there: list[int]
) -> None:
    monkeypatch.setattr(InputBatch, "add_request", InputBatch.add_request)
    assert first_token.install_on_worker(config()) == first_token.install_on_worker(config()) == ""
    assert worker_batch.wrong(token, outputs, there) == ""


@pytest.mark.parametrize("forged", [7, "x", 1 << 40, [7], (7,), None], ids=str)
def test_no_client_gives_a_worker_a_token(monkeypatch: pytest.MonkeyPatch, forged: Any) -> None:
    """A client's `vllm_xargs` are extra arguments too."""
    monkeypatch.setattr(InputBatch, "add_request", InputBatch.add_request)
    assert first_token.install_on_worker(config()) == ""
    added = worker_batch.state(None, [])
    added.sampling_params.extra_args[first_token.GIVEN_ARG] = forged  # type: ignore[index, union-attr]
    worker_batch.batch().add_request(added)
    assert added.output_token_ids == []


def test_a_token_reaches_the_workers_of_other_processes_as_what_it_is() -> None:
    sent = SamplingParams(extra_args={first_token.GIVEN_ARG: first_token.GivenIds((7, 8))})
    received = pickle.loads(pickle.dumps(sent)).extra_args[first_token.GIVEN_ARG]
    assert isinstance(received, first_token.GivenIds) and received == (7, 8)


def test_a_worker_that_could_not_be_wrapped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InputBatch, "add_request", lambda self, request, more: 0)
    assert "differ" in first_token.install_on_worker(config())
    assert not hasattr(InputBatch.add_request, WRAPPED)


def test_the_wrapper_is_put_on_once_and_passes_by_a_connector_with_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def original(self: Any, scheduler_output: Any, model_runner_output: Any) -> str:
        calls.append("vLLM")
        return "outputs"

    class Noted(step_hooks.StepHooks):
        def before(self, output: Any) -> None:
            calls.append(f"before {output} {self.entered}")

        def after(self, scheduler: Any, outputs: Any) -> None:
            calls.append(f"after {outputs} {self.entered}")

    class Connector(step_hooks.HasStepHooks):
        def __init__(self, *hooks: step_hooks.StepHooks) -> None:
            self.step_hooks = hooks

    @functools.wraps(original)
    def by_others(*given: Any) -> Any:  # vllm-ascend wraps this method too
        return original(*given)

    monkeypatch.setattr(Scheduler, "update_from_output", by_others)
    assert first_token.install(config()) == first_token.install(config()) == ""
    noted = Noted()
    for connector in (None, object(), SimpleNamespace(step_hooks="another's"), Connector(), Connector(noted, noted)):
        assert Scheduler.update_from_output(SimpleNamespace(connector=connector), 1, 2) == "outputs"  # type: ignore[arg-type]
    around = ["before 2 True", "before 2 True", "vLLM", "after outputs True", "after outputs False"]
    assert calls == ["vLLM", "vLLM", "vLLM", "vLLM", *around] and not noted.entered


def test_what_a_step_reports_of_a_token() -> None:
    import numpy as np

    rows = LogprobsLists(
        np.array([[3, 3, 4, 5], [8, 9, 7, 6]]), np.array([[-0.1] * 4, [-2.0, -0.5, -0.75, -1.0]]), np.array([1, 4])
    )
    output = SimpleNamespace(req_id_to_index={"a": 0, "r": 1, "s": 2}, sampled_token_ids=[[3], [8], []], logprobs=rows)
    assert first_token.reported(output, "r", 2) == ((8, -2.0, 4), (9, -0.5, 1), (7, -0.75, 2))
    assert first_token.reported(output, "r", 0) == ((8, -2.0, 4),)
    assert first_token.reported(output, "s", 2) == first_token.reported(output, "unknown", 2) == ()
    output.logprobs = None
    assert first_token.reported(output, "r", 2) == ()


# -- through the metaserver


def test_the_metaserver_s_last_word_brings_the_token_unread() -> None:
    assert answers.outcome(b'{"event": "prefilled", "first": "UERG"}') == answers.Outcome("prefilled", first="UERG")
    for line in (
        b'{"event": "prefilled"}',
        b'{"event": "prefilled", "first": 7}',
        b'{"event": "prefilled", "first": null}',
    ):
        assert answers.outcome(line) == answers.Outcome("prefilled")


def test_prefill_s_report_has_room_for_a_token_and_no_more() -> None:
    report = reports.PushReport("p", first="x" * reports.MAX_FIRST)
    body = msgspec.json.encode({"kv_transfer_params": reports.params_of(report)})
    assert reports.read_answer(body) == (None, report)
    longer = msgspec.json.encode(
        {"kv_transfer_params": {"pd_push": {"prefill": "p", "first": "x" * (reports.MAX_FIRST + 1)}}}
    )
    with pytest.raises(msgspec.ValidationError):
        reports.read_answer(longer)


def test_a_row_of_log_probabilities_has_the_rank_of_its_own_token_which_is_the_first() -> None:
    rows = first_token.logprob_rows([[(5, -0.5, 4), (6, -0.1, 1), (7, -0.2, 2)]])
    assert rows.logprob_token_ids.tolist() == [[5, 6, 7]] and rows.sampled_token_ranks.tolist() == [4]
    assert rows.logprobs[0].tolist() == pytest.approx([-0.5, -0.1, -0.2])
