# SPDX-License-Identifier: Apache-2.0
"""Accepted drafts of requests that a step leaves out, which vllm-ascend's runner forgets: states would be wrong.

A D without a free block leaves requests out of a step, often all, while the blocks of the one that it preempts or drops
may still be written (vLLM's `defer_block_free`, from 0.30 on). The worker's batch loses their rows, by which their last
step counted accepted drafts. Their next step then takes each state as if no draft had been accepted: silently wrong
text, in an engine by itself too. Attention has no such memory.
"""

from __future__ import annotations

from typing import Any

from vllm_ascend_pd.vllm_patches import compat
from vllm_ascend_pd.vllm_patches.tried import untried
from vllm_ascend_pd.vllm_patches.wrapping import differing, wrap

_UPDATE, _COUNT = "_update_states", "_sync_num_accepted_tokens"  # of the runner
_UPDATED, _COUNTED = ("self", "scheduler_output"), ("self", "num_reqs", "has_prev_mapping")  # their parameters
_ROWS = "pd_rows"  # on a runner: of requests that a step leaves out, the row in the step before
_COUNTS = "pd_counts"  # and what was accepted there, once it is known


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
    """Return the method that updates the batch, with the rows kept of requests that a step leaves out."""

    def update_states(self: Any, scheduler_output: Any) -> Any:
        rows, there = self.input_batch.prev_req_id_to_index or {}, scheduler_output.num_scheduled_tokens
        if out := rows.keys() - there.keys():
            setattr(self, _ROWS, {**getattr(self, _ROWS, {}), **{request_id: rows[request_id] for request_id in out}})
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for kept in filter(None, (getattr(self, name, None) for name in (_ROWS, _COUNTS))):
            for begin_anew in (scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids, resumed):
                for request_id in begin_anew or ():
                    kept.pop(request_id, None)
        return original(self, scheduler_output)

    return update_states


def count_by_rows(original: Any) -> Any:
    """Return the method that counts accepted drafts: of requests that were left out, by the rows that were kept."""

    def sync_num_accepted_tokens(self: Any, num_reqs: int, has_prev_mapping: bool) -> None:
        rows, counts = getattr(self, _ROWS, {}), getattr(self, _COUNTS, {})
        if rows:  # those of the step before are known now, and the next ones take their places
            counts |= {request_id: self.num_accepted_tokens.np[row] for request_id, row in rows.items()}
            setattr(self, _ROWS, {})
            setattr(self, _COUNTS, counts)
        original(self, num_reqs, has_prev_mapping)
        for index, request_id in enumerate(self.input_batch.req_ids[:num_reqs] if counts else ()):
            if request_id in counts:
                count = counts.pop(request_id)
                self.num_accepted_tokens.np[index] = self.input_batch.num_accepted_tokens_cpu[index] = count

    return sync_num_accepted_tokens
