# SPDX-License-Identifier: Apache-2.0
"""Assumptions of the package about vllm-ascend and its vLLM: each function checks one of them.

python tests/ascend_host/assumptions.py [NAME…]    in an environment of vllm-ascend; one JSON line each: name, error

Without names it checks those about the release that is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from pd_test_forked import in_a_child
from unit.admission.vllm_configs import vllm_config
from vllm import plugins
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core import EngineCoreProc
from vllm_ascend.core import kv_cache_interface as ascend_specs
from vllm_ascend.distributed.kv_transfer import register_connector as register_theirs
from vllm_ascend.worker.worker import NPUWorker

from tools.support.models import ensure
from vllm_ascend_pd import plugin
from vllm_ascend_pd.admission import kinds
from vllm_ascend_pd.connector import AscendPushConnector
from vllm_ascend_pd.engine import Engine
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.vllm_patches import compat, older_groups, patience
from vllm_ascend_pd.vllm_patches.wrapping import WRAPPED

BOTH = ("kv_producer", "kv_consumer")
RELEASE = ".".join(importlib.metadata.version("vllm_ascend").split(".")[:2])
OLDER = RELEASE == "0.23"
ASSUMPTIONS: dict[str, Callable[[], None]] = {}
LOADED: set[str] = set()  # connectors of the plug-ins that vLLM loads by itself
OURS = "ascend_pd"
WITHOUT_OURS, WITH_OURS = "ascend,ascend_kv_connector", f"ascend,{OURS}"
found_with: dict[str, bool] = {}  # whether our connector is found, by VLLM_PLUGINS


def assumption(function: Callable[[], None]) -> Callable[[], None]:
    ASSUMPTIONS[function.__name__] = function
    return function


def of(release: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a decorator for what is assumed of one release alone."""
    return assumption if release == RELEASE else lambda function: function


def refused(config: Any) -> str:
    try:
        Engine.of(config)
    except ConfigError as error:
        return error.sentence
    return ""


def last_line(program: str, **environment: str) -> str:
    """Return the last line that another interpreter prints, for what is read once, when vLLM is imported."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout.splitlines()[-1]


# ---- start: plug-ins, names, configuration


@assumption
def the_connector_is_found_in_either_order_of_registration() -> None:
    """vllm-ascend and this package register by plug-ins of one group, whose order is not defined."""
    registry = KVConnectorFactory._registry
    for order in ((plugin.register, register_theirs), (register_theirs, plugin.register)):
        registry.clear()
        for register in order:
            register()
        ours, theirs = registry[plugin.CONNECTOR](), registry["MooncakeLayerwiseConnector"]()
        assert ours.__module__ == "vllm_ascend_pd.connector", ours
        assert theirs.__module__.startswith("vllm_ascend."), theirs


@assumption
def a_list_of_plugins_has_to_name_ours() -> None:
    """VLLM_PLUGINS names the plug-ins to load, of all groups: vllm-ascend's platform, its plug-ins, and ours."""
    names = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert OURS in names and "ascend_kv_connector" in names, names
    assert "VLLM_PLUGINS" not in os.environ and plugin.CONNECTOR in LOADED
    assert found_with == {WITHOUT_OURS: False, WITH_OURS: True}, found_with


@assumption
def an_engine_id_ends_in_no_rank_but_vllms() -> None:
    """vllm-ascend makes each engine_id unique, once; vLLM appends `_dp` and the rank's number (0.23: on its host)."""
    for role in BOTH:
        config = vllm_config(role)
        given = config.kv_transfer_config.engine_id
        assert re.search(r"-[0-9a-f]{32}$", given), given
        assert not re.search(r"_dp\d+$", given), given
        config.__post_init__()
        assert config.kv_transfer_config.engine_id == given, config.kv_transfer_config.engine_id
    # vllm-ascend replaces run_engine_core, and calls vLLM's unless it balances, which it does for neither P nor D.
    source = inspect.getsource(engine_core)
    try:
        vllm_config("kv_consumer", additional_config={"enable_balance_scheduling": True})
    except ValueError as error:
        assert "not supported in" in str(error), error
    else:
        raise AssertionError("a D may balance")
    assert f"_dp{{{'local_dp_rank' if OLDER else 'dp_rank'}}}" in source and "data_parallel_index = dp_rank" in source


