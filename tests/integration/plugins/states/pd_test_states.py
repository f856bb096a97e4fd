# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet with drafts on a CPU, where vLLM 0.32 stops at a step that computes one token for one request.

The request's state index is one column of a wider table. Its stride is that of the table, which the kernel refuses; of
several requests vLLM makes a copy. For tests: put this folder in front of PYTHONPATH.
"""

from __future__ import annotations

import functools
from typing import Any

KERNEL = "fused_sigmoid_gating_delta_rule_update_cpu"


def install() -> None:
    """vLLM's entry point, in every process of an engine."""
    import torch
    from vllm import _custom_ops

    original = getattr(_custom_ops, KERNEL)

    @functools.wraps(original)
    def with_copied_indices(*args: Any, initial_state_indices: Any, **more: Any) -> Any:
        copied = initial_state_indices.clone(memory_format=torch.contiguous_format)
        return original(*args, initial_state_indices=copied, **more)

    setattr(_custom_ops, KERNEL, with_copied_indices)
