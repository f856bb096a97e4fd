# SPDX-License-Identifier: Apache-2.0
"""Steps of one token per request on a P of vllm-ascend whose D has its heads in int8.

A prompt's last chunk may have one token, and so may what is left of a prompt behind a cached prefix. vllm-ascend takes
a step of nothing else for a decode, and the attention of such a P has no decode: it writes no key and no value, and
returns what was in memory. So each of these steps is called a chunk of a prompt, which that attention computes.
"""

from __future__ import annotations

from typing import Any

from vllm_ascend_pd.vllm_patches.wrapping import differing, wrap

_STATE = "_build_attn_state"
_PARAMETERS = ("self", "num_reqs", "num_scheduled_tokens", "num_valid_tokens")


def install() -> str:
    """Wrap vllm-ascend's model runner, once. Return why not; empty: it is wrapped."""
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    state = getattr(NPUModelRunner, _STATE, None)
    if state is None or differing((state, _PARAMETERS)):
        return "vllm-ascend's model runner names the state of a step otherwise"
    wrap(NPUModelRunner, _STATE, as_chunks)
    return ""


def as_chunks(original: Any) -> Any:
    """Return the method that names a step's state, which calls no step a decode."""

    def build_attn_state(self: Any, *given: Any) -> Any:
        state = original(self, *given)
        if state.name == "DecodeOnly":
            self.attn_state = state = type(state).ChunkedPrefill
        return state

    return build_attn_state
