# SPDX-License-Identifier: Apache-2.0
"""Admission of engines: vLLM's own configuration objects, each with one thing that is not proven."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tools.support import ascend_specs
from unit.admission.vllm_configs import LAYERS, attention, cache_config, latent, model_dir, vllm_config
from unit.geometry.context_parallel import HEADS, ON_DECODE, ON_PREFILL, ContextParallel
from vllm_ascend_pd import admission, secret_files
from vllm_ascend_pd.admission import drafts, quantised
from vllm_ascend_pd.config import ChannelConfig, PushConfig
from vllm_ascend_pd.device.caches import CacheShape, LayerShape
from vllm_ascend_pd.engine import Engine
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.geometry.layout import Group
from vllm_ascend_pd.protocol.auth import MIN_SECRET_BYTES
from vllm_ascend_pd.protocol.identity import dp_rank_of
from vllm_ascend_pd.protocol.versions import fingerprint, may_pair
from vllm_ascend_pd.secret_files import MAX_SECRET_BYTES, load_secrets
from vllm_ascend_pd.vllm_patches import compat, tried

BOTH = ("kv_producer", "kv_consumer")


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    monkeypatch.delenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", raising=False)


def refusal(config: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Engine.of(config)
    return caught.value


@pytest.mark.parametrize("role", BOTH)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tensor_parallel_size": 2},
        {"enable_prefix_caching": False},
        {"kv_cache_dtype": "bfloat16", "dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_what_is_proven_starts(role: str, arguments: dict[str, Any]) -> None:
    engine = Engine.of(vllm_config(role, **arguments))
    assert engine.host == "127.0.0.1" and engine.secrets is None and "LlamaForCausalLM" in engine.model


@pytest.mark.parametrize("role", BOTH)
def test_either_side_may_be_a_pipeline(role: str) -> None:
    Engine.of(vllm_config(role, pipeline_parallel_size=2))


def test_a_pipeline_on_d_under_vllm_ascend_schedules_one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "is_vllm_ascend", lambda: True)
    for role, ahead in (("kv_consumer", True), ("kv_consumer", False), ("kv_producer", True)):
        config = vllm_config(role, pipeline_parallel_size=2)
        config.scheduler_config.async_scheduling = ahead
        if role == "kv_consumer" and ahead:
            assert "--no-async-scheduling" in refusal(config).remedy
        else:
            Engine.of(config)


def test_each_worker_of_a_pipeline_has_a_port_of_its_own() -> None:
    config = vllm_config("kv_consumer", {"side_channel_port": 65530}, pipeline_parallel_size=3, tensor_parallel_size=2)
    assert [Engine.of(config).port_of(worker) for worker in range(6)] == list(range(65530, 65536))
    config = vllm_config("kv_consumer", {"side_channel_port": 65531}, pipeline_parallel_size=3, tensor_parallel_size=2)
    assert "would listen on 65536" in refusal(config).sentence


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE"])
def test_full_graphs_are_decodes_alone(mode: str) -> None:
    """vLLM turns graphs off on a CPU, so the mode is set on a finished configuration, as by vllm-ascend's platform."""
    from vllm.config import CUDAGraphMode

    for role in BOTH:
        config = vllm_config(role)
        config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
        if role == "kv_producer" and "FULL" in mode:
            refused = refusal(config)
            assert refused.code == "PD-CONF-005" and f"cudagraph_mode {mode} on prefill" in refused.sentence
            assert "--enforce-eager" in refused.remedy and "PIECEWISE" in refused.remedy
        else:
            Engine.of(config)


def sleeping(role: str) -> Any:
    """A configuration with sleep mode, set afterwards because vLLM refuses it on a CPU."""
    config = vllm_config(role)
    config.model_config.enable_sleep_mode = True
    return config


def with_parallel(name: str, value: Any) -> Callable[[str], Any]:
    """Return a function that sets this field on a finished configuration, as vLLM refuses some combinations on a
    CPU."""

    def made(role: str) -> Any:
        config = vllm_config(role)
        setattr(config.parallel_config, name, value)
        return config

    return made


def speculation(method: str = "mtp", modules: int = 1, architecture: str = "Draft", **flags: Any) -> Any:
    """A speculative configuration like vLLM's, without the draft model itself."""
    model = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture], num_hidden_layers=1, num_nextn_predict_layers=modules),
        quantization=None,
        get_hidden_size=lambda: 64,
        get_total_num_kv_heads=lambda: 2,
        get_head_size=lambda: 16,
    )
    return SimpleNamespace(method=method, draft_model_config=model, **flags)


def with_drafts(**facts: Any) -> Callable[[str], Any]:
    def made(role: str) -> Any:
        config = vllm_config(role)
        config.speculative_config = speculation(**facts)
        return config

    return made


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize("role", BOTH)
def test_proven_drafts_start(role: str) -> None:
    for method in ("mtp", "eagle3", "eagle", "dflash", "draft_model"):
        Engine.of(with_drafts(method=method)(role))
    Engine.of(vllm_config(role, speculative_config=NGRAM))


def test_drafts_with_a_pipeline_are_refused_but_mtp_on_p_under_vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    for under_vllm_ascend, role, method in itertools.product((False, True), BOTH, ("mtp", "eagle3", "ngram")):
        monkeypatch.setattr(compat, "is_vllm_ascend", lambda under=under_vllm_ascend: under)
        config = vllm_config(role, pipeline_parallel_size=2)
        config.speculative_config = speculation(method=method)
        if under_vllm_ascend and (role, method) == ("kv_producer", "mtp"):
            Engine.of(config)
        else:
            assert "A draft model with pipeline parallelism" in refusal(config).sentence


@pytest.mark.parametrize("under_vllm_ascend", [False, True])
def test_a_draft_that_is_a_model_of_its_own_has_not_run_under_vllm_ascend(
    under_vllm_ascend: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "is_vllm_ascend", lambda: under_vllm_ascend)
    config = vllm_config()
    why = [
        str(each) for each in drafts.refusals(speculation(method="draft_model"), config.parallel_config, "kv_producer")
    ]
    assert len(why) == under_vllm_ascend and all("A separate draft model under vllm-ascend" in each for each in why)


def test_a_draft_models_layers_are_counted_on_from_the_models_or_have_a_prefix() -> None:
    """The model has two layers. Layers of a draft model may be missing on P, so no layer of the model may count as
    one."""
    names = [
        f"{prefix}layers.{i}.self_attn.attn" for prefix in ("model.", "draft_model.model.", "mtp.") for i in (0, 1, 2)
    ]
    names += ["model.embed.attn", "language_model.model.layers.1.self_attn.attn", "model.layers.10.mixer"]
    config = with_drafts()("kv_producer")
    draft_layers = drafts.layers(config, names)
    assert draft_layers == {"model.layers.2.self_attn.attn", "model.layers.10.mixer", *names[3:9]}
    config.speculative_config = None
    assert drafts.layers(config, names) == frozenset()


def test_how_many_tokens_are_drafted_is_no_part_of_the_draft_model() -> None:
    """And drafts without a cache are no draft model."""
    one, other = (drafts.drafter(speculation(num_speculative_tokens=tokens)) for tokens in (1, 3))
    assert one == other != drafts.drafter(speculation(modules=2, architecture="Other")) and "method=mtp" in one
    assert drafts.drafter(vllm_config(speculative_config=NGRAM).speculative_config) == "" == drafts.drafter(None)