@assumption
def sizes_are_checked_by_vllm_ascend_as_we_do() -> None:
    """An engine's own sizes must be right.

    The other side's have no effect on us; vllm-ascend requires P's TP to be a multiple of D's, assumes 1 for a side
    without an entry, and reads `tp_size` of each entry, with any connector (not with MLA).
    """

    def taken(role: str, prefill: dict[str, int] | None, decode: dict[str, int] | None) -> str:
        sides = {"prefill": prefill, "decode": decode}
        extra = {side: sizes for side, sizes in sides.items() if sizes is not None}
        try:
            return refused(vllm_config(role, extra))
        except (ValueError, KeyError) as error:
            return str(error)

    one, two = {"tp_size": 1, "dp_size": 1}, {"tp_size": 2}
    for role in BOTH:
        assert not taken(role, None, None)
        assert not taken(role, one, one)
    assert not taken("kv_consumer", {"tp_size": 64, "dp_size": 8}, one)
    assert "conflicting" in taken("kv_producer", two, one)
    assert "conflicting" in taken("kv_producer", {"tp_size": 1, "dp_size": 2}, one)
    for role in BOTH:
        # Here a D has no TP 2 either, which 0.30 looks at first.
        why = "conflicting" if role == "kv_consumer" and not OLDER else "must be divisible"
        assert why in taken(role, one, two)
        assert why in taken(role, None, two)
        assert "'tp_size'" in taken(role, {"dp_size": 1}, None)


@assumption
def decode_keeps_its_full_graphs_and_prefill_gets_piecewise_ones() -> None:
    """On the configuration as vLLM and vllm-ascend's platform leave it. Metaserver URLs tell vLLM which side it is."""
    urls = {"metaserver_urls": ["http://127.0.0.1:1"]}
    for mode in (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE):
        given: dict[str, Any] = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": mode.name}}
        d, p = vllm_config("kv_consumer", urls, **given), vllm_config("kv_producer", **given)
        assert d.compilation_config.cudagraph_mode == mode, d.compilation_config.cudagraph_mode
        assert not p.compilation_config.cudagraph_mode.has_full_cudagraphs(), p.compilation_config.cudagraph_mode
        assert not refused(d) and not refused(p), (refused(d), refused(p))
        said = refused(vllm_config("kv_producer", urls, **given))
        assert bool(said) == mode.has_full_cudagraphs(), (mode, said)


@assumption
def the_recompute_scheduler_is_decodes_alone() -> None:
    flags = {"additional_config": {"recompute_scheduler_enable": True}}
    d, p = vllm_config("kv_consumer", **flags), vllm_config("kv_producer", **flags)
    assert "RecomputeScheduler" in str(d.scheduler_config.scheduler_cls), d.scheduler_config.scheduler_cls
    assert "Recompute" not in str(p.scheduler_config.scheduler_cls), p.scheduler_config.scheduler_cls
    assert not refused(d) and not refused(p)


@of("0.23")
def prefill_takes_no_blocks_back() -> None:
    """vllm-ascend's scheduler never preempts on a kv_producer: a push restarts only with another vLLM."""
    from vllm_ascend.patch.platform.patch_balance_schedule import _disable_preemption_on_prefill_node as disabled

    assert disabled(vllm_config("kv_producer")) and not disabled(vllm_config("kv_consumer"))


