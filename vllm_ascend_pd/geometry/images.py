# SPDX-License-Identifier: Apache-2.0
"""Layout of KV in the buffers of a regroup, and the rows of work that move it there.

A *unit* is a run of tokens inside one D block and one owner. Its *image* is compact and in the order of D's
addresses: (token, head) where D's blocks are token-major, (head, token) where they are head-major, whole planes where
the token axis is opaque. A buffer holds, group after group and region after region, the images of the units in line
order. Images in send and receive buffers have the heads that one rank passes on. Images in a slot have all heads of
the D rank, so a unit there is what D's block will contain, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.geometry.coalesce import Ints, Spans, merged
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.geometry.plan import Job, d_tables, p_tables
from vllm_ascend_pd.geometry.runs import Grid, Pattern, Tables, grid

# The columns of the ops' tables; every column is an int64.
CACHE_ROW = ("region", "block", "head", "token", "heads", "tokens", "offset", "head_stride", "token_stride")
BUFFER_ROW = (
    "cell",
    "heads",
    "tokens",
    "source",
    "source_head_stride",
    "source_token_stride",
    "destination",
    "destination_head_stride",
    "destination_token_stride",
)
Rows = npt.NDArray[np.int64]


class Segments(msgspec.Struct, frozen=True, eq=False):
    """Non-empty token ranges of jobs, in buffer order: owner after owner, if there are several."""

    jobs: tuple[Job, ...]
    lo: Ints
    hi: Ints

    @property
    def tokens(self) -> Ints:
        return self.hi - self.lo

    @property
    def before(self) -> Ints:
        """Tokens of all earlier segments, by segment."""
        return np.cumsum(self.tokens) - self.tokens

    def units(self, block_size: int) -> Ints:
        return -(-self.hi // block_size) - self.lo // block_size

    def measure(self, region: Region, block_size: int) -> Ints:
        """Return the number of cells per head, by segment."""
        return self.units(block_size) if region.opaque else self.tokens


class Image(msgspec.Struct, frozen=True):
    """Heads of an image, and those of them that are moved."""

    width: int  # heads in the image
    at: int  # place of the first head that is moved
    heads: int  # heads that are moved


def token_outer(region: Region, d_heads: int) -> bool:
    """Return whether D's addresses run through all heads of a token before the next token."""
    return d_heads == 1 or region.token_stride > region.head_stride


def starts(d: CacheGeometry, segments: Segments, width: int, group: Ints, bases: Ints) -> tuple[list[Ints], Ints]:
    """Return by region where each segment's first image begins, and where each group ends.

    `group` is each segment's group; groups follow one another. Group g begins at `bases[g]` and holds, region by
    region, its segments.
    """
    begins = []
    running = bases.copy()
    for region in d.regions:
        size = segments.measure(region, d.block_size) * (width * region.cell_bytes)
        totals = np.zeros(len(bases), dtype=np.int64)
        np.add.at(totals, group, size)
        begin = np.cumsum(size) - size
        begin += (running - (np.cumsum(totals) - totals))[group]
        begins.append(begin)
        running = running + totals
    return begins, running


def cache_rows(
    p: CacheGeometry,
    d: CacheGeometry,
    segments: Segments,
    begin: Sequence[Ints],
    p_head: int,
    image: Image,
    d_heads: int,
) -> Rows:
    """Return rows that gather P's cells into images. `begin` is from `starts`; `p_head` is the local first head."""
    size = d.block_size
    chunks = grid(segments.lo, segments.hi, p_tables(segments.jobs, p.block_size), Tables(size, (), ()))
    count = chunks.count
    done = _done(chunks, segments)
    rows = np.empty((len(p.regions), len(chunks.tokens), len(CACHE_ROW)), dtype=np.int64)
    for index, (a, b) in enumerate(zip(p.regions, d.regions, strict=True)):
        table, cell = rows[index], a.cell_bytes
        if index and _twins((p.regions[index - 1], a), (d.regions[index - 1], b)):
            table[:] = rows[index - 1]
            table[:, 0] = index
            table[:, 6] += np.repeat(begin[index] - begin[index - 1], count)
            continue
        # Whole rows first: writing one column touches as much memory as writing all columns.
        table[:] = (index, 0, p_head, 0, image.heads, 1, 0, cell, image.width * cell)
        table[:, 1] = chunks.src_block
        offset = np.repeat(begin[index] + image.at * cell, count)
        if a.opaque:
            nth = np.arange(len(offset), dtype=np.int64) - np.repeat(chunks.ends - count, count)
            table[:, 6] = offset + nth * (image.width * cell)
            continue
        table[:, 3] = chunks.src_token
        table[:, 5] = chunks.tokens
        if token_outer(b, d_heads):
            table[:, 6] = offset + done * (image.width * cell)
        else:
            inside = np.minimum(chunks.dst_token, done)  # tokens of the unit before the chunk; `unit`: all of them
            unit = inside + np.minimum(size - chunks.dst_token, np.repeat(segments.tokens, count) - done)
            table[:, 6] = offset + ((done - inside) * image.width + image.at * (unit - 1) + inside) * cell
            table[:, 7], table[:, 8] = unit * cell, cell
    return rows.reshape(-1, len(CACHE_ROW))


