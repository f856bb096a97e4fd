# SPDX-License-Identifier: Apache-2.0
"""What a connector's role is asked, in the scheduler's process and in a worker, and what travels between the two.

Each default is the answer of a role that has nothing to do with the question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.first_token import Around
from vllm_ascend_pd.metadata import DecodeStep, Exchanged, LoadEnd, PrefillStep

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

    missed: frozenset[Exchanged] = frozenset()
    failures: frozenset[tuple[str, str]] = frozenset()
    ends: frozenset[LoadEnd] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if not isinstance(other, WorkerNews):
            return self
        return WorkerNews(self.missed | other.missed, self.failures | other.failures, self.ends | other.ends)


@dataclass(frozen=True, slots=True)
class Ended:
    """Requests that a worker reports to vLLM after a step."""

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()  # well or not
    failed: frozenset[str] = frozenset()
    invalid_blocks: frozenset[int] = frozenset()  # of those that failed


class SchedulerRole:
    """In the scheduler's process. Without a role of its own it is the answer to everything."""

    def attach_workers(self, workers: Mapping[tuple[int, int], WorkerFacts]) -> None:
        """By (stage, rank)."""

    def arrived(self, request: Any) -> None:
        """vLLM has taken the request in, and not scheduled it yet."""

    def wanted(self, request: Any, computed: int) -> int:
        """Tokens to load remotely beyond `computed`."""
        return 0

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], count: int) -> None:
        """vLLM schedules the request; `count` tokens are to be loaded into `blocks`, its tables by group."""

    def metadata(self, output: Any) -> StepMetadata:
        """Translate one SchedulerOutput."""
        return StepMetadata()

    def must_step(self) -> bool:
        """Whether the engine must step although it has nothing to compute."""
        return False

    def open_loads(self) -> int:
        """Requests that may be waited for politely; negative if nobody may sleep."""
        return 0

    def heard(self, news: WorkerNews) -> None:
        """What the workers tell, before `released` and `received` are asked."""

    def released(self, request_id: str) -> bool:
        """All workers have reported it: whether it was a push of ours."""
        return False

    def received(self, request_id: str) -> bool:
        """All workers have reported it: whether it was a load of ours."""
        return False

    def holds(self, request_id: str) -> bool:
        """Whether vLLM is not to hear yet that a load is over."""
        return False

    def around(self) -> tuple[Around, ...]:
        """What is to be done around a step's outputs."""
        return ()

    def request_finished(self, request: Any, holds_blocks: bool) -> tuple[bool, dict[str, Any] | None]:
        """The request ended: whether its blocks are held, and what its answer says."""
        return False, None

    def stats(self) -> dict[str, Any] | None:
        return None

    def close(self) -> None:
        """Idempotent."""


class WorkerRole:
    """In a worker. Without a role of its own it is the answer to everything."""

    def register_kv_caches(self, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        """Once, before the first step."""

    def handshake(self) -> WorkerFacts | None:
        return None

    def preempt(self, step: StepMetadata) -> None:
        """Before blocks are overwritten."""

    def bind(self, step: StepMetadata) -> None:
        """Before the forward pass."""

    def save_layer(self, name: str) -> None:
        """A layer's hook fired."""

    def end_step(self) -> None:
        """After the forward pass."""

    def ended(self, requests: Iterable[str]) -> Ended:
        """`requests` are those that vLLM has finished."""
        return Ended()

    def news(self) -> WorkerNews:
        """For the scheduler, since the last call."""
        return WorkerNews()

    def stats(self) -> dict[str, Any] | None:
        return None

    def close(self) -> None:
        """Idempotent."""
