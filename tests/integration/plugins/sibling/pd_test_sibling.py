# SPDX-License-Identifier: Apache-2.0
"""A second connector for tests with a MultiConnector: it delays loads and the release of blocks, and moves no bytes.

It holds the blocks of every finished request for a few steps, and loads a request with `kv_transfer_params: {"sibling":
true}`, which takes a few steps too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

STEPS = 3


@dataclass
class Begun(KVConnectorMetadata):
    loads: list[str] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)


class Sibling(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._begun = Begun()
        self._loaded: set[str] = set()
        self._left: dict[tuple[str, bool], int] = {}  # remaining steps, by request and whether it is a load

    # -- worker

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Begun)
        self._left.update({(name, True): STEPS for name in connector_metadata.loads})
        self._left.update({(name, False): STEPS for name in connector_metadata.saves})

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._left = {key: left - 1 for key, left in self._left.items()}
        finished = [key for key, left in self._left.items() if not left]
        for key in finished:
            del self._left[key]
        return {name for name, load in finished if not load} or None, {name for name, load in finished if load} or None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    # -- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        wanted = (request.kv_transfer_params or {}).get("sibling") is True and request.request_id not in self._loaded
        count = request.num_prompt_tokens - 1 - num_computed_tokens if wanted else 0
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loaded.add(request.request_id)
            self._begun.loads.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        begun, self._begun = self._begun, Begun()
        return begun

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (0,)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._loaded.discard(request.request_id)
        if block_ids:
            self._begun.saves.append(request.request_id)
        return bool(block_ids), None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])
