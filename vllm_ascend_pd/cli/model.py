# SPDX-License-Identifier: Apache-2.0
"""Reader of a model's config.json: sizes of its KV cache, and what of it an engine with this connector would refuse.

The engine itself decides by the layers that vLLM has made (admission/cache.py), after a minute of starting. This reader
needs no start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ascend_pd.cli.flag_values import read_text, refuse
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.geometry.states import DELTA_NET, MAMBA2, Recurrent

_CHUNKED = "chunked_attention"
_ATTENTION = {"full_attention", "attention", "sliding_attention", _CHUNKED}
_RECURRENT_KEYS = ("mamba_d_state", "ssm_cfg", "mamba_num_heads", "linear_num_key_heads", "conv_L_cache")
_RECURRENT = {"linear_attention", "mamba", "mamba2"}  # of `layer_types`
_LETTERS = {"M": "mamba", "*": "attention"}  # of `hybrid_override_pattern`
# One of so many layers looks at all tokens: transformers' defaults, where a configuration has a window and does not say
# in which layers. Other models then have it in all.
_WINDOW_PERIODS = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6}
# Names of the same sizes by family: heads, values of a head, groups of B and C, a state's width, convolution kernel.
_MAMBA2 = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
)
_DELTA_NET = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_REMEDY = "Give a directory with a model's config.json, or --kv-heads, --head-dim and --layers."


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of one model's cache: attention, windows and recurrent states."""

    heads: int
    dim: int  # elements of one head; of MLA latent and rope together
    layers: int
    mla: bool
    window: int = 0  # tokens that some layers attend to; 0: all layers attend to all tokens
    windowed: frozenset[int] = frozenset()  # layers that attend to the window only
    states: States | None = None
    index: int = 0  # elements of an indexer's key; 0: without
    rope: int = 0  # elements of MLA's rope, which vllm-ascend keeps in a tensor of its own
    drafts: int = 0  # layers for drafts (MTP), which an engine has that is told to draft
    ratios: tuple[int, ...] = ()  # DeepSeek-V4: tokens of an entry in each layer, 0 in those with a window alone

    def layer_words(self, item: int = 0) -> str:
        """Return the number of layers, and what is not plain attention among them; with `item` a state's bytes."""
        more = f" ({len(self.windowed)} with a window of {self.window} tokens)" if self.windowed else ""
        if self.states is not None:
            size = f" of {sum(self.states.at(1, item).nbytes)} B" if item else ""
            kept, attends = len(self.states.layers), len(self.states.attention_layers)
            more = f" ({attends} with attention, {kept} with a state{size})"
        if self.ratios:
            counts = ", ".join(f"{self.ratios.count(ratio)} with an entry for {ratio} tokens" for ratio in (4, 128))
            more = f" ({counts}, all with a window of {self.window} tokens)"
        return f"{self.layers} layers{more}"


