# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's own specs of caches, without vllm-ascend: admission knows them by their class names and fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec


@dataclass(frozen=True, kw_only=True)
class AscendMLAAttentionSpec(MLAAttentionSpec):
    """All MLA layers, with an indexer or without; a layer of compressed latents, and its index keys."""

    parts: tuple[int, ...] = ()  # sizes of latent, rope, index key: for tests, vllm-ascend has no such field
    sparse_head_dim: tuple[int, ...] | None = None
    cache_sparse_sfa_c8: bool = False
    cache_sparse_li_c8: bool = False
    sfa_dcp_replicated_indexer_size: int = 1  # copies of an indexer's keys in a rank's cache: one for each rank of DCP
    compress_ratio: int = 1
    scale_dim: int = 0


@dataclass(frozen=True, kw_only=True)
class NewerMLASpec(MLAAttentionSpec):
    """Of 0.30: MLA layers without their indexers; compressed latents, with the entry's tokens as vLLM has them."""

    parts: tuple[int, ...] = ()
    cache_sparse_sfa_c8: bool = False
    scale_dim: int = 0


NewerMLASpec.__name__ = AscendMLAAttentionSpec.__name__  # admission knows a class by its name


@dataclass(frozen=True, kw_only=True)
class AscendSFAIndexerCacheSpec(MLAAttentionSpec):
    """Of 0.30: an indexer's keys, in a layer of their own."""

    scale_dim: int = 0
    sfa_dcp_replicated_indexer_size: int = 1


@dataclass(frozen=True, kw_only=True)
class AscendSlidingWindowMLASpec(SlidingWindowMLASpec):
    compress_ratio: int = 1


def latent(size: int, parts: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    """Return the spec of a layer of MLA with these parts."""
    return AscendMLAAttentionSpec(
        block_size=size, num_kv_heads=1, head_size=sum(parts), dtype=dtype, parts=parts, **more
    )
