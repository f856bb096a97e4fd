# SPDX-License-Identifier: Apache-2.0
"""Tests with other connectors beside ours in vLLM's MultiConnector.

Ours does not touch what another one loads or holds, and blocks that both hold are free once both have released them.
Without a model (vLLM's own scheduler, aggregator and MultiConnector), and with real engines.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_without_model import BLOCK, EngineWithoutModel, run_until
from fake_metaserver import fake_metaserver
from pairs import (
    Pair,
    PairMaker,
    counter,
    fresh_prompt,
    reference_answers,
    settled_free_blocks,
    wait_for_free_blocks,
)

from tools.support.checks import eventually
from tools.support.client import body_of, gather, post
from tools.support.cluster import Cluster
from tools.support.engine import RunningServer
from tools.support.models import ensure
from tools.support.process import free_port
from tools.support.spec import EngineSpec

PLUGIN, OFFLOAD = (Path(__file__).parent / "plugins" / name for name in ("sibling", "offload"))
SIBLING = {"kv_connector": "Sibling", "kv_connector_module_path": "pd_test_sibling", "kv_role": "kv_both"}
TOKENS = [3 + 7 * i % 500 for i in range(5 * BLOCK + 3)]
HITS = "vllm:external_prefix_cache_hits_total"  # tokens that connectors have loaded
MEMORY = {"transport": "memory", "patient": False, "verify": "full"}


@pytest.fixture(params=["ours first", "ours second"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[EngineWithoutModel, EngineWithoutModel, str, Any]]:
    """P with TP 2 and D with TP 2, each with a sibling; the metaserver's address, and the bodies it received."""
    sys.path.insert(0, str(PLUGIN))
    port, reservations = free_port(), queue.SimpleQueue[dict[str, Any]]()
    url = f"http://127.0.0.1:{port}"

    def script(body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        reservations.put(body)
        return 200, [{"event": "accepted", "prefill": "here"}, {"event": "prefilled"}]

    def engine(role: str, **more: Any) -> EngineWithoutModel:
        children = [ours(role, {**MEMORY, **more}), SIBLING]
        return EngineWithoutModel(role, 2, {}, children=children if request.param == "ours first" else children[::-1])

    with fake_metaserver(port, script):
        made = engine("kv_producer"), engine("kv_consumer", metaserver_urls=[url])
        made[0].fill(seed=1)
        yield *made, url, reservations
        for each in made:
            each.close()
    sys.path.remove(str(PLUGIN))


def ours(role: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "AscendPushConnector",
        "kv_connector_module_path": "vllm_ascend_pd.connector",
        "kv_role": role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }


@pytest.mark.timeout(180)
def test_each_connectors_requests_end_and_all_blocks_go_back(engines: Any) -> None:
    prefill, decode, url, reservations = engines
    free = [engine.free_blocks() for engine in (prefill, decode)]
    decode.add("pushed-d", TOKENS, {"do_remote_prefill": True, "metaserver": url, "ticket": "t"}, max_tokens=2)
    decode.add("sibling-d", TOKENS[::-1], {"sibling": True}, max_tokens=2)
    decode.step()
    params = {"do_remote_decode": True, "reservation": reservations.get(timeout=10.0)["reservation"]}
    prefill.add("pushed-p", TOKENS, params)
    prefill.add("sibling-p", TOKENS[::-1], {"sibling": True})
    prefill.add("plain-p", TOKENS[1:], {})
    both = prefill, decode
    run_until(both, lambda: {"pushed-d", "sibling-d"} <= set(decode.finished.received))
    run_until(both, lambda: [engine.free_blocks() for engine in both] == free)
    run_until(both, lambda: not (prefill.scheduler.requests or decode.scheduler.requests))
    assert sorted(prefill.finished.sent) == ["plain-p", "pushed-p", "sibling-p"], (
        "each is reported once, when all are done with it"
    )
    assert not decode.finished.failed


@pytest.mark.timeout(180)
def test_what_ended_before_its_push_had_blocks_is_reported_by_its_sibling_alone(engines: Any) -> None:
    """After an abort, a push holds its blocks until its writes are over, and the sibling holds them, too."""
    prefill, decode, url, reservations = engines
    free = prefill.free_blocks()
    decode.add("r-d", TOKENS, {"do_remote_prefill": True, "metaserver": url, "ticket": "t"}, max_tokens=2)
    decode.step()
    params = {"do_remote_decode": True, "reservation": reservations.get(timeout=10.0)["reservation"]}
    prefill.add("r-p", TOKENS, params, max_tokens=4)
    prefill.step()
    prefill.abort("r-p")
    run_until((prefill, decode), lambda: prefill.free_blocks() == free and not prefill.scheduler.requests)
    assert prefill.finished.sent == ["r-p"]


EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
COPIES = {"spec_name": "CopyingSpec", "spec_module_path": "pd_test_offload", "cpu_bytes_to_use": 32 << 20}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": COPIES}


@pytest.fixture(params=["Sibling", "ExampleConnector", "OffloadingConnector"], scope="module")
def pair(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    allowed: list[str],
    make_pair: PairMaker,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    store = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path_factory.mktemp("store"))}}
    other = {"Sibling": SIBLING, "ExampleConnector": {**EXAMPLE, **store}, "OffloadingConnector": OFFLOADING}[
        request.param
    ]
    clears = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache

    def spec(role: str, *metaservers: str) -> EngineSpec:
        extra = {"connectors": [ours(role, cluster.push_config(*metaservers)), other]}
        name = f"{role.removeprefix('kv_')}-beside-{request.param.lower()}"
        more = {"connector": "MultiConnector", "transfer": {"kv_role": "kv_both"}, "extra": extra}
        plugins = (PLUGIN, OFFLOAD)
        return EngineSpec(name, ensure("gqa"), role=role, plugins=plugins, environment=clears, max_seqs=16, **more)

    p, d = cluster.start(spec("kv_producer"), spec("kv_consumer", *allowed))
    made = make_pair(p, d)
    yield made
    cluster.stop(made.front, d, p)


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pair_beside_another_connector(pair: Pair) -> None:
    free = pair.free_counts()
    pair.check([fresh_prompt(length) for length in (5, 33, 200, 700)], name="beside another")
    for engine in (pair.prefill, *pair.decode):
        post(engine.url, body_of(fresh_prompt(200), 2))
        if "sibling" in engine.name:
            bodies = [body_of(fresh_prompt(100), 2, kv_transfer_params={"sibling": True}) for _ in range(4)]
            assert len(gather(engine.url, bodies)) == 4, "what the other connector loads is loaded"
    pair.check([fresh_prompt(40 + 50 * i) for i in range(8)], name="beside another, 8 at once")
    wait_for_free_blocks((pair.prefill, *pair.decode), free)
    if "sibling" not in pair.prefill.name:
        check_what_another_has_kept(pair)
        wait_for_free_blocks((pair.prefill, *pair.decode), free)


