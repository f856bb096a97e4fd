# SPDX-License-Identifier: Apache-2.0
"""A connector within one engine with DeepSeek-V4: it gives a request those entries of the caches that another one left.

`kv_connector` is "Carrier", its module path is this file. `plan` says what the next request does; its prompt has to be
computed without a cached prefix. What a request needs to continue behind m tokens is `needed`, by docs/kinds.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

WINDOW = 128


@dataclass
class NextRequest:
    """Treatment of the next request: with how many tokens it begins, or behind how many its entries are kept."""

    keep: int = 0  # keep what is needed behind so many tokens, once `of` tokens are computed
    of: int = 0
    load: int = 0
    without: str = ""  # a part of the names of caches whose first needed entry is left out
    blocks: list[list[int]] = field(default_factory=list)  # of the request, by group
    computed: int = 0


plan = NextRequest()
caches: dict[str, Sequence[torch.Tensor]] = {}
specs: dict[str, tuple[int, Any]] = {}  # group and spec by layer
kept: dict[tuple[str, int, int], torch.Tensor] = {}  # by layer, entry, and tensor of the layer


def needed(name: str, spec: Any, tokens: int) -> range:
    """Return a cache's entries without which a request cannot continue behind so many tokens."""
    if name.endswith("swa_cache"):
        return range(max(0, tokens - WINDOW + 1), tokens)
    if name.endswith("state_cache"):
        ratio, coff = (128, 1) if spec.sliding_window == WINDOW else (4, 2)
        return range(max(0, (tokens // ratio - coff + 1) * ratio), tokens)
    return range(tokens // spec.compress_ratio)


def wipe() -> None:
    """Fill all caches with what would show in an answer."""
    torch.npu.synchronize()
    for tensors in caches.values():
        for tensor in tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 99)


class Carrier(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        for group, one in enumerate(kv_cache_config.kv_cache_groups):
            specs.update(
                {name: (group, spec) for name, spec in getattr(one.kv_cache_spec, "kv_cache_specs", {}).items()}
            )

    # ---- the worker's

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        caches.update(kv_caches)

    def start_load_kv(self, forward_context: Any, **_more: Any) -> None:
        if plan.load and plan.blocks:
            for key, place in self._entries(plan.load, plan.without):
                place.copy_(kept[key])
            plan.load = 0

    def wait_for_save(self) -> None:
        if plan.keep and plan.computed >= plan.of:
            torch.npu.synchronize()
            kept.update({key: place.cpu() for key, place in self._entries(plan.keep)})
            plan.keep = 0

    def _entries(self, tokens: int, without: str = "") -> Iterator[tuple[tuple[str, int, int], torch.Tensor]]:
        for name, tensors in caches.items():
            group, spec = specs[name]
            for entry in needed(name, spec, tokens)[bool(without) and without in name :]:
                block = plan.blocks[group][entry // spec.block_size]
                assert block, f"entry {entry} of {name} is in the null block"
                for number, tensor in enumerate(tensors):
                    yield (name, entry, number), tensor[block, entry % spec.block_size]

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *_layer: Any, **_more: Any) -> None: ...

    # ---- the scheduler's

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return plan.load, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        plan.blocks, plan.computed = [list(ids) for ids in blocks.get_block_ids()], 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        for new in scheduler_output.scheduled_new_reqs:
            plan.blocks, plan.computed = [list(ids) for ids in new.block_ids], new.num_computed_tokens
        for more in scheduler_output.scheduled_cached_reqs.new_block_ids:
            for ids, added in zip(plan.blocks, more or (), strict=False):
                ids.extend(added)
        plan.computed += sum(scheduler_output.num_scheduled_tokens.values())
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
