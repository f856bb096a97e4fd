# SPDX-License-Identifier: Apache-2.0
"""A new request as a worker of vLLM's second model runner knows it, in vLLM's own class for it."""

from __future__ import annotations

from typing import Any

import torch

ROOM = {"max_num_reqs": 2, "max_model_len": 256, "max_num_batched_tokens": 256, "vocab_size": 128}


def wrong(new: Any, prompt: list[int], outputs: list[int]) -> str:
    """List differences between what a worker takes in of vLLM's NewRequestData and these tokens; empty if none."""
    import vllm.v1.worker.cpu.shm  # noqa: F401 (lets the next one work without a GPU; for this process only)
    from vllm.v1.worker.gpu.states import RequestState

    states = RequestState(**ROOM, num_speculative_steps=0, device=torch.device("cpu"))  # type: ignore[arg-type]
    length = getattr(new, "prompt_len", len(new.prompt_token_ids))
    states.add_request("r", length, new.prefill_token_ids, new.num_computed_tokens, new.sampling_params.max_tokens)
    states.apply_staged_writes()
    at, end = states.req_id_to_index["r"], len(prompt) + len(outputs)
    compared = {
        "prompt's length": (int(states.prompt_len.np[at]), len(prompt)),
        "length": (int(states.prefill_len.np[at]), end),
        "computed": (int(states.num_computed_tokens_np[at]), len(prompt)),
        "tokens": (states.all_token_ids.gpu[at, :end].tolist(), [*prompt, *outputs]),
    }
    return ", ".join(f"{name}: {has}, wanted {wants}" for name, (has, wants) in compared.items() if has != wants)
