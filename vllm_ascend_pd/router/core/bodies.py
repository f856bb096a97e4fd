# SPDX-License-Identifier: Apache-2.0
"""Reading of a client's request, and the two bodies that are made from it: D's and P's.

Of a request only the outermost level and short values are decoded; prompts and messages stay raw bytes. `stripped`
removes a client's own `kv_transfer_params` from any other body.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import msgspec

from vllm_ascend_pd.router.core import media, stored
from vllm_ascend_pd.router.core.pieces import PIECE, Buffer, count, holds
from vllm_ascend_pd.router.core.prefixes import Mark, Marks, marks_of
from vllm_ascend_pd.shared.core.gathered import Payload

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
# The routes whose prompts P can compute; the fields that have the prompt, and that limit the answer.
ROUTES = {
    COMPLETIONS: ("prompt", "max_tokens"),
    CHAT: ("messages", "max_completion_tokens"),
    RESPONSES: ("input", "max_output_tokens"),
    MESSAGES: ("messages", "max_tokens"),
}
TRANSFER_PARAMS = "kv_transfer_params"  # a client may not set it
_XARGS = "vllm_xargs"  # vLLM copies its entries to where the forbidden field goes, so the field may be in it too

# Errors of msgspec for bytes that it cannot decode. It decodes UTF-8 and recurses, so two of them are Python's own.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_CONVERTED = 4 << 20  # bytes of the longest body in another encoding than UTF-8
MAX_NAMES = 256  # at the outermost level: three times as many as the API has
_NAME_LENGTH = 1 << 10  # of each of those in a long body
READ_WHOLE = 32 << 10  # bytes of the largest body that is decoded into values: some milliseconds
_BEFORE_JSON = re.compile(rb"[ \t\r\n\0\xef\xbb\xbf\xff\xfe]*")  # white space in any encoding, and byte order marks

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY = msgspec.json.Decoder(msgspec.Raw)
_SINGLE = msgspec.json.Decoder(tuple[msgspec.Raw])
_BYTES_PER_TOKEN = 4  # an estimate, for load only
_MODEL_BYTES = 1 << 10  # of a model's name
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_SYSTEM = ("system", "instructions")  # prompts beside the prompt
_PREVIOUS = "previous_response_id"
# Of Claude Code, in its system prompt: another one each time, and vLLM leaves it out.
_BILLING = re.compile(rb'"x-anthropic-billing-header[^"]*"')
_BEFORE_PROMPT = (
    *("model", "cache_salt", "tools", "documents", "chat_template", "chat_template_kwargs"),
    *(*_SYSTEM, _PREVIOUS),
)


class Use(Enum):
    """Purpose of a request's field, as far as P is concerned."""

    PROMPT = "makes the prompt's token ids: P gets it if it does not get those"
    TOKENS = "makes the KV beside the prompt's token ids, or the order of requests: P gets it"
    FIRST = "chooses or reports the first token: P gets it as D has it, if D starts with P's token; else it is left out"
    ANSWER = "applies after the first token: not for P, which would compute it for nothing, or crash"
    ROUTING = "set, or left out, by the metaserver"


