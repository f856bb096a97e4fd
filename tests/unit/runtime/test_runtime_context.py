# SPDX-License-Identifier: Apache-2.0
"""Context parallelism with the real workers of both sides: tokens divided among ranks, equally and unequally.

They arrive byte for byte in their places in the other engine, with checksums on, and a wrong assignment of tokens is
detected.
"""

from __future__ import annotations

from typing import Any

import pytest

from unit.device.caches import CacheModel, Divided, TokenMajorDevice
from unit.geometry.context_parallel import GRID, ContextParallel
from unit.kits.watching import running
from unit.runtime.sites import DecodeSite, PrefillSite, config
from vllm_ascend_pd.geometry.context_parallel import TokenSplit

ONE = Divided()
# Heads, then TP and division of prefill and of decode.
SHAPES = [
    (1, (8, Divided(8, 1, 4)), (2, Divided(2, 1, 4))),
    (1, (1, ONE), (4, Divided(4, 1, 4))),
    (1, (4, Divided(4, 1, 1)), (4, Divided(2, 1, 2))),
    (1, (2, Divided(1, 2, 4)), (2, Divided(2, 1, 4))),
    (1, (2, Divided(2, 2, 4)), (2, ONE)),
    (2, (4, Divided(2, 1, 4)), (2, ONE)),
    (2, (2, ONE), (8, Divided(4, 1, 2))),
    (2, (8, Divided(2, 2, 2)), (4, Divided(2, 1, 4))),
    (2, (2, Divided(1, 3, 4)), (4, Divided(2, 1, 1))),
]


def model(heads: int, *, layers: int = 2) -> CacheModel:
    return CacheModel("latent" if heads == 1 else "token", heads=heads, layers=layers)


@pytest.mark.parametrize(("heads", "p_size", "d_size"), SHAPES)
@pytest.mark.parametrize(("p_block", "d_block"), [(4, 4), (8, 4), (4, 8)])
def test_every_byte_arrives_where_decode_has_its_token(
    heads: int, p_size: tuple[int, Divided], d_size: tuple[int, Divided], p_block: int, d_block: int
) -> None:
    """Chunks that cut blocks and runs, a prefix hit on D, prompts shorter than a run."""
    (p_tp, p_parts), (d_tp, d_parts), one = p_size, d_size, model(heads)
    p = PrefillSite(one, p_tp, divided=p_parts, block=p_block, blocks=200, device=TokenMajorDevice())
    d = DecodeSite(one, d_tp, divided=d_parts, block=d_block, blocks=200, device=TokenMajorDevice())
    with running(p, d):
        made = [
            d.reserve("long", 150),
            d.reserve("with a prefix", 90, first=d.covers),
            d.reserve("short", 3),
            d.reserve("a block", d.covers),
        ]
        d.step()
        for request, chunks in zip(made, ((37, 64, 49), (90,), (3,), (d.covers,)), strict=True):
            p.prefill(request, *chunks)
        reports = d.received(*made)
        assert all(report.ok for report in reports), reports
        d.check(*made)
        for request in made:
            p.finish(request)
        p.released_blocks_of(*made)


@pytest.mark.parametrize(("heads", "p_context", "d_context"), GRID, ids=str)
@pytest.mark.parametrize(("blocks", "runs"), [((4, 4), (4, 4)), ((8, 4), (1, 2))])
def test_every_division_of_prefill_meets_every_one_of_decode(
    heads: int, p_context: ContextParallel, d_context: ContextParallel, blocks: tuple[int, int], runs: tuple[int, int]
) -> None:
    """MLA as vllm-ascend has it, a latent and a rope for each token, and GQA; runs of whole blocks, and others."""
    meet(CacheModel("uneven" if heads == 1 else "token", heads=heads, layers=2), p_context, d_context, blocks, runs)


