# SPDX-License-Identifier: Apache-2.0
"""Quantised caches through real pairs, `verify: full`: vLLM's fp8 in its two formats, and int8 with scales that lie in the cache.

An engine with such a cache is the reference for a pair with it: what is rounded on P must arrive as it was rounded.
"""

from __future__ import annotations

from typing import Any

import pytest
from kind_pairs import BLOCK, check_left, engines, exercise, of, running, spec
from pairs import Pair, PairMaker

from scripts.support.cluster import Cluster
from scripts.support.engine import Engine

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

LENGTHS = (1, 20, 32, 33, 96, 333, 700)


def stored(as_: str, **more: Any) -> dict[str, Any]:
    return {"arguments": ("--kv-cache-dtype", as_), **more}


decode, pair = engines(of("gqa", **stored("fp8")))


class TestFp8:
    def test_every_length_in_chunks(self, pair: Pair) -> None:
        exercise(pair, "fp8 1→1", LENGTHS)

    def test_prefixes(self, pair: Pair) -> None:
        pair.check_prefix_on_decode(BLOCK)
        pair.check_prefix_on_prefill(BLOCK)

    def test_an_aborted_request_leaves_nothing(self, pair: Pair) -> None:
        check_left(pair, 97)


@pytest.mark.slow
class TestFp8Shapes:
    def test_from_tp_2_regrouped(self, cluster: Cluster, decode: Engine, make_pair: PairMaker) -> None:
        p = spec("fp8-p2", "gqa", "kv_producer", cluster.push_config(regroup="always"), **stored("fp8_e4m3", tp=2))
        with running(cluster, make_pair, p, beside=[decode]) as pair:
            exercise(pair, "fp8 2→1 regrouped", LENGTHS)

    @pytest.mark.parametrize(("model", "dtype"), [("gqa", "fp8_e5m2"), ("gptoss", "fp8"), ("nemotronh", "fp8")])
    def test_others_to_tp_2(
        self, cluster: Cluster, allowed: list[str], make_pair: PairMaker, model: str, dtype: str
    ) -> None:
        specs = (
            spec("other-p", model, "kv_producer", cluster.push_config(), **stored(dtype)),
            spec("other-d", model, "kv_consumer", cluster.push_config(*allowed), **stored(dtype, tp=2)),
        )
        with running(cluster, make_pair, *specs) as pair:
            exercise(pair, f"{model} {dtype} 1→2", LENGTHS)
