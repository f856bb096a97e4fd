# SPDX-License-Identifier: Apache-2.0
"""SIGTERM to each role during transfers: it ends by itself in its grace time, informs the others, and leaves nothing.

Prefill has TP 2 and always regroups, so its ranks are exchanging, too. Slow: every engine that ends has to be started
again.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from pairs import fresh_prompt, reference_answers, settled_free_blocks, wait_for_free_blocks

from tools.support import faults
from tools.support.cells import GRACE, LIMIT_S, REACH_S, TOKENS, Clients, FaultSite, exchanges, make_site, start_pair
from tools.support.checks import eventually
from tools.support.client import RequestFailed, TimedAnswer, body_of, complete
from tools.support.cluster import Cluster
from tools.support.compare import AnswerTally
from tools.support.engine import RunningServer
from tools.support.process import is_free

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = tuple(300 + 60 * i for i in range(10))
GRACE_S = float(GRACE[1])
END_S = 10.0  # for an engine's end after its requests have ended or its grace time is over
# Our messages only: vLLM itself writes tracebacks when it has no time to end.
BAD = re.compile(r"did not (end|close|return) within|writer thread died|ERROR.*shutting down: ")


@pytest.fixture(scope="module")
def site(cluster: Cluster, tally: AnswerTally) -> Iterator[FaultSite]:
    port = cluster.port()
    prefill, decode, orders = start_pair(cluster, "ending", 2, [f"http://127.0.0.1:{port}"], regroup="always")
    site = make_site(cluster, prefill, decode, orders, port, tally)
    yield site
    cluster.stop(*(site.servers[role] for role in "MDP"))
    assert exchanges(cluster.traces), "the ranks of prefill have exchanged nothing"


def with_grace(site: FaultSite, role: str, grace: bool) -> None:
    """Restart the engine if its grace time is not as wanted."""
    engine = site.servers[role]
    arguments = tuple(word for word in engine.spec.arguments if word not in GRACE) + (GRACE if grace else ())
    if arguments != engine.spec.arguments:
        engine.spec = dataclasses.replace(engine.spec, arguments=arguments)
        site.replace(role)
        eventually(site.front.ready, "the metaserver sees the engine that came back", LIMIT_S)


@pytest.mark.parametrize(("role", "grace"), [("P", True), ("P", False), ("D", True), ("D", False), ("M", True)])
def test_it_ends_by_itself_and_leaves_nothing(
    site: FaultSite, role: str, grace: bool, progress: Callable[[str], None]
) -> None:
    if role != "M":
        with_grace(site, role, grace)
    victim = site.servers[role]
    others = [site.servers[other] for other in "PD" if other != role]
    free = {engine.name: settled_free_blocks(engine) for engine in others}
    prompts = [fresh_prompt(n) for n in LENGTHS]
    expected = reference_answers(site.prefill, prompts, TOKENS)
    log_before = len(victim.process.log.read_text(errors="replace"))
    for orders in site.orders.values():
        orders.clear()
    site.orders["P"].stop_at("layer_submitted")
    clients = Clients(site.front.url, [body_of(p, TOKENS) for p in prompts])
    pid = site.orders["P"].stopped(REACH_S)
    # Before the signal: an engine that drains takes no more requests.
    eventually(lambda: _requests(site.servers["D"]) == len(prompts), "D has every request", LIMIT_S)
    # after the signal, so that transfers are certainly in progress
    wake = threading.Timer(0.3, faults.wake_pid, (pid,))
    wake.start()
    begun = time.monotonic()
    left = victim.process.stop(GRACE_S + END_S if grace else END_S)
    took = time.monotonic() - begun
    wake.join()
    assert not left, left
    log = victim.process.log.read_text(errors="replace")[log_before:]
    assert not BAD.search(log), log
    for port in (victim.process.command[victim.process.command.index("--port") + 1], *_side_channel(victim)):
        assert is_free(int(port)), f"port {port} is still taken"
    assert clients.wait(time.monotonic() + LIMIT_S), "a client waits without end"
    last = max(clients.ended) - begun
    wait_for_free_blocks(others, free, LIMIT_S)
    site.replace(role)
    right = 0
    for p, want, got in zip(prompts, expected, clients.results, strict=True):
        if isinstance(got, TimedAnswer) and got.finish != "abort":  # vLLM's word for an answer that it cut short
            site.tally.check(f"SIGTERM to {role}", p, want.tokens, got.tokens, site.prefill.url)
            right += 1
        else:
            assert isinstance(got, TimedAnswer) or (isinstance(got, RequestFailed) and got.status >= 400), repr(got)
    progress(
        f"SIGTERM to {role}, grace {grace}: ended in {took:.1f} s, last answer {last:.1f} s, {right} of {len(prompts)} right"
    )
    if grace or role == "P":
        assert right == len(prompts), "what was under way is finished, or computed by D"
    eventually(site.front.ready, "the metaserver sees the engine that came back", LIMIT_S)
    prompt = fresh_prompt(150)
    (want,) = reference_answers(site.prefill, [prompt], TOKENS)
    assert complete(site.front.url, body_of(prompt, TOKENS)).tokens == want.tokens


def _requests(engine: RunningServer) -> float:
    seen = engine.metrics()
    return seen["vllm:num_requests_running"] + seen["vllm:num_requests_waiting"]


def _side_channel(server: object) -> list[int]:
    spec = getattr(server, "spec", None)
    port = spec.extra.get("side_channel_port", 0) if spec is not None else 0
    return [port] if port else []
