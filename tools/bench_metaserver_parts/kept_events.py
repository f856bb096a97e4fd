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


def event(choice: dict[str, Any], **more: Any) -> bytes:
    head = {"id": "chatcmpl-0123456789", "object": "chat.completion.chunk", "created": 1234567890, "model": "model"}
    said = {**head, "choices": [{"index": 0, "finish_reason": None, **choice}], **more}
    return b"data: " + json.dumps(said, separators=(",", ":")).encode() + b"\n\n"


def costs(events: int) -> dict[str, float]:
    """Return µs by kind; none of a kind that this package does not keep."""
    from vllm_ascend_pd.router.core.resume import StreamState

    # With what releases before needed of a request.
    facts = {"held": 0, "stop": 0, "usage": False, "asked_ids": False, "chat": True}
    request: Any = SimpleNamespace(fields={}, route="/v1/chat/completions", size=100, **facts)
    found = {}
    for kind, choice in KINDS.items():
        state = StreamState(request, 1 << 30)
        state.take(event({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=list(range(100))))
        one, begun = event({**choice, "token_ids": [123]}), time.process_time()
        for _ in range(events):
            state.take(one)
        if not state.unfit:
            found[kind] = (time.process_time() - begun) / events * 1e6
    return found


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
    for kind in KINDS:
        cells = [f"{least[name, kind]:.2f}" if (name, kind) in least else "not kept" for name in trees]
        print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
