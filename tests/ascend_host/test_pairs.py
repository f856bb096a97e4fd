# SPDX-License-Identifier: Apache-2.0
"""Pairs under vllm-ascend: tokens equal to one of its engines', every byte checked by `verify: full`.

The cells of one set share its engines. Every commit runs the first five sets; runs of all tests run all sets. They run
under host_build.BASE, those with "older" in front and those with PCP under the release before.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_sets import BLOCK, CHUNK, INT8_APART, SHORT_BLOCKS, Engines, Machine, Side, additional, few_blocks
from grammars import check_grammars
from host_build import OLDER
from kind_pairs import learn_of_first_tokens
from pairs import Pair, counter, fresh_prompt, reference_answers
from seen import EFFECTS, DeviceProcess, processes

from tools.support.checks import Drafted, drafted, eventually, first_tokens, fresh_salt, front_counter
from tools.support.client import RequestFailed, TimedAnswer, attempt, body_of, complete, gather, post
from tools.support.cluster import Cluster, fresh_directory
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess, RunningServer
from tools.support.models import RECIPES, ensure
from tools.support.small import switches_of
from tools.support.speech import RESPONSES, Spoken, read

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

Prompts = list[list[int]]
TOKENS = 12
MANY = 12
LATE, DELAY = 3000, 1000
REGROUPED = {"regroup": "always"}
OWN_KERNELS = {**REGROUPED, "regroup_kernels": "own"}
EXPERTS = ("--enable-expert-parallel",)
ONE_AT_A_TIME = ("--no-async-scheduling",)
RECOMPUTES = additional(recompute_scheduler_enable=True)
EAGLE3 = {"method": "eagle3", "model": "spec-eagle3", "num_speculative_tokens": 2}
EAGLE = {"method": "eagle", "model": "spec-eagle", "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DFLASH = {"method": "dflash", "model": "mla-dflash", "num_speculative_tokens": 3}
MTP3 = {"method": "mtp", "num_speculative_tokens": 3}
CACHED = ("--enable-prefix-caching",)  # states are kept at the ends of blocks then
FULL = "FULL_DECODE_ONLY"
LONG = 4096  # an indexer picks 2,048 tokens, whatever the model's index_topk: its keys affect answers to longer prompts
ROOM = ("--kv-cache-memory-bytes", str(64 << 20))
DSA_MTP: dict[str, Any] = {
    "model": "dsv32-mtp",
    "dtype": "bfloat16",
    "flags": ROOM,
    "draft": MTP3,
    "max_len": LONG,
}
FIELD_DSA_MTP: dict[str, Any] = {**DSA_MTP, "flags": (*EXPERTS, *ROOM)}
FIELD_GLM_MTP: dict[str, Any] = {**FIELD_DSA_MTP, "model": "glm5-mtp"}
DSV4_MTP: dict[str, Any] = {
    "model": "dsv4-mtp-steady",
    "dtype": "bfloat16",
    "flags": SHORT_BLOCKS,
    "draft": MTP3,
}
KEYS_IN_INT8 = ("--attention_config.indexer_kv_dtype", "int8")  # latents stay as they are
INT8 = ("--kv-cache-dtype", "int8")
C8 = (*INT8, *KEYS_IN_INT8)
QUANTISED = ("--quantization", "ascend")
C8_IN_RUNS = (*C8, *additional(c8_enable_reshape_optim=True))
# vllm-ascend's own: with its recompute scheduler D keeps in the host's memory what it preempts.
OFFLOAD = {
    "kv_connector": "PreemptOffloadConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
}
GRAMMAR = {"regex": "[a-z]{2000}"}
FEW_STATES = ("--max-num-seqs", "16")  # with graphs each must have blocks for its states
# In bfloat16 vllm-ascend looks for norms to fuse with a quantisation, by operators that have no definition here.
UNFUSED = {"ascend_compilation_config": {"fuse_norm_quant": False}}
NOT_FUSED = additional(**UNFUSED)
RECOMPUTES_UNFUSED = additional(recompute_scheduler_enable=True, **UNFUSED)
# Of vllm-ascend's own configurations, 21 have the first (hidden states divided by tokens between the layers), most as a
# variable, and 38, 29 and 2 one of the others, which without quantised weights change nothing.
DIVIDED, AS_VARIABLE = {"enable_flashcomm1": True}, {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"}
FUSED = {"enable_fused_mc2": 1, "enable_mlapo": True, "weight_nz_mode": 2}
# Of switches that no note shows, by what the log says.
SAID = {"FlashComm1 is enabled.": {*DIVIDED, *AS_VARIABLE}, "enable_dsa_cp will be": {"enable_dsa_cp"}}
HEAD = {"finegrained_tp_config": {"lmhead_tensor_parallel_size": 2}}
GRAPHS = {"ascend_compilation_config": {"enable_npugraph_ex": True}, "enable_cpu_binding": True}
OFTEN = {"expert_heat_collection_interval": 8, "algorithm_execution_interval": 4, "eplb_policy_type": 1}
BALANCED = additional(eplb_config={"dynamic_eplb": True, **OFTEN})
FEW = few_blocks(17)  # with the null block, room for two and a half requests
HYBRID_BLOCK = 2 * BLOCK  # beside states, vllm-ascend makes a group's block of several of the kernels'


@contextmanager
def started(engines: Engines, machine: Machine, progress: Callable[[str], None]) -> Iterator[Pair]:
    """Start a set; at its end all blocks of both engines must be free, and not too many answers excused."""
    if machine.stands_in:
        progress(f"{engines}: STAND_IN_SEED={machine.environment['STAND_IN_SEED']}")
    with Cluster(fresh_directory("ascend_host"), progress, forks=machine.forks) as cluster:
        pair = engines.start(machine, cluster)
        if RECIPES[engines.model].recomputes_last:
            if engines.starts_with_p_token:
                learn_of_first_tokens(pair)
            else:
                pair.left = 1
        try:
            yield pair
        finally:
            if pair.cutter is not None:
                pair.cutter.close()
        every = (pair.prefill, *pair.decode)
        assert pair.free_counts() == {engine.name: engine.ranks * engine.blocks() for engine in every}
        progress(f"{engines}: {pair.tally.summary()}; all blocks free")
        pair.tally.check_share()
    assert not cluster.leaks, cluster.leaks


class Running(ExitStack):
    """The engines of one set at a time. Not a parametrized fixture, because pytest would reorder the cells."""

    def __init__(self, machines: Callable[[str], Machine], progress: Callable[[str], None]) -> None:
        super().__init__()
        self._machines, self._progress = machines, progress
        self._pairs: dict[str, Pair] = {}

    def pair(self, engines: Engines) -> Pair:
        if engines.title not in self._pairs:
            self._pairs.clear()
            self.close()
            machine = self._machines(engines.release)
            self._pairs[engines.title] = self.enter_context(started(engines, machine, self._progress))
        return self._pairs[engines.title]


@pytest.fixture(scope="module")
def running(hosts: Callable[[str], Machine], progress: Callable[[str], None]) -> Iterator[Running]:
    with Running(hosts, progress) as running:
        yield running


@pytest.fixture
def pair(engines: Engines, running: Running) -> Pair:
    return running.pair(engines)


# ---- cells


def check(engines: Engines, pair: Pair, lengths: list[int]) -> None:
    """Compare answers, each of which starts with P's token and continues with D's."""
    vocab = RECIPES[engines.model].vocab
    taken = sum(map(first_tokens, pair.decode))
    # MLA in bfloat16 has two ways. At unequal sizes each token may be a tie, at which a comparison ends: of twelve
    # tokens in 40 % of answers. Where one layer decides most, ties are as frequent whatever the attention.
    coarse = not engines.one_way or RECIPES[engines.model].one_layer_decides
    ties = engines.dtype == "bfloat16" and coarse and engines.p.tp != engines.d.tp
    tokens = TOKENS // 2 if ties else TOKENS
    pair.check([fresh_prompt(length, vocab) for length in lengths], tokens, str(engines))
    wanted = len(lengths) if engines.starts_with_p_token else 0
    eventually(lambda: sum(map(first_tokens, pair.decode)) - taken == wanted, f"{wanted} first tokens of P are D's")


def edges(engines: Engines, pair: Pair) -> None:
    for length in (2, 20, BLOCK - 1, BLOCK, BLOCK + 1):
        check(engines, pair, [length])


def one_token(engines: Engines, pair: Pair) -> None:
    pair.check([fresh_prompt(1, RECIPES[engines.model].vocab)], TOKENS)


def chunks(engines: Engines, pair: Pair) -> None:
    for length in (CHUNK + 1, 700, 2 * CHUNK + 1, 1500):
        check(engines, pair, [length])


def chosen(engines: Engines, pair: Pair) -> None:
    """Prompts of which each layer's indexer leaves tokens out."""
    for length in (2300, 3000):
        check(engines, pair, [length])


