# SPDX-License-Identifier: Apache-2.0
"""Scripts for a random model: parsers of tools and of reasoning make no sense of what it says by itself.

A request's `vllm_xargs` has its `script`: the token of each place of its answer, or ANY for some letter, which the
model chooses. Behind the script it is free. The place is the number of outputs, those included that another engine had.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

ANY = -1
_LETTERS = slice(3 + ord("a") - ord("!"), 3 + ord("z") - ord("!") + 1)  # of a tokenizer of bytes


class ScriptedTokens(LogitsProcessor):
    """The script of each request in the batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._scripts: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._scripts, batch_update, _script)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (script, said) in self._scripts.items():
            if len(said) < len(script):
                token = script[len(said)]
                wanted = _LETTERS if token == ANY else slice(token, token + 1)
                kept = logits[row, wanted].clone()
                logits[row] = -math.inf
                logits[row, wanted] = kept
        return logits


def _script(params: Any, prompt: list[int] | None, said: list[int]) -> tuple[list[int], list[int]] | None:
    script = (params.extra_args or {}).get("script")
    return (script, said) if script else None
