# SPDX-License-Identifier: Apache-2.0
"""AscendPushConnector: the thin face vLLM sees. It builds one role object and delegates.

Four roles: prefill or decode (`kv_role`), scheduler or worker (vLLM's process). Importing this module needs neither an
NPU nor a transfer engine: the API server imports the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_ascend_pd import admission, compat, patience
from vllm_ascend_pd.decode.decisions import DecodeStep, LoadEnd
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.engine import Engine, WorkerFacts
from vllm_ascend_pd.observe.metrics import PushPromMetrics, PushStats
from vllm_ascend_pd.observe.trace import TraceFile
from vllm_ascend_pd.prefill.decisions import Exchanged, PrefillStep
from vllm_ascend_pd.prefill.scheduler import PrefillScheduler

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

    from vllm_ascend_pd.decode.worker import DecodeWorker
    from vllm_ascend_pd.prefill.worker import PrefillWorker


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step, scheduler → workers."""

    prefill: PrefillStep | None = None
    decode: DecodeStep | None = None


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """One worker → its scheduler, once."""

    facts: WorkerFacts


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """Workers → scheduler, after a step. P's: exchanges to be made again, pushes that failed. D's: loads that ended."""

    missed: frozenset[Exchanged] = frozenset()
    failures: frozenset[tuple[str, str]] = frozenset()
    ends: frozenset[LoadEnd] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if not isinstance(other, WorkerNews):
            return self
        return WorkerNews(self.missed | other.missed, self.failures | other.failures, self.ends | other.ends)


@dataclass
class _Roles:
    """Exactly one is set."""

    prefill_scheduler: PrefillScheduler | None = None
    decode_scheduler: DecodeScheduler | None = None
    prefill_worker: PrefillWorker | None = None
    decode_worker: DecodeWorker | None = None
    legacy_invalid_blocks: set[int] = field(default_factory=set)


