# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernels that Triton's interpreter does not run, in vLLM's own version for torch (sitecustomize.py)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def install() -> None:
    """Let top-k and top-p be taken by torch: the kernel for them counts rows in Triton's integers. Idempotent.

    And take the logarithm of vLLM 0.30's noise by Triton's own: the interpreter has nothing of the device's library.
    """
    from vllm.triton_utils import tl
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.sample import gumbel

    topk_topp_sampler.HAS_TRITON = False

    def log1p(number: Any) -> Any:
        return tl.log(1.0 + number.to(tl.float64)).to(number.dtype)

    if hasattr(gumbel, "tldevice"):
        gumbel.tldevice = SimpleNamespace(log1p=log1p)