def entries(engines: Engines, pair: Pair) -> None:
    """Prompts that end about the end of an entry for 4 tokens, for 128, and of a window."""
    for length in (3, 4, 5, 31, 33, 255, 256, 258):
        check(engines, pair, [length])


def blocks(engines: Engines, pair: Pair) -> None:
    """Prompts that end about the end of a block beside states, which has several of the kernels' blocks."""
    for length in (2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK, 6 * BLOCK + 1):
        check(engines, pair, [length])


def many(engines: Engines, pair: Pair) -> None:
    """Send many requests at once.

    Where a prefill merges parts that were rounded separately (MLA), prompts must be cut alike: all fit into one step.
    """
    first, more = (30, 80) if engines.one_way else (5, 6)
    lengths = [first + more * i for i in range(MANY)]
    assert engines.one_way or sum(lengths) < CHUNK
    check(engines, pair, lengths)


def judge_each(
    engines: Engines, pair: Pair, prompts: Prompts, expected: list[TimedAnswer], answers: list[TimedAnswer]
) -> None:
    for p, want, got in zip(prompts, expected, answers, strict=True):
        pair.judge_all(f"{engines}, {len(p)} tokens", p, want, got)


def at_once(engines: Engines, pair: Pair, prompts: Prompts, tokens: int) -> tuple[list[TimedAnswer], list[TimedAnswer]]:
    """Compare the pair's answers to prompts that come together. Return one engine's and these."""
    expected = reference_answers(pair.reference, prompts, tokens, **pair.asked)
    answers = gather(pair.front.url, [body_of(p, tokens, **pair.asked) for p in prompts])
    judge_each(engines, pair, prompts, expected, answers)
    return expected, answers


def without_blocks(engines: Engines, pair: Pair) -> None:
    """More requests at once than D has blocks for: a step computes nothing, and those that run go on behind it."""
    (d,) = pair.decode

    def lost() -> int:
        drops = d.log.read_text(errors="replace").count("Recompute triggered for request")
        return counter(d, "vllm:num_preemptions_total") + drops

    before = lost()
    at_once(engines, pair, [fresh_prompt(5 + 6 * i, RECIPES[engines.model].vocab) for i in range(MANY)], TOKENS)
    assert lost() > before, "D took no block back: the test shows nothing"


def penalised(engines: Engines, pair: Pair) -> None:
    """Penalties: D's workers must count P's token as generated."""
    (d,), vocab = pair.decode, RECIPES[engines.model].vocab
    taken, lengths = first_tokens(d), (BLOCK + 1, 200)
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2}
    for length in lengths:
        prompt = fresh_prompt(length, vocab)
        body = body_of(prompt, 3 * TOKENS, **penalties, **pair.asked)
        asked = [pair.reference.url, pair.front.url]
        want, got = (complete(url, {**body, "cache_salt": fresh_salt("once")}) for url in asked)
        assert want.tokens == got.tokens, (want, got)  # at a tie an engine would be asked without the penalties
        pair.judge_all(f"{engines}, {length} tokens penalised", prompt, want, got)
    eventually(lambda: first_tokens(d) - taken == len(lengths), "both first tokens of P are D's")


def grammars(engines: Engines, pair: Pair) -> None:
    """Structured outputs: P samples the first token under the grammar, and D's grammar goes on behind it.

    With the older release D samples it: its grammars take no token from outside.
    """
    check_grammars(pair, first=engines.starts_with_p_token and engines.release != OLDER)


def drafts(engines: Engines, pair: Pair) -> None:
    """The drafts right behind a prompt are those of a D that has computed it itself: right text does not show that.

    Some differ from run to run on one engine, up to one in seven: D's first step is a prefill in one case and a padded
    step of one token in the other. Where P's drafter does not get the prompt's last token, half differ. Of 48 prompts
    more than 12 differ in 15 runs of 1,000 if one in seven does, and no more than 12 in 1 of 1,000 if half do. With
    unequal TP in bfloat16 the two round differently, too, and 6 to 13 of 48 differ. If one in four does, of 144 more
    than 52 differ in 1 run of 1,000, and no more than 52 in 1 of 1,000 if half do.
    In bfloat16 these two ways round differently (MLA: 14 of 24 alike, D alone 24 of 24). There D alone has one token in
    its last chunk, which it computes as the pushed D does (23 and 24 of 24). vllm-ascend's recompute scheduler begins
    behind a load with placeholders for drafts, so that a graph fits: one step more, in which none is accepted.
    Behind P's token D drafts from the second one on: then D alone has the first token in its prompt. vLLM pads the step
    that computes one token to a step with drafts, too. Behind such a step 0.30 drafts with keys that are not the
    request's (plugin/ascend_host/repairs.py), so a D with attention of heads is `repaired`.
    """
    (d,), behind = pair.decode, int(engines.starts_with_p_token)
    rounded = engines.dtype == "bfloat16"
    count, most = (144, 52) if rounded and engines.p.tp != engines.d.tp else (48, 12)
    lengths = [CHUNK + 1 - behind if rounded else 20 + 9 * i for i in range(count)]
    prompts = [fresh_prompt(length, RECIPES[engines.model].vocab) for length in lengths]
    pushed, alone = [], []
    for prompt in prompts:
        with drafted(d) as counted:
            answer = complete(pair.front.url, body_of(prompt, 5, cache_salt=fresh_salt("drafts")))
        pushed.append(counted())
        with drafted(d) as counted:
            begun = [*prompt, *answer.tokens[:behind]]
            complete(d.url, body_of(begun, 5 - behind, cache_salt=fresh_salt("drafts")))
        alone.append(counted())
    if "recompute" in engines.title or behind:
        placeholders = engines.d.drafts or int(engines.draft["num_speculative_tokens"])
        pushed = [Drafted(one.steps - 1, one.tokens - placeholders, one.accepted) for one in pushed]
    alike = sum(one == other for one, other in zip(alone, pushed, strict=True))
    accepted = [sum(one.accepted for one in each) for each in (alone, pushed)]
    pair.cluster.progress(
        f"figure: {engines}: drafts behind {alike} of {len(prompts)} prompts as alone, {accepted[1]} accepted, alone {accepted[0]}"
    )
    assert accepted[0] > len(prompts), f"drafts that are never right prove nothing: {alone}"
    assert len(prompts) - alike <= most, list(zip(prompts, alone, pushed, strict=True))


def replayed(engines: Engines, pair: Pair) -> None:
    """Each engine that has captured graphs has replayed some."""
    said = {OLDER: "Replaying aclgraph"}.get(engines.release, "ACL graph replay is active")
    for side, engine in ((engines.p, pair.prefill), (engines.d, pair.decode[0])):
        assert (said in engine.log.read_text(errors="replace")) is bool(side.graphs), engine.name


def switched(engines: Engines, pair: Pair) -> None:
    """Each engine shows those of its switches that have an effect that can be seen."""
    config = json.loads((ensure(engines.model) / "config.json").read_text())
    of = [switches_of((*engines.flags, *side.flags)) for side in (engines.p, engines.d)]
    asked = EFFECTS.keys() & (of[0] | of[1])
    for side, has, engine in zip((engines.p, engines.d), of, (pair.prefill, pair.decode[0]), strict=True):
        log = engine.log.read_text(errors="replace")
        for words, by in SAID.items():
            assert (words in log) is not by.isdisjoint({*has, *side.switches}), (engine.name, words)
        if not (ranks := noted(engine)):
            continue  # NPUs make no notes
        assert len(ranks) == side.devices, (engine.name, len(ranks))
        # An effect that no side asks for is not looked for: others may have it too, and one rank has all of a weight.
        for name in asked:
            shown = [EFFECTS[name](rank, config) for rank in ranks]
            assert shown == [name in has] * len(ranks), (engine.name, name, shown)


def kernels(engines: Engines, pair: Pair) -> None:
    """Each rank of P gathers with our kernels where the set says so, and nowhere else."""
    check(engines, pair, [2 * BLOCK])
    own_kernels = engines.p.keys.get("regroup_kernels") == "own"
    for rank in noted(pair.prefill):
        pair.cluster.progress(f"figure: {engines}: kernels of a rank: {sorted(rank.kernels)}")
        assert ("vapd_gather" in rank.kernels) is own_kernels, rank.kernels


