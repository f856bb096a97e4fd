# SPDX-License-Identifier: Apache-2.0
"""Rules for continuing a stream on another D with exactly the tokens that the first D would have generated.

Pure. The other D gets a prompt of token ids: the prompt's and those generated so far. `FIELD_RULES` says what becomes
of each field of vLLM's requests then. A request with a field that it does not have is not continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.bodies import CHAT, COMPLETIONS, UNREADABLE, Request, Shape
from vllm_ascend_pd.router.core.prefixes import Marks

_GREEDY = 1e-5  # vLLM samples greedily at temperatures below this
_COMPLETION_TOKENS = 16  # vLLM's limit for completions that name none
_SHORT = 64  # bytes of a value that can be harmless
_FIELD_BYTES = 64 << 10  # of all that is kept of a request beside its prompt
MAX_STOP = 256  # characters of a stop string; text of this length may have to be generated again


class FieldTreatment(Enum):
    """Treatment of a request's field when its generation is continued."""

    KEPT = "means the same for the tokens that are still to come"
    PROMPT = "made the prompt, whose token ids are known by now"
    COUNTED = "counts from the first token on: lowered by those that are there"
    OURS = "set anew"
    REFUSED = "cannot go on, unless it has a value that means nothing"


class Rule(NamedTuple):
    treatment: FieldTreatment
    why: str = ""  # why a stream with this field is not continued
    harmless: tuple[object, ...] = (None,)  # values with which it is continued all the same


def _refused(why: str, *harmless: object) -> Rule:
    return Rule(FieldTreatment.REFUSED, why, (None, *harmless))


_KEPT, _PROMPT, _COUNTED, _OURS = (
    Rule(treatment)
    for treatment in (FieldTreatment.KEPT, FieldTreatment.PROMPT, FieldTreatment.COUNTED, FieldTreatment.OURS)
)
_TOOLS = "what parses its tool calls has a state"
_GRAMMAR = "its grammar has a state"
_MEDIA = "its prompt is more than tokens"
_SAMPLED = "it samples: its temperature is not 0"

FIELD_RULES: dict[str, Rule] = {
    **dict.fromkeys(("model", "cache_salt", "priority", "session_id", "user"), _KEPT),
    **dict.fromkeys(("prompt", "messages"), _PROMPT),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "add_generation_prompt"), _PROMPT),
    **dict.fromkeys(("continue_final_message", "documents", "reasoning_effort", "return_prompt_text"), _PROMPT),
    **dict.fromkeys(("add_special_tokens", "truncate_prompt_tokens", "truncation_side"), _PROMPT),
    **dict.fromkeys(
        ("prompt_embeds", "media_io_kwargs", "mm_processor_kwargs", "mm_payload"), _refused(_MEDIA, [], {})
    ),
    **dict.fromkeys(("ec_transfer_params", "return_mm_kwargs"), _refused(_MEDIA, False)),
    "suffix": _refused("it has a suffix"),
    "vllm_xargs": _refused("what reads its vllm_xargs may have a state", {}),
    # Choice of the next token. Greedy decoding needs no seed. `repetition_penalty` treats prompt and answer alike.
    "temperature": _OURS,
    "seed": _PROMPT,
    **dict.fromkeys(("top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids", "repetition_penalty"), _KEPT),
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty"), _refused("its penalty distinguishes the prompt from the answer", 0)
    ),
    "bad_words": _refused("its bad words may begin before the break", []),
    **dict.fromkeys(("structured_outputs", "response_format"), _refused(_GRAMMAR, {"type": "text"})),
    **dict.fromkeys(
        ("repetition_detection", "watermarking", "thinking_token_budget"),
        _refused("it counts what was generated", False),
    ),
    "use_beam_search": _refused("it is a beam search", False),
    "length_penalty": _PROMPT,  # only of a beam search
    # End of the answer.
    **dict.fromkeys(("stop", "include_stop_str_in_output", "stop_token_ids", "ignore_eos"), _KEPT),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), _COUNTED),
    **dict.fromkeys(("n", "best_of"), _refused("it has several choices", 1)),
    # What is reported of the answer.
    **dict.fromkeys(("stream", "request_id", "return_token_ids", bodies.TRANSFER_PARAMS), _OURS),
    **dict.fromkeys(("stream_options", "stream_interval", "skip_special_tokens"), _KEPT),
    "spaces_between_special_tokens": _refused("how it writes special tokens depends on those before", True),
    **dict.fromkeys(("logprobs", "logprob_token_ids", "return_tokens_as_token_ids", "return_weight_versions"), _KEPT),
    "top_logprobs": _refused("log-probabilities of a chat have another form than those of token ids", 0),
    "prompt_logprobs": _refused("it asks for the prompt's own results"),
    "echo": _refused("it repeats the prompt", False),
    **dict.fromkeys(
        ("return_token_offsets", "return_assistant_tokens_mask", "routed_experts_prompt_start"),
        _refused("it asks for results by position", False, 0),
    ),
    "tools": _refused(_TOOLS, []),
    "tool_choice": _refused(_TOOLS, "none", "auto"),
    "parallel_tool_calls": _PROMPT,
    "include_reasoning": _refused("what hides its reasoning has a state", True),
}
_OF_CHAT = {"logprobs": _refused(FIELD_RULES["top_logprobs"].why, False)}


