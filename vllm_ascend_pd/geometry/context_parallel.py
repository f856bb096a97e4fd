# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: a cache whose tokens, not its heads, are divided among ranks.

The prompt is dealt out in runs of `interleave` tokens, rank after rank: rank c of a world of w holds the tokens t with
(t // interleave) mod w = c. All ranks have the same block table. One of its blocks covers block size x w tokens, and
each rank stores its own block size of these, without gaps. With a world of 1 the rank holds all tokens.

One rank pushes to another the tokens that both hold. Their places repeat with the least common multiple of both
periods. Between two borders of runs or blocks these tokens are neighbours on both sides.
"""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.errors import LocalProtocolError

Ints = npt.NDArray[np.int64]
MAX_RUNS = 1 << 14  # in one period; no engine is configured with more


class TokenSplit(msgspec.Struct, frozen=True):
    """Division of an engine's tokens among the ranks of a world."""

    block_size: int  # tokens of a block of the table that one rank holds
    world: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        if min(self.block_size, self.world, self.interleave) < 1:
            raise LocalProtocolError(f"no engine deals its tokens like {self}")
        if self.world > 1 and self.block_size % self.interleave:
            raise LocalProtocolError(f"a block of {self.block_size} does not end with a run of {self.interleave}")

    @property
    def covers(self) -> int:
        """Tokens of the prompt in one block of the table, over all ranks."""
        return self.block_size * self.world

    @property
    def run(self) -> int:
        """Most neighbouring tokens that one rank holds in neighbouring places."""
        return self.interleave if self.world > 1 else self.block_size

    def holder(self, tokens: Ints) -> Ints:
        """Return the part that holds each of the tokens."""
        return tokens // self.interleave % self.world

    def tokens(self, part: int, blocks: Ints) -> Ints:
        """Return the tokens that a part holds in these blocks of the table, as [block, place]."""
        turn, inside = np.divmod(np.arange(self.block_size, dtype=np.int64), self.interleave)
        tokens: Ints = blocks[:, None] * self.covers + (turn * self.world + part) * self.interleave + inside
        return tokens

    def locate(self, tokens: Ints) -> tuple[Ints, Ints]:
        """Return each token's block in the table, and its place in that block on the rank that holds it."""
        block, inside = np.divmod(tokens, self.covers)
        if self.world == 1:
            return block, inside
        return block, inside // (self.world * self.interleave) * self.interleave + inside % self.interleave


class SharedRuns(msgspec.Struct, frozen=True, eq=False):
    """Runs of tokens that a rank of P and a rank of D both hold, in prompt order, with their places on both sides."""

    count: Ints  # tokens of each run
    p_block: Ints  # index in the table
    p_token: Ints  # place in the block
    d_block: Ints
    d_token: Ints


def shared(p: TokenSplit, p_rank: int, d: TokenSplit, d_rank: int, first: int, end: int) -> SharedRuns:
    """Return the tokens of [first, end) that both ranks hold.

    The work is proportional to the runs that are found, not to the prompt's length times the worlds.
    """
    start, count = _period(p, p_rank, d, d_rank)
    period = math.lcm(p.covers, d.covers)
    if not len(start) or end <= first:
        return SharedRuns(*(np.empty(0, dtype=np.int64),) * 5)
    rounds = np.arange(first // period, -(-end // period), dtype=np.int64)
    lo = (rounds[:, None] * period + start).ravel()
    hi = lo + np.tile(count, len(rounds))
    lo, hi = np.clip(lo, first, end), np.clip(hi, first, end)
    some = hi > lo
    lo, hi = lo[some], hi[some]
    return SharedRuns(hi - lo, *p.locate(lo), *d.locate(lo))


def contributors(p: TokenSplit, d: TokenSplit, d_rank: int) -> tuple[int, ...]:
    """Return the ranks of P's world that hold any token that this rank of D's world holds."""
    if p.world == d.world == 1:
        return (0,)
    start, _ = _cut(p, d)
    return tuple(np.unique(p.holder(start[d.holder(start) == d_rank])).tolist())


def runs(p: TokenSplit, d: TokenSplit) -> int:
    """Return the number of stretches in one common period: the work of comparing P and D."""
    return math.lcm(p.covers, d.covers) // math.gcd(p.run, d.run)


@lru_cache(maxsize=256)
def _period(p: TokenSplit, p_rank: int, d: TokenSplit, d_rank: int) -> tuple[Ints, Ints]:
    """Return starts and lengths of the runs that both ranks hold, in one common period."""
    start, step = _cut(p, d)
    return _joined(start[(p.holder(start) == p_rank) & (d.holder(start) == d_rank)], step, p, d)


def _cut(p: TokenSplit, d: TokenSplit) -> tuple[Ints, int]:
    """Return where one common period is cut, and the stretches' length. None crosses a border of a run or block."""
    if runs(p, d) > MAX_RUNS:
        raise LocalProtocolError(f"{p} and {d} have no common period of fewer than {MAX_RUNS} runs")
    step = math.gcd(p.run, d.run)
    return np.arange(0, math.lcm(p.covers, d.covers), step, dtype=np.int64), step


def _joined(start: Ints, step: int, p: TokenSplit, d: TokenSplit) -> tuple[Ints, Ints]:
    """Join stretches that are neighbours in the prompt and in one block on both sides. Return starts and lengths."""
    if not len(start):
        return start, start
    (p_block, p_token), (d_block, d_token) = p.locate(start), d.locate(start)
    new = np.ones(len(start), dtype=bool)
    new[1:] = np.diff(start) != step
    for block, token in ((p_block, p_token), (d_block, d_token)):
        new[1:] |= (np.diff(block) != 0) | (np.diff(token) != step)
    at = np.flatnonzero(new)
    return start[at], np.diff(np.append(at, len(start))) * step
