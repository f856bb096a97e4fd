# SPDX-License-Identifier: Apache-2.0
"""The ranges pushed in each step add up to what D wants, whatever the chunks and the block sizes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.geometry.layout import Group
from vllm_ascend_pd.geometry.plan import push_range


def test_only_complete_blocks_leave_before_the_end() -> None:
    assert push_range(0, 300, 0, 200, 128) == (0, 128)
    assert push_range(0, 300, 200, 250, 128) == (128, 128)
    assert push_range(0, 300, 250, 300, 128) == (128, 300)


def test_a_prefix_hit_on_d_is_never_pushed_again() -> None:
    assert push_range(100, 300, 0, 300, 128) == (100, 300)
    assert push_range(100, 300, 0, 64, 128) == (100, 100)


def test_nothing_leaves_after_the_end() -> None:
    assert push_range(0, 300, 300, 301, 128) == (300, 300)
    assert push_range(0, 300, 310, 400, 128) == (300, 300)


@settings(max_examples=200)
@given(st.data())
def test_steps_meet_without_gap_or_overlap(data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 60))
    end = data.draw(st.integers(first + 1, first + 120))
    block = data.draw(st.integers(1, 40))
    marks = sorted(data.draw(st.lists(st.integers(0, end + 10), max_size=8)))
    at = first
    before = 0
    for after in [*marks, end, end + 1]:
        after = max(before, after)  # noqa: PLW2901
        lo, hi = push_range(first, end, before, after, block)
        assert lo <= hi
        if hi > lo:
            assert lo == at
            assert hi == end or hi % block == 0
            assert hi <= max(after, first)
            at = hi
        before = after
    assert at == end


@settings(max_examples=100)
@given(st.integers(0, 50), st.integers(1, 200), st.integers(1, 300), st.integers(1, 40))
def test_a_window_starts_at_a_block_and_covers_the_window(first: int, length: int, window: int, block: int) -> None:
    end = first + length
    start = Group(block, "window", window).begins(first, end)
    assert first <= start <= max(first, end - window + 1), "the next token sees itself and those before it"
    assert start == first or start % block == 0
    assert start == first or start > end - window + 1 - block
    assert Group(block).begins(first, end) == first
