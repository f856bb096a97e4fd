# SPDX-License-Identifier: Apache-2.0
"""Workers in a Ray cluster (`--distributed-executor-backend ray`), on both sides.

vLLM refuses Ray on its CPU platform, which names no resource for the placement of workers: a test-only hook names one
(plugins/ray). Clusters over several hosts are up to Ray and vLLM.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pairs import PairMaker, fresh_prompt

from tools.support.cluster import Cluster
from tools.support.environments import beside
from tools.support.models import ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

PLUGIN = Path(__file__).parent / "plugins" / "ray"
RAY = ("--distributed-executor-backend", "ray")
PLACES = {"RAY_OVERRIDE_RESOURCES": '{"NPU": 2, "CPU": 16}', "RAY_USAGE_STATS_ENABLED": "0"}


def test_a_pair_whose_workers_are_ray_s(cluster: Cluster, allowed: list[str], make_pair: PairMaker) -> None:
    same = {"python": beside("ray"), "plugins": (PLUGIN,), "arguments": RAY, "environment": PLACES, "block_size": 32}
    p, d = cluster.start(
        EngineSpec("ray-p", ensure("gqa"), role="kv_producer", tp=2, chunk=256, extra=cluster.push_config(), **same),
        EngineSpec("ray-d", ensure("gqa"), role="kv_consumer", extra=cluster.push_config(*allowed), **same),
    )
    pair = make_pair(p, d)
    try:
        for length in (20, 127, 300, 700):
            pair.check([fresh_prompt(length)], name="Ray 2→1")
        pair.check([fresh_prompt(30 + 40 * i) for i in range(6)], name="Ray 2→1, 6 at once")
    finally:
        cluster.stop(pair.front, d, p)
