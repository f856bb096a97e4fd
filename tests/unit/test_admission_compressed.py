# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's caches as vllm-ascend makes them: admitted, and described from the tensors that it registers.

The specs, groups and tensors are those of a model with a plain window, ratios 4, 128 and 4, and blocks of 32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from unit.runtime.caches import TokenMajorDevice
from unit.test_admission import vllm_config
from vllm_ascend_pd import admission
from vllm_ascend_pd.device.caches import describe
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.geometry.layout import Group
from vllm_ascend_pd.protocol.layouts import EngineLayout, read, written


@dataclass(frozen=True, kw_only=True)
class AscendMLAAttentionSpec(MLAAttentionSpec):
    compress_ratio: int = 1
    scale_dim: int = 0


@dataclass(frozen=True, kw_only=True)
class AscendSlidingWindowMLASpec(SlidingWindowMLASpec):
    compress_ratio: int = 1


def latent(ratio: int) -> Any:
    return AscendMLAAttentionSpec(
        block_size=32, num_kv_heads=1, head_size=512, dtype=torch.bfloat16, compress_ratio=ratio
    )


def window(size: int, head: int, n: int, dtype: torch.dtype = torch.float32) -> Any:
    return AscendSlidingWindowMLASpec(block_size=size, num_kv_heads=1, head_size=head, dtype=dtype, sliding_window=n)


KEYS = AscendMLAAttentionSpec(
    block_size=32, num_kv_heads=1, head_size=128, dtype=torch.int8, compress_ratio=4, scale_dim=1
)


def layer(number: int, name: str) -> str:
    return f"model.layers.{number}.self_attn.{name}"


GROUPS: tuple[dict[str, Any], ...] = (
    {layer(i, name): spec for i in (1, 3) for name, spec in (("attn", latent(4)), ("indexer.k_cache", KEYS))},
    {layer(2, "attn"): latent(128)},
    {layer(i, "swa_cache"): window(32, 512, 128, torch.bfloat16) for i in (0, 2)},
    {layer(i, "swa_cache"): window(32, 512, 128, torch.bfloat16) for i in (1, 3)},
    {
        layer(i, name): spec
        for i in (1, 3)
        for name, spec in (
            ("compressor.state_cache", window(2, 2048, 8)),
            ("indexer.compressor.state_cache", window(2, 512, 8)),
        )
    },
    {layer(2, "compressor.state_cache"): window(8, 1024, 128)},
)
EXPECTED = (
    Group(32, "compressed", 4),
    Group(32, "compressed", 128),
    Group(32, "window", 128),
    Group(32, "window", 128),
    Group(2, "window", 8),
    Group(8, "window", 128),
)
BLOCKS = 6
LATENT_PAGE, KEY_PAGE = 32768, 4160


def made(groups: tuple[dict[str, Any], ...] = GROUPS) -> Any:
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs))
            for specs in groups
        ],
    )


def tensors() -> dict[str, list[torch.Tensor]]:
    """Return the tensors as vllm-ascend registers them: those of one position in their groups share memory."""
    raw = {
        (group, page): torch.zeros(BLOCKS * page, dtype=torch.int8)
        for group in range(2)
        for page in (LATENT_PAGE, KEY_PAGE)
    }

    def view(memory: torch.Tensor, page: int, dtype: torch.dtype, size: int, dim: int, at: int = 0) -> torch.Tensor:
        item = dtype.itemsize
        return memory.view(dtype).as_strided((BLOCKS, size, 1, dim), (page // item, dim, dim, 1), at // item)

    found: dict[str, list[torch.Tensor]] = {}
    for specs in GROUPS:
        for name, spec in specs.items():
            page = KEY_PAGE if ".indexer." in name else LATENT_PAGE
            place = [one for one in specs if (".indexer." in one) == (".indexer." in name)].index(name)
            memory = raw[place, page]
            found[name] = [view(memory, page, spec.dtype, spec.block_size, spec.head_size)]
            if getattr(spec, "scale_dim", 0):
                found[name].append(view(memory, page, torch.float16, spec.block_size, 1, 32 * 128))
    return found


@pytest.fixture(autouse=True)
def under_vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "is_vllm_ascend", lambda: True)


def refused(groups: tuple[dict[str, Any], ...], **engine: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        admission.check_groups(made(groups))
        admission.cache_shape(vllm_config(**engine), made(groups))
    assert caught.value.code == "PD-CONF-005"
    return caught.value.sentence


def test_each_group_has_its_rule() -> None:
    admission.check_groups(made())
    shape = admission.cache_shape(vllm_config(), made())
    assert shape.groups == EXPECTED
    assert {name: shape.of(name).head_size for name in GROUPS[4]} == {
        name: spec.head_size for name, spec in GROUPS[4].items()
    }


def test_what_is_registered_is_described_and_read_by_the_other_side() -> None:
    shape = admission.cache_shape(vllm_config(), made())
    caches = describe(tensors(), shape, TokenMajorDevice())
    geometry = caches.geometry
    assert caches.num_blocks == BLOCKS and geometry.groups == EXPECTED
    assert geometry.leaves_last and not geometry.opaque
    by_name = dict(zip(geometry.layers, geometry.by_layer, strict=True))
    assert set(by_name) == {name for specs in GROUPS for name in specs}
    keys = by_name[layer(1, "indexer.k_cache")]
    assert [(region.block_stride, region.cell_bytes) for region in keys.regions] == [(KEY_PAGE, 128), (KEY_PAGE, 2)]
    assert keys.dtype == "int8/float16" and [keys.called(i) for i in range(2)] == [
        "kv0: index key",
        "kv1: scale of the index key",
    ]
    state = by_name[layer(1, "indexer.compressor.state_cache")]
    assert (state.block_size, state.regions[0].block_stride, state.regions[0].cell_bytes) == (2, KEY_PAGE, 2048)
    assert read(written(EngineLayout("a model", geometry))).geometry == geometry


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("quantised KV cache (torch.int8)", replace(KEYS, scale_dim=0)),
        ("quantised KV cache (torch.float8_e4m3fn)", replace(KEYS, dtype=torch.float8_e4m3fn)),
        ("compressed KV cache", replace(latent(4), tokens_per_state=4)),
    ],
)
def test_another_form_of_it_is_refused(words: str, change: Any) -> None:
    assert words in refused(({**GROUPS[0], layer(1, "indexer.k_cache"): change}, *GROUPS[1:]))


def test_it_is_refused_with_a_pipeline_and_beside_other_kinds() -> None:
    assert "pipeline parallelism" in refused(GROUPS, pipeline_parallel_size=2)
    plain = SlidingWindowMLASpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=16)
    assert "several KV cache groups" in refused((*GROUPS, {layer(4, "attn"): plain}))


def test_it_is_refused_without_vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "is_vllm_ascend", lambda: False)
    assert "A KV cache of kind" in refused(GROUPS)
