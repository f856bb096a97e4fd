# SPDX-License-Identifier: Apache-2.0
"""Interfaces of a connector's role, in the scheduler's process and in a worker, and the data sent between the two.

Each default is the answer of a role that the call does not concern.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.metadata import DecodeStep, LoadEnd, MissedExchange, PrefillStep
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.vllm_patches.step_hooks import StepHooks

if TYPE_CHECKING:
    import torch


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step, scheduler → workers."""

    prefill: PrefillStep | None = None
    decode: DecodeStep | None = None


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """Workers → scheduler, after a step. P's: exchanges to be made again, pushes that failed. D's: loads that ended."""

    missed: frozenset[MissedExchange] = frozenset()
    failures: frozenset[tuple[str, Failure]] = frozenset()
    ends: frozenset[LoadEnd] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if not isinstance(other, WorkerNews):
            return self
        return WorkerNews(self.missed | other.missed, self.failures | other.failures, self.ends | other.ends)


@dataclass(frozen=True, slots=True)
class EndedRequests:
    """Requests that a worker reports to vLLM after a step."""

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()  # successfully or not
    failed: frozenset[str] = frozenset()
    invalid_blocks: frozenset[int] = frozenset()  # of those that failed


class SchedulerRole:
    """A role in the scheduler's process. The class itself is for a process without one: it does nothing."""

    def attach_workers(self, workers: Mapping[tuple[int, int], WorkerFacts]) -> None:
        """Receive the workers' facts, by (stage, rank)."""

    def arrived(self, request: Any) -> None:
        """Handle a request that vLLM has accepted, and not scheduled yet."""

    def wanted(self, request: Any, computed: int) -> int | None:
        """Return how many tokens to load remotely beyond `computed`; None: the request cannot be scheduled yet."""
        return 0

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], count: int) -> None:
        """Handle a request that vLLM schedules. `count` tokens are to be loaded into `blocks`, its tables by group."""

    def preempted(self, request_id: str) -> None:
        """Handle a preemption that vLLM lists in no step (resets.py)."""

    def pauses(self, paused: bool) -> None:
        """Handle the engine's pause, its end, or the beginning of its shutdown (resets.py)."""

    def reset(self) -> None:
        """Free what is held for others: the engine's caches are cleared, or it has other weights."""

    def metadata(self, output: Any) -> StepMetadata:
        """Translate one SchedulerOutput."""
        return StepMetadata()

    def must_step(self) -> bool:
        """Return whether the engine must step although it has nothing to compute."""
        return False

    def nap_budget(self) -> int | None:
        """Return how many requests the engine core may nap for; None if it must not nap."""
        return 0

    def due_s(self) -> float:
        """Time until the scheduler must look by itself: no news wakes it then."""
        return math.inf

    def take_news(self, news: WorkerNews) -> None:
        """Handle the workers' news, before `released` and `received` are called."""

    def released(self, request_id: str) -> bool:
        """Record that all workers have reported a request. Return whether it was a push of ours."""
        return False

    def received(self, request_id: str) -> bool:
        """Record that all workers have reported a request. Return whether it was a load of ours."""
        return False

    def holds(self, request_id: str) -> bool:
        """Return whether the end of a load is still withheld from vLLM."""
        return False

    def step_hooks(self) -> tuple[StepHooks, ...]:
        """Return what acts before and after vLLM reads a step's outputs."""
        return ()

    def request_finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request. Return whether its blocks are held, and what its answer says."""
        return False, None

    def stats(self) -> dict[str, Any] | None:
        return None

    def close(self) -> None:
        """Release all resources. Idempotent."""


class WorkerRuntime(Protocol):
    """Part of a role that runs once the worker's KV caches are registered."""

    def stats(self) -> dict[str, Any] | None: ...
    def close(self) -> None: ...


class WorkerRole:
    """A role in a worker's process. The class itself is for a process without one: it does nothing."""

    heads_in_int8 = False  # on D; P makes them on the way
    runtime: WorkerRuntime | None = None
    _facts: WorkerFacts | None = None

    def register_kv_caches(self, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        """Receive the KV caches, once, before the first step."""

    def handshake(self) -> WorkerFacts | None:
        return self._facts

    def preempt(self, step: StepMetadata) -> None:
        """Act before blocks of preempted requests are overwritten."""

    def bind(self, step: StepMetadata) -> None:
        """Begin a step, before the forward pass."""

    def layer_written(self, name: str) -> None:
        """Record that a layer's cache is written, before its hook. Not every engine says so."""

    def save_layer(self, name: str) -> None:
        """Record that a layer's hook fired."""

    def end_step(self) -> None:
        """End a step, after the forward pass."""

    def ended(self, requests: Iterable[str]) -> EndedRequests:
        """Return what has ended here. `requests` are those that vLLM has finished."""
        return EndedRequests()

    def news(self) -> WorkerNews:
        """Return the news for the scheduler since the last call."""
        return WorkerNews()

    def stats(self) -> dict[str, Any] | None:
        return None if self.runtime is None else self.runtime.stats()

    def close(self) -> None:
        """Release all resources. Idempotent."""
        if self.runtime is not None:
            self.runtime.close()
