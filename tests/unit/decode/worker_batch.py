# SPDX-License-Identifier: Apache-2.0
"""The batch of a worker of vLLM's first model runner, of whichever release is installed, and a request in it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_ascend_pd.vllm_patches.first_token import GIVEN_ARG, GivenIds

PROMPT = [4, 5, 6]
_FACTS = {
    "max_num_reqs": 2,
    "max_model_len": 16,
    "max_num_batched_tokens": 16,
    "vocab_size": 32,
    "device": torch.device("cpu"),
    "pin_memory": False,
    "block_sizes": [16],
    "kernel_block_sizes": [16],
    "max_num_blocks_per_req": [1],
}


def batch() -> InputBatch:
    """An empty batch. Parameters have the same names in all releases, but some releases lack some."""
    known = inspect.signature(InputBatch.__init__).parameters
    facts: Any = {name: value for name, value in _FACTS.items() if name in known}
    return InputBatch(**facts)


def state(token: int | tuple[int, ...] | None, outputs: list[int]) -> CachedRequestState:
    """State of a request that its scheduler has started with a token, with several, or without one."""
    tokens = (token,) if isinstance(token, int) else token
    extra = {"kv_transfer_params": {}, **({} if tokens is None else {GIVEN_ARG: GivenIds(tokens)})}
    params = SamplingParams(extra_args=extra, presence_penalty=1.0)
    facts: Any = {"mm_features": [], "block_ids": ([0],), "num_computed_tokens": len(PROMPT), "generator": None}
    return CachedRequestState("r", PROMPT, sampling_params=params, output_token_ids=outputs, **facts)


def wrong(token: int | tuple[int, ...] | None, outputs: list[int], there: list[int]) -> str:
    """List differences between the batch and that of a request with the outputs `there`; empty if there are none."""
    made, added = batch(), state(token, outputs)
    at, end = made.add_request(added), len(PROMPT) + len(there)
    compared = {
        "outputs": (added.output_token_ids, there),
        "outputs in the batch": (made.req_output_token_ids[at], there),
        "tokens": (made.token_ids_cpu[at, :end].tolist(), [*PROMPT, *there]),
        "prompt's length": (int(made.num_prompt_tokens[at]), len(PROMPT)),
        "length": (int(made.num_tokens_no_spec[at]), end),
    }
    return ", ".join(f"{name}: {has}, wanted {wants}" for name, (has, wants) in compared.items() if has != wants)
