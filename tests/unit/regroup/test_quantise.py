# SPDX-License-Identifier: Apache-2.0
"""D's int8 of heads: what P's exchange puts into its slots is what D itself would have written, cell by cell.

The definition here goes token by token and channel by channel.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from unit.device.caches import TokenMajorDevice
from vllm_ascend_pd.config import RegroupConfig
from vllm_ascend_pd.device.caches import CacheShape, describe
from vllm_ascend_pd.errors import ConfigError, LocalProtocolError
from vllm_ascend_pd.geometry.decide import decide
from vllm_ascend_pd.geometry.layout import FRACTAL_PACKING
from vllm_ascend_pd.geometry.match import mismatches
from vllm_ascend_pd.geometry.plan import Job
from vllm_ascend_pd.geometry.regroup import RegroupPlanner
from vllm_ascend_pd.prefill.worker.core.orders import OrderBook
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.regroup.core.staging import StagingSlot, exchanges_possible
from vllm_ascend_pd.regroup.core.world import EngineWorld
from vllm_ascend_pd.regroup.quantise import Quantiser, describe_for_decode
from vllm_ascend_pd.regroup.resources import build_resources

HEADS, DIM, BLOCK, BLOCKS = 4, 64, 8, 6
NAMES = ("model.layers.0.attn", "model.layers.1.attn")
DEVICE = TokenMajorDevice()


def scales(seed: int, *, one: bool = False) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    size = 1 if one else HEADS * DIM
    k, v = (torch.rand(size, generator=made) * 0.02 + 0.02 for _ in range(2))
    return k, torch.full((size,), 3.0), v, torch.zeros(size)


SCALES = {NAMES[0]: scales(1), NAMES[1]: scales(2, one=True)}


def shape(tp: int = 1, heads: int = HEADS, dim: int = DIM, of: dict[str, tuple[Tensor, ...]] = SCALES) -> CacheShape:
    names = dict.fromkeys(NAMES, "int8 of heads with scales")
    group = dict.fromkeys(NAMES, 0)
    return CacheShape(BLOCK, heads // tp, heads, dim, tp, group_of=group, dtype_names=names, int8_scales=of)


def caches(seed: int, local: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> dict[str, tuple[Tensor, Tensor]]:
    """K and V take turns block by block, as vllm-ascend has them."""
    made = torch.Generator().manual_seed(seed)
    both = {name: torch.randn((BLOCKS, 2, BLOCK, local, DIM), generator=made).to(dtype) for name in NAMES}
    return {name: (one[:, 0], one[:, 1]) for name, one in both.items()}


def wanted(cache: Tensor, block: int, scale: Tensor, offset: Tensor, first_head: int = 0) -> Tensor:
    """Return the bytes of one block as D keeps them: [head, channels by 32, token, 32]."""
    heads = cache.shape[2]
    made = torch.empty((heads, DIM // 32, BLOCK, 32), dtype=torch.int8)
    for token in range(BLOCK):
        for head in range(heads):
            for channel in range(DIM):
                at = (first_head + head) * DIM + channel if scale.numel() > 1 else 0
                value = cache[block, token, head, channel] * (1.0 / scale[at]) + offset[at]
                made[head, channel // 32, token, channel % 32] = int(min(127.0, max(-128.0, float(torch.round(value)))))
    return made


@pytest.mark.parametrize("rank", [0, 1])
def test_an_image_is_what_decode_itself_writes(rank: int) -> None:
    of = caches(3, local=2)
    made = Quantiser(of, shape(tp=2), rank)
    for layer, name in enumerate(NAMES):
        made(layer, torch.tensor([4, 1]))
        k_scale, k_offset, v_scale, v_offset = SCALES[name]
        k, v = made.images[name]
        for block in (1, 4):
            for image, cache, scale, offset in (
                (k, of[name][0], k_scale, k_offset),
                (v, of[name][1], v_scale, v_offset),
            ):
                assert torch.equal(image[block].flatten(), wanted(cache, block, scale, offset, 2 * rank).flatten())


def test_prefill_is_known_by_what_decode_has() -> None:
    """Its own memory is not registered, and the geometries fit, whatever the sizes; nothing is pushed directly."""
    p, made = describe_for_decode(caches(3), shape(), DEVICE, 0)
    decode = {name: tuple(torch.zeros((BLOCKS, BLOCK, 2, DIM), dtype=torch.int8) for _ in "kv") for name in NAMES}
    d = describe(decode, shape(tp=2), DEVICE)
    assert made is not None and not p.storages and d.storages
    assert p.geometry.packing == d.geometry.packing == FRACTAL_PACKING and p.geometry.opaque
    assert mismatches(p.geometry, d.geometry) == ()
    for mode in ("auto", "never", "always"):
        assert decide(p.geometry, d.geometry, mode).regroup
        assert exchanges_possible(RegroupConfig(regroup=mode), p.geometry, 1)
    plain, none = describe_for_decode(caches(3), CacheShape(BLOCK, HEADS, HEADS, DIM, 1), DEVICE, 0)
    assert none is None and plain.storages and mismatches(plain.geometry, d.geometry)[0].field == "dtype"


def test_a_direct_push_of_it_is_never_ordered() -> None:
    p, _ = describe_for_decode(caches(3), shape(), DEVICE, 0)
    book = OrderBook(p.geometry, p.geometry, Contributor(0, 0), RegroupConfig(), None)
    start: Any = SimpleNamespace(reservation=SimpleNamespace(geometry=p.geometry))
    with pytest.raises(LocalProtocolError, match="cannot be pushed directly"):
        book.take(start)


@pytest.mark.parametrize("d_tp", [1, 2])
def test_slots_hold_the_blocks_of_each_decode_rank(d_tp: int) -> None:
    """Through the exchange of one rank: of each layer in turn, of blocks in any order, the last one partly filled."""
    of = caches(5)
    p, made = describe_for_decode(of, shape(), DEVICE, 0)
    d = describe(
        {
            name: tuple(torch.zeros((BLOCKS, BLOCK, HEADS // d_tp, DIM), dtype=torch.int8) for _ in "kv")
            for name in NAMES
        },
        shape(tp=d_tp),
        DEVICE,
    ).geometry
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    parts = build_resources(RegroupConfig(), EngineWorld(0, 1, 1, 64), p, DEVICE, group, made)
    ids = np.array([4, 1, 3], dtype=np.int32)
    tokens = 2 * BLOCK + 3
    plan = RegroupPlanner(p.geometry, 0).plan([Job(d, 0, 0, tokens, ids, np.arange(3, dtype=np.int32))])
    rows = parts.exchange.prepare(plan, parts.staging.sample, 0)
    assert rows.blocks is not None and rows.blocks.tolist() == [1, 3, 4]
    for layer, name in enumerate(NAMES):
        slots: list[StagingSlot | None] = [parts.staging.take("d", slot.nbytes) for slot in plan.slots]
        assert parts.exchange.run(rows, layer, slots).error is None
        for planned, slot in zip(plan.slots, slots, strict=True):
            assert slot is not None
            heads = slice(planned.d_rank * HEADS // d_tp, (planned.d_rank + 1) * HEADS // d_tp)
            k, v = (
                [wanted(cache, int(block), s, o)[heads] for block in ids]
                for cache, s, o in zip(of[name], SCALES[name][::2], SCALES[name][1::2], strict=True)
            )
            assert torch.equal(slot.memory[: planned.nbytes].view(torch.int8), torch.stack([*k, *v]).flatten())
            parts.staging.release(slot)


@pytest.mark.parametrize(
    ("tensors", "of"),
    [
        (torch.zeros((2, BLOCKS, BLOCK, HEADS, DIM, 1)), shape()),
        ((torch.zeros((BLOCKS, BLOCK, HEADS, DIM)), torch.zeros((BLOCKS, BLOCK, HEADS, 2 * DIM))), shape()),
        ((torch.zeros((BLOCKS, BLOCK, 1, 48)),) * 2, shape(heads=1, dim=48, of=dict.fromkeys(NAMES, SCALES[NAMES[1]]))),
        (caches(1)[NAMES[0]], shape(heads=2)),
        ((torch.zeros((BLOCKS, 2 * BLOCK, HEADS, DIM)),) * 2, shape()),
    ],
    ids=["one tensor", "unlike", "no whole fractals", "fewer heads than scales", "another block size"],
)
def test_other_layouts_are_refused(tensors: Any, of: CacheShape) -> None:
    with pytest.raises(ConfigError, match="PD-GEO-003"):
        describe_for_decode(dict.fromkeys(NAMES, tensors), of, DEVICE, 0)
