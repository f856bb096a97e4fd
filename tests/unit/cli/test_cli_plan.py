# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan`: its output is what the planners would do, and it names what it cannot plan."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd.cli.__main__ import main

GQA = ["--kv-heads", "8", "--head-dim", "128", "--layers", "61", "--tokens", "4096"]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


def whole(tokens: int, heads: int, dim: int, layers: int, regions: int = 2, item: int = 2) -> int:
    return tokens * heads * dim * layers * regions * item


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (8, 2), (2, 8), (3, 2), (6, 4), (16, 4)])
@pytest.mark.parametrize("regroup", ["never", "always"])
def test_all_bytes_are_sent_once_to_each_holder(
    capsys: pytest.CaptureFixture[str], p_tp: int, d_tp: int, regroup: str
) -> None:
    """12 heads where the sizes must divide them; each D rank gets its own heads from some P rank."""
    heads = {3: 12, 6: 12}.get(p_tp, 8)
    words = ["--kv-heads", str(heads), "--head-dim", "64", "--layers", "2", "--tokens", "1000"]
    made = plan(capsys, "--p-tp", str(p_tp), "--d-tp", str(d_tp), "--regroup", regroup, *words)
    total = sum(link["bytes"] for link in made["links"])
    blocks = -(-1000 // 128) * 128
    assert whole(1000, heads, 64, 2) <= total <= whole(blocks, heads, 64, 2)
    assert {link["d"] for link in made["links"]} == set(range(d_tp))


@pytest.mark.parametrize("regroup", ["never", "always"])
def test_stages_send_each_layer_once_to_the_stage_that_has_it(capsys: pytest.CaptureFixture[str], regroup: str) -> None:
    words = ["--kv-heads", "4", "--head-dim", "64", "--layers", "5", "--tokens", "1024", "--regroup", regroup]
    made = plan(capsys, "--p-tp", "2", "--p-pp", "2", "--d-tp", "1", "--d-pp", "3", *words)
    by_worker = {d: sum(link["bytes"] for link in made["links"] if link["d"] == d) for d in range(3)}
    assert by_worker == {d: whole(1024, 4, 64, layers) for d, layers in enumerate((2, 2, 1))}
    assert {(link["p"] // 2, link["d"]) for link in made["links"]} == {(0, 0), (0, 1), (1, 1), (1, 2)}


def test_tokens_that_ranks_divide_are_sent_once_to_the_rank_that_holds_them(capsys: pytest.CaptureFixture[str]) -> None:
    mla = ["--layout", "mla", "--head-dim", "576", "--layers", "2", "--tokens", "4096"]
    made = plan(capsys, "--p-tp", "8", "--p-dcp", "8", "--d-tp", "2", "--d-dcp", "2", *mla)
    assert made["mode"] == "direct" and "divided" in made["why"]
    assert [(link["p"], link["d"]) for link in made["links"]] == [(rank, rank % 2) for rank in range(8)]
    assert {link["bytes"] for link in made["links"]} == {whole(4096, 1, 576, 2, regions=1) // 8}
    made = plan(capsys, "--p-tp", "2", "--p-pcp", "2", "--d-tp", "1", *mla)
    by_rank = {rank: sum(link["bytes"] for link in made["links"] if link["p"] == rank) for rank in range(4)}
    assert sum(by_rank.values()) == whole(4096, 1, 576, 2, regions=1) and len(set(by_rank.values())) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--p-dcp", "3"], "8 ranks have 8 KV heads"),
        (["--d-dcp", "2"], "KV heads"),
        (["--p-pcp", "2", "--p-interleave", "48"], "a block has 128 tokens"),
        (["--p-interleave", "64"], "the tokens are not divided"),
        (["--p-pcp", "2", "--p-pp", "2"], "--p-pcp"),
        (["--p-pcp", "1024"], "at most 4096 workers"),
    ],
)
def test_parts_that_no_engine_has_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--p-tp", "8", "--d-tp", "8", *GQA, *words]) == 2
    assert says in capsys.readouterr().err


def test_equal_sizes_pair_up(capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(capsys, "--p-tp", "4", "--d-tp", "4", *GQA)
    assert [(link["p"], link["d"]) for link in made["links"]] == [(rank, rank) for rank in range(4)]


def test_short_spans_are_regrouped_and_long_ones_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    token_major = plan(capsys, "--p-tp", "8", "--d-tp", "2", *GQA)
    head_major = plan(capsys, "--p-tp", "8", "--d-tp", "2", "--layout", "head-major", *GQA)
    forbidden = plan(capsys, "--p-tp", "8", "--d-tp", "2", "--regroup", "never", *GQA)
    assert token_major["mode"] != head_major["mode"]
    count = {
        name: sum(x["descriptors"] for x in made["links"]) for name, made in (("r", token_major), ("d", forbidden))
    }
    assert count["r"] * 10 < count["d"]
    assert token_major["busiest_rank_s"] < forbidden["busiest_rank_s"]


def test_staging_is_what_a_prefill_rank_allocates(capsys: pytest.CaptureFixture[str]) -> None:
    small = plan(capsys, "--p-tp", "8", "--d-tp", "2", "--step-tokens", "2048", *GQA)["staging"]
    large = plan(capsys, "--p-tp", "8", "--d-tp", "2", "--step-tokens", "8192", *GQA)["staging"]
    one_layer = 2048 // 8 * 2 * 8 * 128 * 2  # a rank's share of a step, K and V, all heads, bf16
    assert 24 * one_layer < small <= 48 * one_layer and small < large < 4 * small
    assert plan(capsys, "--p-tp", "8", "--d-tp", "2", "--regroup", "never", *GQA)["staging"] == 0


def test_a_faster_link_takes_less_time(capsys: pytest.CaptureFixture[str]) -> None:
    slow = plan(capsys, "--p-tp", "2", "--d-tp", "2", "--link-gbps", "1", *GQA)
    fast = plan(capsys, "--p-tp", "2", "--d-tp", "2", "--link-gbps", "100", *GQA)
    assert fast["busiest_rank_s"] < slow["busiest_rank_s"]


def test_the_table_names_mode_reason_links_and_ranks_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--p-tp", "4", "--d-tp", "2", "--layout", "head-major", *GQA]) == 0
    text = capsys.readouterr().out
    assert "prefill TP 4 → decode TP 2, 8 KV heads × 128, 61 layers" in text
    assert "mode: " in text and "P3 → D1" in text and "P0 → D1" not in text
    assert "D1 is complete after a DONE of P2, P3" in text


def test_a_model_is_read_from_its_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"num_attention_heads": 32, "num_key_value_heads": 4, "hidden_size": 2048, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = plan(capsys, "--p-tp", "2", "--d-tp", "1", "--model", str(tmp_path), "--tokens", "128")
    assert sum(link["bytes"] for link in made["links"]) == whole(128, 4, 64, 3)


@pytest.mark.parametrize(("p_tp", "d_tp", "heads"), [(3, 2, 6), (3, 6, 3), (6, 3, 3), (16, 2, 8)])
def test_sizes_that_divide_the_heads_or_are_a_multiple_of_them_are_planned(
    capsys: pytest.CaptureFixture[str], p_tp: int, d_tp: int, heads: int
) -> None:
    words = ["--p-tp", str(p_tp), "--d-tp", str(d_tp), *GQA, "--kv-heads", str(heads), "--regroup", "never"]
    total = sum(link["bytes"] for link in plan(capsys, *words)["links"])
    assert total == max(1, d_tp // heads) * whole(4096, heads, 128, 61)


def test_mla_is_one_shared_head_of_its_latent_width(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {
        "num_attention_heads": 16,
        "hidden_size": 2048,
        "num_hidden_layers": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = plan(capsys, "--p-tp", "4", "--d-tp", "2", "--model", str(tmp_path), "--tokens", "1280")
    one = whole(1280, 1, 576, 2, regions=1)
    assert sum(link["bytes"] for link in made["links"]) == 2 * one  # each D rank holds it; the P ranks share the work
    assert max(link["bytes"] for link in made["links"]) < one


def test_the_picture_is_svg_with_a_line_for_each_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "plan.svg"
    made = plan(capsys, "--p-tp", "4", "--d-tp", "2", *GQA, "--svg", str(target))
    root = ElementTree.fromstring(target.read_text())
    assert root.tag.endswith("svg")
    assert len(root.findall("{http://www.w3.org/2000/svg}line")) == len(made["links"])
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 6


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--p-tp", "2", "--d-tp", "2", "--head-dim", "8", "--layers", "1"], "--kv-heads"),
        (["--p-tp", "2", "--d-tp", "2", "--kv-heads", "8", "--layers", "1"], "--head-dim"),
        (["--p-tp", "0", "--d-tp", "2", *GQA], "--p-tp = 0"),
        (["--p-tp", "8", "--d-tp", "3", *GQA], "--d-tp = 3"),
        (["--p-tp", "12", "--d-tp", "2", *GQA], "--p-tp = 12"),
        (["--p-tp", "6", "--d-tp", "4", *GQA, "--kv-heads", "4"], "--p-tp = 6"),
        (["--p-tp", "2", "--d-tp", "2", *GQA, "--tokens", "0"], "--tokens = 0"),
        (["--p-tp", "2", "--d-tp", "2", *GQA, "--link-gbps", "0"], "--link-gbps = 0.0"),
        (["--p-tp", "2", "--d-tp", "2", *GQA, "--link-gbps", "-3"], "--link-gbps = -3.0"),
        (["--p-tp", "2", "--d-tp", "2", *GQA, "--link-gbps", "nan"], "--link-gbps = nan"),
        (["--p-tp", "2", "--d-tp", "2", *GQA, "--descriptor-us", "-1"], "--descriptor-us = -1.0"),
        (["--p-tp", "2", "--d-tp", "2", *GQA, "--kv-heads", "-8"], "--kv-heads = -8"),
        (["--p-tp", "2", "--d-tp", "2", *GQA, "--block-size", "1000000000"], "--block-size = 1000000000"),
        (["--p-tp", "2", "--d-tp", "2", *GQA, "--head-dim", "-1"], "--head-dim = -1"),
        (["--p-tp", "2", "--d-tp", "2", *GQA, "--layers", "-1"], "--layers = -1"),
        (["--p-tp", "2", "--d-tp", "2", *GQA, "--svg", "/nowhere/at/all.svg"], "--svg = '/nowhere/at/all.svg'"),
    ],
)
def test_what_cannot_be_planned_is_named(capsys: pytest.CaptureFixture[str], words: list[str], named: str) -> None:
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("PD-CONF-003") and named in printed.err
    assert not printed.out and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("[1]", "not an object"),
        ("{", "not JSON"),
        ('{"num_attention_heads": "32", "num_hidden_layers": 2, "hidden_size": 64}', "num_attention_heads = '32'"),
        ('{"num_attention_heads": 32, "num_hidden_layers": 2}', "hidden_size = None"),
        ('{"num_attention_heads": 32, "num_hidden_layers": -2, "hidden_size": 64}', "num_hidden_layers = -2"),
        ('{"num_attention_heads": 2, "num_hidden_layers": 2, "kv_lora_rank": 512}', "qk_rope_head_dim = None"),
        (None, "cannot be read"),
    ],
)
def test_a_models_configuration_that_cannot_be_used_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: str | None, named: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert main(["plan", "--p-tp", "2", "--d-tp", "1", "--model", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"PD-CONF-003: --model = '{tmp_path}'") and named in said and said.count("\n") == 1


def test_a_vision_models_text_part_is_read_and_a_nested_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 36}
    words = ["plan", "--p-tp", "2", "--d-tp", "1", "--model", str(tmp_path)]
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": text}))
    assert main(words) == 0 and "8 KV heads × 128, 36 layers" in capsys.readouterr().out
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert main(words) == 2 and capsys.readouterr().err.startswith("PD-CONF-003")


FULL = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "num_hidden_layers": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_d_conv": 4}
DELTA = {
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 32, "conv_kernel": 4}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
REFUSED = {
    "windows beside MLA": {
        "layer_types": ["sliding_attention"],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
    },
    "windows beside MLA behind a layer without": {
        "layer_types": ["full_attention", "sliding_attention"],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
    },
    "an unknown kind of layer": {"layer_types": ["local_attention", "full_attention"]},
    "an indexer beside heads": {"index_topk": 2048, "index_head_dim": 128},
    "linear attention of unknown sizes": {"layer_types": ["linear_attention", "full_attention"]},
    "states of unknown sizes": {"mamba_d_state": 128},
    "states beside MLA": {**MAMBA, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "states beside windows": {**MAMBA, "sliding_window": 128},
    "states beside windows in a later layer": {**MAMBA, "layer_types": ["mamba", "sliding_attention"]},
    "a quantised cache": {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}},
    "a scale for each head": {"quantization_config": {"kv_cache_scheme": {**FP8, "strategy": "attn_head"}}},
    "scales of its own": {"quantization_config": {"kv_cache_scheme": {**FP8, "dynamic": True}}},
    "another algorithm": {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}},
}
TAKEN = {
    "plain": {},
    "a window that is switched off": {"sliding_window": 128, "use_sliding_window": False},
    "a window as long as the model": {"sliding_window": 4096, "max_position_embeddings": 4096},
    "full attention in every layer": {"layer_types": ["full_attention"] * 4, "sliding_window": 128},
    "quantised weights": {"quantization_config": {"quant_method": "fp8"}},
    "fp8": {"quantization_config": {"kv_cache_scheme": FP8}},
    "fp8 by another name": {"quantization_config": {"kv_cache_quant_algo": "FP8"}},
}


@pytest.mark.parametrize("inside", [False, True], ids=["a text model", "a vision model"])
@pytest.mark.parametrize("more", REFUSED.values(), ids=REFUSED)
def test_there_is_no_plan_for_a_model_that_an_engine_refuses(
    more: dict[str, Any], inside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**FULL, **more}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config} if inside else config))
    assert main(["plan", "--p-tp", "2", "--d-tp", "1", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("PD-CONF-005: A ")


@pytest.mark.parametrize(
    "more",
    [
        {"compress_ratios": [0, 4, 128, 4], "index_topk": 512, "sliding_window": 128},
        {"layer_types": ["chunked_attention", "full_attention"] * 2},
        {"attention_chunk_size": 8192},
    ],
    ids=["compressed latents", "chunks", "chunks, of no named layers"],
)
def test_what_is_not_described_has_no_plan_but_is_not_called_refused(
    more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FULL, **more}))
    assert main(["plan", "--p-tp", "2", "--d-tp", "1", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("PD-CONF-003: --model")


@pytest.mark.parametrize("more", TAKEN.values(), ids=TAKEN)
def test_a_model_with_full_attention_is_planned(
    more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FULL, **more}))
    assert main(["plan", "--p-tp", "2", "--d-tp", "1", "--model", str(tmp_path)]) == 0
    assert "2 KV heads × 64, 4 layers" in capsys.readouterr().out


