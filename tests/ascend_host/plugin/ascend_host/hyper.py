# SPDX-License-Identifier: Apache-2.0
"""Definitions of what DeepSeek-V4 has around its attention and experts: streams of residuals, and a gate by token.

Several streams go through the model in parallel. Before a part of a layer they are mixed into its one input; behind it
its output and a mixture of the streams become the new ones. The operators of `_C_ascend` belong to vllm-ascend's
compiled library, which is missing here: their schemas are declared as in that library.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ascend_host.reference import of, refuse

SCHEMAS = {
    "_C_ascend::npu_hc_pre_v2": "(Tensor x, Tensor hc_fn, Tensor hc_scale, Tensor hc_base, int hc_mult, "
    "int hc_sinkhorn_iters, float norm_eps, float hc_eps) -> (Tensor, Tensor, Tensor)",
    "_C_ascend::npu_hc_post": "(Tensor x, Tensor residual, Tensor post, Tensor comb) -> Tensor",
    "_C_ascend::moe_gating_top_k_hash": "(Tensor x, int k, Tensor? bias=None, Tensor? input_ids=None, "
    "Tensor? tid2eid=None, int k_group=1, int group_count=1, float routed_scaling_factor=1.0, float eps=1e-20, "
    "int group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False, Tensor? bias_vl=None, "
    "int image_sentinel_lo=129257, int image_sentinel_count=5) -> (Tensor, Tensor, Tensor)",  # 0.23: no pictures
}
SQRT_SOFTPLUS = 2  # norm type


def _hc_pre_shapes(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, mult: int, *more: object) -> tuple[Tensor, ...]:
    post, comb = (x.new_empty((*x.shape[:-2], *sizes), dtype=torch.float32) for sizes in ((mult,), (mult, mult)))
    return x.new_empty((*x.shape[:-2], x.shape[-1]), dtype=torch.bfloat16), post, comb


@of("_C_ascend::npu_hc_pre_v2", shapes=_hc_pre_shapes)
def hc_pre_v2(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int,
    hc_sinkhorn_iters: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a mixture of the streams [tokens, streams, channels], and with which weights `npu_hc_post` continues.

    All weights depend on the streams. In double precision, so that a token's do not depend on its batch.
    """
    wide = x.double()
    flat = wide.flatten(-2)
    mixes = flat @ hc_fn.double().t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    parts, sizes = mixes.split((hc_mult, hc_mult, hc_mult * hc_mult), -1), hc_scale.double()
    biases = hc_base.double().split((hc_mult, hc_mult, hc_mult * hc_mult))
    pre, post, comb = (part * size + bias for part, size, bias in zip(parts, sizes, biases, strict=True))
    comb = (comb.unflatten(-1, (hc_mult, hc_mult)).softmax(-1)) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(hc_sinkhorn_iters - 1):  # towards rows and columns that each sum to 1
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    mixed = ((pre.sigmoid() + hc_eps).unsqueeze(-1) * wide).sum(-2)
    return mixed.to(torch.bfloat16), (2 * post.sigmoid()).float(), comb.float()


@of("_C_ascend::npu_hc_post", shapes=lambda x, residual, post, comb: torch.empty_like(residual))
def hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the new streams: each its share of x, and a mixture of the old streams by its column of `comb`."""
    mixed = comb.double().transpose(-1, -2) @ residual.double()
    return (post.double().unsqueeze(-1) * x.double().unsqueeze(-2) + mixed).to(residual.dtype)


@of("_C_ascend::moe_gating_top_k_hash")
def moe_gating_top_k_hash(
    x: Tensor,
    k: int,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    bias_vl: Tensor | None = None,
    **_of_pictures: int,  # which tokens are of one; without a bias for them they are as others
) -> tuple[Tensor, Tensor, Tensor]:
    """Select k experts for each token: those of the token in a table, or else the best. Weights are by score.

    The bias affects the selection, not the weights.
    """
    refuse("moe_gating_top_k_hash", bias_vl=bias_vl)
    if (k_group, group_count, renorm, norm_type) != (1, 1, 0, SQRT_SOFTPLUS):
        raise NotImplementedError("moe_gating_top_k_hash with groups of experts, or of another norm")
    scores = functional.softplus(x.double()).sqrt()
    if tid2eid is not None:
        assert input_ids is not None
        chosen = tid2eid[input_ids.flatten().long()].long()
    else:
        chosen = (scores if bias is None else scores + bias.double()).topk(k, -1).indices
    weights = scores.gather(-1, chosen)
    weights = weights / (weights.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weights.to(x.dtype), chosen.int(), scores.float()
