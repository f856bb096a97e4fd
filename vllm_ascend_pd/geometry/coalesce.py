# SPDX-License-Identifier: Apache-2.0
"""Byte spans and their merging: two spans become one where they touch on both sides."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Spans(msgspec.Struct, frozen=True, eq=False):
    """Equal-length arrays: `size[i]` bytes at `src[i]` belong at `dst[i]`. Offsets from a base on each side."""

    src: Ints
    dst: Ints
    size: Ints

    def __len__(self) -> int:
        return len(self.size)

    @property
    def nbytes(self) -> int:
        return int(self.size.sum())

    def part(self, ends: list[int], index: int) -> Spans:
        """Return the spans of one group; group g stops at `ends[g]`."""
        a, b = ends[index - 1] if index else 0, ends[index]
        return Spans(self.src[a:b], self.dst[a:b], self.size[a:b])


def merged(spans: Spans, ends: Ints) -> tuple[Spans, Ints]:
    """Merge neighbours within each group, where group g stops at `ends[g]`. Return the spans and their new ends.

    Groups keep their order. Within a group the spans may be reordered: a free list that was filled backwards hands
    out descending blocks, which touch only after sorting.
    """
    if len(spans) < 2:
        return spans, ends
    up, down = _touching(spans, ends)
    if 8 * np.count_nonzero(down) >= len(spans):
        group = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        order = np.lexsort((spans.src, group))
        spans = Spans(spans.src[order], spans.dst[order], spans.size[order])
        up, _ = _touching(spans, ends)
    if not up.any():
        return spans, ends
    first = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(~up) + 1))
    size = np.add.reduceat(spans.size, first)
    return Spans(spans.src[first], spans.dst[first], size), np.searchsorted(first, ends).astype(np.int64, copy=False)


def _touching(spans: Spans, ends: Ints) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return whether span i+1 continues span i on both sides, and whether it precedes it; never across groups."""
    src_step = spans.src[1:] - spans.src[:-1]
    dst_step = spans.dst[1:] - spans.dst[:-1]
    same = src_step == dst_step
    up = same & (src_step == spans.size[:-1])
    down = same & (src_step == -spans.size[1:])
    borders = ends[(ends > 0) & (ends < len(spans))] - 1
    up[borders] = False
    down[borders] = False
    return up, down