def check_what_another_has_kept(pair: Pair) -> None:
    """Clear the engines' own prefix caches. P then pushes what the other connector loads, and D loads it itself."""
    prompts = [fresh_prompt(length) for length in (100, 300, 700)]
    expected, kept = reference_answers(pair.prefill, prompts, 12), sum(len(p) // 32 * 32 for p in prompts)
    for engine, ask in ((pair.prefill, pair.check), (pair.decode[0], None)):
        gather(engine.url, [body_of(prompt, 1) for prompt in prompts])
        settled_free_blocks(engine)  # a step more: an offload is reported with the next one
        eventually(lambda engine=engine: reset(engine), f"{engine.name} clears its prefix cache")
        before = counter(engine, HITS)
        if ask is not None:
            ask(prompts, expected=expected, name="kept by another on P")
        else:
            answers = gather(engine.url, [body_of(prompt, 12) for prompt in prompts])
            assert [one.tokens for one in answers] == [one.tokens for one in expected], "kept by another on D"
        assert counter(engine, HITS) - before == kept, f"{engine.name} took what another connector has kept"


def reset(engine: RunningServer) -> bool:
    return (
        httpx.post(f"{engine.url}/reset_prefix_cache", timeout=10.0, trust_env=False, verify=False).status_code == 200
    )
