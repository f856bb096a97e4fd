# SPDX-License-Identifier: Apache-2.0
"""Differences between vLLM versions, detected by feature, never by version number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    FROM_PEER: Any = CacheHitSource.P2P
except ImportError:  # before 0.32
    FROM_PEER = None
HAS_TRANSFER_RESULTS = hasattr(base, "KVConnectorTransferResults")


def is_vllm_ascend() -> bool:
    """Return whether the engine's platform is vllm-ascend's, on an NPU or not."""
    from vllm.platforms import current_platform

    return type(current_platform).__module__.startswith("vllm_ascend")


def device_type() -> str:
    """Return the type of the engine's device, as its platform and torch name it."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def transfer_results(sent: Iterable[str], received: Iterable[str], failed: Iterable[str]) -> Any:
    """Return vLLM's own result object (0.30 and later)."""
    return base.KVConnectorTransferResults(
        finished_sending=set(sent), finished_recving=set(received), failed_recving=set(failed)
    )


def attention_isa(dtype: Any, block_size: int, head_size: int) -> str:
    """Return the instruction set for which vLLM's attention on a CPU keeps K."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(dtype, block_size, head_size))


def attention_scales(layer: Any) -> tuple[float, float] | None:
    """Return the scales of an attention layer's quantised keys and values; None if it has not one for each."""
    whole = all(getattr(getattr(layer, which, None), "numel", int)() == 1 for which in ("_k_scale", "_v_scale"))
    k, v = (getattr(layer, which, None) for which in ("_k_scale_float", "_v_scale_float"))
    return (k, v) if whole and isinstance(k, float) and isinstance(v, float) else None
