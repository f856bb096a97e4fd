# SPDX-License-Identifier: Apache-2.0
"""Layouts derived from registered tensors: those of vLLM's CPU backend and vllm-ascend, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from unit.device.caches import TokenMajorDevice
from unit.regroup.common import config
from unit.regroup.prefill import gloo_groups
from vllm_ascend_pd.device.base import Device, Packing
from vllm_ascend_pd.device.caches import CacheBytes, Caches, CacheShape, LayerShape, describe
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.device.current import current
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.geometry.layout import STATE, Group, Region, section_of
from vllm_ascend_pd.geometry.states import DELTA_NET, Recurrent
from vllm_ascend_pd.regroup.core.world import EngineWorld
from vllm_ascend_pd.regroup.resources import build_resources

BLOCKS, BLOCK, HEADS, SIZE = GOOD_SHAPE = 8, 32, 2, 16
SHAPE = CacheShape(BLOCK, HEADS, 2 * HEADS, SIZE, tp_size=2)
LATENT = CacheShape(16, 1, 1, 576, tp_size=4)
CPU, NPU_LIKE = CpuDevice(), TokenMajorDevice()


def refused(tensors: dict[str, Any], shape: CacheShape = SHAPE, device: Device = NPU_LIKE) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        describe(tensors, shape, device)
    assert caught.value.code == "PD-GEO-003"
    return caught.value


def cell_address(caches: Caches, layer: int, region: int, block: int, head: int, token: int) -> int:
    r = caches.geometry.by_layer[layer].regions[region]
    return caches.bases[layer][region] + block * r.block_stride + head * r.head_stride + token * r.token_stride


def test_planes_of_the_cpu_backend_with_all_layers_in_one_storage() -> None:
    """vLLM 0.32: [block, head, token, 2 * dim], the token axis permuted inside a plane."""
    storage = torch.empty(3, BLOCKS, HEADS, BLOCK, 2 * SIZE)
    caches = describe({f"l{i}": storage[i] for i in range(3)}, SHAPE, CPU)
    plane = BLOCK * 2 * SIZE * 4
    assert caches.geometry.regions == (Region("kv", HEADS * plane, plane, 0, plane),)
    assert caches.geometry.opaque and caches.num_blocks == BLOCKS
    assert caches.geometry.packing == f"cpu-{_get_attn_isa(torch.float32, BLOCK, SIZE)}"
    assert (caches.geometry.kv_heads, caches.geometry.tp_size, caches.geometry.dtype) == (2 * HEADS, 2, "float32")
    assert caches.geometry.stages == (("l0", "l1", "l2"),)
    assert caches.storages == ((storage.data_ptr(), storage.untyped_storage().nbytes()),), "registered once"
    assert caches.bases == tuple((storage[i].data_ptr(),) for i in range(3))


def test_layers_may_lie_block_by_block_in_one_storage() -> None:
    storage = torch.empty(BLOCKS, 3, HEADS, BLOCK, 2 * SIZE)
    caches = describe({f"l{i}": storage[:, i] for i in range(3)}, SHAPE, CPU)
    (region,) = caches.geometry.regions
    assert region.block_stride == 3 * HEADS * region.cell_bytes and len(caches.storages) == 1


def test_bytes_of_fp8_are_called_what_the_engine_says_and_their_planes_what_this_host_could_make_of_them() -> None:
    """The tensor's dtype is uint8 for both formats, and does not show the dtype in which kernels compute."""
    word = {"l0": "fp8_e5m2 with scales 0123"}
    caches = describe(
        {"l0": torch.empty(BLOCKS, HEADS, BLOCK, 2 * SIZE, dtype=torch.uint8)}, replace(SHAPE, dtype_names=word), CPU
    )
    assert caches.geometry.dtype == word["l0"] and caches.geometry.regions[0].cell_bytes == BLOCK * 2 * SIZE
    forms = dict.fromkeys(_get_attn_isa(dtype, BLOCK, SIZE) for dtype in (torch.float32, torch.bfloat16))
    assert caches.geometry.packing == f"cpu-{'+'.join(forms)}"


def test_one_storage_for_each_layer_is_registered_as_such() -> None:
    """vLLM 0.23."""
    tensors = {f"l{i}": torch.empty(BLOCKS, HEADS, BLOCK, 2 * SIZE) for i in range(3)}
    caches = describe(tensors, SHAPE, CPU)
    assert sorted(caches.storages) == sorted((t.data_ptr(), t.nbytes) for t in tensors.values())


