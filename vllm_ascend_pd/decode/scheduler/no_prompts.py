# SPDX-License-Identifier: Apache-2.0
"""A D that computes no prompts (admission/cache.py): what it would have to compute itself ends with an error.

That is a request without a ticket, or one that has lost its blocks. vLLM asks how much of such a request comes from
elsewhere, and the answer is nothing. A router goes on with a stream that breaks so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.vllm_patches import step_hooks


class NoPrompts(step_hooks.StepHooks):
    """`refused` is called with the id of each request that ends so."""

    def __init__(self, refused: Callable[[str], None]) -> None:
        super().__init__()
        self._refused = refused
        self._ending: dict[str, None] = {}

    def refuses(self, request: Any, computed: int, loaded: int) -> bool:
        """Return whether a request must end, of which so many tokens are here and so many come from P.

        Its next token alone is computed as a decode is. A session whose prompt grows would compute what it grows by.
        """
        grows = getattr(request, "resumable", False)
        if not grows and (loaded or (computed and request.num_tokens - computed == 1)):
            return False
        self._ending[request.request_id] = None
        return True

    def check(self, output: Any) -> None:
        """Raise before a step that would compute a part of a prompt: all of its requests would get wrong tokens."""
        for request_id, tokens in output.num_scheduled_tokens.items():
            if tokens > 1:
                raise LocalProtocolError(f"{request_id} has {tokens} tokens in a step of an engine with heads in int8")

    def after(self, scheduler: Any, outputs: Any) -> None:
        ending, self._ending = self._ending, {}
        for request_id in ending:
            request = scheduler.requests.get(request_id)
            if request is not None and not request.is_finished():
                self._refused(request_id)
                step_hooks.add(outputs, request.client_index, step_hooks.end(scheduler, request))
