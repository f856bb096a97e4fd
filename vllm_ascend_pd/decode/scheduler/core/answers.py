# SPDX-License-Identifier: Apache-2.0
"""Parsing of the metaserver's answer to a reservation: a stream of JSON lines, or one JSON value at the end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_ascend_pd.errors import CATALOGUE
from vllm_ascend_pd.protocol.continuing import read_so_far
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstToken


@dataclass(frozen=True, slots=True)
class Outcome:
    """One event of a call: `accepted`, once for each P that is asked; then `prefilled` or `failed`, which ends it.

    A question for an answer so far is `told` its tokens, or has `failed`.
    """

    kind: str
    failure: Failure | None = None
    prefill: str = ""
    seconds: float = 0.0
    first: str | FirstToken | None = None  # P's first token; sealed, in base64, if it came through a router
    tokens: tuple[int, ...] = ()  # the answer so far

    @property
    def final(self) -> bool:
        return self.kind != "accepted"


class BadAnswer(ValueError):
    """An answer that cannot be understood; the text says why."""


class Lines:
    """Splitter of a stream into lines of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that are complete, without empty ones. Raise BadAnswer if a line is too long."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > self._max_bytes or any(len(line) > self._max_bytes for line in whole):
            raise BadAnswer("a line of its answer is too long")
        return [line for line in whole if line.strip()]


def outcome(line: bytes) -> Outcome | None:
    """Return the event of one line; None for a heartbeat and for events of later versions. Raise BadAnswer."""
    event = _object(line)
    kind = event.get("event")
    if kind == "accepted":
        return Outcome("accepted", prefill=_words(event.get("prefill", ""))[:300])
    return _final(event) if kind in ("prefilled", "failed") else None


def plain(body: bytes) -> Outcome:
    """Return the outcome of vllm-ascend's form: nothing until the prefill is over, then any JSON or no body."""
    return _final(_object(body) if body.lstrip()[:1] == b"{" else {})


def so_far(body: bytes) -> Outcome:
    """Return the outcome of a question for an answer so far. Raise BadAnswer."""
    try:
        return Outcome("told", tokens=tuple(read_so_far(body).tokens))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise BadAnswer(f"its answer is no list of tokens: {str(problem)[:200]}") from problem


def reason(body: bytes) -> str:
    """Return the message of an error answer, or else the beginning of its body."""
    try:
        return _words(json.loads(body)["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError, RecursionError):
        return body[:200].decode(errors="replace").strip()


def seconds(retry_after: str | None) -> float | None:
    try:
        return float(retry_after) if retry_after else None
    except ValueError:
        return None  # given as a date


def _object(text: bytes) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise BadAnswer(f"a line of its answer is not JSON: {text[:80]!r}") from problem
    if not isinstance(event, dict):
        raise BadAnswer(f"a line of its answer is no object: {text[:80]!r}")
    return event


def _final(event: dict[str, Any]) -> Outcome:
    if event.get("event") == "failed" or event.get("error"):
        detail = event.get("detail") or event.get("error") or ""
        code = event.get("code")
        known = isinstance(code, str) and code in CATALOGUE  # it becomes the label of a metric
        return Outcome("failed", Failure(str(code) if known else "PD-META-006", _words(detail)[:1000]))
    first = event.get("first", "")
    return Outcome(
        "prefilled",
        prefill=_words(event.get("prefill", ""))[:300],
        first=first if isinstance(first, str) and first else None,
    )


def _words(value: object) -> str:
    """Return a text that can be logged and sent on: JSON can hold half of a surrogate pair, UTF-8 cannot."""
    return str(value).encode(errors="replace").decode()
