# SPDX-License-Identifier: Apache-2.0
"""Admission of an engine's configuration, before vLLM has made the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_ascend_pd.admission import drafts, quantised, sizes
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.errors import ConfigError, not_proven
from vllm_ascend_pd.vllm_patches import compat, tried


def check_engine(config: Any, push: PushConfig) -> None:
    """Raise ConfigError for an engine configuration that is not proven."""
    for refusal in engine_refusals(config, push):
        raise refusal


def engine_refusals(config: Any, push: PushConfig) -> Iterator[ConfigError]:
    """Yield all that is not proven in an engine's configuration; the first stops its start."""
    role = config.kv_transfer_config.kv_role
    if role not in ("kv_producer", "kv_consumer"):
        yield ConfigError("PD-CONF-004", role=role)
        return
    parallel = config.parallel_config
    model = getattr(config.model_config, "hf_config", None)
    if "DeepseekV41ForCausalLM" in (getattr(model, "architectures", None) or ()):
        # All that speaks against it at once: who leaves out its drafts would be told of its caches next.
        feature = "DeepSeek-V4.1 (rings of states, Engram's hashes beside the cache, dspark drafts)"
        yield not_proven(feature, "Serve it by engines that compute their own prompts, or DeepSeek-V4: docs/kinds.md.")
        return
    if (device := compat.device_type()) not in ("cpu", "npu"):
        # A layer may be read once the device's kernels have run, for which device/ waits on these two alone.
        yield not_proven(f"Platform {device or 'without a device'}", "Start on an NPU or a CPU.")
    yield from _context_refusals(config, role)
    mode = getattr(getattr(config, "compilation_config", None), "cudagraph_mode", None)
    if role != "kv_consumer" and mode is not None and mode.has_full_cudagraphs():
        # Full graphs replay without the layer hooks: all layers would be pushed after the forward pass, none during it.
        remedy = """Start prefill with --enforce-eager or --compilation-config '{"cudagraph_mode": "PIECEWISE"}'."""
        yield not_proven(f"cudagraph_mode {mode.name} on prefill", remedy)
    if getattr(parallel, "use_ubatching", False):
        # With micro-batches a layer's hook fires before all of the step's tokens have passed the layer.
        yield not_proven("Micro-batching (DBO)", "Start without --enable-dbo.")
    if getattr(config.model_config, "enable_sleep_mode", False):
        # Sleep mode frees the cache's memory, which transfers read and write, without asking a connector.
        yield not_proven("Sleep mode", "Start without --enable-sleep-mode.")
    yield from _ascend_refusals(getattr(config, "additional_config", None), role)
    ahead = getattr(getattr(config, "scheduler_config", None), "async_scheduling", False)  # the doctor has none
    if role == "kv_consumer" and parallel.pipeline_parallel_size > 1 and ahead and compat.is_vllm_ascend():
        # Seen with 0.30: behind a prompt of several steps the first stage decodes before it has the sampled token.
        feature = "Asynchronous scheduling with pipeline parallelism on decode under vllm-ascend"
        yield not_proven(feature, "Start decode with --no-async-scheduling.")
    yield from drafts.refusals(config.speculative_config, parallel, role)
    yield from quantised.refusals(config)
    if os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "").lower() not in ("", "0", "false"):
        yield not_proven(
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "Unset it: two requests with one id would share blocks."
        )
    for name in ("enable_fault_tolerance", "enable_elastic_ep"):
        if getattr(parallel, name, False):
            # Ranks come and go then; reservations have the addresses, and exchanges the process groups, of the start.
            yield not_proven(name, "Start without it.")
    side = "prefill" if role == "kv_producer" else "decode"
    yield from _wrong_sizes(push, side, parallel, config.kv_transfer_config.engine_id)
    port, last = push.channel.side_channel_port, sizes.listening_offsets(parallel)[-1]
    if role != "kv_producer" and port and port + last > 65535:
        why = f"the last worker would listen on {port + last}"
        yield ConfigError("PD-CONF-003", key="side_channel_port", value=port, why=why, remedy="Choose a lower port.")