def test_mla_has_ropes_of_64_where_no_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--p-tp", "1", "--d-tp", "1", "--layout", "mla", "--head-dim", "576", "--layers", "2", "--tokens", "128"]
    assert [link["descriptors"] for link in plan(capsys, *words)["links"]] == [2 * 2]
    assert [link["descriptors"] for link in plan(capsys, *words, "--rope-dim", "0")["links"]] == [2]


WINDOWED = [
    ({"model_type": "gemma2"}, 2, 2 * 4096 + 2 * 128),
    ({"sliding_window_pattern": 4}, 3, 4096 + 3 * 128),
    ({"layer_types": ["sliding_attention", "full_attention"] * 2}, 2, 2 * 4096 + 2 * 128),
    ({"max_position_embeddings": 4096}, 4, 4 * 128),
]


@pytest.mark.parametrize(
    ("more", "layers", "tokens"), WINDOWED, ids=["a family's", "a pattern", "in some layers", "in all"]
)
@pytest.mark.parametrize("mode", ["always", "never"])
def test_of_a_window_the_last_blocks_are_planned(
    mode: str, more: dict[str, Any], layers: int, tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind 4,096 tokens the next one looks at 3,969 and later: the last block."""
    (tmp_path / "config.json").write_text(json.dumps({**FULL, **more, "sliding_window": 128}))
    words = ["plan", "--p-tp", "2", "--d-tp", "1", "--model", str(tmp_path), "--regroup", mode]
    assert main(words) == 0 and f"4 layers ({layers} with a window of 128 tokens)" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert sum(link["bytes"] for link in json.loads(capsys.readouterr().out)["links"]) == tokens * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("more", "cell"), [({}, "576"), ({"index_topk": 2048, "index_head_dim": 128}, "576 and index keys of 128")]
)
def test_an_indexers_key_is_planned_with_its_layer(
    more: dict[str, Any], cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**FULL, "kv_lora_rank": 512, "qk_rope_head_dim": 64, **more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--p-tp", "2", "--d-tp", "1", "--model", str(tmp_path)]) == 0
    assert f"{cell}, 4 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "copies"),
    [(("2", "1", "2", "1"), 1), (("1", "2", "1", "2"), 2), (("4", "2", "4", "2"), 2), (("2", "2", "2", "1"), 2)],
    ids=["2→1", "1→2", "4→2", "on prefill alone"],
)
def test_each_rank_of_decode_gets_all_index_keys_and_its_part_of_the_latents(
    sizes: tuple[str, ...], copies: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`copies` of the keys; of the latents there are as many only without DCP on decode."""
    keys = {"index_topk": 2048, "index_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**FULL, **keys}))
    flags = zip(("--p-tp", "--d-tp", "--p-dcp", "--d-dcp"), sizes, strict=True)
    assert main(["plan", *sum(flags, ()), "--model", str(tmp_path), "--json"]) == 0
    links = json.loads(capsys.readouterr().out)["links"]
    latents = int(sizes[1]) // int(sizes[3])
    assert sum(link["bytes"] for link in links) == 4 * 4096 * 2 * (latents * 576 + copies * 128)


def test_an_indexer_with_pcp_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"index_topk": 2048, "index_head_dim": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**FULL, **keys}))
    assert main(["plan", "--p-tp", "1", "--p-pcp", "2", "--d-tp", "1", "--model", str(tmp_path)]) == 2
    assert "sparse indexer" in capsys.readouterr().err


