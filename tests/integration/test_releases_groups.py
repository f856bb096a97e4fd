# SPDX-License-Identifier: Apache-2.0
"""Windows and states in pairs of vLLM 0.23, which hands connectors less of several groups than later releases."""

from __future__ import annotations

from typing import Any

import pytest
from kind_pairs import (
    check_computed_again,
    check_failed_load,
    check_first_token_lost,
    check_left,
    exercise,
    running,
    spec,
)
from pairs import PairMaker, fresh_prompt

from tools.support.cluster import Cluster
from tools.support.compare import AnswerTally
from tools.support.environments import beside

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1200)]

RELEASE = "0.23.0"
LENGTHS = (1, 2, 3, 63, 64, 65, 95, 96, 97, 159, 160, 161, 333, 700)


def specs(model: str, cluster: Cluster, urls: list[str], **more: Any) -> tuple[Any, Any]:
    more = {"python": beside(RELEASE), **more}
    policy = {"policy": more.pop("policy")} if "policy" in more else {}
    return (
        spec(f"{RELEASE}-{model}-p", model, "kv_producer", cluster.push_config(), **more),
        spec(f"{RELEASE}-{model}-d", model, "kv_consumer", cluster.push_config(*urls), **more, **policy),
    )


def test_windows(cluster: Cluster, allowed: list[str], ports: list[int], make_pair: PairMaker) -> None:
    """Gemma-3: several groups, of which all but one keep a window."""
    with running(cluster, make_pair, *specs("gemma3", cluster, allowed)) as pair:
        exercise(pair, "gemma3 0.23", LENGTHS)
        check_failed_load(pair, ports[-1], (97, 250))
        check_first_token_lost(pair, ports[-1], 193, fails=True)
        check_left(pair, 193)


def test_a_failed_load_is_computed_again(
    cluster: Cluster, allowed: list[str], ports: list[int], make_pair: PairMaker
) -> None:
    with running(cluster, make_pair, *specs("gemma3", cluster, allowed, policy="recompute")) as pair:
        check_computed_again(pair, ports[-1], (97, 193, 250))
        check_first_token_lost(pair, ports[-1], 193, fails=False)
        exercise(pair, "after loads that failed", (97, 250))


@pytest.mark.parametrize("cached", [False, True], ids=["none", "align"])
def test_states(cluster: Cluster, allowed: list[str], ports: list[int], make_pair: PairMaker, cached: bool) -> None:
    """Gated DeltaNet, in both modes of its cache."""
    arguments = (
        "--dtype",
        "bfloat16",
        "--mamba-ssm-cache-dtype",
        "float32",
        *(() if cached else ("--no-enable-prefix-caching",)),
    )
    with running(cluster, make_pair, *specs("qwen3next", cluster, allowed, arguments=arguments)) as pair:
        pair.tally = AnswerTally(tie=0.25, excused_share=1.0)
        exercise(pair, "qwen3next 0.23", LENGTHS)
        check_failed_load(pair, ports[-1], (97, 250))
        check_left(pair, 193)
        pair.check([fresh_prompt(97)], name="after all that")
