# SPDX-License-Identifier: Apache-2.0
"""Real vLLM configurations, made from a model directory that holds nothing but a config.json."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

LAYERS = tuple(f"model.layers.{i}.self_attn.attn" for i in range(2))


@lru_cache(maxsize=8)
def model_dir(kv_heads: int = 2, **changes: Any) -> str:
    """A llama of two layers: enough for every configuration that vLLM derives from a model."""
    directory = Path(mkdtemp(prefix="pd-model-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "torch_dtype": "float32",
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def vllm_config(role: str = "kv_producer", extra: dict[str, Any] | None = None, **arguments: Any) -> Any:
    transfer = {
        "kv_connector": "AscendPushConnector",
        "kv_connector_module_path": "vllm_ascend_pd.connector",
        "kv_role": role,
        "kv_connector_extra_config": extra or {},
    }
    given = {
        "model": model_dir(),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "kv_cache_memory_bytes": 1 << 24,
        "kv_transfer_config": transfer,
        **arguments,
    }
    return EngineArgs(**given).create_engine_config()


def attention(block: int = 32, heads: int = 2, size: int = 16, dtype: torch.dtype = torch.float32) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=dtype)


def latent(block: int = 16, size: int = 576) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=size, dtype=torch.float32)


def cache_config(*specs: Any, blocks: int = 8) -> KVCacheConfig:
    """A cache configuration with one group for each spec; our own tensors replace those that a runner would
    allocate."""
    groups = [KVCacheGroupSpec(list(LAYERS), spec) for spec in specs or (attention(),)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
