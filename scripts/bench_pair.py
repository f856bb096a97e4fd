# SPDX-License-Identifier: Apache-2.0
"""Time to the first token, interleaved in one run: (a) one engine of P's TP, (b) a pair with vLLM's in-tree
MooncakeConnector over TCP, (c) a pair with this package behind its metaserver.

All three run at once and are asked one after another, the same fresh prompt each, in rotating order, each on a machine
on which everybody else has come to rest (the in-tree pair is stopped while it is not asked). vLLM's shared-memory queue spins for a second after every message, which on two cores is the largest cost of all; so every
table is made twice: `polite` replaces that spin in all three systems, `as it is` in none (nor does our D nap then).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.support.client import Answer, body_of, complete, prompt
from scripts.support.cluster import STRICT, Cluster, fresh_directory
from scripts.support.compare import Tally
from scripts.support.engine import Engine
from scripts.support.in_tree import PLUGIN, Ask, mooncake
from scripts.support.models import RECIPES, ensure
from scripts.support.spec import EngineSpec
from scripts.support.timeline import REPORTED, RESERVED, Trace

MODEL = "base16"
LENGTHS = (512, 2048)
WANTED = {(1, 512): 1.30, (1, 2048): 1.05, (2, 512): 1.30, (2, 2048): 1.10}  # (c) / (a)
NAMES = {"a": "one engine", "b": "in-tree Mooncake", "c": "this package"}

RESTING = 0.85  # idle share of two processors; whoever spins takes half, whoever naps a hundredth
REST_LOOK_S, REST_LIMIT_S = 0.5, 90.0


@dataclass(frozen=True)
class System:
    """How one of the three is asked. `paused` are stopped (SIGSTOP) while others are asked: after an unequal transfer
    the in-tree connector's P keeps a core busy for as long as it runs, which would be counted against the others."""

    ask: Ask
    paused: tuple[Engine, ...] = ()

    def answer(self, tokens: list[int]) -> Answer:
        for engine in self.paused:
            engine.process.resume()
        try:
            return self.ask(tokens)
        finally:
            for engine in self.paused:
                engine.process.pause()


@dataclass(frozen=True)
class Sample:
    system: str
    length: int
    ttft: float
    sent: float


def shape() -> dict[str, Any]:
    return {"max_len": 2624, "chunk": 2560, "kv_bytes": 384 << 20, "max_seqs": 8, "block_size": 128}


def start_all(cluster: Cluster, p_tp: int, polite: bool, wanted: str) -> dict[str, System]:
    """Five engines and a metaserver, or those of the systems wanted; returns how each system is asked."""
    model = ensure(MODEL)
    common = {**shape(), "environment": {"VLLM_ASCEND_PD_PATIENT_SHM": "1" if polite else "0"}}
    systems: dict[str, System] = {}
    if "a" in wanted:
        (single,) = cluster.start(EngineSpec(f"a{p_tp}-single", model, tp=p_tp, **common))
        systems["a"] = System(lambda tokens: complete(single.url, body_of(tokens, 4)))
    if "b" in wanted:
        systems["b"] = start_in_tree(cluster, model, p_tp, common)
    if "c" in wanted:
        systems["c"] = start_ours(cluster, model, p_tp, common, polite)
    return systems


def start_ours(cluster: Cluster, model: Path, p_tp: int, common: dict[str, Any], polite: bool) -> System:
    port = cluster.port()
    config = cluster.push_config(verify="off", patient=polite, patient_shm="on" if polite else "off")
    d_side = {**config, "metaserver_urls": [f"http://127.0.0.1:{port}"]}
    prefill, decode = cluster.start(
        EngineSpec(f"c{p_tp}-prefill", model, role="kv_producer", tp=p_tp, extra=config, **common),
        EngineSpec(f"c{p_tp}-decode", model, role="kv_consumer", extra=d_side, **common),
    )
    front = cluster.metaserver([prefill], [decode], port, STRICT)
    return System(lambda tokens: complete(front.url, body_of(tokens, 4)))