@dataclass(frozen=True, slots=True)
class States:
    """The layers that keep a state, and its sizes at TP 1. The other layers have attention, or keep nothing."""

    recurrence: str
    heads: int
    head: int  # values of a head
    groups: int  # of B and C (Mamba-2), or heads of the keys (Gated DeltaNet)
    width: int  # of a group's state, or of a key
    rows: int  # inputs that the convolution keeps: its kernel less one
    layers: frozenset[int]
    attention_layers: frozenset[int]
    item: int = 0  # bytes of a number of the recurrence; 0: as the model's

    def at(self, tp: int, item: int) -> Recurrent:
        """Return the state of one rank, in numbers of the model's size. `item` is the cache's: 1 is quantised."""
        groups, item = max(1, self.groups // tp), max(2, item)
        conv = self.rows, self.heads // tp * self.head + 2 * groups * self.width
        shapes, sizes = (conv, (self.heads // tp, self.head, self.width)), (item, self.item or item)
        return Recurrent(self.recurrence, shapes, tuple(f"{n}-byte" for n in sizes), sizes, False, self.groups)


def read_model(model: str) -> Model:
    """Read a model's config.json. Raise ConfigError if that fails, with PD-CONF-005 if an engine refuses the cache."""
    return described(model, read_config(model))


def read_config(model: str) -> dict[str, Any]:
    """Return what a model's config.json says. Raise ConfigError if it cannot be read or is no JSON object."""
    text = read_text("--model", model, Path(model) / "config.json", _REMEDY)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as problem:
        refuse("--model", model, f"its config.json is not JSON ({problem})", _REMEDY, problem)
    if not isinstance(config, dict):
        refuse("--model", model, "its config.json is not an object", _REMEDY)
    return config


def described(model: str, config: Mapping[str, Any]) -> Model:
    """Return the sizes in a model's configuration.

    Raise ConfigError with PD-CONF-005 if an engine refuses the cache, and with another code if this reader cannot
    describe it: an engine may take it all the same.
    """
    if isinstance(config.get("text_config"), dict):  # a vision model: the cache is the language model's
        config = {"quantization_config": config.get("quantization_config"), **config["text_config"]}
    if isinstance(kinds := config.get("layers_block_type"), list):  # the kind of each layer, so their number too
        config = {"num_hidden_layers": len(kinds), **config}
    if config.get("compress_ratios") and config.get("model_type") != "deepseek_v4":
        why = (
            "it compresses its latents, and such caches are not described here, though engines of vllm-ascend take them"
        )
        refuse("--model", model, why, "Trace an engine: vllm-ascend-pd trace names its layers and groups.")

    def size(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            refuse("--model", model, f"its config.json says {name} = {value!r}", _REMEDY)
        return value

    if config.get("full_attention_interval") is not None:
        size("full_attention_interval")
    lacks = refused_feature(config)
    if lacks:
        remedy = "Use a model with attention, windows, states or MLA in plain numbers."
        raise ConfigError("PD-CONF-005", feature=lacks, remedy=remedy)
    kinds = config.get("layer_types")
    if (_CHUNKED in kinds) if isinstance(kinds, list) else config.get("attention_chunk_size"):
        why = "it has chunked attention, and an engine's settings decide whether it keeps all blocks (docs/kinds.md)"
        refuse("--model", model, why, "Trace an engine: vllm-ascend-pd trace names its layers and groups.")
    attention, layers = size("num_attention_heads"), size("num_hidden_layers")
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    drafts = next((size(name) for name in names if config.get(name)), 0)
    if ratios := config.get("compress_ratios"):
        by_layer = tuple(ratios[:layers]) if isinstance(ratios, list) else ()
        if len(by_layer) < layers or any(ratio not in (0, 4, 128) for ratio in by_layer) or not {4, 128} <= {*by_layer}:
            refuse("--model", model, "its compress_ratios are not 4, 128, and 0 for other layers", _REMEDY)
        dim, window, index = size("head_dim"), size("sliding_window"), size("index_head_dim")
        return Model(1, dim, layers, True, window, index=index, drafts=drafts, ratios=by_layer)
    if config.get("kv_lora_rank"):
        index = size("index_head_dim") if config.get("index_topk") else 0  # as if all layers had an indexer
        rope = size("qk_rope_head_dim")
        return Model(1, size("kv_lora_rank") + rope, layers, mla=True, index=index, rope=rope, drafts=drafts)
    dim = size("head_dim") if config.get("head_dim") else size("hidden_size") // attention
    heads = size("num_key_value_heads") if config.get("num_key_value_heads") else attention
    windowed = windowed_layers(config, layers)
    window = size("sliding_window") if windowed else 0
    return Model(heads, dim, layers, False, window, windowed, states(config, layers), drafts=drafts)


def _layer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kind of each layer in transformers' words; empty if the configuration says nothing of kinds."""
    for name in ("layer_types", "layers_block_type"):
        if isinstance(kinds := config.get(name), list):
            return [str(kind) for kind in kinds]
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        return [_LETTERS.get(letter, "") for letter in pattern]
    if isinstance(attention_at := config.get("attn_layer_indices"), list):
        return ["attention" if index in attention_at else "mamba" for index in range(layers)]
    if all(config.get(name) for name in _DELTA_NET):
        every, other = config.get("full_attention_interval") or 4, "linear_attention"  # transformers' default
    elif isinstance(config.get("sliding_window"), int):
        period = config.get("sliding_window_pattern")
        every = period if isinstance(period, int) else _WINDOW_PERIODS.get(str(config.get("model_type")), 0)
        other = "sliding_attention"
    else:
        return []
    return [other if (index + 1) % every else "full_attention" for index in range(layers)] if every > 0 else []


def states(config: Mapping[str, Any], layers: int) -> States | None:
    """Return the states that layers keep; None if no layer keeps one of a known kind."""

    def sizes(names: tuple[str, ...]) -> list[int]:
        values = [config.get(name) for name in names]
        return [n for n in values if isinstance(n, int) and n > 0]

    kinds = _layer_kinds(config, layers)
    stateful = frozenset(index for index, kind in enumerate(kinds) if kind in _RECURRENT)
    attends = frozenset(index for index, kind in enumerate(kinds) if "attention" in kind) - stateful
    if not stateful:  # each layer has both, side by side
        stateful = attends = frozenset(range(layers))
    # vLLM takes the model's dtype for the recurrence unless the configuration names one; Nemotron-H has a default.
    named = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype")
    default = "float32" if "hybrid_override_pattern" in config else ""
    item = {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(named or default), 0)
    if len(delta := sizes(_DELTA_NET)) == len(_DELTA_NET):
        keys, key, values, value, kernel = delta
        return States(DELTA_NET, values, value, keys, key, kernel - 1, stateful, attends, item)
    for names in _MAMBA2:
        if len(mamba := sizes(names)) == len(names):
            heads, head, groups, width, kernel = mamba
            return States(MAMBA2, heads, head, groups, width, kernel - 1, stateful, attends, item)
    return None


def windowed_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Return the layers that attend to a window only."""
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings")
    shorter = isinstance(window, int) and not (isinstance(longest, int) and window >= longest)
    if not isinstance(config.get("layer_types"), list) and not (shorter and config.get("use_sliding_window", True)):
        return frozenset()
    kinds = _layer_kinds(config, layers) or ["sliding_attention"] * layers
    return frozenset(index for index, kind in enumerate(kinds[:layers]) if kind == "sliding_attention")


def refused_feature(config: Mapping[str, Any]) -> str:
    """Return the feature of this model's cache that an engine refuses; empty if there is none."""
    kinds, kept = config.get("layer_types"), states(config, 1)
    windows = windowed_layers(config, len(kinds) if isinstance(kinds, list) else 1)
    known = _ATTENTION | _RECURRENT if kept else _ATTENTION
    others = sorted({str(kind) for kind in kinds} - known) if isinstance(kinds, list) else []
    if others:
        return f"A model with layers of kind {', '.join(others)[:200]}"
    if config.get("kv_lora_rank") and windows:
        return "A model with sliding windows beside MLA"
    if config.get("index_topk") and not (config.get("kv_lora_rank") or config.get("compress_ratios")):
        return "A model with a sparse indexer's cache, and without MLA"
    named = [name for name in _RECURRENT_KEYS if config.get(name)]
    if named and not kept:
        return f"A model with recurrent states ({named[0]})"
    if kept and (config.get("kv_lora_rank") or windows):
        return "A model with recurrent states beside MLA or sliding windows"
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict):
        scheme = quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo")
        if scheme and (not _is_fp8(scheme) or config.get("kv_lora_rank")):
            return f"A quantised KV cache ({str(scheme)[:80]})"
    return ""


def _is_fp8(scheme: Any) -> bool:
    """Return whether the cache is fp8 with one scale for a layer's keys and one for its values, from the checkpoint."""
    if not isinstance(scheme, dict):
        return bool(scheme == "FP8")
    one_scale = scheme.get("strategy", "tensor") == "tensor" and not scheme.get("dynamic")
    return (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) and one_scale