def stored(dtype: str, *, calculate_kv_scales: bool = False, **more: Any) -> Callable[[str], Any]:
    """A configuration with a cache of this dtype, set afterwards because vLLM refuses some on a CPU."""

    def made(role: str) -> Any:
        config = vllm_config(role, **more)
        config.cache_config.cache_dtype = dtype
        if calculate_kv_scales:  # a field of vLLM 0.23
            config.cache_config.calculate_kv_scales = True
        return config

    return made


def divided(role: str, **more: Any) -> Any:
    """A configuration with two tensor-parallel ranks, each with half of the tokens."""
    return vllm_config(role, model=model_dir(1), tensor_parallel_size=2, decode_context_parallel_size=2, **more)


@pytest.fixture
def under_vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "is_vllm_ascend", lambda: True)


def with_pcp(role: str, **more: Any) -> Any:
    """A configuration with prefill context parallelism as in vllm-ascend; vLLM itself allows it for some models
    only."""
    config = divided(role, **more)
    config.parallel_config.prefill_context_parallel_size = 3
    config.parallel_config.cp_kv_cache_interleave_size = 16
    return config


@pytest.mark.usefixtures("under_vllm_ascend")
def test_vllms_own_fp8_has_not_run_under_vllm_ascend() -> None:
    for role in BOTH:
        assert "A quantised KV cache (fp8) under vllm-ascend" in refusal(stored("fp8")(role)).sentence


@pytest.mark.usefixtures("under_vllm_ascend")
def test_ranks_that_divide_the_tokens_start() -> None:
    for role in BOTH:
        config = divided(role)
        Engine.of(config)
        assert admission.token_division(config.parallel_config) == (2, 1, 1)
    config = with_pcp("kv_producer")
    Engine.of(config)
    shape = admission.cache_shape(config, grouped(attention()))
    assert (shape.dcp, shape.pcp, shape.interleave) == (2, 3, 16)


@pytest.mark.usefixtures("under_vllm_ascend")
def test_mtp_with_divided_tokens_starts_from_the_release_on_that_can_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = divided("kv_producer")
    config.speculative_config = speculation()
    monkeypatch.setattr(tried, "installed", {tried.VLLM_ASCEND: "0.30.0rc2", tried.VLLM: "0.30.0"}.__getitem__)
    Engine.of(config)
    monkeypatch.setattr(tried, "installed", {tried.VLLM_ASCEND: "0.23.0.post1", tried.VLLM: "0.23.0"}.__getitem__)
    assert "parallelism (vllm-ascend 0.23.0.post1 was not tried)" in refusal(config).sentence


def in_context(role: str, heads: int, context: ContextParallel) -> Any:
    model = model_dir(heads, num_attention_heads=16)
    sizes = {"tensor_parallel_size": context.tp(heads), "decode_context_parallel_size": context.dcp}
    config = vllm_config(role, model=model, **sizes)
    config.parallel_config.prefill_context_parallel_size = context.pcp
    return config


