# SPDX-License-Identifier: Apache-2.0
"""What a model's config.json says of its KV cache, and what of it an engine with this connector would refuse.

The engine itself judges by the layers that vLLM made (admission.py). This reader sees it before a minute of starting is over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ascend_pd.cli.given import read_text, refuse
from vllm_ascend_pd.errors import ConfigError

_KINDS = {"full_attention", "attention", "sliding_attention"}
_STATES = ("mamba_d_state", "ssm_cfg", "mamba_num_heads", "linear_num_key_heads", "conv_L_cache")


@dataclass(frozen=True, slots=True)
class Model:
    """Of one model's cache: sizes, and whether it is MLA."""

    heads: int
    dim: int
    layers: int
    mla: bool
    window: int = 0  # tokens that some layers look at; 0: all layers at all
    windowed: frozenset[int] = frozenset()  # layers that have it


def read_model(model: str) -> Model:
    """Raises ConfigError for what cannot be read, and PD-CONF-005 for a cache that an engine refuses."""
    remedy = "Give a directory with a model's config.json, or --kv-heads, --head-dim and --layers."
    text = read_text("--model", model, Path(model) / "config.json", remedy)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as problem:
        refuse("--model", model, f"its config.json is not JSON ({problem})", remedy, problem)
    if not isinstance(config, dict):
        refuse("--model", model, "its config.json is not an object", remedy)
    if isinstance(config.get("text_config"), dict):  # a vision model: the cache is the language model's
        config = {"quantization_config": config.get("quantization_config"), **config["text_config"]}
    found = refused(config)
    if found:
        raise ConfigError(
            "PD-CONF-005", feature=found, remedy="Use a model with attention, windows or MLA in plain numbers."
        )

    def size(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            refuse("--model", model, f"its config.json says {name} = {value!r}", remedy)
        return value

    attention, layers = size("num_attention_heads"), size("num_hidden_layers")
    if config.get("kv_lora_rank"):
        # An indexer's key is counted as a part of its layer's cell, and as if all layers had one.
        index = size("index_head_dim") if config.get("index_topk") else 0
        return Model(1, size("kv_lora_rank") + size("qk_rope_head_dim") + index, layers, True)
    dim = size("head_dim") if config.get("head_dim") else size("hidden_size") // attention
    heads = size("num_key_value_heads") if config.get("num_key_value_heads") else attention
    windowed = windows(config, layers)
    return Model(heads, dim, layers, False, size("sliding_window") if windowed else 0, windowed)


def windows(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """The layers that look at a window only."""
    kinds, window, longest = (config.get(name) for name in ("layer_types", "sliding_window", "max_position_embeddings"))
    if isinstance(kinds, list):
        return frozenset(index for index, kind in enumerate(kinds[:layers]) if kind == "sliding_attention")
    shorter = isinstance(window, int) and not (isinstance(longest, int) and window >= longest)
    return frozenset(range(layers) if shorter and config.get("use_sliding_window", True) else ())


def refused(config: Mapping[str, Any]) -> str:
    """What of this model's cache is more than attention in plain numbers, with windows or without; empty if nothing is."""
    kinds = config.get("layer_types")
    others = sorted({str(kind) for kind in kinds} - _KINDS) if isinstance(kinds, list) else []
    if others:
        return f"A model with layers of kind {', '.join(others)[:200]}"
    if config.get("kv_lora_rank") and windows(config, 1):
        return "A model with sliding windows beside MLA"
    if config.get("compress_ratios"):
        return "A model with compressed KV caches"
    if config.get("index_topk") and not config.get("kv_lora_rank"):
        return "A model with a sparse indexer's cache, and without MLA"
    states = [name for name in _STATES if config.get(name)]
    if states:
        return f"A model with recurrent states ({states[0]})"
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict):
        scheme = quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo")
        if scheme:
            return f"A quantised KV cache ({str(scheme)[:80]})"
    return ""