def start_in_tree(cluster: Cluster, model: Path, p_tp: int, common: dict[str, Any]) -> System:
    bootstrap = cluster.port()
    both: dict[str, Any] = {
        **common,
        "connector": "MooncakeConnector",
        "extra": {"mooncake_protocol": "tcp"},
        "plugins": (PLUGIN,),
    }
    p_side = {**both, "environment": {**common["environment"], "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap)}}
    prefill, decode = cluster.start(
        EngineSpec(f"b{p_tp}-prefill", model, role="kv_producer", tp=p_tp, **p_side),
        EngineSpec(f"b{p_tp}-decode", model, role="kv_consumer", **both),
    )
    return System(mooncake(prefill, decode, bootstrap, 4), (prefill, decode))


def rest() -> float:
    """Wait until the processors are idle; how long that took. A system that still works after its answer (vLLM's queues
    spin for a second) would be paid for by the next one asked."""
    began = time.monotonic()
    while time.monotonic() < began + REST_LIMIT_S:
        idle, total = processor_ticks()
        time.sleep(REST_LOOK_S)
        idle_then, total_then = processor_ticks()
        if idle_then - idle >= RESTING * (total_then - total):
            break
    return time.monotonic() - began


def processor_ticks() -> tuple[int, int]:
    with Path("/proc/stat").open() as stat:
        ticks = [int(word) for word in stat.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def measure(systems: dict[str, System], rounds: int, seed: int) -> tuple[list[Sample], Tally]:
    vocab, tally, samples = RECIPES[MODEL].vocab, Tally(), []
    names = list(systems)
    for warm in range(2):
        for length in LENGTHS:
            for system in systems.values():
                system.answer(prompt(length, seed + 1000 + warm, vocab))
    for number in range(rounds):
        for length in LENGTHS:
            tokens = prompt(length, seed + number, vocab)
            first: Answer | None = None
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                rested = rest()
                if rested > REST_LIMIT_S:
                    print(f"  the machine did not come to rest within {REST_LIMIT_S:.0f} s before {name}", flush=True)
                answer = systems[name].answer(tokens)
                samples.append(Sample(name, length, answer.ttft, answer.started))
                tally.answers += 1
                if first is not None and answer.tokens != first.tokens:
                    tally.excused.append(f"{name}, {length} tokens: {answer.tokens}, the first said {first.tokens}")
                first = first or answer
    return samples, tally


def table(samples: list[Sample], p_tp: int, title: str) -> list[str]:
    rows = [f"\n{title}, TP {p_tp}→1: TTFT in ms, median (lowest–highest)"]
    rows.append(
        f"{'tokens':>7}  {'(a) one engine':>22}  {'(b) in-tree Mooncake':>22}  {'(c) this package':>22}    c/a    c/b"
    )
    for length in LENGTHS:
        cells, medians = [], {}
        for name in NAMES:
            values = [s.ttft * 1e3 for s in samples if s.system == name and s.length == length]
            if not values:
                cells.append("-".rjust(22))
                medians[name] = math.nan
                continue
            medians[name] = statistics.median(values)
            cells.append(f"{medians[name]:8.0f} ({min(values):.0f}–{max(values):.0f})".rjust(22))
        over_a, over_b = medians["c"] / medians["a"], medians["c"] / medians["b"]
        verdict = f"wanted c/a <= {WANTED[p_tp, length]:.2f} and c/b < 1"
        good = over_a <= WANTED[p_tp, length] and over_b < 1
        rows.append(
            f"{length:7}  {'  '.join(cells)}  {over_a:5.2f}  {over_b:5.2f}  {'met' if good else 'NOT MET'} ({verdict})"
        )
    return rows


def profile(samples: list[Sample], trace: Trace) -> list[str]:
    """Where (c)'s time goes, from the traces: medians of each leg, ms."""
    legs: dict[int, dict[str, list[float]]] = {length: {} for length in LENGTHS}
    for sample in (s for s in samples if s.system == "c"):
        transfers = trace.transfers(sample.sent, sample.sent + sample.ttft)
        if not transfers:
            continue
        way = trace.way(transfers[-1])
        if not way.writes or not way.computed or REPORTED not in way.moments:
            continue
        hooks = list(way.computed.values())
        marks = {
            "client → D reserves": (sample.sent, way.moments[RESERVED]),
            "D reserves → P's first layer": (way.moments[RESERVED], min(hooks)),
            "P's first → last layer": (min(hooks), max(hooks)),
            "last layer → last byte on D": (max(hooks), max(w.landed for w in way.writes)),
            "last byte → D reports": (max(w.landed for w in way.writes), way.moments[REPORTED]),
            "D reports → first token": (way.moments[REPORTED], sample.sent + sample.ttft),
            "hidden share, %": (0.0, way.hidden() / 10),
        }
        for leg, (begin, end) in marks.items():
            legs[sample.length].setdefault(leg, []).append((end - begin) * 1e3)
    rows = ["  where (c)'s time goes, medians in ms:" + "".join(f"{length:>10} tokens" for length in LENGTHS)]
    for leg in next(iter(legs.values())):
        cells = (f"{statistics.median(legs[length].get(leg, [0.0])):17.1f}" for length in LENGTHS)
        rows += [f"    {leg:36}{''.join(cells)}"]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length and system (default 5)")
    parser.add_argument("--p-tp", type=int, nargs="+", default=[1, 2], help="TP sizes of prefill (default 1 2)")
    parser.add_argument("--spin", choices=("both", "polite", "as-it-is"), default="both")
    parser.add_argument("--systems", default="abc", help="which of a, b and c (default abc)")
    args = parser.parse_args()
    modes = [("polite", True), ("as it is", False)]
    modes = [mode for mode in modes if args.spin in ("both", mode[0].replace(" ", "-"))]
    out = fresh_directory("bench_pair")
    rows: list[str] = []
    leaks: list[str] = []
    for title, polite in modes:
        for p_tp in args.p_tp:
            directory: Path = out / f"{title.replace(' ', '-')}-{p_tp}"
            with Cluster(directory) as cluster:
                samples, tally = measure(
                    start_all(cluster, p_tp, polite, args.systems), args.rounds, seed=p_tp * 10_000
                )
            leaks += cluster.leaks
            made = [
                *table(samples, p_tp, title),
                *(profile(samples, Trace(cluster.traces)) if "c" in args.systems else []),
            ]
            made += [f"  tokens differ: {line}" for line in tally.excused] or ["  all tokens are equal"]
            print("\n".join(made), flush=True)
            rows += made
    print("\n==== all tables ====" + "\n".join(rows))
    for line in leaks:
        print(f"left behind: {line}")
    return 3 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())
