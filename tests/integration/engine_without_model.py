# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: vLLM's real Scheduler and KVOutputAggregator, and our real connectors on every worker.

A step does what a model runner does, in the order of vLLM 0.32; the "forward" only calls the layer hooks. P's caches
are filled once with bytes that depend on layer, block and place, so that bytes on D can be identified.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tools.support.models import RECIPES, ensure
from vllm_ascend_pd.connector import AscendPushConnector

BLOCK = 16  # the block size of MLA in vLLM's CPU backend
WIDTH = 576
BLOCKS = 64
LAYERS = tuple(f"model.layers.{i}.self_attn.attn" for i in range(RECIPES["mla"].layers))


@dataclass
class Finished:
    """Request ids completed by the aggregator, one entry per completion."""

    sent: list[str]
    received: list[str]
    failed: list[str]


class EngineWithoutModel:
    """One MLA engine of `tp` workers in this process, over the memory transport.

    `children` are the connectors behind a MultiConnector.
    """

    def __init__(
        self,
        role: str,
        tp: int,
        extra: dict[str, Any],
        policy: str = "fail",
        children: list[dict[str, Any]] | None = None,
        prefixes: bool = False,
    ) -> None:
        transfer: dict[str, Any] = {
            "kv_connector": "AscendPushConnector",
            "kv_connector_module_path": "vllm_ascend_pd.connector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"transport": "memory", "patient": False, **extra},
        }
        if children is not None:
            extra = {"connectors": children}
            transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        self._connector = AscendPushConnector if children is None else MultiConnector
        arguments: dict[str, Any] = {
            "model": str(ensure("mla")),
            "dtype": "float32",
            "tensor_parallel_size": tp,
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 1 << 24,
            "kv_transfer_config": transfer,
        }
        self.config: Any = EngineArgs(**arguments).create_engine_config()
        self.config.cache_config.num_gpu_blocks = BLOCKS
        self.config.cache_config.enable_prefix_caching = prefixes  # on a CPU vLLM has none with MLA
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=WIDTH, dtype=torch.float32)
        self._caches = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],  # our own tensors replace those that a runner would allocate
            kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
        )
        self.scheduler: Any = Scheduler(
            self.config, self._caches, StructuredOutputManager(self.config), block_size=BLOCK, log_stats=False
        )
        self.tensors = [{name: torch.zeros(BLOCKS, 1, BLOCK, WIDTH) for name in LAYERS} for _ in range(tp)]
        self.workers = [self._worker(rank) for rank in range(tp)]
        shakes = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        connector: Any = self.scheduler.connector
        connector.set_xfer_handshake_metadata_pp_aware(shakes)
        self._aggregator = KVOutputAggregator.from_connector(connector, tp)
        self.finished = Finished([], [], [])
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def _worker(self, rank: int) -> KVConnectorBase_V1:
        config = copy.copy(self.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        worker: Any = self._connector(config, KVConnectorRole.WORKER, self._caches)
        worker.register_kv_caches(self.tensors[rank])
        made: KVConnectorBase_V1 = worker
        return made

    def fill(self, seed: int) -> None:
        """Write the same bytes on every rank, as replicas of MLA's cache hold them."""
        dice = torch.Generator().manual_seed(seed)
        for name in LAYERS:
            content = torch.rand(BLOCKS, 1, BLOCK, WIDTH, generator=dice)
            for tensors in self.tensors:
                tensors[name].copy_(content)

    def add(self, request_id: str, tokens: list[int], params: dict[str, Any], max_tokens: int = 1) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        request = Request(request_id, tokens, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def blocks_of(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def step(self) -> None:
        """Run one engine step, as vLLM's core and model runners do."""
        output: SchedulerOutput = self.scheduler.schedule()
        results = [self._run(worker, output, rank) for rank, worker in enumerate(self.workers)]
        combined = self._aggregator.aggregate(results)
        transfers = combined.kv_connector_output
        self.finished.sent += sorted(transfers.finished_sending or ())
        self.finished.received += sorted(transfers.finished_recving or ())
        self.finished.failed += sorted(transfers.failed_recving or ())
        self.scheduler.update_from_output(output, combined)

    def _run(self, worker: Any, output: SchedulerOutput, rank: int) -> ModelRunnerOutput:
        meta = output.kv_connector_metadata
        if output.preempted_req_ids:
            worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        if output.total_num_scheduled_tokens:
            for name in LAYERS:
                worker.save_kv_layer(name, self.tensors[rank][name], None)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        kv = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
        )
        worker.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[5] for _ in ids],
            kv_connector_output=kv,
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


def run_until(engines: tuple[EngineWithoutModel, ...], reached: Any, deadline_s: float = 30.0) -> None:
    """Step the engines in turn until `reached()` is true. Fails at the deadline."""
    until = time.monotonic() + deadline_s
    while not reached():
        assert time.monotonic() < until, "not reached in time: " + ", ".join(str(e.finished) for e in engines)
        for engine in engines:
            engine.step()
        time.sleep(0.002)
