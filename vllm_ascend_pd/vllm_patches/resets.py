# SPDX-License-Identifier: Apache-2.0
"""Changes to all of an engine's requests and caches, which vLLM reports to no connector.

Preemptions between two steps, in `Scheduler.reset_prefix_cache(reset_running_requests=True)`: the blocks are free at
once, and the next step may give them to other requests. vLLM 0.30 lists these requests as preempted in that step.
Before, it lists only what `schedule` itself preempts, so the writes that still read the blocks would not be drained.

A pause, and a shutdown that lets requests end: both wait until no request has blocks, also those of which P holds the
KV for a D that may still come.

The version of the weights, which vLLM's caller sets after it has changed them.

The connector learns of each from a wrapped method (`install`).
"""

from __future__ import annotations

from typing import Any

from vllm_ascend_pd.vllm_patches.wrapping import contained, wrap

_RESET, _PAUSE = "reset_prefix_cache", "set_pause_state"  # of the scheduler
_SHUTDOWN, _WEIGHTS = "_handle_shutdown", "set_weight_version"  # of the core
_LISTED = "reset_preempted_req_ids"  # of a scheduler that lists them itself


class FollowsEngine:
    """Base of a connector that acts on what this file reports. It may be inside another connector."""

    def preempted(self, request_id: str) -> None:
        """Record that a request has lost its blocks, before the next step is scheduled."""

    def reset_cache(self) -> bool | None:
        """Free what is held for others. vLLM has the blocks back after the next step."""

    def pauses(self, paused: bool) -> None:
        """Record that the engine waits until no request has blocks, or goes on."""

    def weights(self, version: str) -> None:
        """Record how the engine's weights are called from now on."""


def install(vllm_config: Any) -> None:
    """Wrap the engine's scheduler and core, once. What a release lacks it does not do."""
    from vllm.v1.engine.core import EngineCoreProc

    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    for owner, name, around in (
        (scheduler, _RESET, _reporting),
        (scheduler, _PAUSE, _pausing),
        (EngineCoreProc, _SHUTDOWN, _ending),
        (EngineCoreProc, _WEIGHTS, _renaming),
    ):
        if hasattr(owner, name):
            wrap(owner, name, around)


def _reporting(original: Any) -> Any:
    def reset_prefix_cache(self: Any, *given: Any, **named: Any) -> Any:
        if any(given[1:2]) or named.get("reset_connector"):  # vLLM raises before it asks, if any block is still held
            for one in contained(self.connector, FollowsEngine):
                one.reset_cache()
        before = [] if hasattr(self, _LISTED) else [request.request_id for request in self.running]
        try:
            return original(self, *given, **named)
        finally:  # a reset that fails has preempted them all the same
            running = {request.request_id for request in self.running}
            for request_id in before:
                if request_id not in running:
                    for one in contained(self.connector, FollowsEngine):
                        one.preempted(request_id)

    return reset_prefix_cache


def _pausing(original: Any) -> Any:
    def set_pause_state(self: Any, pause_state: Any) -> None:
        original(self, pause_state)
        for one in contained(self.connector, FollowsEngine):
            one.pauses(bool(pause_state.value))

    return set_pause_state


def _ending(original: Any) -> Any:
    def handle_shutdown(self: Any) -> Any:
        if not self.is_running():
            for one in contained(self.scheduler.get_kv_connector(), FollowsEngine):
                one.pauses(True)
        return original(self)

    return handle_shutdown


def _renaming(original: Any) -> Any:
    def set_weight_version(self: Any, weight_version: str) -> None:
        original(self, weight_version)
        for one in contained(self.scheduler.get_kv_connector(), FollowsEngine):
            one.weights(weight_version)

    return set_weight_version
