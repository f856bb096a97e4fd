# SPDX-License-Identifier: Apache-2.0
"""Kinds of streams: what is asked, what the model has to say for it, and what makes an answer right.

Parsers make no sense of what a random model says, so a request may bring a script (tests/integration/plugins/scripted),
in which DOT stands for some letter. An answer is what its client puts together of a stream's events.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.support.client import prompt
from tools.support.models import ROOT, write_tokenizer

PLUGIN = ROOT / "tests" / "integration" / "plugins" / "scripted"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
DOT, ANY = "·", -1
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALLED, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
# Tokens of the models whose parsers read the answers.
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", _BEGIN, _END, _CALL, _CALLED, _SEP)
_PIECE = re.compile("|".join(map(re.escape, WORDS)) + f"|{DOT}|.", re.DOTALL)
VOCAB = 512

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,  # else the grammar lets any JSON be the arguments
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string", "enum": ["to the left", "to the right"]}},
            "required": ["where"],
            "additionalProperties": False,
        },
    },
}
LOOSE = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}  # no grammar forces it
NAMED = {"type": "function", "function": {"name": "look"}}
SCHEMA = {
    "type": "object",
    "properties": {"who": {"type": "string", "pattern": "^[a-z]{20}$"}, "where": {"enum": ["left", "right"]}},
    "required": ["who", "where"],
    "additionalProperties": False,
}
# A grammar allows any white space between the parts of JSON. The tokens of the vocabulary that are some:
DENSE = {"ignore_eos": False, "logit_bias": {str(token): -100 for token in (200, 201, 204, 223)}}
SAMPLED = {"temperature": 0.8}
BUDGET = 12  # tokens of reasoning, behind which vLLM ends it


def speaking(directory: Path) -> Path:
    """Write a tokenizer of bytes with the words of these parsers, as many tokens as the models have."""
    return write_tokenizer(directory, VOCAB, WORDS)


def script_of(text: str) -> list[int]:
    """Return the tokens of a text, by this tokenizer."""
    return [_token(piece) for piece in _PIECE.findall(text)]


@functools.cache
def _token(piece: str) -> int:
    if piece in WORDS:
        return VOCAB - len(WORDS) + WORDS.index(piece)
    if piece == DOT:
        return ANY
    from tokenizers import pre_tokenizers

    letter = {" ": "Ġ", "\n": "Ċ"}.get(piece, piece)
    return 3 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter)


@dataclass
class Spoken:
    """An answer as its client has it, whole or in part. `end`: how it ended; empty: it has not."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, tuple[str, str]] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    rows: list[tuple[str, float]] = field(default_factory=list)  # tokens and their log-probabilities
    end: str = ""
    usage: object = None
    names: set[object] = field(default_factory=set)  # that the answer has: one
    most: int = 0  # tokens of an event: a server that is late merges what has come
    problem: str = ""
    # Of responses and messages: their events, their blocks by number, the one that is open, and what clients keep.
    events: int = 0
    blocks: int = 0
    kinds: dict[int, str] = field(default_factory=dict)
    open: tuple[int, str] | None = None
    said: str = ""  # of that block
    items: list[dict[str, Any]] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    signed: int = 0

    def same(self) -> tuple[object, ...]:
        """Return what one engine's greedy answer has in common with it."""
        return self.text, self.reasoning, self.calls, self.ids, [word for word, _ in self.rows], self.end, self.usage

    def begins(self, other: Spoken) -> bool:
        """Return whether another answer begins as this one, which may be a part."""
        kept = (
            self.names <= other.names and self.called <= other.called and self.items == other.items[: len(self.items)]
        )
        calls = all(
            index in other.calls and all(map(str.startswith, other.calls[index], call))
            for index, call in self.calls.items()
        )
        texts = other.text.startswith(self.text) and other.reasoning.startswith(self.reasoning)
        ids = other.ids[: len(self.ids)] == self.ids or not other.ids
        return kept and calls and texts and ids and other.rows[: len(self.rows)] == self.rows


