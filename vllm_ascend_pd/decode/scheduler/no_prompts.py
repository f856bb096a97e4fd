# SPDX-License-Identifier: Apache-2.0
"""A D that computes no prompts (admission/cache.py): what it would have to compute itself ends with an error.

That is a request without a ticket, or one that has lost its blocks. Whatever the reason, vLLM asks how much of it comes
from elsewhere, and the answer is nothing. A router goes on with a stream that breaks so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ascend_pd.vllm_patches import step_hooks


class NoPrompts(step_hooks.StepHooks):
    """`refused` is called with the id of each request that ends so."""

    def __init__(self, refused: Callable[[str], None]) -> None:
        super().__init__()
        self._refused = refused
        self._ending: dict[str, None] = {}

    def refuses(self, request: Any, computed: int) -> bool:
        """Return whether a request that loads nothing must end. Its next token alone is computed as a decode is."""
        if computed and request.num_tokens - computed == 1:
            return False
        self._ending[request.request_id] = None
        return True

    def after(self, scheduler: Any, outputs: Any) -> None:
        ending, self._ending = self._ending, {}
        for request_id in ending:
            request = scheduler.requests.get(request_id)
            if request is not None and not request.is_finished():
                self._refused(request_id)
                step_hooks.add(outputs, request.client_index, step_hooks.end(scheduler, request))
