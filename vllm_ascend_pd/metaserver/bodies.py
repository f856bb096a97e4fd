# SPDX-License-Identifier: Apache-2.0
"""What is read from a client's request, and the two bodies that are made of it: D's and P's.

Only the outermost level of the JSON is taken apart; prompts and messages stay the bytes they were, however long.
A client's own `kv_transfer_params` never gets any further than here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from vllm_ascend_pd.metaserver import outline
from vllm_ascend_pd.metaserver.gathered import Payload
from vllm_ascend_pd.metaserver.outline import SLICE, Buffer, NotJson, Steps, at_once
from vllm_ascend_pd.metaserver.prefixes import Marks, marks_of

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
FORBIDDEN = "kv_transfer_params"
_SIDE_DOOR = "vllm_xargs"  # vLLM puts its entries where the forbidden field goes, so it may be in there too

# What msgspec raises for bytes that are not what they should be: it decodes UTF-8 and recurses as Python does.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_READ_WHOLE = 32 << 10  # bytes of a body of which values are made: some milliseconds
_BEFORE_JSON = b" \t\r\n\0\xef\xbb\xbf\xff\xfe"  # white space, and the marks of an encoding

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BYTES_PER_TOKEN = 4  # an estimate, for load only
_UNKNOWN_OUTPUT = 256  # tokens assumed when the client sets no limit
_MODEL_BYTES = 1 << 10  # of a model's name
_BEFORE_PROMPT = ("model", "cache_salt", "tools", "documents", "chat_template", "chat_template_kwargs")


class Use(Enum):
    """What a field of a request is for, as far as P is concerned."""

    PROMPT = "makes the prompt, or what of it is the same KV: P gets it"
    TOKENS = "the same for a prompt of token ids: P gets it also beside those"
    FIRST = (
        "chooses or reports the first token: P gets it as D has it, if its token is D's first; else it is thrown away"
    )
    ANSWER = "chooses, ends or shapes what comes after the prompt: P would only pay for it, or die of it"
    OURS = "set anew for P"


# Every field of vLLM's completions and chat requests. One that is not here is of a later release: it goes to P as it came, since
# leaving out what makes the prompt costs the whole prefill, and passing on what does not costs nothing as a rule.
FIELDS: dict[str, Use] = {
    **dict.fromkeys(("model", "cache_salt", "priority", "vllm_xargs", "session_id", "user"), Use.TOKENS),
    **dict.fromkeys(("prompt", "messages", "prompt_embeds", "suffix"), Use.PROMPT),
    # What the chat template is given. Some render the tool choice and the format of the answer into the prompt.
    **dict.fromkeys(
        ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"), Use.PROMPT
    ),
    **dict.fromkeys(("documents", "tools", "tool_choice", "reasoning_effort", "response_format"), Use.PROMPT),
    # How text, images and sound become tokens.
    **dict.fromkeys(("add_special_tokens", "truncate_prompt_tokens", "truncation_side"), Use.PROMPT),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "ec_transfer_params"), Use.PROMPT),
    # Which token comes next. A seed has killed a sampler.
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids"), Use.FIRST),
    **dict.fromkeys(("repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs"), Use.FIRST),
    **dict.fromkeys(("seed", "frequency_penalty", "presence_penalty", "repetition_detection"), Use.ANSWER),
    **dict.fromkeys(("bad_words", "structured_outputs"), Use.FIRST),
    **dict.fromkeys(("watermarking", "thinking_token_budget"), Use.ANSWER),
    # When it ends.
    **dict.fromkeys(("stop", "length_penalty"), Use.ANSWER),
    **dict.fromkeys(("use_beam_search", "best_of", "include_stop_str_in_output"), Use.ANSWER),
    # What is told of it, and how.
    **dict.fromkeys(("top_logprobs", "prompt_logprobs", "logprob_token_ids"), Use.ANSWER),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_token_ids", "return_token_offsets"), Use.ANSWER),
    **dict.fromkeys(("return_prompt_text", "return_mm_kwargs", "routed_experts_prompt_start"), Use.ANSWER),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), Use.ANSWER),
    **dict.fromkeys(
        ("include_reasoning", "parallel_tool_calls", "stream_options", "stream_interval", "echo"), Use.ANSWER
    ),
    **dict.fromkeys(("stream", "n", "max_tokens", "max_completion_tokens", "request_id", FORBIDDEN), Use.OURS),
}
# A letter of the field's name as nobody writes it who does not mean to hide it.
_ESCAPED = re.compile(rb"\\u00(?:%s)" % b"|".join(sorted({b"%02x" % ord(c) for c in FORBIDDEN})), re.IGNORECASE)
MEDIA = re.compile(rb'"(?:image_url|image_embeds|image_pil|input_audio|audio_url|audio_embeds|video_url)"')
_ONE_TOKEN = {
    "temperature": 0.0,
    "n": 1,
    "stream": False,
}  # greedy: of all ways to choose it the one that needs nothing


class BodyError(ValueError):
    """The client's body cannot be used; the text says to the client why."""


