# SPDX-License-Identifier: Apache-2.0
"""scripts/field.sh: admission of other projects' command lines, on small files of our own and on the real ones."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from vllm.v1.kv_cache_interface import FullAttentionSpec

import tools.field as field_page
from tools.support import compressed, field, sdist, small
from tools.support.bases import UNNAMED, Base
from tools.support.small import Needs, needs, stands
from unit.admission.vllm_configs import model_dir, vllm_config
from vllm_ascend_pd import admission
from vllm_ascend_pd.admission import kinds
from vllm_ascend_pd.config import PushConfig

LLAMA = {"architecture": "A", "layers": 4, "mtp": 1, "hidden": 64, "vocab": 128}
KNOWN = field.Known.read(
    json.dumps(
        {
            "families": {
                "gqa": {**LLAMA, "caches": ["full"], "kv_heads": 4, "head_dim": 32},
                "mla": {**LLAMA, "caches": ["mla"], "mla": [512, 64]},
                "sparse": {**LLAMA, "caches": ["indexer"], "mla": [512, 64, 128]},
                "shared": {**LLAMA, "layers": 8, "caches": ["indexer"], "mla": [512, 64, 128], "index_every": 4},
                "hybrid": {**LLAMA, "caches": ["full", "gdn"], "kv_heads": 2, "head_dim": 32, "gdn": [4, 8, 16, 4]},
            },
            "models": {
                "me/gqa": {"family": "gqa"},
                "me/gqa-c8": {"family": "gqa", "c8": "kv_consumer"},
                "me/mla": {"family": "mla"},
                "me/sparse": {"family": "sparse"},
                "me/shared": {"family": "shared"},
                "me/hybrid": {"family": "hybrid"},
            },
            "drafts": {"me/draft": {"method": "eagle3", "kv_heads": 8, "head_dim": 64}},
        }
    )
)
P, D = "kv_producer", "kv_consumer"


def transfer(role: str, connector: str = "MooncakeLayerwiseConnector", **extra: Any) -> dict[str, Any]:
    sizes = {"prefill": {"tp_size": 64, "dp_size": 9}, "decode": {"tp_size": 64}}
    return {
        "kv_connector": connector,
        "kv_role": role,
        "kv_port": "30000",
        "engine_id": "0",
        "kv_connector_extra_config": {"use_ascend_direct": True, **sizes, **extra},
    }


SHARED = transfer(P, metaserver_urls=["http://127.0.0.1:8000"])  # P's, and equally suitable as D's


def line(role: str, *flags: str, connector: dict[str, Any] | None = None, eager: bool = True) -> list[str]:
    config = json.dumps(connector or transfer(role))
    graphs = ["--enforce-eager"] if eager and role == P else []
    return ["--port", "$SERVER_PORT", *graphs, *flags, "--kv-transfer-config", config]


def written(p: list[str], d: list[str], model: str = "me/gqa") -> str:
    """Return a file with two nodes, each with a whole command."""

    def quoted(words: list[str]) -> str:
        return " ".join(["vllm", "serve", model, *(f"'{word}'" if " " in word else word for word in words)])

    envs = {"SERVER_PORT": 8080, "VLLM_ASCEND_ENABLE_THIS": 1, "VLLM_ASCEND_ENABLE_THAT": 0, "OTHER": 1}
    nodes = [{"envs": dict(envs), "server_cmd": quoted(words)} for words in (p, d)]
    return yaml.safe_dump({"model": model, "deployment": nodes})


def judged(p: list[str] | None = None, d: list[str] | None = None, model: str = "me/gqa") -> field.FieldVerdict:
    return field.verdict("nightly/x", written(p or line(P), d or line(D), model), KNOWN)


def reasons(verdict: field.FieldVerdict, side: str) -> list[str]:
    return [field_page.words(refused) for refused in verdict.refusals(side)]


# -- files and command lines


def test_a_template_is_filled_in_for_the_first_rank_of_each_node() -> None:
    template = ["--port", "$SERVER_PORT", "--data-parallel-size", "${DP_SIZE}", "--data-parallel-rank", "${DP_RANK}"]
    template += ["--data-parallel-address", "${DP_ADDRESS}", "--tensor-parallel-size", "${TP_SIZE}", "--x", "$UNKNOWN"]
    node = {"port_start": 7100, "dp_size": 32, "dp_rank_start": 16, "tp_size": 2, "dp_address": "${NODE_2_IP}"}
    text = yaml.safe_dump(
        {
            "model": "me/gqa",
            "config": [{"node_index": 7, **node}],
            "templates": [{"node_index": 7, "envs": {"SERVER_PORT": "${PORT}"}, "server_cmd_template": template}],
        }
    )
    (command,) = field.commands(text)
    assert command.model == "me/gqa" and command.environment == {"SERVER_PORT": "7100"}
    assert command.words == (
        "--port", "7100", "--data-parallel-size", "32", "--data-parallel-rank", "16",
        "--data-parallel-address", field.ADDRESS, "--tensor-parallel-size", "2", "--x", "$UNKNOWN",
    )  # fmt: skip


def test_a_whole_command_names_its_model_itself() -> None:
    (p, d) = field.commands(written(line(P), line(D)).replace("vllm serve me/gqa", "vllm serve me/mla", 1))
    assert (p.model, d.model) == ("me/mla", "me/gqa") and p.words[:2] == ("--port", "8080")


def test_flags_that_vllm_does_not_know_or_take_are_listed_and_the_rest_counts() -> None:
    words = ["--of-theirs", "1", "two", "--tensor-parallel_size=4", "--no-enable-prefix_caching"]
    parsed_line = field.parse([*words, "--kv-cache-dtype", "int5", "--enforce-eager"])
    assert parsed_line.unknown == ("--of-theirs", "--kv-cache-dtype int5")
    assert parsed_line.parsed.tensor_parallel_size == 4 and parsed_line.parsed.enforce_eager
    assert parsed_line.parsed.enable_prefix_caching is False


def test_what_admission_reads_is_what_vllms_own_configuration_says() -> None:
    flags = ["--tensor-parallel-size", "2", "--data-parallel-size", "2", "--kv-cache-dtype", "bfloat16"]
    real = vllm_config(D, tensor_parallel_size=2, data_parallel_size=2, kv_cache_dtype="bfloat16")
    words = ["--model", model_dir(), *flags, "--kv-transfer-config", json.dumps(field.replaced(transfer(D), "/s")[0])]
    ours = field.as_configured(field.parse(words).parsed, KNOWN.models["me/gqa"])
    for name in vars(ours.parallel_config):
        assert getattr(ours.parallel_config, name) == getattr(real.parallel_config, name), name
    assert ours.cache_config.cache_dtype == real.cache_config.cache_dtype
    assert ours.speculative_config is real.speculative_config is None
    fields = ("architecture", "layers", "hidden", "vocab", "kv_heads", "head", "quantization", "dtype")
    assert [word.split("=")[0] for word in admission.model_fingerprint(ours).split()] == list(fields)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ([], "PIECEWISE"),
        (["--enforce-eager"], "NONE"),
        (["--compilation_config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}'], "PIECEWISE"),
        (["--compilation-config", '{"cudagraph_capture_sizes": [1]}', "-O1"], "PIECEWISE"),
    ],
    ids=["nothing configured", "eager", "configured", "another level"],
)
def test_the_graph_mode_is_the_one_that_vllm_settles_on(flags: list[str], mode: str) -> None:
    words = ["--kv-transfer-config", json.dumps(field.replaced(transfer(P), "/s")[0]), *flags]
    config = field.as_configured(field.parse(words).parsed, KNOWN.models["me/gqa"])
    assert config.compilation_config.cudagraph_mode.name == mode


def test_d_keeps_its_full_graphs() -> None:
    words = ["--compilation-config", '{"cudagraph_mode": "FULL_DECODE_ONLY"}', "--kv-transfer-config"]
    parsed = field.parse([*words, json.dumps(field.replaced(transfer(D), "/s")[0])]).parsed
    config = field.as_configured(parsed, KNOWN.models["me/gqa"])
    assert config.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"


# -- the connector


def test_the_connector_is_replaced_as_the_migration_page_says() -> None:
    ours, beside = field.replaced(transfer(D, lease_s=9, tls_config={}), "/secret")
    assert beside == ()
    assert ours == {
        "kv_connector": "AscendPushConnector",
        "kv_role": D,
        "engine_id": "0",
        "kv_connector_extra_config": {
            "use_ascend_direct": True,
            "lease_s": 9,
            "tls_config": {},
            "secret_file": "/secret",
            "side_channel_host": field.ADDRESS,
            "metaserver_urls": [f"http://{field.ADDRESS}:8000"],
        },
    }
    assert PushConfig.parse(ours["kv_connector_extra_config"]).ignored == ("use_ascend_direct", "tls_config")


def test_an_unknown_key_is_refused_as_an_engine_refuses_it() -> None:
    verdict = judged(line(P, connector=transfer(P, their_key=1)))
    assert [refused.code for refused in verdict.refusals("P")] == ["PD-CONF-001"]
    assert "'their_key'" in verdict.refusals("P")[0].sentence and verdict.starts("D")


def test_of_several_connectors_the_one_between_engines_is_replaced_and_the_others_are_named() -> None:
    children = [{"kv_connector": "AscendStoreConnector", "kv_role": "kv_both"}, transfer(P, "MooncakeConnectorV1")]
    wrapped = {"kv_connector": "MultiConnector", "kv_role": P, "kv_connector_extra_config": {"connectors": children}}
    verdict = judged(line(P, connector=wrapped))
    assert verdict.both and verdict.p[0].beside == ("AscendStoreConnector",)
    assert "would start; beside AscendStoreConnector, which is not judged" in field_page.tables([verdict])
    none = {**wrapped, "kv_connector_extra_config": {"connectors": children[:1]}}
    (refused,) = judged(line(P, connector=none)).refusals("P")
    assert refused.code == "PD-CONF-003" and "'MultiConnector'" in refused.sentence


# -- results of admission


@pytest.mark.parametrize("model", ["me/gqa", "me/mla"])
def test_ranks_with_experts_would_start(model: str) -> None:
    p = line(P, "--tensor-parallel-size", "4", "--data-parallel-size", "2", "--enable-expert-parallel")
    d = line(D, "--data-parallel-size", "32", "--data-parallel-rank", "16", "--data-parallel-address", "10.0.0.2")
    verdict = judged(p, d, model)
    assert verdict.both and verdict.pair == ("regroup" if model == "me/gqa" else "direct")
    assert [(engine.tp, engine.dp) for engine in (*verdict.p, *verdict.d)] == [(4, 2), (1, 32)]


DRAFT = '{"method": "deepseek_mtp", "num_speculative_tokens": 1}'
UNPROVEN = '{"method": "suffix", "num_speculative_tokens": 7}'
MODE = "PD-CONF-005 cudagraph_mode FULL_AND_PIECEWISE on prefill"
SPECULATION = "PD-CONF-005 Speculative decoding with suffix"
OWN, C8 = '{"model": "me/draft"}', '{"enable_sparse_li_c8": true, "enable_sparse_sfa_c8": false}'
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a draft on D alone": ({"d": line(D, "--speculative-config", DRAFT)}, [], []),
    "a draft": (
        {"d": line(D, "--speculative-config", DRAFT.replace("1}", "3}")), "p": line(P, "--speculative-config", DRAFT)},
        [],
        [],
    ),
    "an unproven draft": ({"d": line(D, "--speculative-config", UNPROVEN)}, [], [SPECULATION]),
    "a draft of its own shape": (
        {
            "d": line(D, "--speculative-config", OWN),
            "p": line(P, "--speculative-config", OWN, "--tensor-parallel-size", "2"),
        },
        [],
        [],
    ),
    "a draft of its own shape beside MLA": (
        {"d": line(D, "--speculative-config", OWN), "model": "me/mla"},
        [],
        [],
    ),
    "full graphs become piecewise": ({"p": line(P, eager=False)}, [], []),
    "full graphs of one configuration for both": ({"p": line(P, eager=False, connector=SHARED)}, [MODE], []),
    "int8 on D": ({"model": "me/gqa-c8"}, [], []),
    "by flag": (
        {"p": line(P, "--kv-cache-dtype", "fp8_ds_mla")},
        ["PD-CONF-005 A quantised KV cache (fp8_ds_mla)"],
        [],
    ),
    "indexer": ({"model": "me/sparse"}, [], []),
    "indexers in some layers": ({"model": "me/shared", "d": line(D, "--speculative-config", DRAFT)}, [], []),
    "indexer, quantised": (
        {"model": "me/sparse", "p": line(P, "--additional-config", C8), "d": line(D, "--additional-config", C8)},
        [],
        [],
    ),
    "hybrid": ({"model": "me/hybrid"}, [], []),
    "hybrid with a draft on D": ({"model": "me/hybrid", "d": line(D, "--speculative-config", DRAFT)}, [], []),
    "context parallelism": (
        {"p": line(P, "--decode-context-parallel-size", "2", "--prefill-context-parallel-size", "2")},
        ["PD-CONF-005 Decode context parallelism of 2 among 1 ranks that do not hold one head"],
        [],
    ),
    "pipeline": (
        {"d": line(D, "--pipeline-parallel-size", "2"), "p": line(P, "--pipeline-parallel-size", "2")},
        [],
        [],
    ),
}


@pytest.mark.parametrize(("given", "p", "d"), CASES.values(), ids=list(CASES))
def test_all_that_is_refused_is_named_and_first_what_an_engine_says(
    given: dict[str, Any], p: list[str], d: list[str]
) -> None:
    verdict = judged(**given)
    assert (reasons(verdict, "P"), reasons(verdict, "D")) == (p, d)
    assert (verdict.starts("P"), verdict.starts("D"), verdict.both) == (not p, not d, not (p or d))


def test_an_engine_that_is_both_is_neither_p_nor_d() -> None:
    verdict = judged(p=line(P, connector=transfer("kv_both")))
    assert [refused.code for refused in verdict.refusals("P")] == ["PD-CONF-004"] and not verdict.both


def test_caches_that_do_not_fit_each_other_are_no_pair() -> None:
    d = written(line(D), line(D), "me/mla")
    p = field.judge(field.commands(written(line(P), line(P)))[0], KNOWN)
    other = field.judge(field.commands(d)[0], KNOWN)
    words = field.pair_of([p], [other])
    assert words.startswith("PD-GEO-001")
    assert not field.FieldVerdict("x", "me/gqa", (p,), (other,), words).both
    assert judged(p=line(P, "--additional-config", C8), model="me/sparse").pair.startswith("PD-GEO-001: dtype")


def test_the_environment_of_its_caller_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert judged().both
    text = written(line(P), line(D)).replace("SERVER_PORT: 8080", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION: '1'", 1)
    verdict = field.verdict("x", text.replace("$SERVER_PORT", "1"), KNOWN)
    assert reasons(verdict, "P") == ["PD-CONF-005 VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] and verdict.starts("D")


def test_a_model_or_a_draft_without_an_entry_is_an_error_and_not_a_start() -> None:
    with pytest.raises(KeyError, match="me/unknown"):
        judged(model="me/unknown")
    with pytest.raises(KeyError, match="me/other"):
        judged(d=line(D, "--speculative-config", '{"model": "me/other"}'))


def test_the_specs_of_proven_caches_are_vllms_own_classes() -> None:
    spec = KNOWN.models["me/gqa"].spec("full", 8, 16, P)
    assert isinstance(spec, FullAttentionSpec) and (spec.num_kv_heads, spec.dtype) == (1, torch.bfloat16)
    admission.check_groups(SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]))  # type: ignore[arg-type]
    latent = KNOWN.models["me/mla"].spec("mla", 8, 16, P)
    assert type(latent).__name__ == "AscendMLAAttentionSpec" and latent.head_size == 576


def test_a_layer_is_registered_as_vllm_ascend_does() -> None:
    """Latent, rope, index key; with C8 the first two packed, the third int8 with a scale; none where another's
    selection is reused."""
    shared = KNOWN.models["me/shared"]
    names = shared.layers(drafts=True)
    for c8, parts in (((), [512, 64, 128]), (("li",), [512, 64, 128, 1]), (("sfa", "li"), [656, 128, 1])):
        spec = shared.spec("indexer", 8, 16, P, c8)
        specs = shared.by_layer(names, spec, c8)
        assert [part.shape[-1] for part in field.tensors(spec)] == parts
        assert [names.index(name) for name in names if specs[name] is spec] == [0, 1, 5]
        without = field.tensors(specs[names[2]])
        assert [part.shape[-1] for part in without] == ([656] if "sfa" in c8 else [512, 64])


# -- releases of vllm-ascend

NEWER = """
class AscendSFAIndexerCacheSpec: ...
block_size = storage_block_size * self.compress_ratio
stride = (hidden_size, 2 * hidden_size, *dense_strides)
li = vllm_config.attention_config.indexer_kv_dtype in ["fp8", "int8"]
"""
SCHEDULERS = """
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
raise SystemExit("this was run")
class RecomputeReqInfo: ...
class RecomputeScheduler(Scheduler):
    def update_from_output(self, scheduler_output, model_runner_output):
        return {}
