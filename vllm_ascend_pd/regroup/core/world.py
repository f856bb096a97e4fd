# SPDX-License-Identifier: Apache-2.0
"""Where a worker stands among its engine's ranks, and the size of its staging slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.geometry.layout import CacheGeometry

ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class EngineWorld:
    """A worker's rank and its engine's sizes, and the most tokens that a step computes."""

    rank: int  # of the world: all stages of all data-parallel ranks that compute together
    tp_size: int
    groups: int  # number of groups of tp_size ranks in the world
    step_tokens: int

    @classmethod
    def of(cls, parallel: Any, pcp: int, step_tokens: int) -> EngineWorld:
        """Return a worker's world by vLLM's parallel configuration, whose `rank` is within a data-parallel rank."""
        return cls(
            rank=parallel.data_parallel_rank * parallel.world_size + parallel.rank,
            tp_size=parallel.tensor_parallel_size,
            groups=parallel.pipeline_parallel_size * parallel.data_parallel_size * pcp,
            step_tokens=step_tokens,
        )


def slot_bytes(geometry: CacheGeometry, world: EngineWorld) -> int:
    """Return the size of one rank's share of a full step with all heads, plus two blocks for rounding.

    Longer steps are cut.
    """
    sizes = [
        (-(-world.step_tokens // (world.tp_size * kind.block_size)) + 2)
        * kind.kv_heads
        * sum(r.cell_bytes * (1 if r.opaque else kind.block_size) for r in kind.regions)
        for kind in geometry.kinds
        if (kind.kv_heads > 1 or not geometry.others) and not kind.group.stateful
    ]
    return -(-max(sizes) // ALIGNMENT) * ALIGNMENT
