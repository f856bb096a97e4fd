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
from typing import Any

import httpx
import pytest
from engine_sets import BLOCK, SHORT_BLOCKS, Engines, Machine, Side
from pairs import Pair, fresh_prompt
from test_pairs import C8, LATE, LONG, chunks, edges, many, started

from tools.support.checks import eventually, loaded_tokens
from tools.support.client import TimedAnswer, body_of, gather
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
    by_layer: bool = False  # P loads and stores each layer's KV about its computing
    unit: int = BLOCK  # tokens of which the pool has a whole block of each group

    def specs(self, machine: Machine, cluster: Cluster, url: str) -> list[EngineSpec]:
        """Return P and D with one pool, in which both name a block alike."""
        settings = cluster.directory / "memcache.conf"  # of the client; vllm-ascend reads one line of it itself
        settings.write_text("ock.mmc.local_service.protocol = host_tcp\n")
        shared = {
            "MMC_LOCAL_CONFIG_PATH": str(settings),
            "STAND_IN_POOL": str(cluster.directory / "pool"),
            "PYTHONHASHSEED": "0",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }
        made = []
        for spec in super().specs(machine, cluster, url):
            ours, pool = spec.extra["connectors"]
            # lookup_rpc_port is part of the IPC socket's name, where the worker answers its scheduler.
            keys = {**pool["kv_connector_extra_config"], "lookup_rpc_port": cluster.port()}
            if self.by_layer:
                keys |= {"use_layerwise": spec.role == "kv_producer", "consumer_is_to_put": False}
            children = [ours, {**pool, "kv_connector_extra_config": keys}]
            made.append(replace(spec, extra={"connectors": children}, environment={**spec.environment, **shared}))
        return made


DSV4: dict[str, Any] = {"model": "dsv4", "dtype": "bfloat16", "flags": SHORT_BLOCKS, "max_len": 4608, "unit": 32 * 128}
PUT_BY_BOTH = [
    BesidePool("gqa 1to1 pool", p=Side(late_us=LATE), d=Side(late_us=LATE), beside=(POOL,)),
    BesidePool("mla 1to1 pool", "mla", dtype="bfloat16", beside=(POOL,)),
    BesidePool("dsa int8 1to1 pool", "dsv32", dtype="bfloat16", flags=C8, max_len=LONG, beside=(POOL,)),
    BesidePool("dsv4 1to1 pool", beside=(POOL,), **DSV4),
]
PUT_BY_P = [
    BesidePool("gqa 1to1 pool by layer", p=Side(late_us=LATE), beside=(POOL,), by_layer=True),
    BesidePool("dsv4 1to1 pool by layer", beside=(POOL,), by_layer=True, **DSV4),
]
SETS = [*PUT_BY_BOTH, *PUT_BY_P]


@pytest.fixture(scope="module", params=SETS, ids=str)
def engines(request: pytest.FixtureRequest) -> BesidePool:
    engine_set: BesidePool = request.param
    return engine_set


@pytest.fixture(scope="module")
def pair(engines: Engines, hosts: Callable[[str], Machine], progress: Callable[[str], None]) -> Iterator[Pair]:
    with started(engines, hosts(engines.release), progress) as pair:
        yield pair


@pytest.mark.parametrize("cell", [edges, chunks, many])
def test_tokens_are_one_engines(engines: Engines, pair: Pair, cell: Callable[[Engines, Pair], None]) -> None:
    cell(engines, pair)


def clear_prefix_caches(pair: Pair) -> None:
    """Clear the prefix caches of the engines themselves, which needs all blocks to be free."""

    def reset(engine: RunningServer) -> bool:
        return httpx.post(f"{engine.url}/reset_prefix_cache", timeout=10.0, trust_env=False).status_code == 200

    for engine in (pair.prefill, *pair.decode):
        eventually(lambda engine=engine: reset(engine), f"{engine.name} clears its prefix cache")


def pushed_from_the_pool(engines: BesidePool, pair: Pair, prompts: list[list[int]], name: str) -> None:
    """P loads each whole block of the prompts from the pool, and D gets all of their tokens from P.

    What is expected is P's answer behind the same blocks of the pool: MLA rounds otherwise behind a prefix. A P that
    asks the pool layer by layer remembers for half a minute what was not in it.
    """
    kept = sum(len(prompt) // engines.unit * engines.unit for prompt in prompts)

    expected: list[TimedAnswer] = []

    def loaded_alone() -> bool:
        clear_prefix_caches(pair)
        before = loaded_tokens(pair.prefill)
        expected[:] = gather(pair.reference.url, [body_of(prompt, 12, **pair.asked) for prompt in prompts])
        return loaded_tokens(pair.prefill) - before == kept

    eventually(loaded_alone, f"P loads {kept} tokens from the pool", 120.0)
    clear_prefix_caches(pair)
    before = loaded_tokens(pair.prefill)
    pair.check(prompts, name=name, expected=expected)
    assert loaded_tokens(pair.prefill) - before == kept, "P has computed what the pool has"


def whole_blocks_and_more(engines: BesidePool) -> list[list[int]]:
    """Return prompts of which all fit into one step: where they are cut, MLA rounds otherwise too."""
    return [fresh_prompt(length) for length in (engines.unit + 1, 2 * engines.unit + 44) if length < engines.max_len]


def test_p_pushes_what_it_loads_from_the_pool(engines: BesidePool, pair: Pair) -> None:
    prompts = whole_blocks_and_more(engines)
    pair.check(prompts, name="into the pool")
    pushed_from_the_pool(engines, pair, prompts, "from the pool")


@pytest.mark.parametrize("engines", PUT_BY_BOTH, ids=str, indirect=True, scope="module")
def test_p_pushes_what_d_has_put_into_the_pool(engines: BesidePool, pair: Pair) -> None:
    """Prompts that D alone has computed: P has them from the pool only."""
    prompts = whole_blocks_and_more(engines)
    gather(pair.decode[0].url, [body_of(prompt, 1) for prompt in prompts])
    pushed_from_the_pool(engines, pair, prompts, "put there by D")


def test_nothing_went_wrong_in_the_pool(pair: Pair) -> None:
    pair.check([fresh_prompt(BLOCK + 1)], name="one more into the pool")
    pool = pair.cluster.directory / "pool"
    eventually(lambda: any(file.suffix != ".new" for file in pool.iterdir()), "a block in the pool")
    for engine in (pair.prefill, *pair.decode):
        log = engine.log.read_text(errors="replace")
        assert not re.findall(r"Failed to (?:put|get|store) .*", log), engine.name
