# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: every byte of a prompt reaches its rank and place in the other engine once, by a reference
that computes token by token."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.context_parallel import TokenSplit, contributors, shared

UNTOUCHED = -1
WORLDS = [(8, 2), (1, 4), (4, 1), (2, 2), (2, 8), (4, 3), (3, 2), (1, 1), (6, 4)]
SIZES = [(4, 4), (8, 4), (4, 16)]  # block sizes
INTERLEAVES = [(1, 1), (4, 4), (1, 4), (2, 1), (4, 2)]


def place(engine: TokenSplit, token: int) -> tuple[int, int, int]:
    """Reference, token by token: holder, index in the table, place in the block."""
    inside = token % (engine.block_size * engine.world)
    earlier = [t for t in range(inside) if (t // engine.interleave) % engine.world == holder(engine, token)]
    return holder(engine, token), token // (engine.block_size * engine.world), len(earlier)


def holder(engine: TokenSplit, token: int) -> int:
    return (token // engine.interleave) % engine.world


def table(engine: TokenSplit, tokens: int, seed: int) -> np.ndarray:
    blocks = -(-tokens // (engine.block_size * engine.world))
    return np.random.default_rng(seed).permutation(2 * blocks)[:blocks]


def filled(engine: TokenSplit, tokens: int, first: int, seed: int) -> np.ndarray:
    """Return the tokens by [rank, block, place]."""
    ids = table(engine, tokens, seed)
    memory = np.full((engine.world, 2 * len(ids), engine.block_size), UNTOUCHED)
    for token in range(first, tokens):
        rank, block, at = place(engine, token)
        assert memory[rank, ids[block], at] == UNTOUCHED
        memory[rank, ids[block], at] = token
    return memory


@pytest.mark.parametrize(("p_world", "d_world"), WORLDS)
@pytest.mark.parametrize(("p_block", "d_block"), SIZES)
@pytest.mark.parametrize(("p_run", "d_run"), INTERLEAVES)
def test_every_token_arrives_where_decode_has_it(
    p_world: int, d_world: int, p_block: int, d_block: int, p_run: int, d_run: int
) -> None:
    p, d = TokenSplit(p_block, p_world, p_run), TokenSplit(d_block, d_world, d_run)
    for tokens, first in ((1, 0), (97, 0), (130, 31), (p.covers * d_world, 0)):
        source, wanted = filled(p, tokens, 0, 1), filled(d, tokens, first, 2)
        landed = np.full_like(wanted, UNTOUCHED)
        p_ids, d_ids = table(p, tokens, 1), table(d, tokens, 2)
        for p_rank, d_rank in product(range(p_world), range(d_world)):
            runs = shared(p, p_rank, d, d_rank, first, tokens)
            for count, a, at, b, to in zip(
                runs.count, runs.p_block, runs.p_token, runs.d_block, runs.d_token, strict=True
            ):
                part = landed[d_rank, d_ids[b], to : to + count]
                assert len(part) == count and (part == UNTOUCHED).all(), "nothing is written twice, or past its block"
                part[:] = source[p_rank, p_ids[a], at : at + count]
            assert bool(len(runs.count)) <= (p_rank in contributors(p, d, d_rank))
        assert (landed == wanted).all()


@pytest.mark.parametrize("engine", [TokenSplit(4, 1), TokenSplit(4, 2, 4), TokenSplit(8, 3, 2), TokenSplit(16, 8)])
def test_which_part_a_token_is_in_and_which_tokens_a_part_has(engine: TokenSplit) -> None:
    assert engine.holder(np.arange(50)).tolist() == [holder(engine, token) for token in range(50)]
    for part in range(engine.world):
        blocks = [
            [t for t in range(j * engine.covers, (j + 1) * engine.covers) if holder(engine, t) == part]
            for j in range(3)
        ]
        assert engine.tokens(part, np.arange(3)).tolist() == blocks


def test_ranks_that_have_nothing_in_common_do_not_meet() -> None:
    """Equal worlds pair up; in a world of 8 every second rank sends to one of 2."""
    assert [contributors(TokenSplit(16, 4), TokenSplit(16, 4), rank) for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    assert [contributors(TokenSplit(16, 8), TokenSplit(16, 2), rank) for rank in range(2)] == [
        (0, 2, 4, 6),
        (1, 3, 5, 7),
    ]
    assert [contributors(TokenSplit(16, 8, 16), TokenSplit(16, 2, 16), rank) for rank in range(2)] == [
        (0, 2, 4, 6),
        (1, 3, 5, 7),
    ]
    assert contributors(TokenSplit(16, 3), TokenSplit(16, 2), 0) == (0, 1, 2)


def test_neighbours_on_both_sides_are_one_run() -> None:
    whole = shared(TokenSplit(16, 1), 0, TokenSplit(16, 1), 0, 0, 160)
    assert whole.count.tolist() == [16] * 10
    blocks = shared(TokenSplit(16, 2, 16), 0, TokenSplit(16, 4, 16), 0, 0, 640)
    assert set(blocks.count.tolist()) == {16}, "whole blocks move whole where whole blocks are dealt"


def test_what_no_engine_has_is_no_layout() -> None:
    for wrong in ((0, 1, 1), (16, 0, 1), (16, 2, 0), (16, 2, 32), (16, 2, 5)):
        with pytest.raises(LocalProtocolError):
            TokenSplit(*wrong)


def test_a_million_tokens_cost_what_they_hold() -> None:
    runs = shared(TokenSplit(128, 8, 128), 3, TokenSplit(128, 2, 128), 1, 0, 1 << 20)
    assert len(runs.count) == (1 << 20) // 128 // 8 and runs.count.sum() == (1 << 20) // 8
