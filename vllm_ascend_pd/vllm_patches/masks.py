# SPDX-License-Identifier: Apache-2.0
"""Rows of `allowed_token_ids` in the first model runner's batch, which vLLM before 0.32 gives to other requests.

Swapping two rows leaves both with the mask of the second, because the first is overwritten before it is read, and a row
that moves down leaves its mask behind for the next request there. So a request's tokens would be chosen among those
that another one allows: silently wrong text, of a client's own `allowed_token_ids` too. P uses it for requests of which
D chooses the first token (requests.py).
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm_ascend_pd.vllm_patches.wrapping import differing, wrap

_SWAP, _CONDENSE = "swap_states", "condense"  # of the batch
_MASK = "allowed_token_ids_mask_cpu_tensor"
_MENDED = f"{_MASK}[last_req_index].fill_(False)"  # in the releases that have neither fault


def install() -> str:
    """Wrap vLLM's batch, once, where it has the fault. Return why not; empty: it is wrapped, or has no need."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    swap, condense = getattr(InputBatch, _SWAP, None), getattr(InputBatch, _CONDENSE, None)
    if swap is None or condense is None or differing((swap, ("self", "i1", "i2")), (condense, ("self",))):
        return "this vLLM keeps them otherwise"
    if _MENDED not in inspect.getsource(inspect.unwrap(condense)):
        wrap(InputBatch, _SWAP, swap_masks)
        wrap(InputBatch, _CONDENSE, clear_masks)
    return ""


def swap_masks(original: Any) -> Any:
    """Return the method that swaps two rows, with their masks swapped as well."""

    def swap_states(self: Any, i1: int, i2: int) -> None:
        mask = getattr(self, _MASK)
        swapped = None if mask is None else mask[[i2, i1]]  # a copy
        original(self, i1, i2)
        if mask is not None:
            mask[[i1, i2]] = swapped

    return swap_states


def clear_masks(original: Any) -> Any:
    """Return the method that moves rows down into free places, with the places that they leave cleared."""

    def condense(self: Any) -> Any:
        rows = len(self.req_ids)
        done = original(self)
        if (mask := getattr(self, _MASK)) is not None:
            mask[len(self.req_ids) : rows] = False
        return done

    return condense
