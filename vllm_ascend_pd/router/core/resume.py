# SPDX-License-Identifier: Apache-2.0
"""State of a stream that lets another D continue it, and the way to make that D's answer the rest of this one.

Pure: bytes of whole events in, bytes for the client out. `StreamState.take` works in two ways. Events of the first D
pass as they came, except for token ids that the client did not ask for. Of a later D only what the client has not seen
passes, in the form and with the counts of the first D: a later D's prompt contains a part of the answer. It generates
from a `Point` that may lie before the last token, because text may have been held back there.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from vllm_ascend_pd.router.core.bodies import UNREADABLE, Request
from vllm_ascend_pd.router.core.resumable import NotContinued, ResumableRequest, continued

MAX_AGAIN = 256  # most tokens that are generated again, from a point where no text was held back
_OVERHEAD = 2048  # bytes of a kept stream, beside its ids
_DONE = b"data: [DONE]"
_DATA = b"data: "
# In the engine's JSON: within a string these quotes would be escaped. The list holds numbers only, no other list.
_IDS = re.compile(rb'("token_ids"\s*:\s*)\[[0-9,\s]*\]')
_KEY = b'"token_ids":['
_PROMPT_KEY = b'"prompt_token_ids"'
_PROMPT_IDS = re.compile(rb'"prompt_token_ids"\s*:\s*\[')
_NULL = msgspec.Raw(b"null")
_RECOMPUTED = "recomputed"  # `stop_reason` of a request that D has dropped
_STOP_BYTES = 64 << 10  # longer stop strings are not looked through


def stops_at_recomputed(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether the word for a dropped request is a stop string of the client, which vLLM reports in its place."""
    raw = fields.get("stop", _NULL)
    try:
        stop = msgspec.json.decode(raw) if len(memoryview(raw)) <= _STOP_BYTES else None
    except UNREADABLE:
        return False
    return stop == _RECOMPUTED or (isinstance(stop, list) and _RECOMPUTED in stop)


class Cut(Enum):
    """Reason that D itself gave for ending a stream early."""

    DROPPED = "it had no block for the next token"
    ABORTED = "it is shutting down"
    FAILED = "it said that it failed"


class Point(NamedTuple):
    """A count of tokens after which another D can continue: behind `tokens` tokens no text was held back.

    The text of those tokens has `text` characters; their log-probabilities cover `offset` characters.
    """

    tokens: int = 0
    text: int = 0
    offset: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    role: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    text_offset: list[int] = []


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = _NULL
    logprobs: msgspec.Raw = _NULL
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _AnswerError(msgspec.Struct):
    code: int | str | None = None


