# SPDX-License-Identifier: Apache-2.0
"""Definitions of what a Gated DeltaNet layer asks for: compiled operators, and functions over Triton kernels.

The operators of `_C_ascend` belong to vllm-ascend's compiled library, which is missing here: their schemas are declared
as in that library. All but the norm are of 0.23 alone; 0.30 calls functions of fla_npu, which are here over them. The
functions take the place of vllm-ascend's (kernels.py), with the same arguments; a recurrence over many tokens is an
operator of this plug-in, so that it is one task of its stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ascend_host.reference import of, refuse, rms

SCHEMAS = {
    "_C_ascend::npu_gemma_rms_norm": "(Tensor x, Tensor gamma, float epsilon=1e-6) -> (Tensor y, Tensor rstd)",
    "_C_ascend::npu_fused_gdn_gating": "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias, float beta=1.0, "
    "float threshold=20.0) -> (Tensor g, Tensor beta_output)",
    "_C_ascend::npu_causal_conv1d_custom": "(Tensor output, Tensor x, Tensor weight, Tensor conv_state, "
    "Tensor? bias_opt, Tensor? query_start_loc_opt, Tensor? cache_indices_opt, Tensor? initial_state_mode_opt, "
    "Tensor? num_accepted_tokens_opt, int activation_mode, int pad_slot_id, int run_mode) -> (Tensor output)",
    "_C_ascend::npu_recurrent_gated_delta_rule": "(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, "
    "Tensor? beta=None, float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, "
    "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor",
    "ascend_host::gated_delta_rule": "(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, float scale, "
    "Tensor before, Tensor starts) -> (Tensor, Tensor)",
}
PREFILL, UPDATE = 0, 1


@of("_C_ascend::npu_gemma_rms_norm", traced=True)
def gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return rms(x, 1 + gamma.float(), epsilon)


@of("_C_ascend::npu_fused_gdn_gating")
def fused_gdn_gating(
    A_log: Tensor,  # noqa: N803
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[Tensor, Tensor]:
    """Return each token's decay (its logarithm) and its share of the new value, with one axis in front."""
    step = functional.softplus(a.float() + dt_bias.float(), beta, threshold)
    return (-A_log.float().exp() * step).unsqueeze(0), b.float().sigmoid().to(b.dtype).unsqueeze(0)


@of("_C_ascend::npu_causal_conv1d_custom")
def causal_conv1d(
    output: Tensor,
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    bias_opt: Tensor | None,
    query_start_loc_opt: Tensor | None,
    cache_indices_opt: Tensor | None,
    initial_state_mode_opt: Tensor | None,
    num_accepted_tokens_opt: Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> Tensor:
    """Write each sequence's convolution over its last inputs into `output`, and the last inputs into `conv_state`.

    An update always begins with the state, a prefill only where `initial_state_mode_opt` says so. With drafts the state
    keeps all inputs of the step: the next one begins behind the inputs that were accepted.
    """
    if query_start_loc_opt is None or cache_indices_opt is None:
        raise NotImplementedError("npu_causal_conv1d_custom of other sequences than those of a table")
    width, starts = len(weight), query_start_loc_opt.tolist()
    for seq, block in enumerate(cache_indices_opt.view(len(starts) - 1, -1)[:, 0].tolist()):
        rows = x[starts[seq] : starts[seq + 1]]
        if not len(rows) or block == pad_slot_id:
            continue
        state = conv_state[block]
        begin = 0 if num_accepted_tokens_opt is None else int(num_accepted_tokens_opt[seq]) - 1
        before = state[begin : begin + width - 1].clone()
        if run_mode == PREFILL and (initial_state_mode_opt is None or not initial_state_mode_opt[seq]):
            before.zero_()
        inputs = torch.cat((before, rows))
        total = torch.zeros(rows.shape, dtype=torch.float32) if bias_opt is None else bias_opt.float().expand_as(rows)
        for tap in range(width):
            total = total + inputs[tap : tap + len(rows)].float() * weight[tap].float()
        output[starts[seq] : starts[seq + 1]] = functional.silu(total) if activation_mode else total
        kept = inputs[1:] if num_accepted_tokens_opt is not None else inputs[-(width - 1) :]
        state[: len(kept)] = kept
    return output


@of("_C_ascend::npu_recurrent_gated_delta_rule")
def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor,
    *,
    beta: Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
) -> Tensor:
    """Continue sequences of few tokens; the state behind each token goes to that token's block.

    The first of `actual_seq_lengths` is the first sequence's first token, the others are lengths. A sequence begins
    with the state of its last accepted token, without drafts with that of its first.
    """
    refuse("npu_recurrent_gated_delta_rule", gk=gk)
    if beta is None or g is None or scale is None or actual_seq_lengths is None or ssm_state_indices is None:
        raise NotImplementedError("npu_recurrent_gated_delta_rule without gates, scale, lengths or blocks")
    out = torch.zeros(value.shape, dtype=value.dtype)
    start, *lengths = actual_seq_lengths.tolist()
    for seq, length in enumerate(lengths):
        if length <= 0:
            continue
        first = start if num_accepted_tokens is None else start + int(num_accepted_tokens[seq]) - 1
        tokens, begun = slice(start, start + length), state[ssm_state_indices[first]].float()
        given = query[tokens], key[tokens], value[tokens], g[tokens], beta[tokens]
        for token, (now, behind) in enumerate(_steps(*given, scale, begun), start):
            out[token] = now
            state[ssm_state_indices[token]] = behind.to(state.dtype)
        start += length
    return out


