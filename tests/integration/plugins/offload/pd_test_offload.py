# SPDX-License-Identifier: Apache-2.0
"""Copies for vLLM's OffloadingConnector on a CPU, by its own way in for other media (`spec_module_path`).

vLLM's own spec stops the start there ("CPU Offloading is currently only supported on CUDA-alike and XPU GPUs"): its
copies need an accelerator's streams. Scheduler, manager, keys, events and reports stay vLLM's; only the copies are
these.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class Copies(OffloadingWorker):
    """Copies between the cache and a buffer of the same rows, at once; reported with the next step."""

    def __init__(self, caches: CanonicalKVCaches, rows: int) -> None:
        self._caches = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in caches.tensors]
        self._buffers = [torch.zeros(rows, cache.shape[1], dtype=torch.int8) for cache in self._caches]
        self._results: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        for cache, buffer in zip(self._caches, self._buffers, strict=True):
            buffer[_rows(dst_spec)] = cache[_rows(src_spec)]
        return self._succeeded(job_id)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for cache, buffer in zip(self._caches, self._buffers, strict=True):
            cache[_rows(dst_spec)] = buffer[_rows(src_spec)]
        return self._succeeded(job_id)

    def _succeeded(self, job_id: int) -> bool:
        self._results.append(TransferResult(job_id, success=True, transfer_size=1, transfer_time=1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None: ...


def _rows(spec: LoadStoreSpec) -> torch.Tensor:
    assert isinstance(spec, (GPULoadStoreSpec, CPULoadStoreSpec))
    return torch.from_numpy(spec.block_ids).long()


class CopyingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1 and not self.replicated_layout
        return Copies(kv_caches, self.num_chunks)