@of("0.30")
def prefill_takes_blocks_back_as_vllm_does() -> None:
    """P's scheduler is vLLM's own, of which a push knows that it restarts behind a preemption."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler = vllm_config("kv_producer").scheduler_config.get_scheduler_cls()
    assert issubclass(scheduler, Scheduler) and scheduler.schedule is Scheduler.schedule, scheduler
    assert scheduler._preempt_request is Scheduler._preempt_request


@assumption
def a_sleeping_engine_loses_its_cache() -> None:
    """No connector is asked whether it supports sleep mode, so the configuration is refused."""
    for role in BOTH:
        config = vllm_config(role, enable_sleep_mode=True)
        assert "leep mode" in refused(config), refused(config)
    assert "connector" not in inspect.getsource(NPUWorker.sleep).lower()


@assumption
def the_name_of_a_release_may_be_given_to_vllm_ascend_alone() -> None:
    """VLLM_VERSION changes how vllm-ascend calls vLLM. This package goes by the release that is installed."""
    from vllm_ascend.utils import vllm_version_is

    installed = importlib.metadata.version("vllm")
    assert "VLLM_VERSION" not in os.environ and vllm_version_is(installed) and older_groups.unproven() == ""
    program = (
        "from vllm_ascend.utils import vllm_version_is as theirs; from vllm_ascend_pd.vllm_patches.older_groups import unproven as ours;"
        f"print(theirs({installed!r}), theirs('9.9.9'), repr(ours()))"
    )
    assert last_line(program, VLLM_VERSION="9.9.9") == "False True ''"


# ---- caches


@assumption
def the_kinds_of_cache_are_where_they_are_looked_for() -> None:
    """admission/kinds.py knows the kinds by name: vllm-ascend's own stand beside vLLM's."""
    index = "AscendSFAIndexerCacheSpec"  # 0.30's: an indexer's keys are in the tuple of the layer, or a layer
    for name in set(kinds.PROVEN) - ({index} if OLDER else set()):
        spec = getattr(ascend_specs, name, None) or getattr(vllm_specs, name)
        assert issubclass(spec, vllm_specs.AttentionSpec), spec
    mla = ascend_specs.AscendMLAAttentionSpec
    assert issubclass(mla, vllm_specs.MLAAttentionSpec)
    assert ("sparse_head_dim" in {field.name for field in dataclasses.fields(mla)}) is OLDER
    assert hasattr(ascend_specs, index) is not OLDER


@assumption
def other_connectors_of_one_engine_get_no_blocks() -> None:
    """AscendMultiConnector gives the block ids to the chosen connector only, and empty lists to the others."""
    empty = KVCacheBlocks(([], [])).new_empty()
    assert empty.get_block_ids() == ([], []), empty.get_block_ids()
    from vllm_ascend.distributed.kv_transfer.ascend_multi_connector import AscendMultiConnector

    optional = set(re.findall(r'getattr\(c\w*, "(\w+)"', inspect.getsource(AscendMultiConnector)))
    ours = {name for name in optional if hasattr(AscendPushConnector, name)}
    assert {"has_preempted_request", "update_state_before_preempt"} <= optional
    assert ours == (set() if OLDER else {"on_kv_cache_written"}), ours


@of("0.23")
def k_of_a_block_is_as_large_as_a_recurrence() -> None:
    """Full attention and states share memory, first all blocks of one kind; equal sizes keep other blocks apart.

    A larger block, which a user may ask for, is refused when the caches are registered.
    """
    from vllm_ascend.patch.platform import patch_mamba_config
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    source = inspect.getsource(patch_mamba_config.verify_and_update_config)
    assert "attn_single_token_k_page_size * attn_block_size == ssm_block_page_size" in source
    cut = inspect.getsource(NPUModelRunner._reshape_kv_cache_tensors)
    assert "num_blocks * block_size_chunk" in cut and "conv_block_padding_size" in cut


@of("0.23")
def schedulers_can_lend_their_tables() -> None:
    """vllm-ascend's P asks the connector for a step's metadata itself, its other schedulers by a method of vLLM's."""
    from vllm_ascend.patch.platform.patch_balance_schedule import BalanceScheduler

    assert "self.connector.build_connector_meta(scheduler_output)" in inspect.getsource(BalanceScheduler.schedule)
    recompute = {"additional_config": {"recompute_scheduler_enable": True}}
    for role, more in ((BOTH[0], {}), (BOTH[1], {}), (BOTH[1], recompute)):
        config = vllm_config(role, **more)
        assert not older_groups.install(config), (role, older_groups.install(config))
        scheduler = config.scheduler_config.get_scheduler_cls()
        for name in ("schedule", "update_from_output"):
            assert hasattr(getattr(scheduler, name), WRAPPED), (scheduler, name)


