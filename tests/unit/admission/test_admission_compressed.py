# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's caches as vllm-ascend makes them: admitted, and described from the tensors that it registers.

The specs, groups and tensors are those of a model with a plain window, ratios 4, 128 and 4, and blocks of 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

from tools.support.compressed import KEY, LATENT, WINDOW, Specs, groups, keys, latent, layer, made, tensors
from unit.admission.vllm_configs import vllm_config
from unit.device.caches import TokenMajorDevice
from vllm_ascend_pd import admission
from vllm_ascend_pd.cli.compressed import geometry as planned_geometry
from vllm_ascend_pd.cli.model import Model
from vllm_ascend_pd.device.caches import describe
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.geometry.layout import CacheGeometry, Group
from vllm_ascend_pd.protocol.layouts import EngineLayout, read, written
from vllm_ascend_pd.vllm_patches import compat

SIZE, BLOCKS = 32, 6
GROUPS = groups([0, 4, 128, 4], SIZE)
FORMS = {"0.23": GROUPS, "0.30": groups([0, 4, 128, 4], SIZE, newer=True)}
KEYS, KEY_PAGE = keys(SIZE), 4160
EXPECTED = (
    Group(32, "compressed", 4),
    Group(32, "compressed", 128),
    Group(32, "window", 128),
    Group(32, "window", 128),
    Group(2, "window", 8),
    Group(8, "window", 128),
)


@pytest.fixture(autouse=True)
def under_vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "is_vllm_ascend", lambda: True)


def refused(groups: Sequence[Specs], **engine: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        admission.check_groups(made(groups, BLOCKS))
        admission.cache_shape(vllm_config(**engine), made(groups, BLOCKS))
    assert caught.value.code == "PD-CONF-005"
    return caught.value.sentence


each_form = pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))


@each_form
def test_each_group_has_its_rule(form: Sequence[Specs]) -> None:
    admission.check_groups(made(form, BLOCKS))
    shape = admission.cache_shape(vllm_config(), made(form, BLOCKS))
    assert shape.groups == EXPECTED
    assert {name: shape.of(name).head_size for name in GROUPS[4]} == {
        name: spec.head_size for name, spec in GROUPS[4].items()
    }


@each_form
def test_what_is_registered_is_described_and_read_by_the_other_side(form: Sequence[Specs]) -> None:
    shape = admission.cache_shape(vllm_config(), made(form, BLOCKS))
    caches = describe(tensors(form, SIZE, BLOCKS), shape, TokenMajorDevice())
    geometry = caches.geometry
    assert caches.num_blocks == BLOCKS and geometry.groups == EXPECTED
    assert geometry.recomputes_last and not geometry.opaque
    by_name = dict(zip(geometry.layers, geometry.by_layer, strict=True))
    assert set(by_name) == {name for specs in GROUPS for name in specs}
    keys = by_name[layer(1, "indexer.k_cache")]
    assert [(region.block_stride, region.cell_bytes) for region in keys.regions] == [(KEY_PAGE, 128), (KEY_PAGE, 2)]
    assert keys.dtype == "int8/float16" and [keys.region_label(i) for i in range(2)] == [
        "kv0: index key",
        "kv1: scale of the index key",
    ]
    state = by_name[layer(1, "indexer.compressor.state_cache")]
    assert (state.block_size, state.regions[0].block_stride, state.regions[0].cell_bytes) == (2, KEY_PAGE, 2048)
    assert read(written(EngineLayout("a model", geometry))).geometry == geometry


def test_plan_describes_what_is_registered() -> None:
    shape = admission.cache_shape(vllm_config(), made(GROUPS, BLOCKS))
    real = describe(tensors(GROUPS, SIZE, BLOCKS), shape, TokenMajorDevice()).geometry
    model = Model(1, LATENT, 4, True, WINDOW, index=KEY, ratios=(0, 4, 128, 4))
    planned = planned_geometry(model, "--d", tp=1, pp=1, size=SIZE, item=2, drafts=0)

    def facts(geometry: CacheGeometry) -> dict[str, Any]:
        return {
            name.replace("model.", "").replace("self_attn.", ""): (kind.group, [one.cell_bytes for one in kind.regions])
            for name, kind in zip(geometry.layers, geometry.by_layer, strict=True)
        }

    assert facts(planned) == facts(real)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("quantised KV cache (torch.int8)", replace(KEYS, scale_dim=0)),
        ("quantised KV cache (torch.float8_e4m3fn)", replace(KEYS, dtype=torch.float8_e4m3fn)),
        ("compressed KV cache", replace(latent(SIZE, 4), tokens_per_state=4)),
        ("compressed KV cache", replace(latent(SIZE, 4, newer=True), tokens_per_state=Fraction(1, 2))),
        ("several KV cache groups", replace(latent(SIZE, 4, newer=True), model_version="deepseek_v41")),
    ],
)
def test_another_form_of_it_is_refused(words: str, change: Any) -> None:
    assert words in refused(({**GROUPS[0], layer(1, "indexer.k_cache"): change}, *GROUPS[1:]))


def test_it_is_refused_with_a_pipeline_and_beside_other_kinds() -> None:
    assert "pipeline parallelism" in refused(GROUPS, pipeline_parallel_size=2)
    plain = SlidingWindowMLASpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=16)
    assert "KV cache of kind SlidingWindowMLASpec" in refused((*GROUPS, {layer(4, "attn"): plain}))


def test_it_is_refused_without_vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "is_vllm_ascend", lambda: False)
    assert "A KV cache of kind" in refused(GROUPS)
