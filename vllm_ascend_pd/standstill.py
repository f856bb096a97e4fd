# SPDX-License-Identifier: Apache-2.0
"""A D that would stand still: loaded requests hold all blocks, the first of them needs one more, and nothing runs.

vLLM tries waiting requests in order, and ends at the first that finds no block: for example, behind P's first token,
a prompt that fills its last block. It preempts running requests then, but none that wait, so nothing would ever go on.
This file lets the last loaded request give its blocks back, by vLLM's own preemption; D computes its prompt later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_ascend_pd import first_token

MAX_STEPS = 64  # scheduled and not read yet: more than a pipeline has stages
_QUEUES = ("kv_holding_waiting", "skipped_waiting", "waiting")  # in vLLM's order: it tries what holds KV first
_USED = ("_preempt_request", "pause_state")


def install(vllm_config: Any) -> str:
    """Wrap the engine's scheduler, once. Return why not; empty: it is wrapped."""
    import vllm

    if not vllm.__version__.startswith(tuple(f"{one}." for one in first_token.VERSIONS)):
        return f"vLLM {vllm.__version__} was not tried"
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    if missing := [name for name in _USED if not hasattr(scheduler, name)]:
        return f"the scheduler {scheduler.__name__} has no {', '.join(missing)}"
    return first_token.wrap_outputs(scheduler)


class Standstill(first_token.StepHooks):
    """Detection of the standstill, and the way out of it.

    It stands still if a step computes nothing although it was scheduled with a loaded request in the queue, while no
    request runs. Loads that are under way are waited for, unless two loaded requests hold blocks that one could use.
    """

    def __init__(self, gave_back: Callable[[str], None]) -> None:
        """`gave_back` is called with the id of a request that has given its blocks back."""
        super().__init__()
        self._gave_back = gave_back
        self._loaded: frozenset[str] = frozenset()
        self._steps: deque[frozenset[str]] = deque(maxlen=MAX_STEPS)  # per scheduled step: the requests it passed over

    def scheduled(self, tokens: int) -> None:
        """Record that vLLM has scheduled a step with so many tokens."""
        self._steps.append(frozenset() if tokens else self._loaded)

    def after(self, scheduler: Any, outputs: Any) -> None:
        passed_over = self._steps.popleft() if self._steps else frozenset()
        loaded, loading = _holders(scheduler)
        if (
            passed_over.intersection(request.request_id for request, _ in loaded)
            and not scheduler.running
            and (len(loaded) > 1 or not loading)
            and scheduler.pause_state.name == "UNPAUSED"
        ):
            request, queue = loaded.pop()
            _give_back(scheduler, request, queue)
            self._gave_back(request.request_id)
            self._steps = deque([frozenset()] * len(self._steps), MAX_STEPS)  # those in flight came first
        self._loaded = frozenset(request.request_id for request, _ in loaded)


def _holders(scheduler: Any) -> tuple[list[tuple[Any, Any]], int]:
    """Return the waiting requests whose KV is here, each with its queue, and the number of those that still load."""
    from vllm.v1.request import RequestStatus

    loaded, loading = [], 0
    for queue in (getattr(scheduler, name) for name in _QUEUES if hasattr(scheduler, name)):
        for request in queue:
            if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                held = request.status == RequestStatus.WAITING and request.num_computed_tokens > 0
            elif not (held := request.request_id in scheduler.finished_recving_kv_req_ids):
                loading += 1
            if held:
                loaded.append((request, queue))
    return loaded, loading


def _give_back(scheduler: Any, request: Any, queue: Any) -> None:
    """Free the blocks of a loaded request that waits, as if it ran and were preempted."""
    from vllm.v1.request import RequestStatus

    queue.remove_request(request)
    scheduler.finished_recving_kv_req_ids.discard(request.request_id)
    getattr(scheduler, "deferred_waiting", set()).discard(request)
    request.status = RequestStatus.RUNNING  # vLLM preempts no other
    scheduler._preempt_request(request, time.monotonic())
    request.status = RequestStatus.WAITING  # not PREEMPTED: no worker has heard of it yet
