# SPDX-License-Identifier: Apache-2.0
"""Ranges before a transfer engine gets them: nothing outside, nothing lost, as few spans as possible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.transport.maps import check_mapped
from vllm_ascend_pd.transport.spans import Bounds, as_spans, merge_regions, merge_runs

SPACE = 400
ranges = st.lists(st.tuples(st.integers(1, SPACE), st.integers(1, 60)), max_size=12)


def covered(pairs: Sequence[tuple[int, int]]) -> set[int]:
    return {byte for address, length in pairs for byte in range(address, address + length)}


@given(ranges)
def test_merged_regions_cover_the_same_bytes_and_do_not_touch(pairs: Sequence[tuple[int, int]]) -> None:
    merged = merge_regions(pairs)
    assert covered(merged) == covered(pairs)
    assert all(a + la < b for (a, la), (b, _) in itertools.pairwise(merged))


@pytest.mark.parametrize("pair", [(0, 10), (-8, 10), (100, 0), (100, -1)])
def test_an_impossible_region_is_named(pair: tuple[int, int]) -> None:
    with pytest.raises(PdError) as caught:
        merge_regions([(1000, 10), pair])
    assert caught.value.code == "PD-WIRE-002"


@given(ranges, st.lists(st.tuples(st.integers(-20, SPACE + 100), st.integers(-5, 80)), min_size=1, max_size=8))
def test_bounds_let_exactly_those_spans_through_that_lie_inside(
    pairs: Sequence[tuple[int, int]], spans: list[tuple[int, int]]
) -> None:
    inside = covered(pairs)
    good = all(size > 0 and set(range(at, at + size)) <= inside for at, size in spans)
    at, size = (np.array(side) for side in zip(*spans, strict=True))
    bounds = Bounds(pairs, "source")
    if good:
        bounds.check(at, size)
    else:
        with pytest.raises(PdError) as caught:
            bounds.check(at, size)
        assert caught.value.code == "PD-WIRE-003"
        assert "source" in str(caught.value)


def test_bounds_do_not_overflow_near_the_end_of_the_address_space() -> None:
    top = 2**63 - 4096
    bounds = Bounds([(top, 4000)], "destination")
    bounds.check([top], [4000])
    with pytest.raises(PdError):
        bounds.check([top], [2**63 - 1])


def test_the_first_wrong_span_is_the_one_that_is_named() -> None:
    with pytest.raises(PdError) as caught:
        Bounds([(100, 100)], "destination").check([100, 150, 90], [10, 51, 5])
    assert caught.value.values == {"length": 51, "address": 150, "side": "destination"}


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4)), max_size=30)


@given(st.lists(st.integers(0, 40), unique=True, max_size=30), st.randoms())
def test_merging_runs_keeps_every_byte_with_its_source(slots: list[int], random: Random) -> None:
    """Cells of 8 bytes, destination slots distinct, sources anywhere."""
    sources = [random.choice([slot, slot + 100, random.randrange(50)]) for slot in slots]
    src, dst = np.array(sources, dtype=np.int64) * 8, np.array(slots, dtype=np.int64) * 8
    size = np.full(len(slots), 8, dtype=np.int64)
    wanted = {d + i: s + i for s, d in zip(src, dst, strict=True) for i in range(8)}
    ms, md, mn = merge_runs(src, dst, size)
    got = {d + i: s + i for s, d, n in zip(ms, md, mn, strict=True) for i in range(n)}
    assert got == wanted
    assert all(ms[i] + mn[i] != ms[i + 1] or md[i] + mn[i] != md[i + 1] for i in range(len(ms) - 1)), (
        "two neighbours were not merged"
    )


def test_a_run_in_any_order_becomes_one_span() -> None:
    n = np.array([3, 0, 2, 1]) * 4096
    src, dst, size = merge_runs(10**6 + n, 10**9 + n, np.full(4, 4096))
    assert (src.tolist(), dst.tolist(), size.tolist()) == ([10**6], [10**9], [4 * 4096])


def test_spans_that_do_not_belong_together_are_a_local_error() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        as_spans([1, 2], [1], [1])


def test_own_memory_is_mapped_and_the_zero_page_is_not() -> None:
    memory = np.zeros(1 << 20, dtype=np.uint8)
    check_mapped([(memory.ctypes.data, memory.nbytes)])
    with pytest.raises(PdError, match="not mapped"):
        check_mapped([(4096, 100)])


def test_neighbouring_mappings_count_as_one(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("1000-2000 r-xp 0 00:00 0 a\n2000-3000 rw-p 0 00:00 0\n4000-5000 ---p 0 00:00 0\n")
    check_mapped([(0x1800, 0x1800)], maps)
    for region in ((0x2800, 0x1000), (0x4000, 0x10), (0x800, 0x1000)):
        with pytest.raises(PdError):
            check_mapped([region], maps)
    check_mapped([(0x9000, 1)], tmp_path / "none")