def noted(engine: RunningServer) -> list[DeviceProcess]:
    """Return the notes of an engine's ranks. An engine on NPUs makes none."""
    environment = engine.spec.environment if isinstance(engine, EngineProcess) else {}
    return processes(Path(environment["STAND_IN_NOTES"])) if "STAND_IN_NOTES" in environment else []


def balanced(engines: Engines, pair: Pair) -> None:
    """Each engine has found a better place for some experts while it answered."""
    for engine in (pair.prefill, pair.decode[0]):
        log = engine.log.read_text(errors="replace")
        imbalances = re.findall(r"Expert hotness imbalance, current: mean=(\S+) .*, updated: mean=(\S+) ", log)
        assert any(float(updated) < float(current) for current, updated in imbalances), (engine.name, imbalances)


def state_prefixes(engines: Engines, pair: Pair) -> None:
    """With a draft model vLLM does not use the last block of a cached prefix.

    D keeps the attention that it has of a prefix, also where it has no state, and loads the state with the rest.
    """
    dropped = HYBRID_BLOCK if engines.draft else 0
    d_prefixes = pair.check_prefix_of_states(HYBRID_BLOCK, dropped=dropped)
    assert d_prefixes == [2 * HYBRID_BLOCK - dropped] * 3 or engines.d.dp > 1, d_prefixes  # the other rank has nothing


def long_prefixes(engines: Engines, pair: Pair) -> None:
    """A prefix on P of a whole block of each group: vLLM uses no other length of several groups' prefixes."""
    vocab = RECIPES[engines.model].vocab
    head = fresh_prompt(32 * 128, vocab)
    before = counter(pair.prefill, "vllm:prefix_cache_hits_total")
    complete(pair.prefill.url, body_of(head, 1))  # to P only
    pair.check([[*head, *fresh_prompt(50, vocab)]], TOKENS, "a prefix on P")
    hits = before + len(head)
    eventually(lambda: counter(pair.prefill, "vllm:prefix_cache_hits_total") >= hits, "P takes what it has cached")


def prefixes(engines: Engines, pair: Pair) -> None:
    """With a draft model vLLM does not use the last block of a cached prefix.

    Of D's ranks behind one server vLLM chooses another each time, and only one has a prefix.
    """
    dropped = BLOCK if engines.draft else 0
    if engines.d.dp == engines.d.servers:
        pair.check_prefix_on_decode(BLOCK, dropped)
    pair.check_prefix_on_prefill(BLOCK, dropped)


def without_a_load(engines: Engines, pair: Pair) -> None:
    """D computes a prompt by itself behind a prefix that it has cached, as when there is no P.

    vllm-ascend's recompute scheduler begins each request with placeholders for drafts (decode/scheduler/role.py).
    """
    (d,), vocab = pair.decode, RECIPES[engines.model].vocab
    bodies = [
        body_of(fresh_prompt(length, vocab), TOKENS, cache_salt=fresh_salt("cached"), **pair.asked)
        for length in (3 * BLOCK + 5, 4 * BLOCK + 1)
    ]
    hits = counter(d, "vllm:prefix_cache_hits_total")
    answers = [[complete(d.url, body) for _ in range(2)] for body in bodies]
    cached = (2 + 3) * BLOCK  # with a draft model vLLM does not use the last cached block
    assert counter(d, "vllm:prefix_cache_hits_total") - hits == cached
    for body, (anew, behind) in zip(bodies, answers, strict=True):  # at a tie D is asked again, behind prefixes too
        prompt = body["prompt"]
        pair.judge_all(f"{engines}, {len(prompt)} tokens behind a prefix", prompt, anew, behind)


def preempted(engines: Engines, pair: Pair) -> None:
    """More answers than D has blocks for. P has enough: vllm-ascend never preempts on a P.

    D computes again what it has preempted, as a prefill, which MLA rounds otherwise than a decode. So does D alone.
    """
    (d,) = pair.decode
    prompts = [fresh_prompt(BLOCK + 40 * i, RECIPES[engines.model].vocab) for i in range(6)]
    before = counter(d, "vllm:num_preemptions_total")
    expected, answers = at_once(engines, pair, prompts, 2 * BLOCK)
    assert counter(d, "vllm:num_preemptions_total") > before, "D took no block back: the test shows nothing"
    assert not pair.failed_transfers()
    if not engines.one_way:
        alone = gather(d.url, [body_of(p, 2 * BLOCK, cache_salt=fresh_salt("alone")) for p in prompts])
        others = [sum(a.tokens != b.tokens for a, b in zip(expected, each, strict=True)) for each in (answers, alone)]
        pair.cluster.progress(f"figure: {engines}: {others[0]} of {len(prompts)} otherwise than P, D alone {others[1]}")


def offloaded(engines: Engines, pair: Pair) -> None:
    """Check that the other connector keeps and loads what D preempts; ours is not asked for it a second time."""
    preempted(engines, pair)
    log = pair.decode[0].log.read_text(errors="replace")
    kept = set(re.findall(r"Created preempt offload state for request (\S+):", log))
    reloaded = set(re.findall(r"Prepared preempt offload H2D load for request (\S+):", log))
    assert reloaded and reloaded <= kept, (kept, reloaded)  # what D's prefix cache still has is not loaded
    assert "Recompute triggered for request" not in log, "nothing is dropped"


def standing_still(engines: Engines, pair: Pair) -> None:
    """Loaded requests hold all of D's blocks, and each needs one more: the last in the queue gives its own back.

    P's server is stopped until D holds blocks for all three, so that none begins before.
    """
    (d,), p = pair.decode, pair.prefill
    assert isinstance(p, EngineProcess) and d.blocks() == 5 + 5 + 6
    prompts = [fresh_prompt(count * BLOCK, RECIPES[engines.model].vocab) for count in (5, 5, 6)]
    expected = reference_answers(pair.reference, prompts, TOKENS, **pair.asked)
    with ThreadPoolExecutor(1) as pool:
        os.kill(p.process.pid, signal.SIGSTOP)
        try:
            asked = pool.submit(gather, pair.front.url, [body_of(one, TOKENS, **pair.asked) for one in prompts])
            eventually(lambda: not d.free_blocks(), "D holds blocks for all")
        finally:
            os.kill(p.process.pid, signal.SIGCONT)
        judge_each(engines, pair, prompts, expected, asked.result())
    gave_back = d.log.read_text(errors="replace").count("PD-XFER-009")
    assert 0 < gave_back < len(prompts), f"{gave_back} requests have given their blocks back"


def dropped(engines: Engines, pair: Pair) -> None:
    """vllm-ascend's recompute scheduler ends a request without blocks as if it were complete.

    Behind our metaserver each whole answer has all its tokens; a request that is dropped too often gets an error.
    Tokens alone are compared: with log-probabilities a whole answer begins anew.
    """
    (d,) = pair.decode
    prompts = [fresh_prompt(BLOCK + 40 * i, RECIPES[engines.model].vocab) for i in range(6)]
    expected = reference_answers(pair.reference, prompts, 2 * BLOCK)

    def ask(prompt: list[int]) -> list[int] | RequestFailed:
        try:
            tokens: list[int] = post(pair.front.url, body_of(prompt, 2 * BLOCK))["choices"][0]["token_ids"]
        except RequestFailed as failed:
            return failed
        return tokens

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    whole = 0
    for p, want, got in zip(prompts, expected, answers, strict=True):
        if isinstance(got, RequestFailed):
            assert "PD-META-022" in got.text, got
            continue
        pair.judge(f"{engines}, {len(p)} tokens", p, want.tokens, got)
        whole += 1
    drops = set(re.findall(r"Recompute triggered for request (\w+-\w+)-", d.log.read_text(errors="replace")))
    assert len(drops) > len(prompts) - whole, "no request was dropped and answered after all: the test shows nothing"


