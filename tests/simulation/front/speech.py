# SPDX-License-Identifier: Apache-2.0
"""A model that gives the same answer after the same tokens, and a server that streams it as vLLM does.

Some tokens are half a character: their text comes with the next token. While a stop string may follow, the server holds
back one character less than its length. An answer may begin with given tokens. If it samples (`dice`), each engine has
its own answers. Of a chat with tools the server makes reasoning, then content, then calls: some tokens lead from one to
the next, and of those nothing is said.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

HALF = 224  # from here on a token is half a character
LAST = 7  # a token with this remainder modulo 32 ends the answer
NEXT = 3  # and one with this modulo 8 leads to the next part of a chat with tools


class Said(NamedTuple):
    """One token, and the text released with it."""

    token: int
    text: str
    finish: str | None = None
    stop_reason: str | None = None


class AnswerOptions(NamedTuple):
    """A request's options for its answer."""

    limit: int
    stop: tuple[str, ...] = ()
    include: bool = False
    least: int = 0

    @classmethod
    def of(cls, body: dict[str, Any], room: int = 64) -> AnswerOptions:
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or (room if "messages" in body else 16)
        stop = body.get("stop") or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(limit, stop, bool(body.get("include_stop_str_in_output")), body.get("min_tokens") or 0)


def speak(
    ids: Sequence[int], options: AnswerOptions, given: Sequence[int] = (), dice: random.Random | None = None
) -> Iterator[Said]:
    """Yield the answer to a prompt, token by token."""
    state = hashlib.sha256(bytes(ids))
    out, released, waiting = "", 0, 0
    longest = max(map(len, options.stop), default=0)
    for number in range(1, options.limit + 1):
        if number <= len(given):
            token = given[number - 1]
        else:
            token = state.digest()[0] if dice is None else dice.randrange(256)
            token += token % 32 == LAST and number <= options.least
        state.update(bytes([token]))
        new = ""
        if token >= HALF:
            waiting += 1
        elif token % 32 != LAST:
            new = "ü" * waiting + f" {token % 26:x}"
            waiting = 0
        out += new
        stop = None
        if new and number > options.least:
            stop = min(((at, s) for s in options.stop if (at := out.find(s, max(0, len(out) - len(new) - len(s) + 1))) >= 0), default=None)  # fmt: skip
        finish = "stop" if stop or token % 32 == LAST else "length" if number == options.limit else None
        if stop:
            out = out[: stop[0] + (len(stop[1]) if options.include else 0)]
        end = len(out) - (0 if finish or options.include or not longest else longest - 1)
        text, released = out[released:end] if end > released else "", max(released, end)
        yield Said(token, text, finish, stop[1] if stop else None)
        if finish:
            return


