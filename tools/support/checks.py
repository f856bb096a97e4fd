# SPDX-License-Identifier: Apache-2.0
"""Checks of a running pair: fresh prompts, a single engine's answers, counters, free blocks.

Answers are compared with those of one engine with P's TP size. Where that is P itself, it gets the request without
transfer parameters and with a cache salt of its own, so that it computes the whole prompt as a single engine would.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tools.support.client import RequestFailed, TimedAnswer, body_of, gather, post, prompt
from tools.support.engine import RunningServer

_fresh = itertools.count(1)


def eventually(reached: Callable[[], object], what: str, deadline_s: float = 30.0) -> None:
    """Wait until `reached()` is true: counters of engines and metaserver may change after the answer."""
    end = time.monotonic() + deadline_s
    while not reached():
        assert time.monotonic() < end, f"after {deadline_s:.0f} s still not so: {what}"
        time.sleep(0.05)


def fresh_prompt(length: int, vocab: int = 512) -> list[int]:
    """Return a prompt that no engine of this session has seen."""
    return prompt(length, 10_000 + next(_fresh), vocab)


def fresh_salt(word: str) -> str:
    return f"{word}-{next(_fresh)}"


def reference_answers(
    engine: RunningServer, prompts: Sequence[Sequence[int]], max_tokens: int, **more: Any
) -> list[TimedAnswer]:
    """Return a single engine's answers, computed without its prefix cache."""
    bodies = [body_of(p, max_tokens, cache_salt=fresh_salt("reference"), **more) for p in prompts]
    return gather(engine.url, bodies)


def counter(engine: RunningServer, name: str) -> int:
    return round(engine.metrics().get(name, 0.0))


def first_tokens(engine: RunningServer) -> int:
    """Return how many requests of a D engine have begun with P's first token."""
    return counter(engine, "vllm:ascend_pd_first_tokens_taken_total")


def loaded_tokens(engine: RunningServer) -> int:
    """Return how many tokens a D engine has loaded from P, by vLLM's own counter."""
    return counter(engine, "vllm:external_prefix_cache_hits_total")


def front_counter(url: str, name: str, label: str = "") -> float:
    """Return a counter of the metaserver, summed over all its labels or over those that contain `label`."""
    page = httpx.get(url + "/metrics", trust_env=False, verify=False).text
    lines = [line for line in page.splitlines() if re.match(rf"ascend_pd_metaserver_{name}_total[{{ ]", line)]
    return sum(float(line.split()[-1]) for line in lines if label in line)


def prefilled(url: str) -> float:
    """Return how many loads got their KV from P, as D has reported them, at any time relative to the answer."""
    return front_counter(url, "loads", 'end="received"')


@dataclass(frozen=True)
class Drafted:
    """Counts of a draft model, by vLLM's counters."""

    steps: int
    tokens: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.accepted / self.tokens


@contextmanager
def drafted(engine: RunningServer) -> Iterator[Callable[[], Drafted]]:
    """Yield a function that returns, after the block, the engine's counts within the block."""
    names = [f"vllm:spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    before = [counter(engine, name) for name in names]
    after: list[int] = []
    yield lambda: Drafted(*(b - a for a, b in zip(before, after, strict=True)))
    after.extend(counter(engine, name) for name in names)


def settled_free_blocks(engine: RunningServer, *, refuses: bool = False) -> int:
    """Return the free blocks after one more step on each rank: the gauge only shows the scheduler's latest step.

    `refuses`: it is a D that computes no prompts, and makes that step to say so.
    """
    for rank in range(engine.ranks):
        whose = {"X-data-parallel-rank": str(rank)} if engine.ranks > 1 else None
        try:
            post(engine.url, body_of([7], 1, cache_salt=fresh_salt("settle")), headers=whose)
        except RequestFailed:
            if not refuses:
                raise
    return engine.free_blocks()


def wait_for_free_blocks(engines: Sequence[RunningServer], wanted: Mapping[str, int], deadline_s: float = 60.0) -> None:
    """Wait until each engine has as many free blocks as before, or fail with the counts."""
    until = time.monotonic() + deadline_s
    while True:
        now = {engine.name: settled_free_blocks(engine) for engine in engines}
        if all(now[engine.name] == wanted[engine.name] for engine in engines):
            return
        assert time.monotonic() < until, f"free blocks after {deadline_s:.0f} s: {now}; before: {dict(wanted)}"
        time.sleep(0.25)
