# SPDX-License-Identifier: Apache-2.0
"""P's worker as vLLM sees it: the hooks of one step, translated for the push runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import CacheShape
from vllm_ascend_pd.engine import Engine, WorkerFacts
from vllm_ascend_pd.prefill.worker.core.register import PushSite
from vllm_ascend_pd.prefill.worker.runtime import PushRuntime
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.regroup.core.world import EngineWorld
from vllm_ascend_pd.regroup.quantise import describe_for_decode
from vllm_ascend_pd.regroup.resources import allocate
from vllm_ascend_pd.roles import EndedRequests, StepMetadata, WorkerNews, WorkerRole


class PrefillWorker(WorkerRole):
    """P's role in a worker's process. The runtime starts when the KV caches are registered."""

    runtime: PushRuntime | None = None

    def __init__(
        self, engine: Engine, shape: CacheShape, device: Device, contributor: Contributor, world: EngineWorld
    ) -> None:
        self._engine, self._shape, self._device, self._contributor = engine, shape, device, contributor
        self._world, self.heads_in_int8 = world, bool(shape.int8_scales)

    def register_kv_caches(self, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        caches, make_images = describe_for_decode(tensors, self._shape, self._device, self._contributor.rank)
        site = PushSite(self._engine.incarnation, self._contributor, self._engine.model)
        self.runtime = PushRuntime(
            self._engine.config,
            site,
            caches,
            self._device,
            self._engine.create_wire(self._device.attach_thread),
            self._engine.secrets,
            allocate(self._engine.config, self._world, caches, self._device, make_images),
        )
        self._facts = WorkerFacts(None, caches.geometry, kernel_blocks=caches.kernel_blocks)

    def preempt(self, step: StepMetadata) -> None:
        if self.runtime is not None and step.prefill is not None and step.prefill.preempted:
            self.runtime.preempt(step.prefill.preempted)

    def bind(self, step: StepMetadata) -> None:
        """Begin a step. Raise PdError if this worker can never push again: it ends the engine, and /health shows it."""
        if self.runtime is not None and step.prefill is not None:
            self.runtime.check()
            self.runtime.steps.begin(step.prefill)

    def layer_written(self, name: str) -> None:
        if self.runtime is not None:
            self.runtime.steps.written(name)

    def save_layer(self, name: str) -> None:
        if self.runtime is not None:
            self.runtime.steps.computed(name)

    def end_step(self) -> None:
        if self.runtime is not None:
            self.runtime.steps.end()

    def ended(self, requests: Iterable[str]) -> EndedRequests:
        sent = self.runtime.take_finished(requests) if self.runtime is not None else ()
        return EndedRequests(sent=frozenset(sent))

    def news(self) -> WorkerNews:
        return WorkerNews() if self.runtime is None else self.runtime.take_news()
