# SPDX-License-Identifier: Apache-2.0
"""Delays between repetitions: they double up to a bound, and chance shortens them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.shared.backoff import Backoff

RAND = st.floats(0, 1, exclude_max=True)


def test_waits_double_up_to_the_limit_and_jitter_keeps_half() -> None:
    waits = Backoff(1.0, 5.0, floor=0.5)
    assert [waits.delay(failures, 0.0) for failures in range(1, 6)] == [0.5, 1.0, 2.0, 2.5, 2.5]
    assert [round(waits.delay(failures, 0.999), 2) for failures in range(1, 6)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert waits.delay(5000, 0.999) <= 5.0


@given(st.integers(1, 100), RAND, st.floats(0.001, 1), st.floats(1, 60))
def test_backoff_grows_and_is_bounded(attempt: int, rand: float, first: float, longest: float) -> None:
    backoff = Backoff(first, longest)
    assert 0 <= backoff.delay(attempt, rand) <= min(longest, first * 2 ** (attempt - 1))
