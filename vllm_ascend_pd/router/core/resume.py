# SPDX-License-Identifier: Apache-2.0
"""State that another D needs to go on with an answer; its stream becomes the rest of the one that the client has.

Pure: bytes of whole events in, bytes for the client out. The other D gets the same body, asks for the tokens so far
and begins with them, so its stream repeats what the client has. `StreamState.take` passes the first D's events as they
came, but for token ids that the client did not ask for, and of a later D's what lies beyond.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from vllm_ascend_pd.protocol.auth import prompt_hash
from vllm_ascend_pd.protocol.continuing import TokenId
from vllm_ascend_pd.router.core import bodies
from vllm_ascend_pd.router.core.accumulated import IDS, Accumulated, NotContinued, RepeatedAnswer, Row
from vllm_ascend_pd.router.core.bodies import CHAT, COMPLETIONS, UNREADABLE, Request, Shape
from vllm_ascend_pd.router.core.pieces import Buffer

MAX_TIMES = 8  # that one answer goes on, but for drops behind new tokens
MAX_STUCK = 3  # D's in a row that break without a new token: a request that kills each D must not meet them all
_BEHIND = 256  # tokens after which a D that repeats an answer must have said all that the client has
_BODY_BYTES = 8 << 20  # of the longest body that is kept
_OVERHEAD = 2048  # bytes of a kept answer, beside its parts
_DONE = b"data: [DONE]"
_DATA = b"data: "
_IDS = b'token_ids":['  # the end of two names; other spaces are another server's
_SPACED_IDS = re.compile(rb'(token_ids"\s*:\s*)\[[^]]*\]')
RECOMPUTED = "recomputed"  # `stop_reason` of a request that D has dropped
_STOP_BYTES = 64 << 10  # longer stop strings are not looked through
_INCLUDED_BYTES = 1 << 12  # of the list of what a response is to have, which has six words
_NULL = msgspec.Raw(b"null")
# Parts of a choice that grow, and what they are when nothing of them is new.
_PARTS: dict[str, Any] = {"text": "", "delta": {}, "logprobs": None, IDS: []}


def stops_at_recomputed(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether the word for a dropped request is a stop string of the client, which vLLM reports in its place."""
    raw = fields.get("stop", fields.get("stop_sequences", _NULL))
    try:
        stop = msgspec.json.decode(raw) if len(memoryview(raw)) <= _STOP_BYTES else None
    except UNREADABLE:
        return False
    return stop == RECOMPUTED or (isinstance(stop, list) and RECOMPUTED in stop)


