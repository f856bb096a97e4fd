# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM preempts between two steps, in `Scheduler.reset_prefix_cache(reset_running_requests=True)`.

Their blocks are free at once, and the next step may give them to other requests. vLLM 0.32 lists these requests as
preempted in that step. Before, it lists only what `schedule` itself preempts, so the writes that still read the blocks
would not be drained. There, the connector learns of them from the wrapped method (`install`).
"""

from __future__ import annotations

from typing import Any

from vllm_ascend_pd.wrapping import wrap

_RESET = "reset_prefix_cache"
_LISTED = "reset_preempted_req_ids"  # of a scheduler that lists them itself


class RecordsPreemptions:
    """Base of a connector that records requests which a reset has preempted. It may be inside another connector."""

    def preempted(self, request_id: str) -> None:
        """Record that a request has lost its blocks, before the next step is scheduled."""


def install(vllm_config: Any) -> None:
    """Wrap the engine's scheduler, once. A scheduler without this method resets nothing."""
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    if hasattr(scheduler, _RESET):
        wrap(scheduler, _RESET, _reporting)


def _reporting(original: Any) -> Any:
    def reset_prefix_cache(self: Any, *given: Any, **named: Any) -> Any:
        before = [] if hasattr(self, _LISTED) else [request.request_id for request in self.running]
        try:
            return original(self, *given, **named)
        finally:  # a reset that fails has preempted them all the same
            running = {request.request_id for request in self.running}
            for request_id in before:
                if request_id not in running:
                    _report(self.connector, request_id)

    return reset_prefix_cache


def _report(connector: Any, request_id: str) -> None:
    for one in getattr(connector, "_connectors", (connector,)):  # those of a MultiConnector
        if isinstance(one, RecordsPreemptions):
            one.preempted(request_id)
