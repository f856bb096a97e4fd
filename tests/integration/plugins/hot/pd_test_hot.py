# SPDX-License-Identifier: Apache-2.0
"""A planted fault: P takes all that vLLM calls cached for computed, also what the very step computes. For tests."""

from __future__ import annotations


def install() -> None:
    """vLLM's entry point; in every process of an engine."""
    from vllm_ascend_pd.prefill.core.computing import Computing

    Computing.ready = lambda self, request_id, computed, groups: computed  # type: ignore[method-assign]