@of("0.30")
def a_prefix_without_its_state_is_looked_up_again() -> None:
    """Schedulers for D count a prefix as computed of which attention is cached, without its state: that is loaded.

    Where nothing is, they look again. Balance scheduling does not, and has neither P's role nor D's.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm_ascend.core.dyntra_lb_scheduler import DyntraLBScheduler
    from vllm_ascend.core.recompute_scheduler import DyntraLBRecomputeScheduler, RecomputeScheduler

    for scheduler in (DyntraLBScheduler, DyntraLBRecomputeScheduler, RecomputeScheduler):
        assert "if hit_diverged and num_external_computed_tokens == 0:" in inspect.getsource(scheduler.schedule)
    # With these two in vLLM, DyntraLB knows whether a hit is of attention alone.
    for name in ("get_computed_blocks_for_connector", "truncate_computed_blocks"):
        assert hasattr(KVCacheManager, name), name
    balanced = {"additional_config": {"scheduler_config": {"enable_balance_scheduling": True}}}
    for role in BOTH:
        why = ""
        try:
            vllm_config(role, **balanced)
        except ValueError as error:
            why = str(error)
        assert "enable_balance_scheduling only supports PD-mixed mode" in why, (role, why)


@of("0.30")
def an_older_step_ends_the_wait_for_a_request_s_token() -> None:
    """With asynchronous scheduling a pipeline's scheduler marks a request whose token is not known. The end of any step
    of that request takes the mark away, that of an earlier chunk too. So D's pipelines have to do without."""
    from vllm_ascend.patch.platform import patch_pp_mtp

    source = inspect.getsource(patch_pp_mtp._patch_scheduler_update_from_output)
    (line,) = (line for line in source.splitlines() if "next_decode_eligible_step" in line)
    assert line.strip() == "request.next_decode_eligible_step = 0"
    assert "if request is not None:" in source and "is_prefill_chunk" not in source


@assumption
def new_blocks_are_cleared_beside_eagle3_alone() -> None:
    """Clearing them on D would be later than P's writes. With states no draft model but MTP is admitted."""
    source = inspect.getsource(NPUWorker.initialize_from_config)
    before = source[: source.index("_init_kv_zero_meta()")]
    assert 'speculative_config.method == "eagle3"' in before, before


@assumption
def fractal_caches_of_decode_look_plain() -> None:
    """With enable_kv_nz, D's MLA reads its blocks as fractals, in tensors whose format says nothing of it.

    vllm-ascend's pull connectors rewrite what they have pulled. So it is refused. (VLLM_ASCEND_ENABLE_NZ is about
    weights alone.)
    """
    from vllm_ascend.attention import mla_v1
    from vllm_ascend.distributed.kv_transfer.kv_p2p import mooncake_connector
    from vllm_ascend.worker import model_runner_v1

    assert "elif self.enable_kv_nz:" in inspect.getsource(mla_v1)
    assert "need_nz_cache" in inspect.getsource(mooncake_connector)
    assert "enable_kv_nz" not in inspect.getsource(model_runner_v1), "the caches themselves depend on it"
    model: dict[str, Any] = {"model": str(ensure("mla")), "dtype": "bfloat16", "max_model_len": 1024}
    plain, fractal = (
        vllm_config("kv_consumer", additional_config=more, **model) for more in ({}, {"enable_kv_nz": True})
    )
    assert not refused(plain) and "enable_kv_nz" in refused(fractal), (refused(plain), refused(fractal))
    try:
        vllm_config("kv_producer", additional_config={"enable_kv_nz": True}, **model)
    except NotImplementedError as error:
        assert "only be used in D" in str(error), error
    else:
        raise AssertionError("a P may have it")


