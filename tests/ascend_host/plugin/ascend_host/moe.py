# SPDX-License-Identifier: Apache-2.0
"""Definitions of the operators of a mixture of experts.

Those of `_C_ascend` belong to vllm-ascend's compiled library, which is missing here: their schemas are declared as in
that library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ascend_host.reference import of, product, refuse

SCHEMAS = {
    "_C_ascend::moe_gating_top_k": "(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, "
    "int norm_type, bool out_flag, float routed_scaling_factor, float eps, Tensor? bias_opt=None) "
    "-> (Tensor, Tensor, Tensor)",
    "_C_ascend::npu_moe_init_routing_custom": "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, "
    "Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, "
    "int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=0, "
    "int[2] active_expert_range=[], int row_idx_type=0) -> (Tensor, Tensor, Tensor, Tensor)",
}
SOFTMAX, SIGMOID = 0, 1


@of("_C_ascend::moe_gating_top_k")
def moe_gating_top_k(
    x: Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Select the k best experts of each token. The bias affects the selection, not the weights."""
    if group_count > 1:
        raise NotImplementedError("moe_gating_top_k with groups of experts")
    chances = x.float().softmax(-1) if norm_type == SOFTMAX else x.float().sigmoid()
    best = (chances if bias_opt is None else chances + bias_opt.float()).topk(k, -1).indices
    weights = chances.gather(-1, best)
    if renorm or norm_type == SIGMOID:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), best.int(), chances


@of("_C_ascend::npu_moe_init_routing_custom")  # of 0.23
def moe_init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows of x once for each of their experts, sorted by expert.

    Also the place of each row (-1: its expert is on another rank), and the number of rows per expert.
    """
    refuse("npu_moe_init_routing_custom", scale=scale, offset=offset)
    if quant_mode != -1 or drop_pad_mode != 0 or expert_tokens_num_type != 1 or row_idx_type != 0:
        raise NotImplementedError("npu_moe_init_routing_custom, quantised, padded or counted otherwise")
    first, end = active_expert_range
    experts = expert_idx.flatten().long()
    here = (experts >= first) & (experts < end)
    order = torch.where(here, experts, expert_num).argsort(stable=True)
    count = int(here.sum())
    rows = torch.zeros(len(experts), x.shape[1], dtype=x.dtype)
    rows[:count] = x[order[:count] // expert_idx.shape[1]]
    place = torch.full((len(experts),), -1, dtype=torch.int32)
    place[order[:count]] = torch.arange(count, dtype=torch.int32)
    counts = torch.bincount(experts[here] - first, minlength=end - first)
    return rows, place, counts, torch.zeros(len(experts))


@of("npu::npu_moe_init_routing_v2")
def moe_init_routing_v2(
    x: Tensor, expert_idx: Tensor, *, quant_mode: int = -1, **given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same; here no quantisation is the default, which callers do not hand on."""
    return moe_init_routing(x, expert_idx, quant_mode=quant_mode, **given)


@of("npu::npu_grouped_matmul")
def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **more: Any,
) -> list[Tensor]:
    """Multiply the rows of one x group by group, each group with its own matrix.

    Rows outside the groups are undefined.
    """
    refuse("npu_grouped_matmul", **more)
    if (
        group_list is None
        or (split_item, group_type, group_list_type, act_type) != (2, 0, 1, 0)
        or len(x) + len(weight) > 2
    ):
        raise NotImplementedError("npu_grouped_matmul of other groups than counted rows")
    out = torch.zeros(x[0].shape[0], weight[0].shape[2], dtype=x[0].dtype)
    done = 0
    for group, count in enumerate(group_list.tolist()):
        out[done : done + count] = product(x[0][done : done + count], weight[0][group])
        done += count
    return [out]


@of("npu::npu_moe_token_unpermute")
def moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return each token as the weighted sum of its rows."""
    refuse("npu_moe_token_unpermute", padded_mode=padded_mode or None)
    rows = permuted_tokens[sorted_indices.long()]
    if probs is None:
        return rows
    return (rows.unflatten(0, probs.shape) * probs.unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)
