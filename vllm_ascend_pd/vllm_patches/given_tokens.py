# SPDX-License-Identifier: Apache-2.0
"""Requests that begin with given output tokens, in vLLM's scheduler.

The tokens become the request's outputs before it is scheduled for the first time, by what vLLM does with sampled ones:
its stop checks, its grammar and its block hashes see one after the other. From then on it is a request that waits and
has outputs, as a preempted one: its KV is that of prompt and outputs but the last, which the next step computes.
Workers get the tokens as they get P's first token (first_token.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_ascend_pd.vllm_patches.first_token import is_second, logprob_rows, other_grammars, tell_workers
from vllm_ascend_pd.vllm_patches.one_by_one import GIVEN
from vllm_ascend_pd.vllm_patches.tried import TRIED_GIVEN, TRIED_SECOND, untried


def unproven(vllm_config: Any) -> str:
    """Return why no request of this engine begins with given tokens, P's first token aside; empty: they do."""
    if is_second(vllm_config) and (why := untried(tried=TRIED_SECOND)):
        return f"{why} with the second model runner"
    return untried(tried=TRIED_GIVEN)


def refusal(request: Any) -> str:
    """Return why a request cannot begin with given tokens; empty if it can."""
    if request.sampling_params is None or request.prompt_token_ids is None:
        return "it has no prompt of tokens, or samples none"
    if request.resumable:
        return "it is a session"
    if getattr(request, "prompt_is_token_ids", None) is not None or request.mm_features:
        return "its prompt is not only text"
    if request.sampling_params.prompt_logprobs is not None:
        return "it asks for log-probabilities of its prompt"
    if request.structured_output_request is not None and (why := other_grammars()):
        return f"it has a grammar, and {why}"
    return "it has outputs already" if request.num_output_tokens else ""


def has_run(request: Any) -> bool:
    """Return whether a request was scheduled, so that it cannot begin any more."""
    from vllm.v1.request import RequestStatus

    return bool(request.status != RequestStatus.WAITING or request.num_computed_tokens or request.num_output_tokens)


def give(scheduler: Any, request: Any, tokens: Sequence[int]) -> list[Any]:
    """Let a request that was never scheduled begin with outputs. Return them for the client, one for each token.

    The request ends if one of them ends it, or if its grammar does not let one pass.
    """
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput
    from vllm.v1.request import RequestStatus

    if scheduler.log_stats:
        request.record_event(EngineCoreEventType.SCHEDULED)  # else its prefill would begin after its first token
    outputs: list[Any] = []
    status, ends = request.status, None
    for token in tokens:
        request.append_output_token_ids(token)
        rows = _placeholders(request.sampling_params.num_logprobs, token)
        outputs.append(
            EngineCoreOutput(request.request_id, [token], new_logprobs=rows, kv_transfer_params={GIVEN: True})
        )
        if check_stop(request, scheduler.max_model_len):
            ends, request.status = request.status, status
        if request.use_structured_output and not scheduler.structured_output_manager.accept_tokens(request, [token]):
            ends = RequestStatus.FINISHED_ERROR
        if ends is not None:
            break
    first, last = outputs[0], outputs[-1]
    first.events, first.prefill_stats, first.trace_headers = (
        request.take_events(),
        _stats(request),
        request.trace_headers,
    )
    if ends is None:
        tell_workers(request, [output.new_token_ids[0] for output in outputs])
    else:
        scheduler.finish_requests(request.request_id, ends)
        last.finish_reason, last.stop_reason = request.get_finished_reason(), request.stop_reason
    return outputs


def _stats(request: Any) -> Any:
    """Take a request's figures of its prefill: in vLLM a request that still has them computes its prompt only.

    Its prompt counts as brought from elsewhere, and none of it as cached, which the client was told before.
    """
    stats = request.take_prefill_stats()
    if stats is not None:
        stats.set(request.num_prompt_tokens, 0, request.num_prompt_tokens)
        stats.num_cached_tokens = 0
    return stats


def _placeholders(count: int | None, token: int) -> Any:
    """Return a row of log-probabilities, which the client has: what serves it looks them up by token."""
    return None if count is None else logprob_rows([[(token, 0.0, 1)] * (max(count, 0) + 1)])
