# SPDX-License-Identifier: Apache-2.0
"""Small models with recurrent states.

In Falcon-H1, B and C have two groups; in the others with Mamba-2 one, which every rank holds.
"""

from __future__ import annotations

from typing import Any

_HEADS, _HEAD, _STATE = 8, 64, 32  # of a recurrent layer
_MAMBA = {
    "mamba_n_heads": _HEADS,
    "mamba_d_head": _HEAD,
    "mamba_d_state": _STATE,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 64,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "M-M*",
            "mamba_num_heads": _HEADS,
            "mamba_head_dim": _HEAD,
            "n_groups": 1,
            "ssm_state_size": _STATE,
            "conv_kernel": 4,
            "chunk_size": 64,
            "expand": 2,
            "use_mamba_kernels": False,
        },
    ),
    "falcon_h1": (
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {"mamba_d_ssm": _HEADS * _HEAD, "mamba_n_groups": 2, **_MAMBA},
    ),
    "granite_hybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 256,
            "position_embedding_type": "rope",
            **_MAMBA,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "state_size": _STATE,
            "conv_kernel": 4,
            "expand": 2,
            "num_heads": _HEADS,
            "head_dim": _HEAD,
            "n_groups": 1,
            "chunk_size": 64,
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "full_attention_interval": 4,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.25,
        },
    ),
}


def model(family: str, sizes: dict[str, Any], head_dim: int) -> Any:
    import transformers

    made, config, more = FAMILIES[family]
    given = {**sizes, "head_dim": head_dim, "pad_token_id": 0, **more}
    if family == "mamba2":  # it has no position embeddings
        del given["max_position_embeddings"]
    return getattr(transformers, made)(getattr(transformers, config)(**given))