class Shape(Enum):
    ONE = "one prompt"
    BATCH = "several prompts"


class Request(msgspec.Struct, frozen=True):
    """One request of a client, understood as far as routing needs it."""

    route: str
    fields: dict[str, msgspec.Raw]
    size: int  # bytes that it came in
    stream: bool
    shape: Shape
    copies: int  # transfers that it may bring: prompts × choices
    prefill_tokens: int
    decode_tokens: int
    remote: bool  # a prefill elsewhere serves it; else D must see the whole prompt itself
    send_tokens: bool  # P gets the token ids that D made, not the client's own words
    model: str  # as the client names it; empty where it does not
    marks: Marks  # by which its beginning is known again


def parse(route: str, body: Buffer) -> Request:
    """As `parsing`, at once."""
    return at_once(parsing(route, body))


def parsing(route: str, body: Buffer) -> Steps[Request]:
    """Raises BodyError for what is not a JSON object or has impossible values where we look at them."""
    fields = yield from fields_of(body)
    fields.pop(FORBIDDEN, None)
    if _SIDE_DOOR in fields:
        fields[_SIDE_DOOR] = msgspec.Raw((yield from stripping(_view(fields, _SIDE_DOOR))))
    prompt = _view(fields, "messages" if route == CHAT else "prompt", b"")
    prompts, tokens = yield from _measure(prompt, chat=route == CHAT)
    shape = Shape.BATCH if prompts > 1 else Shape.ONE
    choices = _number(fields, "n", 1)
    limit = _number(fields, "max_completion_tokens", 0) or _number(fields, "max_tokens", 0) or _UNKNOWN_OUTPUT
    forced_tool = _word(fields, "tool_choice") not in (b"null", b'"none"', b'"auto"')
    # A format of the answer is compiled into a grammar wherever it is sent, and some templates render it: token ids spare P
    # the one and keep the other. Pictures are not in the ids: then P compiles it as well.
    formatted = _present(fields, "response_format") and not (yield from outline.holds(prompt, MEDIA.search))
    return Request(
        route=route,
        fields=fields,
        size=len(body),
        stream=flag(fields, "stream"),
        shape=shape,
        copies=prompts * choices,
        prefill_tokens=tokens,
        decode_tokens=tokens + min(limit, 1 << 20) * min(choices, 1024),
        remote=bool(prompt) and not _needs_own_prompt(fields),
        # A forced tool call is parsed from the answer, and one token of it is no tool call: P gets the ids.
        send_tokens=shape is Shape.BATCH or (route == CHAT and (forced_tool or formatted)),
        model=model_of(fields),
        marks=(yield from _marks(fields, prompt, tokens)) if shape is Shape.ONE else (),
    )


def fields_of(body: Buffer) -> Steps[dict[str, msgspec.Raw]]:
    """The outermost level of an object. Raises BodyError."""
    try:
        if len(body) > SLICE:
            members = yield from outline.members(body)
            return {name: msgspec.Raw(value) for name, value in members.items()}
        fields = _FIELDS.decode(body)
    except (*UNREADABLE, NotJson) as problem:
        raise BodyError(f"it is not a JSON object: {problem}") from problem
    if len(fields) > outline.MOST_MEMBERS:
        raise BodyError(f"it has more than {outline.MOST_MEMBERS} names at its outermost level")
    return fields


def for_decode(request: Request, params: Mapping[str, Any] | None) -> Payload:
    """D's body: the client's, and where to ask for a prefill (None: D prefills by itself)."""
    return object_of(request.fields if params is None else {**request.fields, FORBIDDEN: params}, request.size)