# ---- hooks and loops


@assumption
def a_worker_has_its_ranks_device_before_the_connector_comes() -> None:
    """Our threads get the device that is current where the caches are registered (device/npu.py)."""
    source = inspect.getsource(NPUWorker._init_device)
    device = source.index('torch.device(f"npu:{self.local_rank}")' if OLDER else "device = torch.device(")
    assert device < source.index("torch.npu.set_device(device)")
    assert "set_device" not in inspect.getsource(NPUWorker.initialize_from_config)


@assumption
def layers_without_a_name() -> None:
    """GDN layers call `save_kv_layer` without name and tensor.

    GQA's `on_kv_cache_written` has no name either, MLA's has.
    """
    from vllm_ascend.attention import attention_v1, mla_v1
    from vllm_ascend.ops import gdn

    assert 'maybe_save_kv_layer_to_connector("", [])' in inspect.getsource(gdn)
    assert "notify_kv_cache_written()" in inspect.getsource(attention_v1)
    assert "notify_kv_cache_written(layer_name)" in inspect.getsource(mla_v1)


@of("0.30")
def every_kind_of_attention_says_when_its_cache_is_written() -> None:
    """By `on_kv_cache_written`. An event of its own records only a layer that uses another layer's cache.

    An indexer, which is a layer, writes its keys where it chooses tokens; then the hook of the attention comes.
    """
    from vllm_ascend.attention import attention_v1, dsa_v1, mla_v1, sfa_v1
    from vllm_ascend.attention.context_parallel import dsa_cp

    for module in (attention_v1, dsa_cp, dsa_v1, mla_v1, sfa_v1):
        source = inspect.getsource(module)
        assert "notify_kv_cache_written(" in source, module
        for before in source.split("reshape_cache_event.record()")[:-1]:
            assert "if self.kv_sharing_target_layer_name is not None:" in before[-400:], module
    before, _, after = inspect.getsource(sfa_v1.AscendSFAImpl.forward).partition("topk_indices = self.indexer(")
    hook = "notify_kv_cache_written(self.layer_name"
    assert "self._store_parallel_kv(" in before and hook not in before
    assert after.index(hook) < after.index("_execute_sparse_flash_attention_process(")


@of("0.23")
def sparse_attention_alone_records_when_its_cache_is_written() -> None:
    """`reshape_cache_event`: only attention with an indexer has one, on a P, recorded behind all its writes.

    vllm-ascend's own connector records one itself elsewhere, in `save_kv_layer`. We use `on_kv_cache_written`, which
    every kind of attention calls at that place.
    """
    from vllm_ascend.attention import attention_v1, dsa_v1, mla_v1, sfa_v1
    from vllm_ascend.attention.context_parallel import attention_cp, dsa_cp, mla_cp

    recorded = "attn_metadata.reshape_cache_event.record()"
    for module in (attention_v1, attention_cp, dsa_cp, dsa_v1, mla_cp, mla_v1, sfa_v1):
        source = inspect.getsource(module)
        assert (recorded in source) == (module is sfa_v1), module
        assert "notify_kv_cache_written(" in source, module
    after = inspect.getsource(sfa_v1).split(recorded)[1]
    assert after.split()[0].startswith("notify_kv_cache_written("), after[:80]
    assert "npu_scatter_nd_update_" not in after and "store_kv_block" not in after


