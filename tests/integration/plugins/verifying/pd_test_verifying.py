# SPDX-License-Identifier: Apache-2.0
"""Plug-in for drafts with vLLM 0.30.0 on a CPU, which ends at the first one that it verifies.

Its CPU worker puts kernels of its own in the place of Triton's, by their names; from 0.30 on the sampler calls them
through objects that hold the first ones. For tests: put this folder in front of PYTHONPATH.
"""

from __future__ import annotations

from typing import Any

KERNELS = ("rejection_greedy_sample", "rejection_random_sample", "expand", "sample_recovered_tokens")


def install() -> None:
    """Install the plug-in: vLLM's entry point, called in every process of an engine."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    put = CPUModelRunner._postprocess_triton

    def put_in_both_places(self: Any) -> None:
        put(self)
        from vllm.v1.sample import rejection_sampler

        for name in KERNELS:
            getattr(rejection_sampler, f"_{name}").kernel = getattr(rejection_sampler, f"{name}_kernel")

    CPUModelRunner._postprocess_triton = put_in_both_places
