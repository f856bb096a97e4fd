# SPDX-License-Identifier: Apache-2.0
"""Streams of responses and messages as a server of this package's writes them, with the token ids between their events.

They are of the model in speech.py. Some tokens lead from a block of the answer to the next: reasoning, text, then calls
of tools. At its end a server that was stopped halfway makes of what it has whatever it makes of a whole answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from simulation.front.speech import HALF, NEXT, AnswerOptions, Said, speak
from tools.support.speech import Spoken, read

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TYPED = (RESPONSES, MESSAGES)
_BLOCKS = {
    RESPONSES: {"reasoning": "reasoning", "text": "message", "call": "function_call"},
    MESSAGES: {"reasoning": "thinking", "text": "text", "call": "tool_use"},
}
_DELTAS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_FIELDS = {"reasoning": "thinking", "text": "text", "call": "partial_json"}


def options_of(body: dict[str, Any], room: int = 64) -> AnswerOptions:
    limit = body.get("max_output_tokens") or body.get("max_tokens") or room
    return AnswerOptions(limit, tuple(body.get("stop_sequences") or ()))


class TypedSpeaker:
    """Writer of one answer as typed events. `reports`: it puts the token ids between them if it is asked to."""

    def __init__(self, path: str, body: dict[str, Any], ids: Sequence[int], name: str, *, reports: bool = True) -> None:
        self._path, self._body, self._ids, self._name = path, body, list(ids), name
        self._reports = reports and (body.get("kv_transfer_params") or {}).get("report_tokens") is True
        self._id = body.get("request_id") or f"msg-{name}"
        self._tokens = self._number = self._phase = self._count = 0
        self._open: list[Any] = []  # kind, id, name and text of the block that is open
        self._items: list[dict[str, Any]] = []
        self._finish: tuple[str | None, str | None] = None, None

    def opening(self) -> bytes:
        if self._path == MESSAGES:
            message: dict[str, Any] = {
                "id": self._id,
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": "m",
            }
            return self._written("message_start", message={**message, "usage": self._usage()})
        begun = self._response("in_progress")
        return self._written("response.created", response=begun) + self._written("response.in_progress", response=begun)

    def event(self, said: Sequence[Said]) -> bytes:
        """Return the events of some tokens, of which only the last can be the end."""
        written, text = [self.tokens([one.token for one in said], said[-1].finish, said[-1].stop_reason)], ""
        self._tokens += len(said)
        for one in said:
            if one.token % 8 == NEXT and one.token < HALF:
                self._phase += 1
            kind = ("reasoning", "text", "call")[min(self._phase, 2)] if self._body.get("tools") else "text"
            begins = kind == "call" and self._count < self._phase - 1  # a call's first token is that of its name
            if self._open and (self._open[0] != kind or begins) and (one.text or begins):
                written += [self._delta(text), self._closed()]
                text = ""
            if not self._open and (one.text or begins):
                written.append(self._opened(kind))
            text += one.text
        return b"".join((*written, self._delta(text)))

    def tokens(self, ids: list[int], finish: str | None = None, stop: str | None = None) -> bytes:
        """Return the ids of the events that follow, and how the answer ends."""
        self._finish = finish, stop
        if not self._reports:
            return b""
        said: dict[str, Any] = {"ids": ids} | ({} if self._tokens else {"prompt": self._ids})
        said |= {"finish_reason": finish} if finish else {}
        said |= {"stop_reason": stop} if stop else {}
        return f"event: pd.tokens\ndata: {json.dumps(said, separators=(',', ':'))}\n\n".encode()

    def end(self, params: dict[str, Any] | None = None) -> bytes:
        closed, (finish, stop) = self._closed(), self._finish
        if self._path == RESPONSES:
            whole = {**self._response("completed"), "kv_transfer_params": params}
            return closed + self._written("response.completed", response=whole)
        # vLLM's: a word that stopped it is a stop sequence, and an abort has no reason.
        reason = {"length": "max_tokens", "abort": None}.get(finish or "", "stop_sequence" if stop else "end_turn")
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return closed + self._written("message_delta", delta=delta, usage=self._usage()) + self._written("message_stop")

    def flushed(self) -> bytes:
        """Return what parsers make of the rest when an answer ends; a router that gets no ids cannot keep it back."""
        return self._delta("…") if self._open and self._reports else b""

    def failed(self) -> bytes:
        """Return the event of an error behind what was said; empty: vLLM breaks a response's stream off."""
        if self._path == RESPONSES:
            return b""
        return self._written("error", error={"type": "internal_error", "message": "as the seed has it"})

    def _opened(self, kind: str) -> bytes:
        index, self._count = len(self._items), self._count + (kind == "call")
        self._open = [kind, f"{kind}-{self._name}-{index}", f"f{self._count}", ""]
        if self._path == RESPONSES:
            return self._written("response.output_item.added", output_index=index, item=self._item("in_progress"))
        block: dict[str, Any] = {"type": _BLOCKS[MESSAGES][kind]}
        named = {"id": self._open[1], "name": self._open[2], "input": {}}
        block |= named if kind == "call" else {_FIELDS[kind]: ""}
        return self._written("content_block_start", index=index, content_block=block)

    def _delta(self, text: str) -> bytes:
        if not text:
            return b""
        self._open[3] += text
        kind, index = self._open[0], len(self._items)
        if self._path == RESPONSES:
            where = {"output_index": index, "item_id": self._open[1], "content_index": 0}
            return self._written(f"response.{_DELTAS[kind]}.delta", **where, delta=text)
        field = _FIELDS[kind]
        form = "input_json_delta" if kind == "call" else f"{field}_delta"
        return self._written("content_block_delta", index=index, delta={"type": form, field: text})

    def _closed(self) -> bytes:
        if not self._open:
            return b""
        index, item = len(self._items), self._item("completed")
        self._items.append(item)
        kind, name, _, text = self._open
        self._open = []
        if self._path == RESPONSES:
            where = {"output_index": index, "item_id": name}
            done = self._written(f"response.{_DELTAS[kind]}.done", **where, text=text)
            return done + self._written("response.output_item.done", output_index=index, item=item)
        signature = {"type": "signature_delta", "signature": f"signed {self._name} {index}"}
        signed = self._written("content_block_delta", index=index, delta=signature) if kind == "reasoning" else b""
        return signed + self._written("content_block_stop", index=index)

    def _item(self, status: str) -> dict[str, Any]:
        kind, name, function, text = self._open
        item = {"id": name, "type": _BLOCKS[RESPONSES][kind], "status": status}
        if kind == "call":
            return {**item, "call_id": f"call-{name}", "name": function, "arguments": text}
        return {**item, "content": [{"text": text}] if text else []}

    def _response(self, status: str) -> dict[str, Any]:
        head = {"id": self._id, "object": "response", "created_at": len(self._name), "model": "m", "status": status}
        return {**head, "output": list(self._items), "usage": self._usage(), "kv_transfer_params": None}

    def _usage(self) -> dict[str, int]:
        prompt, answer = len(self._ids), self._tokens
        counts = {"input_tokens": prompt, "output_tokens": answer}
        return counts | ({"total_tokens": prompt + answer} if self._path == RESPONSES else {})

    def _written(self, form: str, **fields: Any) -> bytes:
        said = {"type": form, **fields}
        if self._path == RESPONSES:
            said["sequence_number"], self._number = self._number, self._number + 1
        return f"event: {form}\ndata: {json.dumps(said, separators=(',', ':'))}\n\n".encode()


def typed_verdict(
    path: str, body: dict[str, Any], ids: Sequence[int], room: int, tokens: Sequence[int], got: bytes
) -> str:
    """Return what became of a stream, whose answer begins with `tokens`: right, broken off, or wrong."""
    speaker = TypedSpeaker(path, body, ids, "one")
    events = [speaker.event([said]) for said in speak(ids, options_of(body, room - len(ids)), tokens)]
    want = read(b"".join((speaker.opening(), *events, speaker.end())))
    try:
        has = read(got)
    except (ValueError, KeyError, TypeError):
        return "wrong"
    if not has.problem:
        return "right" if len(has.names) == 1 and has.same() == want.same() else "wrong"
    has.names, has.called, has.items = set(), set(), []  # those of another engine
    broken = _is_error(has) and b"pd.tokens" not in got and has.begins(want)
    return "broken off" if broken else "wrong"


def _is_error(said: Spoken) -> bool:
    """Return whether the problem of a stream is an error that it ends with."""
    try:
        problem = json.loads(said.problem)
    except ValueError:
        return False
    return bool(isinstance(problem, dict) and (problem.get("message") or problem["error"]["message"]))