# Rows of the convolution in bf16, matrices in float32 as asked: x, B and C of Mamba-2, q, k and v of Gated DeltaNet.
_OF_MAMBA, _OF_DELTA = 3 * (512 + 2 * 2 * 32) * 2 + 8 * 64 * 32 * 4, 3 * (2 * 256 + 512) * 2 + 8 * 64 * 64 * 4
STATEFUL = [
    ({**MAMBA}, 4, 4, _OF_MAMBA),
    ({**DELTA, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 1, 3, _OF_DELTA),
    ({**NEMOTRON, "hybrid_override_pattern": "MM-*"}, 1, 2, _OF_MAMBA - 3 * 2 * 32 * 2),
]


@pytest.mark.parametrize(("more", "attends", "kept", "state"), STATEFUL, ids=["side by side", "delta net", "pattern"])
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("tps", [("2", "1"), ("1", "2"), ("2", "2")], ids="→".join)
def test_a_state_is_planned_once_and_whole(
    mode: str,
    tps: tuple[str, str],
    more: dict[str, Any],
    attends: int,
    kept: int,
    state: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FULL, **more}))
    words = ["plan", "--p-tp", tps[0], "--d-tp", tps[1], "--model", str(tmp_path), "--regroup", mode]
    words += ["--state-dtype", "fp32"]
    line = f"4 layers ({attends} with attention, {kept} with a state of {state} B)"
    assert main(words) == 0 and line in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    repeated_bytes = (
        3 * 2 * 32 * 2 * kept * (int(tps[1]) - 1) if more.get("n_groups") == 1 else 0
    )  # each of D's ranks has all of the single group
    assert sum(link["bytes"] for link in json.loads(capsys.readouterr().out)["links"]) == (
        attends * 4096 * 2 * 2 * 64 * 2 + kept * state + repeated_bytes
    )