class AscendPushConnector(KVConnectorBase_V1, SupportsHMA):
    """Layerwise push of the KV cache, P to D. See docs/protocol.md."""

    supports_sleep_mode = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine = Engine.of(vllm_config)
        if kv_cache_config is not None:
            admission.check_groups(kv_cache_config)
        self._engine = engine
        self.patience = patience.Patience(self._open_loads)
        self._roles = _Roles()
        prefill = vllm_config.kv_transfer_config.is_kv_producer
        scheduler = role == KVConnectorRole.SCHEDULER
        self._trace = self._start_trace(prefill, scheduler)
        _install_patience(engine)
        if scheduler and prefill:
            self._roles.prefill_scheduler = PrefillScheduler(engine)
        elif scheduler:
            self._roles.decode_scheduler = DecodeScheduler(
                engine,
                self.patience,
                recomputes=getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "") == "recompute",
            )
        else:
            self._build_worker(vllm_config, kv_cache_config, prefill)

    def _build_worker(self, vllm_config: Any, kv_cache_config: Any, prefill: bool) -> None:
        from vllm_ascend_pd.device.current import current
        from vllm_ascend_pd.protocol.identity import Contributor

        shape = admission.cache_shape(vllm_config, kv_cache_config)
        parallel = vllm_config.parallel_config
        tp = parallel.rank % parallel.tensor_parallel_size
        if prefill:
            from vllm_ascend_pd.prefill.worker import PrefillWorker
            from vllm_ascend_pd.regroup.parts import Place

            stage = parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size
            place = Place(
                rank=parallel.rank,
                tp_size=parallel.tensor_parallel_size,
                pp_size=parallel.pipeline_parallel_size,
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            )
            self._roles.prefill_worker = PrefillWorker(self._engine, shape, current(), Contributor(stage, tp), place)
        else:
            from vllm_ascend_pd.decode.worker import DecodeWorker

            self._roles.decode_worker = DecodeWorker(self._engine, shape, current(), tp)

    def _start_trace(self, prefill: bool, scheduler: bool) -> TraceFile | None:
        directory = self._engine.config.observe.trace_dir
        name = f"{'prefill' if prefill else 'decode'}-{'scheduler' if scheduler else 'worker'}"
        return TraceFile(directory, name) if directory else None

    def _open_loads(self) -> int:
        """Requests that may be waited for politely; negative if nobody may sleep."""
        if self._roles.prefill_scheduler is not None:
            return -1 if self._roles.prefill_scheduler.must_step() else 0
        return self._roles.decode_scheduler.open_loads() if self._roles.decode_scheduler is not None else 0

    # -- class-level questions

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: vLLM asks without a role, and D, which has no layer hooks, would lose its full graphs. P refuses them
        (admission.py): they replay without the hooks."""
        return False

    # -- worker

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        worker = self._roles.prefill_worker or self._roles.decode_worker
        if worker is not None:
            worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        worker = self._roles.prefill_worker or self._roles.decode_worker
        facts = worker.handshake() if worker is not None else None
        return Handshake(facts) if facts is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        step = kv_connector_metadata.prefill if isinstance(kv_connector_metadata, StepMetadata) else None
        if self._roles.prefill_worker is not None and step is not None:
            self._roles.prefill_worker.preempt(step)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if not isinstance(connector_metadata, StepMetadata):
            return
        if self._roles.prefill_worker is not None and connector_metadata.prefill is not None:
            self._roles.prefill_worker.check()
            self._roles.prefill_worker.bind(connector_metadata.prefill)
        if self._roles.decode_worker is not None and connector_metadata.decode is not None:
            self._roles.decode_worker.bind(connector_metadata.decode)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: P writes into our memory, and pushes are prepared when the metadata is bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled only when its KV is complete."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._roles.prefill_worker is not None:
            self._roles.prefill_worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        if self._roles.prefill_worker is not None:
            self._roles.prefill_worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        sent, received, failed = self._collect(finished_req_ids)
        return compat.transfer_results(sent, received, failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received, _ = self._collect(finished_req_ids)
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        # Failed requests are named by get_transfer_results where vLLM has it; block ids are the older way.
        invalid, self._roles.legacy_invalid_blocks = self._roles.legacy_invalid_blocks, set()
        return set() if compat.HAS_TRANSFER_RESULTS else invalid

    def _collect(self, ended: set[str]) -> tuple[set[str], set[str], set[str]]:
        if self._roles.prefill_worker is not None:
            return self._roles.prefill_worker.finished(ended), set(), set()
        if self._roles.decode_worker is None:
            return set(), set(), set()
        reports = self._roles.decode_worker.reports()
        failed = [report for report in reports if not report.ok]
        for report in failed:
            self._roles.legacy_invalid_blocks.update(report.blocks)
        return set(), {report.request_id for report in reports}, {report.request_id for report in failed}

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        news = WorkerNews()
        if self._roles.prefill_worker is not None:
            prefill = self._roles.prefill_worker
            news = WorkerNews(frozenset(prefill.missed_exchanges()), frozenset(prefill.failures()))
        elif self._roles.decode_worker is not None:
            news = WorkerNews(ends=frozenset(self._roles.decode_worker.ends()))
        return news if news != WorkerNews() else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        teller = self._roles.prefill_worker or self._roles.prefill_scheduler or self._roles.decode_scheduler
        data = teller.stats() if teller is not None else None
        return PushStats(data=data) if data is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return PushStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics | None:
        return PushPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for role in (
            self._roles.prefill_worker,
            self._roles.decode_worker,
            self._roles.prefill_scheduler,
            self._roles.decode_scheduler,
        ):
            if role is not None:
                role.close()
        if self._trace is not None:
            self._trace.close()

    # -- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): facts for rank, facts in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        workers = {key: shake.facts for key, shake in metadata.items() if isinstance(shake, Handshake)}
        scheduler = self._roles.prefill_scheduler or self._roles.decode_scheduler
        if scheduler is not None:
            scheduler.attach_workers(workers)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (0,)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._roles.decode_scheduler is None:
            return 0, False
        count = self._roles.decode_scheduler.wanted(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._roles.decode_scheduler is not None and num_external_tokens > 0:
            self._roles.decode_scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)
        if self._roles.prefill_scheduler is not None:
            self._roles.prefill_scheduler.allocated(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._roles.prefill_scheduler is not None:
            return StepMetadata(prefill=self._roles.prefill_scheduler.build_step(scheduler_output))
        if self._roles.decode_scheduler is not None:
            return StepMetadata(decode=self._roles.decode_scheduler.build_step())
        return StepMetadata()

    def has_pending_push_work(self) -> bool:
        return self._roles.prefill_scheduler is not None and self._roles.prefill_scheduler.must_step()

    def update_connector_output(self, connector_output: Any) -> None:
        news = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._roles.prefill_scheduler is not None:
            if isinstance(news, WorkerNews):
                self._roles.prefill_scheduler.missed(news.missed)
                self._roles.prefill_scheduler.failed(news.failures)
            compat.filter_ids(connector_output.finished_sending, self._roles.prefill_scheduler.released)
        if self._roles.decode_scheduler is not None:
            if isinstance(news, WorkerNews):
                self._roles.decode_scheduler.ended(news.ends)
            compat.filter_ids(connector_output.finished_recving, self._roles.decode_scheduler.received)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._roles.prefill_scheduler is not None:
            return self._roles.prefill_scheduler.finished(request, bool(block_ids))
        if self._roles.decode_scheduler is not None:
            return False, self._roles.decode_scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])


def _install_patience(engine: Engine) -> None:
    from vllm.platforms import current_platform

    if engine.config.observe.patient:
        patience.install_nap()
    mode = engine.config.observe.patient_shm
    if mode == "on" or (mode == "auto" and current_platform.is_cpu()):
        patience.install_shm()