class ResumableRequest(msgspec.Struct, frozen=True):
    """The part of a request that is kept to continue it."""

    chat: bool
    fields: dict[str, msgspec.Raw]
    limit: int | None  # tokens of the answer; None: as many as the model takes
    least: int
    stop: int  # most characters of a stop string that are there before it is complete
    held: int  # characters that D holds back because they may begin a stop string
    asked_ids: bool  # the client wants token ids
    usage: bool  # the client wants the usage at the end
    model: str
    marks: Marks
    size: int


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class NotContinued(ValueError):
    """A stream that cannot be continued; the text says why."""


def resumable_request(request: Request, ceiling: int) -> ResumableRequest:
    """Return what of a request is kept to continue its stream. Raise NotContinued.

    `ceiling`: most tokens of an answer that the engines allow, whatever is asked; 0: they have no such limit.
    """
    chat, fields = request.route == CHAT, request.fields
    if not request.remote:
        raise NotContinued("D computes its prompt itself")
    if request.shape is not Shape.ONE or request.copies != 1:
        raise NotContinued(FIELD_RULES["n"].why)
    kept: dict[str, msgspec.Raw] = {}
    for name, raw in fields.items():
        rule = (_OF_CHAT.get(name) if chat else None) or FIELD_RULES.get(name)
        if rule is None:
            raise NotContinued("it has a field that is not known here")
        if rule.treatment is FieldTreatment.REFUSED and not _is_one_of(raw, rule.harmless):
            raise NotContinued(rule.why)
        if rule.treatment is FieldTreatment.KEPT:
            kept[name] = raw
    if not _greedy(fields):
        raise NotContinued(_SAMPLED)
    if request.has_media:
        raise NotContinued(_MEDIA)
    size = sum(len(memoryview(raw)) for raw in kept.values())
    if size > _FIELD_BYTES:
        raise NotContinued("its fields beside the prompt are too long to be kept")
    longest = _longest_stop(fields)
    return ResumableRequest(
        chat=chat,
        fields={name: msgspec.Raw(bytes(raw)) for name, raw in kept.items()},  # copied: a view keeps the whole body
        limit=_limit(fields, chat, ceiling),
        least=_count(fields, "min_tokens") or 0,
        stop=max(0, longest - 1),
        held=0 if bodies.flag(fields, "include_stop_str_in_output") else max(0, longest - 1),
        asked_ids=bodies.flag(fields, "return_token_ids"),
        usage=_usage(fields),
        model=request.model,
        marks=request.marks,
        size=size,
    )


def continued(
    original: ResumableRequest, prompt: bytes, tokens: int, answer: Sequence[int], at: int, room: int
) -> Request:
    """Return the request that goes on after the first `at` tokens of `answer`. Raise NotContinued.

    `prompt`: its `tokens` ids as they stand in a JSON list. `room`: tokens that the model takes in all, needed if the
    client set no limit.
    """
    left = room - tokens - at if original.limit is None else original.limit - at
    if left < 1:
        raise NotContinued("no token is left of its limit")
    ids = b",".join([prompt, *(b"%d" % one for one in answer[:at])])
    fields: dict[str, Any] = {**original.fields, "prompt": msgspec.Raw(b"[" + ids + b"]"), "temperature": 0.0}
    fields |= {"max_tokens": left, "stream": True, "return_token_ids": True}
    if original.least > at:
        fields["min_tokens"] = original.least - at
    return Request(
        route=COMPLETIONS,
        fields=fields,
        size=len(ids) + original.size,
        stream=True,
        shape=Shape.ONE,
        copies=1,
        prefill_tokens=tokens + at,
        limit=left,
        remote=True,
        send_tokens=False,
        model=original.model,
        marks=original.marks,
    )


def _is_one_of(raw: msgspec.Raw, harmless: tuple[object, ...]) -> bool:
    try:
        return len(memoryview(raw)) <= _SHORT and msgspec.json.decode(raw) in harmless
    except UNREADABLE:
        return False


def _greedy(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether decoding is surely greedy: a default temperature is the model's own and not known here."""
    value = bodies.small(fields, "temperature")
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _GREEDY


def _count(fields: Mapping[str, msgspec.Raw], name: str) -> int | None:
    """Return a field as a count; None if absent. Raise NotContinued for forms that engines may read differently."""
    raw = fields.get(name)
    if raw is None or _is_one_of(raw, (None,)):
        return None
    value = bodies.small(fields, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise NotContinued(f"its {name} is no whole number")
    return value


def _limit(fields: Mapping[str, msgspec.Raw], chat: bool, ceiling: int) -> int | None:
    asked = _count(fields, "max_completion_tokens") if chat else None
    if asked is None:
        asked = _count(fields, "max_tokens")
    if asked is None and not chat:
        asked = _COMPLETION_TOKENS
    if ceiling and asked is not None and asked > ceiling:
        raise NotContinued("its limit of tokens is above the engines' own")
    return ceiling if asked is None and ceiling else asked


def _longest_stop(fields: Mapping[str, msgspec.Raw]) -> int:
    raw = fields.get("stop", msgspec.Raw(b"null"))
    try:
        stop = msgspec.json.decode(raw, type=str | list[str] | None)
    except UNREADABLE as problem:
        raise NotContinued("its stop strings are not understood") from problem
    longest = max(map(len, [stop] if isinstance(stop, str) else stop or [""]))
    if longest > MAX_STOP:
        raise NotContinued(f"a stop string has more than {MAX_STOP} characters")
    return longest


def _usage(fields: Mapping[str, msgspec.Raw]) -> bool:
    raw = fields.get("stream_options", msgspec.Raw(b"null"))
    try:
        options = msgspec.json.decode(raw, type=_StreamOptions | None)
    except UNREADABLE as problem:
        raise NotContinued("its stream options are not understood") from problem
    return options is not None and bool(options.include_usage)
