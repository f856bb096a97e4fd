# SPDX-License-Identifier: Apache-2.0
"""Modes of an engine beside its cache, each in a pair: scheduling, priorities, prefix caches, dtypes, executor, LoRA.

Other files have ranks and experts, pipelines, drafts, Ray, releases of vLLM, and routers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from continued import check_answers_of_another
from pairs import Pair, PairMaker, counter, fresh_prompt, reference_answers, wait_for_free_blocks
from safetensors.torch import save_file

from tools.support.checks import eventually, fresh_salt
from tools.support.client import body_of, complete, gather, post
from tools.support.cluster import Cluster
from tools.support.compare import AnswerTally
from tools.support.models import ensure
from tools.support.spec import EngineSpec

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

BLOCK, LENGTHS = 32, (20, 31, 32, 33, 300, 700)
# vLLM's choice for one worker, which is then in the scheduler's process. On a CPU it makes it a process of its own, for
# OpenMP's sake, unless this is 0.
UNIPROC = (("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),)
NO_ASYNC, NO_PREFIXES = ("--no-async-scheduling",), ("--no-enable-prefix-caching",)


@dataclass(frozen=True)
class Mode:
    """Additional arguments of P and of D."""

    p: tuple[str, ...] = ()
    d: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    chunk: int = 256
    tie: float = 0.0  # of logits: one engine's answer may depend on the order of additions


MODES = {
    "async scheduling off": Mode(NO_ASYNC, NO_ASYNC),
    "async scheduling off on P": Mode(p=NO_ASYNC),
    "async scheduling off on D": Mode(d=NO_ASYNC),
    "no prefix cache": Mode(NO_PREFIXES, NO_PREFIXES),
    "no prefix cache on P": Mode(p=NO_PREFIXES),
    "no prefix cache on D": Mode(d=NO_PREFIXES),
    "chunks that cut blocks": Mode(chunk=50),
    "bfloat16": Mode(("--dtype", "bfloat16"), ("--dtype", "bfloat16"), tie=0.05),
    "UniProc executor, no prefix cache on D": Mode(d=NO_PREFIXES, environment=UNIPROC),
}


def start(cluster: Cluster, allowed: list[str], make_pair: PairMaker, mode: Mode, name: str) -> Pair:
    """Start the pair of a mode. Its engines have logs of their own: an engine of the same name would go on in one."""
    word = "-".join(name.lower().split())
    same: dict[str, Any] = {"block_size": BLOCK, "chunk": mode.chunk, "max_seqs": 16}
    same["environment"] = dict(mode.environment)
    p, d = (
        EngineSpec(f"{word}-{side}", ensure("gqa"), role=role, extra=extra, arguments=words, **same)
        for side, role, words, extra in (
            ("p", "kv_producer", mode.p, cluster.push_config()),
            ("d", "kv_consumer", mode.d, cluster.push_config(*allowed)),
        )
    )
    pair = make_pair(*cluster.start(p, d))
    return replace(pair, tally=AnswerTally(tie=mode.tie, excused_share=0.25)) if mode.tie else pair


def exercise(pair: Pair, name: str) -> None:
    for length in LENGTHS:
        pair.check([fresh_prompt(length)], name=name)
    pair.check([fresh_prompt(25 + 40 * i) for i in range(8)], name=f"{name}, 8 at once")


CI_MODES = ("UniProc executor, no prefix cache on D",)  # the others' code runs in CI in other tests


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci if name in CI_MODES else pytest.mark.slow) for name in MODES]
)
def test_a_mode(
    name: str,
    cluster: Cluster,
    allowed: list[str],
    ports: list[int],
    make_pair: PairMaker,
    progress: Callable[[str], None],
) -> None:
    pair = start(cluster, allowed, make_pair, MODES[name], name)
    try:
        exercise(pair, name)
        if not MODES[name].tie:
            check_answers_of_another(pair, ports[-1])
        for engine, words in ((pair.prefill, MODES[name].p), (pair.decode[0], MODES[name].d)):
            head = fresh_prompt(5 * BLOCK)
            before = counter(engine, "vllm:prefix_cache_hits_total")
            for tail in (1, 2):
                post(engine.url, body_of([*head, *fresh_prompt(tail)], 1))
            hits = counter(engine, "vllm:prefix_cache_hits_total") > before
            assert hits is (words != NO_PREFIXES), "prefixes are cached, or not"
            in_one = MODES[name].environment == UNIPROC
            assert ("(Worker" in engine.log.read_text(errors="replace")) is not in_one, "workers are processes, or not"
        progress(f"figure: {name}: {pair.tally.summary()}")
    finally:
        cluster.stop(pair.front, *pair.decode, pair.prefill)


@pytest.mark.ci
def test_priorities(
    cluster: Cluster, allowed: list[str], make_pair: PairMaker, progress: Callable[[str], None]
) -> None:
    """P and D schedule by priority: an urgent request that comes last overtakes requests that wait, loads and all.

    D has room for two requests, and blocks for less than two that have grown. So it preempts what is least urgent.
    """
    words = ("--scheduling-policy", "priority")
    same: dict[str, Any] = {"block_size": BLOCK, "max_len": 512, "arguments": words}
    d_extra, bytes_of_block = cluster.push_config(*allowed), BLOCK * 4096
    p, d = cluster.start(
        EngineSpec("priority-p", ensure("gqa"), role="kv_producer", chunk=256, extra=cluster.push_config(), **same),
        EngineSpec("priority-d", ensure("gqa"), role="kv_consumer", max_seqs=2, kv_bytes=24 * bytes_of_block, extra=d_extra, **same),
    )  # fmt: skip
    pair = make_pair(p, d)
    try:
        prompts = [fresh_prompt(300) for _ in range(8)]
        expected = reference_answers(p, prompts, 150)
        bodies = [body_of(prompt, 150, priority=5 + index % 3) for index, prompt in enumerate(prompts)]
        bodies[-1]["priority"] = -1
        failed, free = pair.failed_transfers(), pair.free_counts()
        tokens = pair.loaded_tokens()
        with ThreadPoolExecutor(1) as clients:
            first = clients.submit(gather, pair.front.url, bodies[:-1])
            eventually(lambda: counter(d, "vllm:generation_tokens_total") > 20, "the first ones run on D")
            urgent = complete(pair.front.url, bodies[-1])
            answers = [*first.result(240.0), urgent]
        assert pair.failed_transfers() == failed
        for prompt, want, got in zip(prompts, expected, answers, strict=True):
            pair.tally.check(
                "priorities", prompt, want.tokens, got.tokens, p.url, body={"cache_salt": fresh_salt("gap")}
            )
        assert pair.loaded_tokens() - tokens == sum(map(len, prompts)), "each prompt is loaded once"
        ends = sorted(one.started + one.seconds for one in answers)
        assert urgent.started + urgent.seconds < ends[-2], "what came last is not served last"
        assert counter(d, "vllm:num_preemptions_total") > 0, "D had blocks for all: the test shows nothing"
        wait_for_free_blocks((p, d), free)
        progress(f"figure: priorities: {pair.tally.summary()}")
    finally:
        cluster.stop(pair.front, d, p)


def adapter(folder: Path) -> Path:
    """Write a random LoRA adapter for the projections of each layer, which changes the answers."""
    config = json.loads((ensure("gqa") / "config.json").read_text())
    rank, hidden, head = 8, config["hidden_size"], config["head_dim"]
    out = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    dice, weights = torch.Generator().manual_seed(3), {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in out.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, hidden, generator=dice) * 0.1
            weights[f"{at}.lora_B.weight"] = torch.randn(size, rank, generator=dice) * 0.1
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter_config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": sorted(out), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**adapter_config, "base_model_name_or_path": "model"}))
    return folder


@pytest.mark.ci
def test_lora(cluster: Cluster, allowed: list[str], ports: list[int], make_pair: PairMaker, tmp_path: Path) -> None:
    """A base model and an adapter side by side: an adapter has KV of its own, also for the same prompt.

    An answer of the adapter's goes on, too.
    """
    words = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={adapter(tmp_path / 'tuned')}")
    pair = start(cluster, allowed, make_pair, Mode(words, words), "lora")
    try:
        prompts = [fresh_prompt(length) for length in (20, 97, 300, 700)]
        answers: dict[str, list[tuple[int, ...]]] = {}
        for name in ("model", "tuned"):
            before, bodies = pair.loaded_tokens(), [body_of(prompt, 12, model=name) for prompt in prompts]
            alone = gather(pair.prefill.url, [{**body, "cache_salt": "alone"} for body in bodies])
            pair_answers = gather(pair.front.url, bodies)
            answers[name] = [one.tokens for one in alone]
            assert [one.tokens for one in pair_answers] == answers[name], name
            assert pair.loaded_tokens() - before == sum(map(len, prompts)), name
        assert answers["model"] != answers["tuned"], "the adapter changes nothing: the test shows nothing"
        check_answers_of_another(pair, ports[-1], "tuned")
    finally:
        cluster.stop(pair.front, *pair.decode, pair.prefill)