@pytest.mark.parametrize("context", ON_PREFILL, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_engines_start_with_the_divisions_that_the_workers_tests_compare_and_under_vllm_ascend_alone(
    heads: int, context: ContextParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for under_vllm_ascend, role in ((False, BOTH[0]), (False, BOTH[1]), (True, BOTH[0]), (True, BOTH[1])):
        monkeypatch.setattr(compat, "is_vllm_ascend", lambda under=under_vllm_ascend: under)
        config = in_context(role, heads, context)
        if context == ContextParallel() or (under_vllm_ascend and (role == "kv_producer" or context in ON_DECODE)):
            Engine.of(config)
            spec = latent() if heads == 1 else attention(heads=max(1, heads // context.tp(heads)))
            shape = admission.cache_shape(config, grouped(spec))
            assert (shape.tp_size, shape.dcp, shape.pcp) == (context.tp(heads), *context)
        else:
            assert refusal(config).code == "PD-CONF-005"


@pytest.mark.usefixtures("under_vllm_ascend")
def test_what_is_not_proven_of_divided_tokens_is_refused() -> None:
    assert "Prefill context parallelism on decode" in refusal(with_pcp("kv_consumer")).sentence
    for make in (divided, with_pcp):
        assert "Speculative decoding with" in refusal(make("kv_producer", speculative_config=NGRAM)).sentence
        assert "with pipeline" in refusal(make("kv_producer", pipeline_parallel_size=2)).sentence
    config = divided("kv_producer")
    config.cache_config.cache_dtype = "fp8"
    assert "Context parallelism with a quantised KV cache" in refusal(config).sentence
    config = divided("kv_producer")
    config.parallel_config.cp_kv_cache_interleave_size = 24
    with pytest.raises(ConfigError) as caught:
        admission.cache_shape(config, grouped(attention()))
    assert "do not end with a block of 32" in caught.value.sentence
    config.speculative_config = speculation(method="eagle3")
    assert "with context parallelism (drafts other than MTP)" in refusal(config).sentence
    config = vllm_config("kv_producer", tensor_parallel_size=2)  # two heads: each rank has its own
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ConfigError) as caught:
        admission.cache_shape(config, grouped(attention()))
    assert "do not hold one head" in caught.value.sentence


def with_rings(role: str) -> Any:
    """A configuration of DeepSeek-V4.1, with its drafts: the model is what a start is refused for."""
    config = with_drafts(method="dspark")(role)
    config.model_config.hf_config.architectures = ["DeepseekV41ForCausalLM"]
    return config


NOT_PROVEN: list[tuple[str, Callable[[str], Any]]] = [
    ("Context parallelism without vllm-ascend", with_parallel("prefill_context_parallel_size", 2)),
    ("Context parallelism without vllm-ascend", divided),
    ("Speculative decoding with suffix", with_drafts(method="suffix")),
    ("Speculative decoding with medusa", with_drafts(method="medusa")),
    ("A draft model of 3 MTP layers", with_drafts(modules=3)),
    ("disable_padded_drafter_batch", with_drafts(disable_padded_drafter_batch=True)),
    ("parallel_drafting", with_drafts(parallel_drafting=True)),
    ("num_speculative_tokens_per_batch_size", with_drafts(num_speculative_tokens_per_batch_size=[(1, 8, 2)])),
    ("KV cache in bfloat16 under a model in float32", stored("bfloat16")),
    ("quantised KV cache (fp8_per_token_head)", stored("fp8_per_token_head")),
    ("quantised KV cache (int8_per_token_head)", stored("int8_per_token_head")),
    ("quantised KV cache with pipeline parallelism", stored("fp8", pipeline_parallel_size=2)),
    ("quantised KV cache with speculative decoding", stored("fp8", speculative_config=NGRAM)),
    ("scales that an engine computes by itself", stored("fp8_e4m3", calculate_kv_scales=True)),
    ("DeepSeek-V4.1 (rings of states", with_rings),
    ("Micro-batching", with_parallel("enable_dbo", True)),
    ("Sleep mode", sleeping),
    *(
        (feature, lambda role, more=more: vllm_config(role, additional_config=more))
        for feature, more in (
            ("enable_kv_nz", {"enable_kv_nz": True}),
            ("hamming_sparse", {"enable_hamming_sparse": True}),
            ("hamming_sparse", {"hamming_sparse": {"enabled": True}}),
            ("dyntra_lb_config", {"scheduler_config": {"dyntra_lb_config": {"enabled": True}}}),
        )
    ),
    ("enable_fault_tolerance", with_parallel("enable_fault_tolerance", True)),
    ("enable_elastic_ep", with_parallel("enable_elastic_ep", True)),
]


@pytest.mark.parametrize("role", BOTH)
@pytest.mark.parametrize(("feature", "make"), NOT_PROVEN, ids=[feature for feature, _ in NOT_PROVEN])
def test_what_is_not_proven_stops_the_start_with_a_sentence(
    role: str, feature: str, make: Callable[[str], Any]
) -> None:
    refused = refusal(make(role))
    assert refused.code == "PD-CONF-005" and feature in refused.sentence and len(refused.remedy) > 5


@pytest.mark.parametrize("value", ["1", "2", "true"])
def test_request_ids_without_a_random_part_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config()
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", value)
    assert "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION" in refusal(config).sentence
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0")
    Engine.of(config)


@pytest.mark.parametrize("role", [None, "kv_both"])
def test_an_engine_has_one_role(role: str | None) -> None:
    config = vllm_config()
    config.kv_transfer_config.kv_role = role
    refused = refusal(config)
    assert refused.code == "PD-CONF-004" and repr(role) in refused.sentence
    assert all(word in refused.remedy for word in (*BOTH, "an engine has one role"))


# -- the predecessor's keys


@pytest.mark.parametrize(("role", "side"), [("kv_producer", "prefill"), ("kv_consumer", "decode")])
def test_sizes_of_the_predecessor_must_be_true_of_this_engine(role: str, side: str) -> None:
    true = {"tp_size": 2, "dp_size": 1}
    other = {"prefill": "decode", "decode": "prefill"}[side]
    Engine.of(vllm_config(role, {side: true, other: {"tp_size": 64, "dp_size": 8}}, tensor_parallel_size=2))
    for name, wrong in (
        ("tp_size", 4),
        ("dp_size", 2),
        ("pp_size", 2),
        ("dcp_size", 2),
        ("pcp_size", 2),
        ("dp_rank", 1),
    ):
        refused = refusal(vllm_config(role, {side: {**true, name: wrong}}, tensor_parallel_size=2))
        assert refused.code == "PD-CONF-006"
        assert f"{side}.{name}" in refused.sentence and str(wrong) in refused.sentence and "Remove" in refused.remedy


# -- data parallelism


def as_rank(config: Any, rank: int, *, dense: bool, suffix: int | None = None) -> Any:
    """Change a configuration like vLLM's engine core does for one of its data-parallel ranks."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    transfer.engine_id = f"{transfer.engine_id}_dp{rank if suffix is None else suffix}"
    parallel.data_parallel_index = rank
    if dense:
        parallel.reconfigure_for_independent_dp_rank()
    else:
        parallel.data_parallel_rank = rank
    return config


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "experts"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_each_rank_has_ports_and_a_name_of_its_own(rank: int, dense: bool) -> None:
    extra = {"side_channel_port": 7000, "decode": {"tp_size": 2, "dp_size": 4}}
    config = vllm_config("kv_consumer", extra, tensor_parallel_size=2, data_parallel_size=4)
    engine = Engine.of(as_rank(config, rank, dense=dense))
    assert [engine.port_of(worker) for worker in (0, 1)] == [7000 + 2 * rank, 7001 + 2 * rank]
    assert dp_rank_of(engine.incarnation) == ("" if rank == 0 else str(rank))


def test_a_dense_rank_of_a_second_host_starts() -> None:
    """vLLM 0.23 puts the rank's number on its host into engine_id, later releases its number among all."""
    config = vllm_config("kv_consumer", {"decode": {"dp_size": 4}}, data_parallel_size=4)
    Engine.of(as_rank(config, 2, dense=True, suffix=0))


def test_a_rank_whose_port_would_be_none_is_refused() -> None:
    config = vllm_config("kv_consumer", {"side_channel_port": 65530}, tensor_parallel_size=2, data_parallel_size=4)
    assert "would listen on 65537" in refusal(as_rank(config, 3, dense=False)).sentence


def test_the_size_of_experts_is_checked() -> None:
    config = vllm_config("kv_consumer", {"decode": {"dp_size": 8}}, data_parallel_size=4)
    refused = refusal(as_rank(config, 1, dense=False))
    assert refused.code == "PD-CONF-006" and "decode.dp_size = 8" in refused.sentence and "4" in refused.sentence


def test_a_rank_that_the_predecessors_configuration_names_must_be_the_engines_own() -> None:
    Engine.of(as_rank(vllm_config("kv_consumer", {"decode": {"dp_rank": 0}}, data_parallel_size=4), 0, dense=False))
    Engine.of(as_rank(vllm_config("kv_consumer", {"decode": {"dp_rank": 3}}, data_parallel_size=4), 3, dense=False))
    refused = refusal(
        as_rank(vllm_config("kv_consumer", {"decode": {"dp_rank": 0}}, data_parallel_size=4), 1, dense=False)
    )
    assert refused.code == "PD-CONF-006" and "decode.dp_rank = 0" in refused.sentence


def test_other_keys_of_the_predecessor_are_reported_as_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm_ascend_pd"):
        logging.getLogger("vllm_ascend_pd.engine").addHandler(caplog.handler)
        try:
            Engine.of(vllm_config(extra={"use_ascend_direct": True, "kv_port": "30000"}))
        finally:
            logging.getLogger("vllm_ascend_pd.engine").removeHandler(caplog.handler)
    assert any("use_ascend_direct, kv_port" in record.getMessage() for record in caplog.records)


def test_a_bad_key_stops_the_start() -> None:
    assert refusal(vllm_config(extra={"lease": 5})).code == "PD-CONF-001"


# -- the model's cache


@pytest.mark.parametrize(
    "spec", [attention(), attention(dtype=torch.bfloat16), latent()], ids=lambda s: type(s).__name__
)
def test_one_group_of_full_attention_is_taken(spec: Any) -> None:
    admission.check_groups(cache_config(spec))


def test_layers_with_a_window_that_keep_all_their_blocks_are_taken() -> None:
    """Without vLLM's hybrid allocator such layers are full attention with a sliding_window field."""
    admission.check_groups(cache_config(replace(attention(), sliding_window=16)))


def test_a_model_without_a_cache_is_not_refused_here() -> None:
    admission.check_groups(cache_config(blocks=1).__class__(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]))


BASE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}


def state(**changes: Any) -> MambaSpec:
    """The spec of a recurrent state: two heads of 8 and a state of 6; one group of B and C."""
    facts = {"shapes": ((3, 28), (2, 8, 6)), "dtypes": (torch.bfloat16, torch.float32), "block_size": 32}
    return MambaSpec(**{**facts, **changes})


def delta_net(**changes: Any) -> MambaSpec:
    """The spec of a Gated DeltaNet state, with two rows of the convolution for drafted tokens."""
    facts = {
        "mamba_type": MambaAttentionBackendEnum.GDN_ATTN,
        "num_speculative_blocks": 2,
        "shapes": ((5, 28), (2, 8, 6)),
    }
    return state(**{**facts, **changes})


def fp8(spec: Any) -> Any:
    return replace(spec, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)


CACHES: list[tuple[str, tuple[Any, ...]]] = [
    ("recurrent state of kind MAMBA2 with 1 parts", (attention(), state(shapes=((3, 88),), dtypes=(torch.float32,)))),
    ("recurrent state of kind SHORT_CONV", (attention(), state(mamba_type=MambaAttentionBackendEnum.SHORT_CONV))),
    ("mamba_cache_mode all", (attention(), state(mamba_cache_mode="all"))),
    ("recurrent state of kind MAMBA2 with drafts", (attention(), state(num_speculative_blocks=2))),
    ("with drafts in mamba_cache_mode align", (attention(), delta_net(mamba_cache_mode="align"))),
    ("that every rank has whole", (attention(), state(tp_replicated=True))),
    ("MLAAttentionSpec in one of several groups", (latent(), state())),
    ("MLAAttentionSpec in one of several groups", (latent(), SlidingWindowSpec(**BASE, sliding_window=16))),
    ("sliding windows beside recurrent states", (SlidingWindowSpec(**BASE, sliding_window=16), state())),
    (
        "sliding windows beside recurrent states",
        (attention(), SlidingWindowSpec(**BASE, sliding_window=16), delta_net()),
    ),
    ("retained tokens", (attention(), SlidingWindowSpec(**BASE, sliding_window=16, extra_retained_tokens=2))),
    ("ChunkedLocalAttentionSpec", (ChunkedLocalAttentionSpec(**BASE, attention_chunk_size=16),)),
    ("EncoderOnlyAttentionSpec", (EncoderOnlyAttentionSpec(**BASE),)),
    ("CrossAttentionSpec", (CrossAttentionSpec(**BASE),)),
    ("RSWASpec", (RSWASpec(**BASE, rswa_window=16),)),
    ("HiddenStateCacheSpec", (HiddenStateCacheSpec(**{**BASE, "num_kv_heads": 1}),)),
    (
        "quantised KV cache (torch.int8)",
        (UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": attention(), "b": attention(dtype=torch.int8)}),),
    ),
    ("compressed KV cache", (replace(latent(), tokens_per_state=4),)),
    ("quantised KV cache (torch.uint8)", (attention(dtype=torch.uint8),)),
    ("quantised KV cache (torch.float8_e4m3fn)", (attention(dtype=torch.float8_e4m3fn),)),
    ("quantised KV cache (torch.int8)", (attention(dtype=torch.int8),)),
    ("quantised KV cache (torch.uint8)", (fp8(latent()),)),
    ("quantised KV cache (torch.uint8)", (replace(fp8(attention()), kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD),)),
]


@pytest.mark.parametrize(("feature", "specs"), CACHES, ids=[feature for feature, _ in CACHES])
def test_caches_that_are_not_proven_stop_the_start(feature: str, specs: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        admission.check_groups(cache_config(*specs))
    assert caught.value.code == "PD-CONF-005" and feature in caught.value.sentence


WINDOW = SlidingWindowSpec(**BASE, sliding_window=16)


def grouped(*specs: Any) -> Any:
    """A cache configuration with one layer in each group."""
    groups = [KVCacheGroupSpec([f"model.layers.{i}.self_attn.attn"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("specs", "groups"),
    [
        ((WINDOW,), (Group(32, "window", 16),)),
        ((WINDOW, attention()), (Group(32, "window", 16), Group(32))),
        ((attention(), attention()), (Group(32), Group(32))),
    ],
)
def test_windows_and_several_groups_of_plain_attention_are_taken(specs: Any, groups: tuple[Group, ...]) -> None:
    admission.check_groups(grouped(*specs))
    shape = admission.cache_shape(vllm_config(), grouped(*specs))
    assert shape.groups == groups
    assert shape.group_of == {f"model.layers.{i}.self_attn.attn": i for i in range(len(specs))}


@pytest.mark.parametrize("specs", [(attention(), state()), (state(),)], ids=["beside attention", "alone"])
def test_states_are_taken(specs: tuple[Any, ...]) -> None:
    admission.check_groups(grouped(*specs))
    shape = admission.cache_shape(vllm_config(tensor_parallel_size=2), grouped(*specs))
    assert shape.groups[-1] == Group(32, "state") and len(shape.groups) == len(specs)
    (recurrent,) = shape.states.values()
    assert (recurrent.recurrence, recurrent.sizes, recurrent.dtypes) == ("mamba2", (2, 4), ("bfloat16", "float32"))
    assert not recurrent.dim_first and recurrent.nbytes == (168, 384)


MTP = SimpleNamespace(
    method="mtp",
    draft_model_config=SimpleNamespace(
        hf_config=SimpleNamespace(num_hidden_layers=1),
        quantization=None,
        get_hidden_size=lambda: 16,
        get_total_num_kv_heads=lambda: 2,
        get_head_size=lambda: 16,
    ),
)


def drafting(drafts: Any) -> Any:
    config = vllm_config()
    config.speculative_config = drafts
    return config


def test_mtp_beside_gated_delta_net_is_taken() -> None:
    groups = grouped(attention(), delta_net(), delta_net())
    admission.check_groups(groups)
    shape = admission.cache_shape(drafting(MTP), groups)
    assert [recurrent.drafted for recurrent in shape.states.values()] == [2, 2]
    assert [region.name for region in shape.states["model.layers.1.self_attn.attn"].sections("l", 1)[0].regions] == [
        f"conv.{part}.{row}" for part in "qk" for row in range(3)
    ]


@pytest.mark.parametrize(
    ("specs", "drafts"),
    [
        ((attention(), WINDOW, delta_net()), MTP),
        ((attention(), attention(), delta_net()), MTP),
        ((attention(), state()), MTP),
        ((attention(), delta_net()), SimpleNamespace(**{**vars(MTP), "method": "eagle3"})),
    ],
    ids=["windows", "two groups of attention", "Mamba-2", "Eagle3"],
)
def test_other_drafts_beside_states_stop_the_start(specs: Any, drafts: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        admission.cache_shape(drafting(drafts), grouped(*specs))
    assert caught.value.code == "PD-CONF-005"


def test_a_vllm_that_lacks_groups_and_was_not_tried_has_no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(KVCacheConfig, "transfer_group_ids")
    for specs in ((WINDOW,), (state(),), (WINDOW, attention())):
        with pytest.raises(ConfigError, match=r"vLLM 0\.23 or 0\.30\.0"):
            admission.check_groups(grouped(*specs))
    admission.check_groups(grouped(attention()))


@pytest.mark.usefixtures("under_vllm_ascend")
@pytest.mark.parametrize(
    "specs",
    [
        (WINDOW,),
        (state(),),
        (delta_net(),),
        (attention(), WINDOW),
        (attention(), attention()),
        (attention(), state()),
        (attention(), delta_net(), state()),
        (attention(), attention(), delta_net()),
        (WINDOW, attention(), delta_net()),
        (WINDOW, delta_net()),
        (replace(attention(), sliding_window=16), delta_net()),
    ],
    ids=lambda specs: " ".join(type(spec).__name__ for spec in specs),
)
def test_under_vllm_ascend_other_groups_stop_the_start(specs: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="under vllm-ascend"):
        admission.check_groups(grouped(*specs))


@pytest.mark.usefixtures("under_vllm_ascend")
@pytest.mark.parametrize("states", [0, 1, 3])
def test_under_vllm_ascend_gated_delta_net_may_lie_beside_one_group_of_attention(states: int) -> None:
    groups = grouped(attention(), *[delta_net()] * states)
    admission.check_groups(groups)
    assert len(admission.cache_shape(vllm_config(), groups).states) == states


@pytest.mark.usefixtures("under_vllm_ascend")
@pytest.mark.parametrize("mode", ["none", "align"])
def test_under_vllm_ascend_mtp_may_lie_beside_states_with_prefix_caching_too(mode: str) -> None:
    groups = grouped(attention(), delta_net(mamba_cache_mode=mode))
    admission.check_groups(groups)
    assert admission.cache_shape(drafting(MTP), groups).states


@pytest.mark.parametrize("specs", [(WINDOW, attention()), (state(),)], ids=["window", "state"])
@pytest.mark.parametrize("more", [{"pipeline_parallel_size": 2}, {"speculative_config": NGRAM}], ids=["pp", "ngram"])
def test_what_windows_and_states_were_not_shown_with_stops_the_start(more: dict[str, Any], specs: Any) -> None:
    with pytest.raises(ConfigError, match="sliding windows"):
        admission.cache_shape(vllm_config(**more), grouped(*specs))


@pytest.mark.parametrize("flags", [{"enable_kv_transfer": False}, {"host_resident": True}], ids=str)
def test_a_group_that_vllm_does_not_transfer_stops_the_start(flags: dict[str, bool]) -> None:
    groups = grouped(attention(), attention())
    vars(groups.kv_cache_groups[1]).update(flags)
    with pytest.raises(ConfigError, match="does not transfer"):
        admission.check_groups(groups)


def mixed(*specs: Any) -> Any:
    """A cache configuration with the model's two layers and one of a draft model."""
    names = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    group = SimpleNamespace(
        kv_cache_spec=UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=dict(zip(names, specs, strict=True))),
        layer_names=names,
    )
    return SimpleNamespace(kv_cache_groups=[group])


def test_a_draft_model_may_have_heads_of_its_own() -> None:
    config = with_drafts(method="eagle3")("kv_producer")
    config.speculative_config.draft_model_config.get_total_num_kv_heads = lambda: 8
    shape = admission.cache_shape(config, mixed(attention(), attention(), attention(heads=8)))
    assert shape.of("model.layers.1.self_attn.attn") == LayerShape(2, 2, 16)
    assert shape.of("model.layers.2.self_attn.attn") == LayerShape(8, 8, 16)
    assert shape.drafts == {"model.layers.2.self_attn.attn"} and "eagle3" in shape.drafter


def test_a_draft_model_may_have_heads_beside_a_target_with_mla() -> None:
    config = with_drafts(method="eagle3")("kv_producer")
    config.speculative_config.draft_model_config.get_total_num_kv_heads = lambda: 4
    shape = admission.cache_shape(config, mixed(latent(32), latent(32), attention(heads=4)))
    assert shape.of("model.layers.1.self_attn.attn") == LayerShape(1, 1, 576)
    assert shape.of("model.layers.2.self_attn.attn") == LayerShape(4, 4, 16)


UNLIKE = [
    ("layers have unlike heads", (attention(), attention(size=32), attention())),
    ("MLA in some layers only", (latent(32), attention(), attention())),
    ("draft model with MLA for a target without", (attention(), attention(), latent(32))),
]


@pytest.mark.parametrize(("feature", "specs"), UNLIKE, ids=[feature for feature, _ in UNLIKE])
def test_other_layers_that_are_unlike_stop_the_start(feature: str, specs: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        admission.cache_shape(with_drafts(method="eagle3")("kv_producer"), mixed(*specs))
    assert caught.value.code == "PD-CONF-005" and feature in caught.value.sentence


def with_indexers(attention: Any, *more: str) -> Any:
    """A cache configuration with indexers as in vLLM: layers with their own names beside the attention's."""
    specs = {LAYERS[0]: attention, LAYERS[1]: attention, "model.layers.0.self_attn.indexer.k_cache": latent(32, 24)}
    specs |= dict.fromkeys(more, latent(32, 24))
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs))
    return SimpleNamespace(kv_cache_groups=[group])


def test_an_indexer_is_a_layer_of_one_key_per_token_for_all_ranks() -> None:
    config, groups = vllm_config(tensor_parallel_size=2), with_indexers(latent(32, 64))
    admission.check_groups(groups)
    shape = admission.cache_shape(config, groups)
    assert shape.other_shapes == {"model.layers.0.self_attn.indexer.k_cache": LayerShape(1, 1, 24)}
    assert shape.of(LAYERS[1]) == LayerShape(1, 1, 64)


def test_a_draft_models_indexer_is_the_draft_models() -> None:
    """DeepSeek-V3.2's MTP layer has an indexer too: P may lack both of its layers, and no other."""
    groups = with_indexers(latent(32, 64))
    (group,) = groups.kv_cache_groups
    of_draft = {
        "model.layers.2.self_attn.attn": latent(32, 64),
        "model.layers.2.self_attn.indexer.k_cache": latent(32, 24),
    }
    group.layer_names.extend(of_draft)
    group.kv_cache_spec.kv_cache_specs.update(of_draft)
    assert admission.cache_shape(with_drafts()("kv_producer"), groups).drafts == set(of_draft)


@pytest.mark.parametrize(
    ("attention", "more"),
    [(attention(), ()), (latent(32, 64), ("model.layers.7.self_attn.indexer.k_cache",))],
    ids=["heads", "no attention"],
)
def test_an_indexer_whose_write_nothing_announces_is_refused(attention: Any, more: tuple[str, ...]) -> None:
    """An indexer has no hook: that of MLA in the same layer covers both."""
    with pytest.raises(ConfigError) as caught:
        admission.cache_shape(vllm_config(), with_indexers(attention, *more))
    assert caught.value.code == "PD-CONF-005"


def ascend_spec(sparse_head_dim: tuple[int, ...] | None, **more: Any) -> Any:
    """vllm-ascend's own spec, which all MLA layers have, with or without an indexer."""
    return ascend_specs.latent(16, sparse_head_dim or (512, 64), sparse_head_dim=sparse_head_dim, **more)


@pytest.mark.parametrize("second", [(512, 64, 128), (512, 64, 0)], ids=["in all layers", "in some"])
def test_a_sparse_indexer_may_be_a_part_of_its_layer(second: tuple[int, ...]) -> None:
    """vllm-ascend has one spec for latent, rope and index key; layers that reuse another's selection have no key."""
    specs = dict(zip(LAYERS, (ascend_spec((512, 64, 128)), ascend_spec(second)), strict=True))
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs))
    groups = SimpleNamespace(kv_cache_groups=[group])
    admission.check_groups(groups)
    shape = admission.cache_shape(vllm_config(tensor_parallel_size=2), groups)
    assert [shape.of(name) for name in LAYERS] == [LayerShape(1, 1, 704), LayerShape(1, 1, sum(second))]
    assert shape.indexes == dict.fromkeys(LAYERS if second[-1] else LAYERS[:1], 1)


def indexed_in_context(dcp: int = 1, pcp: int = 1, copies: int = 1) -> CacheShape:
    config = divided("kv_producer")
    parallel = config.parallel_config
    parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size = dcp, pcp
    parallel.cp_kv_cache_interleave_size = 16
    groups = cache_config(ascend_spec((512, 64, 128), sfa_dcp_replicated_indexer_size=copies))
    return admission.cache_shape(config, groups)


@pytest.mark.usefixtures("under_vllm_ascend")
def test_an_indexer_with_dcp_has_all_its_keys_on_every_rank() -> None:
    """vllm-ascend counts their copies in the spec; with PCP it divides the keys, which no pair has shown."""
    shape = indexed_in_context(dcp=2, copies=2)
    assert shape.dcp == 2 and shape.indexes == dict.fromkeys(LAYERS, 1)
    with pytest.raises(ConfigError, match="A sparse indexer whose keys are not whole on each of 2 ranks of DCP"):
        indexed_in_context(dcp=2)
    with pytest.raises(ConfigError, match="Prefill context parallelism with a sparse indexer"):
        indexed_in_context(dcp=2, pcp=2, copies=2)


@pytest.mark.usefixtures("under_vllm_ascend")
def test_vllm_ascends_indexers_are_layers_of_their_own_since_0_30() -> None:
    index = {"block_size": 32, "num_kv_heads": 1, "head_size": 128}
    groups = with_indexers(ascend_specs.latent(32, (512, 64)))
    specs = groups.kv_cache_groups[0].kv_cache_spec.kv_cache_specs
    name = next(name for name in specs if name not in LAYERS)
    specs[name] = ascend_specs.AscendSFAIndexerCacheSpec(**index, dtype=torch.bfloat16)
    admission.check_groups(groups)
    shape = admission.cache_shape(vllm_config(tensor_parallel_size=2), groups)
    assert shape.other_shapes == {name: LayerShape(1, 1, 128)} and not shape.indexes
    specs[name] = ascend_specs.AscendSFAIndexerCacheSpec(**index, dtype=torch.int8, scale_dim=1)
    admission.check_groups(groups)
    assert admission.cache_shape(vllm_config(), groups).other_shapes == {name: LayerShape(1, 1, 128)}


@pytest.mark.usefixtures("under_vllm_ascend")
@pytest.mark.parametrize(("dtype", "scales"), [(torch.int8, 0), (torch.uint8, 4), (torch.float8_e4m3fn, 1)], ids=str)
def test_other_quantised_indexers_are_refused(dtype: torch.dtype, scales: int) -> None:
    """vllm-ascend 0.30 has mxfp4 too, and fp8 on other chips."""
    groups = with_indexers(ascend_specs.latent(32, (512, 64)))
    specs = groups.kv_cache_groups[0].kv_cache_spec.kv_cache_specs
    name = next(name for name in specs if name not in LAYERS)
    specs[name] = ascend_specs.AscendSFAIndexerCacheSpec(
        block_size=32, num_kv_heads=1, head_size=128, dtype=dtype, scale_dim=scales
    )
    with pytest.raises(ConfigError, match=rf"A quantised KV cache \({dtype}\)"):
        admission.check_groups(groups)


@pytest.mark.usefixtures("under_vllm_ascend")
def test_an_indexers_own_layer_is_whole_on_each_rank_of_dcp_or_refused() -> None:
    """vllm-ascend 0.30 counts the copies in that layer's spec; vLLM's own indexers have none."""
    config, groups = divided("kv_producer"), with_indexers(latent(32, 64))
    config.parallel_config.cp_kv_cache_interleave_size = 16
    feature = "A sparse indexer whose keys are not whole on each of 2 ranks of DCP"
    with pytest.raises(ConfigError, match=feature):
        admission.cache_shape(config, groups)
    specs = groups.kv_cache_groups[0].kv_cache_spec.kv_cache_specs
    index = {"block_size": 32, "num_kv_heads": 1, "head_size": 24, "dtype": torch.bfloat16}
    (name,) = set(specs).difference(LAYERS)
    specs[name] = ascend_specs.AscendSFAIndexerCacheSpec(**index, sfa_dcp_replicated_indexer_size=2)
    assert admission.cache_shape(config, groups).dcp == 2
    specs[name] = ascend_specs.AscendSFAIndexerCacheSpec(**index)
    with pytest.raises(ConfigError, match=feature):
        admission.cache_shape(config, groups)


@pytest.mark.usefixtures("under_vllm_ascend")
def test_packed_latents_in_int8_have_their_scales_and_other_int8_has_none() -> None:
    """`--kv-cache-dtype int8` of 0.30: what it makes int8 depends on the model, and only the specs say it."""
    config = stored("int8")("kv_consumer")
    Engine.of(config)
    packed = ascend_specs.NewerMLASpec(
        block_size=32, num_kv_heads=1, head_size=656, dtype=torch.int8, parts=(512, 64), cache_sparse_sfa_c8=True
    )
    admission.check_groups(with_indexers(packed))
    assert admission.cache_shape(config, with_indexers(packed)).of(LAYERS[0]) == LayerShape(1, 1, 656)
    with pytest.raises(ConfigError, match=r"A quantised KV cache \(torch.int8\)"):
        admission.check_groups(with_indexers(replace(packed, cache_sparse_sfa_c8=False)))


def test_an_indexer_with_a_pipeline_is_refused_but_on_p_under_vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> None:
    for under_vllm_ascend, role in itertools.product((False, True), BOTH):
        monkeypatch.setattr(compat, "is_vllm_ascend", lambda under=under_vllm_ascend: under)
        staged = vllm_config(role, pipeline_parallel_size=2)
        for groups in (with_indexers(latent(32, 64)), cache_config(ascend_spec((512, 64, 128)))):
            if under_vllm_ascend and role == "kv_producer":
                admission.cache_shape(staged, groups)
                continue
            with pytest.raises(ConfigError, match="A sparse indexer with pipeline parallelism"):
                admission.cache_shape(staged, groups)
    assert admission.cache_shape(staged, cache_config(ascend_spec(None))).of(LAYERS[0]) == LayerShape(1, 1, 576)


def test_an_indexer_with_int8_is_what_its_tensors_say() -> None:
    """C8: the spec has bfloat16 and counts elements. P and D compare what the tensors are."""
    spec = ascend_spec((656, 0, 128), cache_sparse_sfa_c8=True, cache_sparse_li_c8=True)
    admission.check_groups(cache_config(spec))
    assert admission.cache_shape(vllm_config(), cache_config(spec)).of(LAYERS[0]) == LayerShape(1, 1, 784)


def scaled(*layers: tuple[str, float | None, float | None], names: Sequence[str] = LAYERS) -> Any:
    """A configuration whose layers have these formats and scales."""
    config = vllm_config()
    context = config.compilation_config.static_forward_context
    for name, (dtype, k, v) in zip(names, layers, strict=True):
        context[name] = SimpleNamespace(
            kv_cache_dtype=dtype, _k_scale_float=k, _v_scale_float=v, _k_scale=torch.ones(()), _v_scale=torch.ones(())
        )
    return config


def word(*layers: tuple[str, float | None, float | None]) -> str:
    groups = cache_config(fp8(attention()))
    admission.check_groups(groups)
    (dtype_name,) = set(admission.cache_shape(scaled(*layers), groups).dtype_names.values())
    return dtype_name


def test_the_word_of_an_fp8_cache_says_its_format_and_its_scales() -> None:
    """A checkpoint's scales are not in the cache: with other scales the same bytes are other numbers."""
    one, other, plain = ("fp8", 0.5, 0.25), ("fp8", 0.5, 0.125), ("fp8_e4m3", 1.0, 1.0)
    assert word(plain, plain) == word(("fp8", 1.0, 1.0), plain) == "fp8_e4m3"
    assert word(("fp8_e5m2", 1.0, 1.0), ("fp8_e5m2", 1.0, 1.0)) == "fp8_e5m2"
    assert word(one, one) == word(one, one) != word(one, other) != word(other, one)
    assert word(one, one).startswith("fp8_e4m3 with scales ")
    assert admission.cache_shape(vllm_config(), cache_config(attention())).dtype_names == {}


@pytest.mark.parametrize(
    ("feature", "layers"),
    [
        ("more than one scale", (("fp8", 1.0, None), ("fp8", 1.0, 1.0))),
        ("more than one scale", (("fp8", None, 1.0), ("fp8", 1.0, 1.0))),
        ("do not say one format", (("auto", 1.0, 1.0), ("fp8", 1.0, 1.0))),
        ("do not say one format", (("fp8_e5m2", 1.0, 1.0), ("fp8", 1.0, 1.0))),
    ],
)
def test_an_fp8_cache_that_does_not_say_what_its_bytes_mean_stops_the_start(feature: str, layers: Any) -> None:
    with pytest.raises(ConfigError, match=feature):
        word(*layers)


def test_a_cache_that_is_quantised_in_some_layers_only_stops_the_start() -> None:
    groups = mixed(fp8(attention()), attention(), attention())
    with pytest.raises(ConfigError, match="in some layers only"):
        admission.cache_shape(scaled(*[("fp8", 1.0, 1.0)] * 3, names=groups.kv_cache_groups[0].layer_names), groups)


def test_all_refusals_are_named_on_request_and_the_first_stops_the_start() -> None:
    config = vllm_config("kv_consumer", {"side_channel_port": 65535, "decode": {"tp_size": 4}}, tensor_parallel_size=2)
    config.parallel_config.enable_dbo = True
    config.cache_config.cache_dtype = "int8_per_token_head"
    push = PushConfig.parse(config.kv_transfer_config.kv_connector_extra_config)
    refusals = list(admission.engine_refusals(config, push))
    assert [each.code for each in refusals] == ["PD-CONF-005", "PD-CONF-005", "PD-CONF-006", "PD-CONF-003"]
    assert refusal(config).sentence == refusals[0].sentence
    specs = (attention(dtype=torch.int8), SlidingWindowSpec(**BASE, sliding_window=16, extra_retained_tokens=2))
    features = [refused.values["feature"] for refused in admission.group_refusals(cache_config(*specs))]
    assert [words.split(" (")[0] for words in features] == [
        "A quantised KV cache", "A sliding window with retained tokens before it",
    ]  # fmt: skip


def test_an_unknown_kind_is_the_only_reason_that_is_named() -> None:
    unknown = ChunkedLocalAttentionSpec(**BASE, attention_chunk_size=16)
    (alone,) = admission.group_refusals(cache_config(attention(dtype=torch.int8), unknown))
    assert alone.values["feature"] == "A KV cache of kind ChunkedLocalAttentionSpec"


@pytest.mark.parametrize(
    ("kv_heads", "tp", "spec", "expected"),
    [
        (2, 1, attention(), CacheShape(32, 2, 2, 16, 1)),
        (2, 2, attention(heads=1), CacheShape(32, 1, 2, 16, 2)),
        (1, 2, attention(heads=1), CacheShape(32, 1, 1, 16, 2)),
        (2, 2, latent(), CacheShape(16, 1, 1, 576, 2)),
    ],
    ids=["GQA", "GQA TP 2", "MQA TP 2", "MLA TP 2"],
)
def test_the_cache_shape_is_the_engines_own_word(kv_heads: int, tp: int, spec: Any, expected: CacheShape) -> None:
    config = vllm_config(model=model_dir(kv_heads), tensor_parallel_size=tp)
    assert admission.cache_shape(config, cache_config(spec)) == replace(expected, group_of=dict.fromkeys(LAYERS, 0))


def test_the_fingerprint_tells_models_apart_and_can_be_read() -> None:
    prints = {
        admission.model_fingerprint(vllm_config(model=model_dir(**changes)))
        for changes in ({}, {"num_hidden_layers": 3}, {"hidden_size": 128}, {"vocab_size": 256}, {"kv_heads": 4})
    }
    assert len(prints) == 5
    one = admission.model_fingerprint(vllm_config())
    assert one == admission.model_fingerprint(vllm_config("kv_consumer", tensor_parallel_size=2))
    assert "layers=2" in one and "kv_heads=2" in one and "dtype=float32" in one
    assert admission.model_fingerprint(vllm_config(), "r2") == f"{one} version=r2", "weights of one shape look the same"


def longrope(**arguments: Any) -> str:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 128, **factors}
    model = model_dir.__wrapped__(rope_scaling=scaling, original_max_position_embeddings=128)
    return admission.model_fingerprint(vllm_config(model=model, **arguments))


def test_the_fingerprint_names_the_factors_that_rotate_keys() -> None:
    """vLLM takes the long ones where the engine's longest prompt is beyond the model's original length."""
    short, long = longrope(max_model_len=128), longrope(max_model_len=130)
    assert short.endswith(" rope=short") and long.endswith(" rope=long")
    assert not may_pair(fingerprint(short), fingerprint(long))
    plain = admission.model_fingerprint(vllm_config())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    one, other = (
        admission.model_fingerprint(vllm_config(hf_overrides={"rope_parameters": {**yarn, "factor": factor}}))
        for factor in (4.0, 2.0)
    )
    assert len({plain, one, other}) == 3 and plain == one.partition(" rope=")[0]


def test_a_platform_without_code_that_waits_for_its_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config()
    monkeypatch.setattr(compat, "device_type", lambda: "cuda")
    assert "Platform cuda" in refusal(config).sentence


@pytest.mark.parametrize("role", BOTH)
def test_xlite_graphs_are_refused_where_layers_have_to_be_announced(role: str) -> None:
    config = vllm_config(role, additional_config={"xlite_graph_config": {"enabled": True}})
    refused = [each.sentence for each in admission.engine_refusals(config, Engine.of(vllm_config(role)).config)]
    assert len(refused) == (role == "kv_producer") and all("xlite_graph_config on prefill" in each for each in refused)


def test_under_vllm_ascend_a_sparse_indexers_engine_fits_none_whose_keys_are_no_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sparse = {"index_topk": 2048}
    for more, differs in ((sparse, True), ({}, False), ({**sparse, "compress_ratios": [0, 4]}, False)):
        config, prints = vllm_config(), []
        config.model_config.hf_text_config.update(more)
        for under_vllm_ascend in (False, True):
            monkeypatch.setattr(compat, "is_vllm_ascend", lambda under=under_vllm_ascend: under)
            prints.append(admission.model_fingerprint(config))
        # Without vllm-ascend these keys are vLLM's own layers, in all versions: what was said of them stays.
        before, now = prints
        assert now == (f"{before} index=layers" if differs else before)
        assert may_pair(fingerprint(before), fingerprint(now)) is not differs


# -- reachability and secrets


def test_an_address_that_others_reach_needs_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.2.3")
    assert refusal(vllm_config()).code == "PD-SEC-002"
    assert Engine.of(vllm_config(extra={"allow_unauthenticated": True})).host == "10.1.2.3"
    assert Engine.of(vllm_config(extra={"side_channel_host": "127.0.0.1"})).host == "127.0.0.1"
    secret = write(tmp_path / "secret", b"s" * 40)
    engine = Engine.of(vllm_config(extra={"secret_file": secret}))
    assert engine.secrets is not None and engine.secrets.current == b"s" * 40
    assert "s" * 40 not in repr(engine)


def test_peers_are_sent_one_address(tmp_path: Path) -> None:
    keys = {"secret_file": write(tmp_path / "secret", b"s" * 40)}
    for every in ("0.0.0.0", "::"):
        refused = refusal(vllm_config(extra={**keys, "side_channel_host": every}))
        assert refused.code == "PD-CONF-003" and repr(every) in refused.sentence and "advertise_host" in refused.remedy
        Engine.of(vllm_config(extra={**keys, "side_channel_host": every, "advertise_host": "10.1.2.3"}))


def test_ports_beyond_the_last_one_are_noticed_at_the_start() -> None:
    refused = refusal(vllm_config("kv_consumer", {"side_channel_port": 65535}, tensor_parallel_size=2))
    assert refused.code == "PD-CONF-003" and "side_channel_port" in refused.sentence
    Engine.of(vllm_config("kv_consumer", {"side_channel_port": 65534}, tensor_parallel_size=2))


def test_two_processes_have_two_incarnations() -> None:
    config = vllm_config()
    assert Engine.of(config).incarnation != Engine.of(config).incarnation


# -- secret files


def write(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_a_secret_is_read_without_the_white_space_around_it(tmp_path: Path) -> None:
    path = write(tmp_path / "s", b"  " + b"k" * MIN_SECRET_BYTES + b"\n")
    old = write(tmp_path / "old", b"o" * MIN_SECRET_BYTES, 0o400)
    secrets = load_secrets(ChannelConfig(secret_file=path, secret_file_previous=old))
    assert secrets is not None and secrets.accepted == (b"k" * MIN_SECRET_BYTES, b"o" * MIN_SECRET_BYTES)
    assert load_secrets(PushConfig().channel) is None


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (b"k" * 40, 0o640, "others may read it (mode 0640)"),
        (b"k" * 40, 0o604, "others may read it"),
        (b"k" * (MIN_SECRET_BYTES - 1), 0o600, "31 bytes"),
        (b" " * 100, 0o600, "0 bytes"),
        (b"k" * (MAX_SECRET_BYTES + 1), 0o600, "larger than"),
    ],
    ids=["group", "world", "short", "blank", "huge"],
)
def test_a_secret_file_that_is_none_is_refused_without_its_contents(
    content: bytes, mode: int, why: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "s", content, mode)
    with pytest.raises(ConfigError) as caught:
        load_secrets(ChannelConfig(secret_file=path))
    assert caught.value.code == "PD-SEC-001" and why in caught.value.sentence and path in caught.value.sentence
    assert b"kkkk" not in str(caught.value).encode()


