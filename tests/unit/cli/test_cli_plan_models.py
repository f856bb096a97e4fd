# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan` for published models: each number is written out from the model's config.json.

Nothing of the package's geometry is used here. Unless a test says otherwise a prompt has 4,096 tokens, which are 32
blocks, a number has 2 bytes, a link carries 25 GB/s, and a descriptor costs 4 µs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unit.cli.published import written
from vllm_ascend_pd.cli.__main__ import main

GIB, MIB = 1 << 30, 1 << 20
LINK, DESCRIPTOR = 25e9, 4e-6
TOKENS, BLOCK, BLOCKS = 4096, 128, 32
LATENT, ROPE, KEY = BLOCK * 512 * 2, BLOCK * 64 * 2, BLOCK * 128 * 2  # bytes of a block
PlanOfModel = Callable[..., dict[str, Any]]


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PlanOfModel:
    """Return the plan of a model as JSON, and print it as text too."""

    def made(name: str, p: int, d: int, *words: str) -> dict[str, Any]:
        command = ["plan", "--p-tp", str(p), "--d-tp", str(d), "--model", written(tmp_path, name), *words]
        assert main([*command, "--json"]) == 0
        plan: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert main(command) == 0
        return {**plan, "text": capsys.readouterr().out}

    return made


def by_link(made: dict[str, Any]) -> dict[tuple[int, int], tuple[int, int]]:
    return {(x["p"], x["d"]): (x["descriptors"], x["bytes"]) for x in made["links"]}


def received(made: dict[str, Any], d: int) -> tuple[int, int]:
    """Return descriptors and bytes that a rank of D gets."""
    some = [x for x in made["links"] if x["d"] == d]
    return sum(x["descriptors"] for x in some), sum(x["bytes"] for x in some)


def holds(made: dict[str, Any]) -> tuple[int, int, int]:
    memory = made["decode_memory"]
    return memory["blocks"], memory["tokens"], memory["prompts"]