def refusal(request: Request) -> str:
    """Return why no other D can go on with a request's answer; empty if one can. This is all that does not go on."""
    fields = request.fields

    def asks(name: str, *harmless: object) -> bool:
        return name in fields and bodies.small(fields, name) not in harmless

    typed = request.route not in (COMPLETIONS, CHAT)
    reasons = {
        f"vLLM returns no token ids of a whole answer on {request.route}": typed and not request.stream,
        "it follows on an answer that one D has": typed and bodies.present(fields, "previous_response_id"),
        "it runs in the background, or tools of its D's": request.asks_again or bodies.flag(fields, "background"),
        "it asks for log-probabilities, which its last events repeat": typed and _has_rows(fields),
        "it has several prompts": request.shape is not Shape.ONE,
        "it has several choices, which come in any order": request.copies > 1 or asks("best_of", None, 1),
        "it is a beam search, which has no tokens before its end": bodies.flag(fields, "use_beam_search"),
        "it repeats the prompt": bodies.flag(fields, "echo"),
        "it asks for the prompt's own log-probabilities": asks("prompt_logprobs", None),
        "its prompt is more than tokens": request.has_media or asks("prompt_embeds", None),
        "its body is too long to be kept": request.size > _BODY_BYTES,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _has_rows(fields: Mapping[str, msgspec.Raw]) -> bool:
    raw = fields.get("include", _NULL)
    return len(memoryview(raw)) > _INCLUDED_BYTES or "logprobs" in str(msgspec.json.decode(raw))


def has_generator(request: Request) -> bool:
    """Return whether a request has a random generator of its own, which no other D can take over."""
    return bodies.small(request.fields, "seed") is not None and is_sampled(request)


def is_sampled(request: Request) -> bool:
    """Return whether a D that begins anew would answer otherwise."""
    return bodies.small(request.fields, "temperature") != 0


class Cut(Enum):
    """Reason that D itself gave for ending a stream early."""

    DROPPED = "it had no block for the next token"
    ABORTED = "it is shutting down"
    FAILED = "it said that it failed"


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: dict[str, Any] | None = None
    logprobs: dict[str, list[Row | str | float | None] | None] | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _AnswerError(msgspec.Struct):
    code: int | str | None = None


class _AnswerEvent(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[_Choice] = []
    prompt_token_ids: list[TokenId] | None = None
    error: _AnswerError | None = None

    @property
    def prompt(self) -> list[TokenId] | None:
        """Ids of the prompt, which the first event has."""
        of_prompt = self.prompt_token_ids
        return self.choices[0].prompt_token_ids if of_prompt is None and self.choices else of_prompt


_EVENT = msgspec.json.Decoder(_AnswerEvent)


class StreamState:
    """State of one answer that another D needs to go on with it. `max_length`: limit of tokens of prompt and answer."""

    reports = False  # D has to put token ids between the events

    def __init__(self, request: Request, max_length: int) -> None:
        self._first = True  # the first D answers
        self.times = 0  # that it was to go on
        self._stuck = 0  # of these, the last ones in a row without a new token
        self.given = 0  # tokens with which the D that answers begins
        self.finished = self.done = False
        self.cut: Cut | None = None
        self.number = 0  # of the next event, where events have numbers
        fields = request.fields
        self._chat, self._body = request.route == CHAT, request.size
        self.asked_ids = bodies.flag(fields, "return_token_ids")
        options = bodies.small(fields, "stream_options")
        self._usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._stops_at_recomputed = stops_at_recomputed(fields)
        self._seeded = has_generator(request)
        self._max_length = max_length
        self._unfit = ""
        self._prompt = array("I")
        self._head: dict[str, Any] = {}
        self._seen = Accumulated()
        self._answer = 0  # tokens that the client has
        self._repeats: RepeatedAnswer | None = None
        self._said = 0  # tokens of the D that repeats the answer
        self._not_passed: list[dict[str, Any]] = []  # what lies beyond in some part, while another is still repeated

    @property
    def size(self) -> int:
        """Estimated bytes of memory."""
        return _OVERHEAD + self._body + self._seen.size + 4 * (len(self._prompt) + len(self._seen.ids))

    @property
    def ids(self) -> array[int]:
        """Tokens of the answer so far."""
        return self._seen.ids

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self._prompt) + self._answer

    @property
    def moved(self) -> bool:
        """Return whether the D that answers has said more than the tokens that it was given."""
        return self._answer > self.given or self.done

    @property
    def unfit(self) -> str:
        """Reason that no other D can go on; empty if one can."""
        return self._unfit or ("" if self._prompt else "its D returns no token ids")

    @property
    def gave_up(self) -> bool:
        return bool(self._unfit)

    def give_up(self, why: str) -> None:
        """Keep nothing of the answer any more. The client still gets it as it comes."""
        self._unfit = self._unfit or why
        self._prompt, self._seen, self._body = array("I"), self._seen.names(), 0

    # -- from one D to the next

    def go_on(self) -> bool:
        """Expect the stream of another D from `take`. Return whether tokens came since the last time.

        Raise NotContinued.
        """
        if self.unfit:
            raise NotContinued(self.unfit)
        came = self.moved
        self._stuck = 0 if came else self._stuck + 1
        if self._stuck == MAX_STUCK:
            raise NotContinued(f"{MAX_STUCK} D's broke off without a new token")
        if not (came and self.cut is Cut.DROPPED):
            if self.times == MAX_TIMES:
                raise NotContinued(f"it went on {MAX_TIMES} times")
            self.times += 1
        self._first, self.given, self.cut = False, len(self.ids), None
        self._repeats, self._not_passed, self._said = RepeatedAnswer(self._seen), [], 0
        return came

    def tokens(self, prompt: str) -> list[int] | None:
        """Return the tokens with which D begins; None if its prompt, of which this is the hash, is another one."""
        if not self.given:
            return []
        return list(self.ids[: self.given]) if prompt == prompt_hash(self._prompt) else None

    def take_whole(self, answer: Buffer) -> bool:
        """Take in a whole answer that D has dropped. Return whether another one can go on behind it, by new tokens."""
        had, self._seen, self._prompt, self._answer, self.given = self.given, Accumulated(), array("I"), 0, 0
        try:
            read = _EVENT.decode(answer)
        except UNREADABLE:
            return False
        if any(choice.logprobs is not None for choice in read.choices):
            return False  # another D has placeholders for those of tokens that it was given, and nobody has these
        self._note(read)
        self.finished = False
        if not self.unfit:
            self.given = len(self.ids)
        return self.given > had

    def ending(self) -> bytes:
        """Return the rest of a stream whose last token is out: usage, if it was asked for, and the end."""
        said = b""
        if self._usage:
            prompt, answer = len(self._prompt), self._answer
            usage = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
            form = "chat.completion.chunk" if self._chat else "text_completion"
            said = _DATA + msgspec.json.encode({**self._head, "object": form, "choices": [], "usage": usage}) + b"\n\n"
        return said + _DONE + b"\n\n"

    # -- events

    def take(self, stream: bytes) -> bytes:
        """Return what the client gets of whole events, up to one that cuts the stream.

        Raise NotContinued if a later D's answer does not begin with what the client has.
        """
        # One event, as nearly always. To look for two bytes takes five times as long.
        if 0 < stream.find(b"\n") == len(stream) - 2 and stream.endswith(b"\n\n"):
            return self._taken(stream[:-2])
        out: list[bytes] = []
        for event in stream.split(b"\n\n"):
            if event.strip():
                out.append(self._taken(event))
                if self.cut is not None:
                    break
        return b"".join(out)

    def _taken(self, event: bytes) -> bytes:
        """Return what the client gets of an event."""
        if event.startswith(_DATA) and not event.startswith(_DONE):
            return self._event(event)
        if event.startswith(_DONE):
            if self._repeats is not None and not self._repeats.caught_up:
                raise NotContinued("the other D ends it earlier")
            self.done = True
        return event + b"\n\n"

    def _not_understood(self, event: bytes) -> bytes:
        if not self._first:
            raise NotContinued("an event of the other D is not understood")
        self.give_up("an event of its D is not understood")
        return event + b"\n\n"

    def _cut_by(self, finish: str, stop: int | str | None) -> Cut | None:
        """Return how D itself cuts the answer by the reasons of its end, if it does."""
        if stop == RECOMPUTED and not self._stops_at_recomputed:
            return Cut.DROPPED
        return Cut.ABORTED if finish == "abort" else None

    def _event(self, event: bytes) -> bytes:
        try:
            read = _EVENT.decode(event[len(_DATA) :])
        except UNREADABLE:
            return self._not_understood(event)
        if read.error is not None:
            if not isinstance(read.error.code, int) or read.error.code >= 500:
                self.cut = Cut.FAILED
                return b""
            return event + b"\n\n"
        choice = read.choices[0] if read.choices else None
        if choice is not None and choice.finish_reason is not None:
            self.cut = self._cut_by(choice.finish_reason, choice.stop_reason)
            if self.cut is not None:
                return b""
        if not self._first:
            return self._later(event, read)
        if not self._unfit:
            self._note(read)
        return self._as_asked(event, read)

    def _note(self, read: _AnswerEvent) -> None:
        """Take in what goes to the client."""
        choice = read.choices[0] if read.choices else None
        if not self._prompt:
            self._head = self._head or {"id": read.id, "created": read.created, "model": read.model}
            self._prompt = array("I", read.prompt or ())
        if choice is None:
            self._usage = False
            return
        if len(read.choices) != 1 or choice.index:
            self.give_up("it has several choices")
        elif choice.token_ids is None and (
            choice.text or any(v for k, v in (choice.delta or {}).items() if k != "role")
        ):
            self.give_up("its D returns no token ids")
        else:
            self.finished = self.finished or choice.finish_reason is not None
            seen, ids = self._seen, choice.token_ids or ()
            seen.ids.extend(ids)
            self._answer += len(ids)
            if choice.delta is not None:
                seen.take(choice.delta, ("delta",))
            if choice.text is not None:
                seen.take({"text": choice.text})
            if choice.logprobs is not None:
                seen.take(choice.logprobs, ("logprobs",))
            if len(self._prompt) + self._answer > self._max_length:
                self.give_up(f"it has more than {self._max_length} tokens")

    def _as_asked(self, event: bytes, read: _AnswerEvent) -> bytes:
        """Return the event without token ids, unless the client asked for them.

        A chat's parser that waits for more text sends events with nothing but ids: those are left out.
        """
        if not self.asked_ids:
            choice = read.choices[0] if read.choices else None
            swallowed = choice is not None and choice.delta == {} and choice.token_ids
            if choice is not None and swallowed and choice.finish_reason is None and choice.logprobs is None:
                return b""
            event = without_ids(event, several=read.prompt is not None or len(read.choices) > 1)
        return event + b"\n\n"

    # -- what a later D says

    def _later(self, event: bytes, read: _AnswerEvent) -> bytes:
        said = msgspec.json.decode(event[len(_DATA) :])
        said |= {name: value for name, value in self._head.items() if name in said}
        self._take_metrics(said)
        if read.prompt and self._prompt and array("I", read.prompt) != self._prompt:
            raise NotContinued("the prompt is another one there")
        if self._repeats is not None and self._repeats.caught_up:
            self._repeats = None
        repeats, choice = self._repeats, said["choices"][0] if read.choices else {}
        parts = {name: choice[name] for name in _PARTS if choice.get(name) is not None}
        if repeats is None:
            choice |= self._seen.renamed(parts)
            return self._passed(said)
        beyond, ends = repeats.beyond(parts), choice.get("finish_reason") is not None
        self._said += len(choice.get(IDS) or ())
        if self._said > self.given + _BEHIND and not repeats.caught_up:
            raise NotContinued("the other D does not say what the client has")
        if ends and not repeats.caught_up:
            raise NotContinued("the other D ends it earlier")
        if beyond or (ends and not self.finished):
            choice |= {name: _PARTS[name] for name in parts} | beyond
            if "prompt_token_ids" in choice:
                choice["prompt_token_ids"] = None
            self._not_passed.append(said)
        if not repeats.caught_up:
            return b""
        events, self._not_passed, self._repeats = self._not_passed, [], None
        return b"".join(map(self._passed, events))

    def _take_metrics(self, said: dict[str, Any]) -> None:
        """Leave out metrics, which cover a later D's part alone, but say whether a generator began anew."""
        if said.pop("metrics", None) is not None and self._seeded and self.given:
            said["metrics"] = {"generator_began_anew": True}

    def _passed(self, said: dict[str, Any]) -> bytes:
        """Let an event go to the client, as if the first D had written it."""
        event = _DATA + msgspec.json.encode(said)
        read = _EVENT.decode(event[len(_DATA) :])
        if not self._unfit:
            self._note(read)
        return self._as_asked(event, read)


def without_ids(said: bytes, *, several: bool = True) -> bytes:
    """Return an engine's JSON with null for each list of token ids. Within a string its quotes would be escaped."""
    at = said.rfind(_IDS)  # near the end of an event, which has one
    if at < 0:
        return _SPACED_IDS.sub(rb"\1null", said)
    if not several or said.find(_IDS, 0, at) < 0:
        at += len(_IDS) - 1
        return said[:at] + b"null" + said[said.index(b"]", at) + 1 :]
    first, *parts = said.split(_IDS)
    return _IDS[:-1].join((first, *(b"null" + part[part.index(b"]") + 1 :] for part in parts)))
