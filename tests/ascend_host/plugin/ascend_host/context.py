# SPDX-License-Identifier: Apache-2.0
"""Functions over Triton kernels with which ranks of context parallelism merge their attention, since vllm-ascend 0.30.

A rank has attention over its part of the tokens for more heads, or more queries, than its own. Outputs go to the ranks
whose heads or queries they are, each with the logarithm of its row's sum, in one message; there they are merged.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def pack_dcp_output_lse(partial_output: Tensor, softmax_lse: Tensor, dcp_size: int, scatter_dim: int) -> Tensor:
    """Return what each rank gets, [rank, its tokens or heads, all of the others, channels and sum].

    `scatter_dim` is that of [tokens, heads, channels] which is divided. A sum's bytes take the place of channels.
    """
    sums = softmax_lse.float().contiguous().view(partial_output.dtype)
    rows = _divided_first(torch.cat((partial_output, sums), -1), scatter_dim)
    return rows.unflatten(0, (dcp_size, -1)).contiguous()


def fused_dcp_lse_combine(
    recv: Tensor,
    head_dim: int,
    scatter_dim: int,
    return_lse: bool = False,
    local_output: Tensor | None = None,
    local_lse: Tensor | None = None,
) -> Tensor:
    """Merge what the ranks have sent, and a part of this rank alone, into [tokens, heads, channels].

    A sum that is no finite number has no weight, whatever its row. If asked, the sum of all is a last channel.
    """
    rows, sums = recv[..., :head_dim].float(), recv[..., head_dim:].contiguous().view(torch.float32)
    if local_output is not None and local_lse is not None:
        local = [_divided_first(one, scatter_dim).unsqueeze(0).float() for one in (local_output, local_lse)]
        rows, sums = torch.cat((rows, local[0])), torch.cat((sums, local[1]))
    known = sums.isfinite()
    sums = sums.masked_fill(~known, -math.inf)
    whole = sums.logsumexp(0)
    weights = torch.exp(sums - whole).masked_fill(~known, 0.0)
    merged = (rows.masked_fill(~known, 0.0) * weights).sum(0)
    if return_lse:
        merged = torch.cat((merged, whole), -1)
    return _divided_first(merged, scatter_dim).to(recv.dtype).contiguous()


def _divided_first(x: Tensor, scatter_dim: int) -> Tensor:
    """Exchange tokens and heads if heads are divided."""
    return x.transpose(0, 1) if scatter_dim else x


IN_PLACE_OF: dict[str, dict[str, Any]] = {
    "vllm_ascend.ops.triton.dcp.dcp_a2a": {
        "pack_dcp_output_lse": pack_dcp_output_lse,
        "fused_dcp_lse_combine": fused_dcp_lse_combine,
    },
}