def read(stream: bytes) -> Spoken:
    """Put together what the whole events of a stream say, of any of the routes."""
    answer = Spoken()
    for event in stream.decode(errors="replace").split("\n\n")[:-1]:
        data = "" if event.startswith("event: pd.tokens") else event.partition("data: ")[2]  # that is for a router
        if data == "[DONE]" and not answer.end and not answer.problem:
            answer.problem = "it ends without an end"
        if data and data != "[DONE]":
            take(answer, json.loads(data))
    return answer


def take(answer: Spoken, said: dict[str, Any]) -> None:
    """Add what an event says."""
    kind = said.get("type", "")
    if "error" in said or kind == "error":
        answer.problem = json.dumps(said)
    elif kind.startswith("response."):
        _take_response(answer, kind, said)
    elif kind:
        _take_message(answer, kind, said)
    else:
        _take_choice(answer, said)


def _take_choice(answer: Spoken, said: dict[str, Any]) -> None:
    answer.names.add((said["id"], said["created"], said["model"], said["object"]))
    if usage := said.get("usage"):
        answer.usage = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    for choice in said["choices"]:
        delta = choice.get("delta") or {}
        answer.text += choice.get("text") or delta.get("content") or ""
        answer.reasoning += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            name, arguments = answer.calls.get(call["index"], ("", ""))
            more = call.get("function") or {}
            answer.calls[call["index"]] = name + (more.get("name") or ""), arguments + (more.get("arguments") or "")
        ids = choice.get("token_ids") or []
        answer.ids, answer.most = answer.ids + ids, max(answer.most, len(ids))
        rows = choice.get("logprobs") or {}
        listed = zip(rows.get("tokens") or (), rows.get("token_logprobs") or (), strict=True)
        answer.rows += [*listed, *((row["token"], row["logprob"]) for row in rows.get("content") or ())]
        answer.end = choice.get("finish_reason") or answer.end


def _add(answer: Spoken, kind: str, index: int, piece: str) -> None:
    """Add a piece to the block of the answer that is open."""
    answer.said += piece
    if kind == "reasoning":
        answer.reasoning += piece
    elif kind == "call":
        name, arguments = answer.calls[index]
        answer.calls[index] = name, arguments + piece
    else:
        answer.text += piece


_KINDS = {"message": "text", "reasoning": "reasoning", "function_call": "call", "thinking": "reasoning"}
_KINDS |= {"text": "text", "tool_use": "call"}


def _open(answer: Spoken, index: int, block: dict[str, Any]) -> None:
    if answer.open is not None or index != answer.blocks:
        answer.problem = f"block {index} begins behind {answer.blocks}"
    answer.open, answer.blocks = (index, block.get("id", "")), answer.blocks + 1
    answer.kinds[index], answer.said = _KINDS[block["type"]], ""
    if answer.kinds[index] == "call":
        answer.calls[index] = block["name"], ""
        answer.called.add(block.get("call_id") or block["id"])


def _same_block(answer: Spoken, index: int, name: str) -> None:
    if answer.open != (index, name):
        answer.problem = f"{index} {name} is not the block that is open: {answer.open}"


def _says(item: dict[str, Any]) -> tuple[object, ...]:
    """Return what an item of a response says: before vLLM 0.32 the last event has all items anew, with other ids."""
    return item["type"], item.get("name"), item.get("arguments"), [part["text"] for part in item.get("content") or ()]


def _take_response(answer: Spoken, kind: str, said: dict[str, Any]) -> None:
    if said["sequence_number"] != answer.events:
        answer.problem = f"event {said['sequence_number']} comes as number {answer.events}"
    answer.events += 1
    whole: dict[str, Any] = said.get("response") or {}
    if whole:
        answer.names.add((whole["id"], whole["created_at"], whole["model"], whole["object"]))
    if kind == "response.output_item.added":
        _open(answer, said["output_index"], said["item"])
    elif kind == "response.output_item.done":
        _same_block(answer, said["output_index"], said["item"]["id"])
        texts = [said["item"].get("arguments"), *(part["text"] for part in said["item"].get("content") or ())]
        if answer.said != "".join(filter(None, texts)):
            answer.problem = f"block {said['output_index']} ends as {texts} for {answer.said}"
        answer.items.append(said["item"])
        answer.open = None
    elif kind == "response.completed":
        answer.end, answer.usage = (
            whole["status"],
            [whole["usage"][f"{of}_tokens"] for of in ("input", "output", "total")],
        )
        known = {item["id"] for item in answer.items} & {item["id"] for item in whole["output"]}
        if whole["output"] != answer.items if known else [*map(_says, whole["output"])] != [*map(_says, answer.items)]:
            answer.problem = f"its end has {whole['output']} for {answer.items}"
    elif "item_id" in said:
        _same_block(answer, said["output_index"], said["item_id"])
        if kind.endswith(".delta"):
            _add(answer, answer.kinds[said["output_index"]], said["output_index"], said["delta"])


