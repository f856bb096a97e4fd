# SPDX-License-Identifier: Apache-2.0
"""Admission of a model's cache as its layers have made it, and the cache's sizes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.admission import drafts, kinds, quantised, sizes
from vllm_ascend_pd.device.caches import CacheShape, LayerShape
from vllm_ascend_pd.errors import ConfigError, not_proven
from vllm_ascend_pd.geometry.layout import COMPRESSED, STATE, WINDOW, Group, attention_of, is_index
from vllm_ascend_pd.geometry.states import Recurrent
from vllm_ascend_pd.vllm_patches import compat, older_groups

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

GROUPED = "A model with sliding windows, states or several KV cache groups"


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError for a model whose cache, as its layers have made it, is not proven."""
    for refusal in group_refusals(kv_cache_config):
        raise refusal


def group_refusals(kv_cache_config: KVCacheConfig) -> Iterator[ConfigError]:
    """Yield all that is not proven in a model's cache; the first stops the start. An unknown kind is said alone."""
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in kinds.of_group(group)]
    if unknown := sorted({type(spec).__name__ for spec in specs}.difference(kinds.KNOWN)):
        yield not_proven(f"A KV cache of kind {', '.join(unknown)}", "Use a model with the kinds in docs/kinds.md.")
        return
    windows, states = (any(map(is_kind, specs)) for is_kind in (kinds.is_window, kinds.is_state))
    grouped = len(groups) > 1 or windows or states
    compressing = compat.is_vllm_ascend() and kinds.is_compressing(specs)
    if grouped and compat.is_vllm_ascend() and not compressing and not _proven_under_vllm_ascend(specs):
        remedy = "Use a model with one group of full attention, alone or beside Gated DeltaNet, or DeepSeek-V4."
        yield not_proven(f"{GROUPED} under vllm-ascend", remedy)
        return
    if grouped and older_groups.unproven():
        yield not_proven(GROUPED, "Use vLLM 0.23 or 0.30.0 and later for it.")
    if windows and states:
        yield not_proven("A model with sliding windows beside recurrent states", "Use a model with one of the two.")
    if not all(getattr(g, "enable_kv_transfer", True) and not getattr(g, "host_resident", False) for g in groups):
        yield not_proven("A KV cache group that vLLM does not transfer", "Use another model.")
    proven = kinds.COMPRESSING if compressing else kinds.PROVEN_GROUPED if grouped else kinds.PROVEN
    if proven is kinds.PROVEN_GROUPED:
        specs = [group.kv_cache_spec for group in groups]  # layers that differ within their group are not proven
    yield from {str(error): error for spec in specs for error in _spec_refusals(spec, proven)}.values()


def _proven_under_vllm_ascend(specs: Sequence[Any]) -> bool:
    """Return whether these groups, several or not all of attention, are some that were tried with vllm-ascend."""
    attention = [spec for spec in specs if not kinds.is_state(spec)]
    if len(attention) != 1 or type(attention[0]).__name__ != "FullAttentionSpec" or attention[0].sliding_window:
        return False
    return all(kinds.takes_drafts(spec) for spec in specs if kinds.is_state(spec))


def _spec_refusals(spec: Any, proven: Collection[str]) -> Iterator[ConfigError]:
    kind, compressing = type(spec).__name__, proven is kinds.COMPRESSING
    if kind not in proven:
        yield not_proven(f"A KV cache of kind {kind} in one of several groups", "Use another model.")
    elif kinds.is_state(spec):
        yield from _state_refusals(spec)
    elif getattr(spec, "extra_retained_tokens", 0):
        yield not_proven("A sliding window with retained tokens before it", "Start without a draft model.")
    elif str(spec.dtype) not in kinds.PLAIN_DTYPES and not (
        (quantised.is_fp8(spec) and kind in kinds.PROVEN_FP8)
        or kinds.has_scales(spec)
        or (compat.is_vllm_ascend() and proven is kinds.PROVEN and kinds.is_int8_of_heads(spec))
    ):
        # A checkpoint may quantise its cache although the command line does not.
        yield not_proven(f"A quantised KV cache ({spec.dtype})", "Use another model.")
    elif (tokens := kinds.tokens_per_entry(spec)) != 1 and not (compressing and tokens > 1):
        yield not_proven("A compressed KV cache (one entry for several tokens)", "Use another model.")