def _done(chunks: Grid, segments: Segments) -> Ints:
    """Return, by chunk, the tokens before it in its segment."""
    done = np.cumsum(chunks.tokens)
    done -= chunks.tokens
    done -= np.repeat(segments.before, chunks.count)
    return done


def _twins(*sides: tuple[Region, Region]) -> bool:
    """Return whether both regions of each side are equal except for their names, as K and V usually are."""
    return all(msgspec.structs.astuple(a)[1:] == msgspec.structs.astuple(b)[1:] for a, b in sides)


def buffer_rows(
    d: CacheGeometry, segments: Segments, source: Sequence[Ints], target: Sequence[Ints], image: Image, d_heads: int
) -> Rows:
    """Return rows that move images of `image.heads` heads at `source` into images of `image.width` heads at `target`.

    Units of equal shape form one box, so there are at most three rows per segment and region.
    """
    tables: list[Rows] = []
    for index, region in enumerate(d.regions):
        cell = region.cell_bytes
        begin, end = source[index], target[index]
        if not region.opaque and not token_outer(region, d_heads):
            tables.extend(
                _boxes(begin, end, cell, image, *whole) for whole in _head_major(segments, d.block_size, cell)
            )
            continue
        count = segments.measure(region, d.block_size)
        if begin[-1] - begin[0] == (count[:-1].sum()) * (image.heads * cell):  # no gaps between the segments
            begin, end, count = begin[:1], end[:1], count.sum(keepdims=True)
        tables.append(_boxes(begin, end, cell, image, np.zeros_like(count), np.full_like(count, cell), count))
    return np.concatenate(tables)


def _boxes(source: Ints, target: Ints, cell: int, image: Image, done: Ints, length: Ints, count: Ints) -> Rows:
    """Return one row for each segment whose `count` is not 0: heads x count runs of `length` bytes.

    The runs start `done` tokens after the segment's begin.
    """
    some = np.flatnonzero(count)
    long = length[some]
    table = np.empty((len(some), len(BUFFER_ROW)), dtype=np.int64)
    table[:, 0] = long
    table[:, 1] = image.heads
    table[:, 2] = count[some]
    for column, begin, width, at in ((3, source, image.heads, 0), (6, target, image.width, image.at)):
        table[:, column] = begin[some] + done[some] * (width * cell) + at * long
        table[:, column + 1] = long
        table[:, column + 2] = width * long
    return table


def _head_major(segments: Segments, size: int, cell: int) -> list[tuple[Ints, Ints, Ints]]:
    """Return three ranges of each segment: its first partial unit, its whole units, its last partial unit.

    Each range has the tokens before it, the bytes per head of a unit, and the number of units.
    """
    lo, hi = segments.lo, segments.hi
    up, down = np.minimum(-(-lo // size) * size, hi), np.maximum(hi // size * size, lo)
    down = np.maximum(down, up)
    return [
        (np.zeros_like(lo), (up - lo) * cell, np.minimum(up - lo, 1)),
        (up - lo, np.full_like(lo, size * cell), (down - up) // size),
        (down - lo, (hi - down) * cell, np.minimum(hi - down, 1)),
    ]


def slot_spans(d: CacheGeometry, segments: Segments, begin: Sequence[Ints], d_heads: int) -> list[tuple[Spans, Ints]]:
    """Return by region the writes that copy a slot's images into D's cache, and where each segment's writes end.

    The segments are one group of `starts`.
    """
    size = d.block_size
    units = grid(segments.lo, segments.hi, Tables(size, (), ()), d_tables(segments.jobs))
    count = units.count
    done = _done(units, segments)
    spans: list[tuple[Spans, Ints]] = []
    for index, region in enumerate(d.regions):
        cell = region.cell_bytes
        outer = token_outer(region, d_heads)
        if index and _twins((d.regions[index - 1], region)):
            before, ends = spans[-1]
            shift = begin[index][0] - begin[index - 1][0]  # the same for all segments: regions are alike
            spans.append((Spans(before.src + shift, before.dst, before.size), ends))
            continue
        if region.opaque:
            like = Region(region.name, 0, cell, 0, cell)
            nth = np.arange(len(done), dtype=np.int64) - np.repeat(units.ends - count, count)
            src = np.repeat(begin[index], count) + nth * (d_heads * cell)
        else:
            like = Region(region.name, 0, cell if outer else size * cell, d_heads * cell if outer else cell, cell)
            src = np.repeat(begin[index], count) + done * (d_heads * cell)
        pattern = Pattern.between((like, 0), (region, 0), d_heads, size)
        spans.append(merged(*pattern.spread(src, units, compact=not (outer or region.opaque))))
    return spans
