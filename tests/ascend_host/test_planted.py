# SPDX-License-Identifier: Apache-2.0
"""Faults planted in a P or a D one by one (plugin/ascend_host/faults.py), and what detects each.

Six pairs: pushed directly, through an exchange, or with DeepSeek-V4's caches, without and with `verify: full`. Each is
right without a fault, before the first and after the last. What an exchange brings is summed in its staging slot. So
`verify: full` cannot see a gather that was too early: it shows in the answers alone.

In a seventh D is late. When a request stops, its next token is already being computed, and its blocks go to a request
that has waited for them. D's gate keeps P from writing there before that token's keys and values are. It is the older
release: from vLLM 0.30 on a consumer's scheduler itself keeps blocks until the step that writes them is over.

The others have more kinds of cache, sizes, drafts and modes. In these the fault is the smallest: one token has no keys
and values in one layer, behind right sums. Most tokens stay equal, and are less or more probable than they should be.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ascend_host.faults import ELSEWHERE
from engine_sets import BLOCK, EQUAL, ROUNDED, SHORT_BLOCKS, Engines, Machine, Side, additional, few_blocks
from host_build import OLDER
from kind_pairs import learn_of_first_tokens
from pairs import Pair, counter, fresh_prompt

from tools.support.checks import eventually, fresh_salt
from tools.support.client import RequestFailed, body_of, post
from tools.support.client import prompt as prompt_of_seed
from tools.support.cluster import Cluster, fresh_directory
from tools.support.models import RECIPES

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]

OWN_KERNELS = {"regroup": "always", "regroup_kernels": "own"}
LATE, DELAY = 200_000, 1000
BLOCKS_OF_D = 5  # with the null block: the second request needs all that the first one had
TOKENS = "answers"
NO_NUMBER = "Out of range float values"  # vLLM's answer if a log-probability is not a number
Hosts = Callable[[str], Machine]
CODES = {"checksums": "PD-WIRE-004", "tags": "did not give their part", "hooks": "PD-GEO-004"}

TOKEN = {"token": {TOKENS}}
DIRECT = {
    "written": {TOKENS, "checksums"},
    "computed": {TOKENS, "checksums"},
    "layers": {TOKENS, "checksums"},
    "hook": {"hooks"},
    **TOKEN,
}
EXCHANGED = {
    "written": {TOKENS},
    "hold": {TOKENS},
    "staged": {TOKENS, "tags"},
    "order": {"tags"},
    "hook": {"hooks"},
    **TOKEN,
}
GATE = {"gate": {TOKENS}}
COMPRESSED = {
    "hook": {"hooks"},
    **{fault: {TOKENS, "checksums"} for fault in ELSEWHERE},
}


@dataclasses.dataclass(frozen=True)
class Set:
    """A pair without its faults, those that can be planted in it, and the length of its prompts.

    `before`: the length of another prompt, whose request stops when its third token comes.
    """

    engines: Engines
    faults: Mapping[str, set[str]]
    length: int = 2 * BLOCK  # a block for each of two ranks
    before: int = 0
    verify: tuple[str, ...] = ("off", "full")
    whole: bool = False  # answers have all their tokens, and do not end at the second
    limit: float = EQUAL
    prompts: int = 3


def token_in(engines: Engines, **more: Any) -> Set:
    """Return a set in which one token has no keys and values."""
    return Set(engines, TOKEN, verify=("full",), whole=True, **more)


C8 = ("--kv-cache-dtype", "int8", "--attention_config.indexer_kv_dtype", "int8")
QUANTISED = ("--quantization", "ascend")
EXPERTS = ("--enable-expert-parallel",)
MTP = {"method": "mtp", "num_speculative_tokens": 3}
EAGLE3 = {"method": "eagle3", "model": "gqa-eagle3", "num_speculative_tokens": 2}
DFLASH = {"method": "dflash", "model": "spec-flash-dflash", "num_speculative_tokens": 3}
# Where sums over other ranks round by more in bfloat16 than a token makes out, they are in float32 (MLA), or in float16
# (an indexer's attention takes no float32).
SHAPES: dict[str, Engines] = {
    "gqa bf16": Engines("planted gqa bf16", dtype="bfloat16"),
    "gqa 1to2": Engines("planted gqa 1to2", d=Side(2)),
    "mla 1to1": Engines("planted mla 1to1", "mla", dtype="bfloat16"),
    "mla 2to1": Engines("planted mla 2to1", "mla", p=Side(2)),
    "mla 1to2": Engines("planted mla 1to2", "mla", d=Side(2)),
    "mla 4to2": Engines("planted mla 4to2", "mla", p=Side(4), d=Side(2)),
    "dsa int8 1to1": Engines("planted dsa int8 1to1", "dsv32", dtype="bfloat16", flags=C8),
    "heads in int8 1to1": Engines("planted heads in int8 1to1", "qwen3-c8", dtype="bfloat16", flags=QUANTISED),
    "states 2to1": Engines("planted states 2to1", "qwen3next", p=Side(2)),
    "drafts 2to1": Engines("planted drafts 2to1", p=Side(2, drafts=1), draft=EAGLE3),
    "dsv4 1to1": Engines("planted dsv4 1to1", "dsv4", dtype="bfloat16", flags=SHORT_BLOCKS),
    "experts 2to1": Engines("planted experts 2to1", "moe", p=Side(2), flags=("--enable-expert-parallel",)),
    "graphs 1to1": Engines("planted graphs 1to1", d=Side(graphs="FULL_DECODE_ONLY")),
    "pp 2to1": Engines("planted pp 2to1", p=Side(pp=2)),
    "eagle3 mla 2to1": Engines(
        "planted eagle3 mla 2to1", "mla", p=Side(2, drafts=1), draft={**EAGLE3, "model": "mla-eagle3"}
    ),
    "dflash mla 2to1": Engines("planted dflash mla 2to1", "mla", p=Side(2), draft={**DFLASH, "model": "mla-dflash"}),
    "shared expert 2to2": Engines(
        "planted shared expert 2to2",
        "dsv3",
        p=Side(2, flags=additional(enable_shared_expert_dp=True)),
        d=Side(2, flags=additional(multistream_overlap_shared_expert=True)),
        flags=EXPERTS,
    ),
    "flash communication 2to1": Engines(
        "planted flash communication 2to1",
        "dsv3",
        p=Side(2, flags=additional(enable_flashcomm1=True, enable_fused_mc2=1, enable_mlapo=True)),
        flags=EXPERTS,
    ),
    "mla dcp 2to1": Engines("planted mla dcp 2to1", "mla", p=Side(2, dcp=2)),
    "mla 1to2 dcp": Engines("planted mla 1to2 dcp", "mla", d=Side(2, dcp=2)),
    "dcp 2to1": Engines("planted dcp 2to1", "mqa", p=Side(2, dcp=2)),
    "1to2 dcp": Engines("planted 1to2 dcp", "mqa", d=Side(2, dcp=2)),
    "pcp 2 to 1": Engines("planted pcp 2 to 1", "gqa2", p=Side(pcp=2), release=OLDER),
}
SETS = {
    "direct": Set(Engines("planted direct", p=Side(late_us=LATE)), DIRECT),
    "exchange": Set(Engines("planted exchange", p=Side(2, keys=OWN_KERNELS, late_us=LATE, delay_us=DELAY)), EXCHANGED),
    # D's first step completes an entry for 4 tokens and one for 128, of what a compressor had of the others. That of an
    # indexer decides only whether its entry is chosen: three prompts may have the same answers.
    "compressed": Set(
        Engines("planted compressed", "dsv4", dtype="bfloat16", flags=SHORT_BLOCKS),
        COMPRESSED,
        3 * BLOCK - 1,
        prompts=8,
    ),
    # What lands after the sums were compared is in none, so checksums see it by chance.
    "gate": Set(
        Engines(
            "planted gate",
            d=Side(late_us=3 * LATE, flags=few_blocks(BLOCKS_OF_D)),
            max_len=4 * BLOCK,
            release=OLDER,
        ),
        GATE,
        4 * BLOCK - 14,
        before=BLOCK + 20,
        verify=("off",),
    ),
    **{title: token_in(engines) for title, engines in SHAPES.items()},
    # In a short prompt one token has weight.
    "dflash 1to1": token_in(
        Engines("planted dflash 1to1", "spec-flash", p=Side(drafts=1), draft=DFLASH),
        length=24,
    ),
    # Without a fault 4.2e-3 at most in two runs of 36 log-probabilities.
    "dsa 2to1": token_in(
        Engines("planted dsa 2to1", "dsv32", p=Side(2), dtype="float16", release=OLDER),
        limit=2e-2,
    ),
    # Without a fault 1.0e-2 at most (GLM-5), of the others 7.5e-3, in one or two runs of 96 each. With an MTP layer
    # each layer counts, as in the others: where the last one decides, a token of another is not made out (8.3e-3).
    **{
        title: token_in(engines, limit=2e-2, prompts=8)
        for title, engines in {
            "dsa dcp 2to1": Engines("planted dsa dcp 2to1", "dsv32", p=Side(2, dcp=2), dtype="float16"),
            "dsa int8 2to1": Engines("planted dsa int8 2to1", "dsv32", p=Side(2), dtype="float16", flags=C8),
            "dsa int8 1to2": Engines("planted dsa int8 1to2", "dsv32", d=Side(2), dtype="float16", flags=C8),
            "dsa int8 4to2": Engines("planted dsa int8 4to2", "dsv32", p=Side(4), d=Side(2), dtype="float16", flags=C8),
            "dsa 1to2": Engines("planted dsa 1to2", "dsv32", d=Side(2), dtype="float16"),
            "dsa 4to2": Engines("planted dsa 4to2", "dsv32", p=Side(4), d=Side(2), dtype="float16"),
            "dsa mtp 2to1": Engines(
                "planted dsa mtp 2to1", "dsv32-mtp-even", p=Side(2, drafts=1), dtype="float16", draft=MTP
            ),
            "glm 2to1": Engines("planted glm 2to1", "glm5", p=Side(2), dtype="float16"),
        }.items()
    },
    # Without a fault 7.4e-2 at most in two runs of 96 each.
    **{
        title: token_in(engines, limit=ROUNDED, prompts=8)
        for title, engines in {
            "dsv4 2to1": Engines("planted dsv4 2to1", "dsv4-steady", p=Side(2), dtype="bfloat16", flags=SHORT_BLOCKS),
            "dsv4 1to2": Engines("planted dsv4 1to2", "dsv4-steady", d=Side(2), dtype="bfloat16", flags=SHORT_BLOCKS),
            "dsv4 4to2": Engines(
                "planted dsv4 4to2", "dsv4-steady", p=Side(4), d=Side(2), dtype="bfloat16", flags=SHORT_BLOCKS
            ),
            "dsv4 mtp 2to1": Engines(
                "planted dsv4 mtp 2to1",
                "dsv4-mtp-steady",
                p=Side(2, drafts=1),
                dtype="bfloat16",
                flags=SHORT_BLOCKS,
                draft=MTP,
            ),
        }.items()
    },
    # D computes the prompt's last token again, as a decode: in a prefill vllm-ascend's MLA rounds to bfloat16, whatever
    # the model's dtype. Without a fault 1.8e-2 at most in seven runs of 36.
    "mtp 2to1": token_in(
        Engines("planted mtp 2to1", "mtp-even", p=Side(2, drafts=1), draft=MTP),
        length=24,
        limit=1e-1,
    ),
}


@dataclasses.dataclass
class Planted:
    """A pair, and the file that plants a fault in its engines."""

    pair: Pair
    file: Path
    of: Set
    furthest: float = 0.0  # of log-probabilities in what was asked last, whatever the tokens
    seeds: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    def wrong(self, fault: str = "") -> dict[str, str]:
        """Return what was wrong with new prompts (two of a late D) while the fault was there, by what saw it.

        The first request that fails is the last. Each ends at its second token, which is not known before.
        """
        vocab = RECIPES[self.of.engines.model].vocab
        # The same whatever ran before: of one token the effect differs from prompt to prompt.
        seeds = itertools.islice(self.seeds, 2 if self.of.before else self.of.prompts)
        prompts = [prompt_of_seed(self.of.length, seed, vocab) for seed in seeds]
        expected = [said(self.pair.reference.url, prompt, cache_salt=fresh_salt("reference")) for prompt in prompts]
        before, signs = self.pair.failed_transfers(), dict[str, str]()
        self.furthest = 0.0
        self.file.write_text(fault)
        try:
            for prompt, (tokens, chances) in zip(prompts, expected, strict=True):
                try:
                    got, sure = self._answer(prompt, tokens[1])
                    same = next((i for i, (a, b) in enumerate(zip(tokens, got, strict=False)) if a != b), len(got))
                    gaps = [abs(a - b) for a, b in zip(chances[: same + 1], sure, strict=False)]
                except RequestFailed as failed:
                    if NO_NUMBER in failed.text:
                        signs[TOKENS] = f"expected {chances}, got what is not a number"
                        break
                    new = [line for line in self.pair.failed_transfers() if line not in before]
                    seen = {name: line for name, code in CODES.items() for line in new if code in line}
                    if not seen:
                        raise  # an unrelated error shows nothing
                    signs |= {name: f"{failed}; {line}" for name, line in seen.items()}
                    break  # a failure takes long: the metaserver tries again
                # Where they part both tokens must be as probable, and what follows says nothing.
                if not max(gaps) <= self.of.limit:
                    signs[TOKENS] = f"expected {tokens}, {chances}, got {got}, {sure}"
                self.furthest = max(self.furthest, *gaps)
        finally:
            self.file.write_text("")
        return signs

    def good(self, progress: Callable[[str], None]) -> Planted:
        """Check that nothing is wrong without a fault."""
        signs = self.wrong()
        progress(f"figure: {self.of.engines}: log-probabilities at most {self.furthest:.1e} apart without a fault")
        assert not signs, signs
        return self

    def _answer(self, prompt: list[int], last: int) -> tuple[list[int], list[float]]:
        """Return a pair's answer that stops at its token `last`, behind another request if the set says so."""
        front, d = self.pair.front.url, self.pair.decode[0]
        if not self.of.before:
            return said(front, prompt, **({} if self.of.whole else {"stop_token_ids": [last]}))
        other = fresh_prompt(self.of.before, RECIPES[self.of.engines.model].vocab)
        tokens, _ = said(self.pair.prefill.url, other, cache_salt=fresh_salt("reference"))
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(said, front, other, stop_token_ids=[tokens[2]])
            eventually(lambda: counter(d, "vllm:num_requests_running"), "the first request has its blocks")
            answer = said(front, prompt, stop_token_ids=[last])
            first.result()
        assert not counter(d, "vllm:num_preemptions_total"), (
            "the second request did not wait for the first one's blocks"
        )
        return answer