def dropped_streams(engines: Engines, pair: Pair) -> None:
    """Dropped streams continue after their clients' last token.

    Each complete one has one engine's tokens; one that cannot continue ends with an error. D begins with the tokens
    that it had put out before it dropped them, and the router leaves out what the client has. Every other one is
    written under a grammar, which D advances over these tokens. Only where answers are exact: of so many tokens nearly
    each answer has a tie elsewhere, and at a tie an engine is asked without the grammar.
    """
    (d,) = pair.decode
    prompts = [fresh_prompt(BLOCK + 40 * i, RECIPES[engines.model].vocab) for i in range(6)]
    bodies = [body_of(prompt, 2 * BLOCK, **pair.asked) for prompt in prompts]
    for body in bodies[::2]:
        body["structured_outputs"] = GRAMMAR
    expected = gather(pair.reference.url, [{**body, "cache_salt": fresh_salt("alone")} for body in bodies])
    given = counter(d, "vllm:ascend_pd_answers_continued_total")
    answers = attempt(pair.front.url, bodies)
    for p, want, got in zip(prompts, expected, answers, strict=True):
        if isinstance(got, RequestFailed):
            assert "PD-META-" in got.text, got
            continue
        assert not isinstance(got, BaseException), got
        pair.judge_all(f"{engines}, stream of {len(p)}", p, want, got)
    whole = sum(not isinstance(got, RequestFailed) for got in answers)
    resumed = front_counter(pair.front.url, "resumes", 'cause="dropped"')
    assert whole and resumed > len(prompts) - whole, "no stream was dropped and went on: the test shows nothing"
    assert counter(d, "vllm:ascend_pd_answers_continued_total") > given, "D has begun all of them anew"


def cut_streams(engines: Engines, pair: Pair) -> None:
    """Streams that break after one token to eleven go on with the rest of one engine's answer, by D's other address."""
    assert pair.cutter is not None
    vocab, counts = RECIPES[engines.model].vocab, range(1, TOKENS)
    prompts = [fresh_prompt(20 + 30 * count, vocab) for count in counts]
    names = [f"cut-{count}-{fresh_salt('cut')}" for count in counts]
    bodies = [body_of(prompt, TOKENS, **pair.asked) for prompt in prompts]
    expected = reference_answers(pair.reference, prompts, TOKENS, **pair.asked)
    given = sum(counter(d, "vllm:ascend_pd_answers_continued_total") for d in pair.decode)
    answers, behind = attempt(pair.front.url, bodies, names=names), engines.behind_given_tokens(pair)
    for name, p, want, got in zip(names, prompts, expected, answers, strict=True):
        assert not isinstance(got, BaseException), f"{name}: {got}"
        assert not pair.cutter.streams[name].whole, f"{name} was not cut"
        behind.judge_all(f"{engines}, {name}", p, want, got)
    given = sum(counter(d, "vllm:ascend_pd_answers_continued_total") for d in pair.decode) - given
    broken = sum(pair.cutter.streams[name].tokens < TOKENS for name in names)  # with drafts the last ones come at once
    assert given == broken > TOKENS // 2, f"of {broken} answers D went on with {given}"
    print(f"{engines}, cut: {behind.tally.summary()}")
    behind.tally.check_share()


def never_computed(engines: Engines, pair: Pair) -> None:
    """A D with its heads in int8 computes no prompt: a request that comes to it without a P ends with an error.

    Without that its attention returns nothing for such a step, and the answer is what was in memory.
    """
    (d,), vocab = pair.decode, RECIPES[engines.model].vocab
    before = d.log.read_text(errors="replace").count("PD-XFER-010")
    for length in (1, 2, BLOCK + 1):
        answer = attempt(d.url, [body_of(fresh_prompt(length, vocab), 3)])[0]
        assert isinstance(answer, Exception), answer
    assert d.log.read_text(errors="replace").count("PD-XFER-010") == before + 3
    check(engines, pair, [BLOCK + 1])


def lost_blocks(engines: Engines, pair: Pair) -> None:
    """D cannot compute again what it preempts: the stream goes on through P, or ends with an error.

    P attends to given tokens in the model's dtype, where one engine has attended to int8: so answers may differ behind
    them, and each token is judged by the engine alone.
    """
    (d,) = pair.decode
    prompts = [fresh_prompt(BLOCK + 40 * i, RECIPES[engines.model].vocab) for i in range(6)]
    expected = reference_answers(pair.reference, prompts, 2 * BLOCK)
    answers = attempt(pair.front.url, [body_of(one, 2 * BLOCK) for one in prompts])
    tally = AnswerTally(tie=INT8_APART, excused_share=1.0)
    whole = 0
    for p, want, got in zip(prompts, expected, answers, strict=True):
        if isinstance(got, RequestFailed):
            assert "PD-META-" in got.text, got
            continue
        assert not isinstance(got, BaseException), got
        tally.check(f"{engines}, stream of {len(p)}", p, want.tokens, got.tokens, pair.reference.url)
        whole += 1
    resumed = front_counter(pair.front.url, "resumes")
    pair.cluster.progress(f"figure: {engines}: {whole} of {len(prompts)} whole, {resumed:.0f} times gone on")
    assert "PD-XFER-010" in d.log.read_text(errors="replace"), "D took no block back: the test shows nothing"
    assert whole > len(prompts) - resumed, "no stream has lost its blocks and gone on"


def beside_grammars(engines: Engines, pair: Pair) -> None:
    """Requests under a grammar at once with others. Of the former D chooses the first token, and P lets just the token
    be sampled that its drafter needs (vllm_patches/requests.py). No other request gets that one (masks.py)."""
    (d,), vocab = pair.decode, RECIPES[engines.model].vocab
    bodies = [body_of(fresh_prompt(BLOCK + 40 * i, vocab), 2) for i in range(6)]
    for body in bodies[::2]:
        body["structured_outputs"] = GRAMMAR
    alone = [complete(d.url, {**body, "cache_salt": fresh_salt("alone")}).tokens for body in bodies]
    for _ in range(8):
        answers = gather(pair.front.url, [{**body, "cache_salt": fresh_salt("together")} for body in bodies])
        assert [answer.tokens for answer in answers] == alone


def dropped_responses(engines: Engines, pair: Pair) -> None:
    """Only D's connector says of a response that it was dropped. It is asked for again, or its stream goes on.

    None looks complete that is not: a whole one has all its tokens, and so has a stream with an end.
    """
    texts = [chr(ord("a") + i) * (BLOCK + 40 * i) for i in range(6)]
    bodies = [{"model": "model", "input": text, "max_output_tokens": 2 * BLOCK, "temperature": 0} for text in texts]
    bodies = [{**body, "ignore_eos": True} for body in bodies]

    def ask(url: str, body: dict[str, Any]) -> tuple[str, int] | RequestFailed:
        try:
            answer = post(url, body, RESPONSES)
        except RequestFailed as failed:
            return failed
        return answer["output"][0]["content"][0]["text"], answer["usage"]["output_tokens"]

    def stream(body: dict[str, Any]) -> Spoken:
        answer = httpx.post(pair.front.url + RESPONSES, json={**body, "stream": True}, timeout=600, trust_env=False)
        return read(answer.content) if answer.status_code == 200 else Spoken(problem=answer.text)

    expected = [ask(pair.reference.url, {**body, "cache_salt": fresh_salt("alone")}) for body in bodies]
    assert all(not isinstance(want, RequestFailed) and want[1] == 2 * BLOCK for want in expected), expected
    asked_again = front_counter(pair.front.url, "retries", 'failure="dropped"')
    resumed = front_counter(pair.front.url, "resumes", 'cause="dropped"')
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(ask, [pair.front.url] * len(bodies), bodies))
        resent = front_counter(pair.front.url, "retries", 'failure="dropped"') - asked_again
        streams = list(pool.map(stream, bodies))
    refused = [got for got in answers if isinstance(got, RequestFailed)]
    assert all("PD-META-022" in got.text for got in refused), refused
    assert [got for got in answers if got not in refused] == [
        want for want, got in zip(expected, answers, strict=True) if got not in refused
    ]
    broken = [got for got in streams if got.problem]
    codes = ("PD-META-022", "PD-META-024", "PD-META-025")  # dropped again and again, or no D is left
    assert all(any(code in got.problem for code in codes) for got in broken), broken
    went_on = int(front_counter(pair.front.url, "resumes", 'cause="dropped"') - resumed)
    for want, got in zip(expected, streams, strict=True):
        assert not isinstance(want, RequestFailed)
        assert got.text == want[0] if not got.problem else want[0].startswith(got.text), f"{got} for {want}"
    assert resent or refused, "no whole response was dropped: the test shows nothing"
    assert went_on and len(broken) < len(streams), "no stream was dropped and went on: the test shows nothing"
    said = (
        f"{int(resent)} asked for again, {len(refused)} refused; streams: {went_on} times gone on, {len(broken)} broken"
    )
    pair.cluster.progress(f"figure: {engines}: responses: {said}")


# ---- sets

