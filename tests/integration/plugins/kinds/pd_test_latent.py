# SPDX-License-Identifier: Apache-2.0
"""A llama with one KV head, kept like MLA's latent, and in some layers a sparse indexer beside it.

In plain torch on caches that vLLM allocates, under vLLM's own hook, with any block size, chunks and prefix caching.

* The attention's cache has one vector per token, K and V together, with a spec of MLA: every rank holds all of it.
* An indexer's cache has one key per token, with a spec of MLA, in a layer of its own (`….indexer.k_cache`), as in
  vLLM's DeepSeek-V3.2. It is written before the attention, outside any hook. A real indexer selects the tokens that the
  attention sees, but the prompts of tests are shorter than its selection. So here its scores are added to the
  attention's: answers depend smoothly on every key, and the order of additions does not change them.
* `int8` in config.json: both caches are int8, with a float32 scale behind each vector.

PD_TEST_INDEXER=late: keys are written only when the next step begins. The engine's own answers are right, but the
caches are not complete when the hooks are called.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SparseCacheRole

LATE = os.environ.get("PD_TEST_INDEXER") == "late"
SCALE_BYTES = 4


# ---- a cache of one vector per token


@dataclass
class StepPlaces:
    """Places of a step's tokens, and of each request's earlier ones."""

    slots: torch.Tensor
    tables: torch.Tensor
    starts: list[int]
    lengths: list[int]

    def place(self, request: int, length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return block and position of a request's first `length` tokens."""
        tokens = torch.arange(length)
        return self.tables[request, tokens // size].long(), tokens % size


class Builder(AttentionMetadataBuilder[StepPlaces]):
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StepPlaces:
        common = common_attn_metadata
        starts = common.query_start_loc.tolist()
        return StepPlaces(
            common.slot_mapping[: starts[-1]].long(), common.block_table_tensor, starts, common.seq_lens.tolist()
        )


class Backend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "PD_TEST_VECTORS"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size


class Vectors(nn.Module, AttentionLayerBase):
    """A cache layer with one vector per token."""

    def __init__(self, name: str, width: int, dtype: torch.dtype, role: SparseCacheRole, int8: bool) -> None:
        super().__init__()
        config = get_current_vllm_config()
        self.name, self.width, self.role, self.int8 = name, width, role, int8
        self.dtype = torch.uint8 if int8 else dtype
        self.kv_cache = torch.tensor([])
        config.compilation_config.static_forward_context[name] = self

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.width + (SCALE_BYTES if self.int8 else 0),
            dtype=self.dtype,
            cache_role=self.role,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        return Backend

    @property
    def cells(self) -> torch.Tensor:
        """Return the cache by block and token."""
        return self.kv_cache.squeeze(1) if self.kv_cache.dim() == 4 else self.kv_cache

    def write(self, batch: StepPlaces, vectors: torch.Tensor) -> None:
        size, some = self.cells.shape[1], vectors[: len(batch.slots)]
        self.cells[batch.slots // size, batch.slots % size] = packed(some) if self.int8 else some.to(self.dtype)

    def read(self, batch: StepPlaces, request: int) -> torch.Tensor:
        blocks, tokens = batch.place(request, batch.lengths[request], self.cells.shape[1])
        stored = self.cells[blocks, tokens]
        return unpacked(stored) if self.int8 else stored.float()


def packed(vectors: torch.Tensor) -> torch.Tensor:
    """Return each vector as bytes: int8 values, then the scale."""
    scale = vectors.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return torch.cat([(vectors / scale).round().to(torch.int8).view(torch.uint8), scale.view(torch.uint8)], -1)


def unpacked(stored: torch.Tensor) -> torch.Tensor:
    whole, scale = stored[:, :-SCALE_BYTES].contiguous(), stored[:, -SCALE_BYTES:].contiguous()
    return whole.view(torch.int8) * scale.view(torch.float32)


# ---- the indexer


class Indexer(nn.Module):
    def __init__(self, config: Any, prefix: str, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.index_dim
        self.wq = ReplicatedLinear(hidden, width, bias=False, return_bias=False, prefix=f"{prefix}.wq")
        self.wk = ReplicatedLinear(hidden, width, bias=False, return_bias=False, prefix=f"{prefix}.wk")
        self.scaling = 2 * width**-0.5
        self.k_cache = Vectors(f"{prefix}.k_cache", width, dtype, SparseCacheRole.INDEXER, config.int8)
        self.kept: list[tuple[StepPlaces, torch.Tensor]] = []

    def forward(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Return scores of each request's new tokens (rows) for all its tokens so far."""
        batch = get_forward_context().attn_metadata[self.k_cache.name]
        query, keys = self.wq(hidden), self.wk(hidden)
        for late in self.kept:
            self.k_cache.write(*late)
        self.kept = [(batch, keys)] if LATE else []
        if not LATE:
            self.k_cache.write(batch, keys)
        scores = []
        for request, length in enumerate(batch.lengths):
            first, end = batch.starts[request], batch.starts[request + 1]
            known = self.k_cache.read(batch, request)
            if LATE:
                known[length - (end - first) :] = keys[first:end]
            scores.append(query[first:end].float() @ known.T * self.scaling)
        return scores


# ---- the attention


class Latent(LlamaAttention):
    def __init__(self, config: Any, prefix: str = "", **more: Any) -> None:
        super().__init__(config=config, prefix=prefix, **more)
        vllm_config = get_current_vllm_config()
        dtype = vllm_config.model_config.dtype
        self.name = f"{prefix}.attn"
        # vLLM's own layer, which this one replaces
        del vllm_config.compilation_config.static_forward_context[self.name]
        self.attn = Vectors(self.name, 2 * self.head_dim, dtype, SparseCacheRole.SPARSE, config.int8)
        self.indexer = None
        if extract_layer_index(prefix) in config.indexers:
            self.indexer = Indexer(config, f"{prefix}.indexer", dtype)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        query, key = self.rotary_emb(positions, query, key)
        output = torch.zeros_like(query)
        if get_forward_context().attn_metadata is not None:
            scores = None if self.indexer is None else self.indexer(hidden_states)
            attend(query, torch.cat([value, key], -1), scores, output, self.scaling, self.name)
        return self.o_proj(output)[0]


@maybe_transfer_kv_layer
def attend(
    query: torch.Tensor,
    vectors: torch.Tensor,
    scores: list[torch.Tensor] | None,
    output: torch.Tensor,
    scaling: float,
    layer_name: str,
) -> None:
    batch, cache, _, _ = get_attention_context(layer_name)
    cache.write(batch, vectors)
    width = cache.width // 2
    for request, length in enumerate(batch.lengths):
        first, end = batch.starts[request], batch.starts[request + 1]
        value, key = cache.read(batch, request).split(width, -1)
        weights = query[first:end].view(end - first, -1, width).float() @ key.T * scaling  # token, head, earlier token
        if scores is not None:
            weights = weights + scores[request][:, None]
        at = torch.arange(length - (end - first), length)
        weights = weights.masked_fill(torch.arange(length) > at[:, None, None], float("-inf")).softmax(-1)
        output[first:end] = (weights @ value).flatten(1).to(output.dtype)


class LatentDecoderLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=Latent)


class PdTestLatentForCausalLM(LlamaForCausalLM):
    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] = LatentDecoderLayer
    ) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)
