# SPDX-License-Identifier: Apache-2.0
"""Few cells that have every pair of levels of any two factors: what a full product costs too much for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Cell = dict[str, str]  # a level of each factor


def pairs(cell: Mapping[str, str]) -> set[frozenset[tuple[str, str]]]:
    """The pairs of levels that a cell has."""
    return set(map(frozenset, itertools.combinations(cell.items(), 2)))


def cover(factors: Mapping[str, Sequence[str]]) -> list[Cell]:
    """The cell with the most pairs that are not there yet, until all are; of several the first. The same for the same factors."""
    product = [dict(zip(factors, levels, strict=True)) for levels in itertools.product(*factors.values())]
    open_pairs = set[frozenset[tuple[str, str]]]().union(*map(pairs, product))
    found: list[Cell] = []
    while open_pairs:
        best = max(product, key=lambda cell: len(pairs(cell) & open_pairs))
        open_pairs -= pairs(best)
        found.append(best)
    return found
