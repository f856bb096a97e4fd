# SPDX-License-Identifier: Apache-2.0
"""P's worker as vLLM sees it: the hooks of one step, translated for the push runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import CacheShape, describe
from vllm_ascend_pd.engine import Engine, WorkerFacts
from vllm_ascend_pd.prefill.core.pushes import PushSite
from vllm_ascend_pd.prefill.decisions import Exchanged, PrefillStep
from vllm_ascend_pd.prefill.runtime import PushRuntime
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.regroup.parts import Place, allocate

NO_STEP = PrefillStep(rotation=0)


class PrefillWorker:
    """Created with the worker; the runtime starts when the KV caches are registered."""

    def __init__(
        self, engine: Engine, shape: CacheShape, device: Device, contributor: Contributor, place: Place
    ) -> None:
        self._engine, self._shape, self._device, self._contributor = engine, shape, device, contributor
        self._place = place
        self._runtime: PushRuntime | None = None
        self._facts: WorkerFacts | None = None

    def register_kv_caches(self, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        caches = describe(tensors, self._shape, self._device)
        site = PushSite(self._engine.incarnation, self._contributor, self._engine.model)
        self._runtime = PushRuntime(
            self._engine.config,
            site,
            caches,
            self._device,
            self._engine.create_transport(self._device.attach_thread),
            self._engine.secrets,
            allocate(self._engine.config, self._place, caches, self._device),
        )
        self._facts = WorkerFacts(None, caches.geometry)

    def handshake(self) -> WorkerFacts | None:
        return self._facts

    def preempt(self, step: PrefillStep) -> None:
        if self._runtime is not None and step.preempted:
            self._runtime.preempt(step.preempted)

    def check(self) -> None:
        """Raises PdError when this worker can never push again: the engine must end, so that /health says so."""
        if self._runtime is not None:
            self._runtime.check()

    def bind(self, step: PrefillStep) -> None:
        if self._runtime is not None:
            self._runtime.begin_step(step)

    def save_layer(self, name: str) -> None:
        if self._runtime is not None:
            self._runtime.layer_computed(name)

    def end_step(self) -> None:
        if self._runtime is not None:
            self._runtime.end_step()

    def failures(self) -> list[tuple[str, str]]:
        return [] if self._runtime is None else self._runtime.take_failures()

    def stats(self) -> dict[str, Any] | None:
        return None if self._runtime is None else self._runtime.tally.take()

    def missed_exchanges(self) -> list[Exchanged]:
        return [] if self._runtime is None else self._runtime.missed_exchanges()

    def finished(self, ended: Iterable[str]) -> set[str]:
        return set() if self._runtime is None else self._runtime.take_finished(ended)

    def close(self) -> None:
        if self._runtime is not None:
            self._runtime.close()
