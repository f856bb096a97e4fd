# SPDX-License-Identifier: Apache-2.0
"""Admission of engine configurations: only what is proven may start with this connector.

Anything else stops the start with a code and a sentence: wrong KV that looks right costs more than a failed start.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_ascend_pd import drafts, older_groups, quantised
from vllm_ascend_pd.compat import is_vllm_ascend
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.device.caches import CacheShape, LayerShape
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.geometry.layout import COMPRESSED, STATE, WINDOW, Group, attention_of, is_index
from vllm_ascend_pd.geometry.states import DELTA_NET, MAMBA2, Recurrent
from vllm_ascend_pd.transport.create import protocol_of

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

BOTH = "kv_both"
_BESIDE = "A model with sliding windows, states or several KV cache groups"
_ONE_ROLE = "Give each engine one role, kv_producer or kv_consumer."
# Specs by class name: vllm-ascend puts classes of its own in the place of vLLM's.
_PROVEN_SPECS = ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "AscendMLAAttentionSpec")
_STATE_SPEC = "MambaSpec"  # Gated DeltaNet's too
_PROVEN_BESIDE = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    _STATE_SPEC,
)  # in one of several groups, or in a group that does not keep all tokens
_WINDOW_SPECS = ("SlidingWindowSpec", "AscendSlidingWindowMLASpec")
_COMPRESSING = ("AscendMLAAttentionSpec", "AscendSlidingWindowMLASpec")  # DeepSeek-V4's caches, all of one model
_RECURRENCES = {"MAMBA2": MAMBA2, "GDN_ATTN": DELTA_NET}
_PROVEN_FP8 = ("FullAttentionSpec", "SlidingWindowSpec")
_PLAIN_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


def check_engine(config: Any, push: PushConfig) -> None:
    """Raise ConfigError for an engine configuration that is not proven."""
    for refusal in engine_refusals(config, push):
        raise refusal


def engine_refusals(config: Any, push: PushConfig) -> Iterator[ConfigError]:
    """Yield all that is not proven in an engine's configuration; the first stops its start."""
    role = config.kv_transfer_config.kv_role
    if role not in ("kv_producer", "kv_consumer", BOTH):
        yield ConfigError("PD-CONF-004", role=role)
        return
    parallel = config.parallel_config
    if role == BOTH:
        yield from _both_refusals(config, push)
    yield from _context_refusals(config, role)
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    if role != "kv_consumer" and mode is not None and mode.has_full_cudagraphs():
        # Full graphs replay without the layer hooks: all layers would be pushed after the forward pass, none during it.
        remedy = """Start prefill with --enforce-eager or --compilation-config '{"cudagraph_mode": "PIECEWISE"}'."""
        yield _refused(f"cudagraph_mode {mode.name} on prefill", remedy)
    if getattr(parallel, "use_ubatching", False):
        # With micro-batches a layer's hook fires before all of the step's tokens have passed the layer.
        yield _refused("Micro-batching (DBO)", "Start without --enable-dbo.")
    if getattr(config.model_config, "enable_sleep_mode", False):
        # Sleep mode frees the cache's memory, which transfers read and write, without asking a connector.
        yield _refused("Sleep mode", "Start without --enable-sleep-mode.")
    more = getattr(config, "additional_config", None)
    if isinstance(more, Mapping) and more.get("enable_kv_nz"):
        # D's attention would read its plain cache as fractals, which P does not write.
        yield _refused("enable_kv_nz", "Leave it out of --additional-config.")
    for feature, remedy in drafts.not_proven(config.speculative_config, parallel):
        yield _refused(feature, remedy)
    for feature, remedy in quantised.not_proven(config):
        yield _refused(feature, remedy)
    if os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "").lower() not in ("", "0", "false"):
        yield _refused(
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "Unset it: two requests with one id would share blocks."
        )
    for name in ("enable_fault_tolerance", "enable_elastic_ep"):
        if getattr(parallel, name, False):
            # Ranks come and go then; reservations have the addresses, and exchanges the process groups, of the start.
            yield _refused(name, "Start without it.")
    side = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(role, "")
    yield from _wrong_sizes(push, side, parallel, config.kv_transfer_config.engine_id)
    port, last = push.channel.side_channel_port, listening_ports(parallel)[-1] + (role == BOTH)
    if role != "kv_producer" and port and port + last > 65535:
        why = f"the last worker would listen on {port + last}"
        yield ConfigError("PD-CONF-003", key="side_channel_port", value=port, why=why, remedy="Choose a lower port.")