@pytest.mark.parametrize(("p_context", "d_context"), [(p, d) for heads, p, d in GRID if heads == 1 and p.pcp == 1])
@pytest.mark.parametrize(("blocks", "runs"), [((4, 4), (4, 4)), ((8, 4), (1, 2)), ((4, 8), (4, 8))])
def test_an_indexers_keys_are_on_every_rank_that_divides_the_latents(
    p_context: ContextParallel, d_context: ContextParallel, blocks: tuple[int, int], runs: tuple[int, int]
) -> None:
    """DeepSeek-V3.2 as vllm-ascend has it with DCP: a rank has its part of latents and ropes, and all keys."""
    meet(CacheModel("indexed", heads=1), p_context, d_context, blocks, runs)


def meet(
    one: CacheModel,
    p_context: ContextParallel,
    d_context: ContextParallel,
    blocks: tuple[int, int],
    runs: tuple[int, int],
) -> None:
    p_parts, d_parts = (
        Divided(*context, length if context != ContextParallel() else 1)
        for context, length in zip((p_context, d_context), runs, strict=True)
    )
    (p_block, d_block), device = blocks, TokenMajorDevice()
    p = PrefillSite(one, p_context.tp(one.heads), divided=p_parts, block=p_block, blocks=100, device=device)
    d = DecodeSite(one, d_context.tp(one.heads), divided=d_parts, block=d_block, blocks=100, device=device)
    arrives(p, d, 37, 60, 9, first=d.covers)


def arrives(p: PrefillSite, d: DecodeSite, *chunks: int, first: int = 0) -> None:
    """Push one prompt in these chunks; check it on D's ranks byte for byte, and that P's blocks are free again."""
    with running(p, d):
        made = d.bound("one", sum(chunks), first=first)
        p.prefill(made, *chunks)
        d.complete(made)
        p.finish_and_free(made)


def test_layers_that_are_unlike() -> None:
    """One more layer with other cells, whose tokens are divided alike."""
    one = CacheModel("token", heads=1, layers=2, drafts=1, draft_dim=8)
    p = PrefillSite(one, 4, divided=Divided(4, 1, 4), blocks=60, device=TokenMajorDevice())
    d = DecodeSite(one, 2, divided=Divided(2, 1, 2), blocks=60, device=TokenMajorDevice())
    arrives(p, d, 30, 40, first=d.covers)


@pytest.mark.parametrize(("p_pp", "d_cuts"), [(2, ()), (1, (1,)), (2, (1,))])
def test_beside_pipeline_stages(p_pp: int, d_cuts: tuple[int, ...]) -> None:
    one = model(1, layers=3)
    p = PrefillSite(one, 2, pp=p_pp, divided=Divided(2, 2, 4), blocks=100, device=TokenMajorDevice())
    d = DecodeSite(one, 4, cuts=d_cuts, divided=Divided(4, 1, 4), blocks=100, device=TokenMajorDevice())
    arrives(p, d, 30, 70, first=d.covers)


def test_what_another_rank_holds_is_found_by_the_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: prefill deals its tokens in another order than it reports."""
    locate = TokenSplit.locate

    def turned(self: TokenSplit, tokens: Any) -> Any:
        block, place = locate(self, tokens)
        return block, (place + (self.block_size == 8)) % self.block_size

    one = model(1)
    p = PrefillSite(one, 2, divided=Divided(2, 1, 1), block=8, blocks=50, device=TokenMajorDevice())
    d = DecodeSite(one, 1, block=4, blocks=50, device=TokenMajorDevice())
    with running(p, d):
        made = d.bound("one", 32)
        monkeypatch.setattr(TokenSplit, "locate", turned)
        p.prefill(made)
        assert {report.why.code for report in d.received(made)} == {"PD-WIRE-004"}
        p.finish_and_free(made)


def test_exchanges_are_not_made_for_tokens_that_are_divided() -> None:
    """Exchanges are of heads: each rank writes what it holds, even if regroup is configured."""
    for d_parts in (ONE, Divided(2, 1, 4)):
        push = config(regroup="always")
        p = PrefillSite(model(2), 4, divided=Divided(2, 1, 4), push=push, blocks=50, device=TokenMajorDevice())
        d = DecodeSite(model(2), 4, divided=d_parts, push=push, blocks=50, device=TokenMajorDevice())
        arrives(p, d, 40)
