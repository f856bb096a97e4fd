# SPDX-License-Identifier: Apache-2.0
"""How long a step of an engine takes: two lines, given or read from an engine's own /metrics. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_PREFILLS = "vllm:request_prefill_time_seconds"
_COMPUTED = "vllm:request_prefill_kv_computed_tokens_sum"
_GAPS = "vllm:inter_token_latency_seconds"
_STEPS = "vllm:iteration_tokens_total_count"
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
    """Return (prompt tokens, seconds) and (answers at once, seconds) from pages of engines' metrics.

    Each page counts from the one before it that has smaller counts: of one engine, scraped again.
    """
    prefills: list[tuple[float, float]] = []
    decodes: list[tuple[float, float]] = []
    before: dict[str, float] = {}
    for page in pages:
        now: dict[str, float] = {}
        for name, value in _SAMPLE.findall(page):
            now[name] = now.get(name, 0.0) + float(value)
        continues = all(now.get(name, 0.0) >= value for name, value in before.items() if name.endswith("_count"))
        grown = {name: value - (before.get(name, 0.0) if continues else 0.0) for name, value in now.items()}
        before = now
        requests, computed = grown.get(f"{_PREFILLS}_count", 0.0), grown.get(_COMPUTED, 0.0)
        gaps = grown.get(f"{_GAPS}_count", 0.0)
        if requests and gaps >= requests * (_DECODES - 1):
            steps = grown.get(_STEPS, 0.0)
            decodes += [(gaps / steps, grown[f"{_GAPS}_sum"] / gaps)] if steps else []
        elif requests and computed:
            prefills.append((computed / requests, grown[f"{_PREFILLS}_sum"] / requests))
    return prefills, decodes
