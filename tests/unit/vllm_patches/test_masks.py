# SPDX-License-Identifier: Apache-2.0
"""Masks of allowed tokens stay with their requests, wherever rows of a batch move."""

from __future__ import annotations

import torch

from vllm_ascend_pd.vllm_patches import masks


class MaskedBatch:
    """As vLLM's before 0.32, with what matters here: rows of requests, and their masks."""

    def __init__(self) -> None:
        self.req_ids: list[str | None] = []
        self.allowed_token_ids_mask_cpu_tensor: torch.Tensor | None = torch.zeros(8, 4, dtype=torch.bool)

    def add(self, *names: str, allowed: int | None = None) -> None:
        for name in names:
            self.req_ids.append(name)
            if allowed is not None:
                row = self.mask[len(self.req_ids) - 1]
                row[:] = True
                row[allowed] = False

    def remove(self, name: str) -> None:
        at = self.req_ids.index(name)
        self.req_ids[at] = None
        self.mask[at] = False

    @property
    def mask(self) -> torch.Tensor:
        assert self.allowed_token_ids_mask_cpu_tensor is not None
        return self.allowed_token_ids_mask_cpu_tensor

    def swap_states(self, i1: int, i2: int) -> None:
        self.req_ids[i1], self.req_ids[i2] = self.req_ids[i2], self.req_ids[i1]
        mask = self.allowed_token_ids_mask_cpu_tensor
        if mask is not None:
            mask[i1], mask[i2] = mask[i2], mask[i1]

    def condense(self) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        while None in self.req_ids:
            last, free = len(self.req_ids) - 1, self.req_ids.index(None)
            if free < last and self.req_ids[last] is not None:
                self.req_ids[free] = self.req_ids[last]
                if mask is not None:
                    mask[free] = mask[last]
            del self.req_ids[last]

    def allowed(self) -> dict[str | None, int | None]:
        """Return the one token that each request may have; None: any."""
        rows = zip(self.req_ids, self.mask.tolist(), strict=False)
        return {name: row.index(False) if any(row) else None for name, row in rows}


class MendedBatch(MaskedBatch):
    swap_states = masks.swap_masks(MaskedBatch.swap_states)
    condense = masks.clear_masks(MaskedBatch.condense)


def swapped(batch: MaskedBatch) -> MaskedBatch:
    batch.add("a")
    batch.add("b", allowed=1)
    batch.swap_states(0, 1)
    return batch


def moved(batch: MaskedBatch) -> MaskedBatch:
    batch.add("a")
    batch.add("b", allowed=1)
    batch.remove("a")
    batch.condense()
    batch.add("c")
    return batch


def test_two_rows_that_are_swapped_keep_their_masks() -> None:
    assert swapped(MaskedBatch()).allowed() == {"b": 1, "a": 1}, "as vLLM before 0.32 has it"
    assert swapped(MendedBatch()).allowed() == {"b": 1, "a": None}


def test_a_row_that_moves_leaves_no_mask_behind() -> None:
    assert moved(MaskedBatch()).allowed() == {"b": 1, "c": 1}, "as vLLM before 0.32 has it"
    assert moved(MendedBatch()).allowed() == {"b": 1, "c": None}


def test_a_batch_without_masks_is_as_it_was() -> None:
    batch = MendedBatch()
    batch.req_ids, batch.allowed_token_ids_mask_cpu_tensor = ["a", None, "b"], None
    batch.swap_states(0, 2)
    batch.condense()
    assert batch.req_ids == ["b", "a"]


def test_a_vllm_without_the_faults_is_left_alone() -> None:
    from vllm.v1.worker.gpu_input_batch import InputBatch

    before = InputBatch.swap_states, InputBatch.condense
    assert masks.install() == ""
    assert (InputBatch.swap_states, InputBatch.condense) == before, "the installed one has none"
