# SPDX-License-Identifier: Apache-2.0
"""Host versions of the Triton kernels that vllm-ascend starts although there is no Triton here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OnHost:
    """A kernel's interface, `kernel[grid](...)`, over a function on the tensors' memory."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(*arguments: Any, **constants: Any) -> None:
            torch.npu.current_stream().synchronize()
            seen = [torch.ops.ascend_host.host_view(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            self._function(grid, *seen, **constants)

        return start


def slot_mapping(
    grid: tuple[int, ...],
    tokens: int,
    room: int,
    starts: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    _stride: int,
    block_size: int,
    slots: torch.Tensor,
    *,
    PAD_ID: int,  # noqa: N803
    **_constants: Any,
) -> None:
    """Set each token's slot in the paged cache; tokens of request i begin at `starts[i]`. The last program pads."""
    requests = grid[0] - 1
    counts = starts[: requests + 1].diff().long()
    request = torch.arange(requests).repeat_interleave(counts)
    at = positions[: len(request)].long()
    blocks = table[request, at // block_size].long()
    slots[: len(request)] = (blocks * block_size + at % block_size).to(slots.dtype)
    slots[tokens:room] = PAD_ID


def replace() -> None:
    from vllm.v1.worker import block_table

    block_table._compute_slot_mapping_kernel = OnHost(slot_mapping)