_SHAPES = ("response_format", "tool_choice")  # they may ask for structured output
_SHAPELESS = (None, {"type": "text"}, "auto", "none")


def for_prefill(
    request: Request,
    params: Mapping[str, Any],
    token_ids: msgspec.Raw | None,
    first: Mapping[str, msgspec.Raw] | None = None,
) -> tuple[str, Payload]:
    """P's route and body: the same prompt, one token, no stream. `first` is how D wants it chosen and reported, if it starts with it."""
    chosen = {key: value for key, value in (first or {}).items() if FIELDS.get(key) is Use.FIRST}
    if token_ids is not None:
        beside = {key: value for key, value in request.fields.items() if FIELDS.get(key) is Use.TOKENS}
        fields = {**beside, "prompt": token_ids, "max_tokens": 1, **_ONE_TOKEN, **chosen, FORBIDDEN: params}
        return COMPLETIONS, object_of(fields, max(request.size, len(memoryview(token_ids))) + _size(chosen))
    limit = "max_completion_tokens" if request.route == CHAT else "max_tokens"
    if request.route == CHAT and "logprobs" in chosen:
        chosen |= {"top_logprobs": chosen["logprobs"], "logprobs": msgspec.Raw(b"true")}
    if "structured_outputs" in chosen and _asks_for_shape(request):
        del chosen["structured_outputs"]  # what asks stays, for the prompt's sake: P reads from it what D has read
    unwanted = (Use.FIRST, Use.ANSWER, Use.OURS)
    kept = {key: value for key, value in request.fields.items() if FIELDS.get(key) not in unwanted}
    body = {**kept, limit: 1, **_ONE_TOKEN, **chosen, FORBIDDEN: params}
    return request.route, object_of(body, request.size + _size(chosen))


def _asks_for_shape(request: Request) -> bool:
    asked = (request.fields[name] for name in _SHAPES if name in request.fields)
    return any(msgspec.json.decode(value) not in _SHAPELESS for value in asked)


def _size(fields: Mapping[str, msgspec.Raw]) -> int:
    return sum(len(memoryview(value)) for value in fields.values())


def object_of(fields: Mapping[str, Any], longest: int) -> Payload:
    """The object as JSON. What is long of it is not copied; no value that is still JSON has more than `longest` bytes."""
    if longest <= SLICE:
        return msgspec.json.encode(fields)
    long = [key for key, value in fields.items() if isinstance(value, msgspec.Raw) and len(memoryview(value)) > SLICE]
    if not long:
        return msgspec.json.encode(fields)
    pieces: list[bytes | memoryview] = [
        msgspec.json.encode({key: value for key, value in fields.items() if key not in long})[:-1]
    ]
    for key in long:
        between = b"," if len(pieces[0]) > 1 or len(pieces) > 1 else b""
        pieces += [between + msgspec.json.encode(key) + b":", memoryview(fields[key])]
    return [*pieces, b"}"]


def strip(body: bytes | memoryview) -> bytes | memoryview:
    """As `stripping`, at once."""
    return at_once(stripping(body))


def stripping(body: Buffer) -> Steps[Buffer]:
    """Any other JSON body without the forbidden field, also inside a list of requests; unchanged if it has none.

    Engines read bodies with the standard library, which takes more than strict JSON (NaN, UTF-16): what the strict
    decoder refuses is read their way, so that nothing slips through in a form that only they understand. Making values holds
    up everything else here, for seconds if there are many: a long body is only looked through, and refused where that is not
    enough.
    """
    if bytes(body[:64]).lstrip(_BEFORE_JSON)[:1] not in (b"[", b"{"):
        return body
    if len(body) > _READ_WHOLE:
        yield from _look_through(body)
        return body
    try:
        value = _value(bytes(body))
    except ValueError:
        return body  # not JSON (an audio file): the engine will not find the field either
    except RecursionError as problem:
        raise BodyError("it is nested too deeply") from problem
    requests = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
    places = requests + [r[_SIDE_DOOR] for r in requests if isinstance(r.get(_SIDE_DOOR), dict)]
    if not any(FORBIDDEN in place for place in places):
        return body
    for place in places:
        place.pop(FORBIDDEN, None)
    return json.dumps(value).encode()


