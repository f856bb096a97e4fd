# SPDX-License-Identifier: Apache-2.0
"""TP 4→2, 2→4 and sizes that do not divide each other (3→2, 2→3), which start too slowly for every change.

Four workers on two cores take a minute to start; the time is printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from pairs import PairMaker, fresh_prompt

from tools.support.cluster import Cluster
from tools.support.models import ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("model", "p_tp", "d_tp"), [("gqa", 4, 2), ("gqa", 2, 4), ("mha6", 3, 2), ("mha6", 2, 3), ("mla", 4, 2)]
)
def test_tokens_are_the_single_engines(
    model: str,
    p_tp: int,
    d_tp: int,
    cluster: Cluster,
    allowed: list[str],
    make_pair: PairMaker,
    progress: Callable[[str], None],
) -> None:
    path, name = ensure(model), f"{model}-{p_tp}-{d_tp}"
    config = cluster.push_config(*allowed)
    begun = time.monotonic()
    p, d = cluster.start(
        EngineSpec(f"{name}-p", path, role="kv_producer", tp=p_tp, extra=cluster.push_config()),
        EngineSpec(f"{name}-d", path, role="kv_consumer", tp=d_tp, policy="fail", extra=config),
    )
    progress(f"{model} {p_tp}→{d_tp}: started in {time.monotonic() - begun:.0f} s")
    pair = make_pair(p, d)
    for length in (1, 20, 32, 33, 300, 1200):
        pair.check([fresh_prompt(length)], name=f"{model} {p_tp}→{d_tp}")
    pair.check([fresh_prompt(30 + 40 * i) for i in range(8)], name=f"{model} {p_tp}→{d_tp}, 8 at once")
    cluster.stop(pair.front, d, p)