def _ascend_refusals(more: Any, role: str) -> Iterator[ConfigError]:
    """Yield what is not proven of vllm-ascend's own configuration, `--additional-config`."""
    if not isinstance(more, Mapping):
        return
    remedy = "Leave it out of --additional-config."
    if more.get("enable_kv_nz"):
        # D's attention would read its plain cache as fractals, which P does not write.
        yield not_proven("enable_kv_nz", remedy)
    hashed, graphs = (more.get(name) or {} for name in ("hamming_sparse", "xlite_graph_config"))
    if more.get("enable_hamming_sparse") or hashed.get("enabled"):
        # D's attention would choose blocks by hashes of keys, in a cache that no connector is given.
        yield not_proven("hamming_sparse", remedy)
    if ((more.get("scheduler_config") or {}).get("dyntra_lb_config") or {}).get("enabled"):
        # It moves requests between ranks, and beside states counts a prefix of which D has attention alone.
        yield not_proven("dyntra_lb_config", remedy)
    if role != "kv_consumer" and graphs.get("enabled"):
        # Its graphs run without the layer hooks.
        yield not_proven("xlite_graph_config on prefill", remedy)


def _context_refusals(config: Any, role: str) -> Iterator[ConfigError]:
    """Yield what is not proven with context parallelism.

    Proven are decode context parallelism on either side, and prefill context parallelism on prefill, by the rule of
    geometry/context_parallel.py.
    """
    parallel = config.parallel_config
    divided = sizes.token_division(parallel)
    if divided.world == 1:
        return
    without = "Start without --decode-context-parallel-size and --prefill-context-parallel-size."
    if not compat.is_vllm_ascend():
        # It is vllm-ascend's rule which rank keeps which tokens; in vLLM it depends on the backend and the release.
        yield not_proven("Context parallelism without vllm-ascend", without)
    if divided.pcp > 1 and role != "kv_producer":
        yield not_proven("Prefill context parallelism on decode", "Start with --prefill-context-parallel-size 1.")
    if parallel.pipeline_parallel_size > 1:
        yield not_proven("Context parallelism with pipeline parallelism", "Start with -pp 1.")
    if str(config.cache_config.cache_dtype) not in (*quantised.PLAIN, quantised.BY_SPEC):
        yield not_proven("Context parallelism with a quantised KV cache", without)
    if config.speculative_config is not None:
        # vllm-ascend 0.23 ends by itself at its first prefill with more than one drafted token.
        why = "" if config.speculative_config.method == "mtp" else "drafts other than MTP"
        if why := why or tried.untried(tried=tried.TRIED_DIVIDED_DRAFTS):
            feature = f"Speculative decoding with context parallelism ({why})"
            yield not_proven(feature, "Start without a draft model.")


def _wrong_sizes(push: PushConfig, side: str, parallel: Any, engine_id: str | None) -> Iterator[ConfigError]:
    # The predecessor's configurations name both engines' sizes; this engine's own must at least be right.
    divided = sizes.token_division(parallel)
    actual = {"tp_size": parallel.tensor_parallel_size, "pp_size": parallel.pipeline_parallel_size}
    actual |= {"dcp_size": divided.dcp, "pcp_size": divided.pcp, "dp_rank": sizes.dp_rank(parallel)}
    # A rank of a dense model knows its own number (in vLLM 0.23 only that on its host), but not the number of ranks.
    if not sizes.is_dense_rank(engine_id) or parallel.data_parallel_size > 1:
        actual["dp_size"] = parallel.data_parallel_size
    for name, configured in push.sizes.get(side, {}).items():
        if name in actual and configured != actual[name]:
            yield ConfigError("PD-CONF-006", key=f"{side}.{name}", configured=configured, actual=actual[name])


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
    if compat.is_vllm_ascend() and getattr(hf, "index_topk", None) and not getattr(hf, "compress_ratios", None):
        facts["index"] = "layers"  # else engines that still have the keys in their layers' tuples would seem to fit
    if rope := _rope(model):
        facts["rope"] = rope
    if version:
        facts["version"] = version
    return " ".join(f"{key}={value}" for key, value in facts.items())


def _rope(model: Any) -> str:
    """Return what an engine's own settings change about the rotation of keys; empty: nothing.

    A cached key is rotated already, and its bytes do not show how.
    """
    facts = []
    parameters = getattr(model.hf_text_config, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings")
    if parameters.get("rope_type") == "longrope" and original:
        # vLLM chooses one set of factors for the whole engine.
        facts.append("long" if model.max_model_len > original else "short")
    overrides = getattr(model, "hf_overrides", None)
    ropes = {key: overrides[key] for key in overrides if "rope" in key} if isinstance(overrides, Mapping) else {}
    if ropes:
        facts.append(hashlib.sha256(json.dumps(ropes, sort_keys=True, default=str).encode()).hexdigest()[:8])
    return ",".join(facts)
