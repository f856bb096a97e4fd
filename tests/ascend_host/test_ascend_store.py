# SPDX-License-Identifier: Apache-2.0
"""A pair beside vllm-ascend's pool of prefixes (AscendStoreConnector), both in its MultiConnector.

The connector is vllm-ascend's own with its backend for memcache, whose client is the one of plugin/memcache_hybrid.py:
its backend for Mooncake takes the protocol of NPUs alone. Both engines put whole blocks of prompts into one pool, and P
loads from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import httpx
import pytest
from engine_sets import BLOCK, Engines, Machine, Side
from host_build import OLDER
from pairs import Pair, fresh_prompt, reference_answers
from test_pairs import LATE, chunks, edges, many, started

from tools.support.checks import eventually, loaded_tokens
from tools.support.client import body_of, gather
from tools.support.cluster import Cluster
from tools.support.engine import RunningServer
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]

POOL = {
    "kv_connector": "AscendStoreConnector",
    "kv_connector_extra_config": {"backend": "memcache", "consumer_is_to_put": True},
}


@dataclass(frozen=True)
class BesidePool(Engines):
    def specs(self, machine: Machine, cluster: Cluster, url: str) -> list[EngineSpec]:
        """Return P and D with one pool, in which both name a block alike."""
        shared = {
            "STAND_IN_POOL": str(cluster.directory / "pool"),
            "PYTHONHASHSEED": "0",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }
        made = []
        for spec in super().specs(machine, cluster, url):
            ours, pool = spec.extra["connectors"]
            # lookup_rpc_port is part of the IPC socket's name, where the worker answers its scheduler.
            keys = {**pool["kv_connector_extra_config"], "lookup_rpc_port": cluster.port()}
            children = [ours, {**pool, "kv_connector_extra_config": keys}]
            made.append(replace(spec, extra={"connectors": children}, environment={**spec.environment, **shared}))
        return made


ENGINES = BesidePool("gqa 1to1 pool", p=Side(late_us=LATE), d=Side(late_us=LATE), beside=(POOL,), release=OLDER)


@pytest.fixture(scope="module")
def pair(hosts: Callable[[str], Machine], progress: Callable[[str], None]) -> Iterator[Pair]:
    with started(ENGINES, hosts(ENGINES.release), progress) as pair:
        yield pair


@pytest.mark.parametrize("cell", [edges, chunks, many])
def test_tokens_are_one_engines(pair: Pair, cell: Callable[[Engines, Pair], None]) -> None:
    cell(ENGINES, pair)


def clear_prefix_caches(pair: Pair) -> None:
    """Clear the prefix caches of the engines themselves, which needs all blocks to be free."""

    def reset(engine: RunningServer) -> bool:
        return httpx.post(f"{engine.url}/reset_prefix_cache", timeout=10.0, trust_env=False).status_code == 200

    for engine in (pair.prefill, *pair.decode):
        eventually(lambda engine=engine: reset(engine), f"{engine.name} clears its prefix cache")


def pushed_from_the_pool(pair: Pair, prompts: list[list[int]], name: str) -> None:
    """P loads each whole block of the prompts from the pool, and D gets all of their tokens from P."""
    clear_prefix_caches(pair)
    before = loaded_tokens(pair.prefill)
    pair.check(prompts, name=name, expected=reference_answers(pair.reference, prompts, 12))
    kept = sum(len(prompt) // BLOCK * BLOCK for prompt in prompts)
    assert loaded_tokens(pair.prefill) - before == kept, "P has computed what the pool has"


def test_p_pushes_what_it_loads_from_the_pool(pair: Pair) -> None:
    prompts = [fresh_prompt(length) for length in (BLOCK + 1, 300, 700)]
    pair.check(prompts, name="into the pool")
    pushed_from_the_pool(pair, prompts, "from the pool")


def test_p_pushes_what_d_has_put_into_the_pool(pair: Pair) -> None:
    """Prompts that D alone has computed: P has them from the pool only."""
    prompts = [fresh_prompt(length) for length in (BLOCK + 1, 300)]
    gather(pair.decode[0].url, [body_of(prompt, 1) for prompt in prompts])
    pushed_from_the_pool(pair, prompts, "put there by D")


def test_nothing_went_wrong_in_the_pool(pair: Pair) -> None:
    pair.check([fresh_prompt(BLOCK + 1)], name="one more into the pool")
    pool = pair.cluster.directory / "pool"
    eventually(lambda: any(file.suffix != ".new" for file in pool.iterdir()), "a block in the pool")
    for engine in (pair.prefill, *pair.decode):
        log = engine.log.read_text(errors="replace")
        assert not re.findall(r"Failed to (?:put|get|store) .*", log), engine.name