def test_components_of_one_allocation_are_one_region_however_many_layers_there_are() -> None:
    """78 layers of latent, rope, index key and scale: 312 components, 78 allocations."""
    widths = (0, 512, 576, 704, 705)
    layers = [torch.empty(BLOCKS, 16, 1, widths[-1]) for _ in range(78)]
    cuts = list(itertools.pairwise(widths))
    tensors = {f"l{i}": tuple(layer[..., a:b] for a, b in cuts) for i, layer in enumerate(layers)}
    caches = describe(tensors, LATENT, NPU_LIKE)
    assert sum(map(len, caches.bases)) == 312 and len(caches.storages) == 78
    assert dict(caches.storages) == {t.data_ptr(): t.nbytes for t in layers}


@pytest.mark.parametrize("dims", [(BLOCKS, 1, 16, 576), (BLOCKS, 16, 576)], ids=["four axes", "three axes"])
def test_latents_keep_their_token_order(dims: tuple[int, ...]) -> None:
    caches = describe({"l0": torch.empty(*dims)}, LATENT, CPU)
    assert caches.geometry.regions == (Region("kv", 16 * 576 * 4, 0, 576 * 4, 576 * 4),)
    assert caches.geometry.packing == "plain" and not caches.geometry.opaque and caches.geometry.kv_heads == 1


def test_one_head_of_a_gqa_model_is_still_a_plane_on_cpu() -> None:
    shape = CacheShape(BLOCK, 1, 1, SIZE, tp_size=2)
    caches = describe({"l0": torch.empty(BLOCKS, 1, BLOCK, 2 * SIZE)}, shape, CPU)
    assert caches.geometry.opaque and caches.geometry.regions[0].head_stride == 0


def test_tuples_of_token_major_tensors() -> None:
    """vllm-ascend: (K, V), each [block, token, head, dim]."""
    pairs = {
        f"l{i}": tuple(torch.empty(BLOCKS, BLOCK, HEADS, SIZE, dtype=torch.bfloat16) for _ in "kv") for i in range(2)
    }
    caches = describe(pairs, SHAPE, NPU_LIKE)
    cell = SIZE * 2
    strides = (BLOCK * HEADS * cell, cell, HEADS * cell, cell)
    assert caches.geometry.regions == (Region("kv0", *strides), Region("kv1", *strides))
    assert caches.geometry.dtype == "bfloat16" and len(caches.storages) == 4
    k, v = pairs["l1"]
    assert caches.bases[1] == (k.data_ptr(), v.data_ptr())
    assert cell_address(caches, 1, 1, 3, 1, 5) == v[3, 5, 1].data_ptr()


def test_latent_and_rope_apart_have_cells_of_their_own() -> None:
    """vllm-ascend's MLA: ([block, token, 1, 512], [block, token, 1, 64])."""
    parts = (torch.empty(BLOCKS, 16, 1, 512), torch.empty(BLOCKS, 16, 1, 64))
    caches = describe({"l0": parts}, LATENT, NPU_LIKE)
    assert [(r.name, r.cell_bytes, r.token_stride, r.head_stride) for r in caches.geometry.regions] == [
        ("kv0", 2048, 2048, 0),
        ("kv1", 256, 256, 0),
    ]


