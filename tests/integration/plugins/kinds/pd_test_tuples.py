# SPDX-License-Identifier: Apache-2.0
"""A connector with vllm-ascend's interface: the parts of an MLA layer, also its indexer's, are tensors in one tuple.

It stands between the engine and the connector. Layers of indexers vanish, and each attention has (latent, rope) or
(latent, rope, index key), in int8 (packed latent) or (packed latent, index key, scale), with a spec named as
vllm-ascend's. The tensors are views of the engine's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pd_test_latent import SCALE_BYTES
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from vllm_ascend_pd.connector import AscendPushConnector

CACHE = ".indexer.k_cache"


@dataclass(frozen=True, kw_only=True)
class AscendMLAAttentionSpec(MLAAttentionSpec):
    sparse_head_dim: tuple[int, ...] | None = None
    cache_sparse_sfa_c8: bool = False
    cache_sparse_li_c8: bool = False


class TupleConnector(AscendPushConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        config = None if kv_cache_config is None else as_on_npu(kv_cache_config)
        super().__init__(vllm_config, role, config)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        (group,) = self._kv_cache_config.kv_cache_groups
        specs = group.kv_cache_spec.kv_cache_specs
        super().register_kv_caches({name: _handed(name, spec, kv_caches) for name, spec in specs.items()})


def as_on_npu(config: Any) -> Any:
    """Return the configuration of the scheduler's side, where any one layer's spec stands for all."""
    config = copy.copy(config)
    (group,) = config.kv_cache_groups
    names = [name for name in group.layer_names if not name.endswith(CACHE)]
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        merged = {name: _merged(name, spec.kv_cache_specs) for name in names}
        spec = UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=merged)
    else:
        spec = _merged(names[0], {names[0]: spec})
    config.kv_cache_groups = [KVCacheGroupSpec(names, spec)]
    return config


def _merged(name: str, specs: Mapping[str, Any]) -> Any:
    attention, indexer = specs[name], specs.get(name.removesuffix(".attn") + CACHE)
    if not isinstance(attention, MLAAttentionSpec):
        return attention  # the draft model's attention
    int8 = attention.dtype == torch.uint8
    index = 0 if indexer is None else indexer.head_size - (SCALE_BYTES if int8 else 0)
    half = attention.head_size // 2
    return AscendMLAAttentionSpec(
        block_size=attention.block_size,
        num_kv_heads=1,
        head_size=attention.head_size + index,
        dtype=torch.float32,  # the model's dtype, even if all is int8
        sparse_head_dim=(attention.head_size, 0, index) if int8 else (half, half, index),
        cache_sparse_sfa_c8=int8,
        cache_sparse_li_c8=int8 and index > 0,
    )


def _handed(name: str, spec: Any, caches: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(spec, AscendMLAAttentionSpec):
        return caches[name]
    latent, index = _npu(caches[name]), caches.get(name.removesuffix(".attn") + CACHE)
    parts = (latent.view(torch.int8),) if spec.cache_sparse_sfa_c8 else latent.chunk(2, -1)
    if index is None:
        return parts
    key = _npu(index)
    if not spec.cache_sparse_li_c8:
        return *parts, key
    return *parts, key[..., :-SCALE_BYTES].view(torch.int8), key[..., -SCALE_BYTES:].view(torch.float32)


def _npu(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as (block, token, element).

    The axis of the single head is dropped: with it the cache would look like the CPU's own layout.
    """
    return cache.squeeze(1) if cache.dim() == 4 else cache
