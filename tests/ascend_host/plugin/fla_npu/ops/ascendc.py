# SPDX-License-Identifier: Apache-2.0
"""Functions of Gated DeltaNet over the operators that ascend_host/delta.py defines."""

from __future__ import annotations

from typing import Any

import torch
from ascend_host.delta import PREFILL, UPDATE
from torch import Tensor

NO_BLOCK = -1


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = NO_BLOCK,
    null_block_id: int = 0,
) -> Tensor:
    """Return the convolution of prompts' chunks; their last inputs go to `conv_states`."""
    sequences = bias, query_start_loc, cache_indices, has_initial_state, None
    return _convolved(torch.zeros_like(x), x, weight, conv_states, *sequences, _mode(activation), pad_slot_id, PREFILL)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the convolution of sequences that go on, in `out` if it is given."""
    sequences = bias, query_start_loc, conv_state_indices, None, num_accepted_tokens
    into = torch.zeros_like(x) if out is None else out
    return _convolved(into, x, weight, conv_state, *sequences, _mode(activation), NO_BLOCK, UPDATE)


def recurrent_gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, state: Tensor, **given: Any) -> Tensor:
    out: Tensor = torch.ops._C_ascend.npu_recurrent_gated_delta_rule(query, key, value, state, **given)
    return out


def _mode(activation: str | None) -> int:
    if activation not in (None, "silu"):
        raise NotImplementedError(f"a convolution with {activation}")
    return int(activation is not None)


def _convolved(*given: Any) -> Tensor:
    out: Tensor = torch.ops._C_ascend.npu_causal_conv1d_custom(*given)
    return out


def _of_kimi(*given: Any, **more: Any) -> Any:
    raise NotImplementedError("fla_npu's Kimi delta attention has no definition here")


chunk_kda_fwd = recurrent_kda = _of_kimi
