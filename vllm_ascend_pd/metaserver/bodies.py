# SPDX-License-Identifier: Apache-2.0
"""What is read from a client's request, and the two bodies that are made of it: D's and P's.

Only the outermost level of the JSON is taken apart; prompts and messages stay the bytes they were, however long.
A client's own `kv_transfer_params` never gets any further than here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
FORBIDDEN = "kv_transfer_params"
_SIDE_DOOR = "vllm_xargs"  # vLLM puts its entries where the forbidden field goes, so it may be in there too

# What msgspec raises for bytes that are not what they should be: it decodes UTF-8 and recurses as Python does.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

MAX_VALUES = 4 << 20  # in a body that is read whole: each takes many times its bytes
_BEFORE_JSON = b" \t\r\n\0\xef\xbb\xbf\xff\xfe"  # white space, and the marks of an encoding
_LONG = 4 << 20  # bytes of a list of prompts that is not taken apart to be measured

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BYTES_PER_TOKEN = 4  # an estimate, for load only
_UNKNOWN_OUTPUT = 256  # tokens assumed when the client sets no limit
_HEAD_BYTES = 2048  # how much of a prompt makes its affinity
# What would make P do more than the prefill, or refuse a request for one token.
_NOT_FOR_PREFILL = (
    *("stream", "stream_options", "min_tokens", "n", "best_of", "echo", "logprobs", "top_logprobs", "prompt_logprobs"),
    *("max_tokens", "max_completion_tokens", "use_beam_search", "stop", "stop_token_ids", "request_id"),
)
# What of a request changes the KV of given token ids.
_BESIDE_TOKENS = ("model", "cache_salt", "priority", "vllm_xargs")


class BodyError(ValueError):
    """The client's body cannot be used; the text says to the client why."""


class Shape(Enum):
    ONE = "one prompt"
    BATCH = "several prompts"


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a client, understood as far as routing needs it."""

    route: str
    fields: Mapping[str, msgspec.Raw]
    stream: bool
    shape: Shape
    copies: int  # transfers that it may bring: prompts × choices
    prefill_tokens: int
    decode_tokens: int
    remote: bool  # a prefill elsewhere serves it; else D must see the whole prompt itself
    send_tokens: bool  # P gets the token ids that D made, not the client's own words
    affinity: bytes


def parse(route: str, body: bytes) -> Request:
    """Raises BodyError for what is not a JSON object or has impossible values where we look at them."""
    fields = parse_fields(body)
    fields.pop(FORBIDDEN, None)
    if _SIDE_DOOR in fields:
        fields[_SIDE_DOOR] = msgspec.Raw(strip(bytes(fields[_SIDE_DOOR])))
    prompt = bytes(fields.get("messages" if route == CHAT else "prompt", b""))
    prompts, tokens = _measure(prompt, chat=route == CHAT)
    shape = Shape.BATCH if prompts > 1 else Shape.ONE
    choices = _number(fields, "n", 1)
    limit = _number(fields, "max_completion_tokens", 0) or _number(fields, "max_tokens", 0) or _UNKNOWN_OUTPUT
    forced_tool = bytes(fields.get("tool_choice", b"null")) not in (b"null", b'"none"', b'"auto"')
    return Request(
        route=route,
        fields=fields,
        stream=_flag(fields, "stream"),
        shape=shape,
        copies=prompts * choices,
        prefill_tokens=tokens,
        decode_tokens=tokens + min(limit, 1 << 20) * min(choices, 1024),
        remote=bool(prompt) and not _needs_own_prompt(fields),
        # A forced tool call is parsed from the answer, and one token of it is no tool call: P gets the ids.
        send_tokens=shape is Shape.BATCH or (route == CHAT and forced_tool),
        affinity=_affinity(fields, prompt),
    )


def parse_fields(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _FIELDS.decode(body)
    except UNREADABLE as problem:
        raise BodyError(f"it is not a JSON object: {problem}") from problem


def for_decode(request: Request, params: Mapping[str, Any] | None) -> bytes:
    """D's body: the client's, and where to ask for a prefill (None: D prefills by itself)."""
    if params is None:
        return msgspec.json.encode(request.fields)
    return msgspec.json.encode({**request.fields, FORBIDDEN: params})


def for_prefill(request: Request, params: Mapping[str, Any], token_ids: Sequence[int] | None) -> tuple[str, bytes]:
    """P's route and body: the same prompt, one token, no stream."""
    if token_ids is not None:
        fields = {key: request.fields[key] for key in _BESIDE_TOKENS if key in request.fields}
        body = {**fields, "prompt": list(token_ids), "max_tokens": 1, "stream": False, FORBIDDEN: params}
        return COMPLETIONS, msgspec.json.encode(body)
    limit = "max_completion_tokens" if request.route == CHAT else "max_tokens"
    kept = {key: value for key, value in request.fields.items() if key not in _NOT_FOR_PREFILL}
    return request.route, msgspec.json.encode({**kept, limit: 1, "n": 1, "stream": False, FORBIDDEN: params})


