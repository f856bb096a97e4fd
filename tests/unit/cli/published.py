# SPDX-License-Identifier: Apache-2.0
"""Fields of models' public config.json that a cache depends on, by the names there. All others are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3.1": _DEEPSEEK,
    "DeepSeek-V3.2": {**_DEEPSEEK, "model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128},
    "Kimi-K2": {
        **_DEEPSEEK,
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 0,
    },
    "DeepSeek-V4-Flash": {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "hidden_size": 4096,
        "head_dim": 512,
        "sliding_window": 128,
        "index_head_dim": 128,
        "index_topk": 512,
        "num_nextn_predict_layers": 1,
        "compress_ratios": [0, 0, *(4, 128) * 20, 4, 0],  # the last is of the draft layer
    },
    "Qwen3-235B": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_size": 4096,
        "max_position_embeddings": 40960,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "Qwen3-Next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_size": 2048,
        "max_position_embeddings": 262144,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "GLM-4.5": {
        "model_type": "glm4_moe",
        "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 5120,
        "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 1,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 2880,
        "max_position_embeddings": 131072,
    },
    "Gemma-3-27b": {
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 62,
            "sliding_window": 1024,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "hidden_size": 5376,
        }
    },
    "Bamba-9B": {
        "model_type": "bamba",
        "num_hidden_layers": 32,
        "attn_layer_indices": [9, 18, 27],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
    },
}


def written(folder: Path, name: str, **more: Any) -> str:
    """Write a model's config.json into `folder`, and return the folder as --model takes it."""
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], **more}))
    return str(folder)
