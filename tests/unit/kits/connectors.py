# SPDX-License-Identifier: Apache-2.0
"""Connectors of both roles without engines: what a step of vLLM gives them, and a pair over real sockets."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from unit.admission.vllm_configs import LAYERS, attention, cache_config, vllm_config
from unit.kits.watching import until
from unit.schedulers.recording_metaserver import RecordingMetaserver
from vllm_ascend_pd.connector import AscendPushConnector

BLOCK, BLOCKS, SIZE = 32, 8, 16
TOKENS = list(range(40))
QUIET: dict[str, Any] = {
    "transport": "memory",
    "patient": False,
    "verify": "full",
    "regroup": "never",
    "resend_first_s": 0.05,
    "transfer_timeout_s": 5,
    "quiet_extra_s": 0,
}


def connector(
    role: str, kind: KVConnectorRole, extra: dict[str, Any] | None = None, **arguments: Any
) -> AscendPushConnector:
    rank = arguments.pop("rank", 0)
    config = vllm_config(role, {**QUIET, **(extra or {})}, **arguments)
    config.parallel_config.rank = rank
    heads = max(1, 2 // config.parallel_config.tensor_parallel_size)
    return AscendPushConnector(config, kind, cache_config(attention(BLOCK, heads, SIZE), blocks=BLOCKS))


def tensors(heads: int = 2, names: tuple[str, ...] = LAYERS) -> dict[str, torch.Tensor]:
    storage = torch.zeros(len(names), BLOCKS, heads, BLOCK, 2 * SIZE)
    return {name: storage[i] for i, name in enumerate(names)}


@dataclass
class Blocks:
    """Stand-in for the blocks that vLLM passes to update_state_after_alloc."""

    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.ids,)


def request(name: str, params: dict[str, Any] | None, tokens: list[int] = TOKENS) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}), None)


def output(name: str | None = None, tokens: int = 0, blocks: list[int] | None = None) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    if name is not None:
        made.num_scheduled_tokens = {name: tokens}
        made.total_num_scheduled_tokens = tokens
        made.scheduled_new_reqs = [NewRequestData(name, TOKENS, [], None, None, (blocks or [],), 0, None)]
    made.scheduled_cached_reqs = CachedRequestData.make_empty()
    return made


@dataclass
class ConnectorPair:
    """Connectors of both engines, TP 1, without engines around them."""

    metaserver: RecordingMetaserver
    prefill: AscendPushConnector
    prefill_worker: AscendPushConnector
    decode: AscendPushConnector
    decode_worker: AscendPushConnector
    caches: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    reported: list[Any] = field(default_factory=list)

    def load(self, name: str = "r", blocks: tuple[int, ...] = (3, 5)) -> Request:
        """Allocate and post as D; return the request that P gets."""
        params = {"do_remote_prefill": True, "metaserver": self.metaserver.url, "ticket": name}
        asked = request(name, params)
        assert self.decode.get_num_new_matched_tokens(asked, 0) == (len(TOKENS), True)
        count = len(self.metaserver.bodies)
        self.decode.update_state_after_alloc(asked, Blocks(list(blocks)), len(TOKENS))
        self.decode_step()
        until(lambda: len(self.metaserver.bodies) > count, "the POST")
        sealed = self.metaserver.bodies[-1]["reservation"]
        return request(f"{name}-p", {"do_remote_decode": True, "reservation": sealed})

    def decode_step(self) -> Any:
        meta = pickle.loads(pickle.dumps(self.decode.build_connector_meta(output())))
        self.decode_worker.bind_connector_metadata(meta)
        self.decode_worker.start_load_kv(None)
        self.decode_worker.wait_for_save()
        self.decode_worker.clear_connector_metadata()
        return meta

    def prefill_step(self, step: SchedulerOutput, order: str = "after", finished: frozenset[str] = frozenset()) -> Any:
        meta = pickle.loads(pickle.dumps(self.prefill.build_connector_meta(step)))
        worker, (mine, _) = self.prefill_worker, self.caches
        worker.bind_connector_metadata(meta)
        if "before" in order:
            worker.start_load_kv(None)
        if step.total_num_scheduled_tokens:
            for name, tensor in mine.items():
                worker.wait_for_layer_load(name)
                worker.save_kv_layer(name, tensor, None)
        if "after" in order:
            worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set(finished))
        worker.clear_connector_metadata()
        return results

    def prefilled(self, asked: Request, order: str = "after") -> None:
        self.prefill.update_state_after_alloc(asked, Blocks([1, 6]), 0)
        self.prefill_step(output(asked.request_id, len(TOKENS), [1, 6]), order)

    def news(self) -> Any:
        """Report of D's worker to its scheduler after a step, through vLLM's pickle."""
        return pickle.loads(pickle.dumps(self.decode_worker.build_connector_worker_meta()))

    def results(self) -> Any:
        self.decode_step()
        results = self.decode_worker.get_transfer_results(set())
        if results.finished_recving:
            self.reported.append(results)
        return results.finished_recving


@contextmanager
def connected_pair(**keys: Any) -> Iterator[ConnectorPair]:
    server = RecordingMetaserver()
    extra = {"metaserver_urls": [server.url], **keys}
    made = {
        (role, kind): connector(role, kind, extra)
        for role in ("kv_producer", "kv_consumer")
        for kind in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
    }
    caches = tensors(), tensors()
    for tensor in caches[0].values():
        tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(7)))
    for role, mine in zip(("kv_producer", "kv_consumer"), caches, strict=True):
        worker = made[role, KVConnectorRole.WORKER]
        worker.register_kv_caches(mine)
        shake = worker.get_handshake_metadata()
        assert shake is not None
        made[role, KVConnectorRole.SCHEDULER].set_xfer_handshake_metadata({0: shake})
    prefill, prefill_worker, decode, decode_worker = made.values()
    yield ConnectorPair(server, prefill, prefill_worker, decode, decode_worker, caches)
    server.end = b"{}"
    for each in made.values():
        each.shutdown()
    server.served.stop()
