# SPDX-License-Identifier: Apache-2.0
"""An engine of a release of vLLM without a model, driven as vllm-ascend 0.23 drives it.

vLLM's own Scheduler, KVOutputAggregator and KVConnectorModelRunnerMixin call our connectors; the "forward" only
writes KV and calls the layer hooks. As in vllm-ascend the caches are tuples `[block, token, head, dim]`, hooks come
with the layer name "" and a list of tensors, and not at all when no attention metadata is set.

With VLLM_USE_V2_MODEL_RUNNER=1 the scheduler works for vLLM's second model runner, whose ActiveKVConnector takes the
mixin's place.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

import vllm_ascend_pd.device.current
from unit.admission.vllm_configs import LAYERS, model_dir, vllm_config
from unit.regroup.common import LayoutDevice
from vllm_ascend_pd.connector import AscendPushConnector

BLOCK, BLOCKS, HEADS, DIM = 32, 64, 4, 16
UNTOUCHED = 7.0

# Host memory with an NPU's layout. Everything else is as for an engine on a CPU.
vllm_ascend_pd.device.current.current = lambda: LayoutDevice("token")


def content(request: str, layer: int, part: int, tokens: int) -> torch.Tensor:
    """The KV of a prompt, [token, head, dim]: derived from its name, so that any two prompts differ."""
    seed = int.from_bytes(f"{request} {layer} {part}".encode(), "little") % 2**63
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((tokens, HEADS, DIM), dtype=np.float32))


class Traced(AscendPushConnector):
    """Our connector, which records the calls of its hooks in order."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.called: list[str] = []


WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


def _tracing(name: str) -> Any:
    hook = getattr(AscendPushConnector, name)

    def traced(self: Traced, *arguments: Any, **keys: Any) -> Any:
        self.called.append(name)
        return hook(self, *arguments, **keys)

    return traced


for _name in WORKER_HOOKS:
    setattr(Traced, _name, _tracing(_name))


