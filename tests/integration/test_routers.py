# SPDX-License-Identifier: Apache-2.0
"""Routers of vLLM and vllm-ascend, unchanged, with a real pair and no metaserver.

vLLM's toy proxy sends to P first, its demo of NIXL's push and its proxy for Mooncake to both at once, vllm-ascend's
layerwise proxy to D first. With `verify: full`: every answer is the single engine's, and all blocks are freed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pairs import Pair, failures, fresh_prompt, settled_free_blocks, wait_for_free_blocks

from tools.support import routers
from tools.support.checks import eventually, first_tokens, fresh_salt, loaded_tokens
from tools.support.client import RequestFailed, body_of, chat_body_of, post
from tools.support.cluster import Cluster
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.routers import Router
from tools.support.sdist import Unreachable
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.ci, pytest.mark.timeout(900)]

BLOCK = 32
LENGTHS = (1, 2, 20, BLOCK, BLOCK + 1, 4 * BLOCK, 333, 1500)
HOLD_S = 20.0  # enough for D also on a busy machine
HELD = 24
EXPERTS = Path(__file__).parent / "plugins" / "experts"


@dataclass
class RoutedPair:
    """A pair, and functions that start a router in front of it."""

    cluster: Cluster
    tally: AnswerTally
    prefill: EngineProcess
    decode: EngineProcess
    listener: int
    bootstrap: int
    relays: list[int]  # ports of routers to which D may post

    def behind(self, make: Callable[[RoutedPair, int, Path], Router]) -> tuple[Router, Pair]:
        try:
            router = make(self, self.relays.pop() if make is layerwise else self.cluster.port(), self.cluster.logs)
        except Unreachable as why:
            pytest.skip(str(why))
        return router, Pair(self.cluster, router, self.prefill, (self.decode,), self.tally)  # type: ignore[arg-type]


def toy(site: RoutedPair, port: int, where: Path) -> Router:
    return routers.toy(site.prefill, site.decode, port, where)


def push_demo(site: RoutedPair, port: int, where: Path) -> Router:
    return routers.push_demo(site.prefill, site.decode, site.listener, port, where)


def mooncake(site: RoutedPair, port: int, where: Path) -> Router:
    return routers.mooncake(site.prefill, site.decode, site.bootstrap, port, where)


def layerwise(site: RoutedPair, port: int, where: Path) -> Router:
    return routers.layerwise(site.prefill, site.decode, port, where)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["1 to 1", "2 to 1"])
def site(request: pytest.FixtureRequest, cluster: Cluster, tally: AnswerTally) -> Iterator[RoutedPair]:
    model, tp, listener, bootstrap = ensure("gqa"), request.param, cluster.port(), cluster.port()
    p_extra = {"hold_sources": HELD, "hold_share": 0.5, "hold_s": HOLD_S}
    p_extra |= {"side_channel_port": listener, "bootstrap_port": bootstrap}
    relays = [cluster.port() for _ in range(2)]
    d_extra = {
        "prefill_listeners": [f"127.0.0.1:{listener}"],
        "metaserver_urls": [f"http://127.0.0.1:{port}" for port in relays],
    }
    p, d = cluster.start(
        EngineSpec(f"routers-p{tp}", model, role="kv_producer", tp=tp, chunk=256, extra=cluster.push_config(**p_extra)),
        EngineSpec(f"routers-d{tp}", model, role="kv_consumer", policy="fail", extra=cluster.push_config(**d_extra)),
    )
    yield RoutedPair(cluster, tally, p, d, listener, bootstrap, relays)
    cluster.stop(d, p)


@pytest.mark.parametrize(
    "make",
    [toy, push_demo, mooncake, layerwise],
    ids=["toy proxy", "push demo", "Mooncake's proxy", "layerwise proxy"],
)
def test_every_answer_is_the_single_engines_and_no_block_is_lost(
    site: RoutedPair, make: Callable[[RoutedPair, int, Path], Router], progress: Callable[[str], None]
) -> None:
    router, pair = site.behind(make)
    try:
        free = pair.free_counts()
        pair.check([fresh_prompt(n) for n in LENGTHS], name=make.__name__)
        before = first_tokens(site.decode)
        for n in LENGTHS[1:]:
            pair.check([fresh_prompt(n)], name=f"{make.__name__}, alone")
        # The layerwise proxy answers D's post before P has computed anything, and discards P's answer.
        wanted = 0 if make is layerwise else len(LENGTHS) - 1
        eventually(lambda: first_tokens(site.decode) - before == wanted, f"{wanted} first tokens of P")
        pair.check_prefix_on_prefill(BLOCK)
        chat = chat_body_of(f"{make.__name__}: " + "the cache goes ahead of the words. " * 9, 6)
        before = loaded_tokens(site.decode)
        got = post(router.url, chat, "/v1/chat/completions")
        alone = post(site.prefill.url, {**chat, "cache_salt": fresh_salt("alone")}, "/v1/chat/completions")
        assert got["choices"][0]["message"] == alone["choices"][0]["message"]
        assert loaded_tokens(site.decode) - before == got["usage"]["prompt_tokens"]
        wait_for_free_blocks([site.prefill, site.decode], free)
    finally:
        router.stop()


def test_what_is_not_fetched_is_held_to_its_bound_and_all_of_it_comes_back(site: RoutedPair) -> None:
    """Flood P with requests that no D loads: it keeps serving, and reports the others as not held."""
    free = settled_free_blocks(site.prefill)
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    answers = [
        post(site.prefill.url, body_of(fresh_prompt(40), 1, kv_transfer_params=params))["kv_transfer_params"]
        for _ in range(HELD + 6)
    ]
    with_source = [answer for answer in answers if "source" in answer]
    refused = [answer["pd_push"]["code"] for answer in answers if "source" not in answer]
    assert len(with_source) >= HELD and set(refused) <= {"PD-META-028"}
    post(site.prefill.url, body_of(fresh_prompt(300), 4))
    wait_for_free_blocks([site.prefill], {site.prefill.name: free})
    forgotten = body_of(fresh_prompt(40), 2, kv_transfer_params={**with_source[0]})
    before = time.monotonic(), len(failures(site.decode))
    post(site.decode.url, forgotten)  # another prompt than the source's: D computes it
    assert len(failures(site.decode)) == before[1] + 1


@pytest.mark.slow
def test_mooncakes_proxy_chooses_among_the_ranks_behind_one_address(cluster: Cluster, tally: AnswerTally) -> None:
    listener, bootstrap = cluster.ports(2), cluster.port()
    p_extra = {"hold_sources": HELD, "hold_s": HOLD_S, "side_channel_port": listener, "bootstrap_port": bootstrap}
    allowed = {"prefill_listeners": [f"127.0.0.1:{listener + rank}" for rank in range(2)]}
    experts: dict[str, Any] = {"plugins": (EXPERTS,), "max_seqs": 16}
    p, d = cluster.start(
        EngineSpec("ranks-p", ensure("moe"), role="kv_producer", dp=2, extra=cluster.push_config(**p_extra), **experts),
        EngineSpec(
            "ranks-d", ensure("moe"), role="kv_consumer", policy="fail", extra=cluster.push_config(**allowed), **experts
        ),
    )
    site = RoutedPair(cluster, tally, p, d, listener, bootstrap, [])
    router, pair = site.behind(mooncake)
    try:
        free = pair.free_counts()
        for n in LENGTHS:
            pair.check([fresh_prompt(n)], name="ranks behind Mooncake's proxy")
        ranks = p.by_rank("vllm:prompt_tokens_total")
        assert len(ranks) == 2 and all(ranks.values()), ranks
        assert pair.free_counts() == free
    finally:
        router.stop()
        cluster.stop(d, p)


@pytest.mark.slow
def test_a_p_that_dies_with_what_it_holds_fails_the_load_and_costs_d_nothing(site: RoutedPair) -> None:
    """Runs last in this file, because it kills P."""
    tokens, free = fresh_prompt(300), settled_free_blocks(site.decode)
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = post(site.prefill.url, body_of(tokens, 1, kv_transfer_params=params))["kv_transfer_params"]
    assert not site.prefill.process.kill()
    with pytest.raises(RequestFailed):
        post(site.decode.url, body_of(tokens, 2, kv_transfer_params=answer))
    assert "PD-XFER-004" in site.decode.log.read_text()
    assert post(site.decode.url, body_of(fresh_prompt(40), 2))["choices"], "it serves on"
    wait_for_free_blocks([site.decode], {site.decode.name: free})
