# SPDX-License-Identifier: Apache-2.0
"""Two incidents of docs/runbook.md in a running pair on two hosts, as who is on call sees them.

The wire from P to D becomes slow, by tc; P stands still in a write while D has no descriptor for what would lock P out.
That is planted: where there is truly none, Mooncake writes gigabytes of `accept(): Too many open files`. Each is seen
by metrics and alerts, found by the tools that the page names, and ends by its remedy.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import yaml
from pairs import fresh_prompt, reference_answers
from two_hosts import HERE, THERE, WIRE, run, two_hosts

from tests.unit.docs.promql import ScrapedPage, Scrapes, firing
from tools.support.cells import REACH_S, TIMERS
from tools.support.checks import eventually, loaded_tokens, settled_free_blocks
from tools.support.client import TimedAnswer, attempt, body_of
from tools.support.cluster import Cluster
from tools.support.engine import EngineProcess
from tools.support.faults import DOOR, PLUGIN, Orders, wake_pid
from tools.support.models import ROOT, ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
SCALE = 10  # a second here is ten for the alerts, so that five minutes of an incident take half a minute
REMEMBERED_S = 1800  # of those; the longest alert looks back for ten minutes
SHOWN = re.compile(
    r"(?:vllm:(?:ascend_pd_|kv_cache_usage_perc|num_requests_waiting)|ascend_pd_metaserver_)(?!.*_bucket\{)"
)
OWN = [sys.executable, "-m", "vllm_ascend_pd.cli"]
TOKENS = 6


class AlertWatch:
    """Pages of all targets, once a second, as Prometheus would have them."""

    def __init__(self, **urls: str) -> None:
        self._urls, self._pages, self._end = urls, list[ScrapedPage](), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def __enter__(self) -> AlertWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=5.0, trust_env=False) as http:
            while not self._end.wait(1.0):
                for name, url in self._urls.items():
                    try:
                        page = http.get(f"{url}/metrics").text
                    except httpx.TransportError:
                        continue  # as for Prometheus: no sample
                    lines = "".join(f"{line}\n" for line in page.splitlines() if SHOWN.match(line))
                    self._pages.append(ScrapedPage(time.monotonic() * SCALE, {"instance": name}, lines))

    def fire(self) -> set[str]:
        """Return the alerts that fire now."""
        now = time.monotonic() * SCALE
        recording = Scrapes([page for page in tuple(self._pages) if page.at_s > now - REMEMBERED_S])
        return {
            name
            for name, rule in ALERTS.items()
            if firing(rule["expr"], recording, 60 * int(rule.get("for", "0m")[:-1]), now)
        }

    def until(self, wanted: set[str], check: Callable[[], None], limit_s: float) -> None:
        """Wait until each of these has fired."""
        missing, end = set(wanted), time.monotonic() + limit_s
        while missing:
            check()
            missing -= self.fire()
            assert time.monotonic() < end, f"{missing} have not fired"
            time.sleep(1.0)


@dataclass
class WatchedPair:
    cluster: Cluster
    url: str
    prefill: EngineProcess
    decode: EngineProcess
    there: tuple[str, ...]  # words before a command that run it on D's host
    p_orders: Orders
    d_orders: Orders
    watch: AlertWatch
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30.0, trust_env=False))

    def answers(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Return the tokens of each answer, one after another. A request that fails, fails the test."""
        answers = [attempt(self.url, [body_of(prompt, TOKENS)])[0] for prompt in prompts]
        assert all(isinstance(answer, TimedAnswer) for answer in answers), answers
        return [answer.tokens for answer in answers if isinstance(answer, TimedAnswer)]

    def from_p(self) -> bool:
        """Return whether D loads a new prompt from P, as it should."""
        before, prompt = loaded_tokens(self.decode), fresh_prompt(150)
        self.answers([prompt])
        settled_free_blocks(self.decode)
        return loaded_tokens(self.decode) - before == len(prompt)

    def push_times(self, prompts: Sequence[list[int]]) -> tuple[float, float]:
        """Ask, and return the means of two of P's metrics: of a push, and of what of it is not hidden."""
        names = [f"vllm:ascend_pd_{name}_time_seconds" for name in ("xfer", "exposed")]
        before = self.prefill.metrics()
        self.answers(prompts)
        settled_free_blocks(self.prefill)
        after = self.prefill.metrics()
        xfer, exposed = (
            (after[f"{name}_sum"] - before.get(f"{name}_sum", 0.0))
            / (after[f"{name}_count"] - before.get(f"{name}_count", 0.0))
            for name in names
        )
        return xfer, exposed

    def tool(self, *words: str) -> tuple[int, str]:
        done = subprocess.run([*OWN, *words], check=False, capture_output=True, text=True, timeout=90)
        return done.returncode, done.stdout + done.stderr

    def doctor_between(self) -> dict[str, float]:
        """Return the milliseconds that doctor's 2 MiB take there and back."""
        address = f"{THERE}:{self.cluster.port()}"
        secret = ("--secret-file", str(self.cluster.secret_file))
        words = [*self.there, *OWN, "doctor", "--listen", address, "--calls", "1", *secret]
        listening = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert listening.stdout is not None and listening.stdout.readline()
            _, said = self.tool("doctor", "--peer", address, *secret)
        finally:
            listening.kill()
            listening.communicate(timeout=30)
        return {way: float(ms) for way, ms in re.findall(r"write (there|back).* checksum in ([\d.]+) ms", said)}