# Every field of vLLM's requests on these routes. A field that is not here is of a later release and goes to P
# unchanged. To leave out one that shapes the KV would waste the whole prefill; any other usually costs nothing.
FIELDS: dict[str, Use] = {
    **dict.fromkeys(("model", "cache_salt", "priority", "vllm_xargs", "session_id", "user"), Use.TOKENS),
    **dict.fromkeys(("prompt", "messages", "prompt_embeds", "suffix", "input", "previous_input_messages"), Use.PROMPT),
    **dict.fromkeys((*_SYSTEM, _PREVIOUS, "reasoning", "text", "truncation", "output_config", "thinking"), Use.PROMPT),
    # Inputs of the chat template. Some templates render the tool choice and the answer's format into the prompt.
    **dict.fromkeys(
        ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"), Use.PROMPT
    ),
    **dict.fromkeys(("documents", "tools", "tool_choice", "reasoning_effort", "response_format"), Use.PROMPT),
    # How text, images and sound become tokens.
    **dict.fromkeys(("add_special_tokens", "truncate_prompt_tokens", "truncation_side"), Use.PROMPT),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "ec_transfer_params"), Use.PROMPT),
    # Choice of the next token. `seed` does not go to P: it has crashed a sampler.
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids"), Use.FIRST),
    **dict.fromkeys(("repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs"), Use.FIRST),
    **dict.fromkeys(("seed", "frequency_penalty", "presence_penalty", "repetition_detection"), Use.ANSWER),
    **dict.fromkeys(("bad_words", "structured_outputs"), Use.FIRST),
    **dict.fromkeys(("watermarking", "thinking_token_budget", "max_tool_calls"), Use.ANSWER),
    # End of the answer.
    **dict.fromkeys(("stop", "stop_sequences", "length_penalty"), Use.ANSWER),
    **dict.fromkeys(("use_beam_search", "best_of", "include_stop_str_in_output"), Use.ANSWER),
    # What is reported of the answer, and how.
    **dict.fromkeys(("top_logprobs", "prompt_logprobs", "logprob_token_ids"), Use.ANSWER),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_token_ids", "return_token_offsets"), Use.ANSWER),
    **dict.fromkeys(
        ("return_prompt_text", "return_mm_kwargs", "return_weight_versions", "routed_experts_prompt_start"), Use.ANSWER
    ),
    **dict.fromkeys(
        ("skip_special_tokens", "spaces_between_special_tokens", "return_assistant_tokens_mask"), Use.ANSWER
    ),
    **dict.fromkeys(
        ("include", "metadata", "service_tier", "prompt_cache_key", "enable_response_messages"), Use.ANSWER
    ),
    **dict.fromkeys(
        ("include_reasoning", "parallel_tool_calls", "stream_options", "stream_interval", "echo"), Use.ANSWER
    ),
    **dict.fromkeys(("stream", "n", "request_id", "store", "background", *_LIMITS, TRANSFER_PARAMS), Use.ROUTING),
}
# A letter of the forbidden field's name, written as an escape. A request does this only to hide the field.
_ESCAPED = re.compile(rb"\\u00(?:%s)" % b"|".join(sorted({b"%02x" % ord(c) for c in TRANSFER_PARAMS})), re.IGNORECASE)
_PROMPT_EMBEDS = "prompt_embeds"
# Types of a chat's parts that are not, or not completely, in the prompt's token ids; vLLM takes them as keys too.
MEDIA_PARTS = (
    *("input_image", "image_url", "image_embeds", "image_pil", "input_audio", "audio_url", "audio_embeds"),
    *("video_url", "video_embeds", _PROMPT_EMBEDS),
)


# A string that may be one of those by its length and first letters, any of which may be escaped.
_PART = re.compile(rb'"([aipv\\][imnru\\][a-z_0-9A-F\\]{2,81}[a-z0-9A-F])"')
_LETTER = re.compile(rb"\\u00([0-9a-fA-F]{2})")


def _names(parts: Iterable[str]) -> Callable[[bytes], bool]:
    """Return whether a text has one of these strings."""
    wanted = {part.encode() for part in parts}

    def says(text: bytes) -> bool:
        kinds = (one[1] for one in _PART.finditer(text))
        return any((_LETTER.sub(_letter, one) if b"\\" in one else one) in wanted for one in kinds)

    return says


def _letter(escape: re.Match[bytes]) -> bytes:
    return bytes.fromhex(escape[1].decode())


_names_media, _names_embeds, _names_image = _names(MEDIA_PARTS), _names((_PROMPT_EMBEDS,)), _names(("image",))
_ONE_TOKEN = {"temperature": 0.0, "n": 1, "stream": False}  # greedy sampling needs no other field


class BodyError(ValueError):
    """A client's body that cannot be used; the text, which the client gets, says why."""


