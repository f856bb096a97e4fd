# SPDX-License-Identifier: Apache-2.0
"""Caches of several groups under vLLM before 0.30, which gives connectors less than they need for them.

Three things are added around its scheduler, if the release was tried and its scheduler is as it was then (`install`):

- The block tables of a step as they are: entries of states move, so appending new blocks to an earlier table is wrong.
  The connector gets them from the scheduler by itself, because vllm-ascend's schedulers call it in another way.
- A failed load by request: vLLM looks for the blocks of failed loads in a single table (step_hooks.fail).
- D does not clear blocks that P will write. vLLM clears new blocks of models with states, on an NPU some time later.

From 0.30 on vLLM has all three. A fourth is vllm-ascend's own: its recompute scheduler counts a prefix as computed that
D has without its state (`take_whole_prefixes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm_ascend_pd.vllm_patches import step_hooks
from vllm_ascend_pd.vllm_patches.tried import VLLM, untried
from vllm_ascend_pd.vllm_patches.wrapping import wrap

_SCHEDULE = "schedule"
_USED = (_SCHEDULE, "_update_waiting_for_remote_kv", "_update_from_kv_xfer_finished", "finish_requests")


def needed() -> bool:
    """Return whether this vLLM lacks what connectors must know of several groups."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    return not hasattr(KVCacheConfig, "transfer_group_ids")


def unproven() -> str:
    """Return why this vLLM's groups cannot be served; empty: they can, with `install` where it is needed."""
    return untried(tried={VLLM: ("0.23",)}) if needed() else ""  # all later ones that were tried have groups


def install(vllm_config: Any) -> str:
    """Wrap the engine's scheduler, once. Return why not; empty: it is wrapped."""
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    if lacking := [name for name in _USED if not hasattr(scheduler, name)]:
        return f"the scheduler {scheduler.__name__} differs in {', '.join(lacking)}"
    if not (why := step_hooks.wrap_outputs(scheduler)):
        wrap(scheduler, _SCHEDULE, _lending)
    return why


def _lending(original: Any) -> Any:
    def schedule(self: Any, *given: Any, **named: Any) -> Any:
        if self.connector is not None:
            self.connector.tables = self.kv_cache_manager
            take_whole_prefixes(self.kv_cache_manager)
        output = original(self, *given, **named)
        keep_loads(output, output.kv_connector_metadata)
        return output

    return schedule


def take_whole_prefixes(manager: Any) -> None:
    """Let a D with vllm-ascend's recompute scheduler use a cached prefix only if its state is cached too.

    It looks for attention's blocks alone, because a state comes with a load. But nothing is loaded where they cover all
    but a prompt's last token, or where D computes a prompt itself: that token would be computed from an empty state.
    """
    coordinator: Any = getattr(manager, "coordinator", None)
    if hasattr(coordinator, "find_longest_cache_hit_per_group"):
        coordinator.find_longest_cache_hit_per_group = coordinator.find_longest_cache_hit


@contextmanager
def lent(scheduler_output: Any, tables: Any) -> Iterator[Any]:
    """Let a step have its tables for the time being, as vLLM has it from 0.30 on. They do not go to the workers."""
    if tables is None:
        yield scheduler_output
        return
    scheduler_output.kv_connector_block_state = tables
    try:
        yield scheduler_output
    finally:
        del scheduler_output.kv_connector_block_state


def keep_loads(scheduler_output: Any, metadata: Any) -> None:
    """Take the blocks that this step's loads will write out of those to be cleared."""
    cleared = getattr(scheduler_output, "new_block_ids_to_zero", None)
    step = getattr(metadata, "decode", None)
    if not cleared or step is None:
        return
    loads = {block for bind in step.binds for block in bind.taken()}
    scheduler_output.new_block_ids_to_zero = [block for block in cleared if block not in loads] or None