def _look_through(body: Buffer) -> Steps[None]:
    """Raises BodyError for what may name the forbidden field, or would break an engine's reader."""
    try:
        yield from outline.well_formed(body)
    except NotJson as problem:
        raise BodyError(f"it is long, and no strict JSON: {problem}") from problem
    if (yield from outline.holds(body, _names_forbidden)):
        raise BodyError(f"it names {FORBIDDEN}, which only a router sets, and is too long to be read: leave it out")


def _names_forbidden(text: bytes) -> bool:
    return FORBIDDEN.encode() in text or (b"\\u00" in text and _ESCAPED.search(text) is not None)


def _value(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(body)


def _measure(raw: memoryview, chat: bool) -> Steps[tuple[int, int]]:
    """Prompts, and estimated tokens, of what is text, token ids, or a list of either."""
    if chat or bytes(raw[:1]) != b"[":
        return 1, len(raw) // _BYTES_PER_TOKEN + 1
    if bytes(raw[1:64]).lstrip()[:1] in (b'"', b"["):
        if len(raw) > _READ_WHOLE:
            commas = yield from outline.count(raw, b",")
            several = 1 if (yield from outline.single(raw)) else max(2, (yield from outline.count(raw, b"[")) - 1)
            return several, max(commas, len(raw) // _BYTES_PER_TOKEN)
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
        return len(items), sum(map(_tokens, map(bytes, items)))
    return 1, (yield from outline.count(raw, b",")) + 1


def _tokens(raw: bytes) -> int:
    """Of text or of token ids. What is nested deeper is no prompt, and not looked into."""
    return raw.count(b",") + 1 if raw[:1] == b"[" else len(raw) // _BYTES_PER_TOKEN + 1


def _view(fields: Mapping[str, msgspec.Raw], key: str, default: bytes = b"null") -> memoryview:
    return memoryview(fields.get(key, default))


def _needs_own_prompt(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Log-probabilities of the prompt come from computing it; a beam search makes requests of its own."""
    if _present(fields, "prompt_logprobs") or flag(fields, "use_beam_search") or _present(fields, "prompt_embeds"):
        return True
    return flag(fields, "echo") and _present(fields, "logprobs")


def _present(fields: Mapping[str, msgspec.Raw], key: str) -> bool:
    return _word(fields, key) not in (b"null", b"false")


def _word(fields: Mapping[str, msgspec.Raw], key: str) -> bytes:
    """A short value; of a long one only its beginning, which is none."""
    return bytes(memoryview(fields[key])[: _SHORT + 1]) if key in fields else b"null"


# Engines read bodies with pydantic, which takes more than JSON's own numbers and truths. Reading them otherwise would make
# another request of it here than there.
_TRUE = frozenset({True, "1", "on", "t", "true", "y", "yes"})
_WHOLE = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?")
_SHORT = 64  # characters of a value that can be a count


def small(fields: Mapping[str, msgspec.Raw], key: str) -> object:
    """A short value; None for a long one, and for one that is no JSON."""
    if key not in fields:
        return None
    raw = _word(fields, key)
    try:
        return msgspec.json.decode(raw) if len(raw) <= _SHORT else None
    except UNREADABLE:
        return None


def flag(fields: Mapping[str, msgspec.Raw], key: str) -> bool:
    """A truth, as engines read it."""
    value = small(fields, key)
    value = value.lower() if isinstance(value, str) else value
    return isinstance(value, str | int | float) and value in _TRUE


def _number(fields: Mapping[str, msgspec.Raw], key: str, default: int) -> int:
    """A count for routing; what is wrong about it the engine will tell the client."""
    value = small(fields, key)
    if isinstance(value, str):
        text = value.strip()
        value = int(text.partition(".")[0].replace("_", "")) if _WHOLE.fullmatch(text) else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) and 0 <= value < 10**9 else default


def model_of(fields: Mapping[str, msgspec.Raw]) -> str:
    """Empty where there is none, or nothing that could be one."""
    raw = fields.get("model", msgspec.Raw(b'""'))
    try:
        return msgspec.json.decode(raw, type=str) if len(memoryview(raw)) <= _MODEL_BYTES else ""
    except UNREADABLE:
        return ""


def _marks(fields: Mapping[str, msgspec.Raw], prompt: memoryview, tokens: int) -> Steps[Marks]:
    """A template puts tools and documents before what was said."""
    return (yield from marks_of((_view(fields, name, b"") for name in _BEFORE_PROMPT), prompt, tokens))
