# SPDX-License-Identifier: Apache-2.0
"""Views of a test's memory, as the tensors that the ops are given."""

from __future__ import annotations

import torch

from unit.geometry.kit import CountedMemory
from vllm_ascend_pd.regroup import ops


def views(cache: CountedMemory) -> list[torch.Tensor]:
    """Return a cache's regions as the ops take them."""
    facts = cache.geometry
    cell_views = []
    for region, memory in zip(facts.regions, cache.memory, strict=True):
        blocks = torch.from_numpy(memory).view(cache.blocks, region.block_stride)
        cell_views.append(ops.cell_view(blocks, region, len(cache.heads), 1 if region.opaque else facts.block_size))
    return cell_views