@pytest.mark.parametrize(
    ("more", "item"),
    [
        ({**MAMBA}, 2),
        ({**DELTA}, 2),
        ({**DELTA, "mamba_ssm_dtype": "float32"}, 4),
        ({**MAMBA, "mamba_ssm_cache_dtype": "float32"}, 4),
        ({**NEMOTRON, "hybrid_override_pattern": "MM-*"}, 4),
        ({**NEMOTRON, "hybrid_override_pattern": "MM-*", "mamba_ssm_cache_dtype": "bfloat16"}, 2),
    ],
    ids=["its own", "delta net", "Qwen3.5", "named", "Nemotron-H", "Nemotron-H, named"],
)
def test_a_recurrence_has_the_models_dtype_unless_another_is_named(
    more: dict[str, Any], item: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FULL, **more}))
    rows, matrices = (3 * (2 * 256 + 512), 8 * 64 * 64) if "linear_num_key_heads" in more else (3 * 640, 8 * 64 * 32)
    rows -= 3 * 64 if "n_groups" in more else 0
    assert main(["plan", "--p-tp", "1", "--d-tp", "1", "--model", str(tmp_path)]) == 0
    assert f"a state of {rows * 2 + matrices * item} B" in capsys.readouterr().out


@pytest.mark.parametrize("regroup", ["never", "always"])
def test_draft_layers_and_scales_are_planned_too(capsys: pytest.CaptureFixture[str], regroup: str) -> None:
    words = ["--kv-heads", "8", "--head-dim", "128", "--layers", "3", "--tokens", "4096", "--dtype", "int8"]
    more = ["--draft-layers", "1", "--scale-bytes", "4"]
    made = plan(capsys, "--p-tp", "4", "--d-tp", "2", "--regroup", regroup, *words, *more)
    assert sum(link["bytes"] for link in made["links"]) == whole(4096, 8, 128 + 4, 3 + 1, item=1)
    assert main(["plan", "--p-tp", "4", "--d-tp", "2", *words, *more]) == 0
    assert "3 layers and 1 of a draft model" in capsys.readouterr().out
    staged = plan(capsys, "--p-tp", "4", "--p-pp", "2", "--d-tp", "2", "--regroup", regroup, *words, *more)
    assert sum(link["bytes"] for link in staged["links"]) == whole(4096, 8, 128 + 4, 3 + 1, item=1)
    assert main(["plan", "--p-tp", "4", "--d-tp", "2", "--d-pp", "2", *words, *more]) == 2
    assert "--draft-layers" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "named"), [(("--d-pp", "2"), "--d-pp = 2"), (("--p-tp", "16"), "--p-tp = 16")])
def test_states_that_no_engine_starts_with_have_no_plan(
    words: tuple[str, str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FULL, **MAMBA}))
    assert main(["plan", "--p-tp", "2", "--d-tp", "1", "--model", str(tmp_path), *words]) == 2
    assert named in capsys.readouterr().err
