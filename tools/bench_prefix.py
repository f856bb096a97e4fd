# SPDX-License-Identifier: Apache-2.0
"""Conversations through two P's and a D, with the P chosen by load alone, and by prefix and load.

Two metaservers take turns. Each turn's prompt is the last one, its answer, and new tokens. Shown per metaserver: the
share of the prompts in the P's prefix caches, by their own count, and the time to the first token of first and of later
turns.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tools.support.client import body_of, complete, prompt
from tools.support.cluster import STRICT, Cluster, fresh_directory, say
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.spec import EngineSpec

MODEL = "base16"
KV_BYTES, KV_BYTES_PER_TOKEN = 384 << 20, 32 << 10
FIRST, NEW, ANSWER = 768, 256, 8  # tokens of the first prompt, of each further turn, of each answer
_COUNTS = re.compile(r"^vllm:prefix_cache_(queries|hits)_total\{.*\} (\S+)$", re.MULTILINE)


@dataclass
class PrefixSystem:
    """Results of one metaserver."""

    name: str
    url: str
    queries: float = 0.0
    hits: float = 0.0
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)

    def row(self) -> str:
        times = [1000 * statistics.median(self.first), 1000 * statistics.median(self.later)]
        times.append(1000 * statistics.quantiles(self.later, n=10)[-1])
        return f"| {self.name} | {self.hits / self.queries:.0%} | " + " | ".join(f"{t:.0f}" for t in times) + " |"


def counted(prefills: list[EngineProcess]) -> tuple[float, float]:
    """Return the prompt tokens that the P's have looked up in their caches, and those found."""
    sums = {"queries": 0.0, "hits": 0.0}
    for engine in prefills:
        for what, value in _COUNTS.findall(httpx.get(f"{engine.url}/metrics", timeout=30).text):
            sums[what] += float(value)
    return sums["queries"], sums["hits"]


def converse(system: PrefixSystem, seed: int, turns: int) -> None:
    tokens = prompt(FIRST, seed)
    for turn in range(turns):
        answer = complete(system.url, body_of(tokens, ANSWER))
        (system.later if turn else system.first).append(answer.ttft)
        tokens = [*tokens, *answer.tokens, *prompt(NEW, 1000 * seed + turn)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="rounds, each with both metaservers (default: 4)")
    parser.add_argument("--talks", type=int, default=4, help="conversations per round (default: 4)")
    parser.add_argument("--at-once", type=int, default=2, help="conversations at once (default: 2)")
    parser.add_argument("--turns", type=int, default=6, help="turns per conversation, 7 at most (default: 6)")
    args = parser.parse_args()
    with Cluster(fresh_directory("bench-prefix")) as cluster:
        ports = [cluster.port(), cluster.port()]
        config = cluster.push_config(verify="off")
        d_side = {**config, "metaserver_urls": [f"http://127.0.0.1:{port}" for port in ports]}
        common: dict[str, Any] = {
            "max_len": 2624,
            "chunk": 2560,
            "kv_bytes": KV_BYTES,
            "max_seqs": 8,
            "block_size": 128,
        }
        model = ensure(MODEL)
        *prefills, decode = cluster.start(
            EngineSpec("prefill-1", model, role="kv_producer", extra=config, **common),
            EngineSpec("prefill-2", model, role="kv_producer", extra=config, **common),
            EngineSpec("decode", model, role="kv_consumer", extra=d_side, **common),
        )
        ways = {"by load alone": 0, "by prefix and load": KV_BYTES // KV_BYTES_PER_TOKEN}
        systems = [
            PrefixSystem(
                name, cluster.metaserver(prefills, [decode], port, (*STRICT, "--prefix-tokens", str(tokens))).url
            )
            for port, (name, tokens) in zip(ports, ways.items(), strict=True)
        ]
        seed = 0
        for number in range(args.rounds):
            for system in systems if number % 2 else reversed(systems):
                before = counted(prefills)
                with ThreadPoolExecutor(args.at_once) as clients:
                    talks = [clients.submit(converse, system, seed + i, min(args.turns, 7)) for i in range(args.talks)]
                    for talk in talks:
                        talk.result()
                seed += args.talks
                queries, hits = (now - then for now, then in zip(counted(prefills), before, strict=True))
                system.queries, system.hits = system.queries + queries, system.hits + hits
            say(f"round {number + 1} of {args.rounds}")
    print(
        "| choice | prompt tokens found in P's cache | first turn: ms | later turns: ms | p90 |\n|---|---:|---:|---:|---:|"
    )
    for system in systems:
        print(system.row())
    return 0


if __name__ == "__main__":
    sys.exit(main())