def _take_message(answer: Spoken, kind: str, said: dict[str, Any]) -> None:
    if kind == "message_start":
        answer.names.add((said["message"]["id"], said["message"]["model"]))
    elif kind == "content_block_start":
        _open(answer, said["index"], {**said["content_block"], "id": said["content_block"].get("id", "")})
    elif kind == "content_block_delta":
        index = said["index"]
        if answer.open is None or answer.open[0] != index:
            answer.problem = f"block {index} is not the one that is open: {answer.open}"
        delta = said["delta"]
        piece = next((delta[name] for name in ("text", "thinking", "partial_json") if name in delta), "")
        answer.signed += delta["type"] == "signature_delta"
        _add(answer, answer.kinds[index], index, piece)
    elif kind == "content_block_stop":
        answer.open = None
        if answer.signed != sum(block == "reasoning" for block in answer.kinds.values()):
            answer.problem = f"{answer.signed} signatures for {answer.kinds}"
    elif kind == "message_delta":
        answer.end, answer.usage = (
            said["delta"]["stop_reason"],
            [said["usage"][f"{of}_tokens"] for of in ("input", "output")],
        )
    elif kind == "message_stop" and (answer.open is not None or not answer.end):
        answer.problem = "it stops with a block open, or without a reason"


Check = Callable[[Spoken], object]


