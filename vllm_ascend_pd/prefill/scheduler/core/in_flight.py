# SPDX-License-Identifier: Apache-2.0
"""Blocks that the planned step fills: a request that finds them in the prefix cache cannot push them yet.

vLLM puts blocks into its prefix cache when it schedules the step that fills them, so another request of the same step
finds them. A step computes blocks, or another connector loads them (behind a MultiConnector). What earlier steps
compute is complete before this step begins, in the order of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ascend_pd.geometry.layout import Group


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [computed, computed + count) of a request, which a step computes.

    `new` are the request's new blocks of each group, or all of them if it `replaces`. Of the computed tokens the first
    `cached` were in the prefix cache; what another connector loads is behind them. None: all of them.
    """

    request_id: str
    computed: int
    count: int
    new: Sequence[Sequence[int]] | None
    replaces: bool
    cached: int | None = None

    @property
    def filled(self) -> int:
        """The first token that the step fills in."""
        return self.computed if self.cached is None else min(self.computed, self.cached)


class BlocksInFlight:
    """Blocks of one step, by the chunks and block tables of all its requests, pushed or not."""

    def __init__(self, planned: Sequence[tuple[Chunk, Sequence[Sequence[int]]]] = ()) -> None:
        self._planned = planned
        self._filled: dict[int, set[int]] = {}  # by group, blocks that the step fills; made on demand

    def ready(self, chunk: Chunk, table: Sequence[Sequence[int]], groups: Sequence[Group]) -> int:
        """Return how many of a request's first tokens were filled in by earlier steps, not by this one."""
        computed = chunk.filled
        for index, (group, ids) in enumerate(zip(groups, table, strict=False)):
            if group.stateful:
                continue
            hot, size = self._written(index, group.covers), group.covers
            first = next((place for place, block in enumerate(ids[: -(-computed // size)]) if block in hot), None)
            if first is not None:
                computed = min(computed, first * size)
        return computed

    def _written(self, index: int, size: int) -> set[int]:
        """Blocks of a group that the step fills."""
        if (known := self._filled.get(index)) is not None:
            return known
        written = self._filled[index] = set[int]()
        for chunk, table in self._planned:
            if index < len(table):
                written.update(table[index][chunk.filled // size : -(-(chunk.computed + chunk.count) // size)])
        return written
