# SPDX-License-Identifier: Apache-2.0
"""Incompatible caches are refused field by field, with both values; shares follow from the two geometries alone."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unit.geometry.kit import dealt, geometry, owner_share, range_of, share
from vllm_ascend_pd.geometry import pairing
from vllm_ascend_pd.geometry.layout import CacheGeometry, Region
from vllm_ascend_pd.geometry.match import mismatches, range_fault, require_match
from vllm_ascend_pd.geometry.ownership import granule
from vllm_ascend_pd.geometry.plan import plan_digest
from vllm_ascend_pd.geometry.shard import contributors, destinations, head_shares, owner_shares

BASE = geometry("token", heads=4, tp=2, block=16, layers=3)


def changed(**fields: object) -> msgspec.Struct:
    return msgspec.structs.replace(BASE, **fields)


def test_equal_caches_fit_whatever_their_ranks_strides_and_block_sizes() -> None:
    assert mismatches(BASE, geometry("head", heads=4, tp=4, block=32, pad=8, layers=3)) == ()


@pytest.mark.parametrize(
    ("other", "field", "ours", "theirs"),
    [
        (changed(dtype="bfloat16"), "dtype", "float16", "bfloat16"),
        (changed(kv_heads=8), "kv_heads", "4", "8"),
        (changed(packing="amx"), "packing", "plain", "amx"),
        (changed(regions=BASE.regions[:1]), "regions", "r0, r1", "r0"),
        (changed(regions=BASE.regions[::-1]), "regions", "r0, r1", "r1, r0"),
        (geometry("token", heads=4, tp=2, block=16, cells=(2, 4), layers=3), "cell bytes of r1", "2", "4"),
        (geometry("token", heads=4, tp=2, block=16, layers=2), "layers", "3 with layer.2 at 2", "2 with nothing at 2"),
    ],
)
def test_each_difference_is_named_with_both_values(other: CacheGeometry, field: str, ours: str, theirs: str) -> None:
    [difference] = mismatches(BASE, other)
    assert (difference.field, difference.prefill, difference.decode) == (field, ours, theirs)
    error = difference.error()
    assert error.code == "PD-GEO-001"
    assert ours in str(error)
    assert theirs in str(error)


@pytest.mark.parametrize(
    ("heads", "cells", "dtype", "layer", "names"),
    [
        (4, (64,), "bfloat16", "l.0.attn", "kv"),
        (4, (64, 32), "bfloat16", "l.0.attn", "kv0: k, kv1: v"),
        (1, (64, 64), "bfloat16", "l.0.attn", "kv0: k, kv1: v"),
        (1, (1152,), "bfloat16", "l.0.attn", "kv"),
        (1, (1024, 128), "bfloat16", "l.0.attn", "kv0: latent, kv1: rope"),
        (1, (128, 4), "int8", "l.0.indexer.k_cache", "kv0: index key, kv1: scale of the index key"),
        (1, (256,), "bfloat16", "l.0.indexer.k_cache", "kv: index key"),
    ],
)
def test_components_that_have_numbers_are_named_for_people(
    heads: int, cells: tuple[int, ...], dtype: str, layer: str, names: str
) -> None:
    words = ["kv"] if len(cells) == 1 else [f"kv{i}" for i in range(len(cells))]
    regions = tuple(Region(word, 1 << 16, 0, cell, cell) for word, cell in zip(words, cells, strict=True))
    kind = changed(kv_heads=heads, dtype=dtype, regions=regions, stages=((layer,),))
    assert ", ".join(map(kind.region_label, range(len(cells)))) == names  # type: ignore[attr-defined]
    other = msgspec.structs.replace(kind, regions=(*regions[:-1], msgspec.structs.replace(regions[-1], cell_bytes=99)))
    assert mismatches(kind, other)[0].field == f"cell bytes of {names.rsplit(', ', 1)[-1]}"  # type: ignore[arg-type]


def test_all_differences_are_named_at_once() -> None:
    differences = mismatches(BASE, changed(dtype="bfloat16", packing="amx"))
    assert [each.field for each in differences] == ["dtype", "packing"]


def test_block_sizes_must_be_equal_where_tokens_cannot_be_addressed() -> None:
    p, d = (geometry("opaque", heads=4, tp=1, block=size) for size in (16, 32))
    [difference] = mismatches(p, d)
    assert (difference.field, difference.prefill, difference.decode) == ("block_size", "16", "32")
    assert difference.error().code == "PD-GEO-002"


def test_one_opaque_side_is_enough_to_want_equal_block_sizes() -> None:
    opaque = geometry("opaque", heads=4, tp=2, block=32, layers=3)
    for p, d in ((BASE, opaque), (opaque, BASE)):
        assert [each.field for each in mismatches(p, d)] == ["block_size", "token axis of r0", "token axis of r1"]


def test_an_opaque_cache_does_not_fit_an_addressable_one() -> None:
    differences = mismatches(geometry("opaque", heads=4, tp=2, block=16, layers=3), BASE)
    assert [each.field for each in differences] == ["token axis of r0", "token axis of r1"]
    with pytest.raises(Exception, match="PD-GEO-001"):
        require_match(geometry("opaque", heads=4, tp=2, block=16, layers=3), BASE)


def test_ranges_that_cannot_be_pushed_are_distinguished() -> None:
    opaque = geometry("opaque", heads=4, tp=1, block=16)
    assert range_fault(BASE, 5, 40, 3) == ""
    assert "needs 3" in range_fault(BASE, 5, 40, 2)
    assert "empty" in range_fault(BASE, 40, 40, 0)
    assert "opaque" in range_fault(opaque, 5, 40, 3)
    assert range_fault(opaque, 16, 40, 2) == ""


def test_the_contributors_of_the_design() -> None:
    def of(heads: int, p_tp: int, d_tp: int, d_rank: int) -> tuple[int, ...]:
        return contributors(
            geometry("token", heads=heads, tp=p_tp, block=16), geometry("token", heads=heads, tp=d_tp, block=16), d_rank
        )

    assert [of(1, 16, 4, rank) for rank in range(4)] == [tuple(range(4 * rank, 4 * rank + 4)) for rank in range(4)]
    assert [of(8, 8, 2, rank) for rank in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [of(8, 4, 8, rank) for rank in range(8)] == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    assert [of(1, 2, 4, rank) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert of(3, 4, 1, 0) == (0, 1, 2, 3)


@settings(max_examples=300)
@given(st.integers(1, 12), st.integers(1, 16), st.integers(1, 16), st.data())
def test_shares_are_those_of_a_slot_by_slot_count(heads: int, p_tp: int, d_tp: int, data: st.DataObject) -> None:
    p, d = geometry("token", heads=heads, tp=p_tp, block=16), geometry("token", heads=heads, tp=d_tp, block=16)
    d_rank = data.draw(st.integers(0, d_tp - 1))
    for head in range_of(heads, d_tp, d_rank):
        shares = head_shares(p, d, d_rank, head)
        assert shares.total == sum(head in p.head_range(rank) for rank in range(p.tp_size))
        by_rank = dict(zip(shares.ranks, shares.weights, strict=True))
        for rank in range(p_tp):
            assert Fraction(by_rank.get(rank, 0), shares.total) == share(p, d, rank, d_rank, head)
    owners = owner_shares(p, d, d_rank)
    wanted = {rank: owner_share(p, d, rank, d_rank) for rank in range(p_tp)}
    assert contributors(p, d, d_rank) == tuple(rank for rank, part in wanted.items() if part)
    assert [Fraction(weight, owners.total) for weight in owners.weights] == [part for part in wanted.values() if part]
    assert all((d_rank in destinations(p, d, rank)) == bool(part) for rank, part in wanted.items())


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(1, 16))
def test_every_rank_holds_the_heads_that_the_reference_deals(heads: int, tp: int) -> None:
    g = geometry("token", heads=heads, tp=tp, block=16)
    assert [list(g.head_range(rank)) for rank in range(tp)] == [range_of(heads, tp, rank) for rank in range(tp)]


@pytest.mark.parametrize(
    ("kind", "heads", "tp", "cells", "tokens"),
    [
        ("token", 8, 8, (256, 256), 128),  # 256 bytes per token: a block is just long enough
        ("token", 8, 4, (256, 256), 64),
        ("token", 8, 1, (256, 256), 16),
        ("token", 1, 4, (1152,), 32),
        ("token", 1, 4, (1024, 128), 128),  # the narrowest region decides
        ("head", 8, 4, (256, 256), 128),
        ("head", 8, 8, (512, 512), 64),  # one head: its tokens lie together
        ("opaque", 8, 8, (512, 512), 128),
    ],
)
def test_a_granule_is_the_smallest_run_worth_a_write(
    kind: str, heads: int, tp: int, cells: tuple[int, ...], tokens: int
) -> None:
    assert granule(geometry(kind, heads=heads, tp=tp, block=128, cells=cells)) == tokens


def test_stages_that_share_a_layer_contribute() -> None:
    p = msgspec.structs.replace(BASE, stages=(("layer.0",), ("layer.1", "layer.2"), ("mtp",)))
    assert pairing.contributors(p, BASE, 1) == ((0, 1), (1, 1))


@pytest.mark.parametrize("p_tp", [1, 2, 4])
@pytest.mark.parametrize("d_tp", [1, 2, 4])
@pytest.mark.parametrize("p_cuts", [(), (2,), (1, 4)])
@pytest.mark.parametrize("d_cuts", [(), (3,), (1, 2, 4)])
def test_both_sides_name_the_same_pairs_of_workers_and_no_layer_is_forgotten(
    p_tp: int, d_tp: int, p_cuts: tuple[int, ...], d_cuts: tuple[int, ...]
) -> None:
    p, d = (staged(tp, cuts) for tp, cuts in ((p_tp, p_cuts), (d_tp, d_cuts)))
    heard = {(by, worker) for worker in range(d.workers) for by in pairing.contributors(p, d, worker)}
    addressed = {
        ((stage, rank), worker)
        for stage in range(len(p.stages))
        for rank in range(p.tp_size)
        for worker in pairing.destinations(p, d, stage, rank)
    }
    assert heard == addressed
    for layer in p.layers:
        ours, theirs = (next(i for i, names in enumerate(g.stages) if layer in names) for g in (p, d))
        for rank in range(d_tp):
            sources = {by for by, worker in heard if by[0] == ours and worker == d.worker(theirs, rank)}
            assert sources == {(ours, by) for by in contributors(p, d, rank)}, f"{layer} for rank {rank}"
    for (stage, _), worker in heard:
        assert set(p.stages[stage]) & set(d.stages[d.stage_and_rank(worker)[0]]), (
            "no rank waits for one that has nothing for it"
        )


def staged(tp: int, cuts: tuple[int, ...]) -> CacheGeometry:
    names = tuple(f"layer.{i}" for i in range(5))
    stages = tuple(names[a:b] for a, b in pairwise((0, *cuts, 5)))
    return msgspec.structs.replace(geometry("token", heads=4, tp=tp, block=16, layers=5), stages=stages)


def test_the_plan_digest_depends_on_every_fact() -> None:
    digest = plan_digest(BASE, BASE, 0, 10, "direct")
    assert len(digest) <= 64
    assert digest == plan_digest(BASE, geometry("token", heads=4, tp=2, block=16, layers=3), 0, 10, "direct")
    others = [
        plan_digest(changed(packing="x"), BASE, 0, 10, "direct"),
        plan_digest(BASE, changed(tp_size=4), 0, 10, "direct"),
        plan_digest(BASE, BASE, 1, 10, "direct"),
        plan_digest(BASE, BASE, 0, 11, "direct"),
        plan_digest(BASE, BASE, 0, 10, "regroup"),
    ]
    assert len({digest, *others}) == 6


def test_blocks_without_a_common_period_are_a_difference() -> None:
    """Layouts that are expensive to compare are refused before planning."""
    p, d = (dealt(geometry("token", heads=1, tp=2, block=block, cells=(4,)), dcp=2) for block in (1021, 1019))
    (difference,) = mismatches(p, d)
    assert str(difference).startswith("tokens of a block: prefill 1021 on each of 2 parts, in runs of 1, decode 1019")
    assert difference.error().code == "PD-GEO-001"
    assert not mismatches(p, p)


def test_tokens_that_cannot_be_distinguished_cannot_be_divided() -> None:
    p, d = geometry("opaque", heads=1, tp=2, block=16), dealt(geometry("opaque", heads=1, tp=2, block=16), dcp=2)
    assert [difference.field for difference in mismatches(p, d)] == ["tokens of a block"]
