# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: a cache whose tokens, not its heads, are divided among ranks.

The prompt is dealt out in runs of `interleave` tokens, rank after rank: rank c of a world of w holds the tokens t with
(t // interleave) mod w = c. A block of the engine's table then covers block size x w tokens, of which each rank has a block
size, one behind the other: all ranks have the same table, and of each block their own part. A world of 1 holds all tokens.

What one rank pushes to another are the tokens that both hold. Their places repeat with the least common multiple of both
periods, and between two borders of runs or blocks they are neighbours on both sides.
"""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_ascend_pd.errors import LocalProtocolError

Ints = npt.NDArray[np.int64]
MOST_RUNS = 1 << 20  # of one period; beyond is a configuration that no engine has


class Dealt(msgspec.Struct, frozen=True):
    """How an engine's tokens are dealt out among the ranks of a world."""

    block_size: int  # tokens that a rank has of a block
    world: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        if min(self.block_size, self.world, self.interleave) < 1:
            raise LocalProtocolError(f"no engine deals its tokens like {self}")
        if self.world > 1 and self.block_size % self.interleave:
            raise LocalProtocolError(f"a block of {self.block_size} does not end with a run of {self.interleave}")

    @property
    def covers(self) -> int:
        """Tokens of the prompt that a block of the table stands for."""
        return self.block_size * self.world

    @property
    def run(self) -> int:
        """Neighbouring tokens that one rank has in neighbouring places, at most."""
        return self.interleave if self.world > 1 else self.block_size

    def holder(self, token: int) -> int:
        return token // self.interleave % self.world if self.world > 1 else 0

    def places(self, tokens: Ints) -> tuple[Ints, Ints]:
        """Of tokens on the rank that holds them: which block of the table, and where in it."""
        block, inside = np.divmod(tokens, self.covers)
        if self.world == 1:
            return block, inside
        return block, inside // (self.world * self.interleave) * self.interleave + inside % self.interleave

    def holds(self, rank: int, tokens: int) -> int:
        """How many of a prompt's first tokens a rank has."""
        if self.world == 1:
            return tokens
        rounds, left = divmod(tokens, self.world * self.interleave)
        return rounds * self.interleave + min(self.interleave, max(0, left - rank * self.interleave))


class Shared(msgspec.Struct, frozen=True, eq=False):
    """Runs of tokens that a rank of P and a rank of D both hold, in the order of the prompt, with their places on either side."""

    count: Ints  # tokens
    p_block: Ints  # index in the table
    p_token: Ints  # place in the block
    d_block: Ints
    d_token: Ints

    @property
    def tokens(self) -> int:
        return int(self.count.sum())


def shared(p: Dealt, p_rank: int, d: Dealt, d_rank: int, first: int, end: int) -> Shared:
    """Of the tokens [first, end) those that both ranks hold. The work is that of what is found, not of the prompt's length times
    the worlds."""
    start, count = _period(p, p_rank, d, d_rank)
    period = math.lcm(p.covers, d.covers)
    if not len(start) or end <= first:
        return Shared(*(np.empty(0, dtype=np.int64),) * 5)
    rounds = np.arange(first // period, -(-end // period), dtype=np.int64)
    lo = (rounds[:, None] * period + start).ravel()
    hi = lo + np.tile(count, len(rounds))
    lo, hi = np.clip(lo, first, end), np.clip(hi, first, end)
    some = hi > lo
    lo, hi = lo[some], hi[some]
    return Shared(hi - lo, *p.places(lo), *d.places(lo))


def contributors(p: Dealt, d: Dealt, d_rank: int) -> tuple[int, ...]:
    """The ranks of P's world that hold anything of what this rank of D holds."""
    return tuple(rank for rank in range(p.world) if len(_period(p, rank, d, d_rank)[0]))


@lru_cache(maxsize=4096)
def _period(p: Dealt, p_rank: int, d: Dealt, d_rank: int) -> tuple[Ints, Ints]:
    """Starts and lengths of the runs that both hold, in one period of both: cut where either side's run, or block, ends."""
    period, step = math.lcm(p.covers, d.covers), math.gcd(p.run, d.run)
    if period // step > MOST_RUNS:
        raise LocalProtocolError(f"{p} and {d} have no common period of fewer than {MOST_RUNS} runs")
    start = np.arange(0, period, step, dtype=np.int64)
    both = np.ones(len(start), dtype=bool)
    for side, rank in ((p, p_rank), (d, d_rank)):
        if side.world > 1:
            both &= start // side.interleave % side.world == rank
    return _joined(start[both], step, p, d)


def _joined(start: Ints, step: int, p: Dealt, d: Dealt) -> tuple[Ints, Ints]:
    """Neighbours in the prompt that are neighbours in a block on both sides become one run."""
    if not len(start):
        return start, start
    (p_block, p_token), (d_block, d_token) = p.places(start), d.places(start)
    new = np.ones(len(start), dtype=bool)
    new[1:] = np.diff(start) != step
    for block, token in ((p_block, p_token), (d_block, d_token)):
        new[1:] |= (np.diff(block) != 0) | (np.diff(token) != step)
    at = np.flatnonzero(new)
    return start[at], np.diff(np.append(at, len(start))) * step