@pytest.mark.parametrize(
    "dtypes", [("bfloat16",) * 3, ("bfloat16", "bfloat16", "int8", "float16")], ids=["plain", "C8"]
)
def test_an_indexers_key_is_a_third_tensor_and_its_scale_a_fourth(dtypes: tuple[str, ...]) -> None:
    """vllm-ascend: (latent, rope, index key[, scale]); layers that reuse another's selection have the first two
    alone. The keys are layers of their own, as in vLLM."""
    parts = [
        torch.empty(BLOCKS, 16, 1, dim, dtype=getattr(torch, dtype))
        for dim, dtype in zip((512, 64, 128, 1), dtypes, strict=False)
    ]
    unlike, keys = {"l1.attn": LayerShape(1, 1, 576)}, dict.fromkeys(("l0.attn", "l2.attn"), len(dtypes) - 2)
    shape = replace(LATENT, head_size=704, other_shapes=unlike, indexes=keys)
    first, second, third = ([part.clone() for part in parts] for _ in range(3))
    caches = describe({"l0.attn": first, "l1.attn": second[:2], "l2.attn": third}, shape, NPU_LIKE)
    latents, indexes = caches.geometry.kinds
    assert latents.layers == ("l0.attn", "l1.attn", "l2.attn")
    assert indexes.layers == ("l0.indexer.k_cache", "l2.indexer.k_cache") and indexes.kv_heads == 1
    sizes = [part.shape[-1] * part.element_size() for part in parts]
    assert [region.cell_bytes for region in latents.regions] == sizes[:2]
    assert [region.cell_bytes for region in indexes.regions] == sizes[2:]
    assert latents.dtype == "bfloat16" and indexes.dtype == "/".join(dtypes[2:])
    assert caches.geometry.layers == ("l0.attn", "l0.indexer.k_cache", "l1.attn", "l2.attn", "l2.indexer.k_cache")
    assert caches.bases[3] + caches.bases[4] == tuple(part.data_ptr() for part in third)
    assert len(caches.storages) == 2 * len(parts) + 2


