# SPDX-License-Identifier: Apache-2.0
"""Models whose cache has one head, held by every rank: MQA at TP 2→1 and 1→2, MLA at 1→1, 1→2 and 2→1.

With replicas on P each rank pushes its share; with replicas on D each rank gets all of it. A script of examples/ starts
one MQA pair as vLLM starts its processes on CPUs, so CI runs that. The others are forked as in all other tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launched import launched_pair
from pairs import Pair, PairMaker, fresh_prompt

from tools.support.cluster import Cluster
from tools.support.compare import AnswerTally
from tools.support.models import ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

MQA_LENGTHS = (1, 20, 32, 33, 256, 777)
MLA_LENGTHS = (1, 9, 16, 17, 128, 500)  # blocks of 16


@pytest.fixture(scope="class")
def mqa_down(cluster: Cluster, tally: AnswerTally) -> Iterator[Pair]:
    with launched_pair(cluster, tally, "unequal-tp/gqa.sh", ensure("mqa"), p_tp=2, d_tp=1) as pair:
        yield pair


@pytest.fixture(scope="class")
def mqa_up(cluster: Cluster, allowed: list[str], make_pair: PairMaker) -> Iterator[Pair]:
    p, d = cluster.start(
        EngineSpec("mqa-p1", ensure("mqa"), role="kv_producer", chunk=256, extra=cluster.push_config()),
        EngineSpec(
            "mqa-d2", ensure("mqa"), role="kv_consumer", tp=2, policy="fail", extra=cluster.push_config(*allowed)
        ),
    )
    pair = make_pair(p, d)
    yield pair
    cluster.stop(pair.front, d, p)


@pytest.fixture(scope="class")
def mla(cluster: Cluster, allowed: list[str], make_pair: PairMaker) -> Iterator[tuple[Pair, Pair]]:
    """P with TP 1, in pairs with D's of both sizes."""
    config = cluster.push_config(*allowed)
    p, d1, d2 = cluster.start(
        EngineSpec("mla-p1", ensure("mla"), role="kv_producer", tp=1, extra=cluster.push_config()),
        EngineSpec("mla-d1", ensure("mla"), role="kv_consumer", tp=1, policy="fail", extra=config),
        EngineSpec("mla-d2", ensure("mla"), role="kv_consumer", tp=2, policy="fail", extra=config),
    )
    pairs = make_pair(p, d1), make_pair(p, d2)
    yield pairs
    cluster.stop(*(pair.front for pair in pairs), d1, d2, p)


@pytest.fixture(scope="class")
def mla_down(cluster: Cluster, mla: tuple[Pair, Pair], make_pair: PairMaker) -> Iterator[Pair]:
    """P with TP 2, in a pair with the running D with TP 1."""
    (p,) = cluster.start(EngineSpec("mla-p2", ensure("mla"), role="kv_producer", tp=2, extra=cluster.push_config()))
    pair = make_pair(p, *mla[0].decode)
    yield pair
    cluster.stop(pair.front, p)


@pytest.mark.ci
class TestMqa2To1:
    def test_every_length(self, mqa_down: Pair) -> None:
        for length in MQA_LENGTHS:
            mqa_down.check([fresh_prompt(length)], name="MQA 2→1")

    def test_8_at_once(self, mqa_down: Pair) -> None:
        mqa_down.check([fresh_prompt(25 + 40 * i) for i in range(8)], name="MQA 2→1, 8 at once")


@pytest.mark.ci
class TestMqa1To2:
    def test_every_length(self, mqa_up: Pair) -> None:
        for length in MQA_LENGTHS:
            mqa_up.check([fresh_prompt(length)], name="MQA 1→2")

    def test_8_at_once(self, mqa_up: Pair) -> None:
        mqa_up.check([fresh_prompt(25 + 40 * i) for i in range(8)], name="MQA 1→2, 8 at once")


class TestMla:
    def test_1_to_1(self, mla: tuple[Pair, Pair]) -> None:
        for length in MLA_LENGTHS:
            mla[0].check([fresh_prompt(length)], name="MLA 1→1")
        mla[0].check([fresh_prompt(25 + 40 * i) for i in range(8)], name="MLA 1→1, 8 at once")

    def test_1_to_2(self, mla: tuple[Pair, Pair]) -> None:
        for length in MLA_LENGTHS:
            mla[1].check([fresh_prompt(length)], name="MLA 1→2")
        mla[1].check([fresh_prompt(25 + 40 * i) for i in range(8)], name="MLA 1→2, 8 at once")

    def test_2_to_1(self, mla_down: Pair) -> None:
        for length in MLA_LENGTHS:
            mla_down.check([fresh_prompt(length)], name="MLA 2→1")
        mla_down.check([fresh_prompt(25 + 40 * i) for i in range(8)], name="MLA 2→1, 8 at once")
