# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on CPUs, for tests: two collectives that vLLM 0.32 lacks there, and a kernel for local experts.

Parts of unequal length are padded, or everything is sent to all. Without this plug-in an engine with data and expert
parallelism fails in its first request on a CPU: the kernel takes the number of another rank's expert for one of its
own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    CPUUnquantizedExperts.apply = of_those_here(CPUUnquantizedExperts.apply)


def of_those_here(apply: Callable[..., None]) -> Callable[..., None]:
    """Give other ranks' experts the weight 0; the sum over the ranks contains each expert once."""

    @functools.wraps(apply)
    def applied(self: Any, *given: Any, **named: Any) -> None:
        bound = inspect.signature(apply).bind(self, *given, **named)
        said = bound.arguments
        if said["expert_map"] is not None:
            local_ids = said["expert_map"][said["topk_ids"].long()]
            said["topk_weights"] = said["topk_weights"] * (local_ids >= 0)
            said["topk_ids"] = local_ids.clamp(min=0).to(said["topk_ids"].dtype)
        apply(*bound.args, **bound.kwargs)

    return applied


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Concatenate all ranks' rows, sizes[r] of them from rank r."""
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    rows = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(rows), *input_.shape[1:]))
    padded[: len(input_)] = input_
    gathered = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """Return this rank's rows of the sum over all ranks."""
    rows = sizes or [len(input_) // self.world_size] * self.world_size
    summed = input_.contiguous().clone()
    dist.all_reduce(summed, group=self.device_group)
    return summed.split(rows)[self.rank_in_group].clone()
