# SPDX-License-Identifier: Apache-2.0
"""AscendPushConnector: the thin class that vLLM calls. It builds one role object and delegates to it.

A role is prefill or decode (`kv_role`), in the scheduler's process or in a worker (roles.py). Importing this
module needs neither an NPU nor a transfer engine: the API server imports the class.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_ascend_pd import admission
from vllm_ascend_pd.decode.scheduler.role import DecodeScheduler
from vllm_ascend_pd.engine import Engine, WorkerFacts
from vllm_ascend_pd.errors import not_proven
from vllm_ascend_pd.observe.metrics import PushPromMetrics, PushStats
from vllm_ascend_pd.observe.trace import TraceFile
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler
from vllm_ascend_pd.roles import EndedRequests, SchedulerRole, StepMetadata, WorkerNews, WorkerRole
from vllm_ascend_pd.vllm_patches import (
    accepted,
    compat,
    first_token,
    front_end,
    given_tokens,
    masks,
    older_groups,
    patience,
    resets,
    single_token_steps,
    standstill,
    step_hooks,
    tried,
)

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


log = logging.getLogger(__name__)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Facts of one worker, sent to its scheduler once."""

    facts: WorkerFacts


class AscendPushConnector(KVConnectorBase_V1, SupportsHMA, step_hooks.HasStepHooks, resets.FollowsEngine):
    """Layerwise push of the KV cache, P to D. See docs/protocol.md."""

    # vLLM's name, for its usage and metrics: loaded tokens come from another engine.
    _cache_hit_source = compat.FROM_PEER
    tables: Any = None  # the scheduler's block tables, where vLLM does not hand them over itself (older_groups.py)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine = Engine.of(vllm_config)
        if kv_cache_config is not None:
            admission.check_groups(kv_cache_config)
        self._engine = engine
        self._transfer = vllm_config.kv_transfer_config
        self.patience = patience.Patience(
            lambda: self.scheduler_role.nap_budget(),  # noqa: PLW0108  (the role of the moment: it is replaced below)
            lambda: self.scheduler_role.due_s(),  # noqa: PLW0108
        )
        self.scheduler_role, self.worker_role = SchedulerRole(), WorkerRole()  # these do nothing; one is replaced below
        self._legacy_invalid_blocks: set[int] = set()
        self._groups = tuple(range(len(kv_cache_config.kv_cache_groups))) if kv_cache_config is not None else (0,)
        self._grouped = kv_cache_config is not None and admission.is_grouped(kv_cache_config)
        scheduler = role == KVConnectorRole.SCHEDULER
        self._is_worker = not scheduler
        self._trace = self._start_trace(vllm_config.kv_transfer_config, scheduler)
        if engine.config.observe.patient and vllm_config.parallel_config.data_parallel_size == 1:
            patience.install_nap()  # ranks that step together (with experts) would all wait for the one that sleeps
        if scheduler:
            by_request = kv_cache_config is not None and admission.older_scheduler(vllm_config, kv_cache_config)
            blocks = kv_cache_config.num_blocks if kv_cache_config is not None else 0
            computes = kv_cache_config is None or not admission.computes_no_prompts(kv_cache_config)
            facts = {"fails": by_request, "computes_prompts": computes}
            self.scheduler_role = _scheduler(engine, vllm_config, blocks, self.patience, **facts)
        else:
            self.worker_role = _worker(engine, vllm_config, kv_cache_config)
        self.step_hooks = self.scheduler_role.step_hooks()
        for hooks in self.step_hooks:
            hooks.settle(vllm_config)

    def _start_trace(self, transfer: Any, scheduler: bool) -> TraceFile | None:
        directory = self._engine.config.observe.trace_dir
        role = "prefill" if transfer.is_kv_producer else "decode"
        name = f"{role}-{'scheduler' if scheduler else 'worker'}"
        return TraceFile(directory, name) if directory else None

    # -- class-level questions

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether full graphs must not be used, because they would skip P's layer hooks.

        vLLM does not pass the role. A configuration with one of D's allow-lists is D's, and keeps its full graphs. A P
        that has such a list too, and full graphs, is refused (admission).
        """
        return not {"metaserver_urls", "prefill_listeners"} & set(extra_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return False: sleeping takes away memory into which, or from which, others write. vLLM asks from 0.33 on."""
        return False

    # -- worker

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        if not admission.is_alone(self):
            admission.check_contained(grouped=self._grouped, heads_in_int8=self.worker_role.heads_in_int8)
        self.worker_role.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        facts = self.worker_role.handshake()
        return Handshake(facts) if facts is not None else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, StepMetadata):
            self.worker_role.preempt(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepMetadata):
            self.worker_role.bind(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: P writes into D's memory, and pushes are prepared when the metadata is bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled only when its KV is complete."""

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        """Called by vllm-ascend between a layer's write into the cache and its attention; with GQA without a name."""
        self.worker_role.layer_written(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.worker_role.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self.worker_role.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        ended = self._ended(finished_req_ids)
        return compat.transfer_results(ended.sent, ended.received, ended.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended = self._ended(finished_req_ids)
        return set(ended.sent) or None, set(ended.received) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        # Failed requests are named by get_transfer_results where vLLM has it; block ids are the older way.
        # Of several groups vLLM cannot use them: the scheduler's side fails the request (older_groups.py).
        invalid, self._legacy_invalid_blocks = self._legacy_invalid_blocks, set()
        return set() if compat.HAS_TRANSFER_RESULTS or self._grouped else invalid

    def _ended(self, finished_req_ids: set[str]) -> EndedRequests:
        ended = self.worker_role.ended(finished_req_ids)
        self._legacy_invalid_blocks.update(ended.invalid_blocks)
        return ended

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        news = self.worker_role.news()
        return news if news != WorkerNews() else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        data = self.worker_role.stats() or self.scheduler_role.stats()
        if data is None and self._is_worker and not compat.HAS_TRANSFER_RESULTS:
            data = {}  # before 0.30 vLLM asks the scheduler's side only in steps in which a worker reports something
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
        self.worker_role.close()
        self.scheduler_role.close()
        if self._trace is not None:
            self._trace.close()

    # -- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): facts for rank, facts in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Receive the workers' facts by stage and TP rank. vllm-ascend has the PCP rank between these two."""
        by_worker: dict[tuple[int, ...], WorkerFacts] = {
            key: shake.facts for key, shake in metadata.items() if isinstance(shake, Handshake)
        }
        workers = {
            (stage, pcp[0] * facts.geometry.tp_size + tp if pcp else tp): facts
            for (stage, *pcp, tp), facts in by_worker.items()
        }
        self.scheduler_role.attach_workers(workers)
        role = "prefill" if self._transfer.is_kv_producer else "decode"
        log.info("%s", self._engine.summary(role, workers))

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._groups

    def on_new_request(self, request: Any) -> None:
        self.scheduler_role.arrived(request)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Return whether D may have attention blocks of a prefix without its state: P sends that in any case."""
        return not self._transfer.is_kv_producer

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self.scheduler_role.wanted(request, num_computed_tokens)
        return count, count is not None and count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler_role.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        with older_groups.lent(scheduler_output, self.tables) as output:
            return self.scheduler_role.metadata(output)

    def preempted(self, request_id: str) -> None:
        self.scheduler_role.preempted(request_id)

    def pauses(self, paused: bool) -> None:
        self.scheduler_role.pauses(paused)

    def weights(self, version: str) -> None:
        self._engine.weights.version = version
        self.scheduler_role.reset()

    def reset_cache(self) -> bool:
        self.scheduler_role.reset()
        return True

    def has_pending_push_work(self) -> bool:
        return self.scheduler_role.must_step()

    def update_connector_output(self, connector_output: Any) -> None:
        news = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(news, WorkerNews):
            self.scheduler_role.take_news(news)
        # Behind a MultiConnector, reports of other connectors are among these: unknown here, they stay for vLLM.
        for request_id in sorted(connector_output.finished_sending or ()):
            self.scheduler_role.released(request_id)
        for request_id in sorted(connector_output.finished_recving or ()):
            self.scheduler_role.received(request_id)
            if self.scheduler_role.holds(request_id):
                connector_output.finished_recving.discard(request_id)  # vLLM learns of it with its first token

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_role.request_finished(request, bool(block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_role.request_finished(request, any(block_ids))


def _scheduler(
    engine: Engine, vllm_config: Any, blocks: int, waiting: patience.Patience, *, fails: bool, computes_prompts: bool
) -> SchedulerRole:
    transfer = vllm_config.kv_transfer_config
    resets.install(vllm_config)
    lacks = {}  # by change of vLLM, why it is off here
    if first := engine.config.wire.first_token != "off":
        lacks[tried.FIRST_TOKEN] = first_token.install(vllm_config)
        first = not lacks[tried.FIRST_TOKEN]
        lacks[tried.GRAMMARS] = first_token.other_grammars() if first else ""
    made: PrefillScheduler | DecodeScheduler
    if transfer.is_kv_producer:
        made = PrefillScheduler(engine, waiting.news, blocks, sends_first=first)
    else:
        if first:
            lacks[tried.GIVEN] = given_tokens.unproven(vllm_config) or front_end.unfit()
        lacks[tried.STANDSTILL] = standstill.install(vllm_config)
        if not computes_prompts and (why := step_hooks.wrap_outputs(vllm_config.scheduler_config.get_scheduler_cls())):
            raise not_proven(f"Heads in int8 where {why}", "Use a release that docs/matrix.md names.")
        facts = {
            "recomputes": getattr(transfer, "kv_load_failure_policy", "") == "recompute",
            "longest": vllm_config.model_config.max_model_len,
            "vocabulary": int(vllm_config.model_config.get_vocab_size()) if first else 0,
            "whole": step_hooks.can_fail(),
            "fails": fails,
            "computes_prompts": computes_prompts,
            "yields": not lacks[tried.STANDSTILL],
            "gives": first and not lacks[tried.GIVEN],
        }
        made = DecodeScheduler(engine, waiting, **facts)
    for change, why in lacks.items():
        if why:
            made.tally.raise_level("hooks_off")
            log.warning("%s", tried.off(change, why))
    return made


def _worker(engine: Engine, vllm_config: Any, kv_cache_config: Any) -> WorkerRole:
    """Return the worker's role. What needs a device is imported here: the API server, which has none, imports this
    module too.
    """
    from vllm_ascend_pd.device.current import current

    shape = admission.cache_shape(vllm_config, kv_cache_config)
    parallel = vllm_config.parallel_config
    stage, rank = divmod(parallel.rank, parallel.tensor_parallel_size * shape.pcp)
    stage %= parallel.pipeline_parallel_size
    if why := masks.install():
        log.warning("%s", tried.off(tried.MASKS, why))
    if vllm_config.kv_transfer_config.is_kv_consumer:
        from vllm_ascend_pd.decode.worker.role import DecodeWorker

        why_no_first_token = (
            first_token.install_on_worker(vllm_config) if engine.config.wire.first_token != "off" else "off"
        )
        if why := accepted.install(vllm_config):
            log.warning("%s", tried.off(tried.ACCEPTED, why))
        return DecodeWorker(engine, shape, current(), stage, rank, why_no_first_token)
    if shape.int8_scales and (why := single_token_steps.install()):
        raise not_proven(f"A prefill engine for heads in int8 where {why}", "Use a release that docs/matrix.md names.")
    from vllm_ascend_pd.prefill.worker.role import PrefillWorker
    from vllm_ascend_pd.protocol.identity import Contributor
    from vllm_ascend_pd.regroup.core.world import EngineWorld

    world = EngineWorld.of(parallel, shape.pcp, vllm_config.scheduler_config.max_num_batched_tokens)
    return PrefillWorker(engine, shape, current(), Contributor(stage, rank), world)
