# SPDX-License-Identifier: Apache-2.0
"""A long mixed load on prefill TP 2 → decode TP 1, every block checksummed, every answer compared.

Answers are compared with a single engine's. Mixed lengths, common prefixes, 2 % of the clients disconnect, and prefill
is restarted in the middle under load. The load pauses ten times: memory, threads, sockets, free blocks and open
transfers must not grow (a worker's memory: not more than the single engine's).

With --kills there are two D's, and in place of the restart one engine after another is killed under load, each once
the one before takes requests again and a hundred prompts were answered: for 40 % of the prompts D's, for 40 % P, then
either. So P, which has seen many D's die, and D's that have seen many P's die, are old enough to show what that leaves
in them.

A run that was ended goes on at its last pause if it is started with the same flags.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import Any

import httpx

from tools.support.cluster import Cluster, fresh_directory, say
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess
from tools.support.models import ROOT, ensure
from tools.support.previous import git
from tools.support.soaking import OtherSoak, Soak
from tools.support.spec import EngineSpec

# A run may be stopped for minutes as a whole, so timeouts of waits are long. With --kills the usual ones apply: they
# must notice an engine that was killed.
AGES = ("--idle-timeout", "36000", "--first-byte-timeout", "36000", "--prefill-timeout", "36000")
GRACE = ("--shutdown-timeout", "20")
LONGEST_S, LOOK_S = 600.0, 0.2  # from a kill until the engine takes requests again
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
    parser.add_argument("--kills", action="store_true", help="kill P and two D's again and again (SIGKILL)")
    return parser.parse_args()


class SoakSite:
    """A P, a D or two, a single engine and a metaserver. Engines can be restarted on their addresses."""

    def __init__(self, cluster: Cluster, kills: bool, prompts: int) -> None:
        self.cluster, self.prompts = cluster, prompts
        port, model = cluster.port(), ensure("gqa")
        config: dict[str, Any] = {**cluster.push_config(), "trace_dir": ""}
        if not kills:
            config |= {"recv_deadline_s": 3600.0, "stall_timeout_s": 3600.0}
        timeouts = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "36000", "VLLM_ENGINE_READY_TIMEOUT_S": "36000"}
        shape: dict[str, Any] = {"chunk": 512, "kv_bytes": 24 << 20, "arguments": GRACE}
        d_config = {**config, "metaserver_urls": [f"http://127.0.0.1:{port}"]}
        (self.single,) = cluster.start(EngineSpec("single", model, tp=1, environment=timeouts, **shape))
        d = EngineSpec("decode", model, role="kv_consumer", tp=1, extra=d_config, environment=timeouts, **shape)
        self.prefill, *self.decodes = cluster.start(
            EngineSpec("prefill", model, role="kv_producer", tp=2, extra=config, environment=timeouts, **shape),
            *([replace(d, name=f"decode-{number}") for number in (1, 2)] if kills else [d]),
        )
        self.front = cluster.metaserver([self.prefill], self.decodes, port, () if kills else AGES)
        self.counts: dict[str, dict[str, float]] = {}
        self.kills = 0

    def restart(self) -> None:
        begun, spec = time.monotonic(), self.prefill.spec
        self.note(self.prefill, "prefill before its restart")
        self.cluster.stop(self.prefill)
        say(f"  prefill is stopped, after {time.monotonic() - begun:.1f} s; it starts again on port {spec.port}")
        (self.prefill,) = self.cluster.start(spec)

    def kill(self, done: int) -> tuple[str, float]:
        """Kill an engine, start it again, and wait until it takes requests. Return its name and how long that took."""
        begun = time.monotonic()
        self.kills += 1
        turn = [*self.decodes] if done < 0.4 * self.prompts else [self.prefill]
        turn = turn if done < 0.8 * self.prompts else [*self.decodes, self.prefill]
        victim = turn[self.kills % len(turn)]
        if stuck := victim.process.kill():
            raise RuntimeError("; ".join(stuck))
        self.cluster.stop(victim)
        (started,) = self.cluster.start(victim.spec)
        if victim is self.prefill:
            self.prefill = started
        else:
            self.decodes[self.decodes.index(victim)] = started
        while not self._takes_requests(started):
            if time.monotonic() > begun + LONGEST_S:
                raise TimeoutError(f"{victim.name} takes no requests {LONGEST_S:.0f} s after it was killed")
            time.sleep(LOOK_S)
        seconds = time.monotonic() - begun
        say(f"  {victim.name} was killed behind {done} prompts, and is back after {seconds:.1f} s")
        return victim.name, seconds

    def _takes_requests(self, engine: EngineProcess) -> bool:
        instances = httpx.get(f"{self.front.url}/instances", timeout=30.0, trust_env=False, verify=False).json()
        name = engine.url.removeprefix("http://")
        return any(one["name"] == name and one["state"] == "ready" for one in instances["instances"])

    def note(self, engine: EngineProcess, name: str) -> None:
        metrics = engine.metrics()
        self.counts[name] = {count: metrics.get(count, 0.0) for count in COUNTS}


def main() -> int:
    args = arguments()
    with Cluster(fresh_directory("soak")) as cluster:
        site = SoakSite(cluster, args.kills, args.prompts)
        soak = Soak(
            site.front.url,
            site.single,
            lambda: (site.prefill, *site.decodes, site.front, site.single),
            AnswerTally(),
            say,
            salted=False,
            half_way=None if args.no_restart or args.kills else site.restart,
            kill=site.kill if args.kills else None,
            kept=ROOT / "out/soak-kept.json",
            made_by=f"{vars(args)} at {git('rev-parse', 'HEAD:vllm_ascend_pd').stdout.decode().strip()}",
            at_once=args.at_once,
            rests=args.rests,
            seed=args.seed,
        )
        try:
            soak.run(args.prompts)
        except OtherSoak as other:
            say(str(other))
            return 2
        site.note(site.prefill, "prefill")
        for d in site.decodes:
            site.note(d, d.name)
        reservations = [
            line
            for line in httpx.get(site.front.url + "/metrics", trust_env=False).text.splitlines()
            if line.startswith("ascend_pd_metaserver_reservations_total")
        ]
        growth = soak.growth(memory=args.prompts >= 2000)
    say("")
    for line in (*soak.report(), "", *soak.slopes()):
        say(line)
    for name, times in soak.back.items():
        say(f"{name}: killed {len(times)} times, back after {min(times):.0f} to {max(times):.0f} s")
    say("")
    for name, counts in site.counts.items():
        say(f"{name}: " + ", ".join(f"{key.partition(':')[2]} {value:.0f}" for key, value in counts.items() if value))
    for line in reservations:
        say(f"metaserver: {line}")
    problems = [*(f"WRONG: {e}" for e in soak.errors[:20]), *(f"GROWS: {g}" for g in growth)]
    problems += [f"LEFT BEHIND: {leak}" for leak in cluster.leaks]
    for problem in problems:
        say(problem)
    soak.forget_kept()
    say(f"soak: {'FAILED' if problems else 'good'}, {args.prompts / soak.seconds:.1f} prompts/s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
