# SPDX-License-Identifier: Apache-2.0
"""Views of a test's memory, as the tensors that the ops are given."""

from __future__ import annotations

import torch

from unit.geometry.kit import CountedMemory
from vllm_ascend_pd.regroup import ops


def views(cache: CountedMemory) -> list[torch.Tensor]:
    """Return a cache's regions as the ops take them."""
    facts = cache.geometry
    found = []
    for region, memory in zip(facts.regions, cache.memory, strict=True):
        blocks = torch.from_numpy(memory).view(cache.blocks, region.block_stride)
        found.append(ops.cell_view(blocks, region, len(cache.heads), 1 if region.opaque else facts.block_size))
    return found