@assumption
def a_layers_cache_is_written_before_its_attention() -> None:
    """`on_kv_cache_written` comes behind all writes of GQA's and MLA's layers and before their attention."""
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl as Heads
    from vllm_ascend.attention.mla_v1 import AscendMLAImpl as Latents

    for function, in_order in (
        (Heads.reshape_and_cache, ("DeviceOperator.reshape_and_cache(", "notify_kv_cache_written(")),
        (Heads.forward, ("self.reshape_and_cache(", "self.forward_impl(")),
        (Latents._mla_preprocess, ("mla_preprocess_decode(", "mla_preprocess_prefill(", "notify_kv_cache_written(")),
        (Latents.forward, ("self._mla_preprocess(", "self._forward_decode(", "self._forward_prefill(")),
    ):
        source = inspect.getsource(function)
        assert all(source.rindex(one) < source.index(next_) for one, next_ in itertools.pairwise(in_order)), function


@of("0.23")
def with_dsa_cp_each_rank_has_the_whole_cache_before_its_hook() -> None:
    """P's ranks compute a part of the tokens each, gather latents, ropes and index keys, and write those of all."""
    from vllm_ascend.attention.sfa_v1 import AscendSFAImpl

    source = inspect.getsource(AscendSFAImpl.forward)
    gathered = source.index("_restore_byte_gathered_tensors(")
    latents = source.index("DeviceOperator.reshape_and_cache(", gathered)
    keys = source.index("kv_cache[dsa_k_cache_idx].view(", latents)
    hook = source.index("notify_kv_cache_written(", keys)
    assert "slot_mapping=slot_mapping_sfa[: attn_metadata.num_actual_tokens]" in source[latents:keys]
    assert (
        'k_li = kv_gather_outputs["k_li"]' in source[gathered:latents]
        and "slot_mapping.view(-1, 1)" in source[keys:hook]
    )
    assert "slot_mapping_cp" not in source[gathered:], "slots of a rank's own tokens"


@assumption
def an_indexer_picks_as_many_tokens_whatever_the_model_says() -> None:
    """The tests' models say the same number; a shorter prompt is attended to as a whole."""
    from vllm_ascend.attention import sfa_v1

    uses = 3 if OLDER else 2
    assert inspect.getsource(sfa_v1.DeviceOperator.indexer_select_post_process).count("sparse_count=2048") == uses


@assumption
def int8_of_heads_is_written_on_decode_alone() -> None:
    """P writes keys and values as they are, also into a cache that --kv-cache-dtype has made int8."""
    from vllm_ascend.attention.attention_v1 import AscendC8AttentionBackendImpl as Attention

    package = "vllm_ascend.quantization.methods" + ("" if OLDER else ".kv_cache")
    method = importlib.import_module(f"{package}.kv_c8").AscendC8KVCacheAttentionMethod
    source = inspect.getsource(method.create_weights)
    assert "if not self.is_kv_producer:" in source[: source.index("layer.kv_cache_torch_dtype = torch.int8")]
    assert all(f"layer.{name} = " in source for name in ("k_cache_scale", "k_cache_offset", "v_cache_scale"))
    beside = inspect.getsource(Attention.forward).rsplit("if attn_metadata.attn_state != ", 1)[1]
    of_prefill = beside.split("elif not self.is_kv_producer:")[0]
    assert "self.reshape_and_cache(" in of_prefill and "_quantize_kv_to_int8" not in of_prefill