@contextmanager
def wire_of(rate: str) -> Iterator[None]:
    """Let the wire from P's host to D's carry so much, as a bad port or a full switch would."""
    run("tc", "qdisc", "replace", "dev", WIRE, "root", "tbf", "rate", rate, "burst", "32kb", "latency", "100ms")
    try:
        yield
    finally:
        run("tc", "qdisc", "del", "dev", WIRE, "root")


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> Iterator[WatchedPair]:
    model, port = ensure("gqa"), cluster.port()
    with ExitStack() as stack:
        there = stack.enter_context(two_hosts("tc"))
        here = ("nsenter", "--net=/proc/self/ns/net")  # started from this thread, so on its host, and not forked
        orders = {role: Orders(cluster.directory / "orders" / f"incident-{role}") for role in "pd"}
        common: dict[str, Any] = {"plugins": (PLUGIN,), "arguments": DOOR, "chunk": 128}
        config = {**cluster.push_config(), **TIMERS}
        prefill, decode = cluster.start(
            EngineSpec(
                "incident-p",
                model,
                role="kv_producer",
                host=HERE,
                prefix=here,
                extra=config,
                environment=orders["p"].environment,
                **common,
            ),
            EngineSpec(
                "incident-d",
                model,
                role="kv_consumer",
                host=THERE,
                prefix=there,
                extra={**config, "metaserver_urls": [f"http://{HERE}:{port}"]},
                environment=orders["d"].environment,
                **common,
            ),
        )
        stack.callback(cluster.stop, decode, prefill)
        front = cluster.metaserver([prefill], [decode], port, ("--host", "0.0.0.0", "--advertise-host", HERE))
        stack.callback(cluster.stop, front)
        watch = stack.enter_context(AlertWatch(m=front.url, p=prefill.url, d=decode.url))
        watched = WatchedPair(cluster, front.url, prefill, decode, there, orders["p"], orders["d"], watch)
        stack.callback(watched.http.close)
        yield watched


@contextmanager
def going_on(ask: Callable[[], object], clients: int) -> Iterator[Callable[[], None]]:
    """Let so many clients ask again and again. Yield what raises the first of their failures."""
    end = threading.Event()

    def client(after_s: float) -> None:
        end.wait(after_s)
        while not end.is_set():
            ask()

    with ThreadPoolExecutor(clients, thread_name_prefix="client") as pool:
        asking = [pool.submit(client, 4.0 * number) for number in range(clients)]

        def check() -> None:
            for future in asking:
                if future.done():
                    future.result()

        try:
            yield check
        finally:
            end.set()
    check()


