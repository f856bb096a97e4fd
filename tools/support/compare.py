# SPDX-License-Identifier: Apache-2.0
"""Comparison of answers token by token, which allows for ties between the reference's two best logits.

Up to the first difference both sides have seen the same tokens, so the reference's logits at that place tell how close
its two best tokens were. Below `tie` (1e-4, for float32) the order of additions can decide: such an answer is counted
and excused, at most one in a thousand (or one in a smaller run). Any other difference is treated as wrong KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.support.client import post

TIE = 1e-4
EXCUSED_PER = 1000


class TokensDiffer(AssertionError):
    """An answer differs from the reference's."""


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Return the index of the first token that differs (a missing one included), or None."""
    for index, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(actual) else min(len(expected), len(actual))


def top_two_gap(reference: str, prompt: Sequence[int], body: Mapping[str, Any] | None = None) -> float:
    """Return the gap between the reference's two best logits after `prompt` (log-probabilities differ as logits do)."""
    asked = {"model": "model", **(body or {}), "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "logprobs": 2}
    answer = post(reference, {**asked, "ignore_eos": True, "return_tokens_as_token_ids": True})
    top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    best = sorted(top.values(), reverse=True)
    return float(best[0] - best[1])


@dataclass
class Tally:
    """Counter of answers and excuses in a whole run."""

    answers: int = 0
    tokens: int = 0
    excused: list[str] = field(default_factory=list)
    tie: float = TIE
    excused_per: int = EXCUSED_PER

    def check(
        self,
        name: str,
        prompt: Sequence[int],
        expected: Sequence[int],
        actual: Sequence[int],
        reference: str,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise TokensDiffer unless equal or excused.

        `reference` is the URL of a single engine that is still running.
        """
        self.answers += 1
        self.tokens += len(actual)
        where = first_difference(expected, actual)
        if where is None:
            return
        told = f"{name}: token {where} of {len(expected)} differs: expected {list(expected)}, got {list(actual)}"
        if where >= min(len(expected), len(actual)):
            raise TokensDiffer(f"{told} (one is shorter)")
        gap = top_two_gap(reference, [*prompt, *expected[:where]], body)
        told += f"; the reference's two best logits there are {gap:.3e} apart"
        if gap >= self.tie:
            raise TokensDiffer(told)
        print(f"excused: {told}", flush=True)
        self.excused.append(told)
        if len(self.excused) * self.excused_per > max(self.answers, self.excused_per):
            raise TokensDiffer(f"{len(self.excused)} excused answers of {self.answers} are too many; the last: {told}")

    def summary(self) -> str:
        return f"{self.answers} answers, {self.tokens} tokens compared, {len(self.excused)} excused"
