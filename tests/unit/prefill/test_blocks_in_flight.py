# SPDX-License-Identifier: Apache-2.0
"""Blocks of a cached prefix that are ready, and those that the same step computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from unit.schedulers.kit import CACHE, engine, output, remote_decode, request, reservation
from vllm_ascend_pd.engine import WorkerFacts
from vllm_ascend_pd.geometry.layout import COMPRESSED, STATE, Group
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.in_flight import Chunk
from vllm_ascend_pd.prefill.scheduler.role import PrefillScheduler
from vllm_ascend_pd.protocol.auth import seal

SIZE = 4
PLAIN = (Group(SIZE),)


def chunk(name: str, computed: int, count: int, *new: Sequence[int], replaces: bool = True) -> Chunk:
    return Chunk(name, computed, count, new, replaces)


class UnpushedSteps:
    """A book whose requests are not pushed, step by step."""

    def __init__(self) -> None:
        self.book = PushBook(model="m")

    def step(self, chunks: Sequence[Chunk], ended: Sequence[str]) -> None:
        for name in ended:
            self.book.finished(0.0, name, holds_blocks=True, well=True, why="")
        self.book.step(chunks, {}.__getitem__)

    def ready(self, chunks: Sequence[Chunk], ended: Sequence[str], groups: Any) -> int:
        """Run a step; return how many computed tokens of the last chunk's request are ready."""
        self.step(chunks, ended)
        record = self.book.find(chunks[-1].request_id)
        assert record is not None
        return self.book.flight.ready(chunks[-1], record.tables, groups)


def ready(*chunks: Chunk, ended: Sequence[str] = (), groups: Any = PLAIN, known: UnpushedSteps | None = None) -> int:
    """Run a step; return how many computed tokens of the last chunk's request are ready."""
    return (known or UnpushedSteps()).ready(chunks, ended, groups)


def test_what_no_step_computes_now_is_there() -> None:
    assert ready(chunk("a", 0, 8, [1, 2]), chunk("b", 8, 2, [3, 4, 5])) == 8


@pytest.mark.parametrize(("beside", "there"), [((0, 8), 0), ((4, 4), 4), ((7, 1), 4), ((8, 4), 8)], ids=str)
def test_what_another_request_of_the_step_computes_is_not_there(beside: tuple[int, int], there: int) -> None:
    """`a` computes blocks 1 and 2, which `b` has before its own."""
    assert ready(chunk("a", *beside, [1, 2, 9]), chunk("b", 8, 2, [1, 2, 3])) == there


def test_a_block_that_becomes_full_in_this_step_was_allocated_in_an_earlier_one() -> None:
    computing = UnpushedSteps()
    computing.step([chunk("a", 0, 6, [1, 2])], ())
    more = chunk("a", 6, 2, replaces=False)
    assert ready(more, chunk("b", 8, 2, [1, 2, 3]), known=computing) == 4
    assert ready(Chunk("a", 8, 1, ([9],), False), chunk("c", 8, 2, [1, 2, 4]), known=computing) == 8


def test_blocks_of_requests_that_are_over_belong_to_none() -> None:
    computing = UnpushedSteps()
    computing.step([chunk("a", 0, 6, [1, 2])], ())
    assert ready(chunk("b", 8, 2, [1, 2, 3]), ended=["a"], known=computing) == 8
    assert computing.book.open_count() == 1


def test_a_request_that_comes_back_has_other_blocks() -> None:
    computing = UnpushedSteps()
    computing.step([chunk("a", 0, 8, [1, 2])], ())
    assert ready(chunk("a", 0, 8, [6, 7]), chunk("b", 8, 2, [1, 2, 3]), known=computing) == 8
    assert ready(chunk("a", 4, 4, replaces=False), chunk("c", 8, 2, [6, 7, 3]), known=computing) == 4


def test_the_group_that_lacks_most_decides_and_states_do_not() -> None:
    groups = (Group(SIZE), Group(2 * SIZE), Group(SIZE, STATE))
    states = [0, 0, 0, 7]
    beside = chunk("a", 8, 8, [1, 2, 3, 4], [5, 6], states)
    assert ready(beside, chunk("b", 16, 1, [1, 2, 8, 4, 10], [11, 14, 12], states), groups=groups) == 12
    assert ready(beside, chunk("b", 16, 1, [1, 2, 8, 4, 10], [11, 6, 12], states), groups=groups) == 8
    assert ready(beside, chunk("b", 16, 1, [1, 2, 8, 9, 10], [11, 13, 12], states), groups=groups) == 16


def test_blocks_of_compressed_layers_stand_for_more_tokens() -> None:
    groups = (Group(SIZE), Group(2, COMPRESSED, 3))  # a block of 2 entries: 6 tokens
    beside = chunk("a", 8, 8, [1, 2, 3, 4], [5, 6])
    assert ready(beside, chunk("b", 12, 1, [1, 2, 8, 9], [5, 11, 12]), groups=groups) == 12
    assert ready(beside, chunk("b", 12, 1, [1, 2, 8, 9], [5, 6, 12]), groups=groups) == 6


@pytest.mark.parametrize(("cached", "there"), [(0, 0), (4, 4), (8, 8), (12, 8), (None, 8)], ids=str)
def test_what_another_connector_loads_in_this_step_is_not_there(cached: int | None, there: int) -> None:
    """vLLM calls it computed. Another request of the step may find it in the prefix cache, too."""
    loading = Chunk("a", 8, 4, ([1, 2, 3],), True, cached)
    assert ready(loading) == there
    assert ready(loading, chunk("b", 8, 2, [1, 2, 9])) == there


@pytest.mark.parametrize(
    ("cached", "beside", "early"), [(4, [9, 9], 4), (None, [9, 9], 4), (4, [1, 9], 0), (0, [9, 9], 0)], ids=str
)
def test_a_prompt_that_p_has_cached_leaves_before_the_forward(
    cached: int | None, beside: list[int], early: int
) -> None:
    """But not what another connector loads into this cache: vLLM counts it as computed while it is being loaded."""
    scheduler, asked = PrefillScheduler(engine()), request()
    if cached is not None:
        assert scheduler.wanted(asked, cached) == 0
    scheduler.attach_workers({(0, rank): WorkerFacts(None, CACHE) for rank in range(2)})
    asked.kv_transfer_params = remote_decode(seal(reservation(asked), None))
    scheduler.allocated(asked)
    step = scheduler.build_step(output([("beside", 0, 8, beside), ("r", 4, 6, [1, 2, 3])]))
    assert [(slice_.before, slice_.after) for slice_ in step.computed] == [(0, early)] * bool(early)
    assert [(slice_.before, slice_.after) for slice_ in step.slices] == [(early, 10)]
