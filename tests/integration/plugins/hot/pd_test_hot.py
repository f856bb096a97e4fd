# SPDX-License-Identifier: Apache-2.0
"""A planted fault, for tests: P treats all blocks that vLLM calls cached as computed.

Also those that the very same step computes.
"""

from __future__ import annotations


def install() -> None:
    """Install the plug-in: vLLM's entry point, called in every process of an engine."""
    from vllm_ascend_pd.prefill.scheduler.core.in_flight import BlocksInFlight

    BlocksInFlight.ready = lambda self, chunk, table, groups: chunk.computed  # type: ignore[method-assign]