def _both_refusals(config: Any, push: PushConfig) -> Iterator[ConfigError]:
    """Yield what is not proven with both roles in one engine: all but the order P first in a plain engine."""
    parallel = config.parallel_config
    if push.wire.transport == "mooncake" and (protocol := protocol_of(push.wire)) != "tcp":
        yield _refused(f"{BOTH} over {protocol}", _ONE_ROLE)
    if parallel.pipeline_parallel_size > 1:
        yield _refused(f"{BOTH} with pipeline parallelism", _ONE_ROLE)
    if parallel.data_parallel_size > 1 or _is_dense_rank(config.kv_transfer_config.engine_id):
        yield _refused(f"{BOTH} with data parallelism", _ONE_ROLE)
    if config.speculative_config is not None:
        yield _refused(f"{BOTH} with speculative decoding", _ONE_ROLE)
    if push.metaserver.metaserver_urls:
        # Two engines whose caches are full of each other's reservations would wait for each other's prefills.
        yield _refused(f"{BOTH} behind the metaserver", _ONE_ROLE)
    if not push.meet.hold_sources:
        yield _refused(
            f"{BOTH} without hold_sources", "Set hold_sources: how many prompts P holds until a D has fetched them."
        )


def _context_refusals(config: Any, role: str) -> Iterator[ConfigError]:
    """Yield what is not proven with context parallelism.

    Proven are decode context parallelism on either side, and prefill context parallelism on prefill, by the rule of
    geometry/context.py.
    """
    parallel = config.parallel_config
    divided = context(parallel)
    if divided.world == 1:
        return
    if role == BOTH:
        yield _refused(f"{BOTH} with context parallelism", _ONE_ROLE)
    without = "Start without --decode-context-parallel-size and --prefill-context-parallel-size."
    if not is_vllm_ascend():
        # It is vllm-ascend's rule which rank keeps which tokens; in vLLM it depends on the backend and the release.
        yield _refused("Context parallelism without vllm-ascend", without)
    if divided.pcp > 1 and role != "kv_producer":
        yield _refused("Prefill context parallelism on decode", "Start with --prefill-context-parallel-size 1.")
    if parallel.pipeline_parallel_size > 1:
        yield _refused("Context parallelism with pipeline parallelism", "Start with -pp 1.")
    if str(config.cache_config.cache_dtype) not in quantised.PLAIN:
        yield _refused("Context parallelism with a quantised KV cache", without)
    if config.speculative_config is not None:
        yield _refused("Speculative decoding with context parallelism", "Start without a draft model.")


class TokenDivision(NamedTuple):
    """Division of an engine's tokens among ranks."""

    dcp: int
    pcp: int
    interleave: int

    @property
    def world(self) -> int:
        return self.dcp * self.pcp


def context(parallel: Any) -> TokenDivision:
    dcp = int(getattr(parallel, "decode_context_parallel_size", 1))
    pcp = int(getattr(parallel, "prefill_context_parallel_size", 1))
    return TokenDivision(dcp, pcp, int(parallel.cp_kv_cache_interleave_size) if dcp * pcp > 1 else 1)