@pytest.mark.parametrize("where", ["in the tuple", "in a layer behind it", "in a layer before it"])
def test_each_rank_of_dcp_has_all_keys_of_an_indexer(where: str) -> None:
    """vllm-ascend: in as many blocks for one of the table as there are ranks, one behind the other."""
    apart, names = where != "in the tuple", ["l0.attn", "l0.indexer.k_cache"]
    parts = [torch.empty(BLOCKS, 16, 1, 512), torch.empty(BLOCKS, 16, 1, 64), torch.empty(4 * BLOCKS, 16, 1, 128)]
    shape = replace(LATENT, tp_size=8, dcp=4, interleave=16, indexes={} if apart else {"l0.attn": 1})

    def cached(keys: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        made = dict(zip(names, (parts[:2], [keys]), strict=True)) if apart else {"l0.attn": [*parts[:2], keys]}
        return dict(reversed(made.items())) if where == "in a layer before it" else made

    caches = describe(cached(parts[2]), shape, NPU_LIKE)
    latents, keys = caches.geometry.kinds
    assert keys.layers == ("l0.indexer.k_cache",)
    assert (latents.block_size, latents.ranks.world, latents.covers) == (16, 4, 64)
    assert (keys.block_size, keys.ranks.world, keys.covers) == (64, 1, 64)
    layer = caches.geometry.layers.index("l0.indexer.k_cache")
    assert cell_address(caches, layer, 0, 3, 0, 37) == parts[2][3 * 4 + 2, 5].data_ptr()
    with pytest.raises(ConfigError, match="blocks"):
        describe(cached(parts[2][:BLOCKS]), shape, NPU_LIKE)


def test_a_models_order_is_that_of_its_pipelines_stages_though_indexers_are_registered_first() -> None:
    """vllm-ascend 0.30 registers all indexers' caches before the attention's, on each stage for itself."""

    def registered(*layers: int) -> tuple[str, ...]:
        latents = [torch.empty(BLOCKS, 16, 1, 512), torch.empty(BLOCKS, 16, 1, 64)]
        tensors = {f"l{n}.indexer.k_cache": [torch.empty(BLOCKS, 16, 1, 128)] for n in layers}
        tensors |= {f"l{n}.attn": [part.clone() for part in latents] for n in layers}
        return describe(tensors, LATENT, NPU_LIKE).geometry.layers

    assert registered(0, 1, 2) == (*registered(0, 1), *registered(2))


def test_k_and_v_stacked_in_one_tensor() -> None:
    stacked = torch.empty(2, BLOCKS, BLOCK, HEADS, SIZE)
    caches = describe({"l0": stacked}, SHAPE, NPU_LIKE)
    assert [region.name for region in caches.geometry.regions] == ["kv0", "kv1"]
    assert caches.bases == ((stacked[0].data_ptr(), stacked[1].data_ptr()),)
    assert caches.storages == ((stacked.data_ptr(), stacked.nbytes),) and caches.num_blocks == BLOCKS


def test_parts_that_are_none_are_skipped() -> None:
    caches = describe({"l0": (torch.empty(BLOCKS, 1, 16, 576), None)}, LATENT, CPU)
    assert [region.name for region in caches.geometry.regions] == ["kv"]


@pytest.mark.parametrize(
    ("device", "token_axis"), [(CPU, "heads first"), (NPU_LIKE, "tokens first")], ids=["cpu", "npu"]
)
def test_as_many_heads_as_tokens_are_read_as_the_device_lays_them(device: Device, token_axis: str) -> None:
    shape = CacheShape(4, 4, 4, SIZE, 1)
    tensor = torch.empty(BLOCKS, 4, 4, SIZE)
    region = describe({"l0": (tensor,)}, shape, device).geometry.regions[0]
    if token_axis == "heads first":
        assert region.opaque and region.head_stride == 4 * SIZE * 4
    else:
        assert (region.token_stride, region.head_stride) == (4 * SIZE * 4, SIZE * 4)


def test_every_cell_is_where_the_region_says() -> None:
    dice = np.random.default_rng(3)
    for make in (
        lambda: torch.empty(BLOCKS, BLOCK, HEADS, SIZE),
        lambda: torch.empty(BLOCKS, HEADS, BLOCK, SIZE).permute(0, 2, 1, 3),
        lambda: torch.empty(BLOCKS, BLOCK, HEADS, 3 * SIZE)[..., SIZE : 2 * SIZE],
        lambda: torch.empty(2 * BLOCKS, BLOCK, HEADS, SIZE)[::2],
    ):
        tensor = make()
        caches = describe({"l0": tensor}, SHAPE, NPU_LIKE)
        for block, head, token in dice.integers(0, (BLOCKS, HEADS, BLOCK), (50, 3)).tolist():
            assert cell_address(caches, 0, 0, block, head, token) == tensor[block, token, head].data_ptr()


# -- full attention and Gated DeltaNet in one memory, as vllm-ascend has them

KERNEL, TOKENS = 16, 64  # of the kernels' block, and of the group's
STATES = Recurrent(DELTA_NET, ((3, 192), (8, 16, 16)), ("bfloat16", "bfloat16"), (2, 2), dim_first=False)
CONV, MATRICES = STATES.nbytes  # K of a block is as large as the matrices
SHARED = CacheShape(
    TOKENS,
    HEADS,
    HEADS,
    SIZE,
    tp_size=1,
    groups=(Group(TOKENS), Group(4096, STATE), Group(4096, STATE)),
    group_of={"l0.attn": 0, "l1.gdn": 1, "l2.gdn": 2},
    states=dict.fromkeys(("l1.gdn", "l2.gdn"), STATES),
)


def shared(tokens: int = TOKENS, kernel: int = KERNEL) -> dict[str, list[torch.Tensor]]:
    """All blocks of the convolution, then all of the matrices and K over them, then V."""
    keys = MATRICES * tokens // TOKENS
    raw = torch.zeros(BLOCKS * (CONV + 2 * keys), dtype=torch.int8)

    def cut(begin: int, size: int, *dims: int) -> torch.Tensor:
        return raw[BLOCKS * begin : BLOCKS * (begin + size)].view(torch.bfloat16).view(*dims)

    conv, matrices = cut(0, CONV, BLOCKS, *STATES.shapes[0]), cut(CONV, MATRICES, BLOCKS, *STATES.shapes[1])
    dims = BLOCKS * tokens // kernel, kernel, HEADS, SIZE
    k, v = cut(CONV, keys, *dims), cut(CONV + keys, keys, *dims)
    return {"l0.attn": [k, v], "l1.gdn": [conv, matrices], "l2.gdn": [conv, matrices]}


def taking_turns() -> dict[str, list[torch.Tensor]]:
    """vllm-ascend 0.30: pages of both states, and over them K and V of one kernel's block, then of the next one."""
    page = 2 * MATRICES
    raw = torch.zeros(BLOCKS, page, dtype=torch.int8)
    k, v = raw.view(torch.bfloat16).view(BLOCKS * TOKENS // KERNEL, 2, KERNEL, HEADS, SIZE).unbind(1)
    ends = (0, CONV, CONV + MATRICES)
    conv, matrices = (
        raw[:, begin:end].view(torch.bfloat16).unflatten(1, shape)
        for (begin, end), shape in zip(itertools.pairwise(ends), STATES.shapes, strict=True)
    )
    return {"l0.attn": [k, v], "l1.gdn": [conv, matrices], "l2.gdn": [conv, matrices]}


@pytest.mark.parametrize(("make", "turns"), [(shared, 1), (taking_turns, 2)], ids=["0.23", "0.30"])
def test_a_group_whose_blocks_are_several_of_the_kernels_is_described_by_these(
    make: Callable[[], dict[str, list[torch.Tensor]]], turns: int
) -> None:
    tensors = make()
    caches = describe(tensors, SHARED, NPU_LIKE)
    attention = next(kind for kind in caches.geometry.kinds if kind.layers == ("l0.attn",))
    cell = SIZE * 2
    strides = (turns * KERNEL * HEADS * cell, cell, HEADS * cell, cell)
    assert attention.regions == (Region("kv0", *strides), Region("kv1", *strides))
    assert attention.block_size == KERNEL and caches.geometry.tables == (Group(KERNEL), *SHARED.groups[1:])
    assert caches.num_blocks == BLOCKS and len(caches.storages) == 1
    assert caches.kernel_blocks == (4, 1, 1) and caches.blocks == (4 * BLOCKS, BLOCKS, BLOCKS)
    assert all(
        cell_address(caches, 0, region, 4 * BLOCKS - 1, head, 5) == part[4 * BLOCKS - 1, 5, head].data_ptr()
        for head in range(HEADS)
        for region, part in enumerate(tensors["l0.attn"])
    )
    (address, length), at = caches.storages[0], caches.bases[0][1]
    assert at - address + len(CacheBytes(caches, NPU_LIKE).region(0, 1)) == length, "as far as V goes"
    recurrence = tensors["l1.gdn"][1]
    at = caches.geometry.layers.index(section_of("l2.gdn", "values"))
    assert caches.bases[at][-1] == recurrence.data_ptr()
    assert caches.geometry.by_layer[at].regions[-1].block_stride == turns * MATRICES


def test_an_exchange_has_views_of_attention_and_none_of_states() -> None:
    caches = describe(shared(), SHARED, NPU_LIKE)
    made = build_resources(config().regroup, EngineWorld(0, 1, 1, TOKENS), caches, CPU, *gloo_groups(1))
    names = [layer for layer, views in zip(caches.geometry.layers, made.exchange._caches, strict=True) if views]
    assert names == ["l0.attn"] and len(caches.geometry.layers) > 1


def test_blocks_of_two_groups_lie_over_blocks_with_the_same_number_only() -> None:
    """K and the matrices share memory. With blocks of twice as many tokens K of one block lies over two matrices."""
    longer = replace(SHARED, groups=(Group(2 * TOKENS), *SHARED.groups[1:]))
    error = refused(shared(2 * TOKENS), longer)
    assert "'l1.gdn'" in error.sentence and "its block 1 shares memory with block 0 of l0.attn" in error.sentence


def test_layers_of_one_group_and_other_memory_may_lie_anyhow() -> None:
    """Blocks of one group are one request's; another storage has other bytes."""
    double = {"l0.attn": shared(2 * TOKENS)["l0.attn"], **{name: shared()[name] for name in ("l1.gdn", "l2.gdn")}}
    longer = replace(SHARED, groups=(Group(2 * TOKENS), *SHARED.groups[1:]))
    assert describe(double, longer, NPU_LIKE).num_blocks == BLOCKS


@pytest.mark.parametrize(
    ("dims", "why"),
    [
        ((BLOCKS * 4 + 1, KERNEL), "it has 33 blocks, 4 for one of vLLM's, of which l0.attn has 8"),
        ((BLOCKS * 4, 24), "block size 64"),
        ((BLOCKS * 4, 2 * TOKENS), "block size 64"),
    ],
    ids=["a part of a block", "tokens that do not add up", "longer than the group's"],
)
def test_kernels_blocks_that_are_not_whole_blocks_of_the_group_are_refused(dims: tuple[int, ...], why: str) -> None:
    tensors = shared()
    tensors["l0.attn"] = [torch.empty(*dims, HEADS, SIZE, dtype=part.dtype) for part in tensors["l0.attn"]]
    assert why in refused(tensors, SHARED).sentence


def test_heads_before_tokens_are_no_kernels_blocks() -> None:
    tensors = shared()
    tensors["l0.attn"] = [torch.empty(BLOCKS * 4, HEADS, KERNEL, SIZE, dtype=part.dtype) for part in tensors["l0.attn"]]
    assert "block size 64" in refused(tensors, SHARED).sentence


def test_layers_of_a_group_have_the_same_kernels_blocks() -> None:
    tensors, shape = shared(), replace(SHARED, group_of={**SHARED.group_of, "l3.attn": 0})
    tensors["l3.attn"] = [torch.empty(BLOCKS * 2, 32, HEADS, SIZE, dtype=torch.bfloat16) for _ in "kv"]
    assert "block size 32" in refused(tensors, shape).sentence


def test_kernels_blocks_of_a_format_without_an_order_of_tokens_are_refused() -> None:
    class Fractal(TokenMajorDevice):
        def packing(self, cache: torch.Tensor, block_size: int, head_size: int) -> Packing:
            return Packing("fractal", opaque=True)

    tensors, shape = shared(), replace(SHARED, local_heads=1, total_heads=1)
    tensors["l0.attn"] = [part.view(-1, KERNEL, 1, SIZE) for part in tensors["l0.attn"]]
    assert "block size 64" in refused(tensors, shape, Fractal()).sentence
    assert "block size 32" in refused({"l0": torch.empty(BLOCKS, 16, HEADS, SIZE)}, SHAPE).sentence


# -- bytes of two cells

OVERLAPS: list[tuple[str, torch.Tensor]] = [
    ("one block for all", torch.empty(1, BLOCK, HEADS, SIZE).expand(BLOCKS, -1, -1, -1)),
    ("one head for all", torch.empty(BLOCKS, BLOCK, 1, SIZE).expand(-1, -1, HEADS, -1)),
    ("a token within the one before", torch.empty(99_999).as_strided(GOOD_SHAPE, (2048, HEADS * SIZE // 2, SIZE, 1))),
    ("a block within the one before", torch.empty(99_999).as_strided(GOOD_SHAPE, (1023, HEADS * SIZE, SIZE, 1))),
]


@pytest.mark.parametrize("tensor", [tensor for _, tensor in OVERLAPS], ids=[name for name, _ in OVERLAPS])
def test_a_tensor_whose_cells_share_memory_is_refused(tensor: torch.Tensor) -> None:
    assert "its cells share memory" in refused({"l0": tensor}).sentence


def test_states_that_share_memory_are_refused() -> None:
    tensors = shared()
    conv, matrices = tensors["l1.gdn"]
    dims, (_, *inner) = matrices.shape, matrices.stride()
    tensors["l1.gdn"] = [conv, matrices.as_strided(dims, (MATRICES // 2 - 1, *inner))]
    assert "for states of" in refused(tensors, SHARED).sentence


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, groups=(Group(BLOCK),))], ids=["one group", "named"])
def test_two_layers_of_a_group_in_one_memory_are_refused(shape: CacheShape) -> None:
    """vllm-ascend lets layers take turns in one buffer, with a pool that keeps them (layer reuse)."""
    buffer = torch.empty(BLOCKS, BLOCK, HEADS, SIZE)
    tensors = {f"l{i}": [buffer[:], torch.empty(BLOCKS, BLOCK, HEADS, SIZE)] for i in range(2)}
    error = refused(tensors, replace(shape, group_of=dict.fromkeys(tensors, 0)))
    assert "'l1'" in error.sentence and "it shares memory with l0, of the same group" in error.sentence
    assert "shares memory with l0" in refused({"l0": [buffer, buffer]}).sentence, "K is V"


# -- what is not understood


GOOD = torch.empty(GOOD_SHAPE)
STRANGE: list[tuple[str, Any, str]] = [
    ("no head axis", torch.empty(BLOCKS, BLOCK, HEADS * SIZE), "shape (8, 32, 32)"),
    ("another block size", torch.empty(BLOCKS, 16, HEADS, SIZE), "block size 32"),
    ("all heads of the model", torch.empty(BLOCKS, BLOCK, 2 * HEADS, SIZE), "2 KV heads on this rank"),
    ("blocks before K and V", torch.empty(BLOCKS, 2, BLOCK, HEADS, SIZE), "shape"),
    ("three stacked", torch.empty(3, BLOCKS, BLOCK, HEADS, SIZE), "shape"),
    ("flat", torch.empty(1000), "shape (1000,)"),
    ("two axes", torch.empty(BLOCKS, 1000), "shape (8, 1000)"),
    ("dim not innermost", torch.empty(BLOCKS, BLOCK, SIZE, HEADS).transpose(2, 3), "not contiguous"),
    ("different numbers of blocks", (GOOD, torch.empty(BLOCKS + 1, BLOCK, HEADS, SIZE)), "different numbers of blocks"),
    ("nothing", (), "numbers of blocks"),
]


@pytest.mark.parametrize(("value", "why"), [(v, w) for _, v, w in STRANGE], ids=[name for name, *_ in STRANGE])
def test_a_layout_that_is_not_understood_is_refused_with_its_shape(value: Any, why: str) -> None:
    error = refused({"good": GOOD, "strange": value})
    assert "'strange'" in error.sentence and why in error.sentence


OTHERS: list[tuple[str, Any]] = [
    ("strides", torch.empty(BLOCKS, BLOCK, HEADS, 2 * SIZE)[..., :SIZE]),
    ("dtype of another size", GOOD.to(torch.bfloat16)),
    ("dtype of the same size", torch.empty(BLOCKS, BLOCK, HEADS, SIZE, dtype=torch.int32)),
    ("parts", (GOOD.clone(), GOOD.clone())),
]


@pytest.mark.parametrize("value", [v for _, v in OTHERS], ids=[name for name, _ in OTHERS])
def test_layers_that_differ_are_each_what_they_are_alone(value: Any) -> None:
    caches = describe({"first": GOOD, "second": value, "third": GOOD.clone()}, SHAPE, NPU_LIKE)
    first, second, third = caches.geometry.by_layer
    assert first is third and first.layers == ("first", "third") and second.layers == ("second",)
    for kind, name, tensors in ((first, "first", GOOD), (second, "second", value)):
        alone = describe({name: tensors}, SHAPE, NPU_LIKE).geometry
        assert (kind.regions, kind.dtype, kind.kv_heads) == (alone.regions, alone.dtype, alone.kv_heads)
    assert caches.geometry.layers == ("first", "second", "third"), "in their order"


def test_layers_may_have_heads_of_their_own() -> None:
    """A draft model with fewer heads, an indexer with one key per token for all ranks."""
    shape = replace(SHAPE, other_shapes={"draft": LayerShape(1, 2, SIZE), "indexer": LayerShape(1, 1, 24)})
    tensors = {"layer": GOOD, "draft": torch.empty(BLOCKS, BLOCK, 1, SIZE), "indexer": torch.empty(BLOCKS, BLOCK, 24)}
    geometry = describe(tensors, shape, NPU_LIKE).geometry
    assert [kind.kv_heads for kind in geometry.kinds] == [2 * HEADS, 2, 1]
    assert [list(kind.head_range(1)) for kind in geometry.kinds] == [[2, 3], [1], [0]]
    assert geometry.kinds[2].regions[0].cell_bytes == 24 * 4


def test_layers_of_one_table_have_as_many_blocks() -> None:
    error = refused({"first": GOOD, "second": torch.empty(BLOCKS + 1, BLOCK, HEADS, SIZE)})
    assert "'second'" in error.sentence and "first" in error.sentence


def test_parts_of_different_dtypes_are_sent_to_the_peer() -> None:
    parts = (GOOD, torch.empty(BLOCKS, BLOCK, HEADS, SIZE, dtype=torch.int8))
    assert describe({"l0": parts}, SHAPE, NPU_LIKE).geometry.dtype == "float32/int8"


def test_an_opaque_plane_must_be_one_piece() -> None:
    tensor = torch.empty(BLOCKS, HEADS, BLOCK, 4 * SIZE)[..., : 2 * SIZE]
    assert "opaque" in refused({"l0": tensor}, device=CPU).sentence


def test_no_cache_at_all_is_refused() -> None:
    assert "no KV cache" in refused({}).sentence


# -- the device


def test_the_cpu_is_done_when_the_call_returns_and_can_be_read() -> None:
    device = current()
    assert isinstance(device, CpuDevice) and device.record().done()
    device.attach_thread()
    tensor = torch.arange(64, dtype=torch.uint8)
    assert bytes(device.view(tensor.data_ptr() + 8, 4)) == bytes([8, 9, 10, 11])
