# SPDX-License-Identifier: Apache-2.0
"""A planted fault: a P that believes vLLM's word "cached" for blocks that the same step only computes.

It pushes what was in such a block before. Without checksums the tokens show it; with `verify: full` D refuses the
bytes. (`check_prefix_on_prefill` in pairs.py shows that the correct P is right in the same situation.)
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pairs import PairMaker, fresh_prompt, reference_answers

from tools.support.client import body_of, gather
from tools.support.cluster import Cluster
from tools.support.models import ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

PLUGIN = Path(__file__).parent / "plugins" / "hot"
BLOCK, ROUNDS = 32, 10


CASES = [
    pytest.param(True, "off", id="planted"),
    pytest.param(True, "full", id="planted, verified"),
    pytest.param(False, "full", id="as it is, verified"),
]


@pytest.mark.parametrize(("planted", "verify"), CASES)
def test_blocks_of_the_step_taken_for_computed_are_seen(
    planted: bool, verify: str, cluster: Cluster, allowed: list[str], make_pair: PairMaker
) -> None:
    plugins = (PLUGIN,) if planted else ()
    name = f"hot-{planted}-{verify}".lower()  # logs are read: each pair has its own
    p, d = cluster.start(
        EngineSpec(
            f"{name}-p",
            ensure("gqa"),
            role="kv_producer",
            extra=cluster.push_config(verify=verify),
            plugins=plugins,
        ),
        EngineSpec(f"{name}-d", ensure("gqa"), role="kv_consumer", extra=cluster.push_config(*allowed, verify=verify)),
    )
    pair = make_pair(p, d)
    try:
        wrong, refused = 0, 0
        for _ in range(ROUNDS):  # whether requests with one prefix meet in one step of P is chance
            head = fresh_prompt(6 * BLOCK)
            prompts = [fresh_prompt(1200), *([*head, *fresh_prompt(20 + i)] for i in range(6))]
            answers = gather(pair.front.url, [body_of(prompt, 12) for prompt in prompts])
            expected = reference_answers(p, prompts, 12)
            wrong += sum(one.tokens != right.tokens for one, right in zip(answers, expected, strict=True))
            refused = sum("PD-WIRE-004" in line for line in pair.failed_transfers())
            if planted and (wrong or refused):
                break
        assert bool(wrong) is (planted and verify == "off"), f"{wrong} answers differ"
        assert bool(refused) is (planted and verify == "full"), f"{refused} loads were refused"
    finally:
        cluster.stop(pair.front, d, p)