ALL = (one_token, edges, chunks, many, prefixes)
FEWER = (edges, chunks, many)
DROPPED = (edges, dropped, dropped_streams, dropped_responses)
ENTRIES = (*FEWER, entries)
# What most of vllm-ascend's own D's have together: drafts, its recompute scheduler and full graphs. And MLA.
FIELD_DRAFTS = Engines(
    "mtp 1to1 recompute scheduler full graphs",
    "mtp",
    p=Side(drafts=1, late_us=LATE),
    d=Side(graphs=FULL, flags=(*FEW, *RECOMPUTES_UNFUSED)),
    dtype="bfloat16",
    draft=MTP3,
)
EVERY_COMMIT: list[tuple[Engines, tuple[Callable[[Engines, Pair], None], ...]]] = [
    (Engines("gqa 1to1", p=Side(late_us=LATE), d=Side(flags=FEW)), (*ALL, penalised, grammars, preempted)),
    (Engines("gqa 2to1 regrouped", p=Side(2, keys=REGROUPED, late_us=LATE), flags=ONE_AT_A_TIME), (*ALL, kernels)),
    (Engines("gqa 1to2 full graphs", d=Side(2, graphs=FULL)), (*FEWER, replayed)),
    (FIELD_DRAFTS, (edges, chunks, without_a_load, replayed)),
    (Engines("mla dcp 2to1", "mla", p=Side(2, dcp=2), dtype="bfloat16"), FEWER),
]
MORE: list[tuple[Engines, tuple[Callable[[Engines, Pair], None], ...]]] = [
    (Engines("moe 2to1 experts apart", "moe", p=Side(2), flags=EXPERTS), FEWER),
    (Engines("gqa 2to1 own kernels", p=Side(2, keys=OWN_KERNELS, late_us=LATE, delay_us=DELAY)), (*FEWER, kernels)),
    (Engines("mla 1to1", "mla", p=Side(late_us=LATE), dtype="bfloat16"), FEWER),
    (Engines("mqa 1to1", "mqa"), FEWER),
    (Engines("mha 2to1", "mha6", p=Side(2)), FEWER),
    (Engines("qwen3 1to2", "qwen3", d=Side(2)), FEWER),
    (Engines("gqa pp 2to1", p=Side(pp=2)), FEWER),
    (Engines("qwen2 2to2", "qwen2", p=Side(2, delay_us=DELAY), d=Side(2, delay_us=DELAY)), FEWER),
    (Engines("gqa 4to2 regrouped", p=Side(4, keys=REGROUPED), d=Side(2)), FEWER),
    (
        Engines("moe 1to1 dp 2to2", "moe", p=Side(dp=2, repaired=True), d=Side(dp=2, repaired=True), flags=EXPERTS),
        FEWER,
    ),
    (Engines("moe 2to1 dp 1to2", "moe", p=Side(2), d=Side(dp=2, repaired=True), flags=EXPERTS), FEWER),
    (
        Engines("moe 1to1 dp 1to2 a server each", "moe", d=Side(dp=2, servers=2, repaired=True), flags=EXPERTS),
        FEWER,
    ),
    (Engines("dsv3 1to1", "dsv3", p=Side(late_us=LATE), dtype="bfloat16"), (*FEWER, prefixes)),
    (Engines("mla 2to1", "mla", p=Side(2, late_us=LATE), dtype="bfloat16"), FEWER),
    (Engines("mla 1to2", "mla", d=Side(2), dtype="bfloat16"), FEWER),
    (Engines("mtp 1to1", "mtp", p=Side(drafts=1, late_us=LATE), dtype="bfloat16", draft=MTP3), (*FEWER, drafts)),
    (Engines("mtp 2to1", "mtp", p=Side(2), d=Side(drafts=1), dtype="bfloat16", draft=MTP3), (*FEWER, drafts)),
    (Engines("eagle3 2to1", "spec", p=Side(2), draft=EAGLE3), FEWER),
    # Kimi: heads beside a latent. The draft's attention is random, so a right draft would say nothing.
    (
        Engines(
            "eagle3 beside latents 2to1",
            "mla",
            p=Side(2, drafts=1),
            dtype="bfloat16",
            draft={**EAGLE3, "model": "mla-eagle3"},
        ),
        FEWER,
    ),
    (
        Engines(
            "dflash 1to1",
            "spec-flash",
            p=Side(drafts=1, repaired=True),
            d=Side(repaired=True),
            draft={**DFLASH, "model": "spec-flash-dflash"},
        ),
        (*FEWER, drafts),
    ),
    (Engines("dflash beside latents 2to1", "mla", p=Side(2), dtype="bfloat16", draft=DFLASH), FEWER),
    (Engines("mqa dcp 2to1", "mqa", p=Side(2, dcp=2)), FEWER),
    (Engines("mqa 1to2 dcp", "mqa", d=Side(2, dcp=2)), FEWER),
    (Engines("mqa dcp 4to2", "mqa", p=Side(4, dcp=4), d=Side(2, dcp=2)), FEWER),
    (Engines("mla 1to2 dcp", "mla", d=Side(2, dcp=2), dtype="bfloat16"), FEWER),
    # DeepSeek-V3.2: each rank has its part of the latents, and all of the indexers' keys.
    (Engines("dsa dcp 2to1", "dsv32", p=Side(2, dcp=2), dtype="bfloat16", max_len=LONG), (*FEWER, chosen)),
    (Engines("dsa 1to2 dcp", "dsv32", d=Side(2, dcp=2), dtype="bfloat16", max_len=LONG), (*FEWER, chosen)),
    (
        Engines("dsa dcp 2to1 int8", "dsv32", p=Side(2, dcp=2), dtype="bfloat16", flags=C8, max_len=LONG),
        (*FEWER, chosen),
    ),
    (Engines("dsa dcp 4to2", "dsv32", p=Side(4, dcp=4), d=Side(2, dcp=2), dtype="bfloat16", max_len=LONG), FEWER),
    # Two ranks of P hold the same head, and divide its tokens.
    (Engines("gqa dcp 4to2", "gqa2", p=Side(4, dcp=2), d=Side(2)), FEWER),
    (Engines("mla dcp both 2to2", "mla", p=Side(2, dcp=2), d=Side(2, dcp=2), dtype="bfloat16"), FEWER),
    (Engines("gqa dcp both 4to4", "gqa2", p=Side(4, dcp=2), d=Side(4, dcp=2)), FEWER),
    (Engines("qwen3next 1to1", "qwen3next", p=Side(late_us=LATE), dtype="bfloat16"), (one_token, *FEWER, blocks)),
    # In bfloat16 sums over two ranks change which experts a token gets, and with them the tokens.
    (Engines("qwen3next 2to1", "qwen3next", p=Side(2)), (*FEWER, blocks)),
    (Engines("qwen3next 1to2", "qwen3next", d=Side(2)), (*FEWER, blocks)),
    (Engines("qwen3next 1to1 cached", "qwen3next", dtype="bfloat16", flags=CACHED), (*FEWER, blocks, state_prefixes)),
    (
        Engines(
            "qwen3next 1to1 mtp", "qwen3next-mtp", p=Side(drafts=1, late_us=LATE), d=Side(repaired=True), draft=MTP3
        ),
        (edges, chunks, without_blocks, blocks, drafts),
    ),
    (Engines("qwen3next 2to1 mtp", "qwen3next-mtp", p=Side(2), d=Side(drafts=1), draft=MTP3), (*FEWER, blocks, drafts)),
    (
        Engines("qwen3next 1to1 mtp cached", "qwen3next-mtp", d=Side(repaired=True), draft=MTP3, flags=CACHED),
        (*FEWER, blocks, drafts, state_prefixes),
    ),
    (
        Engines("gqa 1to1 full graphs", p=Side(late_us=LATE), d=Side(graphs=FULL)),
        (edges, chunks, many, prefixes, replayed),
    ),
    (Engines("gqa 2to1 piecewise graphs on P", p=Side(2, graphs="PIECEWISE", keys=REGROUPED)), (*FEWER, replayed)),
    (
        Engines("mla 1to1 full graphs", "mla", d=Side(graphs=FULL, flags=NOT_FUSED), dtype="bfloat16"),
        (*FEWER, replayed),
    ),
    (
        Engines(
            "qwen3next 1to1 mtp full graphs",
            "qwen3next-mtp",
            d=Side(graphs=FULL, flags=(*FEW_STATES, *RECOMPUTES), repaired=True),
            draft=MTP3,
        ),
        (edges, chunks, without_blocks, blocks, drafts, beside_grammars, dropped_streams, replayed),
    ),
    (Engines("dsa 1to1", "dsv32", p=Side(late_us=LATE), dtype="bfloat16", max_len=LONG), (*ALL, chosen)),
    (Engines("dsa 2to1", "dsv32", p=Side(2, late_us=LATE), dtype="bfloat16", max_len=LONG), (*ALL, chosen)),
    (Engines("dsa 1to2", "dsv32", d=Side(2), dtype="bfloat16", max_len=LONG), (*FEWER, chosen)),
    (Engines("dsa 1to1 mtp", **DSA_MTP), (*FEWER, chosen, drafts)),
    (
        Engines("dsa 1to1 int8", "dsv32", p=Side(late_us=LATE), dtype="bfloat16", flags=C8, max_len=LONG),
        (*FEWER, chosen),
    ),
    (
        Engines(
            "dsa 1to1 keys in int8", "dsv32", p=Side(late_us=LATE), dtype="bfloat16", flags=KEYS_IN_INT8, max_len=LONG
        ),
        (*FEWER, chosen),
    ),
    (
        Engines("dsa 2to1 keys in int8 mtp", p=Side(2, drafts=1), **{**DSA_MTP, "flags": (*ROOM, *KEYS_IN_INT8)}),
        (*FEWER, chosen, drafts),
    ),
    (
        # P stores index keys in runs of tokens.
        Engines(
            "dsa 1to1 int8 mtp",
            "dsv32-mtp",
            dtype="bfloat16",
            p=Side(flags=C8_IN_RUNS),
            d=Side(flags=C8),
            flags=ROOM,
            draft=MTP3,
            max_len=LONG,
        ),
        (*FEWER, chosen, drafts, switched),
    ),
    # GLM-5: layers with an indexer of their own beside one that uses another's choice, and another rotation of keys.
    (Engines("dsa 1to1 glm", "glm5", p=Side(late_us=LATE), dtype="bfloat16", max_len=LONG), (*ALL, chosen)),
    (Engines("dsa dcp 2to1 mtp", p=Side(2, dcp=2, drafts=1), **DSA_MTP), (*FEWER, chosen, drafts)),
    # D's drafts behind a prompt are alone's in 20 of 48 cases: what P's draft layer has with DCP is not said anywhere.
    (Engines("mtp dcp 2to1", "mtp", p=Side(2, dcp=2, drafts=1), draft=MTP3), FEWER),
    (Engines("dsv4 1to1", "dsv4", p=Side(late_us=LATE), dtype="bfloat16", flags=SHORT_BLOCKS), (one_token, *ENTRIES)),
    # It takes no float32. In bfloat16 sums over two ranks change what routers and indexers choose, and with it a
    # token's log-probability by up to 1.2, so here neither has a choice.
    (Engines("dsv4 2to1", "dsv4-steady", p=Side(2, late_us=LATE), dtype="bfloat16", flags=SHORT_BLOCKS), ENTRIES),
    (Engines("dsv4 1to2", "dsv4-steady", d=Side(2), dtype="bfloat16", flags=SHORT_BLOCKS), ENTRIES),
    (
        Engines("dsv4 1to1 mtp", "dsv4-mtp", p=Side(drafts=1), dtype="bfloat16", flags=SHORT_BLOCKS, draft=MTP3),
        (*ENTRIES, drafts),
    ),
    (Engines("mqa pcp 2 to dcp 2", "mqa", p=Side(pcp=2), d=Side(2, dcp=2)), FEWER),
    # Switches of vllm-ascend's own configurations.
    (
        Engines(
            "switches moe 2to2 flash communication",
            "moe",
            p=Side(2, flags=additional(**DIVIDED)),
            d=Side(2, switches=AS_VARIABLE),
            flags=EXPERTS,
        ),
        (*FEWER, prefixes, switched),
    ),
    (
        Engines(
            "switches dsv3 2to2 shared expert",
            "dsv3",
            # Without flash communication, which has the same effect on shared experts.
            p=Side(2, flags=additional(enable_shared_expert_dp=True)),
            d=Side(2, flags=additional(multistream_overlap_shared_expert=True)),
            flags=EXPERTS,
            dtype="bfloat16",
        ),
        (*FEWER, switched),
    ),
    (
        Engines(
            "switches mtp 2to1 flash communication",
            "mtp",
            p=Side(2, drafts=1, flags=additional(**DIVIDED, **FUSED)),
            d=Side(flags=additional(**FUSED)),
            flags=EXPERTS,
            dtype="bfloat16",
            draft=MTP3,
        ),
        (*FEWER, drafts, switched),
    ),
    (
        Engines(
            "switches dsa 2to1 tokens divided on P",
            "dsv32",
            p=Side(2, flags=additional(**DIVIDED, enable_dsa_cp=True)),
            flags=EXPERTS,
            dtype="bfloat16",
            max_len=LONG,
        ),
        (*FEWER, chosen, switched),
    ),
    (
        Engines(
            "switches moe 1to1 dp 2to2 head divided",
            "moe",
            p=Side(dp=2, repaired=True),
            d=Side(dp=2, graphs=FULL, flags=additional(**HEAD, **GRAPHS), repaired=True),
            flags=EXPERTS,
        ),
        (*FEWER, replayed, switched),
    ),
    (
        Engines(
            "switches moe 1to1 dp 2to2 experts balanced",
            "moe",
            p=Side(dp=2, switches={"DYNAMIC_EPLB": "true"}, flags=BALANCED, repaired=True),
            d=Side(dp=2, switches={"DYNAMIC_EPLB": "true"}, flags=BALANCED, repaired=True),
            flags=EXPERTS,
        ),
        (*FEWER, balanced),
    ),
    # vllm-ascend's MultiConnector with ours and one of its own in it, on both sides.
    (
        Engines("gqa 2to1 multi", p=Side(2, late_us=LATE), d=Side(flags=(*FEW, *RECOMPUTES)), beside=(OFFLOAD,)),
        (edges, chunks, offloaded, standing_still),
    ),
    (
        Engines(
            "dsa int8 1to1 multi",
            "dsv32",
            p=Side(late_us=LATE),
            d=Side(flags=(*FEW, *RECOMPUTES)),
            dtype="bfloat16",
            flags=C8,
            beside=(OFFLOAD,),
        ),
        (edges, chunks, offloaded),
    ),
    (Engines("gqa 1to1 recompute scheduler", d=Side(flags=(*FEW, *RECOMPUTES))), (*DROPPED, standing_still)),
    (replace(FIELD_DRAFTS, title=f"{FIELD_DRAFTS} again"), (drafts,)),
    (
        Engines(
            "dsa int8 1to1 mtp recompute scheduler",
            "dsv32-mtp",
            d=Side(flags=(*FEW, *RECOMPUTES_UNFUSED)),
            dtype="bfloat16",
            flags=C8,
            draft=MTP3,
        ),
        (edges, dropped_streams),
    ),
    # The same where answers are exact, however long: in bfloat16 MLA's two ways round differently.
    (
        Engines(
            "eagle3 1to1 recompute scheduler full graphs",
            "spec",
            p=Side(late_us=LATE),
            d=Side(graphs=FULL, flags=(*FEW, *RECOMPUTES)),
            draft=EAGLE3,
        ),
        (edges, chunks, without_a_load, grammars, dropped, dropped_streams, replayed),
    ),
    # Heads in int8 on D alone (GLM-4.7-W8A8C8): P makes them of its own cache.
    (
        Engines("c8 1to1", "qwen3-c8", p=Side(late_us=LATE), d=Side(flags=FEW), flags=QUANTISED, dtype="bfloat16"),
        (*FEWER, prefixes, never_computed, lost_blocks),
    ),
    (
        Engines("c8 2to1", "qwen3-c8", p=Side(2, late_us=LATE, delay_us=DELAY), flags=QUANTISED, dtype="bfloat16"),
        (*FEWER, prefixes),
    ),
    (
        Engines("c8 2to1 own kernels", "qwen3-c8", p=Side(2, keys=OWN_KERNELS), flags=QUANTISED, dtype="bfloat16"),
        (*FEWER, kernels),
    ),
    (
        Engines(
            "c8 1to2 full graphs", "qwen3-c8", d=Side(2, graphs=FULL, flags=INT8), flags=QUANTISED, dtype="bfloat16"
        ),
        (*FEWER, replayed),
    ),
    (
        Engines(
            "field c8 dp 2to2 full graphs",
            "moe-c8",
            p=Side(dp=2),
            d=Side(dp=2, graphs=FULL, flags=INT8, repaired=True),
            flags=(*EXPERTS, *QUANTISED),
            dtype="bfloat16",
        ),
        (*FEWER, replayed),
    ),
    # vllm-ascend's own configurations in small: the kinds of cache, the draft and all modes in one pair.
    (
        Engines(
            "field mtp dp 2to2",
            "mtp",
            p=Side(dp=2, drafts=1),
            d=Side(dp=2, graphs=FULL, flags=RECOMPUTES_UNFUSED),
            flags=EXPERTS,
            dtype="bfloat16",
            draft=MTP3,
        ),
        (*FEWER, replayed),
    ),
    (
        Engines(
            "field dsv3 dp 2to2",
            "dsv3",
            p=Side(dp=2),
            d=Side(dp=2, graphs=FULL, flags=NOT_FUSED),
            flags=EXPERTS,
            dtype="bfloat16",
        ),
        (*FEWER, replayed),
    ),
    (
        Engines(
            "field dsa mtp dp 2to2",
            p=Side(dp=2, drafts=1),
            d=Side(dp=2, graphs=FULL, flags=RECOMPUTES_UNFUSED),
            **FIELD_DSA_MTP,
        ),
        (*FEWER, chosen, replayed),
    ),
    (
        Engines(
            "field dsa int8 mtp dp 2to2",
            p=Side(dp=2, drafts=1, flags=C8),
            d=Side(dp=2, graphs=FULL, flags=(*C8, *RECOMPUTES_UNFUSED)),
            **FIELD_DSA_MTP,
        ),
        (*FEWER, chosen, replayed),
    ),
    (
        Engines(
            "field glm mtp 2to1 dp 1to2",
            p=Side(2, drafts=1, flags=C8),
            d=Side(dp=2, graphs=FULL, flags=(*C8, *RECOMPUTES_UNFUSED)),
            **FIELD_GLM_MTP,
        ),
        (*FEWER, chosen),  # it captures graphs, and replays none here
    ),
    (
        Engines(
            "field glm dcp mtp 2to2 dp 1to2",
            p=Side(2, dcp=2, drafts=1, flags=KEYS_IN_INT8),
            d=Side(2, dp=2, dcp=2, graphs=FULL, flags=(*KEYS_IN_INT8, *RECOMPUTES_UNFUSED)),
            **FIELD_GLM_MTP,
        ),
        (*FEWER, chosen),  # it captures graphs, and replays none here
    ),
    (
        # Several ranks of TP in each rank of DP, as most of the configurations have them.
        Engines(
            "field mtp 2to1 dp 2to2",
            "mtp",
            p=Side(2, dp=2, drafts=1),
            d=Side(dp=2, graphs=FULL, flags=RECOMPUTES_UNFUSED),
            flags=EXPERTS,
            dtype="bfloat16",
            draft=MTP3,
        ),
        (*FEWER, replayed),
    ),
    (Engines("field dsv4 mtp 2to1", p=Side(2, drafts=1), **DSV4_MTP), ENTRIES),
    (
        Engines(
            "field dsv4 mtp dp 2to2",
            "dsv4-mtp",
            p=Side(dp=2, drafts=1),
            d=Side(dp=2, flags=RECOMPUTES),
            flags=(*EXPERTS, *SHORT_BLOCKS),
            dtype="bfloat16",
            draft=MTP3,
        ),
        ENTRIES,
    ),
    (
        Engines(
            "field dsv4 mtp full graphs",
            "dsv4-mtp",
            p=Side(drafts=1),
            d=Side(graphs=FULL, flags=RECOMPUTES_UNFUSED),
            flags=SHORT_BLOCKS,
            dtype="bfloat16",
            draft=MTP3,
        ),
        (*ENTRIES, replayed),
    ),
    (
        Engines(
            "field dsv4 mtp dp 2to2 full graphs repaired",
            "dsv4-mtp",
            p=Side(dp=2, drafts=1),
            d=Side(dp=2, graphs=FULL, flags=RECOMPUTES_UNFUSED, repaired=True),
            flags=(*EXPERTS, *SHORT_BLOCKS),
            dtype="bfloat16",
            draft=MTP3,
        ),
        (*ENTRIES, replayed),
    ),
    (
        Engines(
            "field qwen3next mtp 2to1 dp 1to2 regrouped",
            "qwen3next-mtp",
            p=Side(2, keys=REGROUPED),
            d=Side(dp=2, graphs=FULL, flags=(*FEW_STATES, *RECOMPUTES), repaired=True),
            flags=(*EXPERTS, *CACHED),
            draft=MTP3,
        ),
        (*FEWER, blocks, state_prefixes, replayed),
    ),
    (
        Engines(
            "field moe 2to1 dp 1to2 regrouped",
            "moe",
            p=Side(2, keys=REGROUPED, graphs="PIECEWISE"),
            d=Side(dp=2, graphs=FULL, flags=RECOMPUTES, repaired=True),
            flags=EXPERTS,
        ),
        (*FEWER, prefixes, replayed),
    ),
    (
        Engines(
            "field eagle3 2to1 dp 1to2 regrouped",
            "moe",
            p=Side(2, keys=REGROUPED, drafts=1),
            d=Side(dp=2, graphs=FULL, flags=RECOMPUTES),
            flags=EXPERTS,
            draft={**EAGLE3, "model": "moe-eagle3"},
        ),
        (*FEWER, prefixes, replayed),
    ),
    (
        Engines(
            "field eagle3 beside latents 2to1 dp 1to2 regrouped",
            "mla",
            p=Side(2, keys=REGROUPED, drafts=1),
            d=Side(dp=2, graphs=FULL, flags=RECOMPUTES_UNFUSED),
            flags=EXPERTS,
            dtype="bfloat16",
            draft={**EAGLE3, "model": "mla-eagle3"},
        ),
        (*FEWER, replayed),
    ),
    (
        Engines(
            "field dflash beside latents 2to1 dp 1to2 regrouped",
            "mla",
            p=Side(2, keys=REGROUPED),
            d=Side(dp=2, graphs=FULL, flags=RECOMPUTES_UNFUSED),
            flags=EXPERTS,
            dtype="bfloat16",
            draft=DFLASH,
        ),
        (*FEWER, replayed),
    ),
    # Kinds of cache that have not each size above.
    (Engines("sizes mha 1to1", "mha8", d=Side(flags=FEW)), (*FEWER, prefixes, preempted)),
    (Engines("sizes mha 1to2", "mha8", d=Side(2)), FEWER),
    (Engines("sizes mha 2to2", "mha8", p=Side(2), d=Side(2)), FEWER),
    (Engines("sizes mha 4to2 regrouped", "mha8", p=Side(4, keys=REGROUPED), d=Side(2)), FEWER),
    (Engines("sizes mha pp 2to1", "mha8", p=Side(pp=2)), FEWER),
    (Engines("sizes mqa 2to1", "mqa", p=Side(2), d=Side(flags=FEW)), (*FEWER, prefixes, preempted)),
    (Engines("sizes mqa 1to2", "mqa", d=Side(2)), FEWER),
    (Engines("sizes mqa 2to2", "mqa", p=Side(2), d=Side(2)), FEWER),
    (Engines("sizes mqa 4to2", "mqa", p=Side(4), d=Side(2)), FEWER),
    (Engines("sizes mqa pp 2to1", "mqa", p=Side(pp=2)), FEWER),
    (Engines("sizes moe 1to1", "moe", d=Side(flags=FEW), flags=EXPERTS), (*FEWER, prefixes, preempted)),
    (Engines("sizes moe 1to2", "moe", d=Side(2), flags=EXPERTS), FEWER),
    (Engines("sizes moe 4to2", "moe", p=Side(4), d=Side(2), flags=EXPERTS), FEWER),
    (Engines("sizes moe pp 2to1", "moe", p=Side(pp=2), flags=EXPERTS), FEWER),
    (Engines("sizes mla 4to2", "mla", p=Side(4), d=Side(2), dtype="bfloat16"), FEWER),
    (Engines("sizes mla pp 2to1", "mla", p=Side(pp=2), dtype="bfloat16"), FEWER),
    # The kinds with an indexer, compressed latents or states, with their drafts, in the sizes that are not above.
    # One of P and D drafts one token, the other three.
    (Engines("sizes dsa int8 1to2", "dsv32", d=Side(2), dtype="bfloat16", flags=C8, max_len=LONG), (*FEWER, chosen)),
    (
        Engines("sizes dsa int8 2to2", "dsv32", p=Side(2), d=Side(2), dtype="bfloat16", flags=C8, max_len=LONG),
        (*FEWER, chosen),
    ),
    (
        Engines("sizes dsa int8 4to2", "dsv32", p=Side(4), d=Side(2), dtype="bfloat16", flags=C8, max_len=LONG),
        (*FEWER, chosen),
    ),
    (Engines("sizes dsa mtp 1to2", p=Side(drafts=1), d=Side(2), **DSA_MTP), (*FEWER, chosen, drafts)),
    (Engines("sizes dsa mtp 2to2", p=Side(2), d=Side(2, drafts=1), **DSA_MTP), (*FEWER, chosen, drafts)),
    (Engines("sizes dsa mtp 4to2", p=Side(4), d=Side(2, drafts=1), **DSA_MTP), (*FEWER, chosen)),
    (Engines("sizes dsa glm 1to2", "glm5", d=Side(2), dtype="bfloat16", max_len=LONG), (*FEWER, chosen)),
    (Engines("sizes dsa glm 2to2", "glm5", p=Side(2), d=Side(2), dtype="bfloat16", max_len=LONG), (*FEWER, chosen)),
    (Engines("sizes dsa glm 4to2", "glm5", p=Side(4), d=Side(2), dtype="bfloat16", max_len=LONG), (*FEWER, chosen)),
    (
        Engines("sizes dsv4 4to2", "dsv4-steady", p=Side(4), d=Side(2), dtype="bfloat16", flags=SHORT_BLOCKS),
        ENTRIES,
    ),
    (Engines("sizes dsv4 mtp 1to2", p=Side(drafts=1), d=Side(2), **DSV4_MTP), ENTRIES),
    (Engines("sizes dsv4 mtp 2to2", p=Side(2), d=Side(2, drafts=1), **DSV4_MTP), ENTRIES),
    (Engines("sizes dsv4 mtp 4to2", p=Side(4), d=Side(2, drafts=1), **DSV4_MTP), ENTRIES),
    (
        Engines("sizes qwen3next mtp 1to2", "qwen3next-mtp", p=Side(drafts=1), d=Side(2, repaired=True), draft=MTP3),
        (*FEWER, blocks, drafts),
    ),
    (
        Engines("sizes qwen3next mtp 2to2", "qwen3next-mtp", p=Side(2), d=Side(2, drafts=1), draft=MTP3),
        (*FEWER, blocks, drafts),
    ),
    (
        Engines("sizes qwen3next mtp 4to2", "qwen3next-mtp", p=Side(4), d=Side(2, drafts=1), draft=MTP3),
        (*FEWER, blocks),
    ),
    # What starts, and none of vllm-ascend's own configurations has.
    (Engines("others gqa 2 to pp 2", p=Side(2), d=Side(pp=2, flags=ONE_AT_A_TIME)), FEWER),
    (Engines("others gqa pp 2 to pp 2", p=Side(pp=2), d=Side(pp=2, flags=ONE_AT_A_TIME)), FEWER),
    (Engines("others eagle 2to1", "spec", p=Side(2), draft=EAGLE), FEWER),
    (Engines("others ngram 2to1", p=Side(2), draft=NGRAM), FEWER),
    # The kinds' other shapes, one or two of them to each pair of engines.
    (Engines("shapes gqa pcp 2 to 1", "gqa2", p=Side(pcp=2)), (*FEWER, prefixes)),
    (Engines("shapes mla pcp 2 to 1", "mla", p=Side(pcp=2), dtype="bfloat16"), FEWER),
    (
        Engines("shapes dsa pp 2to1", "dsv32", p=Side(pp=2, late_us=LATE), dtype="bfloat16", max_len=LONG),
        (*FEWER, chosen),
    ),
    (
        Engines("shapes mtp pp 2to1", "mtp", p=Side(pp=2, drafts=1, late_us=LATE), dtype="bfloat16", draft=MTP3),
        (*FEWER, drafts),
    ),
    (
        Engines(
            "shapes dsa 2to2",
            "dsv32",
            p=Side(2, late_us=LATE),
            d=Side(2),
            dtype="bfloat16",
            flags=ONE_AT_A_TIME,
            max_len=LONG,
        ),
        (*FEWER, chosen, prefixes),
    ),
    (Engines("shapes dsa mtp 2to1", p=Side(2, drafts=1), **DSA_MTP), (*FEWER, chosen, drafts, prefixes)),
    (Engines("shapes dsa 4to2", "dsv32", p=Side(4), d=Side(2), dtype="bfloat16", max_len=LONG), (*FEWER, chosen)),
    (
        Engines("shapes dsa int8 2to1", "dsv32", p=Side(2, late_us=LATE), dtype="bfloat16", flags=C8, max_len=LONG),
        (*FEWER, chosen, prefixes),
    ),
    (
        Engines("shapes dsa glm 2to1", "glm5", p=Side(2, late_us=LATE), dtype="bfloat16", max_len=LONG),
        (*FEWER, chosen),
    ),
    (Engines("shapes mtp 1to2", "mtp", p=Side(drafts=1), d=Side(2), dtype="bfloat16", draft=MTP3), (*FEWER, drafts)),
    (
        Engines(
            "shapes mtp 2to2",
            "mtp",
            p=Side(2),
            d=Side(2, drafts=1),
            dtype="bfloat16",
            flags=ONE_AT_A_TIME,
            draft=MTP3,
        ),
        (*FEWER, prefixes, drafts),
    ),
    (Engines("shapes mtp 4to2", "mtp", p=Side(4), d=Side(2, drafts=2), dtype="bfloat16", draft=MTP3), FEWER),
    (Engines("shapes eagle3 1to2", "spec", p=Side(drafts=1), d=Side(2), draft=EAGLE3), FEWER),
    (
        Engines("shapes eagle3 2to2", "spec", p=Side(2), d=Side(2, drafts=1), flags=ONE_AT_A_TIME, draft=EAGLE3),
        (*FEWER, prefixes, drafts),
    ),
    (Engines("shapes eagle3 4to2", "spec", p=Side(4), d=Side(2), draft=EAGLE3), FEWER),
    (Engines("shapes mla 1to1 preempted", "mla", d=Side(flags=FEW), dtype="bfloat16"), (edges, preempted)),
    (Engines("shapes dsa 1to1 preempted", "dsv32", d=Side(flags=FEW), dtype="bfloat16"), (edges, preempted)),
    # A block of 32 entries for 128 tokens each is the longest. A D with fewer blocks than a request of max_len has
    # without its windows' being freed does not start, so a few requests do not make it preempt.
    (
        Engines("shapes dsv4 1to1 prefixes", "dsv4", dtype="bfloat16", flags=SHORT_BLOCKS, max_len=4608),
        (edges, long_prefixes),
    ),
    (
        Engines(
            "shapes dsv4 2to2",
            "dsv4-steady",
            p=Side(2, late_us=LATE),
            d=Side(2),
            dtype="bfloat16",
            flags=(*SHORT_BLOCKS, *ONE_AT_A_TIME),
        ),
        ENTRIES,
    ),
    # vllm-ascend's recompute scheduler would take D's cached attention without a state (older_groups.py).
    (
        Engines(
            "shapes qwen3next 1to1 cached recompute scheduler", "qwen3next", d=Side(flags=RECOMPUTES), flags=CACHED
        ),
        (*FEWER, blocks, state_prefixes),
    ),
    (Engines("shapes qwen3next 2to2", "qwen3next", p=Side(2), d=Side(2), flags=ONE_AT_A_TIME), (*FEWER, blocks)),
    (Engines("shapes qwen3next 4to2", "qwen3next", p=Side(4), d=Side(2)), (*FEWER, blocks)),
]