@pytest.mark.parametrize(
    ("mode", "of_group", "taken"),
    [(0o440, True, True), (0o440, False, False), (0o460, True, False), (0o444, True, False)],
)
def test_a_secret_that_root_lends_to_the_processs_own_group_is_taken(
    mode: int, of_group: bool, taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pod that is not root gets it, with an `fsGroup`. Here the process is said to be another user."""
    path = write(tmp_path / "s", b"k" * 40, mode)
    owner, group = Path(path).stat().st_uid, Path(path).stat().st_gid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(os, "getegid", lambda: group if of_group else group + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [])
    with nullcontext() if taken else pytest.raises(ConfigError, match="others may read it"):
        assert load_secrets(ChannelConfig(secret_file=path)) is not None


def test_secrets_are_read_again_once_their_files_have_changed_and_nobody_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, three = (bytes([letter]) * MIN_SECRET_BYTES for letter in b"abc")
    path, previous = write(tmp_path / "s", one), write(tmp_path / "p", one)
    secrets = load_secrets(ChannelConfig(secret_file=path, secret_file_previous=previous))
    assert secrets is not None
    write(tmp_path / "p", two)
    assert secrets.accepted == (one, one), "it was looked at less than a second ago"
    monkeypatch.setattr(secret_files, "LOOK_S", 0.0)
    monkeypatch.setattr(secret_files, "SETTLED_S", 3600.0)
    assert secrets.accepted == (one, one), "it has just been written, and the other file may follow"
    monkeypatch.setattr(secret_files, "SETTLED_S", 0.0)
    assert secrets.accepted == (one, two) and secrets.current == one
    write(tmp_path / "p", one)
    write(tmp_path / "s", two)
    assert secrets.accepted == (two, one) and secrets.current == two
    write(tmp_path / "s", b"too short")
    for _ in range(3):
        assert secrets.accepted == (two, one)
    (tmp_path / "s").unlink()
    assert secrets.accepted == (two, one)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2 and "9 bytes" in said[0] and "No such file" in said[1], "each once"
    replaced = write(tmp_path / "new", three)
    Path(replaced).rename(path)
    assert secrets.current == three
    assert not [record for record in caplog.records if "cccc" in record.getMessage()]


def test_what_is_not_a_file_is_no_secret(tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "absent"), "/dev/null"):
        with pytest.raises(ConfigError) as caught:
            load_secrets(ChannelConfig(secret_file=path))
        assert caught.value.code == "PD-SEC-001"


INT8_ON_D = attention(dtype=torch.int8)
SCALED = {name: torch.full((32,), 0.5) for name in quantised.SCALES}


def with_scales(role: str, changed: Mapping[str, Any] = MappingProxyType({}), *, layers: int = 2, **more: Any) -> Any:
    """A configuration whose layers have scales for heads in int8, as vllm-ascend makes them of its checkpoint."""
    config = vllm_config(role, **more)
    context = config.compilation_config.static_forward_context
    context.update({name: SimpleNamespace(**{**SCALED, **changed}) for name in LAYERS[:layers]})
    return config


@pytest.mark.usefixtures("under_vllm_ascend")
def test_heads_in_int8_on_d_are_known_by_their_scales_on_both_sides() -> None:
    p, d = (
        admission.cache_shape(with_scales(role), cache_config(spec))
        for role, spec in (("kv_producer", attention()), ("kv_consumer", INT8_ON_D))
    )
    admission.check_groups(cache_config(INT8_ON_D))
    assert p.dtype_names == d.dtype_names and set(p.int8_scales) == set(d.int8_scales) == set(LAYERS)
    other = with_scales("kv_producer", {"v_cache_offset": torch.zeros(32)})
    assert admission.cache_shape(other, cache_config(attention())).dtype_names != d.dtype_names
    assert admission.computes_no_prompts(cache_config(INT8_ON_D))
    assert not admission.computes_no_prompts(cache_config(attention()))


@pytest.mark.usefixtures("under_vllm_ascend")
def test_a_p_with_its_own_heads_in_int8_is_refused() -> None:
    for role in BOTH:
        config = stored("int8")(role)
        if role == "kv_producer":
            assert "Start prefill without --kv-cache-dtype" in refusal(config).remedy
        else:
            Engine.of(config)


@pytest.mark.usefixtures("under_vllm_ascend")
@pytest.mark.parametrize(
    ("roles", "feature", "change"),
    [
        (BOTH, "Heads in int8 with speculative decoding", {"speculative_config": NGRAM}),
        (BOTH, "Heads in int8 with pipeline parallelism", {"pipeline_parallel_size": 2}),
        (BOTH, "Heads in int8 with context parallelism", {}),
        (BOTH, "Heads in int8 with vLLM's second model runner", {}),
        (BOTH[1:], "Heads in int8 with kv_load_failure_policy recompute", {}),
        (BOTH[:1], "in some layers only", {"layers": 1}),
        (BOTH[1:], "without scales of its checkpoint", {"layers": 1}),
        (BOTH[1:], "without scales of its checkpoint", {"layers": 0}),
    ],
)
def test_what_is_not_proven_beside_heads_in_int8_is_refused(
    roles: tuple[str, ...], feature: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in roles:
        config = with_scales(role, **change)
        config.parallel_config.prefill_context_parallel_size = 1 + ("context" in feature)
        config.kv_transfer_config.kv_load_failure_policy = "recompute" if "policy" in feature else "fail"
        spec = attention() if role == "kv_producer" else INT8_ON_D
        with monkeypatch.context() as patched, pytest.raises(ConfigError) as caught:
            if "second" in feature:
                patched.setattr(type(config), "use_v2_model_runner", True)
            admission.cache_shape(config, cache_config(spec))
        assert feature in caught.value.sentence


def test_heads_in_int8_are_vllm_ascends_alone() -> None:
    with pytest.raises(ConfigError, match="quantised KV cache"):
        admission.check_groups(cache_config(INT8_ON_D))
    assert not admission.computes_no_prompts(cache_config(INT8_ON_D))
    assert not admission.cache_shape(with_scales("kv_producer"), cache_config(attention())).int8_scales


@pytest.mark.usefixtures("under_vllm_ascend")
def test_heads_in_int8_stand_in_one_group_and_behind_no_other_connector() -> None:
    for role in BOTH:
        config = with_scales(role)
        with pytest.raises(ConfigError, match="several groups or states"):
            quantised.of_heads(config, dict.fromkeys(LAYERS, attention()), grouped=True)
    with pytest.raises(ConfigError, match="behind a MultiConnector"):
        admission.check_contained(grouped=False, heads_in_int8=True)
    admission.check_contained(grouped=False, heads_in_int8=False)
