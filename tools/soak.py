# SPDX-License-Identifier: Apache-2.0
"""A long mixed load on prefill TP 2 → decode TP 1, every block checksummed, every answer compared.

Answers are compared with a single engine's. Mixed lengths, common prefixes, 2 % of the clients disconnect, and prefill
is restarted in the middle under load. The load pauses ten times: memory, threads, sockets, free blocks and open
transfers must not grow (a worker's memory: not more than the single engine's).
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import httpx

from tools.support.cluster import Cluster, fresh_directory, say
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.soaking import Soak
from tools.support.spec import EngineSpec

AGES = ("--idle-timeout", "36000", "--first-byte-timeout", "36000", "--prefill-timeout", "36000")
GRACE = ("--shutdown-timeout", "20")
COUNTS = (
    "vllm:ascend_pd_num_failed_transfers_total",
    "vllm:ascend_pd_num_failed_recvs_total",
    "vllm:ascend_pd_num_recomputed_reqs_total",
    "vllm:ascend_pd_num_kv_expired_reqs_total",
    "vllm:ascend_pd_bytes_transferred_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:prefix_cache_hits_total",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10_000, help="number of prompts (default: 10000)")
    parser.add_argument("--at-once", type=int, default=24, help="requests under way (default: 24)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the load (default: 1)")
    parser.add_argument("--rests", type=int, default=10, help="samples in a run (default: 10)")
    parser.add_argument("--no-restart", action="store_true", help="do not restart prefill")
    return parser.parse_args()


class SoakSite:
    """Three engines and a metaserver; prefill can be restarted on its address."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        port, model = cluster.port(), ensure("gqa")
        config = {**cluster.push_config(), "trace_dir": "", "recv_deadline_s": 3600.0, "stall_timeout_s": 3600.0}
        # A run may be stopped for minutes as a whole, so timeouts of waits are long.
        timeouts = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "36000", "VLLM_ENGINE_READY_TIMEOUT_S": "36000"}
        shape: dict[str, Any] = {"chunk": 512, "kv_bytes": 24 << 20, "arguments": GRACE}
        d_config = {**config, "metaserver_urls": [f"http://127.0.0.1:{port}"]}
        (self.single,) = cluster.start(EngineSpec("single", model, tp=1, environment=timeouts, **shape))
        self.prefill, self.decode = cluster.start(
            EngineSpec("prefill", model, role="kv_producer", tp=2, extra=config, environment=timeouts, **shape),
            EngineSpec("decode", model, role="kv_consumer", tp=1, extra=d_config, environment=timeouts, **shape),
        )
        self.front = cluster.metaserver([self.prefill], [self.decode], port, AGES)
        self.counts: dict[str, dict[str, float]] = {}

    def restart(self) -> None:
        begun, spec = time.monotonic(), self.prefill.spec
        self.note(self.prefill, "prefill before its restart")
        self.cluster.stop(self.prefill)
        say(f"  prefill is stopped, after {time.monotonic() - begun:.1f} s; it starts again on port {spec.port}")
        (self.prefill,) = self.cluster.start(spec)

    def note(self, engine: EngineProcess, name: str) -> None:
        metrics = engine.metrics()
        self.counts[name] = {count: metrics.get(count, 0.0) for count in COUNTS}


def main() -> int:
    args = arguments()
    with Cluster(fresh_directory("soak")) as cluster:
        site = SoakSite(cluster)
        soak = Soak(
            site.front.url,
            site.single,
            lambda: (site.prefill, site.decode, site.front, site.single),
            AnswerTally(),
            say,
            salted=False,
            half_way=None if args.no_restart else site.restart,
            at_once=args.at_once,
            rests=args.rests,
            seed=args.seed,
        )
        soak.run(args.prompts)
        site.note(site.prefill, "prefill")
        site.note(site.decode, "decode")
        reservations = [
            line
            for line in httpx.get(site.front.url + "/metrics", trust_env=False).text.splitlines()
            if line.startswith("ascend_pd_metaserver_reservations_total")
        ]
        growth = soak.growth(memory=args.prompts >= 2000)
    say("")
    for line in soak.report():
        say(line)
    say("")
    for name, counts in site.counts.items():
        say(f"{name}: " + ", ".join(f"{key.partition(':')[2]} {value:.0f}" for key, value in counts.items() if value))
    for line in reservations:
        say(f"metaserver: {line}")
    problems = [*(f"WRONG: {e}" for e in soak.errors[:20]), *(f"GROWS: {g}" for g in growth)]
    problems += [f"LEFT BEHIND: {leak}" for leak in cluster.leaks]
    for problem in problems:
        say(problem)
    say(f"soak: {'FAILED' if problems else 'good'}, {args.prompts / soak.seconds:.1f} prompts/s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