def _state_refusals(spec: Any) -> Iterator[ConfigError]:
    name = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    if name not in kinds.RECURRENCES or len(spec.shapes) != 2:
        feature = f"A recurrent state of kind {name} with {len(spec.shapes)} parts"
        yield not_proven(feature, "Use a model with Mamba-2 or Gated DeltaNet.")
    if (mode := getattr(spec, "mamba_cache_mode", "none")) not in ("none", "align"):
        yield not_proven(f"mamba_cache_mode {mode}", "Use none or align.")
    if getattr(spec, "num_speculative_blocks", 0):
        if not kinds.takes_drafts(spec):
            yield not_proven(f"A recurrent state of kind {name} with drafts", "Start without a draft model.")
        elif mode != "none" and not compat.is_vllm_ascend():
            # vLLM moves such states by a kernel that CPUs lack, so this was not shown without vllm-ascend.
            feature = f"A recurrent state with drafts in mamba_cache_mode {mode}"
            yield not_proven(feature, "Start with --no-enable-prefix-caching, or without a draft model.")
    if getattr(spec, "tp_replicated", False):
        yield not_proven("A recurrent state that every rank has whole", "Use another model.")


def computes_no_prompts(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether a D of this cache can only go on behind what P has computed (quantised.of_heads)."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in kinds.of_group(group)]
    return compat.is_vllm_ascend() and any(map(kinds.is_int8_of_heads, specs))


def is_grouped(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether there are several groups, or one that does not keep all tokens."""
    return bool(_groups(kv_cache_config.kv_cache_groups))


def cache_shape(config: Any, kv_cache_config: KVCacheConfig) -> CacheShape:
    """Return the cache's sizes by the engine's own configuration; the tensors are compared with them.

    Raise ConfigError for layers that are not proven together, or not with this configuration.
    """
    made = kv_cache_config.kv_cache_groups
    spec: Any = made[0].kv_cache_spec
    names = [name for group in made for name in group.layer_names]
    tp = config.parallel_config.tensor_parallel_size
    which, layers = drafts.drafter(config.speculative_config), drafts.layers(config, names)

    def shape(name: str, of: Any) -> LayerShape:
        model = config.speculative_config.draft_model_config if name in layers else config.model_config
        total = 1 if kinds.is_latent(of) else int(model.get_total_num_kv_heads())
        return LayerShape(max(1, total // tp), total, of.head_size)

    specs: dict[str, Any] = {}
    for group in made:
        specs.update(kinds.by_layer(group.kv_cache_spec) or dict.fromkeys(group.layer_names, group.kv_cache_spec))
    states = {name: _recurrent(config, of) for name, of in specs.items() if kinds.is_state(of)}
    specs = {name: of for name, of in specs.items() if name not in states}
    shapes = {name: shape(name, of) for name, of in specs.items()}
    groups = _groups(made)
    for refusal in itertools.chain(_unlike(specs, shapes, layers), _together(config, made, groups, specs, shapes)):
        raise refusal
    if states and which and not which.startswith("method=mtp "):
        raise not_proven("A draft model other than MTP beside states", "Use MTP, or none.")
    int8_scales = quantised.of_heads(config, specs, grouped=bool(groups or states))
    dtype_names = quantised.dtype_names(config, specs, int8_scales)
    first = next(iter(shapes.values()), None) or (LayerShape(1, 1, 1) if states else shape("", spec))
    unlike = {name: one for name, one in shapes.items() if one != first}
    heads = first.local_heads, first.total_heads, first.head_size
    of = {name: index for index, group in enumerate(made) for name in group.layer_names}
    divided = sizes.token_division(config.parallel_config)
    indexes = {name: count for name, one in specs.items() if (count := kinds.index_tensors(one))}
    return CacheShape(
        spec.block_size,
        *heads,
        tp,
        which,
        layers,
        unlike,
        groups,
        of,
        states,
        indexes,
        dtype_names,
        int8_scales,
        *divided,
    )


def _unlike(
    specs: Mapping[str, Any], shapes: Mapping[str, LayerShape], drafts: Collection[str]
) -> Iterator[ConfigError]:
    """Yield layers of one group that differ in a way that is not proven.

    Proven are latents of different sizes, an indexer's keys among them, and a draft model with heads of its own.
    """
    target = {name: shapes[name] for name in specs if name not in drafts}
    latent = {name for name in specs if kinds.is_latent(specs[name])}
    if len(latent.intersection(target)) not in (0, len(target)):
        yield not_proven("A model with MLA in some layers only", "Use a model whose layers are alike.")
    elif len(set(target.values())) > 1 and not latent.issuperset(target):
        yield not_proven("A model whose layers have unlike heads", "Use a model whose layers are alike.")
    if latent.intersection(drafts) and not latent.intersection(target):
        yield not_proven("A draft model with MLA for a target without", "Use another draft model.")
    for name in specs:
        if is_index(name) and attention_of(name) not in latent:
            # Its own write has no hook: nothing would report when it is computed.
            yield not_proven(f"An indexer's cache without MLA in the same layer ({name})", "Use another model.")


def _together(
    config: Any,
    made: Sequence[Any],
    groups: Sequence[Group],
    specs: Mapping[str, Any],
    shapes: Mapping[str, LayerShape],
) -> Iterator[ConfigError]:
    """Yield what of the cache is not proven with this engine's parallel sizes or its draft model."""
    parallel, tp = config.parallel_config, config.parallel_config.tensor_parallel_size
    divided, block = sizes.token_division(parallel), made[0].kv_cache_spec.block_size
    indexed = any(map(kinds.has_indexer, specs, specs.values()))
    if divided.world > 1 and groups:
        # Windows and states are not divided.
        yield not_proven("Context parallelism with sliding windows, states or several groups", "Start without it.")
    if divided.pcp > 1 and indexed:
        yield not_proven("Prefill context parallelism with a sparse indexer", "Start without it, or with DCP.")
    elif divided.world > 1 and not all(kinds.has_whole_index(name, one, divided.dcp) for name, one in specs.items()):
        feature = f"A sparse indexer whose keys are not whole on each of {divided.dcp} ranks of DCP"
        yield not_proven(feature, "Start without it.")
    if divided.world > 1 and block % divided.interleave:
        feature = (
            f"Context parallelism in runs of {divided.interleave} tokens, which do not end with a block of {block},"
        )
        yield not_proven(feature, "Set --cp-kv-cache-interleave-size to the block size.")
    if divided.dcp > 1 and any(tp % (one.total_heads * divided.dcp) for one in shapes.values()):
        feature = f"Decode context parallelism of {divided.dcp} among {tp} ranks that do not hold one head"
        yield not_proven(feature, "Use a divisor of the ranks that hold the same head.")
    shown = config.kv_transfer_config.kv_role == "kv_producer" and compat.is_vllm_ascend()
    if parallel.pipeline_parallel_size > 1 and indexed and not shown:
        yield not_proven("A sparse indexer with pipeline parallelism", "Start with -pp 1.")
    if parallel.pipeline_parallel_size > 1 and groups:
        feature = "A cache with sliding windows, states or several groups, with pipeline parallelism"
        yield not_proven(feature, "Start with -pp 1.")
    if config.speculative_config is not None and groups and not _drafts_beside(made):
        feature = "Speculative decoding with sliding windows, Mamba-2 or several groups of attention"
        yield not_proven(feature, "Start without a draft model.")


def _drafts_beside(made: Sequence[Any]) -> bool:
    """Return whether drafts are proven beside these groups.

    They are beside states of Gated DeltaNet and one group of attention, and beside compressed latents.
    """
    specs = [spec for group in made for spec in kinds.of_group(group)]
    if kinds.is_compressing(specs):
        return True
    attention = [spec for spec in specs if not kinds.is_state(spec)]
    divided = all(kinds.takes_drafts(spec) for spec in specs if kinds.is_state(spec))
    return divided and len(attention) == 1 and not kinds.is_window(attention[0])


def _groups(made: Sequence[Any]) -> tuple[Group, ...]:
    """Return the groups if there are several, or if one does not keep all tokens; else an empty tuple."""

    def group(made: Any) -> Group:
        spec = kinds.of_group(made)[0]  # the layers of a group have one block size, window and ratio
        if kinds.is_state(spec):
            return Group(spec.block_size, STATE)
        if kinds.is_window(spec):
            return Group(spec.block_size, WINDOW, spec.sliding_window)
        ratio = kinds.tokens_per_entry(spec)
        entries = spec.block_size // getattr(spec, "tokens_per_state", 1)  # with that name a block is counted in tokens
        return Group(entries, COMPRESSED, ratio) if ratio > 1 else Group(spec.block_size)

    groups = tuple(map(group, made))
    return groups if len(groups) > 1 or any(group.partial for group in groups) else ()


def _recurrent(config: Any, spec: Any) -> Recurrent:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    hf = config.model_config.hf_text_config
    groups = [getattr(hf, name, None) for name in ("n_groups", "mamba_n_groups", "mamba_ngroups")]
    return Recurrent(
        recurrence=kinds.RECURRENCES[spec.mamba_type.name],
        shapes=tuple(map(tuple, spec.shapes)),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
        sizes=tuple(dtype.itemsize for dtype in spec.dtypes),
        dim_first=is_conv_state_dim_first(),
        groups=next((one for one in groups if isinstance(one, int)), 0),
        drafted=getattr(spec, "num_speculative_blocks", 0),
    )