def check_both(kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError if both roles are not proven in this engine, by what only the engine itself knows."""
    if is_vllm_ascend():
        raise _refused(f"{BOTH} under vllm-ascend", _ONE_ROLE)
    if older_groups.needed():
        raise _refused(f"{BOTH} with this vLLM", f"Use vLLM 0.32.0 or later for it. {_ONE_ROLE}")
    if is_grouped(kv_cache_config):
        raise _refused(f"{BOTH} for a cache with sliding windows, states or several groups", _ONE_ROLE)


def is_alone(connector: object) -> bool:
    """Return whether vLLM's connector is this one, not another that contains it. Only a worker's process knows."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return not has_kv_transfer_group() or get_kv_transfer_group() is connector


def check_contained(both: bool, grouped: bool) -> None:
    """Raise ConfigError if an engine's connector is not proven inside another one."""
    if both:
        raise _refused(f"{BOTH} behind a MultiConnector", _ONE_ROLE)
    if grouped and older_groups.needed():
        raise _refused(f"{_BESIDE} behind a MultiConnector", "Use vLLM 0.32.0 or later for it.")


def listening_ports(parallel: Any) -> range:
    """Return the ports that an engine's workers listen on, counted from side_channel_port.

    Each data-parallel rank has its own ports, so that ranks on one host do not collide.
    """
    size = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size) * context(parallel).pcp
    first = dp_rank(parallel) * size
    return range(first, first + size)


def dp_rank(parallel: Any) -> int:
    """Return the data-parallel index: in a dense model vLLM gives each rank a size of 1 and the rank 0."""
    return int(parallel.data_parallel_index)


def ranks_here(parallel: Any) -> int:
    """Return how many data-parallel ranks one address on this host stands for.

    It is 1 for a dense model, whose ranks do not know of each other.
    """
    return int(parallel.data_parallel_size_local) if parallel.data_parallel_size > 1 else 1


