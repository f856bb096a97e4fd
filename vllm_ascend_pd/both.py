# SPDX-License-Identifier: Apache-2.0
"""Both roles in one engine (`kv_both`): a request's `kv_transfer_params` name its role; the roles are independent.

They share vLLM's block pool, and a process; each has its own book, threads and transfer engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.first_token import StepHooks
from vllm_ascend_pd.observe.metrics import PushStats
from vllm_ascend_pd.protocol.dialects import is_prefill
from vllm_ascend_pd.roles import EndedRequests, SchedulerRole, StepMetadata, WorkerNews, WorkerRole

if TYPE_CHECKING:
    import torch


class BothScheduler(SchedulerRole):
    def __init__(self, prefill: SchedulerRole, decode: SchedulerRole) -> None:
        self._prefill, self._decode = prefill, decode

    def _role_of(self, request: Any) -> SchedulerRole:
        return self._prefill if is_prefill(request.kv_transfer_params) else self._decode

    def attach_workers(self, workers: Mapping[tuple[int, int], WorkerFacts]) -> None:
        self._prefill.attach_workers(workers)
        self._decode.attach_workers(workers)

    def arrived(self, request: Any) -> None:
        self._role_of(request).arrived(request)

    def wanted(self, request: Any, computed: int) -> int:
        return self._role_of(request).wanted(request, computed)

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], count: int) -> None:
        self._role_of(request).allocated(request, blocks, count)

    def preempted(self, request_id: str) -> None:
        self._prefill.preempted(request_id)

    def pauses(self, paused: bool) -> None:
        self._prefill.pauses(paused)

    def reset(self) -> None:
        self._prefill.reset()

    def metadata(self, output: Any) -> StepMetadata:
        return StepMetadata(self._prefill.metadata(output).prefill, self._decode.metadata(output).decode)

    def must_step(self) -> bool:
        return self._prefill.must_step() or self._decode.must_step()

    def open_loads(self) -> int:
        counts = self._prefill.open_loads(), self._decode.open_loads()
        return min(counts) if min(counts) < 0 else sum(counts)  # negative: the engine must not nap

    def due_s(self) -> float:
        return min(self._prefill.due_s(), self._decode.due_s())

    def take_news(self, news: WorkerNews) -> None:
        self._prefill.take_news(news)
        self._decode.take_news(news)

    def released(self, request_id: str) -> bool:
        return self._prefill.released(request_id)

    def received(self, request_id: str) -> bool:
        return self._decode.received(request_id)

    def holds(self, request_id: str) -> bool:
        return self._decode.holds(request_id)

    def around(self) -> tuple[StepHooks, ...]:
        return (*self._prefill.around(), *self._decode.around())

    def request_finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        return self._role_of(request).request_finished(request, holds_blocks)

    def stats(self) -> dict[str, Any] | None:
        return _added_stats(self._prefill.stats(), self._decode.stats())

    def close(self) -> None:
        _close(self._prefill, self._decode)


class BothWorker(WorkerRole):
    def __init__(self, prefill: WorkerRole, decode: WorkerRole) -> None:
        self._prefill, self._decode = prefill, decode

    def register_kv_caches(self, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        self._prefill.register_kv_caches(tensors)
        self._decode.register_kv_caches(tensors)

    def handshake(self) -> WorkerFacts | None:
        return self._decode.handshake()  # P's facts of the same cache lack an endpoint

    def preempt(self, step: StepMetadata) -> None:
        self._prefill.preempt(step)
        self._decode.preempt(step)

    def bind(self, step: StepMetadata) -> None:
        self._prefill.bind(step)
        self._decode.bind(step)

    def save_layer(self, name: str) -> None:
        self._prefill.save_layer(name)
        self._decode.save_layer(name)

    def end_step(self) -> None:
        self._prefill.end_step()
        self._decode.end_step()

    def ended(self, requests: Iterable[str]) -> EndedRequests:
        requests = frozenset(requests)
        return dataclasses.replace(self._decode.ended(requests), sent=self._prefill.ended(requests).sent)

    def news(self) -> WorkerNews:
        prefill, decode = self._prefill.news(), self._decode.news()
        return dataclasses.replace(prefill, ends=decode.ends)

    def stats(self) -> dict[str, Any] | None:
        return _added_stats(self._prefill.stats(), self._decode.stats())

    def close(self) -> None:
        _close(self._prefill, self._decode)


def _close(prefill: SchedulerRole | WorkerRole, decode: SchedulerRole | WorkerRole) -> None:
    """Close both, even if closing the first one raises."""
    try:
        prefill.close()
    finally:
        decode.close()


def _added_stats(prefill: dict[str, Any] | None, decode: dict[str, Any] | None) -> dict[str, Any] | None:
    if prefill is None or decode is None:
        return decode if prefill is None else prefill
    return PushStats(data=prefill).aggregate(PushStats(data=decode)).data
