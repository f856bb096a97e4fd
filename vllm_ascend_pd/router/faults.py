# SPDX-License-Identifier: Apache-2.0
"""Errors as a client gets them: OpenAI's format, a status that says what happened, a header that says when to retry."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_ascend_pd.errors import CATALOGUE, PdError
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.router.core.bodies import MESSAGES, RESPONSES, UNREADABLE
from vllm_ascend_pd.shared.http_session import Headers

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowed",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLarge",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: ours, or an engine's error passed on."""

    status: int
    body: bytes
    headers: Headers = field(default_factory=list)
    content_type: bytes = b"application/json"


class _RefusalError(msgspec.Struct):
    type: str = ""
    code: Any = None
    message: Any = ""


class _Refusal(msgspec.Struct):
    error: _RefusalError


_REFUSAL = msgspec.json.Decoder(_Refusal)
# In a stream of messages vLLM says only that it could not read the error event of the chat below it, of which it quotes
# begin and end, some 50 characters. A text that has more may be a client's, and would be searched anew from each begin.
_QUOTED = re.compile(r"input_value=\{'error': .{0,200}?'code': ([45][0-9]{2})\}\}")


def brief(status: int, body: bytes) -> str:
    """Return status and kind of an engine's error, without its message, which may quote the prompt."""
    try:
        kind = _REFUSAL.decode(body).error.type
    except UNREADABLE:
        kind = ""
    return f"answered {status}" + (f" ({kind})" if kind.isidentifier() and len(kind) <= 64 else "")


def status_of(body: bytes) -> int:
    """Return the status that an engine's error has in its body, where its head has another; 500 if there is none."""
    try:
        error = _REFUSAL.decode(body).error
    except UNREADABLE:
        return 500
    code, quoted = error.code, _QUOTED.search(error.message) if isinstance(error.message, str) else None
    if code is None and quoted is not None:
        code = int(quoted[1])
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def remedy(code: str) -> str:
    """Return the catalogue's remedy, if it needs no values."""
    entry = CATALOGUE.get(code)
    return entry.remedy if entry is not None and "{" not in entry.remedy else "See docs/errors.md."


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    error = {"message": message, "type": kind, "param": None, "code": code or status}
    return msgspec.json.encode({"error": error, "type": "error"})  # the latter is for clients of Anthropic's API


def fault(status: int, message: str, code: str | None = None, retry_after_s: float | None = None) -> Answer:
    headers: Headers = []
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(retry_after_s))).encode()))
    return Answer(status, error_body(status, message, code), headers)


def known(status: int, code: str, retry_after_s: float | None = None, **values: object) -> Answer:
    """Return the answer for an error of the catalogue."""
    return fault(status, PdError(code, **values).sentence, code, retry_after_s)


def json_answer(value: Any, status: int = 200) -> Answer:
    return Answer(status, msgspec.json.encode(value))


def error_frame(noted: Failure, route: str, number: int = 0) -> bytes:
    """Return the end of a stream that broke after its first byte. `number`: of the event, where events have numbers."""
    code, message = noted.code, noted.detail
    body = error_body(502, message, code)
    if route == RESPONSES:
        fields = {"code": code, "message": message, "param": None, "sequence_number": number, "type": "error"}
        body = msgspec.json.encode(fields)
    if route in (RESPONSES, MESSAGES):
        return b"event: error\ndata: " + body + b"\n\n"
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"