class _ManyNames(Exception):
    """More names, or longer ones, than a body may have."""


class _Name(str):
    """A name of a long body. msgspec calls a hook for each, before it makes more."""


class Shape(Enum):
    ONE = "one prompt"
    BATCH = "several prompts"


class Request(msgspec.Struct, frozen=True):
    """One request of a client, parsed as far as routing needs it."""

    route: str
    fields: dict[str, msgspec.Raw]
    size: int  # bytes of its body
    stream: bool
    shape: Shape
    copies: int  # transfers that it may cause: prompts × choices
    prefill_tokens: int
    limit: int  # tokens of each choice; 0: the client sets no limit
    remote: bool  # P may prefill it; else D must compute the whole prompt itself
    send_tokens: bool  # the prompt is text, or several: P is to get the token ids that D makes of it
    model: str  # as the client names it; empty if it names none
    marks: Marks  # of the prompt, to find engines that have its beginning in their cache
    has_media: bool = False
    follows: stored.Stored | None = None  # the response with which its prompt begins, and which one D has
    asks_again: bool = False  # D may make several prompts of it: it runs tools itself, and goes on

    def counted(self, tokens: int) -> Request:
        """Return it with the number of its prompt's tokens, of which what it follows on is the beginning."""
        more = tokens - self.prefill_tokens
        marks = tuple(Mark(digest, max(0, upto + more)) for digest, upto in self.marks)
        return msgspec.structs.replace(self, prefill_tokens=tokens, marks=marks)


class _Tool(msgspec.Struct):
    type: str = "function"


_TOOLS = msgspec.json.Decoder(list[_Tool])
_OF_CLIENTS = ("function", "custom", "namespace")
_TOOLS_BYTES = 1 << 20  # that are looked through: some milliseconds


def parse(route: str, body: Buffer) -> Request:
    """Parse a request. Raise BodyError if it is no JSON object, or its `vllm_xargs` cannot be searched."""
    fields = fields_of(body)
    fields.pop(TRANSFER_PARAMS, None)
    if _XARGS in fields:
        fields[_XARGS] = msgspec.Raw(stripped(_view(fields, _XARGS)))
    prompt = _view(fields, ROUTES[route][0], b"")
    chat = route != COMPLETIONS
    has_media = chat and holds(prompt, _names_image if route == MESSAGES else _names_media)
    text = memoryview(media.measured(prompt)) if has_media else prompt
    prompts, tokens = _measure(text, chat)
    tokens += sum(len(_view(fields, name, b"")) for name in _SYSTEM) // _BYTES_PER_TOKEN
    shape = Shape.BATCH if prompts > 1 else Shape.ONE
    choices = _number(fields, "n", 1) if route in (COMPLETIONS, CHAT) else 1
    # A chat with media goes to P as it came. A forced tool call is parsed from the answer, and P's one token is none.
    forced_tool = _word(fields, "tool_choice") not in (b"null", b'"none"', b'"auto"')
    # Embeddings have no hash by which P and D could tell that they compute the same prompt.
    embeds = has_media and holds(prompt, _names_embeds)
    follows = stored.read(small(fields, _PREVIOUS)) if route == RESPONSES else None
    has_media = has_media or (follows is not None and follows.has_media)
    marks = _marks(fields, text, tokens) if shape is Shape.ONE else ()
    if follows is not None:  # nothing is known here of its length
        marks = (*follows.marks, *marks)
    limits = ("max_completion_tokens", "max_tokens") if route == CHAT else ROUTES[route][1:]  # no other ends it
    here = _needs_own_prompt(fields) or embeds or (has_media and (forced_tool or present(fields, _PREVIOUS)))
    return Request(
        route=route,
        fields=fields,
        size=len(body),
        stream=flag(fields, "stream"),
        shape=shape,
        copies=prompts * choices,
        prefill_tokens=tokens,
        limit=next(filter(None, (_number(fields, name, 0) for name in limits)), 0),
        # Behind the answer to a request that D runs in the background nobody is left whom D could ask.
        remote=bool(prompt) and not here and not (route == RESPONSES and flag(fields, "background")),
        send_tokens=chat or shape is Shape.BATCH or _next(prompt, int(bytes(prompt[:1]) == b"[")) == b'"',
        model=model_of(fields),
        marks=marks,
        has_media=has_media,
        follows=follows,
        asks_again=route == RESPONSES and _has_tools_of_its_own(fields),
    )


