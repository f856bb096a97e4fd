# SPDX-License-Identifier: Apache-2.0
"""A real pair on NPUs through vllm-ascend: tokens equal to a single engine's, every block checked end to end.

It uses a small random model, so nothing has to be downloaded. TP 2→1 regroups its short pieces: the exchange runs over
HCCL inside a real engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pairs import PairMaker, fresh_prompt

from tools.support.cluster import Cluster
from tools.support.models import RECIPES, ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.npu, pytest.mark.engines, pytest.mark.timeout(1800)]

MODEL = "tiny16"
SHAPES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 1, {}),
    (2, 1, {"regroup": "never"}),
    (2, 1, {"regroup": "always"}),
    (2, 1, {"regroup": "always", "regroup_kernels": "own"}),
    (4, 2, {"regroup": "always"}),
]


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "keys"),
    SHAPES,
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else str(value),
)
def test_tokens_are_the_single_engines(
    p_tp: int,
    d_tp: int,
    keys: dict[str, Any],
    cluster: Cluster,
    allowed: list[str],
    make_pair: PairMaker,
    told: Callable[[str], None],
) -> None:
    import torch

    if torch.npu.device_count() < p_tp + d_tp:
        pytest.skip(f"needs {p_tp + d_tp} NPUs, there are {torch.npu.device_count()}")
    path, name = ensure(MODEL), f"npu-{p_tp}-{d_tp}-{'-'.join(keys.values())}"
    first = ",".join(map(str, range(p_tp)))
    then = ",".join(map(str, range(p_tp, p_tp + d_tp)))
    config = cluster.push_config(*allowed)
    p, d = cluster.start(
        EngineSpec(
            f"{name}-p", path, role="kv_producer", tp=p_tp, chunk=512, devices=first, extra=cluster.push_config(**keys)
        ),
        EngineSpec(f"{name}-d", path, role="kv_consumer", tp=d_tp, policy="fail", devices=then, extra=config),
    )
    pair, vocab = make_pair(p, d), RECIPES[MODEL].vocab
    for length in (1, 20, 128, 129, 700, 1500):
        pair.check([fresh_prompt(length, vocab)], name=name)
    pair.check([fresh_prompt(30 + 80 * i, vocab) for i in range(16)], name=f"{name}, 16 at once")
    told(f"figure: pair {p_tp}→{d_tp} {keys or ''}: 22 prompts, tokens equal to a single engine's")
    cluster.stop(pair.front, d, p)
