# SPDX-License-Identifier: Apache-2.0
"""A model runner that drives P's worker the way vllm-ascend does.

Differences from vLLM: caches are tuples `[block, token, head, dim]`, the layer's name is often empty, hooks fire in
dummy runs with no metadata bound, and layers inside a captured graph fire none.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unit.regroup.common import LOOPBACK, NAME
from unit.regroup.prefill import HOOKS, ComputedTokens, Layer, Parts, RegroupPrefillRank, WorkerReport
from vllm_ascend_pd.device.caches import Caches, CacheShape
from vllm_ascend_pd.engine import Engine
from vllm_ascend_pd.metadata import PrefillStep
from vllm_ascend_pd.prefill.worker.role import PrefillWorker
from vllm_ascend_pd.prefill.worker.runtime import PushRuntime
from vllm_ascend_pd.roles import StepMetadata
from vllm_ascend_pd.transport.base import Wire


@dataclass(frozen=True)
class GivenEngine(Engine):
    """An engine with the transfer engine of the test."""

    wire: Wire | None = None

    def create_wire(self, *_: Any, **__: Any) -> Wire:
        assert self.wire is not None
        return self.wire


class AscendRank(RegroupPrefillRank):
    """One worker of P behind its real `PrefillWorker`."""

    worker: PrefillWorker

    def _start(self, caches: Caches, parts: Parts) -> PushRuntime:
        cache = self.cache
        given = GivenEngine(self.push, uuid.uuid4().hex[:16], "an engine", NAME, LOOPBACK, None, wire=self.transport)
        shape = CacheShape(cache.block, len(self.memory.heads), cache.heads, cache.dim, cache.tp)
        self.worker = PrefillWorker(given, shape, self.device, self.contributor, self.place)
        self.dummy_run()  # memory profiling, before there are caches
        self.worker.register_kv_caches(self.memory.tensors)
        assert self.worker.runtime is not None
        return self.worker.runtime

    def run(self, step: PrefillStep, shares: Sequence[ComputedTokens], hook: str, ended: Sequence[str]) -> WorkerReport:
        self.worker.preempt(StepMetadata(prefill=step))
        self.worker.bind(StepMetadata(prefill=step))
        if shares:
            RUNS.get(hook, HOOKS["none"])(self, lambda local_layer: self.write(local_layer, shares))
        if hook != "no end":
            self.worker.end_step()
        return WorkerReport(set(self.worker.ended(ended).sent), list(self.worker.news().missed))

    def fire(self, local_layer: int) -> None:
        self.worker.save_layer(self.names[local_layer])

    def dummy_run(self) -> None:
        """Run a forward without requests: every hook fires, nothing is computed."""
        for local_layer in range(len(self.names)):
            self.fire(local_layer)

    def close(self) -> None:
        self.worker.close()


def by_name(rank: AscendRank, write: Layer) -> None:
    for local_layer in range(len(rank.names)):
        write(local_layer)
        rank.fire(local_layer)


def twice(rank: AscendRank, write: Layer) -> None:
    for local_layer in range(len(rank.names)):
        write(local_layer)
        rank.fire(local_layer)
        rank.fire(local_layer)


def with_unregistered(rank: AscendRank, write: Layer) -> None:
    """Fire hooks of unregistered layers too: a draft model's, and one without a name."""
    for local_layer in range(len(rank.names)):
        write(local_layer)
        rank.worker.save_layer("")
        rank.worker.save_layer("model.draft.attn")
        rank.fire(local_layer)


RUNS: dict[str, Callable[[AscendRank, Layer], None]] = {
    "by name": by_name,
    "twice": twice,
    "with unregistered": with_unregistered,
    "no end": by_name,
}
