# SPDX-License-Identifier: Apache-2.0
"""Quantised caches of vLLM: those that may start, and the dtype names under which P and D compare them.

A transfer moves an fp8 cache as plain bytes. Their meaning depends on the engine: on the format, and on one scale for a
layer's keys and one for its values, which come with the checkpoint and are not in the cache. Format and scales are part
of the name that P and D compare.

vllm-ascend's int8 of heads is on D alone: its P keeps the model's dtype, and makes D's int8 of it on the way, by the
scales of the same checkpoint (regroup/quantise.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_ascend_pd.admission import kinds, sizes
from vllm_ascend_pd.errors import ConfigError, not_proven
from vllm_ascend_pd.vllm_patches import compat

PLAIN = ("auto", "float16", "bfloat16")
# vllm-ascend's: only a layer's spec says whether this makes it int8, and with scales (kinds.has_scales).
BY_SPEC = "int8"
_FP8 = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
_STORED = ("torch.uint8", "torch.float8_e4m3fn", "torch.float8_e5m2")
_REMEDY = 'Use --kv-cache-dtype "auto".'
SCALES = ("k_cache_scale", "k_cache_offset", "v_cache_scale", "v_cache_offset")  # of a layer, by channel or one for all

Scales = tuple[float, float]  # of a layer's keys, and of its values


def refusals(config: Any) -> Iterator[ConfigError]:
    """Yield what is not proven of a quantised cache, by the engine's configuration alone."""
    cache, dtype = config.cache_config, str(config.cache_config.cache_dtype)
    if dtype in PLAIN:
        yield from _another_plain(dtype, config)
        return
    if dtype == BY_SPEC and compat.is_vllm_ascend():
        if config.kv_transfer_config.is_kv_producer and not config.model_config.use_mla:
            # Its attention writes the model's dtype all the same.
            remedy = "Start prefill without --kv-cache-dtype: it makes decode's int8 on the way."
            yield not_proven("A prefill engine with its heads in int8", remedy)
        return
    if dtype not in _FP8:
        yield not_proven(f"A quantised KV cache ({dtype})", 'Use --kv-cache-dtype "auto", "fp8_e4m3" or "fp8_e5m2".')
    elif compat.is_vllm_ascend():
        yield not_proven(f"A quantised KV cache ({dtype}) under vllm-ascend", _REMEDY)
    elif getattr(cache, "calculate_kv_scales", False):
        # Each engine would take them from the first prompts that it happens to see.
        feature = "A quantised KV cache with scales that an engine computes by itself"
        yield not_proven(feature, "Start without --calculate-kv-scales.")
    elif config.parallel_config.pipeline_parallel_size > 1:
        yield not_proven("A quantised KV cache with pipeline parallelism", "Start with -pp 1.")
    elif config.speculative_config is not None:
        yield not_proven("A quantised KV cache with speculative decoding", "Start without a draft model.")


def _another_plain(dtype: str, config: Any) -> Iterator[ConfigError]:
    """Yield a plain dtype that is not the model's: vLLM's kernels on a CPU write the model's values into such a cache,
    and so over the next block.
    """
    if dtype != "auto" and (model := str(config.model_config.dtype).removeprefix("torch.")) != dtype:
        yield not_proven(f"A KV cache in {dtype} under a model in {model}", _REMEDY)


def is_fp8(spec: Any) -> bool:
    """Return whether a layer's cache has one scale for all its keys, and one for its values, as vLLM's fp8 has."""
    mode = getattr(getattr(spec, "kv_quant_mode", None), "name", "")
    return mode == "FP8_PER_TENSOR" and str(getattr(spec, "dtype", "")) in _STORED


def dtype_names(config: Any, specs: Mapping[str, Any], scaled: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Return the dtype name of each layer with such a cache. Raise PD-CONF-005 for what cannot be compared.

    `scaled`: the scales of heads in int8 (`of_heads`).
    """
    names = list(scaled) or [name for name in specs if is_fp8(specs[name])]
    if not names:
        return {}
    if len(names) < len(specs):
        raise not_proven(f"A cache that is quantised in some layers only ({names[0]})", _REMEDY)
    if scaled:
        content = b"".join(one.detach().float().cpu().numpy().tobytes() for each in scaled.values() for one in each)
        return dict.fromkeys(names, f"int8 of heads with scales {_short_hash(content)}")
    layers = config.compilation_config.static_forward_context
    formats = {_FP8.get(str(getattr(layers.get(name), "kv_cache_dtype", None)), "") for name in names}
    word = formats.pop()
    if formats or not word:
        raise not_proven(f"A quantised KV cache whose layers do not say one format ({names[0]})", _REMEDY)
    return dict.fromkeys(names, word + _digest([_scales(name, layers[name]) for name in names]))


def of_heads(config: Any, specs: Mapping[str, Any], *, grouped: bool = False) -> dict[str, tuple[Any, ...]]:
    """Return the scales of layers whose heads a D has in int8: SCALES by layer. Raise PD-CONF-005 if that is refused.

    `grouped`: there are other groups or states. A D of these computes no prompt: beside a connector its attention is
    defined for steps of one token per request.
    """
    if not compat.is_vllm_ascend():
        return {}
    layers = config.compilation_config.static_forward_context
    scaled = {name: scales for name in specs if (scales := _scales_of_heads(layers.get(name)))}
    if missing := [name for name in specs if kinds.is_int8_of_heads(specs[name]) and name not in scaled]:
        raise not_proven(f"A cache of heads in int8 without scales of its checkpoint ({missing[0]})", _REMEDY)
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    beside = {
        "speculative decoding": config.speculative_config is not None,
        "context parallelism": sizes.token_division(parallel).world > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "kv_load_failure_policy recompute": transfer.is_kv_consumer
        and getattr(transfer, "kv_load_failure_policy", "") == "recompute",
        "several groups or states": grouped,
        "vLLM's second model runner": bool(getattr(config, "use_v2_model_runner", False)),
    }
    for feature in [name for name, there in beside.items() if there] if scaled else ():
        raise not_proven(f"Heads in int8 with {feature}", "Start without it.")
    return scaled


def _scales_of_heads(layer: Any) -> tuple[Any, ...]:
    scales = tuple(getattr(layer, name, None) for name in SCALES)
    return () if any(scale is None for scale in scales) else scales


def _scales(name: str, layer: Any) -> Scales:
    scales = compat.attention_scales(layer)
    if scales is None:
        raise not_proven(
            f"A quantised KV cache with more than one scale for a layer's keys or values ({name})", _REMEDY
        )
    return scales


def _digest(scales: list[Scales]) -> str:
    """Return one short text for the scales of all layers; empty if all are 1."""
    if all(scale == (1.0, 1.0) for scale in scales):
        return ""
    text = " ".join(f"{k.hex()} {v.hex()}" for k, v in scales)
    return f" with scales {_short_hash(text.encode())}"


def _short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