@of("ascend_host::gated_delta_rule")
def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, scale: float, before: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return all tokens' outputs, and the state behind each sequence; states are [head, value, key]."""
    out, after = torch.zeros(value.shape, dtype=value.dtype), before.float().clone()
    ends = starts.tolist()
    for seq in range(len(before)):
        tokens = slice(ends[seq], ends[seq + 1])
        given = query[tokens], key[tokens], value[tokens], g[tokens], beta[tokens]
        for token, (now, behind) in enumerate(_steps(*given, scale, before[seq].float()), ends[seq]):
            out[token], after[seq] = now, behind
    return out, after


def _steps(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each token's output and the state behind it, all heads at once, in single precision.

    The state forgets, then replaces a share of what it holds for the token's key by the token's value.
    """
    heads = value.shape[1] // key.shape[1]
    q, k = (x.float().repeat_interleave(heads, 1) for x in (query, key))
    for row in range(len(query)):
        state = state * g[row].float().exp().view(-1, 1, 1)
        new = value[row].float() - (state * k[row].unsqueeze(1)).sum(-1)
        state = state + (new * beta[row].float().unsqueeze(-1)).unsqueeze(-1) * k[row].unsqueeze(1)
        yield (state * (q[row] * scale).unsqueeze(1)).sum(-1), state


# ---- functions over Triton kernels, by the places where vllm-ascend looks for them


def l2norm_fwd(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Return vectors of length one; an empty one stays as it is."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(output_dtype or x.dtype)


def clear_ssm_states(ssm_states: Tensor, has_initial_state: Tensor) -> None:
    """Clear the states of sequences that begin."""
    keep = has_initial_state.bool().view(-1, *[1] * (ssm_states.dim() - 1))
    ssm_states.copy_(torch.where(keep, ssm_states, torch.zeros_like(ssm_states)))


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort a projection's values: given by head of q and k, wanted all q, all k, all v; z, b and a apart."""
    tokens, each = len(mixed_qkvz), num_heads_v // num_heads_qk
    parts = mixed_qkvz.view(tokens, num_heads_qk, -1).split([head_qk, head_qk, each * head_v, each * head_v], -1)
    q, k, v, z = (part.reshape(tokens, -1) for part in parts)
    b, a = (part.reshape(tokens, num_heads_v) for part in mixed_ba.view(tokens, num_heads_qk, -1).chunk(2, -1))
    return torch.cat((q, k, v), -1), z.view(tokens, num_heads_v, head_v), b, a


def layer_norm_fwd_npu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    z: Tensor | None = None,
    out: Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> tuple[Tensor, None, Tensor]:
    """Return RMS norm of whole rows, gated by SiLU of z behind it."""
    refuse("layer_norm_fwd_npu", bias=bias, out=out)
    if z is None or not norm_before_gate or not is_rms_norm or group_size not in (None, x.shape[-1]):
        raise NotImplementedError("layer_norm_fwd_npu other than RMS norm with a gate behind it")
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float() * functional.silu(z.float())).to(x.dtype), None, scale.flatten()


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    prebuilt_meta: object = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return outputs and last states of sequences of any length; states are [head, key, value] here."""
    if initial_state is None or cu_seqlens is None or head_first or not output_final_state:
        raise NotImplementedError("chunk_gated_delta_rule other than of sequences with states, tokens first")
    if use_qk_l2norm_in_kernel:
        q, k = l2norm_fwd(q), l2norm_fwd(k)
    size = q.shape[-1] ** -0.5 if scale is None else scale
    given = (x.squeeze(0) for x in (q, k, v, g, beta))
    before = initial_state.transpose(-1, -2).contiguous()
    out, after = torch.ops.ascend_host.gated_delta_rule(*given, size, before, cu_seqlens)
    return out.unsqueeze(0), after.transpose(-1, -2)


def fused_gdn_gating_patch(*given: Any) -> tuple[Tensor, Tensor]:
    gates: tuple[Tensor, Tensor] = torch.ops._C_ascend.npu_fused_gdn_gating(*given)
    return gates


def gather_ssm_states(
    state: Tensor, indices: Tensor, has_initial_state: Tensor, *, output_dtype: torch.dtype | None = None
) -> Tensor:
    """Return sequences' states; zero for those that begin, whose blocks are not read."""
    gathered = torch.zeros(len(indices), *state.shape[1:], dtype=output_dtype or state.dtype, device=state.device)
    begun = has_initial_state.bool()
    gathered[begun] = state[indices[begun].long()].to(gathered.dtype)
    return gathered


