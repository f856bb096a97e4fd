# SPDX-License-Identifier: Apache-2.0
"""A request's block tables, one for each group, as vLLM's managers keep them.

Blocks are freed once they are behind a window, and a state's once a later block has the state.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ascend_pd.geometry.layout import ALL, STATE, CacheGeometry, Group

NULL = 0  # the null block, where there are windows


def pool(geometry: CacheGeometry, blocks: int) -> list[int]:
    """Return the blocks that an engine can allocate: the groups share one pool."""
    return list(range(1 if geometry.groups else 0, blocks))


def needed(group: Group, tokens: int) -> int:
    """Return how many blocks of a group the first `tokens` tokens have, if none is behind a window."""
    return -(-(tokens // group.per_entry) // group.block_size)


class BlockTables:
    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        # block 0 is the null block
        self._has_null = len(self.groups) > 1 or any(group.matters != ALL for group in self.groups)
        self.ids: list[list[int]] = [[] for _ in groups]

    def grow(self, computed: int, tokens: int, free: list[int], rng: random.Random) -> bool:
        """Allocate blocks for tokens up to `tokens`, of which `computed` are present or will be loaded.

        Returns False if there are not enough.
        """
        begins = [max(len(ids), _behind(group, computed)) for ids, group in zip(self.ids, self.groups, strict=True)]
        stops = [needed(group, tokens) for group in self.groups]
        if sum(max(0, stop - begin) for begin, stop in zip(begins, stops, strict=True)) > len(free):
            return False
        for ids, begin, stop in zip(self.ids, begins, stops, strict=True):
            ids.extend(NULL for _ in range(min(begin, stop) - len(ids)))
            ids.extend(free.pop(rng.randrange(len(free))) for _ in range(stop - len(ids)))
        return True

    def let_go(self, computed: int) -> list[int]:
        """Return the blocks behind the windows once `computed` tokens are computed, and remove them."""
        gone: list[int] = []
        for ids, group in zip(self.ids, self.groups, strict=True):
            for index in range(min(_behind(group, computed), len(ids))):
                if ids[index] != NULL:
                    gone.append(ids[index])
                    ids[index] = NULL
        return gone

    def clear(self) -> list[int]:
        """Return and remove all blocks."""
        gone = [block for ids in self.ids for block in ids if block != NULL or not self._has_null]
        self.ids = [[] for _ in self.groups]
        return gone

    def arrays(self) -> tuple[NDArray[np.int64], ...]:
        return tuple(np.asarray(ids, dtype=np.int64) for ids in self.ids)


def _behind(group: Group, computed: int) -> int:
    """Return how many blocks hold nothing that the token `computed` or a later one sees.

    A token sees itself and n - 1 before it, or the state after the one before it.
    """
    if group.matters == STATE:
        return max(0, computed - 1) // group.block_size
    return max(0, computed - group.n + 1) // group.block_size if group.partial else 0