def cache_shape(config: Any, kv_cache_config: KVCacheConfig) -> CacheShape:
    """Return the cache's sizes by the engine's own configuration; the tensors are compared with them."""
    made = kv_cache_config.kv_cache_groups
    spec: Any = made[0].kv_cache_spec
    names = [name for group in made for name in group.layer_names]
    tp = config.parallel_config.tensor_parallel_size
    which, layers = drafts.drafter(config.speculative_config), drafts.layers(config, names)

    def shape(name: str, of: Any) -> LayerShape:
        model = config.speculative_config.draft_model_config if name in layers else config.model_config
        total = 1 if _is_latent(of) else int(model.get_total_num_kv_heads())
        return LayerShape(max(1, total // tp), total, of.head_size)

    specs: dict[str, Any] = {}
    for group in made:
        specs.update(_by_layer(group.kv_cache_spec) or dict.fromkeys(group.layer_names, group.kv_cache_spec))
    states = {name: _recurrent(config, of) for name, of in specs.items() if _is_state(of)}
    specs = {name: of for name, of in specs.items() if name not in states}
    shapes = {name: shape(name, of) for name, of in specs.items()}
    for refusal in _unlike(specs, shapes, layers):
        raise refusal
    staged, groups = config.parallel_config.pipeline_parallel_size > 1, _groups(made)
    divided = context(config.parallel_config)
    if divided.world > 1 and (groups or any(map(_has_indexer, specs, specs.values()))):
        # An indexer's keys are on every rank, windows and states are not divided.
        feature = "Context parallelism with a sparse indexer, sliding windows, states or several groups"
        raise _refused(feature, "Start without it.")
    if divided.world > 1 and spec.block_size % divided.interleave:
        feature = f"Context parallelism in runs of {divided.interleave} tokens, which do not end with a block of {spec.block_size},"
        raise _refused(feature, "Set --cp-kv-cache-interleave-size to the block size.")
    if divided.dcp > 1 and any(tp % (one.total_heads * divided.dcp) for one in shapes.values()):
        feature = f"Decode context parallelism of {divided.dcp} among {tp} ranks that do not hold one head"
        raise _refused(feature, "Use a divisor of the ranks that hold the same head.")
    if staged and any(map(_has_indexer, specs, specs.values())):
        raise _refused("A sparse indexer with pipeline parallelism", "Start with -pp 1.")
    if staged and groups:
        feature = "A cache with sliding windows, states or several groups, with pipeline parallelism"
        raise _refused(feature, "Start with -pp 1.")
    if config.speculative_config is not None and groups and not _drafts_beside(made):
        feature = "Speculative decoding with sliding windows, Mamba-2 or several groups of attention"
        raise _refused(feature, "Start without a draft model.")
    if states and which and not which.startswith("method=mtp "):
        raise _refused("A draft model other than MTP beside states", "Use MTP, or none.")
    words = quantised.words(config, specs)
    first = next(iter(shapes.values()), None) or (LayerShape(1, 1, 1) if states else shape("", spec))
    unlike = {name: one for name, one in shapes.items() if one != first}
    sizes = first.local_heads, first.total_heads, first.head_size
    of = {name: index for index, group in enumerate(made) for name in group.layer_names}
    return CacheShape(spec.block_size, *sizes, tp, which, layers, unlike, groups, of, states, words, *divided)


def _recurrent(config: Any, spec: Any) -> Recurrent:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    hf = config.model_config.hf_text_config
    groups = [getattr(hf, name, None) for name in ("n_groups", "mamba_n_groups", "mamba_ngroups")]
    return Recurrent(
        recurrence=_RECURRENCES[spec.mamba_type.name],
        shapes=tuple(map(tuple, spec.shapes)),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
        sizes=tuple(dtype.itemsize for dtype in spec.dtypes),
        dim_first=is_conv_state_dim_first(),
        groups=next((one for one in groups if isinstance(one, int)), 0),
        drafted=getattr(spec, "num_speculative_blocks", 0),
    )


def _groups(made: Sequence[Any]) -> tuple[Group, ...]:
    """Return the groups if there are several, or if one does not keep all tokens; else an empty tuple."""

    def group(made: Any) -> Group:
        spec = _specs(made)[0]  # the layers of a group have one block size, window and ratio
        if _is_state(spec):
            return Group(spec.block_size, STATE)
        if _is_window(spec):
            return Group(spec.block_size, WINDOW, spec.sliding_window)
        ratio = _tokens_per_entry(spec)
        return Group(spec.block_size, COMPRESSED, ratio) if ratio > 1 else Group(spec.block_size)

    groups = tuple(map(group, made))
    return groups if len(groups) > 1 or any(group.partial for group in groups) else ()


def is_grouped(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether there are several groups, or one that does not keep all tokens."""
    return bool(_groups(kv_cache_config.kv_cache_groups))


def _drafts_beside(made: Sequence[Any]) -> bool:
    """Return whether drafts are proven beside these groups.

    They are beside states of Gated DeltaNet and one group of attention, and beside compressed latents.
    """
    specs = [spec for group in made for spec in _specs(group)]
    if _is_compressing(specs):
        return True
    attention = [spec for spec in specs if not _is_state(spec)]
    divided = all(_takes_drafts(spec) for spec in specs if _is_state(spec))
    return divided and len(attention) == 1 and not _is_window(attention[0])


def _takes_drafts(spec: Any) -> bool:
    """Return whether a state's rows for drafted tokens are known: its first rows are those of the prompt."""
    return _RECURRENCES.get(getattr(spec.mamba_type, "name", "")) == DELTA_NET


def _is_window(spec: Any) -> bool:
    """Return whether vLLM frees blocks outside a window. Full attention may name a window, but keeps all its blocks."""
    return type(spec).__name__ in _WINDOW_SPECS


def _is_state(spec: Any) -> bool:
    return type(spec).__name__ == _STATE_SPEC


def _unlike(
    specs: Mapping[str, Any], shapes: Mapping[str, LayerShape], drafts: Collection[str]
) -> Iterator[ConfigError]:
    """Yield layers of one group that differ in a way that is not proven.

    Proven are latents of different sizes, an indexer's keys among them, and a draft model with heads of its own.
    """
    own = {name: shapes[name] for name in specs if name not in drafts}
    latent = {name for name in specs if _is_latent(specs[name])}
    if len(latent.intersection(own)) not in (0, len(own)):
        yield _refused("A model with MLA in some layers only", "Use a model whose layers are alike.")
    elif len(set(own.values())) > 1 and not latent.issuperset(own):
        yield _refused("A model whose layers have unlike heads", "Use a model whose layers are alike.")
    if latent.intersection(drafts) and not latent.intersection(own):
        yield _refused("A draft model with MLA for a target without", "Use another draft model.")
    for name in specs:
        if is_index(name) and attention_of(name) not in latent:
            # Its own write has no hook: nothing would report when it is computed.
            yield _refused(f"An indexer's cache without MLA in the same layer ({name})", "Use another model.")


def _has_indexer(name: str, spec: Any) -> bool:
    """Return whether there is an indexer: as a layer of its own, or as a part of its layer's tuple."""
    return bool(attention_of(name) or getattr(spec, "sparse_head_dim", None))


def _by_layer(spec: Any) -> dict[str, Any]:
    """Return the specs by layer, if layers of one group differ; empty if one spec is for all."""
    return dict(getattr(spec, "kv_cache_specs", {}))


def _specs(group: Any) -> list[Any]:
    """Return the specs of a group: one for each layer, or one for all."""
    return list(_by_layer(group.kv_cache_spec).values()) or [group.kv_cache_spec]


def _tokens_per_entry(spec: Any) -> int:
    return int(getattr(spec, "compress_ratio", 1) or 1)


def _has_scales(spec: Any) -> bool:
    """Return whether an int8 cache has its scales beside it, in the same layer."""
    return str(spec.dtype) == "torch.int8" and getattr(spec, "scale_dim", 0) > 0


def _is_compressing(specs: Collection[Any]) -> bool:
    """Return whether these are the specs of a model that compresses latents, with all that belongs to it."""
    return all(type(spec).__name__ in _COMPRESSING for spec in specs) and any(
        _tokens_per_entry(spec) > 1 for spec in specs
    )


def _is_latent(spec: Any) -> bool:
    """Return whether a layer has one vector per entry, which all ranks hold: MLA's, an indexer's or a compressor's."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return isinstance(spec, MLAAttentionSpec) or type(spec).__name__ in _COMPRESSING


def model_fingerprint(config: Any, version: str = "") -> str:
    """Return what must be the same on both sides, readable in an error message.

    Weights of one shape look the same; `version`, a word of the operator, distinguishes them.
    """
    model = config.model_config
    hf = model.hf_text_config
    facts: dict[str, Any] = {
        "architecture": ",".join(getattr(model.hf_config, "architectures", None) or ["?"]),
        "layers": getattr(hf, "num_hidden_layers", "?"),
        "hidden": getattr(hf, "hidden_size", "?"),
        "vocab": getattr(hf, "vocab_size", "?"),
        "kv_heads": model.get_total_num_kv_heads(),
        "head": model.get_head_size(),
        "quantization": model.quantization or "none",
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    if version:
        facts["version"] = version
    return " ".join(f"{key}={value}" for key, value in facts.items())


def _refused(feature: str, remedy: str) -> ConfigError:
    return ConfigError("PD-CONF-005", feature=feature, remedy=remedy)


def _wrong_sizes(push: PushConfig, side: str, parallel: Any, engine_id: str | None) -> Iterator[ConfigError]:
    # The predecessor's configurations name both engines' sizes; this engine's own must at least be right.
    own = {"tp_size": parallel.tensor_parallel_size}
    # A rank of a dense model knows its own number (in vLLM 0.23 only that on its host), but not the number of ranks.
    if not _is_dense_rank(engine_id) or parallel.data_parallel_size > 1:
        own["dp_size"] = parallel.data_parallel_size
    for name, configured in push.sizes.get(side, {}).items():
        if name in own and configured != own[name]:
            yield ConfigError("PD-CONF-006", key=f"{side}.{name}", configured=configured, actual=own[name])


def _is_dense_rank(engine_id: str | None) -> bool:
    return re.search(r"_dp\d+$", str(engine_id)) is not None


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError for a model whose cache, as its layers have made it, is not proven."""
    for refusal in group_refusals(kv_cache_config):
        raise refusal


def older_scheduler(config: Any, kv_cache_config: KVCacheConfig) -> bool:
    """Give connectors of an older vLLM what they need for several groups. Return whether that was necessary.

    Raise ConfigError if it is not proven with this scheduler.
    """
    if not is_grouped(kv_cache_config) or not older_groups.needed():
        return False
    if why := older_groups.install(config):
        raise _refused(f"{_BESIDE} ({why})", "Use vLLM 0.32.0 or later for it.")
    return True


def group_refusals(kv_cache_config: KVCacheConfig) -> Iterator[ConfigError]:
    """Yield all that is not proven in a model's cache; the first stops the start."""
    groups = kv_cache_config.kv_cache_groups
    all_specs = [spec for group in groups for spec in _specs(group)]
    compressing = is_vllm_ascend() and _is_compressing(all_specs)
    beside = len(groups) > 1 or any(_is_window(spec) or _is_state(spec) for spec in all_specs)
    if beside and is_vllm_ascend() and not compressing and not _proven_under_vllm_ascend(all_specs):
        remedy = "Use a model with one group of full attention, alone or beside Gated DeltaNet, or DeepSeek-V4."
        yield _refused(f"{_BESIDE} under vllm-ascend", remedy)
    elif beside and older_groups.unproven():
        yield _refused(_BESIDE, "Use vLLM 0.23 or 0.32.0 and later for it.")
    if any(
        not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False) for group in groups
    ):
        yield _refused("A KV cache group that vLLM does not transfer", "Use another model.")
    proven = _COMPRESSING if compressing else _PROVEN_BESIDE if beside else _PROVEN_SPECS
    for group in groups:
        specs = _specs(group) if compressing or not beside else [group.kv_cache_spec]
        yield from {str(error): error for spec in specs for error in _spec_refusals(spec, proven)}.values()


def _proven_under_vllm_ascend(specs: Sequence[Any]) -> bool:
    """Return whether these groups, several or not all of attention, are some that were tried with vllm-ascend."""
    attention = [spec for spec in specs if not _is_state(spec)]
    if len(attention) != 1 or type(attention[0]).__name__ != "FullAttentionSpec" or attention[0].sliding_window:
        return False
    return all(_takes_drafts(spec) for spec in specs if _is_state(spec))


def _spec_refusals(spec: Any, proven: Collection[str]) -> Iterator[ConfigError]:
    kind = type(spec).__name__
    if kind not in proven:
        beside = "" if kind not in _PROVEN_SPECS else " in one of several groups"
        remedy = "Use a model with full attention, sliding windows, MLA, Mamba-2 or Gated DeltaNet."
        yield _refused(f"A KV cache of kind {kind}{beside}", remedy)
    elif _is_state(spec):
        yield from _state_refusals(spec)
    elif getattr(spec, "extra_retained_tokens", 0):
        yield _refused("A sliding window with retained tokens before it", "Start without a draft model.")
    elif str(spec.dtype) not in _PLAIN_DTYPES and not (
        (quantised.is_fp8(spec) and kind in _PROVEN_FP8) or (proven is _COMPRESSING and _has_scales(spec))
    ):
        # A checkpoint may quantise its cache although the command line does not.
        yield _refused(f"A quantised KV cache ({spec.dtype})", "Use another model.")
    elif getattr(spec, "tokens_per_state", 1) != 1 or (_tokens_per_entry(spec) > 1 and proven is not _COMPRESSING):
        yield _refused("A compressed KV cache (one entry for several tokens)", "Use another model.")


def _state_refusals(spec: Any) -> Iterator[ConfigError]:
    name = getattr(spec.mamba_type, "name", str(spec.mamba_type))
    if name not in _RECURRENCES or len(spec.shapes) != 2:
        feature = f"A recurrent state of kind {name} with {len(spec.shapes)} parts"
        yield _refused(feature, "Use a model with Mamba-2 or Gated DeltaNet.")
    if (mode := getattr(spec, "mamba_cache_mode", "none")) not in ("none", "align"):
        yield _refused(f"mamba_cache_mode {mode}", "Use none or align.")
    if getattr(spec, "num_speculative_blocks", 0):
        if not _takes_drafts(spec):
            yield _refused(f"A recurrent state of kind {name} with drafts", "Start without a draft model.")
        elif mode != "none" and not is_vllm_ascend():
            # vLLM moves such states by a kernel that CPUs lack, so this was not shown without vllm-ascend.
            feature = f"A recurrent state with drafts in mamba_cache_mode {mode}"
            yield _refused(feature, "Start with --no-enable-prefix-caching, or without a draft model.")
    if getattr(spec, "tp_replicated", False):
        yield _refused("A recurrent state that every rank has whole", "Use another model.")