def strip(body: bytes) -> bytes:
    """Any other JSON body without the forbidden field, also inside a list of requests; unchanged if it has none.

    Engines read bodies with the standard library, which takes more than strict JSON (NaN, UTF-16): what the strict
    decoder refuses is read their way, so that nothing slips through in a form that only they understand.
    """
    if body[:64].lstrip(_BEFORE_JSON)[:1] in (b"[", b"{") and _values(body) > MAX_VALUES:
        raise BodyError("it holds too many values")
    try:
        value = _value(body)
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


def _values(body: bytes) -> int:
    """No fewer than it holds."""
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def _value(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(body)


def _measure(raw: bytes, chat: bool) -> tuple[int, int]:
    """Prompts, and estimated tokens, of what is text, token ids, or a list of either."""
    if not chat and raw[:1] == b"[" and raw[1:64].lstrip()[:1] in (b'"', b"["):
        if len(raw) > _LONG:
            return max(2, raw.count(b"[") - 1), max(raw.count(b","), len(raw) // _BYTES_PER_TOKEN)
        several = msgspec.json.decode(raw, type=list[msgspec.Raw])
        return len(several), sum(_tokens(bytes(item)) for item in several)
    return 1, len(raw) // _BYTES_PER_TOKEN + 1 if chat else _tokens(raw)


def _tokens(raw: bytes) -> int:
    """Of text or of token ids. What is nested deeper is no prompt, and not looked into."""
    return raw.count(b",") + 1 if raw[:1] == b"[" else len(raw) // _BYTES_PER_TOKEN + 1


def _needs_own_prompt(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Log-probabilities of the prompt come from computing it; a beam search makes requests of its own."""
    if _present(fields, "prompt_logprobs") or _flag(fields, "use_beam_search") or _present(fields, "prompt_embeds"):
        return True
    return _flag(fields, "echo") and _present(fields, "logprobs")


def _present(fields: Mapping[str, msgspec.Raw], key: str) -> bool:
    return bytes(fields.get(key, b"null")) not in (b"null", b"false")


def _flag(fields: Mapping[str, msgspec.Raw], key: str) -> bool:
    return bytes(fields.get(key, b"false")) in (b"true", b"1", b'"true"')


def _number(fields: Mapping[str, msgspec.Raw], key: str, default: int) -> int:
    """A count for routing; what is wrong about it the engine will tell the client."""
    raw = bytes(fields.get(key, b""))
    return int(raw) if raw.isdigit() and len(raw) < 10 else default


def _affinity(fields: Mapping[str, msgspec.Raw], prompt: bytes) -> bytes:
    head = bytes(fields.get("model", b"")) + b"\0" + bytes(fields.get("cache_salt", b"")) + b"\0" + prompt[:_HEAD_BYTES]
    return hashlib.blake2b(head, digest_size=16).digest()
