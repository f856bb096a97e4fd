# SPDX-License-Identifier: Apache-2.0
"""Accepted drafts behind a step of nothing, which vllm-ascend's runner forgets: recurrent states would be wrong.

A D without a free block schedules nothing while the blocks of the request that it would preempt may still be written
(vLLM's `defer_block_free`, from 0.30 on). Such a step empties the worker's batch, and with it the rows by which the
last step counted accepted drafts. The next step then takes each state as if no draft had been accepted: silently wrong
text, in an engine by itself too. Attention has no such memory.
"""

from __future__ import annotations

from typing import Any

from vllm_ascend_pd.vllm_patches import compat
from vllm_ascend_pd.vllm_patches.tried import untried
from vllm_ascend_pd.vllm_patches.wrapping import differing, wrap

_UPDATE, _COUNT = "_update_states", "_sync_num_accepted_tokens"  # of the runner
_UPDATED, _COUNTED = ("self", "scheduler_output"), ("self", "num_reqs", "has_prev_mapping")  # their parameters
_ROWS = "pd_rows"  # on a runner: by request, its row in the step before the one of nothing


def install(vllm_config: Any) -> str:
    """Wrap vllm-ascend's runner, once, where the fault may be. Return why not; empty: it is wrapped, or has no need."""
    if not compat.is_vllm_ascend() or vllm_config.speculative_config is None or not vllm_config.model_config.is_hybrid:
        return ""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    if not hasattr(Scheduler, "_drain_deferred_frees") or not vllm_config.scheduler_config.async_scheduling:
        return ""
    update, count = (getattr(NPUModelRunner, name, None) for name in (_UPDATE, _COUNT))
    if update is None or count is None or differing((update, _UPDATED), (count, _COUNTED)):
        return "this vllm-ascend counts them otherwise"
    if why := untried():
        return why
    wrap(NPUModelRunner, _UPDATE, keep_rows)
    wrap(NPUModelRunner, _COUNT, count_by_rows)
    return ""


def keep_rows(original: Any) -> Any:
    """Return the method that updates the batch, with the rows kept over steps of nothing."""

    def update_states(self: Any, scheduler_output: Any) -> Any:
        rows = self.input_batch.prev_req_id_to_index
        if not scheduler_output.total_num_scheduled_tokens and rows:
            setattr(self, _ROWS, dict(rows))
        elif kept := getattr(self, _ROWS, {}):  # of these some begin anew
            for request_id in (
                *(scheduler_output.preempted_req_ids or ()),
                *scheduler_output.scheduled_cached_reqs.resumed_req_ids,
            ):
                kept.pop(request_id, None)
        return original(self, scheduler_output)

    return update_states


def count_by_rows(original: Any) -> Any:
    """Return the method that counts accepted drafts, by the rows that were kept if there are some."""

    def sync_num_accepted_tokens(self: Any, num_reqs: int, has_prev_mapping: bool) -> None:
        rows = {} if has_prev_mapping else getattr(self, _ROWS, {})
        setattr(self, _ROWS, {})
        accepted = {request_id: self.num_accepted_tokens.np[row] for request_id, row in rows.items()}
        original(self, num_reqs, has_prev_mapping)
        for index, request_id in enumerate(self.input_batch.req_ids[:num_reqs] if accepted else ()):
            if request_id in accepted:
                count = accepted[request_id]
                self.num_accepted_tokens.np[index] = self.input_batch.num_accepted_tokens_cpu[index] = count

    return sync_num_accepted_tokens
