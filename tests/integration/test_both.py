# SPDX-License-Identifier: Apache-2.0
"""Two engines that are both P and D (`kv_both`), behind vLLM's unchanged toy proxy in both directions.

The request decides which engine is P. With `verify: full`: every answer is the single engine's, every prompt is loaded
from the other engine, and all blocks are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from pairs import Pair, failures, fresh_prompt, wait_for_free_blocks

from tools.support import routers
from tools.support.checks import counter, eventually, first_tokens, loaded_tokens
from tools.support.client import body_of, complete, post
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


@dataclass
class EnginesOfBothRoles:
    """Two engines, and the port of each one's listener."""

    cluster: Cluster
    tally: AnswerTally
    engines: tuple[EngineProcess, EngineProcess]
    listeners: tuple[int, int]

    def behind(self, make: Callable[..., Router], prefill: int, *more: object) -> tuple[Router, Pair]:
        p, d = self.engines[prefill], self.engines[1 - prefill]
        router = self.router(make, p, d, *more)
        return router, Pair(self.cluster, router, p, (d,), self.tally)  # type: ignore[arg-type]

    def router(self, make: Callable[..., Router], *given: object) -> Router:
        try:
            return make(*given, self.cluster.port(), self.cluster.logs)
        except Unreachable as why:
            pytest.skip(str(why))


@pytest.fixture(
    scope="module",
    params=[("gqa", 1, {}), pytest.param(("gqa", 2, {"regroup": "always"}), marks=pytest.mark.slow)],
    ids=["1 and 1", "2 and 1, regrouped"],
)
def site(request: pytest.FixtureRequest, cluster: Cluster, tally: AnswerTally) -> Iterator[EnginesOfBothRoles]:
    name, tp, keys = request.param
    model, first = ensure(name), cluster.ports(8)
    listeners = first, first + 4  # room after each port, on which D's workers listen

    def spec(index: int, size: int) -> EngineSpec:
        held = {"hold_sources": 24, "hold_share": 0.5, "hold_s": 60.0, "side_channel_port": listeners[index]}
        extra = cluster.push_config(**held, **keys, prefill_listeners=[f"127.0.0.1:{listeners[1 - index]}"])
        name = f"both-{index}-tp{size}"
        return EngineSpec(name, model, role="kv_both", tp=size, chunk=256, policy="fail", extra=extra)

    engines = cluster.start(spec(0, tp), spec(1, 1))
    yield EnginesOfBothRoles(cluster, tally, (engines[0], engines[1]), listeners)
    cluster.stop(*engines)


def test_each_is_p_for_one_request_and_d_for_the_next(site: EnginesOfBothRoles) -> None:
    """Send one after the other, then in both directions at once, with prefixes cached on the other engine."""
    fronts = [site.behind(routers.toy, prefill) for prefill in (0, 1)]
    pairs = [pair for _, pair in fronts]
    try:
        free = pairs[0].free_counts()
        for n in LENGTHS[1:]:
            for which, pair in enumerate(pairs):
                pair.check([fresh_prompt(n)], name=f"P is {which}, alone")
        for engine in site.engines:
            eventually(lambda d=engine: first_tokens(d) == len(LENGTHS) - 1, "each begins with the other's first token")  # type: ignore[misc]
        with ThreadPoolExecutor(2) as pool:
            sent = [
                pool.submit(pair.check, [fresh_prompt(n) for n in 2 * LENGTHS], name=f"P is {which}, at once")
                for which, pair in enumerate(pairs)
            ]
            for one in sent:
                one.result()
        for pair in pairs:
            pair.check_prefix_on_prefill(BLOCK)
        for engine in site.engines:  # each counts in both its roles
            assert counter(engine, "vllm:ascend_pd_bytes_transferred_total") and loaded_tokens(engine)
        wait_for_free_blocks(site.engines, free)
    finally:
        for router, _ in fronts:
            router.stop()


def test_what_was_loaded_is_pushed_on(site: EnginesOfBothRoles) -> None:
    """A prefix that an engine loaded as D is pushed by it as P."""
    (there, first), (back, second) = (site.behind(routers.toy, prefill) for prefill in (0, 1))
    head = fresh_prompt(8 * BLOCK)
    try:
        first.check([head], name="there")
        before = counter(site.engines[1], "vllm:prefix_cache_hits_total")
        tokens = [*head, *fresh_prompt(BLOCK + 5)]
        answer = complete(back.url, body_of(tokens, 12))
        second.compare([tokens], [answer], "and back")
        assert counter(site.engines[1], "vllm:prefix_cache_hits_total") - before >= 7 * BLOCK
        assert not second.failed_transfers()
    finally:
        there.stop()
        back.stop()


def test_both_at_once_work_too(site: EnginesOfBothRoles) -> None:
    fronts = [site.behind(routers.push_demo, prefill, site.listeners[prefill]) for prefill in (0, 1)]
    try:
        free = fronts[0][1].free_counts()
        for _, pair in fronts:
            # D loads nothing of a prompt of one token
            pair.check([fresh_prompt(n) for n in LENGTHS[1:]], name="push demo")
        wait_for_free_blocks(site.engines, free)
    finally:
        for router, _ in fronts:
            router.stop()


def test_an_engine_may_fetch_from_itself(site: EnginesOfBothRoles) -> None:
    """A router that knows only one engine sends both requests there.

    D has the full blocks in its cache and loads the rest.
    """
    one = site.engines[0]
    router = site.router(routers.toy, one, one)
    try:
        pair = Pair(site.cluster, router, one, (one,), site.tally)  # type: ignore[arg-type]
        free, before, tokens = pair.free_counts(), loaded_tokens(one), fresh_prompt(3 * BLOCK + 5)
        pair.compare([tokens], [complete(router.url, body_of(tokens, 12))], "itself")
        assert loaded_tokens(one) - before == 5 and not pair.failed_transfers()
        wait_for_free_blocks([one], free)
    finally:
        router.stop()


def test_plain_requests_are_neither(site: EnginesOfBothRoles) -> None:
    one, before = site.engines[0], loaded_tokens(site.engines[0])
    lines = len(failures(one))
    assert post(one.url, body_of(fresh_prompt(40), 4))["choices"]
    assert loaded_tokens(one) == before and len(failures(one)) == lines