# In each of vllm-ascend's own configurations streams go on.
MORE = [
    (replace(engines, cut=True), (*cells, cut_streams)) if engines.title.startswith("field ") else (engines, cells)
    for engines, cells in MORE
]
# What 0.30 refuses.
MORE = [(replace(engines, release=OLDER) if engines.p.pcp > 1 else engines, cells) for engines, cells in MORE]
# What stays of the release before: a set of each way to push.
OLDER_TOO = (
    "gqa 1to1",
    "gqa 2to1 regrouped",
    "mla 1to1",
    "dsv3 1to1",
    "mtp 1to1 recompute scheduler full graphs",
    "qwen3next 1to1",
    "dsv4 1to1",
    "c8 1to1",
)
MORE += [
    (replace(engines, title=f"older {engines}", release=OLDER), cells)
    for engines, cells in (*EVERY_COMMIT, *MORE)
    if engines.title in OLDER_TOO
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" not in metafunc.fixturenames:
        return
    rows = [
        pytest.param(engines, cell, id=f"{engines}: {cell.__name__}", marks=[pytest.mark.slow] if slow else [])
        for slow, sets in ((False, EVERY_COMMIT), (True, MORE))
        for engines, cells in sets
        for cell in cells
    ]
    metafunc.parametrize(("engines", "cell"), rows)


def test_tokens_are_one_engines(engines: Engines, pair: Pair, cell: Callable[[Engines, Pair], None]) -> None:
    cell(engines, pair)
