# SPDX-License-Identifier: Apache-2.0
"""Admission by what only the engine's own process knows: its connectors and its scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.admission.cache import GROUPED, is_grouped
from vllm_ascend_pd.errors import not_proven
from vllm_ascend_pd.vllm_patches import older_groups

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def is_alone(connector: object) -> bool:
    """Return whether vLLM's connector is this one, not another that contains it. Only a worker's process knows."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return not has_kv_transfer_group() or get_kv_transfer_group() is connector


def check_contained(*, grouped: bool, heads_in_int8: bool) -> None:
    """Raise ConfigError if an engine's connector is not proven inside another one.

    Beside one that has a part of a prompt, a D with its heads in int8 would compute the rest, which it cannot.
    """
    if heads_in_int8:
        raise not_proven("Heads in int8 behind a MultiConnector", "Name this connector alone.")
    if grouped and older_groups.needed():
        raise not_proven(f"{GROUPED} behind a MultiConnector", "Use vLLM 0.30.0 or later for it.")


def older_scheduler(config: Any, kv_cache_config: KVCacheConfig) -> bool:
    """Give connectors of an older vLLM what they need for several groups. Return whether that was necessary.

    Raise ConfigError if it is not proven with this scheduler.
    """
    if not is_grouped(kv_cache_config) or not older_groups.needed():
        return False
    if why := older_groups.install(config):
        raise not_proven(f"{GROUPED} ({why})", "Use vLLM 0.30.0 or later for it.")
    return True
