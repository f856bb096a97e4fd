# SPDX-License-Identifier: Apache-2.0
"""Pairs behind a metaserver, and checks of their answers."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from typing import Any

from tools.support.checks import (
    counter,
    eventually,
    fresh_prompt,
    fresh_salt,
    loaded_tokens,
    prefilled,
    reference_answers,
    settled_free_blocks,
    wait_for_free_blocks,
)
from tools.support.client import TimedAnswer, body_of, complete, gather
from tools.support.cluster import Cluster, Metaserver
from tools.support.compare import AnswerTally
from tools.support.cutting import Cutter
from tools.support.engine import RunningServer
from tools.support.fork_server import ForkServers
from tools.support.spec import SERVER

__all__ = [
    "FORKED",
    "Pair",
    "PairMaker",
    "close_traces",
    "counter",
    "engine_forks",
    "failures",
    "fresh_prompt",
    "prefilled",
    "reference_answers",
    "settled_free_blocks",
    "transfer_request",
    "wait_for_free_blocks",
]

# A start takes a tenth of the processor's time with both. PD_TEST_FORK=0: engines start as vLLM starts them on CPUs.
_ALONE = os.environ.get("PD_TEST_FORK") == "0"
FORKED = () if _ALONE else (Path(__file__).parent / "plugins" / "forked",)
_FAILED = re.compile(r"(transfer|push) .*(failed|cannot be pushed)|is prefilled but not pushed|is prefilled locally")


def engine_forks(logs: Path, *imported: str) -> AbstractContextManager[ForkServers | None]:
    """Return what forks engines from processes that have imported vLLM and these modules."""
    return nullcontext() if _ALONE else ForkServers((SERVER, "vllm.v1.engine.core", *imported), logs)


def apart(one: TimedAnswer, other: TimedAnswer) -> float:
    """Return how far apart two answers put a token, at most."""
    return max(map(abs, map(sub, one.chances, other.chances)), default=0.0)


@dataclass
class Pair:
    """One P, one or more D's, their metaserver."""

    cluster: Cluster
    front: Metaserver | RunningServer
    prefill: RunningServer
    decode: tuple[RunningServer, ...]
    tally: AnswerTally
    alone: RunningServer | None = None  # the reference for answers; None: P
    more_prefill: tuple[RunningServer, ...] = ()  # other servers of the same P: its ranks have an address each
    one_way: bool = True  # a token is computed alike wherever its prompt is cut
    decode_computes: bool = True  # D can compute a prompt by itself
    cutter: Cutter | None = None  # between front door and D
    left: int = 0  # last tokens of a prompt that P does not push, because D computes them for its first token

    @property
    def reference(self) -> RunningServer:
        return self.alone or self.prefill

    @property
    def all_prefill(self) -> tuple[RunningServer, ...]:
        return (self.prefill, *self.more_prefill)

    def check_lengths(self, name: str) -> None:
        """Check eleven answers: lengths around the sizes of blocks and chunks one by one, then six prompts at once."""
        for length in (20, 127, 128, 300, 700):
            self.check([fresh_prompt(length)], name=name)
        self.check([fresh_prompt(30 + 40 * i) for i in range(6)], name=f"{name}, 6 at once")

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 12,
        name: str = "",
        expected: Sequence[TimedAnswer] | None = None,
    ) -> list[TimedAnswer]:
        """Send all prompts at once; every answer must equal the single engine's, or `expected`.

        All prompts of more than one token must have been loaded from P: an answer that D computed by itself proves
        nothing.
        """
        if expected is None:
            expected = reference_answers(self.reference, prompts, max_tokens, **self.asked)
        before, failed = self.loaded_tokens(), self.failed_transfers()
        answers = gather(self.front.url, [body_of(p, max_tokens, **self.asked) for p in prompts])
        loaded = self.loaded_tokens() - before
        more = [line for line in self.failed_transfers() if line not in failed]
        assert not more, f"a transfer failed and D computed by itself: {more}"
        for index, (p, want, got) in enumerate(zip(prompts, expected, answers, strict=True)):
            title = f"{name or 'prompt'} {index} of {len(p)} tokens"
            self.judge_all(title, p, want, got)
        wanted = sum(len(p) - self.left for p in prompts if len(p) > 1)
        assert loaded == wanted, f"D loaded {loaded} tokens from P, {wanted} were wanted"
        return answers

    @property
    def asked(self) -> dict[str, int]:
        """Return what requests ask for beside tokens: their log-probabilities, if the tally compares them."""
        return {} if self.tally.limit == math.inf else {"logprobs": 1}

    def judge(
        self,
        name: str,
        prompt: Sequence[int],
        expected: Sequence[int],
        actual: Sequence[int],
        chances: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> None:
        """Compare one answer. A token that differs must be good for the reference, or for D by itself."""
        computing = self.decode if self.decode_computes else ()
        alone, body = (self.reference.url, *(d.url for d in computing)), {"cache_salt": fresh_salt("gap")}
        self.tally.check(name, prompt, expected, actual, *alone, body=body, chances=chances)

    def judge_all(self, name: str, prompt: Sequence[int], want: TimedAnswer, got: TimedAnswer) -> None:
        """Compare one answer, and the log-probabilities that both were asked for."""
        self.judge(name, prompt, want.tokens, got.tokens, (want.chances, got.chances))

    def compare(self, prompts: Sequence[Sequence[int]], answers: Sequence[TimedAnswer], name: str) -> None:
        """Compare answers that were obtained in another way with the reference's."""
        expected = reference_answers(self.reference, prompts, len(answers[0].tokens), **self.asked)
        for p, want, got in zip(prompts, expected, answers, strict=True):
            self.judge_all(name, p, want, got)

    def in_turn(self, prompts: Sequence[Sequence[int]]) -> list[TimedAnswer]:
        """Return a single engine's answers to one prompt after the other.

        If the cut of a prompt matters, it has the earlier ones in its prefix cache, as P has.
        """
        if self.one_way:
            return [answer for p in prompts for answer in reference_answers(self.reference, [p], 12, **self.asked)]
        salt = fresh_salt("reference")
        return [complete(self.reference.url, body_of(p, 12, cache_salt=salt, **self.asked)) for p in prompts]

    def check_prefix_on_decode(self, block: int, dropped: int = 0) -> None:
        """Check that D loads only what it does not have: none of the full blocks in its cache.

        `dropped`: tokens at the end of a cached prefix that vLLM does not use, as with a draft model.
        """
        head = fresh_prompt(5 * block)
        first = [*head, *fresh_prompt(block + 8)]
        cases = (
            ([*head, *fresh_prompt(3 * block + 5)], 3 * block + 5),  # part of it is cached
            (first, 8),  # all full blocks are cached
            (head, block),  # only whole blocks: D computes in the last one itself, so it loads that again
        )
        cold, *expected = self.in_turn([first, *(tokens for tokens, _ in cases)])
        self.check([first], name="cold", expected=[cold])
        for (tokens, beyond), want in zip(cases, expected, strict=True):
            wanted = beyond + dropped
            before = self.loaded_tokens()
            answer = complete(self.front.url, body_of(tokens, 12, **self.asked))
            loaded = self.loaded_tokens() - before
            assert loaded == wanted, f"D loaded {loaded} of {len(tokens)} tokens, {wanted} were wanted"
            self.judge_all(f"with {len(tokens) - wanted} tokens on D", tokens, want, answer)

    def check_prefix_on_prefill(self, block: int, dropped: int = 0) -> None:
        """Check that P also pushes a prefix that it did not compute for this request; `dropped` as above."""
        head = fresh_prompt(6 * block)
        prompts = [[*head, 9], [*head, *fresh_prompt(50)]]
        expected = self.in_turn(prompts)[1:]
        complete(self.prefill.url, body_of(prompts[0], 1))  # to P only: D does not have it
        before = counter(self.prefill, "vllm:prefix_cache_hits_total")
        self.check(prompts[1:], name="prefix on P", expected=expected)
        hits = before + len(head) - dropped
        eventually(lambda: counter(self.prefill, "vllm:prefix_cache_hits_total") >= hits, "P takes what it has cached")
        # Behind a long prompt the others wait, and then share blocks in the very step that computes them. How much of
        # them D loads depends on the order of arrival there too, and so do which of them computes the head, and where
        # the long one is cut. Two with two blocks fit into one step, which cuts neither.
        # The long prompt fills its last block: with P's first token it needs one more. On the smallest D's the loaded
        # requests hold all blocks then.
        blocks, others = (6, 4) if self.one_way else (2, 2)
        head, long = fresh_prompt(blocks * block), fresh_prompt(min(24 * block, 1024))
        prompts = [[*head, *fresh_prompt(20 + i)] for i in range(others)]
        failed = self.failed_transfers()
        first, *answers = gather(self.front.url, [body_of(p, 12, **self.asked) for p in (long, *prompts)])
        if self.one_way:
            self.compare([long, *prompts], [first, *answers], "one head at once")
        else:
            for p, answer in zip(prompts, answers, strict=True):
                anew, behind = self.in_turn([p])[0], self.in_turn([[*head, 9], p])[1]
                # Which of the two it is also shows in its log-probabilities alone.
                far = [(one.tokens != answer.tokens, apart(one, answer)) for one in (behind, anew)]
                want = behind if far[0] <= far[1] else anew
                self.judge_all("one head at once", p, want, answer)
        assert self.failed_transfers() == failed

    def check_prefix_of_states(self, block: int, dropped: int = 0) -> list[int]:
        """Check prefixes on P and on D: they end at the end of a block, with the state that is stored there.

        `dropped`: tokens at the end of a cached prefix that vLLM does not use, as with a draft model. Returns how many
        tokens of each of three prompts D took from its own cache: it has their attention, and of the last no state.
        """
        head, cached = fresh_prompt(2 * block + 9), 2 * block - dropped
        prompts = [head, [*head, *fresh_prompt(block)], [*head[: 2 * block], *fresh_prompt(7)]]
        expected = self.in_turn(prompts)
        self.check(prompts[:1], name="cold", expected=expected[:1])
        d_prefixes = [
            self._own_prefix(p, want, "a prefix on D") for p, want in zip(prompts[1:], expected[1:], strict=True)
        ]
        head = fresh_prompt(2 * block + 5)
        prompts = [head, [*head, *fresh_prompt(50)], [*head[: 2 * block], *fresh_prompt(1)]]
        expected = self.in_turn(prompts)
        before = counter(self.prefill, "vllm:prefix_cache_hits_total")
        complete(self.prefill.url, body_of(head, 1))  # to P only: D does not have it
        self.check(prompts[1:2], name="a prefix on P", expected=expected[1:2])
        d_prefixes.append(self._own_prefix(prompts[2], expected[2], "a prefix that is all of it on P"))
        hits = before + cached
        eventually(lambda: counter(self.prefill, "vllm:prefix_cache_hits_total") >= hits, "P takes what it has cached")
        assert set(d_prefixes) <= {0, cached}, d_prefixes
        return d_prefixes

    def _own_prefix(self, prompt: Sequence[int], want: TimedAnswer, name: str) -> int:
        """Check an answer; return how many of the prompt's tokens D had itself."""
        before = self.loaded_tokens()
        answer = complete(self.front.url, body_of(prompt, 12, **self.asked))
        d_tokens = len(prompt) - self.left - (self.loaded_tokens() - before)
        self.judge_all(name, prompt, want, answer)
        return d_tokens

    def loaded_tokens(self) -> int:
        """Return how many tokens the D engines have loaded from P, by vLLM's own counter."""
        return sum(loaded_tokens(engine) for engine in self.decode)

    def failed_transfers(self) -> list[str]:
        """Return the log lines about failed transfers, which a D that recomputes would hide."""
        return [line for engine in (*self.all_prefill, *self.decode) for line in failures(engine)]

    def free_counts(self) -> dict[str, int]:
        free = {engine.name: settled_free_blocks(engine) for engine in self.all_prefill}
        refuses = not self.decode_computes
        return free | {engine.name: settled_free_blocks(engine, refuses=refuses) for engine in self.decode}


PairMaker = Callable[..., Pair]  # prefill, *decode, options of the metaserver


def failures(engine: RunningServer) -> list[str]:
    text = engine.log.read_text(errors="replace")
    return [line for line in text.splitlines() if _FAILED.search(line)]


def close_traces(pair: Pair) -> None:
    """Make each process write its trace: one does so with the first event after a second."""
    time.sleep(1.1)
    gather(pair.front.url, [body_of(fresh_prompt(40), 1) for _ in range(2 * len(pair.decode))])


def transfer_request(
    metaserver: str, ticket: str, tokens: Sequence[int], max_tokens: int = 8, **more: Any
) -> dict[str, Any]:
    """Return a request as a metaserver sends it to D, with a ticket."""
    params = {"do_remote_prefill": True, "metaserver": metaserver, "ticket": ticket, **more}
    return body_of(tokens, max_tokens, kv_transfer_params=params)
