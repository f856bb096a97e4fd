# SPDX-License-Identifier: Apache-2.0
"""Changes to one of vLLM's requests, in fields that it gives connectors no way to set."""

from __future__ import annotations

from typing import Any


def end_after_prompt(request: Any) -> None:
    """Let a request end with its first token."""
    request.max_tokens = 1


def cut_prompt(request: Any) -> int:
    """Take the last token off a prompt that is not scheduled yet, and return it."""
    last: int = request.prompt_token_ids[-1]
    for tokens in (request.prompt_token_ids, request._all_token_ids):
        tokens.pop()
    request.num_prompt_tokens -= 1
    return last


def force(request: Any, token: int) -> None:
    """Let only `token` be sampled.

    The prompt was cut by one token, and the sampled token takes its place. A drafter computes its KV at a position from
    the next token, and that KV is pushed. So the token that was cut must be the one that is sampled.
    """
    if request.sampling_params.structured_outputs is not None:
        return  # a grammar may forbid the token; D's drafts are then a little worse
    only = request.sampling_params.clone()
    only.temperature, only.allowed_token_ids, only.logit_bias, only.min_tokens = 0.0, [token], None, 0
    only.bad_words, only._bad_words_token_ids = [], None
    request.sampling_params = only


def drop_placeholders(request: Any) -> None:
    """Take away the placeholders for drafts with which vllm-ascend's recompute scheduler begins each request.

    They are for a graph behind a load. Where D computes behind a cached prefix, a step takes them for tokens of the
    prompt.
    """
    request.spec_token_ids = []


def report_cached(request: Any, tokens: int) -> None:
    """Set the number of prompt tokens that vLLM reports to the client as cached.

    By itself vLLM counts all that came from P, most of which P has computed for the request.
    """
    stats = getattr(request, "prefill_stats", None)  # None after the first token
    if stats is not None:
        stats.num_cached_tokens = tokens
