# SPDX-License-Identifier: Apache-2.0
"""One prefill engine that pushes to many decode ranks at once, as to a D of DP 32: time, memory, threads, connections.

Real runtimes without vLLM: P's two ranks exchange over gloo in one process group, every decode rank is an engine with
its own Mooncake over TCP on loopback. Each number of destinations runs in a process of its own, in turns. Every step
computes one prompt for each destination and ends when all of them have reported; all bytes are compared afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOOPBACK = "127.0.0.1"
TP = 2
COLUMNS = {
    "first": "first step ms",
    "step": "later steps ms",
    "each": "ms a destination",
    "mib": "MiB more",
    "threads": "threads more",
    "sockets": "sockets more",
    "again": "exchanges again",
}


def child(destinations: int, steps: int, tokens: int, layers: int, keys: dict[str, str]) -> dict[str, float]:
    """Measure one number of destinations in this process.

    The imports are here because the parent does not need them.
    """
    import psutil
    from unit.kits.watching import running
    from unit.regroup.common import EngineCache, RegisteredMemory, RegroupDecodeSite, RegroupPrompt, config
    from unit.regroup.prefill import engine

    from vllm_ascend_pd.transport.create import create_target, create_wire

    usual = {"transport": "mooncake", "mooncake_protocol": "tcp", "transfer_timeout_s": 30, "quiet_extra_s": 2.0}
    values: dict[str, Any] = {**usual, **keys}
    push = config(**values)

    class FanoutSite(RegroupDecodeSite):
        def _memory(self, rank: int, blocks: int, folder: Path | None) -> tuple[RegisteredMemory, Any]:
            return RegisteredMemory(self.cache, self.cache.names, rank, blocks), create_target(push.wire, LOOPBACK)

    wires = [create_wire(push.wire, LOOPBACK, quiet_s=32.0) for _ in range(TP)]
    cache = EngineCache(tp=TP, heads=8, layers=layers, block=16, dim=128)
    blocks = -(-tokens // cache.block)
    p = engine(
        cache, push=push, transports=wires, step_tokens=destinations * tokens, blocks=destinations * (blocks + 1)
    )
    sites = [
        FanoutSite(EngineCache(heads=8, layers=layers, block=16, dim=128), blocks=2 * blocks, push=push)
        for _ in range(destinations)
    ]
    me, times = psutil.Process(), []

    def used() -> tuple[int, int, int]:
        return me.memory_info().rss, me.num_threads(), len(me.net_connections("tcp"))

    def step() -> list[RegroupPrompt]:
        prompts = [d.reserve(tokens, deadline_s=120.0) for d in sites]
        for d in sites:
            d.step()
        p.admit(*prompts)
        begun = time.monotonic()
        p.compute(*((prompt, tokens) for prompt in prompts))
        if not p.ended(*prompts, seconds=120.0):
            raise RuntimeError("a destination was not served")
        times.append(1e3 * (time.monotonic() - begun))
        return prompts

    with running(p, *sites):
        before = used()
        for number in range(steps + 1):
            prompts = step()
            p.finished(*prompts)
            if number == 0:
                after = used()
                for d, prompt in zip(sites, prompts, strict=True):
                    d.check(prompt)
            for d, prompt in zip(sites, prompts, strict=True):
                d.pool.give(prompt.d_blocks)
                d.prompts.remove(prompt)
        now = used()
        after = max(after[0], now[0]), max(after[1], now[1]), max(after[2], now[2])
    later = statistics.median(times[1:])
    rss, threads, sockets = (a - b for a, b in zip(after, before, strict=True))
    return {
        "first": times[0],
        "step": later,
        "each": later / destinations,
        "mib": rss / (1 << 20),
        "threads": threads,
        "sockets": sockets,
        "again": p.catch_ups / (steps + 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--destinations", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all numbers of destinations")
    parser.add_argument("--steps", type=int, default=10, help="measured steps per process, after the first")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per prompt")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the connector")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    keys = {
        key: json.loads(value) if value[:1].isdigit() else value for key, value in (s.split("=", 1) for s in args.set)
    }
    if args.child:
        print(json.dumps(child(args.child, args.steps, args.tokens, args.layers, keys)))
        return
    command = [sys.executable, __file__, *(f"--{name}={getattr(args, name)}" for name in ("steps", "tokens", "layers"))]
    command += ["--set", *args.set] if args.set else []
    environment = {**os.environ, "MC_LOG_LEVEL": "ERROR"}
    seen: dict[int, list[dict[str, float]]] = {count: [] for count in args.destinations}
    for _ in range(args.rounds):
        for count in args.destinations:
            said = subprocess.check_output([*command, f"--child={count}"], env=environment, timeout=600)
            seen[count].append(json.loads(said.splitlines()[-1]))
            print(f"{count} destinations: {seen[count][-1]['step']:.0f} ms a step", file=sys.stderr, flush=True)
    print(f"| destinations | {' | '.join(COLUMNS.values())} |\n|---:|{'---:|' * len(COLUMNS)}")
    for count, results in seen.items():
        row = (statistics.median(each[name] for each in results) for name in COLUMNS)
        print(f"| {count} | {' | '.join(f'{value:.1f}' for value in row)} |")


if __name__ == "__main__":
    main()
