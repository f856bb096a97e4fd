# SPDX-License-Identifier: Apache-2.0
"""CPU time that an event of a stream costs if the stream can go on with another D, by what the event has.

    python -m tools.bench_metaserver_parts.kept_events [--beside DIRECTORY_OF_ANOTHER_CHECKOUT]

Both are measured in turns, each time in a process of its own. The least of all turns is shown: other load only adds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROW = {"token": "token_id:123", "logprob": -0.5, "bytes": [104, 105]}
KINDS: dict[str, dict[str, Any]] = {
    "a completion's text": {"text": "hello", "logprobs": None, "stop_reason": None},
    "a chat's content": {"delta": {"content": "hello"}, "logprobs": None},
    "with log-probabilities": {
        "delta": {"content": "hello"},
        "logprobs": {"content": [{**ROW, "top_logprobs": [ROW] * 5}]},
    },
    "reasoning": {"delta": {"reasoning": "hello"}, "logprobs": None},
    "a tool call": {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "hello"}}]}, "logprobs": None},
}


# Of routes with typed events: what an event says beside its type. D's event with the token's id goes before it.
TYPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a response's text": (
        "/v1/responses",
        "response.output_text.delta",
        {"content_index": 0, "delta": "hello", "item_id": "msg_0123456789", "logprobs": [], "output_index": 0},
    ),
    "a message's text": (
        "/v1/messages",
        "content_block_delta",
        {"index": 0, "delta": {"type": "text_delta", "text": "hello"}},
    ),
}


def event(choice: dict[str, Any], **more: Any) -> bytes:
    head = {"id": "chatcmpl-0123456789", "object": "chat.completion.chunk", "created": 1234567890, "model": "model"}
    said = {**head, "choices": [{"index": 0, "finish_reason": None, **choice}], **more}
    return b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


def typed_event(name: str, said: dict[str, Any], **reported: Any) -> bytes:
    tokens = json.dumps({"ids": [123], **reported}, separators=(",", ":"))
    data = json.dumps({"type": name, **said}, separators=(",", ":"))
    return f"event: pd.tokens\ndata: {tokens}\n\nevent: {name}\ndata: {data}\n\n".encode()


def costs(events: int) -> dict[str, float]:
    """Return µs by kind; none of a kind that this package does not keep."""
    from vllm_ascend_pd.router.core.resume import StreamState

    # With what releases before needed of a request.
    facts = {"held": 0, "stop": 0, "usage": False, "asked_ids": False, "chat": True}

    def request(route: str) -> Any:
        return SimpleNamespace(fields={}, route=route, size=100, **facts)

    micros = {}

    def measure(kind: str, state: Any, first: bytes, one: bytes) -> None:
        state.take(first)
        begun = time.thread_time()
        for _ in range(events):
            state.take(one)
        if not state.unfit:
            micros[kind] = (time.thread_time() - begun) / events * 1e6

    prompt = list(range(100))
    for kind, choice in KINDS.items():
        first = event({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=prompt)
        state = StreamState(request("/v1/chat/completions"), 1 << 30)
        measure(kind, state, first, event({**choice, "token_ids": [123]}))
    try:
        from vllm_ascend_pd.router.core.blocks import BlockStream
    except ImportError:
        return micros
    for kind, (route, name, said) in TYPED.items():
        state = BlockStream(request(route), 1 << 30)
        measure(kind, state, typed_event(name, said, prompt=prompt), typed_event(name, said))
    return micros


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--beside", type=Path, help="another checkout, which is measured in turns with this one")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--events", type=int, default=3000, help="of each kind in a turn")
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of is not None:
        sys.path.insert(0, str(args.of))
        print(json.dumps(costs(args.events)))
        return
    trees = {"here": ROOT} | ({"beside": args.beside.resolve()} if args.beside else {})
    least: dict[tuple[str, str], float] = {}
    for _ in range(args.turns):
        for name, tree in trees.items():
            turn = [sys.executable, __file__, "--of", str(tree), "--events", str(args.events)]
            said = subprocess.check_output(turn, text=True)
            for kind, cost in json.loads(said).items():
                least[name, kind] = min(cost, least.get((name, kind), cost))
    print(f"| µs for an event | {' | '.join(trees)} |\n|---|{'--:|' * len(trees)}")
    for kind in (*KINDS, *TYPED):
        cells = [f"{least[name, kind]:.2f}" if (name, kind) in least else "not kept" for name in trees]
        print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
