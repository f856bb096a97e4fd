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
from dataclasses import dataclass
from typing import Any

from vllm_ascend_pd.vllm_patches import step_hooks
from vllm_ascend_pd.vllm_patches.tried import untried

MAX_STEPS = 64  # scheduled and not read yet: more than a pipeline has stages
_QUEUES = ("kv_holding_waiting", "skipped_waiting", "waiting")  # in vLLM's order: it tries what holds KV first
USED = ("_preempt_request", "get_num_unfinished_requests", "get_request_counts")


def install(vllm_config: Any) -> str:
    """Wrap the engine's scheduler, once. Return why not; empty: it is wrapped."""
    if why := untried():
        return why
    scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    if missing := [name for name in USED if not hasattr(scheduler, name)]:
        return f"the scheduler {scheduler.__name__} has no {', '.join(missing)}"
    return step_hooks.wrap_outputs(scheduler)


@dataclass(frozen=True, slots=True)
class _BlockHolders:
    """Holders of blocks while no request runs."""

    loaded: tuple[str, ...]  # requests whose KV is here, in the order of the queue
    others: int  # loads under way, and requests that have ended and whose blocks are held
    free: int


class Standstill(step_hooks.StepHooks):
    """Detection of the standstill, and the way out of it.

    D stands still if a step computed nothing and changed nothing although it was scheduled with a loaded request in the
    queue, while no request ran. Blocks that will come free are waited for, unless two loaded requests hold some.
    """

    def __init__(self, gave_back: Callable[[str], None]) -> None:
        """`gave_back` is called with the id of a request that has given its blocks back."""
        super().__init__()
        self._gave_back = gave_back
        self._holders: _BlockHolders | None = None  # as of the last step that was read
        self._steps: deque[_BlockHolders | None] = deque(maxlen=MAX_STEPS)  # those when each unread step was scheduled

    def scheduled(self, tokens: int) -> None:
        """Record that vLLM has scheduled a step with so many tokens."""
        self._steps.append(None if tokens else self._holders)

    def after(self, scheduler: Any, outputs: Any) -> None:
        before, self._holders = (self._steps.popleft() if self._steps else None), None
        # While requests run the queue is not read: it may be long. No unfinished ones are counted while vLLM pauses.
        if scheduler.running or not scheduler.get_num_unfinished_requests():
            return
        loaded, holders = _read(scheduler)
        if holders != before or not loaded or (len(loaded) == 1 and holders.others):
            self._holders = holders
            return
        _give_back(scheduler, *loaded[-1])
        self._steps = deque([None] * len(self._steps), MAX_STEPS)  # those in flight were scheduled before that
        self._gave_back(holders.loaded[-1])


def _read(scheduler: Any) -> tuple[list[tuple[Any, Any]], _BlockHolders]:
    """Return the waiting requests whose KV is here, each with its queue, and all holders."""
    from vllm.v1.request import RequestStatus

    loaded, loading = [], 0
    for queue in (getattr(scheduler, name) for name in _QUEUES if hasattr(scheduler, name)):
        for request in queue:
            if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                startable = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
                has_blocks = startable and request.num_computed_tokens > 0
            elif not (has_blocks := request.request_id in scheduler.finished_recving_kv_req_ids):
                loading += 1
            if has_blocks:
                loaded.append((request, queue))
    ended = len(scheduler.requests) - sum(scheduler.get_request_counts())
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return loaded, _BlockHolders(tuple(request.request_id for request, _ in loaded), loading + ended, free)


def _give_back(scheduler: Any, request: Any, queue: Any) -> None:
    """Free the blocks of a loaded request that waits, as if it ran and were preempted."""
    from vllm.v1.request import RequestStatus

    queue.remove_request(request)
    for ids in (scheduler.finished_recving_kv_req_ids, scheduler.failed_recving_kv_req_ids):
        ids.discard(request.request_id)
    getattr(scheduler, "deferred_waiting", set()).discard(request)
    has_run, request.status = request.num_preemptions > 0, RequestStatus.RUNNING  # vLLM preempts no other
    scheduler._preempt_request(request, time.monotonic())
    if not has_run:
        request.status = RequestStatus.WAITING  # workers do not know it: it must come to them as a new one
