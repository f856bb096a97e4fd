# SPDX-License-Identifier: Apache-2.0
"""From token ranges to byte spans: chunks of tokens, and the pattern of spans that one chunk makes.

A chunk is a run of tokens inside one P block and one D block. How many spans it makes depends on how far heads and
tokens lie together on both sides: one span, one per head, one per token, or one per cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.coalesce import Ints, Spans
from vllm_ascend_pd.geometry.context_parallel import SharedRuns
from vllm_ascend_pd.geometry.layout import Region


class Tables(msgspec.Struct, frozen=True, eq=False):
    """One side's block tables, by job, from block index `firsts` of the prompt on. No `ids`: none are needed."""

    block_size: int
    ids: Sequence[npt.NDArray[np.int32]]
    firsts: Sequence[int]


class Grid(msgspec.Struct, frozen=True, eq=False):
    """Chunks of several jobs, in job and token order."""

    tokens: Ints  # number of tokens, by chunk
    src_block: npt.NDArray[np.int32]
    src_token: Ints  # place of the chunk's first token inside its block
    dst_block: npt.NDArray[np.int32]
    dst_token: Ints
    count: Ints  # number of chunks, by job
    ends: Ints  # where a job's chunks end


def grid(lo: Ints, hi: Ints, src: Tables, dst: Tables) -> Grid:
    """Cut the token ranges [lo, hi), none of them empty, at every block border of both sides."""
    size = math.gcd(src.block_size, dst.block_size)
    begin, stop = lo // size, -(-hi // size)
    count = stop - begin
    ends = np.cumsum(count)
    starts = ends - count
    chunk = np.arange(int(ends[-1]), dtype=np.int64)
    chunk += np.repeat(begin - starts, count)
    skipped = lo - begin * size
    tokens = np.full(len(chunk), size, dtype=np.int64)
    tokens[starts] -= skipped
    tokens[ends - 1] -= stop * size - hi
    sides = []
    for side in (src, dst):
        ratio = side.block_size // size
        block = _blocks(side, lo, hi)
        token = (chunk % ratio) * size if ratio > 1 else np.zeros(len(chunk), dtype=np.int64)
        token[starts] += skipped
        if ratio > 1 and side.ids:
            per_job = -(-hi // side.block_size) - lo // side.block_size
            shift = np.cumsum(per_job) - per_job - lo // side.block_size
            block = block[chunk // ratio + np.repeat(shift, count)]
        sides.append((block, token))
    return Grid(tokens, *sides[0], *sides[1], count, ends)


def dealt_grid(runs: Sequence[SharedRuns], src: Tables, dst: Tables) -> tuple[Ints, Grid]:
    """Return the indices of jobs with tokens that both ranks hold, and these runs of tokens as chunks."""
    counts = np.array([len(one.count) for one in runs], dtype=np.int64)
    some = np.flatnonzero(counts)
    chosen = [runs[index] for index in some.tolist()]
    sides = []
    for side, blocks in ((src, [one.p_block for one in chosen]), (dst, [one.d_block for one in chosen])):
        ids = [np.empty(0, dtype=np.int32)]
        for index, numbers in zip(some.tolist(), blocks, strict=True):
            table, first = side.ids[index], side.firsts[index]
            if int(numbers.max()) - first >= len(table) or int(numbers.min()) < first:
                raise LocalProtocolError("a job's block table is shorter than its token range")
            ids.append(table[numbers - first])
        sides.append(np.concatenate(ids))

    def joined(parts: list[Ints]) -> Ints:
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    tokens, src_token, dst_token = (
        joined([getattr(one, name) for one in chosen]) for name in ("count", "p_token", "d_token")
    )
    return some, Grid(tokens, sides[0], src_token, sides[1], dst_token, counts[some], np.cumsum(counts[some]))


def _blocks(side: Tables, lo: Ints, hi: Ints) -> npt.NDArray[np.int32]:
    """Return the jobs' block ids over their token ranges, end to end."""
    if not side.ids:
        return np.empty(0, dtype=np.int32)
    begin, stop = (lo // side.block_size).tolist(), (-(-hi // side.block_size)).tolist()
    parts = [table[a - f : b - f] for table, a, b, f in zip(side.ids, begin, stop, side.firsts, strict=True)]
    blocks = np.concatenate(parts)
    if len(blocks) != sum(stop) - sum(begin):
        raise LocalProtocolError("a job's block table is shorter than its token range")
    return blocks


class RegionSide(msgspec.Struct, frozen=True):
    """One region of one side as seen from the first head of a pattern."""

    block_stride: int
    head_stride: int
    token_stride: int
    base: int  # offset of the first head inside a block


class Pattern(msgspec.Struct, frozen=True):
    """Spans of one chunk of n tokens: one for each of `heads`, or n x `heads` if tokens lie apart too."""

    src: RegionSide
    dst: RegionSide
    cell: int
    heads: int  # heads that need a span each; 1 where they lie together
    width: int  # bytes of one token, or of one plane, in one span
    by_token: bool  # each token is a span of its own
    plane: bool  # the token axis is opaque: a span does not depend on the tokens
    whole: int  # tokens of a chunk whose heads form one span, because they lie together on both sides; 0: none

    @classmethod
    def between(cls, src: tuple[Region, int], dst: tuple[Region, int], heads: int, block_size: int) -> Pattern:
        """Return the pattern of `heads` neighbouring heads.

        Each region comes with the local index of the first head. `block_size` is the source's.
        """
        (a, a_head), (b, b_head) = src, dst
        cell = a.cell_bytes
        sides = (
            RegionSide(a.block_stride, a.head_stride, a.token_stride, a_head * a.head_stride),
            RegionSide(b.block_stride, b.head_stride, b.token_stride, b_head * b.head_stride),
        )
        row = heads == 1 or (a.head_stride == cell and b.head_stride == cell)
        outer, width = (1, heads * cell) if row else (heads, cell)
        if a.opaque:
            return cls(*sides, cell, outer, width, by_token=False, plane=True, whole=0)
        by_token = a.token_stride != width or b.token_stride != width
        together = not by_token and a.head_stride == b.head_stride == block_size * cell
        return cls(*sides, cell, outer, width, by_token, plane=False, whole=block_size if together and outer > 1 else 0)

    def spans(self, chunks: Grid) -> tuple[Spans, Ints]:
        """Return the spans of all chunks, and where each job's spans end."""
        src = self._starts(self.src, chunks.src_block, chunks.src_token)
        return self.spread(src, chunks)

    def spread(self, src: Ints, chunks: Grid, *, compact: bool = False) -> tuple[Spans, Ints]:
        """Return the spans of chunks whose sources start at `src`, and where each job's spans end.

        `compact`: in the source, each head directly follows the last token of the head before.
        """
        dst = self._starts(self.dst, chunks.dst_block, chunks.dst_token)
        tokens = chunks.tokens
        size = np.full(len(src), self.width, dtype=np.int64) if self.plane or self.by_token else tokens * self.width
        if self.heads == 1 and not self.by_token:
            return Spans(src, dst, size), chunks.ends
        per_chunk = self._counts(tokens)
        ends = np.cumsum(per_chunk)
        head = np.arange(int(ends[-1]), dtype=np.int64)
        head -= np.repeat(ends - per_chunk, per_chunk)
        src, dst, size = np.repeat(src, per_chunk), np.repeat(dst, per_chunk), np.repeat(size, per_chunk)
        if self.by_token:
            token, head = np.divmod(head, self.heads)
            src += token * self.src.token_stride
            dst += token * self.dst.token_stride
        src += head * (np.repeat(tokens * self.cell, per_chunk) if compact else self.src.head_stride)
        dst += head * self.dst.head_stride
        if self.whole:
            size[(ends - 1)[per_chunk == 1]] *= self.heads
        return Spans(src, dst, size), ends[chunks.ends - 1]

    def _counts(self, tokens: Ints) -> Ints:
        if self.by_token:
            return tokens * self.heads
        counts = np.full(len(tokens), self.heads, dtype=np.int64)
        if self.whole:
            counts[tokens == self.whole] = 1
        return counts

    def _starts(self, side: RegionSide, block: npt.NDArray[np.int32], token: Ints) -> Ints:
        start = np.multiply(block, side.block_stride, dtype=np.int64)
        start += side.base
        if not self.plane:
            start += token * side.token_stride
        return start
