# SPDX-License-Identifier: Apache-2.0
"""Real engines of other releases of vLLM: pairs of one release, and of one with the main environment's, on either side.

Their answers begin with P's first token; under a grammar and with drafts on D where tried.py says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from continued import check_answers_of_another
from draft_pairs import LENGTHS, check, draft_config
from grammars import check_grammars
from kind_pairs import running
from pairs import PairMaker

from tools.support.checks import first_tokens
from tools.support.cluster import Cluster
from tools.support.environments import ASKED, NEWEST, beside
from tools.support.models import ensure
from tools.support.spec import EngineSpec
from vllm_ascend_pd.vllm_patches.tried import TRIED_DRAFTS, TRIED_GIVEN, TRIED_GRAMMARS, VLLM, untried

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

ONE_DRAFT = "0.30.0"  # with more, its drafter on a CPU calls a kernel of Triton's
VERIFYING = Path(__file__).parent / "plugins" / "verifying"


def interpreter(release: str) -> str:
    return beside(release) if release != NEWEST else sys.executable


def spec(release: str, name: str, role: str, cluster: Cluster, urls: list[str]) -> EngineSpec:
    shape = {"extra": cluster.push_config(*urls), "block_size": 32, "chunk": 256, "python": interpreter(release)}
    return EngineSpec(f"{release}-{name}", ensure("gqa"), role=role, **shape)


@pytest.mark.parametrize(
    ("p", "d"),
    [(one, one) for one in ASKED] + [(one, NEWEST) for one in ASKED] + [(NEWEST, one) for one in ASKED],
    ids=lambda release: f"{release}",
)
def test_a_pair_of_two_releases(
    p: str,
    d: str,
    cluster: Cluster,
    allowed: list[str],
    ports: list[int],
    make_pair: PairMaker,
    progress: Callable[[str], None],
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
        if not untried({VLLM: d}, TRIED_GIVEN):
            check_answers_of_another(pair, ports[-1])
        check_grammars(pair, first=not any(untried({VLLM: one}, TRIED_GRAMMARS) for one in (p, d)))
    finally:
        cluster.stop(*((pair.front,) if pair is not None else ()), *started)


@pytest.mark.parametrize(
    ("release", "method"),
    [(one, method) for one in ASKED for method in ("eagle", "mtp") if not untried({VLLM: one}, TRIED_DRAFTS)],
)
def test_drafts_behind_p_s_first_token(
    release: str,
    method: str,
    cluster: Cluster,
    allowed: list[str],
    make_pair: PairMaker,
    progress: Callable[[str], None],
) -> None:
    """D accepts as many drafts as by itself, where it computes the prompt and begins behind the same token."""
    target = ensure("mtp" if method == "mtp" else "spec")
    count = {"num_speculative_tokens": 1 if release == ONE_DRAFT else 2}
    draft = {"method": "mtp", **count} if method == "mtp" else draft_config("eagle", "spec-eagle", **count)
    same: dict[str, Any] = {"draft": draft, "python": interpreter(release)}
    if release == ONE_DRAFT:
        same["plugins"] = (VERIFYING,)
    extra = cluster.push_config(*allowed)
    specs = (
        EngineSpec(f"{release}-{method}-p", target, role="kv_producer", extra=cluster.push_config(), **same),
        EngineSpec(f"{release}-{method}-d", target, role="kv_consumer", policy="fail", extra=extra, **same),
    )
    with running(cluster, make_pair, *specs) as pair:
        check(pair, LENGTHS, f"{method}, vLLM {release}", progress)
