# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of one long chat through one pair, with two metaservers in turns.

One sends P the chat as it came, so that P renders and tokenises it behind D; the other sends the token ids that D made.
P has the chat in its prefix cache, as in a conversation, and D keeps none: what is left is the work around the model.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

from tools.support.client import TimedAnswer, chat_body_of, complete, post
from tools.support.cluster import STRICT, Cluster, say
from tools.support.models import ensure
from tools.support.spec import EngineSpec, MetaserverSpec

MODEL = "narrow"
CHAT = "/v1/chat/completions"
AROUND = 32  # tokens to spare for the template's own
WAYS = {"as it came": "tools.support.as_it_came", "as D's token ids": MetaserverSpec.module}


def text(length: int) -> str:
    """Return words of so many bytes in all. The small models' tokenizer makes a token of each byte."""
    dice = random.Random(length)
    words = ("".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 9))) for _ in range(length))
    return " ".join(words)[:length]


def compare(cluster: Cluster, tokens: int, rounds: int) -> list[str]:
    """Start a pair and both metaservers, send them the chat in turns, and return the table's lines."""
    ports = [cluster.port() for _ in WAYS]
    config, length = cluster.push_config(verify="off"), tokens + AROUND
    d_side = {**config, "metaserver_urls": [f"http://127.0.0.1:{port}" for port in ports]}
    common: dict[str, Any] = {"max_len": length + AROUND, "max_seqs": 8}
    p, d = cluster.start(
        EngineSpec("chat-p", ensure(MODEL), role="kv_producer", extra=config, **common),
        EngineSpec(
            *("chat-d", ensure(MODEL), "kv_consumer"),
            extra=d_side,
            arguments=("--no-enable-prefix-caching",),
            **common,
        ),
    )
    fronts = {
        way: cluster.metaserver([p], [d], port, MetaserverSpec(STRICT, module)).url
        for port, (way, module) in zip(ports, WAYS.items(), strict=True)
    }
    body = chat_body_of(text(tokens), 4)
    alone = post(p.url, body, CHAT)["choices"][0]["token_ids"]
    for front in fronts.values():
        complete(front, body, CHAT)
    answers: dict[str, list[TimedAnswer]] = {way: [] for way in fronts}
    for number in range(rounds):
        for way in list(fronts)[:: 1 if number % 2 else -1]:
            answers[way].append(complete(fronts[way], body, CHAT))
        say(f"round {number + 1} of {rounds}")
    rows = [f"\na chat of {tokens:,} bytes and tokens that P has in its cache: TTFT in ms, median (lowest–highest)"]
    for way, of_front in answers.items():
        times = [answer.ttft * 1e3 for answer in of_front]
        same = "answers as P's alone" if all(list(a.tokens) == alone for a in of_front) else "ANSWERS DIFFER"
        rows.append(
            f"  to P {way:18} {statistics.median(times):8.0f} ({min(times):.0f}–{max(times):.0f})  {same}, "
            f"{len(of_front[0].prompt):,} tokens"
        )
    return rows