def _has_tools_of_its_own(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether a request may have tools that its D runs itself: any but those that clients run."""
    tools = _view(fields, "tools", b"[]")
    try:
        return len(tools) > _TOOLS_BYTES or any(tool.type not in _OF_CLIENTS for tool in _TOOLS.decode(tools))
    except UNREADABLE:
        return False


def fields_of(body: Buffer) -> dict[str, msgspec.Raw]:
    """Return the members of the outermost object, each as raw JSON. Raise BodyError."""
    try:
        body = _in_utf8(body)
        if len(body) <= PIECE:
            fields = _FIELDS.decode(body)
            if len(fields) > MAX_NAMES:
                raise _ManyNames
            return fields
        named = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=_few_names()).decode(body)
        return {str(name): value for name, value in named.items()}
    except UNREADABLE as problem:
        raise _unread(problem, "it is not a JSON object") from problem
    except _ManyNames as problem:
        many = f"more than {MAX_NAMES} names at its outermost level, or one of more than {_NAME_LENGTH} characters"
        raise BodyError(f"it has {many}") from problem


def _few_names() -> Callable[[type, str], _Name]:
    """Return a hook that ends the decoding of a body with too many names: objects for 57 MiB of them fill gigabytes."""
    numbers = itertools.count()

    def take(_: type, name: str) -> _Name:
        if next(numbers) >= MAX_NAMES or len(name) > _NAME_LENGTH:
            raise _ManyNames
        return _Name(name)

    return take


def _unread(problem: Exception, what: str) -> BodyError:
    return BodyError("it is nested too deeply" if isinstance(problem, RecursionError) else f"{what}: {problem}")


def _in_utf8(body: Buffer) -> Buffer:
    """Return JSON in UTF-8 without a byte order mark, as engines take any. Raise UnicodeDecodeError or BodyError."""
    encoding = json.detect_encoding(bytes(body[:4]))
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        return body[3:]
    if len(body) > _CONVERTED:
        raise BodyError(f"it is long, and in {encoding}")
    return bytes(body).decode(encoding).encode()


def for_decode(request: Request, params: Mapping[str, Any] | None, home: str = "") -> Payload:
    """Return D's body: the client's, with `params`: where to ask for a prefill (None: D prefills by itself).

    A response that the client does not name gets a name that says where it is: at the D that ids call `home`.
    """
    more: dict[str, Any] = {} if params is None else {TRANSFER_PARAMS: params}
    if request.route == RESPONSES and not _is_named(request.fields):
        more["request_id"] = stored.new_id(home, request.marks, request.has_media)
    return object_of(request.fields | more if more else request.fields, request.size)


def _is_named(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether a client names its response; not as the metaserver does, as that name would say what is not so."""
    try:
        name = msgspec.json.decode(_view(fields, "request_id")[: 8 * _SHORT])  # each letter may be escaped
    except UNREADABLE:
        return True
    return name not in (None, False) and stored.read(name) is None


def for_prefill(
    request: Request,
    params: Mapping[str, Any],
    token_ids: msgspec.Raw | None,
    first: Mapping[str, msgspec.Raw] | None = None,
) -> tuple[str, Payload]:
    """Return P's route and body: the same prompt, one token, no stream.

    `token_ids`: those that D made of the prompt; without them the prompt goes as it came. `first`: the fields by which
    D wants P's token chosen and reported, if D starts with that token. They are those of a completion, and a chat that
    goes as it came has media, with which D starts with its own.
    """
    ids = {} if token_ids is None else {"prompt": token_ids}
    route = COMPLETIONS if ids else request.route
    wanted = (Use.TOKENS, None) if ids else (Use.PROMPT, Use.TOKENS, None)
    fields: dict[str, Any] = {key: value for key, value in request.fields.items() if FIELDS.get(key) in wanted} | ids
    fields |= {ROUTES[route][1]: 1, **_ONE_TOKEN}
    if route == RESPONSES:
        fields["store"] = False
    if route == COMPLETIONS and first:
        fields |= {key: value for key, value in first.items() if FIELDS.get(key) is Use.FIRST}
    raw = (len(memoryview(value)) for value in fields.values() if isinstance(value, msgspec.Raw))
    return route, object_of({**fields, TRANSFER_PARAMS: params}, sum(raw))


def object_of(fields: Mapping[str, Any], longest: int) -> Payload:
    """Return the object as JSON, without copying long values. `longest`: upper bound for the bytes of a raw value."""
    if longest <= PIECE:
        return msgspec.json.encode(fields)
    long = [key for key, value in fields.items() if isinstance(value, msgspec.Raw) and len(memoryview(value)) > PIECE]
    if not long:
        return msgspec.json.encode(fields)
    pieces: list[bytes | memoryview] = [
        msgspec.json.encode({key: value for key, value in fields.items() if key not in long})[:-1]
    ]
    for key in long:
        between = b"," if len(pieces[0]) > 1 or len(pieces) > 1 else b""
        pieces += [between + msgspec.json.encode(key) + b":", memoryview(fields[key])]
    return [*pieces, b"}"]


def stripped(body: Buffer) -> Buffer:
    """Return any JSON body without the forbidden field, also in a list of requests; unchanged if it has none.

    Engines read bodies with the standard library, which accepts more than strict JSON (NaN, UTF-16). What the strict
    decoder refuses is therefore read in the same way, so that the field cannot hide in a form that only engines accept.
    To make values of a long body would take seconds and gigabytes if it has many. So a long body is only searched, and
    refused with BodyError if it may have the field.
    """
    if _next(body, 0) not in (b"[", b"{"):
        return body
    if len(body) > READ_WHOLE:
        _look_through(body)
        return body
    try:
        value = _value(bytes(body))
    except ValueError:
        return body  # not JSON (an audio file): the engine will not find the field either
    except RecursionError as problem:
        raise _unread(problem, "") from problem
    requests = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
    objects = requests + [r[_XARGS] for r in requests if isinstance(r.get(_XARGS), dict)]
    if not any(TRANSFER_PARAMS in place for place in objects):
        return body
    for place in objects:
        place.pop(TRANSFER_PARAMS, None)
    return json.dumps(value).encode()


def _next(text: Buffer, at: int) -> bytes:
    """Return the first byte of a value at `at` or later; none at the end."""
    blanks = _BEFORE_JSON.match(text, at)
    at = blanks.end() if blanks is not None else at
    return bytes(text[at : at + 1])


def _look_through(body: Buffer) -> None:
    """Search a long body. Raise BodyError if it may name the forbidden field, is malformed or too deeply nested."""
    try:
        body = _in_utf8(body)
        _ANY.decode(body)
    except UNREADABLE as problem:
        raise _unread(problem, "it is long, and no strict JSON") from problem
    if holds(body, _names_forbidden):
        raise BodyError(
            f"it names {TRANSFER_PARAMS}, which only a router sets, and is too long to be read: leave it out"
        )


def _names_forbidden(text: bytes) -> bool:
    return TRANSFER_PARAMS.encode() in text or (b"\\u00" in text and _ESCAPED.search(text) is not None)


def _value(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(body)


def _measure(raw: memoryview, chat: bool) -> tuple[int, int]:
    """Return the number of prompts and the estimated tokens of text, token ids, or a list of either."""
    if chat or bytes(raw[:1]) != b"[":
        return 1, len(raw) // _BYTES_PER_TOKEN + 1
    commas = count(raw, b",")
    if _next(raw, 1) not in (b'"', b"["):
        return 1, commas + 1
    if len(raw) > READ_WHOLE:
        try:
            _SINGLE.decode(raw)
            several = 1
        except msgspec.ValidationError:
            several = max(2, count(raw, b"[") - 1)
        return several, max(commas, len(raw) // _BYTES_PER_TOKEN)
    items = msgspec.json.decode(raw, type=list[msgspec.Raw])
    return len(items), sum(map(_tokens, map(bytes, items)))


def _tokens(raw: bytes) -> int:
    """Return the estimated tokens of text or of token ids. Anything nested deeper is no prompt and not examined."""
    return raw.count(b",") + 1 if raw[:1] == b"[" else len(raw) // _BYTES_PER_TOKEN + 1


def _view(fields: Mapping[str, msgspec.Raw], key: str, default: bytes = b"null") -> memoryview:
    return memoryview(fields.get(key, default))


def _needs_own_prompt(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether a field makes D compute the prompt itself.

    Log-probabilities of the prompt come from computing it; a beam search makes requests of its own.
    """
    if present(fields, "prompt_logprobs") or flag(fields, "use_beam_search") or present(fields, "prompt_embeds"):
        return True
    return flag(fields, "echo") and present(fields, "logprobs")


def present(fields: Mapping[str, msgspec.Raw], key: str) -> bool:
    """Return whether a field is there, and neither null nor false."""
    return _word(fields, key) not in (b"null", b"false")


def _word(fields: Mapping[str, msgspec.Raw], key: str) -> bytes:
    """Return a field's raw value, null if it is absent; of a long one only the first `_SHORT` + 1 bytes."""
    return bytes(memoryview(fields[key])[: _SHORT + 1]) if key in fields else b"null"


# Engines read bodies with pydantic, which accepts more than JSON's own numbers and booleans. The metaserver must read
# them alike, or a request would mean something else here than in the engine.
_TRUE = frozenset({True, "1", "on", "t", "true", "y", "yes"})
_WHOLE = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*(?:\.0+)?")
_SHORT = 64  # bytes of a value that can be a count or a flag


def small(fields: Mapping[str, msgspec.Raw], key: str) -> object:
    """Return a field's decoded value; None if it is absent, long or no JSON."""
    if key not in fields:
        return None
    raw = _word(fields, key)
    try:
        return msgspec.json.decode(raw) if len(raw) <= _SHORT else None
    except UNREADABLE:
        return None


def flag(fields: Mapping[str, msgspec.Raw], key: str) -> bool:
    """Return a field as a boolean, as engines read it."""
    value = small(fields, key)
    value = value.lower() if isinstance(value, str) else value
    return isinstance(value, str | int | float) and value in _TRUE


def _number(fields: Mapping[str, msgspec.Raw], key: str, default: int) -> int:
    """Return a field as a count, for routing only: the engine itself refuses a wrong value."""
    value = small(fields, key)
    if isinstance(value, str):
        text = value.strip()
        value = int(text.partition(".")[0].replace("_", "")) if _WHOLE.fullmatch(text) else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return int(value) if isinstance(value, int) and 0 <= value < 10**9 else default


def model_of(fields: Mapping[str, msgspec.Raw]) -> str:
    """Return the model's name; empty if there is none, or the value cannot be one."""
    raw = fields.get("model", msgspec.Raw(b'""'))
    try:
        return msgspec.json.decode(raw, type=str) if len(memoryview(raw)) <= _MODEL_BYTES else ""
    except UNREADABLE:
        return ""


def _marks(fields: Mapping[str, msgspec.Raw], prompt: memoryview, tokens: int) -> Marks:
    """Return the prompt's marks. They cover tools and documents too, which a template puts before the messages."""
    before: dict[str, Buffer] = {name: _view(fields, name, b"") for name in _BEFORE_PROMPT}
    before["system"] = _BILLING.sub(b"", before["system"])
    return marks_of(before.values(), prompt, tokens)
