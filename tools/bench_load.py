# SPDX-License-Identifier: Apache-2.0
"""Systems of two engines each under the same loads, in turns in one run.

(a) two engines that compute prompts and answers, behind this package's router; (b) a pair with this package behind its
router; (c) a pair with vLLM's MooncakeConnector over TCP behind vLLM's example of a router for it; (d) a pair with
NixlConnector behind vLLM's toy proxy. Each engine has one thread on a core of its own; router and client have other
cores if there are four, else all. With --vllm-ascend it is pairs under vllm-ascend 0.23 on a CANN in host memory: (b)
again, and vllm-ascend's connectors behind their examples of routers, (e) MooncakeLayerwiseConnector and (f)
MooncakeConnectorV1.

Loads: Poisson arrivals (--rates), closed loops (--clients), both with each --prefix; chats of eight turns (--chats);
requests of a trace in the form of Mooncake's public ones (--trace). Chats have a client of their own; for all others
it is `vllm bench serve`, whose figures these are. A load's requests, times and prompts are the same for each system,
and others in each repeat; they are kept as a trace file that `vllm-ascend-pd plan --load` reads.

Goodput: answers a second with TTFT and mean TPOT within multiples of what one idle engine takes. Beside the pair of
(b) stands what `plan --load` says of the same requests. `computed / new`:
tokens of prompts that engines computed, for each that was in no earlier prompt of the load. `bytes / lacked`: bytes
that P wrote for each of KV that D lacked.

With --push nothing of this runs, but streams on a pair's D while prompts are pushed into it: the gaps between their
tokens as ratios to those without a push. With --destinations it is the time of P's steps while it pushes to so many
D's. With --overload it is a pair under multiples of what it can do: how those requests fare that it accepts, and that
all others are refused.

A run without these three that was ended goes on where it was if it is started with the same flags (--out).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.bench_load_parts import client, destinations, figures, overload, planned, plot, pushed
from tools.bench_load_parts.figures import MeasuredPoint
from tools.bench_load_parts.kept import KeptPoints, OtherRun
from tools.bench_load_parts.loads import CHUNK, TURNS, Lengths, LoadCase, new_tokens, renamed, requests, written
from tools.bench_load_parts.systems import (
    MODEL,
    NAMES,
    ON_ASCEND,
    TOKEN_BYTES,
    LoadedSystem,
    started,
    started_on_ascend,
)
from tools.support.client import body_of, complete, prompt
from tools.support.cluster import Cluster, fresh_directory, say, say_leaks
from tools.support.fork_server import ForkServers
from tools.support.models import RECIPES, ROOT
from vllm_ascend_pd.cli.load.arrivals import Arrival, Limits, read
from vllm_ascend_pd.cli.load.engine import EngineSizes

IDLE_REQUESTS = 5
MODEL_LEN = 2048
STEP_TOKENS, AT_ONCE = 2048, 32  # --max-num-batched-tokens and --max-num-seqs
MOST_DESTINATIONS, MOST_PUSHED = 8, 64
# What all points of a folder have in common: the same load is the same requests, and good means the same.
SETTINGS = (
    "prompt",
    "answer",
    "turn",
    "seconds",
    "trace",
    "trace_lengths",
    "ttft_times",
    "tpot_times",
    "kv_mib",
    "vllm_ascend",
)


def main() -> int:
    args = _parsed()
    if args.push:
        args.systems = args.systems.replace("a", "")
        return pushed.run(args)
    if args.destinations:
        return destinations.run(args)
    if args.overload:
        return overload.run(args)
    trace = read(args.trace.read_text()) if args.trace else []
    try:
        kept = KeptPoints(args.out, {name: str(getattr(args, name)) for name in SETTINGS})
    except OtherRun as other:
        say(str(other))
        return 2
    wanted = [
        (repeat, case, system)
        for repeat in range(args.repeats)
        for case in _cases(args)
        for system in turned(args.systems, repeat)
    ]
    missing = [one for one in wanted if not kept.has(one[2], one[1], one[0])]
    leaks: list[str] = []
    if missing:
        with (
            Cluster(fresh_directory("bench_load")) as cluster,
            ForkServers([client.SERVE], cluster.logs) as forks,  # the client's imports take longer than a short point
        ):
            shape = {"max_len": MODEL_LEN, "chunk": STEP_TOKENS, "kv_bytes": args.kv_mib << 20, "max_seqs": AT_ONCE}
            start = started_on_ascend if args.vllm_ascend else started
            with start(cluster, args.systems, shape) as systems:
                _run(args, kept, missing, systems, trace, forks)
        leaks = cluster.leaks
    else:
        say(f"all points are in {args.out}; with another --out they are measured anew")
    _report(args, kept)
    return say_leaks(leaks)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[0.3, 0.6], help="requests a second, Poisson (default: 0.3 0.6)"
    )
    parser.add_argument("--clients", type=int, nargs="*", default=[], help="closed loops of so many clients")
    parser.add_argument(
        "--chats", type=int, nargs="*", default=[], help=f"so many chats at once, of {TURNS} turns each"
    )
    parser.add_argument(
        "--prefix", type=int, nargs="*", default=[0], help="%% of each prompt that is common to all (default: 0)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines: timestamp (ms), input_length, output_length, hash_ids"
    )
    parser.add_argument(
        "--speeds", type=float, nargs="*", default=[1.0], help="times as fast as the trace (default: 1)"
    )
    parser.add_argument(
        "--trace-lengths", type=float, default=1.0, help=f"factor on its lengths: {MODEL_LEN} tokens fit (default: 1)"
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer (default: 48)")
    parser.add_argument("--turn", type=int, default=64, help="tokens that a client adds to a chat (default: 64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, for each point (default: 60)")
    parser.add_argument("--repeats", type=int, default=3, help="of each point (default: 3)")
    parser.add_argument("--systems", help="which of a, b, c and d (default: abc), or of b, e and f (default: bef)")
    parser.add_argument(
        "--vllm-ascend", action="store_true", help="vllm-ascend's engines in host memory (.venv-ascend-host-0.23)"
    )
    parser.add_argument(
        "--ttft-times", type=float, default=5.0, help="good: TTFT within so many times an idle engine's (default: 5)"
    )
    parser.add_argument(
        "--tpot-times", type=float, default=2.0, help="good: TPOT within so many times an idle engine's (default: 2)"
    )
    parser.add_argument("--kv-mib", type=int, default=512, help="cache of each engine (default: 512)")
    others = parser.add_mutually_exclusive_group()
    others.add_argument(
        "--push",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="push so many prompts at once into a D that streams",
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[8], help="with --push: streams on D (default: 8)")
    parser.add_argument("--pushed", type=int, default=2048, help="with --push: tokens of such a prompt (default: 2048)")
    parser.add_argument(
        "--alone", action="store_true", help="with --push: phases, too, in which P computes such prompts for nobody"
    )
    parser.add_argument(
        "--cached",
        action="store_true",
        help="with --push: P has the prompts in its prefix cache, and they come at once",
    )
    both = "with --push and --destinations"
    parser.add_argument(
        "--p-tp", type=int, default=1, choices=(1, 2, 4), help=f"{both}: P's ranks, on one core (default: 1)"
    )
    parser.add_argument("--regroup", action="store_true", help=f"{both}: P's ranks exchange heads before they push")
    parser.add_argument("--verify", action="store_true", help=f"{both}: D checks every block that came")
    others.add_argument(
        "--destinations",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="P's steps while it pushes to so many D's, which have one core",
    )
    others.add_argument(
        "--overload",
        type=float,
        nargs="+",
        default=[],
        metavar="TIMES",
        help="so many times the requests that the pair can do",
    )
    parser.add_argument(
        "--admit", type=int, default=4, help="with --overload: requests under way, --max-running (default: 4)"
    )
    parser.add_argument(
        "--waiting", type=int, default=0, help="with --overload: requests that wait, --max-waiting (default: 0)"
    )
    parser.add_argument(
        "--point-limit", type=float, default=600.0, help="seconds after which a point is given up (default: 600)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out/bench_load/run", help="folder of the run (default: out/bench_load/run)"
    )
    args = parser.parse_args()
    letters = "".join(ON_ASCEND) if args.vllm_ascend else "abcd"
    args.systems = letters[:3] if args.systems is None else args.systems
    if not args.systems or set(args.systems) - set(letters):
        parser.error(f"--systems takes letters of {letters}" + (" with --vllm-ascend" if args.vllm_ascend else ""))
    if any(not 0 <= share < 100 for share in args.prefix):
        parser.error("--prefix takes 0 to 99")
    longest = max(args.prompt + args.answer, TURNS * (args.turn + args.answer) if args.chats else 0)
    if longest > MODEL_LEN:
        parser.error(f"{longest} tokens do not fit into the model's {MODEL_LEN}")
    numbers = (*args.rates, *args.clients, *args.chats, *args.speeds, args.trace_lengths, args.seconds, args.repeats)
    numbers += (*args.push, *args.streams, args.pushed, args.p_tp, *args.destinations, *args.overload, args.admit)
    if min(*numbers, args.prompt, args.answer, args.turn) <= 0:
        parser.error("numbers are above 0")
    if wrong := _misfit(args):
        parser.error(wrong)
    return args


def _misfit(args: argparse.Namespace) -> str:
    """Return what is wrong with the flags of the runs that are no loads; an empty text: nothing."""
    for name in ("push", "streams", "destinations"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            return f"--{name} takes each number once"
    steps, most = destinations.STEP_TOKENS, max(args.destinations, default=1)
    if most > MOST_DESTINATIONS or steps % most:
        return f"--destinations: the largest is at most {MOST_DESTINATIONS}, each an engine, and divides {steps}"
    if args.push and not set(args.systems) & set("bcd"):
        return "--push needs a system with a D: --systems b, c or d"
    if max(args.push, default=1) > MOST_PUSHED or args.pushed > MODEL_LEN:
        return f"--push takes at most {MOST_PUSHED}, --pushed at most {MODEL_LEN}"
    if args.vllm_ascend and (args.push or args.destinations or args.overload):
        return "--vllm-ascend goes with loads, not with --push, --destinations or --overload"
    if args.regroup and args.p_tp == 1:
        return "--regroup needs --p-tp of at least 2"
    if (args.alone or args.cached) and not args.push:
        return "--alone and --cached go with --push"
    if (args.p_tp > 1 or args.verify) and not (args.push or args.destinations):
        return "--p-tp, --regroup and --verify go with --push or --destinations"
    return ""


def _cases(args: argparse.Namespace) -> list[LoadCase]:
    made = [LoadCase("rate", rate, share) for share in args.prefix for rate in args.rates]
    made += [LoadCase("clients", count, share) for share in args.prefix for count in args.clients]
    made += [LoadCase("chats", count) for count in args.chats]
    return made + ([LoadCase("trace", speed) for speed in args.speeds] if args.trace else [])


def turned(systems: str, repeat: int) -> str:
    """Return the systems in another order for each repeat: what the one before leaves behind hits another one."""
    turn = repeat % len(systems)
    return systems[turn:] + systems[:turn]


def _run(
    args: argparse.Namespace,
    kept: KeptPoints,
    missing: Sequence[tuple[int, LoadCase, str]],
    systems: dict[str, LoadedSystem],
    trace: list[Arrival],
    forks: ForkServers,
) -> None:
    idle = _idle(args, systems)
    limits = Limits(args.ttft_times * idle.ttft, args.tpot_times * idle.tpot)
    say(f"one engine, idle: TTFT {idle.ttft:.3f} s, TPOT {idle.tpot * 1e3:.1f} ms")
    missing = [one for one in missing if one[2] in systems]
    began = time.monotonic()
    for place, (repeat, case, letter) in enumerate(missing):
        done = f"[{time.monotonic() - began:5.0f} s] point {place + 1} of {len(missing)}: repeat {repeat + 1}, {case}"
        say(f"{done}, ({letter}) {NAMES[letter]}")
        point = _point(args, systems[letter], case, repeat, idle, limits, trace, forks)
        kept.add(MeasuredPoint(letter, case, repeat, point))
        if errors := point["errors"]:
            say(f"  {len(errors)} failed, the first one: {str(errors[0])[:300]}")
        if point.get("completed"):
            words = [f"goodput {point['request_goodput']:.2f}/s of {point['request_throughput']:.2f}"]
            words += [f"TTFT p50 {point['p50_ttft_ms'] / 1e3:.2f} s", f"TPOT p50 {point['p50_tpot_ms']:.0f} ms"]
            say("  " + ", ".join(words))


def _idle(args: argparse.Namespace, systems: dict[str, LoadedSystem]) -> Limits:
    """Return what one engine takes that has nothing else to do; the run's own first measurement, once it is made."""
    file = args.out / "idle.json"
    if not file.exists():
        system = next(iter(systems.values()))
        vocab = RECIPES[MODEL].vocab
        with system.running():
            answers = [
                complete(system.prefills[0].url, body_of(prompt(args.prompt, number, vocab), args.answer))
                for number in range(IDLE_REQUESTS + 1)
            ][1:]
        ttft = statistics.median(one.ttft for one in answers)
        tpot = statistics.median((one.seconds - one.ttft) / max(1, args.answer - 1) for one in answers)
        file.write_text(json.dumps(asdict(Limits(ttft, tpot))))
    return Limits(**json.loads(file.read_text()))


