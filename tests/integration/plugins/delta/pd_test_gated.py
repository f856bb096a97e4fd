# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next for float32 on a CPU: the operators of Gated DeltaNet in plain torch, with drafts and without.

A prompt's tokens go one by one, as those of an answer do: so a D that begins in the middle computes what a single
engine computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

__all__ = ["Qwen3NextForCausalLM"]


def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
    """Do as vLLM's function of another name does, for any dtype."""
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    assert isinstance(context.attn_metadata, dict)
    metadata: Any = context.attn_metadata[layer.prefix]
    if not metadata.num_actual_tokens:
        return
    given = layer, metadata, mixed_qkv, b, a, core_attn_out
    kernel, kept = layer.conv1d.weight.size(-1), gdn_attention._conv_buffer_view(layer).size(-1)
    if kept > kernel - 1:  # rows for drafted tokens
        gdn_attention._cpu_gdn_attention_spec_aware(*given, kernel, kept)
    else:
        gdn_attention._cpu_gdn_attention_nonspec(*given)


def gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
    """Return each token's decay (its logarithm) and its share of the new value."""
    return -A_log.exp() * functional.softplus(a + dt_bias), b.sigmoid()


def of_prompts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Continue the states in place. Return the outputs, with an axis in front."""
    given = (x.view(-1, *x.shape[-2:]) for x in (query, key, value))
    sequences = _whole(initial_state_indices, cu_seqlens)
    return _run(*given, g, beta, initial_state, sequences).unsqueeze(0), initial_state


def of_tokens(
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> Tensor:
    """Continue the states in place by a token each. Return the outputs, with the second axis empty."""
    given = (x.view(-1, *x.shape[-2:]) for x in (q, k, v))
    gates = gating(A_log, a, b, dt_bias)
    return _run(*given, *gates, initial_state_source, _whole(initial_state_indices, cu_seqlens)).unsqueeze(1)


def of_drafts(
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    spec_state_indices: Tensor,
    num_accepted_tokens: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> Tensor:
    """Continue the states behind the last accepted token; the state after each token gets a slot of its own."""
    given = (x.view(-1, *x.shape[-2:]) for x in (q, k, v))
    gates, ends = gating(A_log, a, b, dt_bias), cu_seqlens.tolist()
    sequences = [
        (slots[accepted - 1], begin, slots[: end - begin])
        for slots, accepted, begin, end in zip(
            spec_state_indices.tolist(), num_accepted_tokens.tolist(), ends, ends[1:], strict=False
        )
    ]
    return _run(*given, *gates, initial_state_source, sequences)


Span = tuple[int, int, Sequence[int | None]]  # slot of its state, first row, and for each row the slot afterwards


def _whole(indices: Tensor, starts: Tensor) -> Iterable[Span]:
    """Return sequences whose state stays in its slot, and is needed after the last token only."""
    ends = starts.tolist()
    for slot, begin, end in zip(indices.tolist(), ends, ends[1:], strict=False):
        yield slot, begin, [*[None] * (end - begin - 1), slot]


def _run(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, states: Tensor, sequences: Iterable[Span]
) -> Tensor:
    """Continue each sequence, token by token. States are [slot, head, key, value]."""
    heads = value.shape[1] // key.shape[1]
    q, k = (functional.normalize(x, dim=-1, eps=1e-6).repeat_interleave(heads, 1) for x in (query, key))
    q = q * query.shape[-1] ** -0.5
    decay, out = g.exp().view(len(value), -1), torch.empty_like(value)
    for source, begin, slots in sequences:
        state = states[source]
        for row, slot in enumerate(slots, begin):
            state = state * decay[row].view(-1, 1, 1)
            new = (value[row] - (state * k[row].unsqueeze(-1)).sum(1)) * beta[row].view(-1, 1)
            state = state + k[row].unsqueeze(-1) * new.unsqueeze(1)
            out[row] = (state * q[row].unsqueeze(-1)).sum(1)
            if slot is not None:
                states[slot] = state
    return out


class Operators:
    """Functions that vLLM's code takes from vllm._custom_ops."""

    fused_gdn_gating_cpu = staticmethod(gating)
    chunk_gated_delta_rule_cpu = staticmethod(of_prompts)
    fused_sigmoid_gating_delta_rule_update_cpu = staticmethod(of_tokens)
    fused_sigmoid_gating_delta_rule_update_spec_cpu = staticmethod(of_drafts)


gdn_attention.ops = Operators  # type: ignore[assignment]
gdn_attention.cpu_gdn_attention_core = core
torch.cpu._is_avx512_bf16_supported = lambda: False  # the convolution of other dtypes
torch.cpu._is_amx_tile_supported = lambda: False