def scatter_ssm_states_(state: Tensor, indices: Tensor, source: Tensor) -> None:
    state[indices.long()] = source.to(state.dtype)


@of("npu::npu_chunk_gated_delta_rule")
def npu_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    actual_seq_lengths: Tensor | None = None,
    scale: float | None = 1.0,
    g: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Return outputs and last states of sequences given by their lengths; states are [head, value, key]."""
    refuse("npu_chunk_gated_delta_rule", **more)
    if beta is None or g is None or scale is None or initial_state is None or actual_seq_lengths is None:
        raise NotImplementedError("npu_chunk_gated_delta_rule without gates, scale, lengths or states")
    starts = functional.pad(actual_seq_lengths.cumsum(0), (1, 0))
    out, after = gated_delta_rule(query, key, value, g, beta, scale, initial_state, starts)
    return out, after.to(initial_state.dtype)


IN_PLACE_OF: dict[str, dict[str, Any]] = {
    "vllm_ascend.ops.gdn": {
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
        "clear_ssm_states": clear_ssm_states,
        "fused_qkvzba_split_reshape_cat": fused_qkvzba_split_reshape_cat,
        "l2norm_fwd": l2norm_fwd,
    },
    "vllm_ascend.ops.layernorm": {"layer_norm_fwd_npu": layer_norm_fwd_npu},
}
IN_PLACE_OF_ONE: dict[str, dict[str, dict[str, Any]]] = {
    "0.23": {},
    "0.30": {
        "vllm_ascend.device.device_op": {"fused_gdn_gating_patch": fused_gdn_gating_patch},
        "vllm_ascend.ops.gdn": {
            "gather_ssm_states": gather_ssm_states,
            "scatter_ssm_states_": scatter_ssm_states_,
        },
    },
}