def _point(
    args: argparse.Namespace,
    system: LoadedSystem,
    case: LoadCase,
    repeat: int,
    idle: Limits,
    limits: Limits,
    trace: list[Arrival],
    forks: ForkServers,
) -> dict[str, Any]:
    """Measure once. A point that does not end in time, or whose client fails, has an error in place of figures."""
    lengths = Lengths(args.prompt, args.answer, args.seconds, args.turn, args.trace_lengths)
    idle_s, seed = idle.ttft + idle.tpot * (args.answer - 1), zlib.crc32(f"{case}/{repeat}".encode())
    with system.running():
        before = system.counts()
        try:
            if case.kind == "chats":
                count = max(int(case.value), round(args.seconds / (TURNS * idle_s)))
                count -= count % int(case.value)
                new = client.new_of_chats(count, lengths)
                measured = client.chats(system.url, MODEL, case, lengths, count, seed, limits, args.point_limit)
            else:
                arrivals, chunk = requests(case, lengths, repeat, idle_s, trace)
                new = new_tokens(arrivals, chunk)
                file = planned.trace_of(args.out, case, repeat)
                file.write_text(written(renamed(one, seed) for one in arrivals))

                def progress(seconds: float) -> None:
                    say(f"  {seconds:.0f} s of the client")

                measured = client.serve(system.url, MODEL, case, file, chunk, limits, args.point_limit, progress, forks)
            for engine in system.engines:  # from these pages `plan --load` learns how fast they are
                (args.out / f"{engine.name}-{len(list(args.out.glob('*.prom'))):04}.prom").write_text(engine.page())
        except (client.PointTooLong, RuntimeError) as problem:
            return {"errors": [str(problem)], "completed": 0}
        return measured | figures.counted(before, system.counts(), new, TOKEN_BYTES, measured["completed"])


