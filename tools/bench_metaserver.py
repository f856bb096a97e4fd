# SPDX-License-Identifier: Apache-2.0
"""Speed of the metaserver: requests per second, added time to the first byte, CPU per request, memory.

All systems use the same instant engines; the measured process has a core of its own, load and engines share another.
Rounds are interleaved and medians are shown. Each round starts the processes anew, because one can be up to a tenth
faster than another for all its life. Measured are whole requests (D first, D asks for its prefill, P prefills), and the
relay alone, where nginx stands for a proxy in C.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
PARTS = "tools.bench_metaserver_parts"
PREFILL, DECODE = 19501, 19502
WAYS = ("whole", "relay")

NGINX = """
worker_processes 1; daemon off; pid {dir}/pid; error_log {dir}/error.log warn;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {dir}; proxy_temp_path {dir}; fastcgi_temp_path {dir};
  uwsgi_temp_path {dir}; scgi_temp_path {dir}; keepalive_requests 1000000;
  upstream engine {{ server 127.0.0.1:{decode}; keepalive 2048; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""


@dataclass
class MeasuredSystem:
    """A measured system; `way` says whether there is a prefill."""

    name: str
    way: str
    port: int
    command: list[str]
    root: Path = ROOT  # repository of the measured code


def systems(wanted: list[str], directory: str, beside: Path | None) -> list[MeasuredSystem]:
    python, example = sys.executable, f"{PARTS}.example_proxy"
    metaserver = [python, "-m", "vllm_ascend_pd.cli", "metaserver", "--no-canary", "--log-level", "warning"]
    engines = ["--decode", f"127.0.0.1:{DECODE}"]
    ports = iter(range(19510, 19600))
    trees = {"metaserver": ROOT} | ({"metaserver beside": beside} if beside is not None else {})
    made = []
    for way in WAYS:
        prefill = ["--prefill", f"127.0.0.1:{PREFILL}"] if way == "whole" else []
        for name, tree in trees.items():
            port = next(ports)
            made.append(MeasuredSystem(name, way, port, [*metaserver, "--port", str(port), *engines, *prefill], tree))
        port = next(ports)
        nothing = [*metaserver, "--port", str(port), *engines, *prefill, "--resume-tokens", "0"]
        made.append(MeasuredSystem("metaserver, nothing kept", way, port, nothing))
        port = next(ports)
        made.append(
            MeasuredSystem("example", way, port, [python, "-m", example, str(port), str(PREFILL), str(DECODE), way])
        )
    if shutil.which("nginx"):
        port = next(ports)
        file = Path(directory) / "nginx.conf"
        file.write_text(NGINX.format(dir=directory, port=port, decode=DECODE))
        made.append(MeasuredSystem("nginx", "relay", port, ["nginx", "-c", str(file)]))
    made.append(MeasuredSystem("engine alone", "relay", DECODE, []))
    return [s for s in made if not wanted or s.name in wanted]


def pinned(core: int, command: list[str]) -> list[str]:
    return ["taskset", "-c", str(core), *command] if (os.cpu_count() or 1) > 1 and shutil.which("taskset") else command


@contextmanager
def started(core: int, command: list[str], port: int, root: Path = ROOT) -> Iterator[psutil.Process]:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen(pinned(core, command), env=environment, cwd=root, stdout=subprocess.DEVNULL)
    try:
        until(lambda: process.poll() is not None or listening(port), f"{command} did not start")
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(promise: Callable[[], object], otherwise: str) -> None:
    end = time.monotonic() + 30
    while not promise():
        if time.monotonic() > end:
            raise RuntimeError(otherwise)
        time.sleep(0.1)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def cpu(process: psutil.Process) -> float:
    """Return the processor seconds of the process and its children (nginx has a worker)."""
    family = [process, *process.children(recursive=True)]
    return sum(sum(p.cpu_times()[:2]) for p in family)


def load(port: int, **flags: float) -> dict[str, float]:
    words = [f"--{name.replace('_', '-')}={value:g}" for name, value in flags.items()]
    command = pinned(1, [sys.executable, "-m", f"{PARTS}.load", str(port), *words])
    result: dict[str, float] = json.loads(subprocess.check_output(command, cwd=ROOT))
    return result


def measured(system: MeasuredSystem, process: psutil.Process | None, **flags: float) -> dict[str, float]:
    before = cpu(process) if process else 0.0
    result = load(system.port, **flags)
    if process:
        result["cpu_us"] = 1e6 * (cpu(process) - before) / max(1, result["requests"])
    return result


Rows = dict[tuple[str, str], dict[str, float]]
Running = tuple[MeasuredSystem, psutil.Process | None]
Seen = dict[tuple[int, str], dict[tuple[str, str], list[dict[str, float]]]]  # by number of clients and kind of load


def medians(seen: dict[tuple[str, str], list[dict[str, float]]]) -> Rows:
    return {
        key: {figure: statistics.median(r.get(figure, 0.0) for r in results) for figure in results[0]}
        for key, results in seen.items()
    }


def show(title: str, rows: Rows, floor: dict[str, float] | None = None) -> None:
    """Print a table. `added` is a percentile less the engine's own; a stream is longer than its pieces were sent apart.

    The tenth percentile is least disturbed by other load on the machine. Where the client's core is full, a figure is
    the client's.
    """
    percentiles = ("p10", "p50", "p99")
    heads = ["way", "system", "requests/s", *(f"first byte {p} ms" for p in percentiles)]
    heads += [*(f"added {p} ms" for p in percentiles), "longer p99 ms", "CPU µs/request", "its core", "client's core"]
    print(f"\n{title}\n\n| {' | '.join(heads)} |\n|---|---|{'---:|' * (len(heads) - 2)}")
    for (way, name), row in sorted(rows.items()):
        times = {p: row[f"ttfb_{p}_ms"] for p in percentiles}
        added = ["–"] * len(percentiles)
        if floor and row is not floor:
            added = [f"{times[p] - floor[f'ttfb_{p}_ms']:.2f}" for p in percentiles]
        used = ["–"] * 2
        if "cpu_us" in row:
            used = [f"{row['cpu_us']:.0f}", f"{row['cpu_us'] * row['rate'] / 1e6:.0%}"]
        cells = [
            f"{row['rate']:.0f}" if row["rate"] >= 10 else f"{row['rate']:.2g}",
            *(f"{t:.2f}" for t in times.values()),
            *added,
            f"{row['longer_p99_ms']:.1f}",
            *used,
            f"{row['load_cpu']:.0%}",
        ]
        print(f"| {way} | {name} | {' | '.join(cells)} |", flush=True)


def memory(system: MeasuredSystem, process: psutil.Process, requests: int) -> None:
    print(f"\nMemory over {requests} requests ({system.way} way)\n\n| requests | MiB |\n|---:|---:|")
    step = max(1, requests // 10)
    for done in range(0, requests + 1, step):
        if done:
            load(system.port, streams=32, seconds=600, requests=step, pieces=2)
        print(f"| {done} | {process.memory_info().rss / (1 << 20):.1f} |", flush=True)


def serves(port: int) -> bool:
    """Return whether a request is answered, so that the metaserver has found its engines."""
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1, "stream": True}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return b"[DONE]" in answer.read()
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 1000])
    parser.add_argument("--systems", nargs="+", default=[], help="only these")
    parser.add_argument("--skip", nargs="+", default=[], choices=("saturation", "paced", "memory"))
    parser.add_argument("--memory-requests", type=int, default=100_000)
    parser.add_argument(
        "--beside", type=Path, metavar="DIR", help="another checkout, whose metaserver is measured beside"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the started processes are stopped
    with tempfile.TemporaryDirectory() as directory:
        engines = [sys.executable, "-m", f"{PARTS}.engines", str(PREFILL), str(DECODE)]
        with started(1, engines, DECODE):
            bench(args, systems(args.systems, directory, args.beside))


def bench(args: argparse.Namespace, chosen: list[MeasuredSystem]) -> None:
    seen: Seen = {}
    for number in range(1, args.rounds + 1):
        print(f"round {number} of {args.rounds}", file=sys.stderr, flush=True)
        with running(chosen if number % 2 else chosen[::-1]) as processes:
            one_round(args, processes, seen)
            if number == args.rounds:
                tables(args, seen)
                for system, process in processes:
                    if "memory" not in args.skip and (system.name, system.way) == ("metaserver", "whole") and process:
                        memory(system, process, args.memory_requests)


@contextmanager
def running(chosen: list[MeasuredSystem]) -> Iterator[list[Running]]:
    """Start all systems, and stop each of them whatever happens."""
    with ExitStack() as stack:
        processes: list[Running] = []
        for system in chosen:
            process = None
            if system.command:
                process = stack.enter_context(started(0, system.command, system.port, system.root))
                until(partial(serves, system.port), f"{system.name} does not serve")
            processes.append((system, process))
        yield processes


def one_round(args: argparse.Namespace, processes: list[Running], seen: Seen) -> None:
    for streams in args.streams:
        for kind in ("saturation", "paced"):
            for system, process in processes if kind not in args.skip else ():
                if kind == "saturation":
                    figures = measured(system, process, streams=streams, seconds=args.seconds)
                else:
                    flags = {"streams": streams, "pieces": 20, "gap_ms": 50, "ramp_s": 1.0, "seconds": args.seconds + 2}
                    figures = measured(system, process, **flags)
                seen.setdefault((streams, kind), {}).setdefault((system.way, system.name), []).append(figures)


def tables(args: argparse.Namespace, seen: Seen) -> None:
    for streams in args.streams:
        if results := seen.get((streams, "saturation")):
            rows = medians(results)
            # with more streams requests wait for each other
            alone = rows.get(("relay", "engine alone")) if streams == 1 else None
            show(f"Saturation: {streams} clients, one request after the other, 8 pieces at once", rows, alone)
        if results := seen.get((streams, "paced")):
            rows = medians(results)
            show(f"Paced: {streams} streams open, 20 pieces, 50 ms apart", rows, rows.get(("relay", "engine alone")))


if __name__ == "__main__":
    main()