class ReleaseEngine:
    """`tp` workers in this process, over the memory transport. `names`: request ids → names of their prompts."""

    def __init__(
        self, role: str, tp: int, extra: dict[str, Any], policy: str = "fail", chunk: int = 128, blocks: int = BLOCKS
    ) -> None:
        settings = {"transport": "memory", "regroup": "never", "verify": "full", **extra}
        self.config = vllm_config(
            role,
            settings,
            model=model_dir(HEADS),
            tensor_parallel_size=tp,
            block_size=BLOCK,
            max_num_batched_tokens=chunk,
            max_num_seqs=8,
            max_model_len=256,
        )
        self.config.kv_transfer_config.kv_load_failure_policy = policy
        self.config.cache_config.num_gpu_blocks = blocks
        self.tp = tp
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS // tp, head_size=DIM, dtype=torch.float32)
        self._caches = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)]
        )
        manager = StructuredOutputManager(self.config)
        self.scheduler: Any = Scheduler(self.config, self._caches, manager, block_size=BLOCK, log_stats=True)
        shape = (blocks, BLOCK, HEADS // tp, DIM)
        self.tensors = [
            {name: (torch.full(shape, UNTOUCHED), torch.full(shape, UNTOUCHED)) for name in LAYERS} for _ in range(tp)
        ]
        self.second = self.config.use_v2_model_runner
        self.runners: list[ActiveKVConnector] = []  # the second model runner's
        self.taken_in: dict[str, Any] = {}  # vLLM's NewRequestData by request id
        self.workers = [self._worker(rank) for rank in range(tp)]
        shakes = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        connector: Any = self.scheduler.connector
        connector.set_xfer_handshake_metadata_pp_aware(shakes)
        self._aggregator = KVOutputAggregator.from_connector(connector, tp)
        self.sent: list[str] = []
        self.received: list[str] = []
        self.answers: dict[str, list[Any]] = {}  # vLLM's outputs by request id
        self.computed: Counter[str] = Counter()  # prompt tokens whose KV was written here, by request id
        self._names: dict[str, str] = {}
        self.token = 5  # always sampled
        self.counted: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by metric and reason
        self.steps = 0  # steps that computed anything
        self.missing_hook = -1  # layer whose hook does not fire, as in a captured graph
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def _worker(self, rank: int) -> Traced:
        config = copy.copy(self.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        worker = Traced(config, KVConnectorRole.WORKER, self._caches)
        kv_transfer_state._KV_CONNECTOR_AGENT = worker  # as in a process of its own
        if self.second:
            self.runners.append(ActiveKVConnector(config, self.tensors[rank]))  # type: ignore[arg-type]
        else:
            worker.register_kv_caches(self.tensors[rank])
        return worker

    def add(
        self,
        request_id: str,
        name: str,
        tokens: list[int],
        params: dict[str, Any],
        max_tokens: int = 1,
        **more: Any,
    ) -> None:
        extra = {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **more)
        request = Request(request_id, tokens, sampling, None, block_hasher=self._hasher)
        self._names[request_id] = name
        self.scheduler.add_request(request)

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def request(self, request_id: str) -> Any:
        return self.scheduler.requests.get(request_id)

    def blocks_of(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def step(self) -> None:
        """Run one step like vLLM's core: schedule → each worker's execute_model → aggregate → update."""
        output = self.scheduler.schedule()
        self.steps += output.total_num_scheduled_tokens > 0
        # Copies, as to another process: the scheduler's lists grow.
        self.taken_in |= {new.req_id: copy.deepcopy(new) for new in output.scheduled_new_reqs}
        lengths = {
            request_id: self._span(request_id, count) for request_id, count in output.num_scheduled_tokens.items()
        }
        results = [self._execute(rank, output, lengths) for rank in range(self.tp)]
        combined = self._aggregator.aggregate(results)
        kv = combined.kv_connector_output
        if kv is not None:
            self.sent += sorted(kv.finished_sending or ())
            self.received += sorted(kv.finished_recving or ())
        for outputs in self.scheduler.update_from_output(output, combined).values():
            stats = outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats
            for name, reasons in (stats["counts"] if stats else {}).items():
                self.counted[name].update(reasons)
            for one in outputs.outputs:
                self.answers.setdefault(one.request_id, []).append(one)

    def _span(self, request_id: str, count: int) -> tuple[int, int]:
        end = self.scheduler.requests[request_id].num_computed_tokens  # already includes this step
        return end - count, end

    def _execute(self, rank: int, output: Any, spans: dict[str, tuple[int, int]]) -> ModelRunnerOutput:
        kv_transfer_state._KV_CONNECTOR_AGENT = self.workers[rank]
        run = self._execute_second if self.second else self._execute_first
        kv = run(rank, output, spans)
        if isinstance(kv, ModelRunnerOutput):
            # A copy, as from another process: vLLM has one object for all empty outputs, and the aggregator writes into
            # it.
            return copy.copy(kv)
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[self._sampled(request_id, spans[request_id][1]) for request_id in ids],
            kv_connector_output=kv,
        )

    def _execute_first(self, rank: int, output: Any, spans: dict[str, tuple[int, int]]) -> Any:
        self.workers[rank].handle_preemptions(output.kv_connector_metadata)
        if not output.total_num_scheduled_tokens:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self.config)
        with (
            set_forward_context({"": None}, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as kv,
        ):
            for layer in range(len(LAYERS)):
                self._forward(rank, layer, spans)
        return kv

    def _execute_second(self, rank: int, output: Any, spans: dict[str, tuple[int, int]]) -> Any:
        runner: Any = self.runners[rank]
        if not output.total_num_scheduled_tokens:
            return runner.no_forward(output)
        runner.pre_forward(output)
        with set_forward_context({"": None}, self.config):
            for layer in range(len(LAYERS)):
                self._forward(rank, layer, spans)
        if hasattr(runner, "finish_forward"):  # from 0.30 on
            runner.finish_forward()
        return runner.post_forward(output.finished_req_ids)

    def _sampled(self, request_id: str, end: int) -> list[int]:
        return [self.token] if end >= self.scheduler.requests[request_id].num_tokens else []

    def _forward(self, rank: int, layer: int, spans: dict[str, tuple[int, int]]) -> None:
        worker, parts = self.workers[rank], self.tensors[rank][LAYERS[layer]]
        worker.wait_for_layer_load("")
        for request_id, (lo, hi) in spans.items():
            self._write(parts, rank, layer, request_id, lo, hi)
        if layer != self.missing_hook:
            worker.save_kv_layer(LAYERS[layer], list(parts), {"": None})

    def _write(self, parts: Sequence[torch.Tensor], rank: int, layer: int, request_id: str, lo: int, hi: int) -> None:
        hi = min(hi, self.scheduler.requests[request_id].num_prompt_tokens)
        if lo >= hi:  # output tokens
            return
        tokens = torch.arange(lo, hi)
        self.computed[request_id] += len(tokens) if rank == layer == 0 else 0
        blocks = torch.tensor(self.blocks_of(request_id))[tokens // BLOCK]
        heads = slice(rank * HEADS // self.tp, (rank + 1) * HEADS // self.tp)
        for part, memory in enumerate(parts):
            memory[blocks, tokens % BLOCK] = content(self._names[request_id], layer, part, hi)[tokens][:, heads]

    def wrong(self, request_id: str, blocks: Sequence[int], first: int, end: int) -> list[str]:
        """List places at which these blocks do not hold tokens [first, end) of the request's prompt."""
        differences = []
        tokens = torch.arange(first, end)
        ids = torch.tensor(list(blocks))[tokens // BLOCK]
        for rank in range(self.tp):
            heads = slice(rank * HEADS // self.tp, (rank + 1) * HEADS // self.tp)
            for layer, name in enumerate(LAYERS):
                for part, memory in enumerate(self.tensors[rank][name]):
                    wanted = content(self._names[request_id], layer, part, end)[first:, heads]
                    if not torch.equal(memory[ids, tokens % BLOCK], wanted):
                        differences.append(f"rank {rank}, layer {layer}, part {part}")
        return differences

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()