@pytest.mark.parametrize("name", ["DeepSeek-V3.1", "Kimi-K2"])
def test_mla_is_two_tensors_and_the_one_link_of_d_receives_from_all_ranks_of_p(name: str, planned: PlanOfModel) -> None:
    made = planned(name, 8, 1, "--kv-memory", "20")
    each = BLOCKS // 8 * 61 * (LATENT + ROPE)
    assert by_link(made) == {(rank, 0): (BLOCKS // 8 * 61 * 2, each) for rank in range(8)}
    assert (BLOCKS // 8 * 61 * 2, each) == (488, 35_979_264)
    assert made["busiest_rank_s"] == pytest.approx(488 * DESCRIPTOR) == pytest.approx(1.952e-3)
    assert made["busiest_decode_rank_s"] == pytest.approx(8 * each / LINK) == pytest.approx(11.513e-3, rel=1e-4)
    assert "receives from 8 prefill ranks: decode is the slower side" in made["text"]
    assert "tensors of a layer, by block: latent 131072 B, rope 16384 B" in made["text"]
    assert made["staging"] == made["exchange_buffers"] == 0  # every rank has the one head
    blocks = 20 * GIB // (61 * (LATENT + ROPE))
    assert holds(made) == (blocks, (blocks - 1) * BLOCK, (blocks - 1) // BLOCKS) == (2387, 305_408, 74)


def test_one_tensor_for_both_is_what_other_engines_of_vllm_have(planned: PlanOfModel) -> None:
    made = planned("DeepSeek-V3.1", 8, 1, "--rope-dim", "0")
    assert by_link(made)[0, 0] == (244, BLOCKS // 8 * 61 * (LATENT + ROPE))
    assert "by block: kv 147456 B" in made["text"]


def test_each_rank_of_d_gets_all_of_mla(planned: PlanOfModel) -> None:
    made = planned("Kimi-K2", 16, 2)
    for d in range(2):
        assert received(made, d) == (BLOCKS * 61 * 2, BLOCKS * 61 * (LATENT + ROPE))
    assert made["busiest_decode_rank_s"] == pytest.approx(BLOCKS * 61 * (LATENT + ROPE) / LINK)


def test_an_indexers_keys_are_a_third_tensor(planned: PlanOfModel) -> None:
    made = planned("DeepSeek-V3.2", 8, 1, "--kv-memory", "20")
    each = BLOCKS // 8 * 61 * (LATENT + ROPE + KEY)
    assert by_link(made) == {(rank, 0): (BLOCKS // 8 * 61 * 3, each) for rank in range(8)}
    assert made["busiest_rank_s"] == pytest.approx(732 * DESCRIPTOR) == pytest.approx(2.928e-3)
    assert made["busiest_decode_rank_s"] == pytest.approx(8 * each / LINK)
    assert "latent 131072 B, rope 16384 B, index key 32768 B" in made["text"]
    assert "mode: direct (no rank has heads that another lacks)" in made["text"] and "spans 0" not in made["text"]
    blocks = 20 * GIB // (61 * (LATENT + ROPE + KEY))
    assert holds(made) == (blocks, (blocks - 1) * BLOCK, (blocks - 1) // BLOCKS) == (1953, 249_856, 61)


def test_with_dcp_a_rank_of_d_has_all_index_keys_of_a_block_that_all_ranks_share(planned: PlanOfModel) -> None:
    made = planned("DeepSeek-V3.2", 8, 4, "--d-dcp", "4", "--kv-memory", "20")
    blocks = 20 * GIB // (61 * (LATENT + ROPE + 4 * KEY))
    assert holds(made) == (blocks, (blocks - 1) * BLOCK * 4, (blocks - 1) // (BLOCKS // 4))
    assert received(made, 0)[1] == 61 * (BLOCKS // 4 * (LATENT + ROPE) + BLOCKS * KEY)


def test_of_deepseek_v4_go_complete_entries_and_windows(planned: PlanOfModel) -> None:
    """Of 4,096 tokens 1,024 and 32 entries, 128 tokens of each window, and a compressor's last 8 and 128."""
    made = planned("DeepSeek-V4-Flash", 4, 2)
    fours, longs, layers, latent = 21, 20, 43, 512 * 2
    entries = fours * 1024 * (latent + 128 + 2) + longs * 32 * latent
    compressors = fours * 8 * 4 * (512 + 128) * 4 + longs * 128 * 2 * 512 * 4
    for d in range(2):
        assert received(made, d)[1] == entries + layers * 128 * latent + compressors == 43_313_152
    assert made["busiest_decode_rank_s"] == pytest.approx(43_313_152 / LINK)
    assert f"{layers} layers ({fours} with an entry for 4 tokens, {longs} with an entry for 128 tokens" in made["text"]
    drafted = planned("DeepSeek-V4-Flash", 4, 2, "--draft-layers", "1")
    assert received(drafted, 0)[1] == 43_313_152 + 128 * latent, "a draft layer has a window alone"
    # Blocks of 32 entries; a compressor's have 2 and 8. A prompt of 100 tokens has 25 entries for 4, and none for 128.
    short = planned("DeepSeek-V4-Flash", 1, 1, "--block-size", "32", "--tokens", "100")
    windows = layers * 100 * latent + fours * 8 * 4 * (512 + 128) * 4 + longs * 100 * 2 * 512 * 4
    assert received(short, 0)[1] == fours * 25 * (latent + 130) + windows


def test_groups_of_deepseek_v4_take_their_blocks_from_one_pool(planned: PlanOfModel) -> None:
    """21 layers have latents for 4 tokens, 20 for 128, 43 a window, 21 and 20 a compressor.

    As groups of 22 windows are two, and 1 + 2 + 1 + 1 + 2 places stay empty; of 21 they would be three, with 20 empty.
    A block is 22 pages of latents and 22 of index keys, of which a prompt of 4,096 tokens has 8 for 1,024 entries,
    1 for 32 entries, 2 for each group of windows, and 2 and 5 for windows of 8 and 128 tokens in blocks of 8 and 32.
    """
    pages = BLOCK * 512 * 2 + BLOCK * (128 + 2)
    made = planned("DeepSeek-V4-Flash", 4, 2, "--kv-memory", "20")
    blocks, wanted = 20 * GIB // (22 * pages), 8 + 1 + 2 * 2 + 2 + 5
    assert holds(made) == (blocks, (blocks - 1) // wanted * TOKENS, (blocks - 1) // wanted) == (6608, 1_351_680, 330)
    # A layer of MTP is one window more, in the group of 21, and has a place for itself.
    drafted = planned("DeepSeek-V4-Flash", 4, 2, "--draft-layers", "1", "--kv-memory", "20")
    assert holds(drafted)[::2] == (20 * GIB // (23 * pages), (20 * GIB // (23 * pages) - 1) // wanted)
    # Blocks of 32 entries, of which 1,024 entries are 32; of windows' 32 tokens 5; of 2 tokens 5; of 8 tokens 17.
    small = planned("DeepSeek-V4-Flash", 1, 1, "--block-size", "32", "--kv-memory", "20")
    blocks, wanted = 20 * GIB // (22 * pages // 4), 32 + 1 + 2 * 5 + 5 + 17
    assert holds(small)[::2] == (blocks, (blocks - 1) // wanted) == (26433, 406)
    # A prompt of 100 tokens fills no window, and its 25 entries are a block; it has no entry of 128 tokens.
    short = planned("DeepSeek-V4-Flash", 4, 2, "--tokens", "100", "--kv-memory", "20")
    assert holds(short)[2] == (6608 - 1) // (1 + 0 + 2 * 1 + 2 + 4) == 734


def test_the_larger_stage_of_a_pipeline_decides_how_many_blocks_there_are(planned: PlanOfModel) -> None:
    made = planned("DeepSeek-V3.1", 8, 1, "--d-pp", "2", "--kv-memory", "20")
    assert holds(made)[0] == 20 * GIB // (31 * (LATENT + ROPE))
    assert "--draft-layers" not in made["text"]  # a D with a pipeline does not start with them


@pytest.mark.parametrize(("name", "layers"), [("DeepSeek-V3.1", 61), ("DeepSeek-V3.2", 61), ("GLM-4.5", 92)])
def test_layers_for_drafts_are_named_until_they_are_counted(name: str, layers: int, planned: PlanOfModel) -> None:
    without, with_drafts = planned(name, 8, 8), planned(name, 8, 8, "--draft-layers", "1")
    assert without["layers_for_drafts"] == 1
    assert "not counted: layers for drafts (MTP)" in without["text"] and "--draft-layers 1" in without["text"]
    assert "not counted" not in with_drafts["text"]
    descriptors, size = received(without, 0)
    assert received(with_drafts, 0) == (descriptors * (layers + 1) // layers, size * (layers + 1) // layers)


def test_a_model_without_layers_for_drafts_has_no_hint(planned: PlanOfModel) -> None:
    assert "not counted" not in planned("Kimi-K2", 8, 8)["text"]


@pytest.mark.parametrize(
    ("name", "p", "d", "heads", "layers", "link"),
    [("Qwen3-235B", 8, 2, 2, 94, (1504, 94 * MIB)), ("GLM-4.5", 16, 4, 2, 92, (1472, 92 * MIB))],
)
def test_heads_are_regrouped_to_whole_blocks_of_d(
    name: str, p: int, d: int, heads: int, layers: int, link: tuple[int, int], planned: PlanOfModel
) -> None:
    """`heads` of D's ranks; K and V of a block are a span each, and the spans of a rank of D come from four of P's."""
    made = planned(name, p, d, "--kv-memory", "20")
    span = BLOCK * heads * 128 * 2
    each = BLOCKS // 4 * layers * 2
    assert by_link(made) == {(rank, rank // 4): (each, each * span) for rank in range(p)} and link == (
        each,
        each * span,
    )
    assert made["mode"] == "regroup"
    assert made["busiest_rank_s"] == pytest.approx(each * DESCRIPTOR)  # longer than each * span / LINK
    assert made["busiest_decode_rank_s"] == pytest.approx(4 * each * span / LINK)
    blocks = 20 * GIB // (layers * 2 * span)
    assert holds(made) == (blocks, (blocks - 1) * BLOCK, (blocks - 1) // BLOCKS)


@pytest.mark.parametrize(("p", "d"), [(8, 16), (4, 8)])
def test_ranks_of_d_with_the_same_head_get_it_each(p: int, d: int, planned: PlanOfModel) -> None:
    made = planned("Qwen3-235B", p, d)
    for rank in range(d):
        assert received(made, rank) == (BLOCKS * 94 * 2, 188 * MIB)
    assert made["busiest_decode_rank_s"] == pytest.approx(188 * MIB / LINK)


def test_staging_and_a_communicator_are_allocated_by_a_p_that_could_exchange(planned: PlanOfModel) -> None:
    """20 slots (4 for each of 4 destinations, and two buffers of 2) of a rank's 8 blocks of a step and 2 more."""
    slot = (8192 // 8 // BLOCK + 2) * 4 * 2 * BLOCK * 128 * 2
    for d in (2, 8):
        made = planned("Qwen3-235B", 8, d)
        assert (made["staging"], made["exchange_buffers"]) == (20 * slot, 2 * 200 * MIB) == (50 * MIB, 400 * MIB)
        assert "50.0 MiB, and 400 MiB for HCCL's communicator, beyond vLLM's share" in made["text"]
    made = planned("Qwen3-235B", 8, 2, "--hccl-buffsize", "256", "--npu-memory", "64", "--weights", "40")
    assert made["exchange_buffers"] == 512 * MIB
    assert "which leaves 5243 MiB" in made["text"]  # 64 GiB x 0.08
    assert made["decode_memory"]["nbytes"] == int((64 * 0.92 - 40) * GIB)
    never = planned("Qwen3-235B", 8, 2, "--regroup", "never")
    assert never["staging"] == never["exchange_buffers"] == 0


def test_a_p_of_one_rank_cuts_heads_apart_token_by_token(planned: PlanOfModel) -> None:
    """It has nobody to exchange with, so an engine does not regroup, whatever it is told."""
    for regroup in ("auto", "always"):
        made = planned("Qwen3-235B", 1, 2, "--regroup", regroup)
        each = TOKENS * 94 * 2
        assert by_link(made) == {(0, d): (each, each * 2 * 128 * 2) for d in range(2)}
        assert (made["mode"], made["why"]) == ("direct", "each prefill rank has all heads that it sends")
        assert made["busiest_rank_s"] == pytest.approx(2 * each * DESCRIPTOR)


def test_a_block_of_d_that_fits_no_slot_is_written_by_those_who_have_its_heads(planned: PlanOfModel) -> None:
    """D's block has 1,024 tokens of two heads; a slot has three of P's with 256, for a share of 64."""
    small, large = (planned("Qwen3-Next", 8, 1, "--step-tokens", size) for size in ("512", "8192"))
    assert (small["mode"], small["why"]) == ("direct", "one block of decode does not fit a staging slot")
    assert small["staging"] == 20 * 3 * 256 * 2 * 2 * 256 * 2
    assert large["mode"] == "regroup"


def test_of_four_layers_of_qwen3_next_one_has_attention(planned: PlanOfModel) -> None:
    """The recurrence has 32 heads of 128 x 128, in two bytes; K of a block is as long as it on either side."""
    made = planned("Qwen3-Next", 4, 2, "--tokens", "32768", "--kv-memory", "20")
    state = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2
    assert f"48 layers (12 with attention, 36 with a state of {state} B)" in made["text"]
    k = 1 * 256 * 2  # of a token, on a rank of either side
    assert made["block_sizes"] == [32 // 4 * 128 * 128 * 2 // k, 32 // 2 * 128 * 128 * 2 // k] == [512, 1024]
    # A rank of D has one of two heads, and half of each state, in 3 rows each of q, k and v and one recurrence.
    attention, half = 12 * 2 * 32768 * k, 36 * state // 2
    pieces = 12 * 2 * 32768 // 512, 36 * (3 * 3 + 1) * 2
    assert by_link(made) == {(rank, rank // 2): (sum(pieces) // 2, (attention + half) // 2) for rank in range(4)}
    assert made["busiest_decode_rank_s"] == pytest.approx((attention + half) / LINK)
    assert made["mode"] == "direct"
    # Three groups of 12 layers with states, and one with attention. A block: K, which is the recurrence's too, V, rows.
    block = 12 * (2 * 1024 * k + 3 * (2 * 8 * 128 + 16 * 128) * 2)
    blocks, wanted = 20 * GIB // block, 32768 // 1024 + 3
    assert holds(made) == (blocks, (blocks - 1) // wanted * 32768, (blocks - 1) // wanted) == (1667, 1_540_096, 47)


def test_a_recurrence_in_float32_is_twice_as_long(planned: PlanOfModel) -> None:
    made = planned("Qwen3-Next", 4, 2, "--state-dtype", "fp32")
    assert "36 with a state of 2146304 B" in made["text"] and made["block_sizes"] == [1024, 2048]
    assert planned("Qwen3-Next", 4, 2, "--block-size", "128")["block_sizes"] == [128, 128]


def test_drafts_beside_states_take_a_row_and_a_state_more(planned: PlanOfModel) -> None:
    """13 layers with attention make groups of 13: one, and three for 36 states."""
    made = planned("Qwen3-Next", 2, 2, "--draft-layers", "1", "--kv-memory", "20")
    block = 13 * (2 * 1024 * 512 + 4 * (2 * 8 * 128 + 16 * 128) * 2)
    blocks, wanted = 20 * GIB // block, TOKENS // 1024 + 3 * 2
    assert holds(made) == (blocks, (blocks - 1) // wanted * TOKENS, (blocks - 1) // wanted)


def test_the_windows_of_gpt_oss_push_one_block(planned: PlanOfModel) -> None:
    """Behind 4,096 tokens the next one looks at 3,969 and later: the last block."""
    made = planned("gpt-oss-120b", 8, 2, "--kv-memory", "20")
    assert "36 layers (18 with a window of 128 tokens)" in made["text"]
    span = BLOCK * 4 * 64 * 2  # K or V of a block of four heads, on a rank of D
    for d in range(2):
        assert received(made, d)[1] == 18 * 2 * (BLOCKS + 1) * span
    assert made["busiest_decode_rank_s"] == pytest.approx(18 * 2 * (BLOCKS + 1) * span / LINK)
    # Two ranks of P share the block of a window, so half blocks of it are written.
    assert received(made, 0)[0] == 18 * 2 * (BLOCKS + 2)
    blocks, wanted = 20 * GIB // (18 * 2 * span), BLOCKS + 2  # a window of 128 tokens lies in two blocks
    assert holds(made) == (blocks, (blocks - 1) // wanted * TOKENS, (blocks - 1) // wanted) == (9102, 1_093_632, 267)


def test_of_six_layers_of_gemma_3_five_have_a_window(planned: PlanOfModel) -> None:
    """Ten layers look at all tokens, so the other 52 are six groups, which need nine blocks each."""
    made = planned("Gemma-3-27b", 2, 2, "--kv-memory", "20")
    assert "62 layers (52 with a window of 1024 tokens)" in made["text"]
    layer = 2 * BLOCK * 8 * 128 * 2
    begin = (TOKENS - 1024 + 1) // BLOCK * BLOCK
    assert received(made, 0)[1] == layer // BLOCK * (10 * TOKENS + 52 * (TOKENS - begin))
    assert holds(made)[2] == (20 * GIB // (10 * layer) - 1) // (BLOCKS + 6 * 9)


def test_three_layers_of_bamba_have_attention(planned: PlanOfModel) -> None:
    assert "32 layers (3 with attention, 29 with a state of " in planned("Bamba-9B", 2, 2)["text"]


@pytest.mark.parametrize(
    ("name", "words", "named"),
    [
        ("Kimi-K2", ["--kv-memory", "20", "--npu-memory", "64"], "--kv-memory = 20.0"),
        ("Kimi-K2", ["--kv-memory", "0"], "--kv-memory = 0.0"),
        ("Kimi-K2", ["--weights", "40"], "--weights = 40.0"),
        ("Kimi-K2", ["--npu-memory", "64"], "--npu-memory = 64.0"),
        ("Kimi-K2", ["--npu-memory", "32", "--weights", "40"], "nothing is left for the cache"),
        ("Kimi-K2", ["--npu-memory", "64", "--weights", "4", "--gpu-memory-utilization", "92"], "utilization = 92.0"),
        ("Kimi-K2", ["--hccl-buffsize", "0"], "--hccl-buffsize = 0"),
        ("Kimi-K2", ["--rope-dim", "576"], "--rope-dim = 576"),
        ("Kimi-K2", ["--rope-dim", "-1"], "--rope-dim = -1"),
        ("GLM-4.5", ["--rope-dim", "64"], "--rope-dim = 64"),
        ("GLM-4.5", ["--state-dtype", "fp32"], "--state-dtype = 'fp32'"),
        ("Bamba-9B", ["--kv-memory", "20"], "vllm-ascend has no such states"),
        ("Qwen3-Next", ["--kv-memory", "20", "--block-size", "128"], "--block-size is given"),
        ("gpt-oss-120b", ["--d-pp", "2"], "--d-pp = 2"),
        ("DeepSeek-V4-Flash", ["--d-pp", "2"], "--d-pp = 2"),
        ("DeepSeek-V4-Flash", ["--block-size", "256"], "--block-size = 256"),
        ("DeepSeek-V4-Flash", ["--p-dcp", "2"], "--p-dcp = 2"),
        ("DeepSeek-V4-Flash", ["--dtype", "fp8"], "--dtype = '1 bytes a number'"),
    ],
)
def test_sizes_that_do_not_belong_together_are_named(
    name: str, words: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--p-tp", "2", "--d-tp", "1", "--model", written(tmp_path, name), *words]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("PD-CONF-003") and named in printed.err
    assert not printed.out and printed.err.count("\n") == 1


@pytest.mark.parametrize("ratios", [[4] * 42, "4", [8] * 43, [[4]] * 43, [4] * 43, [0, 128] * 22])
def test_ratios_that_are_not_those_of_all_layers_are_named(
    ratios: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(tmp_path, "DeepSeek-V4-Flash", compress_ratios=ratios)
    assert main(["plan", "--p-tp", "2", "--d-tp", "1", "--model", model]) == 2
    assert "compress_ratios" in capsys.readouterr().err


@pytest.mark.parametrize("interval", [0, -4, "four", True])
def test_an_interval_that_is_none_is_named(interval: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = written(tmp_path, "Qwen3-Next", full_attention_interval=interval)
    assert main(["plan", "--p-tp", "2", "--d-tp", "1", "--model", model]) == 2
    assert f"full_attention_interval = {interval!r}" in capsys.readouterr().err
