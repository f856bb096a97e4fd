# SPDX-License-Identifier: Apache-2.0
"""Two collectives that vLLM's communicator for CPUs does not have, and that experts spread over data-parallel ranks need.

For tests: parts of unequal length are padded, or all of everything is sent. Without them an engine with data and expert
parallelism ends in its first request on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Every rank's rows behind each other; rank r has sizes[r] of them."""
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    rows = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(rows), *input_.shape[1:]))
    padded[: len(input_)] = input_
    gathered = padded.new_empty((self.world_size, *padded.shape))
    dist.all_gather_into_tensor(gathered, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    rows = sizes or [len(input_) // self.world_size] * self.world_size
    summed = input_.contiguous().clone()
    dist.all_reduce(summed, group=self.device_group)
    return summed.split(rows)[self.rank_in_group].clone()
