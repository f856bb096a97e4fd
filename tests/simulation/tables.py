# SPDX-License-Identifier: Apache-2.0
"""A request's block tables, one for each group, as vLLM's managers keep them: a window's blocks go when they are behind it, and a
state's when a later block has the state."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ascend_pd.geometry.layout import ALL, STATE, CacheGeometry, Group

NULL = 0  # the block of nobody, where there are windows


def pool(geometry: CacheGeometry, blocks: int) -> list[int]:
    """What an engine may give away of its blocks: groups draw from one pool."""
    return list(range(1 if geometry.groups else 0, blocks))


class Tables:
    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self._nobody = len(self.groups) > 1 or any(group.matters != ALL for group in self.groups)  # whose is block 0
        self.ids: list[list[int]] = [[] for _ in groups]

    def grow(self, computed: int, tokens: int, free: list[int], rng: random.Random) -> bool:
        """Blocks for tokens up to `tokens`, of which `computed` are there, or come from elsewhere. False: there are not enough."""
        begins = [max(len(ids), _behind(group, computed)) for ids, group in zip(self.ids, self.groups, strict=True)]
        stops = [-(-tokens // group.block_size) for group in self.groups]
        if sum(max(0, stop - begin) for begin, stop in zip(begins, stops, strict=True)) > len(free):
            return False
        for ids, begin, stop in zip(self.ids, begins, stops, strict=True):
            ids.extend(NULL for _ in range(min(begin, stop) - len(ids)))
            ids.extend(free.pop(rng.randrange(len(free))) for _ in range(stop - len(ids)))
        return True

    def let_go(self, computed: int) -> list[int]:
        """What is behind the windows once so many tokens are computed."""
        gone: list[int] = []
        for ids, group in zip(self.ids, self.groups, strict=True):
            for index in range(min(_behind(group, computed), len(ids))):
                if ids[index] != NULL:
                    gone.append(ids[index])
                    ids[index] = NULL
        return gone

    def clear(self) -> list[int]:
        """All of it."""
        gone = [block for ids in self.ids for block in ids if block != NULL or not self._nobody]
        self.ids = [[] for _ in self.groups]
        return gone

    def arrays(self) -> tuple[NDArray[np.int64], ...]:
        return tuple(np.asarray(ids, dtype=np.int64) for ids in self.ids)


def _behind(group: Group, computed: int) -> int:
    """How many blocks hold nothing that the token `computed` or a later one looks at: each sees itself and n - 1 before it, or the
    state after the one before it."""
    if group.matters == STATE:
        return max(0, computed - 1) // group.block_size
    return 0 if group.matters == ALL else max(0, computed - group.n + 1) // group.block_size
