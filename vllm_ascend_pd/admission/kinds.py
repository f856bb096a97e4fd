# SPDX-License-Identifier: Apache-2.0
"""Kinds of cache by the class names of vLLM's specs, because vllm-ascend puts classes of its own in their place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm_ascend_pd.geometry.layout import attention_of, is_index
from vllm_ascend_pd.geometry.states import DELTA_NET, MAMBA2

PROVEN: tuple[str, ...] = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "MLAAttentionSpec",
    "AscendMLAAttentionSpec",
    "AscendSFAIndexerCacheSpec",  # vllm-ascend 0.30: an indexer's keys as a layer of their own
)
_STATE_SPEC = "MambaSpec"  # Gated DeltaNet's too
# In one of several groups, or in a group that does not keep all tokens.
PROVEN_GROUPED: tuple[str, ...] = ("FullAttentionSpec", "SlidingWindowSpec", _STATE_SPEC)
_WINDOW_SPECS = ("SlidingWindowSpec", "AscendSlidingWindowMLASpec")
COMPRESSING: tuple[str, ...] = ("AscendMLAAttentionSpec", "AscendSlidingWindowMLASpec")  # DeepSeek-V4's, of one model
KNOWN = frozenset((*PROVEN, *PROVEN_GROUPED, *COMPRESSING))
RECURRENCES = {"MAMBA2": MAMBA2, "GDN_ATTN": DELTA_NET}
PROVEN_FP8 = ("FullAttentionSpec", "SlidingWindowSpec")
PLAIN_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


def by_layer(spec: Any) -> dict[str, Any]:
    """Return the specs by layer, if layers of one group differ; empty if one spec is for all."""
    return dict(getattr(spec, "kv_cache_specs", {}))


def of_group(group: Any) -> list[Any]:
    """Return the specs of a group: one for each layer, or one for all."""
    return list(by_layer(group.kv_cache_spec).values()) or [group.kv_cache_spec]


def is_window(spec: Any) -> bool:
    """Return whether vLLM frees blocks outside a window. Full attention may name a window, but keeps all its blocks."""
    return type(spec).__name__ in _WINDOW_SPECS


def is_state(spec: Any) -> bool:
    return type(spec).__name__ == _STATE_SPEC


def takes_drafts(spec: Any) -> bool:
    """Return whether a state's rows for drafted tokens are known: its first rows are those of the prompt."""
    return RECURRENCES.get(getattr(spec.mamba_type, "name", "")) == DELTA_NET


def is_latent(spec: Any) -> bool:
    """Return whether a layer has one vector per entry, which all ranks hold: MLA's, an indexer's or a compressor's."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return isinstance(spec, MLAAttentionSpec) or type(spec).__name__ in COMPRESSING


def has_indexer(name: str, spec: Any) -> bool:
    """Return whether there is an indexer: as a layer of its own, or as a part of its layer's tuple."""
    return bool(attention_of(name) or getattr(spec, "sparse_head_dim", None))


def index_tensors(spec: Any) -> int:
    """Return how many tensors of a layer's tuple are its indexer's: keys, and with int8 their scales."""
    parts = getattr(spec, "sparse_head_dim", None)
    return 1 + bool(getattr(spec, "cache_sparse_li_c8", False)) if parts and parts[-1] else 0


def has_whole_index(name: str, spec: Any, dcp: int) -> bool:
    """Return whether every rank of DCP has all keys of an indexer, if the layer is one or has one."""
    keys = is_index(name) or index_tensors(spec)
    return not keys or getattr(spec, "sfa_dcp_replicated_indexer_size", 1) == dcp


def tokens_per_entry(spec: Any) -> int:
    """Return how many tokens an entry stands for; 0 if that is not known. vLLM 0.30 has another name for it."""
    ratio, tokens = getattr(spec, "compress_ratio", 1) or 1, getattr(spec, "tokens_per_state", 1)
    return int(tokens if ratio == 1 else ratio if tokens == 1 else 0)


def has_scales(spec: Any) -> bool:
    """Return whether an int8 cache has its scales in the same layer: beside it, or behind each packed latent."""
    scaled = getattr(spec, "scale_dim", 0) > 0 or getattr(spec, "cache_sparse_sfa_c8", False)
    return scaled and str(spec.dtype) == "torch.int8"


def is_int8_of_heads(spec: Any) -> bool:
    """Return whether keys and values of heads are kept in int8, as vllm-ascend's C8 does on D alone.

    Their scales come with the checkpoint. vLLM's own int8 has another mode.
    """
    plain = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE") == "NONE"
    return plain and type(spec).__name__ == "FullAttentionSpec" and str(spec.dtype) == "torch.int8"


def is_compressing(specs: Collection[Any]) -> bool:
    """Return whether these are the specs of a model that compresses latents, with all that belongs to it."""
    # Others have other layouts.
    known = {getattr(spec, "model_version", None) for spec in specs} <= {None, "deepseek_v4"}
    one_kind = known and all(type(spec).__name__ in COMPRESSING for spec in specs)
    return one_kind and any(tokens_per_entry(spec) > 1 for spec in specs)
