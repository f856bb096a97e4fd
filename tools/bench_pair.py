# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of four systems, interleaved in one run.

(a) one engine of P's TP, (b) a pair with vLLM's in-tree MooncakeConnector over TCP, (c) a pair with this package behind
its metaserver, (n) a pair with NixlConnector.

All run at once and get the same fresh prompt one after another, in rotating order, each on an idle machine (in-tree
pairs are stopped while they are not asked). vLLM's shared-memory queue spins for a second after every message, which on
two cores is the largest cost of all; so every table is made twice: `patient` replaces that spin in all systems, `as it
is` in none (nor does our D nap then).

With --beside, further pairs with this package have other settings (keys of the connector, or of the environment in
capitals), or are another version: CHECKOUT=FOLDER, with its extension built.

With --warm the prompts have 2,048 tokens of which P, and the single engine, have 95 % in their prefix caches, and D
none, half, or as much.

With --chat nothing of this runs but one pair with this package, and a long chat that goes to P as it came and as D's
token ids, in turns (bench_chat.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tools import bench_chat
from tools.support.client import TimedAnswer, body_of, complete, prompt
from tools.support.cluster import STRICT, Cluster, Metaserver, fresh_directory, say, say_leaks
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess
from tools.support.in_tree import Ask, install_nixl, start_mooncake, start_nixl
from tools.support.models import RECIPES, ensure
from tools.support.processor_time import Scheduled, parts, scheduled
from tools.support.spec import EngineSpec, MetaserverSpec
from vllm_ascend_pd.viewer.timeline import REPORTED, RESERVED, Trace

ASKED_D, ASKED_P = "metaserver decode", "metaserver prefill"
P_SAID, D_SAID = "metaserver prefilled", "metaserver first_byte"
MODEL = "base16"
TOKENS = 4  # of an answer
KV_BYTES_PER_TOKEN = 32 << 10
NAMES = {"a": "(a) one engine", "b": "(b) in-tree Mooncake", "n": "(n) in-tree NIXL", "c": "(c) this package"}


@dataclass(frozen=True)
class PairPrompts:
    """Prompts of one kind, and the wanted ratios: (c) / (a) by P's TP, and (c) / the better in-tree pair."""

    length: int
    over_one: tuple[float, float]  # with P of TP 1, of TP 2
    over_in_tree: float
    on_p: int = 0  # tokens in the prefix cache of P, and of the single engine
    on_d: int = 0

    def __str__(self) -> str:
        return f"{self.length}" if not self.on_p else f"{self.length}, {self.on_d} on D"


BLOCK = {False: 128, True: 32}  # smaller for warm prompts, so that 95 % are whole blocks
COLD = (PairPrompts(512, (1.06, 1.20), 1.0), PairPrompts(2048, (1.03, 1.10), 1.0))
WARM = (
    PairPrompts(2048, (1.15, 1.15), 0.6, on_p=61 * 32),
    PairPrompts(2048, (1.15, 1.15), 0.6, on_p=61 * 32, on_d=32 * 32),
    # Next to nothing has to be copied here, so the ratio cannot fall by better copying.
    PairPrompts(2048, (math.inf, math.inf), math.inf, on_p=61 * 32, on_d=60 * 32),
)

RESTING = 0.85  # idle share of two processors; a spinning process takes half, a napping one a hundredth
REST_LOOK_S, REST_LIMIT_S = 0.5, 90.0


@dataclass(frozen=True)
class PairSystem:
    """Requests to one system, and its engines for prefill and decode.

    `paused` are stopped (SIGSTOP) while others are asked: after an unequal transfer the in-tree connector's P keeps a
    core busy forever, which would be counted against the others.
    """

    ask: Ask
    prefill: EngineProcess
    decode: EngineProcess | None = None
    paused: tuple[EngineProcess, ...] = ()
    front: Metaserver | None = None  # this package's

    def parts(self) -> dict[str, list[int]]:
        """Return the processes that a request passes, but for those that compute; none without our metaserver."""
        if self.front is None or self.decode is None:
            return {}
        p, d = parts(self.prefill), parts(self.decode)
        of_engines = {f"{side}'s {part}": by[part] for side, by in (("D", d), ("P", p)) for part in ("server", "core")}
        return {"metaserver": [one.pid for one in self.front.process.members()], **of_engines}

    def answer(self, tokens: list[int], case: PairPrompts) -> tuple[TimedAnswer, dict[str, Scheduled]]:
        """Return the answer, and what the processes that it passed have done until its last token."""
        for engine, head in ((self.prefill, tokens[: case.on_p]), (self.decode, tokens[: case.on_d])):
            if engine is not None and head:  # into its cache: whole blocks, and one token to compute
                with self.running():
                    complete(engine.url, body_of([*head, 1], 1))
        rest()
        with self.running():
            passed = self.parts()
            before = {part: scheduled(pids) for part, pids in passed.items()}
            answer = self.ask(tokens)
            return answer, {part: scheduled(pids).since(before[part]) for part, pids in passed.items()}

    @contextmanager
    def running(self) -> Iterator[None]:
        for engine in self.paused:
            engine.process.resume()
        try:
            yield
        finally:
            for engine in self.paused:
                engine.process.pause()


@dataclass(frozen=True)
class TimeSample:
    system: str
    case: PairPrompts
    ttft: float
    sent: float
    start: int = 0
    spent: Mapping[str, Scheduled] = field(default_factory=dict)  # by what it passed


def shape(warm: bool) -> dict[str, Any]:
    return {"max_len": 2624, "chunk": 2560, "kv_bytes": 384 << 20, "max_seqs": 8, "block_size": BLOCK[warm]}


def start_all(
    cluster: Cluster, p_tp: int, patient: bool, wanted: str, warm: bool, beside: dict[str, list[str]]
) -> dict[str, PairSystem]:
    """Start the engines of the wanted systems, and our metaservers. Return how to ask each system."""
    model = ensure(MODEL)
    common = {**shape(warm), "spins": not patient}
    systems: dict[str, PairSystem] = {}
    if "a" in wanted:
        (single,) = cluster.start(EngineSpec(f"a{p_tp}-single", model, tp=p_tp, **common))
        systems["a"] = PairSystem(lambda tokens: complete(single.url, body_of(tokens, TOKENS)), single)
    for letter, start in (("b", start_mooncake), ("n", start_nixl)):
        if letter in wanted and (letter == "b" or install_nixl()):
            prefill, decode, ask = start(cluster, partial(pair_spec, model, p_tp, common), TOKENS)
            systems[letter] = PairSystem(ask, prefill, decode, (prefill, decode))
            for engine in (prefill, decode):
                engine.process.pause()
    if "c" in wanted:
        systems["c"] = start_ours(cluster, model, p_tp, common, patient)
    for name, settings in beside.items():
        systems[name] = start_ours(cluster, model, p_tp, common, patient, f"-{name[1]}", settings)
    return systems


def start_ours(
    cluster: Cluster,
    model: Path,
    p_tp: int,
    common: dict[str, Any],
    patient: bool,
    mark: str = "",
    settings: Sequence[str] = (),
) -> PairSystem:
    """Start a pair with this package behind its metaserver.

    `settings` are KEY=VALUE of the connector, or of the environment if in capitals. CHECKOUT is the folder of another
    version of this package, which the pair's engines and its metaserver run.
    """
    port = cluster.port()
    config = cluster.push_config(verify="off", patient=patient)
    environment: dict[str, str] = {}
    paths: tuple[Path, ...] = ()
    for key, value in (setting.split("=", 1) for setting in settings):
        if key == "CHECKOUT":
            paths, environment["PYTHONSAFEPATH"] = (Path(value).resolve(),), "1"
        elif key.isupper():
            environment[key] = value
        else:
            config[key] = json.loads(value) if value[:1].isdigit() or value in ("true", "false") else value
    d_side = {**config, "metaserver_urls": [f"http://127.0.0.1:{port}"]}
    ways: dict[str, Any] = {"plugins": paths, "environment": environment}
    prefill, decode = cluster.start(
        pair_spec(model, p_tp, common, f"ours{mark}-p", "kv_producer", extra=config, **ways),
        pair_spec(model, p_tp, common, f"ours{mark}-d", "kv_consumer", extra=d_side, **ways),
    )
    front = cluster.metaserver(
        [prefill], [decode], port, MetaserverSpec((*STRICT, "--trace-dir", str(cluster.traces)), **ways)
    )
    return PairSystem(lambda tokens: complete(front.url, body_of(tokens, TOKENS)), prefill, decode, front=front)


def pair_spec(model: Path, p_tp: int, common: dict[str, Any], name: str, role: str, **more: Any) -> EngineSpec:
    tp = p_tp if role == "kv_producer" else 1
    return EngineSpec(f"{name}{p_tp}", model, role=role, tp=tp, **common, **more)


def rest() -> None:
    """Wait until the processors are idle.

    Work after an answer (vLLM's queues spin for a second) would delay the next system's answer.
    """
    limit = time.monotonic() + REST_LIMIT_S
    while time.monotonic() < limit:
        idle, total = processor_ticks()
        time.sleep(REST_LOOK_S)
        idle_then, total_then = processor_ticks()
        if idle_then - idle >= RESTING * (total_then - total):
            return
    say(f"the machine did not come to rest within {REST_LIMIT_S:.0f} s")


def processor_ticks() -> tuple[int, int]:
    with Path("/proc/stat").open() as stat:
        ticks = [int(word) for word in stat.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def measure(
    systems: dict[str, PairSystem], cases: Sequence[PairPrompts], rounds: int, seed: int
) -> tuple[list[TimeSample], AnswerTally]:
    vocab, tally, samples = RECIPES[MODEL].vocab, AnswerTally(), []
    names = list(systems)
    for warm in range(2):
        for place, case in enumerate(cases):
            for system in systems.values():
                system.answer(prompt(case.length, seed + 1000 + 100 * place + warm, vocab), case)
    for number in range(rounds):
        for place, case in enumerate(cases):
            tokens = prompt(case.length, seed + 100 * place + number, vocab)
            first: TimedAnswer | None = None
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                answer, spent = systems[name].answer(tokens, case)
                samples.append(TimeSample(name, case, answer.ttft, answer.started, spent=spent))
                tally.answers += 1
                if first is not None and answer.tokens != first.tokens:
                    tally.excused.append(f"{name}, {case} tokens: {answer.tokens}, the first said {first.tokens}")
                first = first or answer
        say(f"round {number + 1} of {rounds}")
    return samples, tally


def table(
    samples: list[TimeSample], cases: Sequence[PairPrompts], p_tp: int, title: str, beside: dict[str, list[str]]
) -> list[str]:
    titles = {**NAMES, **{name: f"{name} {' '.join(settings)}" for name, settings in beside.items()}}
    names = [name for name in titles if any(s.system == name for s in samples)]
    rows = [f"\n{title}, TP {p_tp}→1: TTFT in ms, median (lowest–highest)"]
    rows.append(f"{'tokens':>16}" + "".join(f"  {titles[name]:>22}" for name in names) + "    c/a   c/in-tree")
    for case in cases:
        cells, medians = [], dict.fromkeys(titles, math.nan)
        for name in names:
            values = [s.ttft * 1e3 for s in samples if s.system == name and s.case == case]
            medians[name] = statistics.median(values)
            cells.append(f"  {medians[name]:8.0f} ({min(values):.0f}–{max(values):.0f})".ljust(24))
        over_a = medians["c"] / medians["a"]
        over_b = medians["c"] / min((medians[name] for name in "bn" if name in names), default=math.nan)
        good = over_a <= case.over_one[p_tp - 1] and not over_b > case.over_in_tree
        if math.isinf(case.over_in_tree):
            rows.append(f"{case!s:>16}{''.join(cells)}  {over_a:5.2f}  {over_b:5.2f}  (nearly nothing is copied)")
            continue
        wanted = f"wanted c/a <= {case.over_one[p_tp - 1]:.2f} and c/in-tree <= {case.over_in_tree:.1f}"
        rows.append(
            f"{case!s:>16}{''.join(cells)}  {over_a:5.2f}  {over_b:5.2f}  {'met' if good else 'NOT MET'} ({wanted})"
        )
    return rows


def by_start(samples: list[TimeSample], cases: Sequence[PairPrompts]) -> list[str]:
    """Return each start's medians: an engine may compute a tenth faster than another one of the same code."""
    rows = []
    for case in cases:
        for name in dict.fromkeys(sample.system for sample in samples):
            values: dict[int, list[float]] = {}
            for sample in (s for s in samples if s.system == name and s.case == case):
                values.setdefault(sample.start, []).append(sample.ttft * 1e3)
            rows.append(
                f"  by start, {case!s}, {name}: {', '.join(f'{statistics.median(v):.0f}' for v in values.values())}"
            )
    return rows


def profile(samples: list[TimeSample], cases: Sequence[PairPrompts], trace: Trace) -> list[str]:
    """Return the medians of (c)'s spans of time, in ms, from the traces, and of two shares.

    The first layer's span has P's scheduling and that layer; P's answer comes behind the rest of its step.
    """
    figures: dict[PairPrompts, dict[str, list[float]]] = {case: {} for case in cases}
    for sample in (s for s in samples if s.system == "c"):
        transfers = trace.transfers(sample.sent, sample.sent + sample.ttft)
        if not transfers:
            continue
        way = trace.timeline_of(transfers[-1])
        if not way.writes or not way.computed or not {REPORTED, ASKED_D, ASKED_P, P_SAID, D_SAID} <= way.moments.keys():
            continue
        hooks, at = list(way.computed.values()), way.moments
        marks = {
            "client → metaserver asks D": (sample.sent, at[ASKED_D]),
            "→ D reserves": (at[ASKED_D], at[RESERVED]),
            "→ metaserver asks P": (at[RESERVED], at[ASKED_P]),
            "→ P's first layer": (at[ASKED_P], min(hooks)),
            "→ P's last layer": (min(hooks), max(hooks)),
            "last layer → last byte on D": (max(hooks), max(w.landed for w in way.writes)),
            "→ D reports": (max(w.landed for w in way.writes), at[REPORTED]),
            "last layer → metaserver has P's answer": (max(hooks), at[P_SAID]),
            "both → metaserver has D's first token": (max(at[REPORTED], at[P_SAID]), at[D_SAID]),
            "→ client": (at[D_SAID], sample.sent + sample.ttft),
            "hidden share, %": (0.0, way.hidden() / 10),
            "bytes written / bytes that D had not": (
                0.0,
                way.nbytes / ((sample.case.length - sample.case.on_d) * KV_BYTES_PER_TOKEN) / 1e3,
            ),
        }
        for name, (begin, end) in marks.items():
            figures[sample.case].setdefault(name, []).append((end - begin) * 1e3)
    rows = ["  where (c)'s time goes, medians in ms:" + "".join(f"{case!s:>18}" for case in cases)]
    for name in next(iter(figures.values())):
        digits = 2 if name.startswith("bytes") else 1
        values = (statistics.median(figures[case].get(name, [0.0])) for case in cases)
        rows += [f"    {name:36}{''.join(f'{value:18.{digits}f}' for value in values)}"]
    return [*rows, *work(samples, cases)]


def work(samples: list[TimeSample], cases: Sequence[PairPrompts]) -> list[str]:
    """Return what the processes around the model do for a request of (c)'s: work, and waits for a processor."""
    rows = [f"  until its {TOKENS}th token, medians: ms on a processor; ms ready without one; times put on one"]
    mine = {case: [one.spent for one in samples if (one.system, one.case) == ("c", case)] for case in cases}
    for part in next(iter(mine[cases[0]]), {}):
        cells = []
        for of_case in mine.values():
            ran, ready, times = (
                statistics.median(values) for values in zip(*(one[part] for one in of_case), strict=True)
            )
            cells.append(f"{ran * 1e3:.1f}; {ready * 1e3:.1f}; {times:.0f}")
        rows.append(f"    {part:36}{''.join(f'{cell:>18}' for cell in cells)}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length and system (default 5)")
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        help="how often all engines are started; the profile is of the last (default 1)",
    )
    parser.add_argument("--p-tp", type=int, nargs="+", default=[1, 2], help="TP sizes of prefill (default 1 2)")
    parser.add_argument("--spin", choices=("both", "patient", "as-it-is"), default="both")
    parser.add_argument("--systems", default="", help="which of a, b, c and n (default abc; abcn with --warm)")
    parser.add_argument("--warm", action="store_true", help="prompts of which P has 95 %% in its prefix cache")
    parser.add_argument(
        "--beside",
        action="append",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="one more pair with this package, with these settings; may be repeated",
    )
    parser.add_argument("--chat", type=int, metavar="TOKENS", help="a chat of so many, tokenised by D alone or P too")
    args = parser.parse_args()
    if args.chat:
        with Cluster(fresh_directory("bench_chat")) as cluster:
            print("\n".join(bench_chat.compare(cluster, args.chat, args.rounds)))
        return say_leaks(cluster.leaks)
    beside = {f"({letter})": settings for letter, settings in zip("defghijk", args.beside, strict=False)}
    if len(args.beside) > len(beside) or any("=" not in setting for settings in args.beside for setting in settings):
        parser.error(f"--beside takes KEY=VALUE, at most {len('defghijk')} times")
    cases, systems = WARM if args.warm else COLD, args.systems or ("abcn" if args.warm else "abc")
    modes = [("patient", True), ("as it is", False)]
    modes = [mode for mode in modes if args.spin in ("both", mode[0].replace(" ", "-"))]
    out = fresh_directory("bench_pair")
    rows: list[str] = []
    leaks: list[str] = []
    for title, patient in modes:
        for p_tp in args.p_tp:
            samples: list[TimeSample] = []
            differ: list[str] = []
            for start in range(args.starts):
                directory: Path = out / f"{title.replace(' ', '-')}-{p_tp}-{start}"
                with Cluster(directory) as cluster:
                    started = start_all(cluster, p_tp, patient, systems, args.warm, beside)
                    last, tally = measure(started, cases, args.rounds, seed=p_tp * 10_000 + 1000 * start)
                samples += [replace(sample, start=start) for sample in last]
                differ += [f"  tokens differ: {line}" for line in tally.excused]
                leaks += cluster.leaks
            made = [
                *table(samples, cases, p_tp, title, beside),
                *(by_start(samples, cases) if args.starts > 1 else []),
                *(profile(last, cases, Trace(cluster.traces)) if "c" in systems else []),
            ]
            made += differ or ["  all tokens are equal"]
            print("\n".join(made), flush=True)
            rows += made
    print("\n==== all tables ====" + "\n".join(rows))
    return say_leaks(leaks)


if __name__ == "__main__":
    sys.exit(main())
