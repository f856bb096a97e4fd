# SPDX-License-Identifier: Apache-2.0
"""Clients: `vllm bench serve` for requests that do not depend on answers, and one of our own for chats."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tools.bench_load_parts import figures
from tools.bench_load_parts.figures import TimedRequest
from tools.bench_load_parts.loads import TURNS, Lengths, LoadCase
from tools.support.client import RequestFailed, TimedAnswer, body_of, prompt, stream
from tools.support.fork_server import ForkServers
from tools.support.models import RECIPES, ROOT, ensure
from tools.support.process import Child
from tools.support.spec import child_environment
from vllm_ascend_pd.cli.load.arrivals import Limits

SERVE = "tools.bench_load_parts.serve"
LOOK_S = 0.2
SHOWN_S = 10.0


class PointTooLong(RuntimeError):
    """A point did not end within its limit."""


def serve(
    url: str,
    model: str,
    case: LoadCase,
    trace: Path,
    chunk: int,
    limits: Limits,
    limit_s: float,
    progress: Callable[[float], None],
    forks: ForkServers | None = None,
) -> dict[str, Any]:
    """Run `vllm bench serve` with the requests of a trace file. Return its results."""
    result, log = trace.with_suffix(".result.json"), trace.with_suffix(".log")
    result.unlink(missing_ok=True)
    count = len(trace.read_text().splitlines())
    words = flags(url, ensure(model), case, trace, count, chunk, limits, result)
    # The prompts' tokens follow from the hash of strings, which is to be the same for each system.
    environment = {**child_environment(npu=False), "PYTHONHASHSEED": "0"}
    child = Child(trace.stem, [sys.executable, "-m", SERVE, *words], log, environment, ROOT, forks)
    _wait(child, limit_s, progress)
    if child.returncode or not result.exists():
        raise RuntimeError(f"vllm bench serve ended with {child.returncode}; the end of {log}:\n{child.tail()}")
    results: dict[str, Any] = json.loads(result.read_text())
    results["errors"] = [error for error in results["errors"] if error]
    return results


def flags(
    url: str, model: Path, case: LoadCase, trace: Path, count: int, chunk: int, limits: Limits, result: Path
) -> list[str]:
    """Return the flags of `vllm bench serve` for a trace of `count` requests."""
    words = ["--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
    words += ["--model", str(model), "--served-model-name", "model", "--tokenizer", str(model), "--temperature", "0"]
    words += ["--dataset-name", "timed_trace", "--dataset-path", str(trace), "--num-prompts", str(count)]
    words += ["--timed-trace-sec-multiplier", "0.001", "--timed-trace-chunk-hash-size", str(chunk)]
    if case.kind == "clients":
        words += ["--no-self-timed", "--max-concurrency", f"{case.value:g}"]
    # A first request, not counted, puts a common prefix into the caches.
    words += ["--ready-check-timeout-sec", "120" if case.prefix else "0", "--disable-tqdm"]
    words += ["--goodput", f"ttft:{limits.ttft * 1e3:.3f}", f"tpot:{limits.tpot * 1e3:.3f}"]
    words += ["--percentile-metrics", ",".join(figures.TIMES)]
    words += ["--metric-percentiles", ",".join(map(str, figures.PERCENTILES))]
    return [*words, "--save-result", "--save-detailed", "--result-filename", str(result)]


def _wait(child: Child, limit_s: float, progress: Callable[[float], None]) -> None:
    began = shown = time.monotonic()
    while child.alive:
        now = time.monotonic()
        if now - began > limit_s:
            child.stop(grace_s=5.0)
            raise PointTooLong(f"it did not end within {limit_s:.0f} s")
        if now - shown >= SHOWN_S:
            shown = now
            progress(now - began)
        time.sleep(LOOK_S)


def chats(
    url: str, model: str, case: LoadCase, lengths: Lengths, count: int, seed: int, limits: Limits, limit_s: float
) -> dict[str, Any]:
    """Run chats in closed loops, each turn with all of the chat before as its prompt. Return the figures."""
    vocab, dice = RECIPES[model].vocab, random.Random(f"chats/{seed}")
    begins = iter([prompt(lengths.turn, dice.getrandbits(60), vocab) for _ in range(count * TURNS)])
    seen: list[TimedRequest] = []

    async def loop(client: httpx.AsyncClient) -> None:
        for _ in range(max(1, count // int(case.value))):
            said: list[int] = []
            for _ in range(TURNS):
                said += next(begins)
                answer = TimedAnswer()
                try:
                    await stream(client, f"{url}/v1/completions", body_of(said, lengths.answer), answer)
                except (RequestFailed, httpx.HTTPError) as problem:
                    seen.append(TimedRequest(error=str(problem) or type(problem).__name__))
                    break
                gaps = tuple(after - before for before, after in zip(answer.times, answer.times[1:], strict=False))
                seen.append(TimedRequest(answer.ttft, gaps, len(answer.tokens)))
                said += answer.tokens

    async def run() -> None:
        connections = httpx.Limits(max_connections=int(case.value), max_keepalive_connections=int(case.value))
        async with httpx.AsyncClient(timeout=limit_s, limits=connections, trust_env=False) as client:
            try:
                await asyncio.wait_for(asyncio.gather(*(loop(client) for _ in range(int(case.value)))), limit_s)
            except asyncio.TimeoutError:
                raise PointTooLong(f"it did not end within {limit_s:.0f} s") from None

    began = time.monotonic()
    asyncio.run(run())
    return figures.of_requests(seen, time.monotonic() - began, limits)


def new_of_chats(count: int, lengths: Lengths) -> int:
    """Return how many tokens of the prompts of so many chats were in no earlier prompt; answers come back in them."""
    return count * (TURNS * lengths.turn + (TURNS - 1) * lengths.answer)