def _report(args: argparse.Namespace, kept: KeptPoints) -> None:
    """Write and print what all points of the folder say, those of earlier runs with other flags, too."""
    measured = {one.system for one in kept.points}
    names = {letter: f"({letter}) {name}" for letter, name in NAMES.items() if letter in measured}
    idle = Limits(**json.loads((args.out / "idle.json").read_text()))
    good = Limits(args.ttft_times * idle.ttft, args.tpot_times * idle.tpot)
    limits = (
        f"good: TTFT within {good.ttft:.2f} s and TPOT within {good.tpot * 1e3:.0f} ms "
        f"({args.ttft_times:g}, {args.tpot_times:g} × idle)"
    )
    sizes = f"{args.prompt} tokens in, {args.answer} out; {figures.runs(kept.points)} runs of {args.seconds:g} s"
    rows = [f"{sizes}; {limits}; medians (lowest–highest)", "", *figures.table(kept.points, names)]
    say("\n".join(["", *rows]))
    (args.out / "table.md").write_text("\n".join(rows) + "\n")
    points = [{"system": p.system, "case": asdict(p.case), "repeat": p.repeat, **p.figures} for p in kept.points]
    said = {"idle": asdict(idle), "limits": limits, "sizes": sizes, "systems": names, "points": points}
    (args.out / "load.json").write_text(json.dumps(said, indent=1))
    kept_there = "load.json and table.md"
    if any(one.case.kind == "rate" for one in kept.points):
        picture = plot.svg(kept.points, names, f"{sizes}; {limits}")
        (args.out / "load.svg").write_text(picture)
        why = plot.png(picture, args.out / "load.png")
        kept_there += f", and load.svg (no PNG: {why})" if why else ", and load.svg and load.png"
    engine = EngineSizes(STEP_TOKENS, AT_ONCE, (args.kv_mib << 20) // TOKEN_BYTES, CHUNK)
    if plan := planned.rows(args.out, kept.points, good, engine):
        say("\n".join(["", *plan]))
        (args.out / "plan.md").write_text("\n".join(plan) + "\n")
        kept_there += "; plan.md"
    say(f"\nkept in {args.out}: {kept_there}")


if __name__ == "__main__":
    sys.exit(main())