@dataclass(frozen=True)
class StreamKind:
    """A row of the table. `parsers`: of the D that serves it."""

    name: str
    route: str
    asks: Mapping[str, Any] = field(default_factory=dict)
    script: str = ""
    check: Check = bool
    parsers: str = "plain"
    goes_on: bool = True
    most: int = 48  # tokens
    one_by_one: bool = False  # its parser loses what comes merged with more

    def takes(self, answer: Spoken) -> bool:
        """Return whether an answer is what was asked for, as far as its parser could read it."""
        return bool(self.check(answer)) or (self.one_by_one and answer.most > 1)

    @property
    def sampled(self) -> bool:
        return bool(self.asks.get("temperature"))

    def body(self, number: int, length: int = 150) -> dict[str, Any]:
        """Return a request of this kind; each number has another prompt, of about this many tokens."""
        text, limit = " ".join(map(str, prompt(length * 4 // 15, number))), "max_tokens"
        # Of letters: half a character at its end would be the beginning of the answer.
        what: dict[str, Any] = {"prompt": [3 + token % 90 for token in prompt(length, number)]}
        if self.route == RESPONSES:
            what, limit = {"input": text}, "max_output_tokens"
        elif self.route != COMPLETIONS:
            what = {"messages": [{"role": "user", "content": text}]}
        asked = {"model": "model", "stream": True, limit: self.most, "temperature": 0, **what}
        if self.route in (COMPLETIONS, CHAT):
            asked |= {"stream_options": {"include_usage": True}, "return_token_ids": True, "ignore_eos": True}
        if self.script:
            asked["vllm_xargs"] = {"script": script_of(self.script)}
        return {**asked, **self.asks}


def _object(text: str) -> dict[str, Any]:
    """Return the object that a text is in JSON; an empty one if it is none, which a check then refuses."""
    try:
        said = json.loads(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def json_of(answer: Spoken) -> bool:
    said = _object(answer.text)
    well = said.keys() == {"who", "where"} and said["where"] in ("left", "right")
    return well and bool(re.fullmatch("[a-z]{20}", said["who"]))


def calls_look(answer: Spoken) -> bool:
    """Return whether it calls the tool, first with whole arguments; a tool that must be called is called again."""
    names = {name for name, _ in answer.calls.values()}
    return names == {"look"} and set(_object(answer.calls[min(answer.calls)][1])) == {"where"}


def thinks(reasoning: str, text: str) -> Check:
    """Return a check of both parts of an answer; DOT is some letter."""
    pattern = [re.escape(part).replace(re.escape(DOT), "[a-z]") for part in (reasoning, text)]
    return lambda a: re.fullmatch(pattern[0], a.reasoning.strip()) and re.fullmatch(pattern[1], a.text.strip())


def long(answer: Spoken) -> bool:
    return answer.end == "length"


def in_full(answer: Spoken) -> bool:
    return answer.end in ("completed", "incomplete", "max_tokens") and bool(answer.text)


def with_rows(answer: Spoken) -> bool:
    return len(answer.rows) == len(answer.ids) > 0


def _auto(script: str) -> dict[str, Any]:
    return {
        "route": CHAT,
        "script": script,
        "check": calls_look,
        "most": len(script_of(script)) + 1,
    }


_DOTS = DOT * 12
_TOOLS: dict[str, Any] = {"tools": [TOOL], "ignore_eos": False, "stop_token_ids": []}
_AUTO: dict[str, Any] = {"tools": [LOOSE], "tool_choice": "auto"}
_THOUGHT, _SAID = f"so {_DOTS} it is", f"the answer is {_DOTS}"
_HERMES = f'<tool_call>\n{{"name": "look", "arguments": {{"where": "{_DOTS}"}}}}\n</tool_call>'
_DEEPSEEK = f'{_BEGIN}{_CALL}function{_SEP}look\n```json\n{{"where": "{_DOTS}"}}\n```{_CALLED}{_END}'
_QWEN = f"<tool_call>\n<function=look>\n<parameter=where>\n{_DOTS}\n</parameter>\n</function>\n</tool_call>"
_FLAT = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2}
_CUT: dict[str, Any] = {"stop": ["ENOUGH"], "ignore_eos": False}
_SPEECH = "one two three ENOUG four ENOUGH five"

# Flags of D's server by the name in `StreamKind.parsers`.
PARSERS: dict[str, Sequence[str]] = {
    "plain": ("--tool-call-parser", "hermes"),
    "deepseek": ("--tool-call-parser", "deepseek_v3", "--reasoning-parser", "deepseek_r1"),
    "qwen3": ("--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3"),
    "glm": ("--tool-call-parser", "hermes", "--reasoning-parser", "glm45"),
}


def _typed(
    name: str,
    asks: Mapping[str, Any],
    script: str,
    check: Check,
    parsers: str = "plain",
    *,
    calls: bool = False,
) -> list[StreamKind]:
    """Return a response and a message, perhaps with a tool. The limit is the script's length: an end is not ignored."""
    function: Any = LOOSE["function"]
    tools: dict[str, Any] = {
        RESPONSES: {"type": "function", **function},
        MESSAGES: {"name": function["name"], "input_schema": function["parameters"]},
    }
    return [
        StreamKind(
            name,
            route,
            {**asks, "tools": [tools[route]]} if calls else asks,
            script,
            check,
            parsers,
            one_by_one=parsers == "deepseek",
            most=len(script_of(script)),
        )
        for route in tools
    ]


def _reasons(parsers: str, begin: str = "<think>") -> list[StreamKind]:
    """Return what has a parser of reasoning: a thought and an answer, and a grammar behind the thought.

    DeepSeek's begins in the prompt. Its parser leaves the first word in the thought if that comes with another token.
    """
    both: dict[str, Any] = {"parsers": parsers, "route": CHAT}
    script = f"{begin}{_THOUGHT}</think>{_SAID}"
    most = len(script_of(script))
    schema = {"structured_outputs": {"json": SCHEMA}, **DENSE}
    behind: Check = lambda a: json_of(a) and a.reasoning  # noqa: E731
    budget = StreamKind(
        f"a budget of reasoning, {parsers}",
        script=f"{begin}{DOT * 47}",
        check=lambda a: len(a.reasoning) == BUDGET and a.text,
        asks={"thinking_token_budget": BUDGET},
        **both,
    )
    return [
        *([budget] if begin else []),  # vLLM counts from its first token on
        *_typed(f"reasoning, {parsers}", SAMPLED, script, thinks(_THOUGHT, _SAID), parsers),
        StreamKind(f"reasoning, {parsers}", script=script, check=thinks(_THOUGHT, _SAID), most=most, **both),
        StreamKind(
            f"reasoning, {parsers}, sampled",
            script=script,
            check=thinks(_THOUGHT, _SAID),
            most=most,
            asks=SAMPLED,
            **both,
        ),
        StreamKind(
            f"a schema behind reasoning, {parsers}",
            script=f"{begin}so</think>",
            check=behind,
            most=80,
            asks={**schema, **SAMPLED},
            **both,
        ),
    ]


KINDS: tuple[StreamKind, ...] = (
    StreamKind("greedy", COMPLETIONS, check=long),
    StreamKind("temperature 0.8", COMPLETIONS, SAMPLED, check=long),
    StreamKind("top-p 0.9", COMPLETIONS, {**SAMPLED, "top_p": 0.9}, check=long),
    StreamKind("penalties", COMPLETIONS, _FLAT, check=long),
    StreamKind(
        "min_tokens",
        COMPLETIONS,
        {"min_tokens": 42, "stop_token_ids": [*range(3, VOCAB)], "ignore_eos": False},
        check=lambda a: len(a.ids) == 43 and a.end == "stop",
    ),
    StreamKind("stop string", COMPLETIONS, _CUT, _SPEECH, lambda a: a.text == "one two three ENOUG four "),
    StreamKind("5 log-probabilities", COMPLETIONS, {"logprobs": 5}, check=with_rows),
    StreamKind(
        "schema", COMPLETIONS, {"structured_outputs": {"json": SCHEMA}, **DENSE, **SAMPLED}, check=json_of, most=80
    ),
    StreamKind("greedy", CHAT, check=long),
    StreamKind("temperature 0.8, penalties", CHAT, {**SAMPLED, **_FLAT}, check=long),
    StreamKind("stop string", CHAT, _CUT, _SPEECH, lambda a: a.text == "one two three ENOUG four "),
    StreamKind("5 log-probabilities", CHAT, {"logprobs": True, "top_logprobs": 5}, check=with_rows),
    StreamKind(
        "schema",
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, **DENSE},
        check=json_of,
        most=80,
    ),
    StreamKind("a named tool", CHAT, {**_TOOLS, "tool_choice": NAMED, **DENSE}, check=calls_look, most=60),
    # The grammar also lets it spell </tool_call>; then vLLM's parser takes a second call for the rest of the first.
    StreamKind(
        "some tool",
        CHAT,
        {**_TOOLS, "tool_choice": "required", **DENSE, **SAMPLED},
        check=calls_look,
        most=80,
        one_by_one=True,
    ),
    StreamKind("hermes calls", asks=_AUTO, **_auto(_HERMES)),
    StreamKind("hermes calls, sampled", asks={**_AUTO, **SAMPLED}, **_auto(_HERMES)),
    *_typed("greedy", {}, DOT * 48, in_full),
    *_typed("temperature 0.8", {**SAMPLED, "top_p": 0.9}, DOT * 48, in_full),
    StreamKind(
        "stop string",
        MESSAGES,
        {"stop_sequences": ["ENOUGH"]},
        _SPEECH,
        lambda a: a.text == "one two three ENOUG four ",
    ),
    *_typed("hermes calls", {}, f"I look {_HERMES}", calls_look, calls=True),
    *_typed("hermes calls, sampled", SAMPLED, _HERMES, calls_look, calls=True),
    StreamKind(
        "log-probabilities", RESPONSES, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, goes_on=False
    ),
    *_reasons("deepseek", ""),
    StreamKind(
        "deepseek calls, sampled",
        asks={**_AUTO, **SAMPLED},
        parsers="deepseek",
        one_by_one=True,
        **_auto("</think>" + _DEEPSEEK),
    ),
    *_reasons("qwen3"),
    *_typed("qwen3 calls, sampled", SAMPLED, "</think>" + _QWEN, calls_look, "qwen3", calls=True),
    StreamKind("qwen3 calls, sampled", asks={**_AUTO, **SAMPLED}, parsers="qwen3", **_auto("</think>" + _QWEN)),
    *_reasons("glm"),
)
