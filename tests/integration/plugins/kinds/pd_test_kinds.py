# SPDX-License-Identifier: Apache-2.0
"""A model with kinds of cache for which vLLM has no CPU kernel, and a connector that is handed them as vllm-ascend hands them.

For tests: put this folder in front of PYTHONPATH. The model is in pd_test_latent.py, the connector in pd_test_tuples.py.
"""

from __future__ import annotations

MODEL = "PdTestLatentForCausalLM"


def install() -> None:
    """vLLM's entry point; in every process of an engine. The model is imported only where it is built."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(MODEL, f"pd_test_latent:{MODEL}")
