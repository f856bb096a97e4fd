# SPDX-License-Identifier: Apache-2.0
"""Comparison of this package's connector with vllm-ascend's own two: the same engines, requests and faults. One table.

Each connector has its own router: our metaserver, or the examples in vllm-ascend's source distribution.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/ascend_host")]

from host_build import INTERPRETER, HostBuild  # noqa: E402

from tools.field import PINNED  # noqa: E402
from tools.support import sdist  # noqa: E402
from tools.support.cells import Clients  # noqa: E402
from tools.support.checks import fresh_prompt, reference_answers, settled_free_blocks  # noqa: E402
from tools.support.client import Answer, body_of, complete  # noqa: E402
from tools.support.cluster import Cluster, fresh_directory, say  # noqa: E402
from tools.support.engine import Engine  # noqa: E402
from tools.support.models import ensure  # noqa: E402
from tools.support.process import Child  # noqa: E402
from tools.support.spec import EngineSpec, child_environment  # noqa: E402

LENGTHS = (20, 129, 700, 1500)
TOKENS = 12
LONG, STREAMED = 1500, 200  # the request during a fault: its prompt, and its tokens if D is killed
ANSWER_S = 120.0  # after that a client gives up
CLEAN_S = 60.0
ROUTER_S = 60.0
EXAMPLES = "examples/disaggregated_prefill_v1"


@dataclass(frozen=True)
class Contender:
    connector: str
    router: str  # an example of vllm-ascend's; "": our metaserver
    p: dict[str, Any] = field(default_factory=dict)  # further fields of --kv-transfer-config
    d: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


THEIRS = (
    {"kv_port": 26700, "engine_id": "p"},
    {"kv_port": 26800, "engine_id": "d"},
    {side: {"dp_size": 1, "tp_size": 1} for side in ("prefill", "decode")},
)
CONTENDERS = (
    Contender("AscendPushConnector", ""),
    Contender("MooncakeLayerwiseConnector", "load_balance_proxy_layerwise_server_example.py", *THEIRS),
    Contender("MooncakeConnectorV1", "load_balance_proxy_server_example.py", *THEIRS),
)


@dataclass
class Row:
    """Results of one connector."""

    connector: str
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    ttft: dict[int, list[float]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


class Site:
    """A connector's engines and its router."""

    def __init__(self, contender: Contender, cluster: Cluster, build: HostBuild) -> None:
        self.contender, self.cluster, self.build = contender, cluster, build
        port = cluster.port()
        url = f"http://127.0.0.1:{port}"
        self.p, self.d = cluster.start(self._spec("p", "kv_producer", url), self._spec("d", "kv_consumer", url))
        self.url = url
        self._router: Child | None = None
        if contender.router:
            self._router = self._start_example(port)
        else:
            cluster.metaserver([self.p], [self.d], port, ("--no-canary",))

    def _spec(self, name: str, role: str, url: str) -> EngineSpec:
        contender, mine = self.contender, not self.contender.router
        metaservers = [url] if role == "kv_consumer" else []
        ours = self.cluster.push_config(*metaservers, verify="off", mooncake_protocol="tcp", patient_shm="on")
        return EngineSpec(
            f"{contender.connector}-{name}",
            ensure("gqa"),
            role=role,
            chunk=512,
            connector=contender.connector,
            extra=ours if mine else contender.extra,
            transfer=contender.p if role == "kv_producer" else contender.d,
            python=str(INTERPRETER),
            npu=True,
            plugins=self.build.plugins,
            arguments=("--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(32 << 20)),
            environment={**self.build.variables(), "ASCEND_HOST_WIRE": "tcp", "STAND_IN_DEVICES": "8"},
        )

    def _start_example(self, port: int) -> Child:
        folder = self.cluster.directory / "routers"
        folder.mkdir(exist_ok=True)
        for name, text in sdist.read(sdist.ensure(PINNED), EXAMPLES, ".py").items():
            (folder / name).write_text(text)
        words = [sys.executable, str(folder / self.contender.router), "--host", "127.0.0.1", "--port", str(port)]
        for role, engine in (("prefiller", self.p), ("decoder", self.d)):
            words += [f"--{role}-hosts", "127.0.0.1", f"--{role}-ports", engine.url.rsplit(":", 1)[1]]
        router = Child("router", words, self.cluster.logs / f"{self.contender.router}.log", child_environment(), folder)
        until = time.monotonic() + ROUTER_S
        while not _answers(f"{self.url}/healthcheck"):
            if time.monotonic() > until or not router.alive:
                router.stop()
                raise RuntimeError(f"{self.contender.router} is not ready:\n{router.tail()}")
            time.sleep(0.5)
        return router

    def stop_router(self) -> None:
        if self._router is not None:
            self._router.stop()

    def again(self, engine: Engine) -> Engine:
        """Start the killed engine anew with the same command."""
        self.cluster.stop(engine)
        (started,) = self.cluster.start(engine.spec)
        return started


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def judged(site: Site, row: Row, rounds: int) -> None:
    """Measure without a fault: right tokens, and the time to the first one."""
    for _ in range(rounds):
        for length in LENGTHS:
            prompt = fresh_prompt(length)
            (want,) = reference_answers(site.p, [prompt], TOKENS)
            try:
                got = complete(site.url, body_of(prompt, TOKENS))
            except Exception as error:  # noqa: BLE001 (the table shows it)
                row.wrong.append(f"{length} tokens: {error!r}"[:120])
                continue
            row.ttft.setdefault(length, []).append(got.ttft)
            if got.tokens == want.tokens:
                row.right += 1
            else:
                row.wrong.append(f"{length} tokens: other tokens")


def struck(site: Site, victim: Engine, after_s: float, tokens: int) -> str:
    """Return the client's result of a request during which one engine is killed."""
    prompt = fresh_prompt(LONG)
    (want,) = reference_answers(site.p, [prompt], tokens)
    clients = Clients(site.url, [body_of(prompt, tokens)])
    time.sleep(after_s)
    early, at = clients.results[0] is not None, time.monotonic()
    stuck = victim.process.kill()
    if stuck:
        raise RuntimeError(str(stuck))
    if not clients.wait(at + ANSWER_S):
        return f"nothing for {ANSWER_S:.0f} s"
    if early:
        return "the answer was there before the fault"
    got, seconds = clients.results[0], clients.ended[0] - at
    if isinstance(got, Answer):
        same = got.tokens == want.tokens
        short = f"cut at {len(got.tokens)} of {tokens} tokens, as if complete" if len(got.tokens) < tokens else "wrong"
        return f"{'right' if same else short} after {seconds:.0f} s"
    code = re.search(r"PD-[A-Z]+-\d+", str(got))  # in a stream: its last event
    said = f"an error, {code[0]}," if code else str(got)[:60] or type(got).__name__
    return f"{said} after {seconds:.0f} s"


def cleaned(engine: Engine, before: int) -> str:
    """Return whether the survivor's blocks are free again, and when."""
    began = time.monotonic()
    while time.monotonic() - began < CLEAN_S:
        try:
            left = before - settled_free_blocks(engine)
        except Exception as error:  # noqa: BLE001 (a survivor that does not answer is a result)
            return f"survivor: {type(error).__name__}"
        if left <= 0:
            return f"its blocks free after {time.monotonic() - began:.0f} s"
        time.sleep(1.0)
    return f"{left} blocks held after {CLEAN_S:.0f} s"


def once(site: Site, row: Row, title: str, ask: Callable[[], str]) -> None:
    row.faults[title] = ask()
    say(f"    {title}: {row.faults[title]}")


def compare(contender: Contender, build: HostBuild, rounds: int) -> Row:
    row = Row(contender.connector)
    with Cluster(fresh_directory("compare-ascend")) as cluster:
        site = Site(contender, cluster, build)
        try:
            judged(site, row, rounds)
            say(f"    {row.right} right, {row.wrong}")
            usual = statistics.median(row.ttft.get(LONG, [2.0]))
            free = settled_free_blocks(site.d)
            once(site, row, "P killed while it computes", lambda: struck(site, site.p, usual / 2, TOKENS))
            once(site, row, "then D", lambda: cleaned(site.d, free))
            site.p = site.again(site.p)
            (want,) = reference_answers(site.p, [prompt := fresh_prompt(LONG)], TOKENS)
            once(site, row, "P is back", lambda: _served(site, prompt, want))
            free = settled_free_blocks(site.p)
            once(site, row, "D killed while it streams", lambda: struck(site, site.d, 2 * usual + 1, STREAMED))
            once(site, row, "then P", lambda: cleaned(site.p, free))
        finally:
            site.stop_router()
    return row


def _served(site: Site, prompt: list[int], want: Answer) -> str:
    try:
        got = complete(site.url, body_of(prompt, TOKENS))
    except Exception as error:  # noqa: BLE001 (the table shows it)
        return f"{error!r}"[:80]
    return "right" if got.tokens == want.tokens else "wrong"


def table(rows: list[Row]) -> list[str]:
    titles = list(dict.fromkeys(title for row in rows for title in row.faults))
    lines = ["| | " + " | ".join(row.connector for row in rows) + " |", "|---" * (len(rows) + 1) + "|"]
    lines.append(
        "| answers right | " + " | ".join(f"{row.right} of {row.right + len(row.wrong)}" for row in rows) + " |"
    )
    for length in LENGTHS:
        times = [row.ttft.get(length) for row in rows]
        told = [f"{statistics.median(each):.2f} s" if each else "–" for each in times]
        lines.append(f"| median time to the first token, {length} tokens | " + " | ".join(told) + " |")
    faults = (f"| {title} | " + " | ".join(row.faults.get(title, "–") for row in rows) + " |" for title in titles)
    return [*lines, *faults]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME,…", help="only these connectors")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each length (default: 3)")
    args = parser.parse_args()
    wanted = [c for c in CONTENDERS if not args.only or c.connector in args.only.split(",")]
    build = HostBuild(INTERPRETER).ensure()
    rows: list[Row] = []
    failed = []
    for contender in wanted:
        say(f"{contender.connector}")
        try:
            rows.append(compare(contender, build, args.rounds))
        except Exception as error:  # noqa: BLE001 (the others are compared nevertheless)
            failed.append(f"{contender.connector}: {error}")
            say(failed[-1])
    print("\n".join(table(rows)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