class Speaker:
    """Writer of one answer as events. `ids` are the prompt's. `given`: tokens with which the answer begins."""

    def __init__(self, body: dict[str, Any], ids: Sequence[int], name: str, given: int = 0) -> None:
        self._given = given
        self.chat = "messages" in body
        self._body, self._ids = body, list(ids)
        self._wants_ids = bool(body.get("return_token_ids"))
        options = body.get("stream_options") or {}
        self._usage = bool(options.get("include_usage"))
        self._always = self._usage and bool(options.get("continuous_usage_stats"))
        self._head = {"id": name, "object": "chat.completion.chunk" if self.chat else "text_completion", "created": len(name), "model": "m"}  # fmt: skip
        self._tokens = self._offset = self._phase = 0

    def opening(self) -> bytes:
        """Return the opening event with the role; nothing for a completion."""
        if not self.chat:
            return b""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._written([choice], prompt_token_ids=self._ids if self._wants_ids else None)

    def event(self, said: Sequence[Said]) -> bytes:
        """Return an event of some tokens, of which only the last can be the end."""
        text, last, ids = "".join(one.text for one in said), said[-1], [one.token for one in said]
        choice: dict[str, Any] = {"index": 0}
        if self._body.get("tools"):
            choice["delta"] = self._parsed(said)
            if not (choice["delta"] or last.finish or self._wants_ids or self._body.get("logprobs")):
                self._tokens += len(ids)
                return b""
        else:
            choice |= {"delta": {"content": text}} if self.chat else {"text": text}
        choice |= {"logprobs": self._logprobs(ids), "finish_reason": last.finish}
        if last.finish or not self.chat:
            choice["stop_reason"] = last.stop_reason
        if not self.chat:
            choice["prompt_token_ids"] = self._ids if self._wants_ids and not self._tokens else None
        choice["token_ids"] = ids if self._wants_ids else None
        self._tokens += len(ids)
        return self._written([choice])

    def _parsed(self, said: Sequence[Said]) -> dict[str, Any]:
        """Return what parsers of reasoning and tool calls make of some tokens."""
        delta: dict[str, Any] = {}
        for one in said:
            number = self._phase - 2
            if one.token % 8 == NEXT and one.token < HALF:
                self._phase, number = self._phase + 1, number + 1
                if number >= 0:
                    call = {"index": number, "id": f"call-{self._head['id']}-{number}", "type": "function"}
                    call["function"] = {"name": f"f{number}", "arguments": ""}
                    delta.setdefault("tool_calls", []).append(call)
            elif number >= 0 and one.text:
                if not delta.get("tool_calls"):
                    delta["tool_calls"] = [{"index": number, "function": {"arguments": ""}}]
                delta["tool_calls"][-1]["function"]["arguments"] += one.text
            elif one.text:
                name = "content" if self._phase else "reasoning"
                delta[name] = delta.get(name, "") + one.text
        return delta

    def end(self) -> bytes:
        usage = self._written([], usage=self._counts()) if self._usage else b""
        return usage + b"data: [DONE]\n\n"

    def _logprobs(self, ids: list[int]) -> dict[str, Any] | None:
        if not self._body.get("logprobs"):
            return None
        tokens, offsets = [f"<{one}>" for one in ids], []
        computed = range(self._tokens, self._tokens + len(ids))  # of a given token there is a placeholder
        chances = [-one / 7 if at >= self._given else 0.0 for at, one in zip(computed, ids, strict=True)]
        if self.chat:
            rows = zip(tokens, chances, strict=True)
            return {"content": [{"token": one, "logprob": c, "bytes": [1], "top_logprobs": []} for one, c in rows]}
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        top = [{token: chance} for token, chance in zip(tokens, chances, strict=True)]
        return {"text_offset": offsets, "token_logprobs": chances, "tokens": tokens, "top_logprobs": top}

    def _counts(self) -> dict[str, int]:
        prompt, answer = len(self._ids), self._tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}

    def _written(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        said = {**self._head, "choices": choices, **more}
        if self._always and choices:
            said["usage"] = self._counts()
        return b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


def understood(stream: bytes) -> dict[str, Any]:
    """Parse a stream as a client does.

    Raise ValueError if it contradicts itself, has no end, or continues after an error.
    """
    *events, last = [line.removeprefix("data: ") for line in stream.decode().split("\n\n")[:-1]] or [""]
    if last != "[DONE]":
        raise ValueError("no end")
    answer: dict[str, Any] = {
        "text": "",
        "ids": [],
        "offsets": [],
        "chances": [],
        "forms": set(),
        "finish": None,
        "prompts": 0,
        "roles": 0,
        "reasoning": "",
        "tools": {},
    }
    heads, error = set(), None
    for event in map(json.loads, events):
        if error is not None:
            raise ValueError("it goes on after an error")
        if "error" in event:
            error = event["error"]
            continue
        heads.add((event["id"], event["object"], event["created"], event["model"]))
        answer["prompts"] += bool(event.get("prompt_token_ids"))
        if not event["choices"]:
            answer["usage"] = event["usage"]
        for choice in event["choices"]:
            if answer["finish"] is not None:
                raise ValueError("it goes on after its end")
            _take(answer, choice, event.get("usage"))
    if len(heads) > 1:
        raise ValueError(f"events of several answers: {heads}")
    return answer | ({"error": error} if error is not None else {})


def _take(answer: dict[str, Any], choice: dict[str, Any], usage: dict[str, int] | None) -> None:
    delta = choice.get("delta") or {}
    answer["text"] += choice["text"] if "text" in choice else delta.get("content") or ""
    answer["reasoning"] += delta.get("reasoning") or ""
    answer["roles"] += "role" in delta
    for call in delta.get("tool_calls", ()):
        if ("id" in call) == (call["index"] in answer["tools"]):
            raise ValueError("a call of a tool has no id, or two")
        name, arguments = answer["tools"].get(call["index"], ("", ""))
        function = call["function"]
        answer["tools"][call["index"]] = name + function.get("name", ""), arguments + function.get("arguments", "")
    answer["ids"] += choice.get("token_ids") or []
    answer["prompts"] += bool(choice.get("prompt_token_ids"))
    answer["forms"].add("|".join(sorted(choice.keys() - {"stop_reason"})))
    if choice["finish_reason"] is not None:
        answer["finish"] = choice["finish_reason"], choice.get("stop_reason")
    if choice["logprobs"] and "content" in choice["logprobs"]:
        answer["chances"] += [row["logprob"] for row in choice["logprobs"]["content"]]
    elif choice["logprobs"]:
        answer["offsets"] += choice["logprobs"]["text_offset"]
        answer["chances"] += choice["logprobs"]["token_logprobs"]
    if usage and choice.get("token_ids") and usage["completion_tokens"] != len(answer["ids"]):
        raise ValueError("its usage is of another moment")


def right_stream(body: dict[str, Any], ids: Sequence[int], room: int, tokens: Sequence[int] = ()) -> bytes:
    """Return the stream of a single engine, whose answer begins with `tokens`."""
    speaker = Speaker(body, ids, "one")
    events = [speaker.event([said]) for said in speak(ids, AnswerOptions.of(body, room - len(ids)), tokens)]
    return b"".join((speaker.opening(), *events, speaker.end()))
