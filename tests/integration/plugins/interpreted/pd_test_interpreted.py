# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernels that Triton's interpreter does not run, in vLLM's own version for torch (sitecustomize.py)."""

from __future__ import annotations


def install() -> None:
    """Let top-k and top-p be taken by torch: the kernel for them counts rows in Triton's integers. Idempotent."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
