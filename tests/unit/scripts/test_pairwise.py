# SPDX-License-Identifier: Apache-2.0
"""A cover contains every pair, and is small."""

from __future__ import annotations

import itertools

import pytest

from tools.support.pairwise import cover

FACTORS = [
    {"a": ("1", "2"), "b": ("1", "2")},
    {"a": ("1", "2", "3"), "b": ("x", "y"), "c": ("x", "y"), "d": ("x", "y"), "e": ("x", "y")},
    {"a": ("1", "2", "3", "4"), "b": ("1", "2", "3"), "c": ("x",), "d": ("x", "y")},
]


@pytest.mark.parametrize("factors", FACTORS, ids=lambda factors: f"{len(factors)} factors")
def test_every_pair_of_levels_is_in_a_cell(factors: dict[str, tuple[str, ...]]) -> None:
    cells = cover(factors)
    for (one, levels), (other, more) in itertools.combinations(factors.items(), 2):
        for pair in itertools.product(levels, more):
            assert any((cell[one], cell[other]) == pair for cell in cells), (one, other, pair)
    sizes = sorted(map(len, factors.values()))
    assert sizes[-1] * sizes[-2] <= len(cells) <= 2 * sizes[-1] * sizes[-2], (
        "fewer are impossible, many more are no cover"
    )
    assert cells == cover(factors)
    assert len({tuple(cell.items()) for cell in cells}) == len(cells)


def test_every_pair_but_the_impossible_one_is_in_a_cell() -> None:
    factors = FACTORS[1]
    cells = cover(factors, {"b": "y", "c": "x"})
    for (one, levels), (other, more) in itertools.combinations(factors.items(), 2):
        for pair in itertools.product(levels, more):
            there = any((cell[one], cell[other]) == pair for cell in cells)
            assert there is ((one, other, *pair) != ("b", "c", "y", "x")), (one, other, pair)
