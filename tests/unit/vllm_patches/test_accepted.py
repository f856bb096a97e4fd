# SPDX-License-Identifier: Apache-2.0
"""Accepted drafts are counted by the rows of the step in which they were, whatever lies between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_ascend_pd.vllm_patches import accepted


class Runner:
    """As vllm-ascend's: rows of the batch are known from one step to the next."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=[], prev_req_id_to_index={}, num_accepted_tokens_cpu=np.ones(8, int))
        self.num_accepted_tokens = SimpleNamespace(np=np.ones(8, int))

    def _update_states(self, scheduler_output: Any) -> None:
        batch, there = self.input_batch, scheduler_output.num_scheduled_tokens
        batch.prev_req_id_to_index = {one: at for one, at in batch.prev_req_id_to_index.items() if one in there}
        batch.req_ids = list(there)

    def _sync_num_accepted_tokens(self, num_reqs: int, has_prev_mapping: bool) -> None:
        rows, counts = self.input_batch.prev_req_id_to_index, self.num_accepted_tokens.np
        reordered = [counts[rows[one]] if one in rows else 1 for one in self.input_batch.req_ids]
        counts[:num_reqs] = self.input_batch.num_accepted_tokens_cpu[:num_reqs] = reordered

    def step(
        self,
        *requests: str,
        preempted: tuple[str, ...] = (),
        resumed: tuple[str, ...] = (),
        finished: tuple[str, ...] = (),
    ) -> dict[str, int]:
        """Schedule these requests. Return how many tokens each is taken to have had accepted in the step before."""
        output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(requests, 4),
            total_num_scheduled_tokens=4 * len(requests),
            preempted_req_ids=set(preempted) or None,
            finished_req_ids=set(finished),
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
        )
        self._update_states(output)
        if not requests:
            return {}
        self._sync_num_accepted_tokens(len(requests), bool(self.input_batch.prev_req_id_to_index))
        return dict(zip(requests, self.input_batch.num_accepted_tokens_cpu.tolist(), strict=False))

    def accept(self, **counts: int) -> None:
        """End a step: its rows are those of its requests."""
        self.input_batch.prev_req_id_to_index = {one: row for row, one in enumerate(self.input_batch.req_ids)}
        for row, one in enumerate(self.input_batch.req_ids):
            self.num_accepted_tokens.np[row] = counts[one]


class Mended(Runner):
    """The same with both of its methods wrapped."""


for name, around in (("_update_states", accepted.keep_rows), ("_sync_num_accepted_tokens", accepted.count_by_rows)):
    setattr(Mended, name, around(getattr(Runner, name)))


def after_steps_of_nothing(runner: Runner) -> dict[str, int]:
    runner.step("a", "b", "c")
    runner.accept(a=3, b=1, c=4)
    runner.step()
    runner.step()
    return runner.step("c", "a", preempted=("b",))


def test_a_step_of_nothing_does_not_change_what_was_accepted() -> None:
    assert after_steps_of_nothing(Runner()) == {"c": 1, "a": 1}, "as vllm-ascend has it"
    assert after_steps_of_nothing(Mended()) == {"c": 4, "a": 3}


def test_the_next_step_is_counted_by_its_own_rows() -> None:
    runner = Mended()
    after_steps_of_nothing(runner)
    runner.accept(c=2, a=1)
    assert runner.step("a", "c", "new") == {"a": 1, "c": 2, "new": 1}


def left_out_of_a_step(runner: Runner, **of_the_last: Any) -> dict[str, int]:
    runner.step("a", "b", "c", "d")
    runner.accept(a=3, b=2, c=4, d=3)
    assert runner.step("b", "a") == {"b": 2, "a": 3}
    runner.accept(b=1, a=2)
    return runner.step("d", "a", "b", "c", **of_the_last)


def test_a_step_that_leaves_a_request_out_does_not_change_what_was_accepted() -> None:
    assert left_out_of_a_step(Runner()) == {"d": 1, "a": 2, "b": 1, "c": 1}, "as vllm-ascend has it"
    assert left_out_of_a_step(Mended()) == {"d": 3, "a": 2, "b": 1, "c": 4}
    assert left_out_of_a_step(Mended(), resumed=("d",)) == {"d": 1, "a": 2, "b": 1, "c": 4}


def test_what_is_over_is_forgotten() -> None:
    runner = Mended()
    runner.step("a", "b", "c")
    runner.accept(a=3, b=2, c=4)
    runner.step("a", finished=("b",), preempted=("c",))
    runner.accept(a=2)
    runner.step()
    assert runner.step("b", "a", "c") == {"b": 1, "a": 2, "c": 1}
    assert runner.pd_counts == runner.pd_rows == {}  # type: ignore[attr-defined]


def test_a_request_that_begins_anew_has_none() -> None:
    runner = Mended()
    runner.step("a", "b")
    runner.accept(a=3, b=4)
    runner.step()
    assert runner.step("a", "b", resumed=("b",)) == {"a": 3, "b": 1}


def test_it_is_left_to_engines_that_have_no_such_step() -> None:
    """Without vllm-ascend, drafts or states nothing is imported."""
    hybrid, drafts = SimpleNamespace(is_hybrid=True), SimpleNamespace()
    assert accepted.install(SimpleNamespace(speculative_config=drafts, model_config=hybrid)) == ""
