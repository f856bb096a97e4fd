# SPDX-License-Identifier: Apache-2.0
"""Cost of waiting on D: processor time while requests only wait for remote KV, and time to the first token.

One P and two D's: one as configured by default, one with vLLM's own waiting (`patient` off, queues that spin). Waiting
is measured with a metaserver that accepts reservations and never prefills; the first token with short prompts, asked of
both D's in turn, so that the handover outweighs the prefill.

    python -m tools.bench_waiting [--seconds 20] [--requests 4] [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tools.support.client import body_of, complete, leave_after, prompt
from tools.support.cluster import STRICT, Cluster, Metaserver, fresh_directory, say_leaks
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.spec import EngineSpec

WANTED_CORES = 0.3
WANTED_TTFT_MS = 5.0
PATIENT, STOCK = "patient", "as vLLM waits"


class StalledMetaserver(BaseHTTPRequestHandler):
    """Metaserver that accepts reservations and only sends heartbeats: the prefill never ends."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._line({"event": "accepted", "prefill": "none"})
        stop: threading.Event = self.server.stop  # type: ignore[attr-defined]
        while not stop.wait(2.0):
            try:
                self._line({"event": "heartbeat"})
            except OSError:
                return

    def _line(self, fields: dict[str, str]) -> None:
        text = json.dumps(fields).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        return


@contextmanager
def stalled_metaserver(port: int) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", port), StalledMetaserver)
    server.daemon_threads = True
    server.stop = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, name="never", kwargs={"poll_interval": 0.1})
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop.set()  # type: ignore[attr-defined]
        server.shutdown()
        server.server_close()
        thread.join(5.0)


def cores_while_waiting(engine: EngineProcess, url: str, requests: int, seconds: float) -> tuple[float, float]:
    """Return the cores used by the engine's processes: idle, and with `requests` waiting."""
    idle = _cores(engine, min(seconds, 5.0))
    clients = []
    for number in range(requests):
        params = {"do_remote_prefill": True, "metaserver": url, "ticket": f"waits-{number}"}
        body = body_of(prompt(600, 7000 + number), 4, kv_transfer_params=params)
        clients.append(threading.Thread(target=leave_after, args=(engine.url, body, seconds + 4.0), name="waiter"))
        clients[-1].start()
    time.sleep(2.0)
    waiting = _cores(engine, seconds)
    for client in clients:
        client.join()
    return idle, waiting


def _cores(engine: EngineProcess, seconds: float) -> float:
    begun, before = time.monotonic(), engine.process.cpu_seconds()
    time.sleep(seconds)
    return (engine.process.cpu_seconds() - before) / (time.monotonic() - begun)


def first_tokens(fronts: dict[str, Metaserver], rounds: int, pause_s: float) -> dict[str, list[float]]:
    """Return TTFT in ms of short prompts, D's asked in turn, their order swapped every round."""
    times_of: dict[str, list[float]] = {name: [] for name in fronts}
    for number in range(rounds + 2):
        names = list(fronts) if number % 2 else list(reversed(fronts))
        for name in names:
            time.sleep(pause_s)
            answer = complete(fronts[name].url, body_of(prompt(64, 9000 + number), 4))
            if number >= 2:  # the first two rounds warm up
                times_of[name].append(answer.ttft * 1e3)
    return times_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with Cluster(fresh_directory("bench_waiting")) as cluster:
        model, ports = ensure("gqa"), [cluster.port() for _ in range(3)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        config = cluster.push_config(*urls, verify="off")
        p_config = cluster.push_config(verify="off")
        p, d_patient, d_stock = cluster.start(
            EngineSpec("prefill", model, role="kv_producer", extra=p_config),
            EngineSpec("decode-patient", model, role="kv_consumer", extra=config),
            EngineSpec("decode-stock", model, role="kv_consumer", extra={**config, "patient": False}, spins=True),
        )
        fronts = {PATIENT: cluster.metaserver([p], [d_patient], ports[0], STRICT)}
        fronts[STOCK] = cluster.metaserver([p], [d_stock], ports[1], STRICT)
        ttfts = first_tokens(fronts, args.rounds, pause_s=1.3)
        with stalled_metaserver(ports[2]) as url:
            used = {
                name: cores_while_waiting(engine, url, args.requests, args.seconds)
                for name, engine in ((PATIENT, d_patient), (STOCK, d_stock))
            }
    print(f"\n{args.requests} requests wait for remote KV; cores used by all of D's processes")
    for name, (idle, waiting) in used.items():
        print(f"  {name:16} idle {idle:5.2f}   waiting {waiting:5.2f}")
    medians = {name: statistics.median(values) for name, values in ttfts.items()}
    print(f"TTFT of 64-token prompts in ms, medians of {args.rounds}")
    for name, values in ttfts.items():
        print(f"  {name:16} {medians[name]:6.1f}   ({min(values):.1f}–{max(values):.1f})")
    lost = medians[PATIENT] - medians[STOCK]
    good = used[PATIENT][1] < WANTED_CORES and lost <= WANTED_TTFT_MS
    print(
        f"patient waiting uses {used[PATIENT][1]:.2f} of a core (wanted < {WANTED_CORES}) and costs {lost:+.1f} ms of TTFT "
        f"(wanted <= {WANTED_TTFT_MS:.0f}): {'met' if good else 'NOT MET'}"
    )
    return say_leaks(cluster.leaks)


if __name__ == "__main__":
    sys.exit(main())