class AsyncRecomputeScheduler(AsyncScheduler, RecomputeScheduler): ...
"""
CALLING = SCHEDULERS.replace("return {}", "return super().update_from_output(scheduler_output, model_runner_output)")


def release(scheduler: str = CALLING, code: str = "", version: str = "0.30.0rc9") -> Base:
    texts = {"vllm_ascend/core/recompute_scheduler.py": scheduler, "vllm_ascend/a.py": code}
    return Base.of(version, {**texts, "vllm_ascend/__init__.py": "", "Dockerfile": "FROM x\nARG VLLM_TAG=v0.30.0\n"})


def under(base: Base, model: str, p: list[str] | None = None, d: list[str] | None = None) -> field.FieldVerdict:
    return field.verdict("nightly/x", written(p or line(P), d or line(D), model), replace(KNOWN, base=base))


def test_a_release_is_known_by_its_own_code_and_none_of_it_is_run() -> None:
    older, newer = release(), release(code=NEWER)
    assert (older.vllm, older.minor) == ("0.30.0", "0.30")
    assert [kind.__name__ for kind in older.schedulers] == ["RecomputeScheduler", "AsyncRecomputeScheduler"]
    for name in ("indexes_apart", "in_tokens", "takes_turns", "int8_by_flags"):
        assert (getattr(older, name), getattr(newer, name)) == (False, True)
    with pytest.raises(ValueError, match="VLLM_TAG"):
        Base.of("1", {"Dockerfile": "FROM x"})
    assert Base.of("1", {"Dockerfile": "ARG VLLM_TAG=v9.9"}).schedulers == ()


RECOMPUTES = ["--additional-config", '{"recompute_scheduler_enable": true}']


@pytest.mark.parametrize(
    ("base", "flags", "why"),
    [
        (release(), RECOMPUTES, ""),
        (
            release(SCHEDULERS),
            RECOMPUTES,
            "the scheduler RecomputeScheduler reads a step's outputs without vLLM's own method",
        ),
        (release(SCHEDULERS), [], ""),
        (release(version="0.29.0"), [], "vllm-ascend 0.29.0 was not tried"),
        (replace(release(), vllm="0.29.0"), [], "vLLM 0.29.0 was not tried"),
        (release(), ["--logits-processors", "a.B"], "logits processors may remember tokens"),
    ],
    ids=["calls vLLM's", "does not", "is off", "another release", "another vLLM", "logits processors"],
)
def test_whether_d_begins_with_ps_token_is_what_this_package_says(base: Base, flags: list[str], why: str) -> None:
    verdict = under(base, "me/gqa", line(P, *RECOMPUTES), line(D, *flags))
    assert verdict.both and verdict.no_first == why
    assert f"| direct | {why or 'yes'} | `" in field_page.tables([verdict])


def test_an_indexer_may_be_a_layer_of_its_own_and_int8_a_flag_of_vllms() -> None:
    base = release(code=NEWER)
    assert under(base, "me/sparse").both
    li, sfa = ["--attention_config.indexer_kv_dtype", "int8"], ["--kv-cache-dtype", "int8"]
    for model in ("me/sparse", "me/shared"):
        keys, latents = (under(base, model, d=line(D, *flags)) for flags in (li, sfa))
        for flags, alone in ((li, keys), (sfa, latents)):
            assert reasons(alone, "D") == [] and alone.pair.startswith("PD-GEO-001"), "P has them in bfloat16"
            assert under(base, model, p=line(P, *flags), d=line(D, *flags)).both
        assert keys.d[0].unknown == latents.d[0].unknown == ()
    older = under(release(), "me/sparse", d=line(D, *li, *sfa))
    assert older.both and older.d[0].unknown == ("--kv-cache-dtype int8", "--attention-config.indexer_kv_dtype int8")
    model = KNOWN.models["me/shared"]
    spec = model.spec("indexer", 8, 16, P, (), base)
    specs = model.by_layer(model.layers(drafts=True), spec, ("li",), base, 2)
    assert [name.split(".")[2] for name in specs if name.endswith(".indexer.k_cache")] == ["0", "1", "5"]
    assert [part.shape for part in field.tensors(spec, base)] == [(2, 16, 1, 512), (2, 16, 1, 64)]
    index = specs["model.layers.5.self_attn.indexer.k_cache"]
    assert [part.shape for part in field.tensors(index, base)] == [(4, 16, 1, 128), (4, 16, 1, 1)]
    packed = model.spec("indexer", 8, 16, P, ("sfa",), base)
    assert [part.shape for part in field.tensors(packed, base)] == [(2, 16, 1, 656)]


def test_keys_and_values_may_take_turns_in_blocks_of_the_kernels() -> None:
    spec = KNOWN.models["me/hybrid"].spec("full", 1, 640, P)
    for base, stride in ((release(), 1), (release(code=NEWER), 2)):
        k, v = field.tensors(spec, base)
        assert k.shape == v.shape == (10, 128, 2, 32)
        assert k.stride(0) == stride * 128 * 2 * 32 and k.is_contiguous() is (stride == 1)


def test_a_block_of_entries_is_counted_in_entries_or_in_tokens() -> None:
    for newer, sizes in ((False, {128}), (True, {512, 128 * 128})):
        first, second, *_ = made = compressed.groups([0, 0, 4, 128, 4, 128], newer=newer)
        assert {spec.block_size for spec in (*first.values(), *second.values())} == sizes
        caches = compressed.tensors(made, 128, 2)
        assert caches["model.layers.2.self_attn.attn"][0].shape == (2, 128, 1, 512)
        assert {type(spec).__name__ for spec in first.values()} == {"AscendMLAAttentionSpec"}


# -- the page


def three() -> list[field.FieldVerdict]:
    texts = {
        "nightly/a/one.yaml": written(line(P), line(D)),
        "nightly/a/two.yaml": written(line(P, "--speculative-config", UNPROVEN), line(D)),
        "weekly/one.yaml": written(
            line(P, "--speculative-config", UNPROVEN, eager=False, connector=SHARED),
            line(D, "--theirs", "1", "--additional-config", '{"outer": {"inner": true}, "off": false}'),
        ),
        "weekly/alone.yaml": "model: me/gqa",
    }
    return field_page.verdicts(texts, KNOWN)


@pytest.mark.parametrize(
    ("switch", "source", "read"),
    [
        ("VLLM_ASCEND_X", 'os.getenv("VLLM_ASCEND_X")', True),
        ("VLLM_ASCEND_X", 'additional_config.get("x")', False),
        ("x", 'additional_config.get("x", False)', True),
        ("x", 'additional_config.get(\n    "x")', True),
        ("x", 'value_of(additional_config, "x")', True),
        ("x", 'if "x" in additional_config:', True),
        ("x", '(config.additional_config or {}).get("x", False)', True),
        ("x", "class Config:\n    x: int = 0", True),
        ("x", "def get(x: int) -> None:", False),
        ("part.x", "class Config:\n    part: Part\nclass Part:\n    x: bool = False", True),
        ("x", 'part.get("x")', False),
        ("part.x", 'additional_config.get("part").get("x")', True),
        ("part.x", 'additional_config.get("part")', False),
        ("part.x", 'additional_config.get("x")', False),
    ],
)
def test_a_switch_counts_as_read_where_it_stands(switch: str, source: str, read: bool) -> None:
    assert field_page.is_read(switch, source) is read


def test_the_tables_count_what_starts_and_what_stands_in_the_way() -> None:
    printed = field_page.tables(three())
    counted = " ".join(printed.partition("|")[0].split())
    assert "**P and D would start in 1 of 3 configurations.** P would start in 1, D in 3." in counted
    assert "In 1 D begins with P's first token." in counted
    assert f"| {SPECULATION} | 2 | 1 | 0 | 1 |" in printed
    assert f"| {MODE} | 1 | 1 | 0 | 0 |" in printed
    assert "| nightly/one | me/gqa | 1 × 1 | would start | 1 × 1 | would start | direct | yes | `" in printed
    both = f"{MODE}; {SPECULATION.removeprefix('PD-CONF-005 ')}"
    assert f"| weekly/one | me/gqa | 1 × 1 | {both} | 1 × 1 | would start | – | – | – |" in printed
    assert "left out (in how many configurations): `--theirs` (1)." in printed
    switches = printed[printed.index("| switch |") :].splitlines()[2:]
    assert switches[:2] == ["| `VLLM_ASCEND_ENABLE_THIS` | 3 |", "| `outer.inner` | 1 |"]
    assert switches[-1].endswith("does not read where they stand (in how many configurations): none.")
    printed = field_page.tables(three(), source='os.getenv("VLLM_ASCEND_ENABLE_THIS")')
    assert printed.splitlines()[-1].endswith("configurations): `outer.inner` (1).") and "| `outer.inner`" not in printed
    assert field_page.starting(printed) == {"nightly/one"}


SMALL = {
    "plain": needs({"full"}, ""),
    "ranks": needs({"full"}, "", ranks=2),
    "both": needs({"full"}, "", ranks=2, graphs="FULL_DECODE_ONLY"),
    "drafts": needs({"mla"}, "mtp"),
    "other graphs": needs({"gdn"}, "", graphs="PIECEWISE"),
    "latent graphs": needs({"mla"}, "", graphs="FULL_DECODE_ONLY"),
    "dropped": needs({"full"}, "", graphs="PIECEWISE", switches={"recompute_scheduler_enable"}),
}


@pytest.mark.parametrize(
    ("wanted", "stand_in"),
    [
        (needs({"full"}, ""), "`plain`"),
        (needs({"full"}, "", ranks=8), "`ranks`"),
        (needs({"full"}, "", graphs="FULL"), "`both`"),
        (needs({"mla"}, "mtp", graphs="FULL_DECODE_ONLY"), "`drafts`; full graphs `latent graphs`"),
        (needs({"mla"}, "mtp", graphs="PIECEWISE"), "`drafts`; piecewise graphs `other graphs`"),
        (needs({"mla"}, "mtp", divided=2), "`drafts`; –: context parallelism"),
        (needs({"mla"}, "mtp", switches={"recompute_scheduler_enable"}), "`drafts`; recompute scheduler `dropped`"),
        (needs({"full"}, "mtp"), "–: full with mtp"),
        (needs({"full", "gdn"}, ""), "–: full and gdn"),
    ],
    ids=[
        "plain",
        "more ranks",
        "full graphs",
        "a draft and full graphs",
        "a draft and piecewise graphs",
        "a draft, divided",
        "a draft and the recompute scheduler",
        "a draft that no set has",
        "a kind that no set has",
    ],
)
def test_sets_of_engines_stand_for_a_configuration(wanted: Needs, stand_in: str) -> None:
    assert stands(wanted, SMALL) == stand_in


def test_a_set_is_known_by_its_models_kinds_and_its_modes() -> None:
    sets = small.sets()
    assert sets["gqa 1to1"] == needs({"full"}, "")
    assert sets["mtp 1to1"] == needs({"mla"}, "mtp")
    assert sets["moe 2to1 dp 1to2"] == needs({"full"}, "", ranks=2)
    assert sets["gqa 4to2 regrouped"] == needs({"full"}, "", exchange=True)
    assert sets["mqa pcp 2 to dcp 2"] == needs({"full"}, "", divided=2)
    both = needs({"full", "gdn"}, "mtp", graphs="FULL_DECODE_ONLY", switches={small.RECOMPUTES})
    assert sets["qwen3next 1to1 mtp full graphs"] == both


def test_every_set_that_the_page_names_exists() -> None:
    _, between, _ = field_page.MARKS.split(field_page.PAGE.read_text())
    lines = re.sub(r"\| switch \|.*?\n\n", "", between, flags=re.DOTALL).splitlines()
    named = {name for line in lines if line.startswith("| ") for name in re.findall("`([^`]+)`", line)}
    assert named and named <= small.sets().keys()


def test_a_page_that_is_not_what_is_printed_is_wrong_and_a_lost_start_is_named() -> None:
    printed = field_page.tables(three())
    assert field_page.compare(printed, printed) == []
    (words,) = field_page.compare(printed.replace("P would start in 1", "P would start in 2"), printed)
    assert "is not what is printed" in words
    before = printed.replace(f"1 × 1 | {SPECULATION} | 1 × 1", "1 × 1 | would start | 1 × 1")
    assert field_page.compare(before, printed) == ["nightly/two would start, says the page, and no longer does"]


def test_heads_in_int8_are_made_on_the_way_and_prefill_has_no_flag_for_them() -> None:
    base, flag = release(code=NEWER), ["--kv-cache-dtype", "int8"]
    for flags in ([], flag):
        verdict = under(base, "me/gqa-c8", p=line(P, *flags), d=line(D, *flags))
        assert verdict.both and verdict.pair == "regroup"


def test_the_release_before_has_a_smaller_table_and_a_lost_start_there_counts() -> None:
    base = replace(UNNAMED, version=field_page.BEFORE.version)
    printed = field_page.shorter(three(), base)
    assert f"### vllm-ascend {base.version}" in printed
    assert f"| nightly/two | {SPECULATION} | – | – |" in printed
    (row,) = [line for line in printed.splitlines() if line.startswith("| nightly/one |")]
    assert row.startswith("| nightly/one | would start | yes | ")
    (lost,) = field_page.compare(printed, printed.replace(row, row.replace("would start", "PD-CONF-005 no more")))
    assert lost.startswith(f"{base.version}: nightly/one would start")


def test_a_rule_that_becomes_stricter_loses_starts_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = field_page.tables(three())
    monkeypatch.setattr(kinds, "PROVEN", ())
    assert field_page.compare(before, field_page.tables(three())) == [
        "nightly/one would start, says the page, and no longer does"
    ]


def test_the_readme_has_the_pages_number() -> None:
    page = field_page.PAGE.read_text()
    (main, before) = re.findall(r"P and D would start in (\d+ of \d+) configurations", page)
    assert [name.startswith(field_page.BEFORE.version) for name in sorted(field_page.starting(page))].count(
        True
    ) == int(before.split()[0])
    assert len(field_page.starting(page)) == int(main.split()[0]) + int(before.split()[0])
    line = f"[docs/field.md](docs/field.md): {main} of vllm-ascend {field_page.PINNED.version}, {before} of "
    assert line in (field_page.ROOT / "README.md").read_text()


def test_one_name_for_two_files_is_an_error() -> None:
    text = written(line(P), line(D))
    with pytest.raises(ValueError, match="nightly/x"):
        field_page.verdicts({"nightly/a/x.yaml": text, "nightly/b/x.yaml": text}, KNOWN)


# -- the distribution


def packed(folder: Path) -> sdist.Pin:
    """Make a source distribution whose build would fail."""
    folder.mkdir()
    root = folder / "some_thing-1.0"
    (root / "tests" / "a").mkdir(parents=True)
    (root / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: some-thing\nVersion: 1.0\n")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["unknown"]\nbuild-backend = "setuptools.build_meta"\n'
    )
    (root / "setup.py").write_text("raise SystemExit('this was run')\n")
    (root / "tests" / "a" / "x.yaml").write_text("kept")
    (root / "tests" / "a" / "x.py").write_text("left")
    path = folder / "some_thing-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(root, root.name)
    return sdist.Pin("some-thing", "1.0", hashlib.sha256(path.read_bytes()).hexdigest())


def no_index(monkeypatch: pytest.MonkeyPatch, links: Path) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))


def test_a_distribution_is_fetched_once_and_nothing_of_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = packed(tmp_path / "links")
    no_index(monkeypatch, tmp_path / "links")
    path = sdist.ensure(pin, tmp_path / "cache")
    assert sdist.read(path, "tests", ".yaml") == {"a/x.yaml": "kept"}
    no_index(monkeypatch, tmp_path / "nothing")
    assert sdist.ensure(pin, tmp_path / "cache") == path
    assert [each.name for each in (tmp_path / "cache").iterdir()] == ["some_thing-1.0.tar.gz"]


def test_other_contents_by_the_same_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = packed(tmp_path / "links")
    no_index(monkeypatch, tmp_path / "links")
    with pytest.raises(sdist.NotThePinned, match="is not the pinned"):
        sdist.ensure(sdist.Pin(pin.name, pin.version, "0" * 64), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_an_index_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_index(monkeypatch, tmp_path)
    with pytest.raises(sdist.Unreachable) as caught:
        sdist.ensure(sdist.Pin("some-thing", "1.0", ""), tmp_path / "cache")
    assert "No matching distribution found" in str(caught.value) and "--sdist FILE" in str(caught.value)


def test_a_file_that_is_not_the_pinned_one_ends_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for pin in (field_page.PINNED, field_page.BEFORE):
        path = tmp_path / pin.file
        assert field_page.main(["--sdist", str(path)]) == 2
        path.write_bytes(b"something else")
        capsys.readouterr()
        assert field_page.main(["--sdist", str(path)]) == 2
        assert "is not the pinned" in capsys.readouterr().err
        path.unlink()
    assert field_page.main(["--sdist", str(tmp_path / "x.tar.gz")]) == 2
    assert "is not called as a pinned distribution" in capsys.readouterr().err


def test_the_page_is_what_vllm_ascends_own_configurations_give(capsys: pytest.CaptureFixture[str]) -> None:
    """The real distribution: no configuration that would start is missing, and the page has what is printed."""
    try:
        for pin in (field_page.PINNED, field_page.BEFORE):
            sdist.ensure(pin)
    except sdist.Unreachable as problem:
        pytest.skip(str(problem))
    assert field_page.main(["--check"]) == 0, capsys.readouterr().err
