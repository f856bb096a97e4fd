# SPDX-License-Identifier: Apache-2.0
"""Plug-in for Gated DeltaNet in float32 on a CPU, where vLLM has it in bfloat16 only.

In bfloat16 sums in another order, as those of another TP, make other tokens. For tests: put this folder in front of
PYTHONPATH. The operators are in pd_test_gated.py.
"""

from __future__ import annotations

MODEL = "Qwen3NextForCausalLM"


def install() -> None:
    """Install the plug-in: vLLM's entry point, called in every process of an engine.

    The operators are replaced only where the model is built.
    """
    from vllm import ModelRegistry

    ModelRegistry.register_model(MODEL, f"pd_test_gated:{MODEL}")
