# SPDX-License-Identifier: Apache-2.0
"""Comparison of answers token by token, which allows for ties between the best tokens.

Up to the first difference both sides have seen the same tokens, so an engine's logits at that place tell how much worse
the other token is. Below `tie` (1e-4, for float32) the order of additions can decide. Each later token of that answer
is compared in the same way, behind the answer's own beginning. Such an answer is counted and excused, at most one in a
thousand (or one in a smaller run). Any other difference is treated as wrong KV.

Equal tokens show little of a cache: with one token's KV of one layer gone most answers keep all of theirs. Their
log-probabilities change with any byte of it. Where a tally has a `limit`, those of equal tokens may be that far apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.support.client import post
from tools.support.spec import LOGPROBS

TIE = 1e-4
EXCUSED_SHARE = 0.001


class TokensDiffer(AssertionError):
    """An answer differs from the reference's, in a token or in how probable one is."""


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Return the index of the first token that differs (a missing one included), or None."""
    for index, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(actual) else min(len(expected), len(actual))


def best_tokens(engine: str, prompt: Sequence[int], body: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Return the log-probabilities of the engine's best tokens after `prompt`."""
    asked = {"model": "model", **(body or {}), "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    answer = post(engine, {**asked, "logprobs": LOGPROBS, "ignore_eos": True, "return_tokens_as_token_ids": True})
    top: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    return top


def shortfall(engine: str, prompt: Sequence[int], token: int, body: Mapping[str, Any] | None = None) -> float:
    """Return how far the engine, alone, puts `token` below its best one after `prompt` (log-probabilities differ as
    logits do)."""
    top = best_tokens(engine, prompt, body)
    return float(max(top.values()) - top.get(f"token_id:{token}", -math.inf))


def apart(one: str, other: str, prompts: Sequence[Sequence[int]], body: Mapping[str, Any] | None = None) -> float:
    """Return how far apart two single engines put a token, at most, of the best ones of both after one of `prompts`."""
    gaps = [0.0]
    for prompt in prompts:
        a, b = best_tokens(one, prompt, body), best_tokens(other, prompt, body)
        gaps += [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
    return max(gaps)


@dataclass
class AnswerTally:
    """Counter of answers and excuses in a whole run."""

    answers: int = 0
    tokens: int = 0
    excused: list[str] = field(default_factory=list)
    tie: float = TIE
    excused_share: float = EXCUSED_SHARE  # of all answers; one answer may be excused in any case
    judged_from: int = 0  # the share of fewer answers is checked by `check_share` alone: two of two may be chance
    limit: float = math.inf  # between two log-probabilities of a token behind the same tokens; inf: not compared
    furthest: float = 0.0
    chances: int = 0  # log-probabilities compared

    def check(
        self,
        name: str,
        prompt: Sequence[int],
        expected: Sequence[int],
        actual: Sequence[int],
        *engines: str,
        body: Mapping[str, Any] | None = None,
        chances: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> None:
        """Raise TokensDiffer unless equal or excused. `chances`: the log-probabilities of both sides' tokens.

        `engines`: URLs of single engines that are still running; a token that is good for one of them is good. A pair
        of unequal TP adds up as P in the prompt and as D after it, so both are asked there, each without the other.
        """
        self.answers += 1
        self.tokens += len(actual)
        where = first_difference(expected, actual)
        self._compare(name, chances, len(actual) if where is None else where)
        if where is None:
            return
        difference = f"{name}: token {where} of {len(expected)} differs: expected {list(expected)}, got {list(actual)}"
        if len(expected) != len(actual):
            raise TokensDiffer(f"{difference} (one is shorter)")
        worst = 0.0
        for place in range(where, len(actual)):
            begun = [*prompt, *actual[:place]]
            gaps = [shortfall(engine, begun, actual[place], body) for engine in engines]
            if min(gaps) >= self.tie:
                worse = " and ".join(f"{gap:.3e}" for gap in gaps)
                raise TokensDiffer(f"{difference}; token {place} is {worse} worse than the best of one engine")
            worst = max(worst, min(gaps))
        difference += f"; from there on no token is more than {worst:.3e} worse than the best of one engine"
        print(f"excused: {difference}", flush=True)
        self.excused.append(difference)
        if self.answers >= self.judged_from:
            self.check_share()

    def _compare(self, name: str, chances: tuple[Sequence[float], Sequence[float]] | None, common: int) -> None:
        """Compare the log-probabilities of the first `common` tokens, which are equal."""
        if chances is None or self.limit == math.inf:
            return
        (expected, actual) = chances
        if min(len(expected), len(actual)) < common:
            raise TokensDiffer(f"{name}: {len(expected)} and {len(actual)} log-probabilities of {common} equal tokens")
        gaps = [abs(a - b) for a, b in zip(expected[:common], actual[:common], strict=True)]
        self.chances += common
        self.furthest = max(self.furthest, *gaps, 0.0)
        for place, gap in enumerate(gaps):
            if not gap <= self.limit:  # nor what is no number
                both = f"{expected[place]} expected, {actual[place]} got"
                raise TokensDiffer(f"{name}: token {place} has log-probability {both}: {gap:.3e} apart")

    def check_share(self) -> None:
        """Raise TokensDiffer if more answers are excused than may be."""
        if len(self.excused) > max(self.answers * self.excused_share, 1):
            last = self.excused[-1]
            raise TokensDiffer(f"{len(self.excused)} excused answers of {self.answers} are too many; the last: {last}")

    def summary(self) -> str:
        said = f"{self.answers} answers, {self.tokens} tokens compared, {len(self.excused)} excused"
        chances = f"{self.chances} log-probabilities at most {self.furthest:.1e} apart, {self.limit:g} allowed"
        return f"{said}, {chances}" if self.chances else said
