# SPDX-License-Identifier: Apache-2.0
"""The grid of context parallelism that plans, the workers of both sides, and admission are tested with.

Every division of prefill's tokens meets every one of decode's, equal and unequal, for attention with one head on every
rank (MLA, MQA) and with several (GQA). The pair in which neither side divides them is left out.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple


class ContextParallel(NamedTuple):
    """Context parallelism of one engine, in which each head's tokens are divided among `dcp` ranks."""

    dcp: int = 1
    pcp: int = 1

    def tp(self, heads: int) -> int:
        """Return the smallest TP size that allows this DCP. With DCP 1 it is 1: a rank of PCP holds every head."""
        return heads * self.dcp if self.dcp > 1 else 1

    def __str__(self) -> str:
        return f"dcp{self.dcp}pcp{self.pcp}"


HEADS = (1, 2)
ON_DECODE = tuple(ContextParallel(dcp) for dcp in (1, 2, 4, 8))
ON_PREFILL = (*ON_DECODE, *(ContextParallel(dcp, pcp) for dcp, pcp in ((1, 2), (1, 3), (2, 2), (4, 2))))
GRID = [
    (heads, p, d) for heads, p, d in product(HEADS, ON_PREFILL, ON_DECODE) if (p, d) != (ON_PREFILL[0], ON_DECODE[0])
]
