# SPDX-License-Identifier: Apache-2.0
"""Data parallelism with expert parallelism: ranks that compute each layer together, each with requests of its own.

Any P (TP x DP) to any D (TP x DP), with vLLM's own balancing between the ranks behind one address. No configuration
names ranks or sizes: the reservation identifies its destination.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair, PairMaker, fresh_prompt, settled_free_blocks, wait_for_free_blocks

from scripts.support.client import body_of, gather
from scripts.support.cluster import Cluster
from scripts.support.models import ensure
from scripts.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

EXPERTS = Path(__file__).parent / "plugins" / "experts"
LOADED = "vllm:external_prefix_cache_hits_total"
LENGTHS = (1, 20, 32, 33, 256, 700)


@dataclass(frozen=True)
class Shape:
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
        (Shape(1, 2), Shape(1, 2, servers=2)),
        pytest.param((Shape(2, 1), Shape(1, 2)), marks=pytest.mark.slow),
        pytest.param((Shape(1, 2), Shape(2, 1)), marks=pytest.mark.slow),
        pytest.param((Shape(2, 2), Shape(1, 2)), marks=pytest.mark.slow),
        # The servers of two hosts, each of which balances between its own ranks. (With one rank each vLLM treats it
        # like the first case.)
        pytest.param((Shape(1, 1), Shape(1, 4, servers=2)), marks=pytest.mark.slow),
    ],
    ids=lambda shapes: f"{shapes[0]}-to-{shapes[1]}",
    scope="module",
)
def pair(request: pytest.FixtureRequest, cluster: Cluster, allowed: list[str], make_pair: PairMaker) -> Iterator[Pair]:
    p_shape, d_shape = request.param
    d_config = cluster.push_config(*allowed, side_channel_port=cluster.ports(d_shape.tp * d_shape.dp))
    p_config = cluster.push_config(**({"regroup": "always"} if p_shape.tp > 1 else {}))
    p, *ds = cluster.start(
        *p_shape.specs(cluster, "p", role="kv_producer", extra=p_config),
        *d_shape.specs(cluster, "d", role="kv_consumer", policy="fail", extra=d_config),
    )
    made = make_pair(p, *ds)
    yield made
    cluster.stop(made.front, *ds, p)


def test_every_length(pair: Pair) -> None:
    for length in LENGTHS:
        pair.check([fresh_prompt(length)], name="ranks")


def test_many_requests_use_all_ranks_and_leave_nothing(pair: Pair) -> None:
    before = pair.free_counts()
    for _ in range(8):
        pair.check([fresh_prompt(10 + 17 * i) for i in range(25)], name="ranks, 25 at once")
    for engine, name in ((pair.prefill, "vllm:prompt_tokens_total"), *((d, LOADED) for d in pair.decode)):
        ranks = engine.by_rank(name)
        assert len(ranks) == engine.ranks and all(ranks.values()), f"{name} of {engine.name} by rank: {ranks}"
    assert pair.free_counts() == before


@pytest.mark.slow
def test_a_rank_that_dies_ends_its_engine_and_another_goes_on(
    cluster: Cluster, allowed: list[str], make_pair: PairMaker
) -> None:
    """vLLM ends an engine when a rank dies. The other D takes over its requests, and P keeps no blocks."""
    p, *ds = cluster.start(
        *Shape(2, 1).specs(cluster, "p-alone", role="kv_producer", extra=cluster.push_config()),
        *(
            spec
            for name in ("d-dying", "d-staying")
            for spec in Shape(1, 2).specs(cluster, name, role="kv_consumer", extra=cluster.push_config(*allowed))
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
