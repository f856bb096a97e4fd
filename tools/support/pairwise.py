# SPDX-License-Identifier: Apache-2.0
"""Pairwise covering: few cells that contain every pair of levels of any two factors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Cell = dict[str, str]  # a level of each factor


def pairs(cell: Mapping[str, str]) -> set[frozenset[tuple[str, str]]]:
    """Return the pairs of levels in a cell."""
    return set(map(frozenset, itertools.combinations(cell.items(), 2)))


def cover(factors: Mapping[str, Sequence[str]], without: Mapping[str, str] | None = None) -> list[Cell]:
    """Return cells that cover all pairs; none has all levels of `without`. Equal arguments give equal cells.

    Greedy: each cell is the one with the most pairs not covered yet, the first of equals.
    """
    product = [dict(zip(factors, levels, strict=True)) for levels in itertools.product(*factors.values())]
    if without:
        product = [cell for cell in product if not without.items() <= cell.items()]
    open_pairs = set[frozenset[tuple[str, str]]]().union(*map(pairs, product))
    cells: list[Cell] = []
    while open_pairs:
        best = max(product, key=lambda cell: len(pairs(cell) & open_pairs))
        open_pairs -= pairs(best)
        cells.append(best)
    return cells
