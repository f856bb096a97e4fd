# SPDX-License-Identifier: Apache-2.0
"""Times of an engine's steps: two lines, given or read from an engine's own /metrics. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_SAMPLE = re.compile(r"^(vllm:\w+?)(?:_bucket\{[^}]*(le=\"[^\"]+\")[^}]*\}|(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)
_PREFILLS = "vllm:request_prefill_time_seconds"
_GAPS = "vllm:inter_token_latency_seconds"
_STEPS = "vllm:iteration_tokens_total"
_DECODES = 1.5  # tokens of an answer from which on an engine's steps are those of a D


@dataclass(frozen=True, slots=True)
class StepLine:
    """Seconds = `base` + `slope` * how many."""

    base: float
    slope: float

    def __call__(self, count: float) -> float:
        return self.base + self.slope * count if count else 0.0

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]], *, flat: bool) -> StepLine:
        """Return the line closest to the points. Of one count, or with a falling line: `flat`, or from zero."""
        x, y = (np.array(values, dtype=float) for values in zip(*points, strict=True))
        slope = float(np.polyfit(x, y, 1)[0]) if np.ptp(x) > 0.05 * x.mean() else -1.0
        base = float(y.mean() - slope * x.mean())
        if slope > 0 and base >= 0:
            return cls(base, slope)
        return cls(float(y.mean()), 0.0) if flat else cls(0.0, float(y.sum() / x.sum()))


@dataclass(frozen=True, slots=True)
class StepLines:
    """An engine's steps: tokens of prompts, and answers at once. A step that has both takes both."""

    prefill: StepLine
    decode: StepLine

    def seconds(self, tokens: int, answers: int) -> float:
        return self.prefill(tokens) + self.decode(answers)


def measured(pages: Iterable[str]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return (prompt tokens, seconds) and (answers at once, seconds) of steps, from pages of engines' metrics.

    Each page counts from the one before it that has smaller counts: of one engine, read again.
    """
    prefills: list[tuple[float, float]] = []
    decodes: list[tuple[float, float]] = []
    before: dict[str, float] = {}
    for page in pages:
        now: dict[str, float] = {}
        for name, bound, value in _SAMPLE.findall(page):
            now[name + bound] = now.get(name + bound, 0.0) + float(value)
        continues = all(now.get(name, 0.0) >= value for name, value in before.items() if name.endswith("_count"))
        grown = {name: value - (before.get(name, 0.0) if continues else 0.0) for name, value in now.items()}
        before = now
        requests, gaps = grown.get(f"{_PREFILLS}_count", 0.0), grown.get(f"{_GAPS}_count", 0.0)
        if not requests or not grown.get(f"{_STEPS}_count"):
            continue
        if gaps >= requests * (_DECODES - 1):
            decodes.append((_shared(grown), grown[f"{_GAPS}_sum"] / gaps))
        else:
            prefills.append((_shared(grown), grown[f"{_PREFILLS}_sum"] / requests))
    return prefills, decodes


def _shared(grown: Mapping[str, float]) -> float:
    """Return the tokens of the step that a token is in, on average.

    A request's time is that of its step, so a step with many counts as often. How large the steps of a bucket are is
    not known: they are taken to lie in its middle, and then scaled so that all have the right sum.
    """
    bounds = sorted(
        (float(name.split('"')[1]), value) for name, value in grown.items() if name.startswith(f"{_STEPS}le=")
    )
    sizes: list[tuple[float, float]] = []
    low, known = 0.0, 0.0
    for bound, upto in bounds:
        if upto > known:
            sizes.append((upto - known, low if math.isinf(bound) else (low + bound) / 2))
        low, known = bound, max(known, upto)
    total = sum(count * size for count, size in sizes)
    mean = grown[f"{_STEPS}_sum"] / grown[f"{_STEPS}_count"]
    if not total:
        return mean
    return mean * known * sum(count * size * size for count, size in sizes) / total**2