class _AnswerEvent(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[_Choice] = []
    prompt_token_ids: msgspec.Raw = _NULL
    error: _AnswerError | None = None


_EVENT = msgspec.json.Decoder(_AnswerEvent)
_LOGPROBS = msgspec.json.Decoder(_Logprobs | None)


class StreamState:
    """State of one stream that another D needs to continue it. `max_length`: limit of tokens of prompt and answer."""

    def __init__(self, original: ResumableRequest, max_length: int) -> None:
        self.original = original
        self.times = 0  # continuations so far
        self.ids = array("I")
        self.finished = self.done = False
        self.cut: Cut | None = None
        self._max_length = max_length
        self._stops_at_recomputed = stops_at_recomputed(original.fields)
        self._unfit = ""
        self._prompt, self._prompt_tokens = b"", 0
        self._head: dict[str, Any] = {}
        self._answer = 0  # tokens that the client has
        self._released = 0  # characters of text that the client has
        self._offset = 0
        self._marks = deque([Point()])  # where no text was held back: the last ones, that may be needed
        self._usage_sent = False
        # Of a later D: where it began, the tokens that it must repeat, and how much of its text the client has.
        self._from = Point()
        self._again: list[int] = []
        self._skip = 0

    @property
    def size(self) -> int:
        """Estimated bytes of memory."""
        return _OVERHEAD + self.original.size + len(self._prompt) + 4 * len(self.ids) + 128 * len(self._marks)

    def give_up(self, why: str) -> None:
        """Keep nothing of the stream any more: it cannot be continued. The client still gets it as it comes."""
        self._unfit = self._unfit or why
        self._prompt, self.ids = b"", array("I")
        self._marks.clear()

    @property
    def unfit(self) -> str:
        """Reason that the stream cannot be continued; empty if it can."""
        return self._unfit or ("" if self._prompt else "its D returns no token ids")

    @property
    def first(self) -> bool:
        """True while the first D answers."""
        return self.times == 0

    # -- from one D to the next

    def point(self) -> Point:
        """Return where to go on. Raise NotContinued."""
        if self.unfit:
            raise NotContinued(self.unfit)
        # A stop string that is completed later begins at most `stop` characters before the end of the text so far,
        # which is what D has released and the `held` characters that it may hold back.
        latest = self._released + self.original.held - self.original.stop
        found = next((mark for mark in reversed(self._marks) if mark.text <= latest or not mark.tokens), None)
        if found is None or len(self.ids) - found.tokens > MAX_AGAIN:
            raise NotContinued(
                f"D held text back, or sent several tokens in each event (--stream-interval), for over {MAX_AGAIN} tokens"
            )
        return found

    def next_request(self, room: int) -> Request:
        """Return the request for another D, whose events `take` expects next. `room`: see `continued`.

        Raise NotContinued.
        """
        point = self.point()
        request = continued(self.original, self._prompt, self._prompt_tokens, self.ids, point.tokens, room)
        self._from, self._again = point, list(self.ids[point.tokens :])
        self._skip = max(0, self._released - point.text)
        self.cut = None
        self.times += 1
        return request

    def ending(self) -> bytes:
        """Return the rest of a stream whose last token is out: usage, if it was asked for, and the end."""
        said = b""
        if self.original.usage and not self._usage_sent:
            prompt, answer = self._prompt_tokens, self._answer
            usage = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
            said = _written({**self._head, "choices": [], "usage": usage})
        return said + _DONE + b"\n\n"

    # -- events

    def take(self, stream: bytes) -> bytes:
        """Return what the client gets of whole events, up to one that cuts the stream.

        Raise NotContinued if a later D's answer does not match the first D's.
        """
        out: list[bytes] = []
        for event in stream.split(b"\n\n"):
            if not event.strip():
                continue
            if event.startswith(_DONE):
                self.done = True
                out.append(event + b"\n\n")
            elif not event.startswith(_DATA):
                out.append(event + b"\n\n")
            else:
                rewritten = self._event(event)
                if self.cut is not None:
                    break
                out.append(rewritten)
        return b"".join(out)

    def _event(self, event: bytes) -> bytes:
        try:
            read = _EVENT.decode(event[len(_DATA) :])
        except UNREADABLE:
            if not self.first:
                raise NotContinued("an event of the other D is not understood") from None
            self.give_up("an event of its D is not understood")
            return event + b"\n\n"
        if read.error is not None:
            if not isinstance(read.error.code, int) or read.error.code >= 500:
                self.cut = Cut.FAILED
            return event + b"\n\n"
        choice = read.choices[0] if read.choices else None
        if choice is not None:
            if choice.stop_reason == _RECOMPUTED and not self._stops_at_recomputed:
                self.cut = Cut.DROPPED
            elif choice.finish_reason == "abort":
                self.cut = Cut.ABORTED
            if self.cut is not None:
                return b""
        else:
            self._usage_sent = True
        if not self.first:
            return self._later(event, choice)
        if not self._unfit:
            if not self._prompt or not self._head:
                self._note_head(read, choice)
            self._note(choice, len(read.choices))
        return self._as_asked(event, choice)

    def _note_head(self, read: _AnswerEvent, choice: _Choice | None) -> None:
        if not self._head:
            form = "chat.completion.chunk" if self.original.chat else "text_completion"
            self._head = {"id": read.id, "object": form, "created": read.created, "model": read.model}
        if not self._prompt:
            ids = memoryview(read.prompt_token_ids)
            if choice is not None and bytes(ids[:1]) != b"[":
                ids = memoryview(choice.prompt_token_ids)
            if bytes(ids[:1]) == b"[" and len(ids) > 2:
                self._prompt = bytes(ids[1:-1])
                self._prompt_tokens = self._prompt.count(b",") + 1

    def _note(self, choice: _Choice | None, count: int) -> None:
        """Take in an event of the first D."""
        if choice is None:
            return
        if count != 1 or choice.index != 0:
            self.give_up("it has several choices")
            return
        text, delta = choice.text or "", choice.delta
        if delta is not None:
            text = delta.content or ""
            if (
                delta.reasoning
                or delta.reasoning_content
                or delta.tool_calls
                or (choice.token_ids and delta.content is None)
            ):
                self.give_up("what parses its answer has a state")
                return
        if choice.token_ids is None and text:
            self.give_up("its D returns no token ids")
            return
        tokens = choice.token_ids or []
        self._count(tokens, text, choice, bool(text) and len(tokens) == 1)

    def _count(self, tokens: list[int], text: str, choice: _Choice, single: bool) -> None:
        """Count what goes to the client. `single`: one token with text, so no part of a character waits for more."""
        self.ids.extend(tokens)
        self._answer += len(tokens)
        self._released += len(text)
        self.finished = self.finished or choice.finish_reason is not None
        if self._prompt_tokens + self._answer > self._max_length:
            self.give_up(f"it has more than {self._max_length} tokens")
            return
        if (
            self.original.fields.get("logprobs") is not None
            and (logprobs := _LOGPROBS.decode(choice.logprobs))
            and logprobs.tokens
        ):
            self._offset = (
                logprobs.text_offset[-1] + len(logprobs.tokens[-1]) + (0 if self.first else self._from.offset)
            )
        if not single:
            return
        self._marks.append(Point(len(self.ids), self._released + self.original.held, self._offset))
        latest = self._released + self.original.held - self.original.stop
        while len(self._marks) > 1 and self._marks[1].text <= latest:
            self._marks.popleft()

    def _as_asked(self, event: bytes, choice: _Choice | None) -> bytes:
        """Return the event without token ids, unless the client asked for them.

        A chat's parser that waits for more text sends events with nothing but ids: those are left out.
        """
        if not self.original.asked_ids:
            if choice is not None and choice.token_ids:
                if choice.delta == _Delta() and choice.finish_reason is None and bytes(choice.logprobs) == b"null":
                    return b""
                event = _without(event)
            if _PROMPT_KEY in event:
                event = _without_prompt(event)
        return event + b"\n\n"

    # -- what a later D says

    def _later(self, event: bytes, choice: _Choice | None) -> bytes:
        said = msgspec.json.decode(event[len(_DATA) :])
        said |= self._head
        said.pop("metrics", None)  # they cover only this D's part
        if said.get("usage"):
            self._correct(said["usage"])
        if choice is None:
            return _written(said)
        tokens = choice.token_ids
        if tokens is None or len(said["choices"]) != 1:
            raise NotContinued("the other D returns no token ids")
        again = min(len(tokens), len(self._again))
        if tokens[:again] != self._again[:again]:
            raise NotContinued("the other D computes other tokens")
        del self._again[:again]
        if choice.finish_reason is not None and self._again:
            raise NotContinued("the other D ends it earlier")
        text, seen = choice.text or "", min(self._skip, len(choice.text or ""))
        self._skip -= seen
        if self._skip and (len(tokens) > again or choice.finish_reason is not None):
            raise NotContinued("the other D writes the same tokens otherwise")
        single = bool(text) and len(tokens) == 1 and not again
        text, tokens = text[seen:], tokens[again:]
        if not (text or tokens or choice.finish_reason is not None):
            return b""
        if not self._unfit:
            self._count(tokens, text, choice, single)
        said["choices"] = [self._framed(said["choices"][0], choice, text, tokens, again)]
        return _written(said)

    def _framed(
        self, written: dict[str, Any], choice: _Choice, text: str, tokens: list[int], again: int
    ) -> dict[str, Any]:
        ids = tokens if self.original.asked_ids else None
        if self.original.chat:
            framed = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": choice.finish_reason}
            return framed | ({"stop_reason": choice.stop_reason} if choice.finish_reason else {}) | {"token_ids": ids}
        written |= {"text": text, "prompt_token_ids": None, "token_ids": ids}
        if written.get("logprobs"):
            lists = {name: values[again:] for name, values in written["logprobs"].items() if values is not None}
            lists["text_offset"] = [at + self._from.offset for at in lists["text_offset"]]
            written["logprobs"] = lists
        return written

    def _correct(self, usage: dict[str, Any]) -> None:
        """Move the answer's tokens in this D's prompt from the prompt's count to the answer's."""
        usage["prompt_tokens"] -= self._from.tokens
        usage["completion_tokens"] += self._from.tokens
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])


def _without(event: bytes) -> bytes:
    """Return the event with null for the answer's ids. vLLM's own spacing is the fast way; the pattern takes any."""
    at = event.rfind(_KEY)
    if at < 0:
        return _IDS.sub(rb"\1null", event)
    at += len(_KEY)
    return event[: at - 1] + b"null" + event[event.index(b"]", at) + 1 :]


def _without_prompt(event: bytes) -> bytes:
    found = _PROMPT_IDS.search(event)
    if found is None:
        return event
    end = event.index(b"]", found.end()) + 1
    return event[: found.end() - 1] + b"null" + event[end:]


def _written(said: dict[str, Any]) -> bytes:
    return _DATA + msgspec.json.encode(said) + b"\n\n"
