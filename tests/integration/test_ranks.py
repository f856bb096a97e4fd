# SPDX-License-Identifier: Apache-2.0
"""Data parallelism with expert parallelism: ranks that compute each layer together, each with requests of its own.

Any P (TP x DP) to any D (TP x DP), with vLLM's own balancing between the ranks behind one address. No configuration
names ranks or sizes: the reservation identifies its destination.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_metaserver import Answer, fake_metaserver
from pairs import Pair, PairMaker, fresh_prompt, settled_free_blocks, transfer_request, wait_for_free_blocks

from tools.support import browser
from tools.support.checks import eventually, reference_answers
from tools.support.client import body_of, gather, leave_after, post
from tools.support.cluster import Cluster
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.ci, pytest.mark.timeout(900)]

EXPERTS = Path(__file__).parent / "plugins" / "experts"
LOADED = "vllm:external_prefix_cache_hits_total"
LENGTHS = (1, 20, 32, 33, 256, 700)
WAVE = re.compile(r"Wave \d+ finished")  # all ranks have agreed that no rank has work, and step no more
HELD_S = 3.0  # many such agreements: a small model's ranks step more than a hundred times a second


@dataclass(frozen=True)
class RankCounts:
    tp: int
    dp: int
    servers: int = 1  # one for all ranks, one for each rank, or one for each host

    def __str__(self) -> str:
        return f"tp{self.tp}dp{self.dp}" + (f"-{self.servers}servers" if self.servers > 1 else "")

    def specs(self, cluster: Cluster, side: str, **more: Any) -> list[EngineSpec]:
        common: dict[str, Any] = {"plugins": (EXPERTS,), "max_seqs": 16, "tp": self.tp, "dp": self.dp, **more}
        name, model = f"ranks-{side}-{self}", ensure("moe")
        if self.servers == 1:
            return [EngineSpec(name, model, **common)]
        port = cluster.port()
        local = self.dp // self.servers
        ranks = {"dp_local": local, "dp_rpc_port": port}
        return [EngineSpec(f"{name}{n}", model, dp_rank=n * local, **ranks, **common) for n in range(self.servers)]


@pytest.fixture(
    params=[
        (RankCounts(1, 2), RankCounts(1, 2, servers=2)),
        pytest.param((RankCounts(2, 1), RankCounts(1, 2)), marks=pytest.mark.slow),
        pytest.param((RankCounts(1, 2), RankCounts(2, 1)), marks=pytest.mark.slow),
        pytest.param((RankCounts(2, 2), RankCounts(1, 2)), marks=pytest.mark.slow),
        # The servers of two hosts, each of which balances between its own ranks. (With one rank each vLLM treats it
        # like the first case.)
        pytest.param((RankCounts(1, 1), RankCounts(1, 4, servers=2)), marks=pytest.mark.slow),
        # P's ranks too have addresses of their own, or share one with those of their host.
        pytest.param((RankCounts(2, 2, servers=2), RankCounts(1, 2, servers=2)), marks=pytest.mark.slow),
        pytest.param((RankCounts(1, 4, servers=2), RankCounts(2, 1)), marks=pytest.mark.slow),
    ],
    ids=lambda shapes: f"{shapes[0]}-to-{shapes[1]}",
    scope="module",
)
def pair(request: pytest.FixtureRequest, cluster: Cluster, allowed: list[str], make_pair: PairMaker) -> Iterator[Pair]:
    p_shape, d_shape = request.param
    d_config = cluster.push_config(*allowed, side_channel_port=cluster.ports(d_shape.tp * d_shape.dp))
    p_config = cluster.push_config(**({"regroup": "always"} if p_shape.tp > 1 else {}))
    started = cluster.start(
        *p_shape.specs(cluster, "p", role="kv_producer", extra=p_config),
        *d_shape.specs(cluster, "d", role="kv_consumer", policy="fail", extra=d_config),
    )
    ps, ds = started[: p_shape.servers], started[p_shape.servers :]
    made = make_pair(ps[0], *ds, more_prefill=ps[1:])
    yield made
    cluster.stop(made.front, *ds, *ps)


def test_every_length(pair: Pair) -> None:
    for length in LENGTHS:
        pair.check([fresh_prompt(length)], name="ranks")


def test_many_requests_use_all_ranks_and_leave_nothing(pair: Pair) -> None:
    before = pair.free_counts()
    for _ in range(8):
        pair.check([fresh_prompt(10 + 17 * i) for i in range(25)], name="ranks, 25 at once")
    read = [*((p, "vllm:prompt_tokens_total") for p in pair.all_prefill), *((d, LOADED) for d in pair.decode)]
    for engine, name in read:
        ranks = engine.by_rank(name)
        assert len(ranks) == engine.ranks and all(ranks.values()), f"{name} of {engine.name} by rank: {ranks}"
    assert pair.free_counts() == before


@pytest.mark.skipif(not browser.executable(), reason=browser.MISSING)
def test_the_status_page_has_a_row_for_each_address(pair: Pair, tmp_path: Path) -> None:
    """Ranks with servers of their own have a row each, those behind one address one together."""
    addresses = [engine.url.removeprefix("http://") for engine in (*pair.all_prefill, *pair.decode)]
    with browser.browser(tmp_path) as page:
        page.open(pair.front.url)
        for address in addresses:
            page.until(browser.shows(address, "ready"))
        assert page.ask("document.querySelectorAll('#instances tr').length") == len(addresses)
        page.picture(pair.cluster.directory / "status.png")
        assert not page.complaints


@pytest.mark.slow
def test_a_load_keeps_the_wave_and_ranks_without_work_serve_their_peers(
    cluster: Cluster, allowed: list[str], ports: list[int], make_pair: PairMaker
) -> None:
    shown = {"environment": {"VLLM_LOGGING_LEVEL": "DEBUG"}}
    # P does not give up by itself while a D that is silent is waited for.
    p_config = cluster.push_config(hold_sources=8, hold_s=300.0, ready_timeout_s=300.0, lease_s=2.0)
    p, d = cluster.start(
        *RankCounts(1, 2).specs(cluster, "p-idle", role="kv_producer", extra=p_config, **shown),
        *RankCounts(1, 2).specs(
            cluster, "d-idle", role="kv_consumer", policy="fail", extra=cluster.push_config(*allowed), **shown
        ),
    )
    pair = make_pair(p, d)
    free, go_on, url = pair.free_counts(), threading.Event(), f"http://127.0.0.1:{ports[-1]}"
    second = {"X-data-parallel-rank": "1"}
    prompts = [fresh_prompt(300) for _ in range(3)]
    waits, leaves, held_prompt = prompts
    expected = reference_answers(p, prompts, 12)

    def asks_late(body: dict[str, Any]) -> Answer:
        if "reservation" in body:
            assert go_on.wait(30.0)
            params = {"do_remote_decode": True, "reservation": body["reservation"]}
            post(p.url, body_of(waits, 1, kv_transfer_params=params), headers=second)
        return 200, [{"event": "accepted", "prefill": "here"}, {"event": "prefilled"}]

    with fake_metaserver(ports[-1], asks_late) as seen, ThreadPoolExecutor(1) as client:
        before = rest(d)
        answer = client.submit(post, d.url, transfer_request(url, "late", waits, 12), headers=second)
        eventually(lambda: seen, "a reservation")
        time.sleep(HELD_S)
        assert waves(d) == before, "the ranks came to rest although a request waits for its KV"
        go_on.set()
        assert tuple(answer.result(30.0)["choices"][0]["token_ids"]) == expected[0].tokens
        eventually(lambda: waves(d) > before, "the ranks come to rest behind the request")

    go_on.clear()

    def asks_no_engine(body: dict[str, Any]) -> Answer:
        assert go_on.wait(30.0) or "reservation" not in body
        return 200, [{"event": "accepted", "prefill": "here"}]

    with fake_metaserver(ports[-1], asks_no_engine) as seen:
        leave_after(d.url, transfer_request(url, "left", leaves, 12), 1.0)
        go_on.set()
        (reserved,) = [body["reservation"] for body in seen if "reservation" in body]
        before = rest(d)
        params = {"do_remote_decode": True, "reservation": reserved}
        post(p.url, body_of(leaves, 1, kv_transfer_params=params), headers=second)
        wait_for_free_blocks([p], free)
        assert waves(d) == before, "D answers P for a request that has left, and steps for it"

    params = {"do_remote_decode": True, "do_remote_prefill": False}
    source = post(p.url, body_of(held_prompt, 1, kv_transfer_params=params), headers=second)["kv_transfer_params"]
    before = rest(p)
    (held_answer,) = gather(d.url, [body_of(held_prompt, 12, kv_transfer_params=source)])
    assert held_answer.tokens == expected[2].tokens and waves(p) == before, "P pushes what it holds, and no wave begins"
    assert pair.loaded_tokens() == sum(map(len, prompts)), "D has computed a prompt itself"
    wait_for_free_blocks([p, d], free)
    cluster.stop(pair.front, d, p)


def waves(engine: EngineProcess) -> int:
    return len(WAVE.findall(engine.log.read_text(errors="replace")))


def rest(engine: EngineProcess) -> int:
    """Wait until the ranks have come to rest, and return how often they have."""
    for _ in range(2):  # the first request may end a wave that has begun before it
        before = waves(engine)
        post(engine.url, body_of(fresh_prompt(5), 1))
        eventually(lambda at=before: waves(engine) > at, f"{engine.name} comes to rest")
    return waves(engine)


@pytest.mark.slow
def test_a_rank_that_dies_ends_its_engine_and_another_goes_on(
    cluster: Cluster, allowed: list[str], make_pair: PairMaker
) -> None:
    """vLLM ends an engine when a rank dies. The other D takes over its requests, and P keeps no blocks."""
    p, *ds = cluster.start(
        *RankCounts(2, 1).specs(cluster, "p-alone", role="kv_producer", extra=cluster.push_config()),
        *(
            spec
            for name in ("d-dying", "d-staying")
            for spec in RankCounts(1, 2).specs(cluster, name, role="kv_consumer", extra=cluster.push_config(*allowed))
        ),
    )
    pair = make_pair(p, *ds)
    pair.check([fresh_prompt(64 + n) for n in range(12)], name="before a rank died")
    before = {p.name: settled_free_blocks(p)}
    core = re.search(r"EngineCore_DP1 pid=(\d+)", ds[0].log.read_text(errors="replace"))
    assert core is not None
    os.kill(int(core[1]), signal.SIGKILL)
    prompts = [fresh_prompt(100 + n) for n in range(20)]
    pair.compare(prompts, gather(pair.front.url, [body_of(prompt, 12) for prompt in prompts]), "after a rank died")
    wait_for_free_blocks([p], before)
    assert not ds[0].ready(), "the engine of the dead rank goes on"
    cluster.stop(pair.front, *ds, p)