def said(url: str, prompt: list[int], **more: Any) -> tuple[list[int], list[float]]:
    """Return tokens and their log-probabilities, which change with any byte of the cache."""
    choice = post(url, body_of(prompt, 12, logprobs=1, **more))["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@contextmanager
def started(name: str, verify: str, hosts: Hosts, progress: Callable[[str], None], file: Path) -> Iterator[Planted]:
    """Start a pair that is right without a fault; at its end it is so again, and all blocks are free."""
    plain = SETS[name].engines
    p, d = (dataclasses.replace(side, faults=str(file)) for side in (plain.p, plain.d))
    engines = dataclasses.replace(plain, title=f"{plain.title} {verify}", p=p, d=d, verify=verify)
    host = hosts(engines.release)
    with Cluster(fresh_directory("ascend_host"), progress, forks=host.forks) as cluster:
        planted = Planted(engines.start(host, cluster), file, SETS[name])
        if RECIPES[engines.model].recomputes_last:
            learn_of_first_tokens(planted.pair)
        yield planted.good(progress)
        planted.good(progress)
        every = (planted.pair.prefill, *planted.pair.decode)
        assert planted.pair.free_counts() == {engine.name: engine.ranks * engine.blocks() for engine in every}
    assert not cluster.leaks, cluster.leaks


@pytest.fixture(scope="module")
def planted(hosts: Hosts, progress: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a function that returns a pair: one at a time, until another is asked for."""
    file, running = tmp_path_factory.mktemp("planted") / "fault", dict[tuple[str, str], Planted]()
    with ExitStack() as stack:

        def pair(name: str, verify: str) -> Planted:
            if (name, verify) not in running:
                running.clear()
                stack.close()
                running[name, verify] = stack.enter_context(started(name, verify, hosts, progress, file))
            return running[name, verify]

        yield pair


ROWS = [(name, verify, fault) for name, one in SETS.items() for verify in one.verify for fault in one.faults]


@pytest.mark.parametrize(("name", "verify", "fault"), ROWS)
def test_a_planted_fault_is_seen(
    planted: Callable[[str, str], Planted], name: str, verify: str, fault: str, progress: Callable[[str], None]
) -> None:
    signs = planted(name, verify).wrong(fault)
    seen, furthest = ", ".join(sorted(signs)) or "nothing", planted(name, verify).furthest
    progress(f"figure: {name}, verify {verify}, {fault}: seen by {seen}, {furthest:.1e} apart: {signs}")
    able = SETS[name].faults[fault] - (set() if verify == "full" else {"checksums"})
    assert signs and set(signs) <= able, signs