@assumption
def int8_of_heads_is_in_fractals_and_rounded_like_this() -> None:
    """As regroup/quantise.py makes it."""
    from vllm_ascend.attention.attention_v1 import AscendC8AttentionBackendImpl as Attention

    view = inspect.getsource(Attention._nz_5d_view)
    assert "cache.view(-1, self.num_kv_heads, self.head_size // NZ_FMT_LAST_DIM, block_size, NZ_FMT_LAST_DIM)" in view
    assert "NZ_FMT_LAST_DIM = 32" in view
    made = " ".join(inspect.getsource(Attention._quantize_kv_to_int8).split())
    for which in "kv":
        name = {"k": "key", "v": "value"}[which]
        rounded = f"torch.round(actual_{name} * layer._c8_{which}_inv_scale + layer._c8_{which}_offset), -128, 127"
        assert rounded in made, rounded
    shared = inspect.getsource(Attention._prepare_c8_scales)
    assert "tp_rank * total_kv_heads // tp_size" in shared and "1.0 / layer._c8_k_scale" in shared


@assumption
def int8_of_heads_computes_no_prompt_on_decode_and_no_step_of_single_tokens_on_prefill() -> None:
    """Needless once they do: decode/scheduler/no_prompts.py, vllm_patches/single_token_steps.py."""
    from vllm_ascend.attention.attention_v1 import AscendC8AttentionBackendImpl as Attention

    beside = inspect.getsource(Attention.forward).rsplit("if attn_metadata.attn_state != ", 1)[1]
    assert beside.startswith("AscendAttentionState.DecodeOnly and self.is_kv_producer:")
    of_decode = beside.split("elif not self.is_kv_producer:")[1]
    assert re.findall(r"self\._forward_\w+", of_decode) == [
        "self._forward_encoder_attention",
        "self._forward_c8_decode",
    ]
    assert "AscendAttentionState.DecodeOnly:" in of_decode and "else:" not in of_decode


@assumption
def what_patience_changes_is_there() -> None:
    assert patience.install_nap()
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # by the tests' plug-in `patient`
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_ascend.core.recompute_scheduler import RecomputeScheduler

    assert issubclass(RecomputeScheduler, Scheduler) and callable(SpinCondition.wait)
    for name in ("get_kv_connector", "get_request_counts", "has_requests"):
        assert callable(getattr(Scheduler, name)), name
    source = inspect.getsource(EngineCoreProc.step_with_batch_queue)
    assert "batch_queue.appendleft((future, scheduler_output, exec_future))" in source


@of("0.30")
def groups_need_nothing_around_the_scheduler_and_failed_loads_are_reported_by_request() -> None:
    assert compat.HAS_TRANSFER_RESULTS and not older_groups.needed() and older_groups.unproven() == ""


@of("0.23")
def failed_loads_are_reported_by_blocks() -> None:
    """vLLM 0.23 has no result per request; it asks the connector for failed blocks instead."""
    assert not compat.HAS_TRANSFER_RESULTS
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    source = inspect.getsource(KVConnectorModelRunnerMixin._get_kv_connector_output)
    assert "get_block_ids_with_load_errors" in source and "build_connector_worker_meta" in source


@assumption
def preemptions_are_announced_before_blocks_are_overwritten() -> None:
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    source = inspect.getsource(NPUModelRunner.execute_model)
    assert 0 < source.index(".handle_preemptions(") < source.index("self._update_states(")


def finds_ours(listed: str) -> bool:
    """Load the listed plug-ins; return whether our connector is among them."""
    os.environ["VLLM_PLUGINS"] = listed
    plugins.load_general_plugins()
    return plugin.CONNECTOR in KVConnectorFactory._registry


def main() -> None:
    torch.set_num_threads(1)
    for listed in (WITHOUT_OURS, WITH_OURS):  # in a child each: a process loads plug-ins once, and this one all of them
        found_with[listed] = in_a_child(functools.partial(finds_ours, listed))
    plugins.load_general_plugins()
    LOADED.update(KVConnectorFactory._registry)
    for name in sys.argv[1:] or ASSUMPTIONS:
        try:
            ASSUMPTIONS[name]()
            wrong = ""
        except Exception:  # noqa: BLE001 (the test of this assumption fails)
            wrong = traceback.format_exc()
        print(json.dumps({"name": name, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
