# SPDX-License-Identifier: Apache-2.0
"""Are two answers the same? Token by token; a difference is only excused where the reference itself hung in the balance.

At the first differing place both sides have seen the same tokens, so the reference's logits there say how close
the two best were. Below `tie` (1e-4, for float32) the order of additions may decide: such an answer is counted and
excused, at most one in a thousand (or one in a run of fewer). Anything else is wrong KV until proven otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.support.client import post

TIE = 1e-4
EXCUSED_PER = 1000


class TokensDiffer(AssertionError):
    """An answer that is not the reference's."""


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """Index of the first token that differs (a missing one included), or None."""
    for index, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(actual) else min(len(expected), len(actual))


def top_two_gap(reference: str, prompt: Sequence[int], body: Mapping[str, Any] | None = None) -> float:
    """The reference's logit gap between its two best next tokens after `prompt` (logprobs differ as logits do)."""
    asked = {"model": "model", **(body or {}), "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "logprobs": 2}
    answer = post(reference, {**asked, "ignore_eos": True, "return_tokens_as_token_ids": True})
    top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    best = sorted(top.values(), reverse=True)
    return float(best[0] - best[1])


@dataclass
class Tally:
    """Counts answers and excuses over a whole run."""

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
        """Raise TokensDiffer unless equal or excused. `reference` is the URL of the single engine, still running."""
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
