# SPDX-License-Identifier: Apache-2.0
"""Real engines of earlier releases of vLLM: pairs of one release, and of one with the newest, on either side."""

from __future__ import annotations

import sys
from collections.abc import Callable

import httpx
import pytest
from pairs import PairMaker

from tools.support.checks import first_tokens
from tools.support.cluster import Cluster
from tools.support.environments import ASKED, NEWEST, beside
from tools.support.models import ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]


def spec(release: str, name: str, role: str, cluster: Cluster, urls: list[str]) -> EngineSpec:
    python = beside(release) if release != NEWEST else sys.executable
    shape = {"extra": cluster.push_config(*urls), "block_size": 32, "chunk": 256, "python": python}
    return EngineSpec(f"{release}-{name}", ensure("gqa"), role=role, **shape)


@pytest.mark.parametrize(
    ("p", "d"),
    [(one, one) for one in ASKED] + [(one, NEWEST) for one in ASKED] + [(NEWEST, one) for one in ASKED],
    ids=lambda release: f"{release}",
)
def test_a_pair_of_two_releases(
    p: str, d: str, cluster: Cluster, allowed: list[str], make_pair: PairMaker, progress: Callable[[str], None]
) -> None:
    started = cluster.start(spec(p, "p", "kv_producer", cluster, []), spec(d, "d", "kv_consumer", cluster, allowed))
    pair = None
    try:
        pair = make_pair(*started)
        pair.check_lengths(f"P {p}, D {d}")
        versions = (httpx.get(f"{one.url}/version", trust_env=False).json()["version"] for one in started)
        progress(
            f"figure: P {p} ({next(versions)}), D {d} ({next(versions)}): {first_tokens(started[1])} of 11 answers begin with P's token"
        )
        assert first_tokens(started[1]) == 11
    finally:
        cluster.stop(*((pair.front,) if pair is not None else ()), *started)
