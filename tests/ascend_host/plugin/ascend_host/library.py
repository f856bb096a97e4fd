# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's compiled library, which is missing here: the module, and what no other file here has of its operators.

0.30 imports the module wherever a norm adds a residual. With nothing in it vllm-ascend leaves sleep mode off.
"""

from __future__ import annotations

import sys
from types import ModuleType

from torch import Tensor

from ascend_host.reference import add_rms_norm, of

NAME = "vllm_ascend.vllm_ascend_C"
SCHEMAS = {
    "_C_ascend::npu_add_rms_norm_bias": "(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6) "
    "-> (Tensor y, Tensor rstd, Tensor x)",
}


def install() -> None:
    """Make the module importable, empty."""
    sys.modules[NAME] = ModuleType(NAME)


@of("_C_ascend::npu_add_rms_norm_bias", traced=True)
def add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    y, scale, both = add_rms_norm(x1, x2, gamma, epsilon)
    return y if beta is None else y + beta, scale, both
