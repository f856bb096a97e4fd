# SPDX-License-Identifier: Apache-2.0
"""Pipelines: each stage of D has its own layers, and receives them from the stages of P that have some of them.

Five layers, so that no pipeline is cut evenly; D is cut differently from P. (In CI test_gqa.py has a pipeline on both
sides.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pairs import Pair, PairMaker, fresh_prompt

from tools.support.cluster import Cluster
from tools.support.models import ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class StageShape:
    tp: int
    cut: tuple[int, ...]  # layers of each stage

    def __str__(self) -> str:
        return f"tp{self.tp}-{'+'.join(map(str, self.cut))}"

    def spec(self, name: str, model: str, **more: Any) -> EngineSpec:
        environment = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, self.cut))} if len(self.cut) > 1 else {}
        shape = {"tp": self.tp, "pp": len(self.cut), "environment": environment}
        return EngineSpec(f"{name}-{model}-{self}", ensure(model), **shape, **more)


SHAPES = [
    ("gqa5", StageShape(1, (5,)), StageShape(1, (2, 3))),
    ("gqa5", StageShape(1, (3, 2)), StageShape(1, (1, 4))),
    ("gqa5", StageShape(2, (5,)), StageShape(1, (2, 3))),
    ("gqa5", StageShape(1, (2, 3)), StageShape(1, (5,))),
    ("gqa5", StageShape(2, (3, 2)), StageShape(2, (1, 4))),
    ("mla", StageShape(1, (4,)), StageShape(1, (1, 3))),
]


@pytest.fixture(params=SHAPES, ids=lambda of: f"{of[0]}-{of[1]}-to-{of[2]}", scope="module")
def pair(request: pytest.FixtureRequest, cluster: Cluster, allowed: list[str], make_pair: PairMaker) -> Iterator[Pair]:
    model, p_shape, d_shape = request.param
    d_config = cluster.push_config(*allowed, side_channel_port=cluster.ports(d_shape.tp * len(d_shape.cut)))
    p_config = cluster.push_config(**({"regroup": "always"} if p_shape.tp > d_shape.tp else {}))
    p, d = cluster.start(
        p_shape.spec("p", model, role="kv_producer", chunk=512, extra=p_config),
        d_shape.spec("d", model, role="kv_consumer", policy="fail", extra=d_config),
    )
    made = make_pair(p, d)
    yield made
    cluster.stop(made.front, d, p)


def test_every_length(pair: Pair) -> None:
    for length in (1, 2, 20, 32, 33, 333, 1500):
        pair.check([fresh_prompt(length)], name="stages")


def test_many_at_once_leave_nothing(pair: Pair) -> None:
    before = pair.free_counts()
    for _ in range(3):
        pair.check([fresh_prompt(10 + 37 * i) for i in range(16)], name="stages, 16 at once")
    assert pair.free_counts() == before


def test_prefixes_on_either_side(pair: Pair) -> None:
    if "mla" in pair.prefill.name:
        pytest.skip("vLLM has no prefix cache for MLA on a CPU")
    pair.check_prefix_on_decode(32)
    pair.check_prefix_on_prefill(32)
