# SPDX-License-Identifier: Apache-2.0
"""Answers of `/v1/responses` and `/v1/messages` as vLLM 0.32 writes them: whole, and as the events of a stream."""

from __future__ import annotations

import itertools
import json
from typing import Any

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
OTHERS = (RESPONSES, MESSAGES)
WELL, RECOMPUTED, ABORT = "length", "recomputed", "abort"  # ends of an answer


def event(fields: dict[str, Any]) -> bytes:
    return f"event: {fields['type']}\ndata: {json.dumps(fields, separators=(',', ':'))}\n\n".encode()


def whole(route: str, body: dict[str, Any], name: str, words: list[str], end: str = WELL) -> dict[str, Any]:
    """Return a whole answer, which `name` names. A response does not show how it ended."""
    usage = {"input_tokens": 5, "output_tokens": len(words)}
    if route == MESSAGES:
        content: list[dict[str, Any]] = [{"type": "text", "text": "".join(words)}]
        if body.get("tools"):
            made = {"stop_sequence": "recomputed", "finish_reason": "abort"}
            content.append({"type": "tool_use", "id": "toolu_1", "name": "f", "input": made})
        ends = {WELL: {"stop_reason": "max_tokens"}, RECOMPUTED: {"stop_reason": "stop_sequence", "stop_sequence": end}}
        head = {"id": name, "type": "message", "role": "assistant", "model": "fake", "content": content}
        return {**head, **ends.get(end, {}), "usage": usage}
    text = {"type": "output_text", "text": "".join(words), "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
    return {
        **{"id": name, "object": "response", "created_at": 1, "model": "fake", "status": "completed"},
        **{"output": [message], "tools": body.get("tools") or [], "metadata": body.get("metadata")},
        **{"parallel_tool_calls": True, "tool_choice": "auto", "usage": usage, "kv_transfer_params": None},
    }


def events(route: str, words: list[str], answer: dict[str, Any]) -> list[bytes]:
    """Return the events of a stream with this whole answer: what opens it in one piece, one a word, and the end."""
    if route == MESSAGES:
        opening = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
        opening.pop("kv_transfer_params", None)
        start = {"type": "message_start", "message": opening}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        said = [
            event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}})
            for word in words
        ]
        delta = {"stop_reason": answer.get("stop_reason"), "stop_sequence": answer.get("stop_sequence")}
        last = [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": delta, "usage": answer["usage"]},
        ]
        last.append({"type": "message_stop"})
        return [event(start), *([event(block) + said[0], *said[1:]] if said else []), b"".join(map(event, last))]
    numbers = itertools.count()
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "kv_transfer_params": None}
    parts = [event({"response": begun, "sequence_number": next(numbers), "type": f"response.{step}"}) for step in ("created", "in_progress")]  # fmt: skip
    where = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
    said = [
        event({**where, "delta": word, "sequence_number": next(numbers), "type": "response.output_text.delta"})
        for word in words
    ]
    end = {"response": answer, "sequence_number": next(numbers), "type": "response.completed"}
    return [b"".join(parts), *said, event(end)]
