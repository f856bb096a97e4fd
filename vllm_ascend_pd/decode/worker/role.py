# SPDX-License-Identifier: Apache-2.0
"""D's worker as vLLM sees it: the hooks of one step, translated for the receive runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from vllm_ascend_pd.decode.worker.runtime import ReceiveRuntime, Site
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import CacheShape, describe
from vllm_ascend_pd.engine import Engine, WorkerFacts
from vllm_ascend_pd.metadata import LoadEnd
from vllm_ascend_pd.roles import EndedRequests, StepMetadata, WorkerNews, WorkerRole


class DecodeWorker(WorkerRole):
    """D's role in a worker's process. The runtime starts when the KV caches are registered."""

    runtime: ReceiveRuntime | None = None

    def __init__(
        self, engine: Engine, shape: CacheShape, device: Device, stage: int, rank: int, why_no_first_token: str = ""
    ) -> None:
        """`why_no_first_token`: why its batch cannot go on behind P's first token."""
        self._engine, self._shape, self._device = engine, shape, device
        self._why_no_first_token = why_no_first_token
        self._stage, self._rank, self.heads_in_int8 = stage, rank, bool(shape.int8_scales)
        self._ends: list[LoadEnd] = []

    def register_kv_caches(self, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        engine, channel = self._engine, self._engine.config.channel
        caches = describe(tensors, self._shape, self._device)
        site = Site(
            incarnation=engine.incarnation,
            stage=self._stage,
            rank=self._rank,
            model=engine.model,
            host=engine.host,
            port=engine.port_of(caches.geometry.worker(self._stage, self._rank)),
            advertise_host=channel.advertise_host,
        )
        target = engine.create_target(self._device.attach_thread)
        self.runtime = ReceiveRuntime(engine.config, site, caches, self._device, target, engine.secrets)
        facts = self.runtime.endpoint, caches.geometry, self._why_no_first_token, caches.kernel_blocks
        self._facts = WorkerFacts(*facts)

    def bind(self, step: StepMetadata) -> None:
        if self.runtime is not None and step.decode is not None:
            self.runtime.step(step.decode)

    def ended(self, requests: Iterable[str]) -> EndedRequests:
        ends = self.reports()
        failed = [report for report in ends if not report.ok]
        return EndedRequests(
            received=frozenset(report.request_id for report in ends),
            failed=frozenset(report.request_id for report in failed),
            invalid_blocks=frozenset(block for report in failed for block in report.blocks),
        )

    def reports(self) -> list[LoadEnd]:
        ends = [] if self.runtime is None else self.runtime.take_reports()
        self._ends += ends
        return ends

    def news(self) -> WorkerNews:
        ends, self._ends = self._ends, []
        return WorkerNews(ends=frozenset(ends))
