# SPDX-License-Identifier: Apache-2.0
"""Plug-in with a model whose kinds of cache have no CPU kernel in vLLM, and a connector with vllm-ascend's interface.

For tests: put this folder in front of PYTHONPATH. The model is in pd_test_latent.py, the connector in
pd_test_tuples.py.
"""

from __future__ import annotations

MODEL = "PdTestLatentForCausalLM"


def install() -> None:
    """Install the plug-in: vLLM's entry point, called in every process of an engine.

    The model is imported only where it is built.
    """
    from vllm import ModelRegistry

    ModelRegistry.register_model(MODEL, f"pd_test_latent:{MODEL}")