def test_the_network_is_slow(pair: WatchedPair) -> None:
    prompts = [fresh_prompt(200) for _ in range(4)]
    want = [answer.tokens for answer in reference_answers(pair.prefill, prompts, TOKENS)]
    usual, _ = pair.push_times([fresh_prompt(200) for _ in range(4)])
    quick = pair.doctor_between()
    with wire_of("8mbit"):
        # Slow only: answers are right; metrics say it, the trace says that it is the wire, and doctor how slow it is.
        before = loaded_tokens(pair.decode)
        slow, exposed = pair.push_times(prompts)
        assert pair.answers(prompts) == want and loaded_tokens(pair.decode) > before
        assert slow > max(5 * usual, 0.4) and exposed > 0.3, (usual, slow, exposed)
        _, traced = pair.tool("trace", str(pair.cluster.traces))
        shown = re.findall(r"^\w+/\d+/\w+ +([\d,]+) +\d+ +[\d.]+% +([\d.]+)$", traced, re.MULTILINE)
        pushed = [float(ms) for nbytes, ms in shown if int(nbytes.replace(",", "")) > 500_000]
        assert min(pushed[-4:]) > 300 > max(pushed[:4]), traced
        there = pair.doctor_between()
        assert there["there"] > 1500 > 3 * quick["there"] and there["back"] < there["there"] / 3, (quick, there)
    with wire_of("2mbit"), going_on(lambda: pair.answers([fresh_prompt(1000)]), 3) as check:
        # Too slow: loads fail, D computes the prompts, and the alerts name pair and code, as the status page does.
        pair.watch.until({"PDLoadsFail", "PDDecodeLoadsFail", "PDPushesFail"}, check, 240)
        instances = pair.http.get(f"{pair.url}/instances").json()["instances"]
        errors = {facts["role"]: facts["last_error"] for facts in instances}
        assert "PD-XFER-00" in errors["prefill"] and pair.prefill.url.removeprefix("http://") in errors["decode"]
    # The remedy: the link is mended. Nothing else is to be done.
    eventually(pair.from_p, "D loads from P again", 60)
    eventually(lambda: not pair.watch.fire(), "no alert", 180)


def test_blocks_stay_held(pair: WatchedPair) -> None:
    free, prompt = settled_free_blocks(pair.decode), fresh_prompt(300)
    (want,) = reference_answers(pair.prefill, [prompt], TOKENS)
    pair.p_orders.stop_at("layer_submitted")
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        asking = pool.submit(pair.answers, [prompt])
        stopped = pair.p_orders.stopped(REACH_S)
        stack.callback(wake_pid, stopped)
        stack.callback(pair.d_orders.comply)
        pair.d_orders.refuse("revocation")
        with going_on(lambda: pair.answers([fresh_prompt(40)]), 1) as check:
            # Seen: both alerts, doctor and D's log. Requests are answered, but for the one that has the blocks.
            pair.watch.until({"PDBlocksHeld", "PDRevocationPending"}, check, 180)
            assert not asking.done(), "its blocks may still be written"
            code, said = pair.tool("doctor", "--engine", pair.decode.url)
            assert code == 1 and re.search(
                r"^FAILURE +revocation .* could not be revoked for \d+ s", said, re.MULTILINE
            )
            assert "access is not revoked yet" in pair.decode.process.log.read_text()
            # The remedy: there are descriptors again.
            pair.d_orders.comply()
            eventually(lambda: pair.tool("doctor", "--engine", pair.decode.url)[0] == 0, "access is revoked", 60)
            assert asking.result(60) == [want.tokens]
    eventually(pair.from_p, "D loads from P again", 60)
    eventually(lambda: not pair.watch.fire(), "no alert", 180)
    eventually(lambda: settled_free_blocks(pair.decode) >= free, "all blocks are back", 30)
