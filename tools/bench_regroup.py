# SPDX-License-Identifier: Apache-2.0
"""Benefit of regrouping: descriptors and bytes per descriptor of the busiest P rank, `never` against `always`.

Computed by the planners that run in production, for one layer of one prompt with scattered blocks. Nothing is timed: it
shows the transfers, not their speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_ascend_pd.geometry.decide import decide
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.geometry.plan import Job, StepPlanner
from vllm_ascend_pd.geometry.regroup import RegroupPlanner

HEAD_BYTES = 128 * 2  # head dimension 128, two bytes
LATENT_BYTES = {"latent": 512 * 2, "rope": 64 * 2}
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class RegroupModel:
    name: str
    heads: int  # KV heads; 1 for MLA


LLAMA, QWEN, DEEPSEEK = RegroupModel("Llama-70B", 8), RegroupModel("Qwen3-235B", 4), RegroupModel("DeepSeek-V3", 1)
CASES = (
    (LLAMA, 2, 1),
    (LLAMA, 4, 2),
    (LLAMA, 8, 1),
    (LLAMA, 8, 2),
    (LLAMA, 8, 4),
    (LLAMA, 4, 8),
    (QWEN, 16, 2),
    (QWEN, 16, 4),
    (DEEPSEEK, 16, 4),
)


def cache(model: RegroupModel, tp: int, block: int, layout: str) -> CacheGeometry:
    rank_heads = max(1, model.heads // tp)
    cells = {"k": HEAD_BYTES, "v": HEAD_BYTES} if model.heads > 1 else LATENT_BYTES
    regions = []
    for name, cell in cells.items():
        head, token = (cell, rank_heads * cell) if layout == "token" else (block * cell, cell)
        regions.append(Region(name, block * rank_heads * cell, 0 if rank_heads == 1 else head, token, cell))
    return CacheGeometry(block, model.heads, tp, "bfloat16", "plain", tuple(regions), (("layer",),))


@dataclass(frozen=True)
class LayerWrites:
    """Writes of one rank and one layer."""

    descriptors: int
    nbytes: int
    exchanged: int = 0  # bytes sent to other P ranks

    @property
    def span(self) -> int:
        return self.nbytes // max(1, self.descriptors)


def direct(p: CacheGeometry, job: Job) -> Iterator[LayerWrites]:
    for rank in range(p.tp_size):
        [plan] = StepPlanner(p, rank).plan([job])
        spans = [each for regions in plan.by_rank.values() for each in regions]
        yield LayerWrites(sum(len(each) for each in spans), sum(each.nbytes for each in spans))


def regrouped(p: CacheGeometry, job: Job) -> Iterator[LayerWrites]:
    for rank in range(p.tp_size):
        plan = RegroupPlanner(p, rank).plan([job])
        spans = [each for slot in plan.slots for regions in slot.writes.values() for each in regions]
        sent = int(plan.matrix[rank].sum() - plan.matrix[rank, rank])
        yield LayerWrites(sum(len(each) for each in spans), sum(each.nbytes for each in spans), sent)


def scattered(tokens: int, block: int, seed: int) -> np.ndarray:
    """Return a block table in which no two ids are neighbours."""
    count = -(-tokens // block)
    return (2 * np.random.default_rng(seed).permutation(count)).astype(np.int32)


def words(load: LayerWrites) -> str:
    span = f"{load.span / KIB:.4g} KiB" if load.span >= KIB else f"{load.span} B"
    return f"{load.descriptors:>9,} x {span:<9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768, help="length of the prompt")
    parser.add_argument("--block", type=int, default=128, help="block size of both engines")
    parser.add_argument(
        "--layout", choices=("token", "head"), default="token", help="which axis comes first in a block"
    )
    args = parser.parse_args()
    print(
        f"One layer of a prompt of {args.tokens:,} tokens, {args.layout}-major blocks of {args.block}, bf16, busiest P rank"
    )
    print(f"{'model':12} {'P -> D':>8}   {'never':23} {'always':23} {'exchanged':>10}   auto")
    for model, p_tp, d_tp in CASES:
        p, d = (cache(model, tp, args.block, args.layout) for tp in (p_tp, d_tp))
        p_blocks, d_blocks = (scattered(args.tokens, args.block, seed) for seed in (1, 2))
        job = Job(d, 0, 0, args.tokens, p_blocks, d_blocks)
        loads = [max(how(p, job), key=lambda load: load.descriptors) for how in (direct, regrouped)]
        decision = decide(p, d)
        print(
            f"{model.name:12} {f'{p_tp} -> {d_tp}':>8}   {words(loads[0])} {words(loads[1])} "
            f"{loads[1].exchanged / MIB:6.2f} MiB   {'regroups' if decision.regroup else 'writes directly'}: {decision.why}"
        )


if __name__ == "__main__":
    main()
