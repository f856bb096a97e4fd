# SPDX-License-Identifier: Apache-2.0
"""SIGSTOP of one process of a real pair at a time: its API server, its engine core or a worker, beside clients.

The cells (cells.py) stop whole engines. Here one process stands still and all others go on, so that each wait for it is
met: of a client, of the metaserver, of its engine's other processes, of the other engine. Clients stream all the while.
Each gets right tokens, as probable as a single engine has them, or an error with a code, within `ENDED_S`. Once the
process goes on, clients are served, KV is loaded from P, no process is lost, and all blocks are free again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import psutil

from tools.support.cells import LIMIT_S, ROLES, FaultSite, PromiseBroken
from tools.support.checks import (
    eventually,
    fresh_prompt,
    fresh_salt,
    reference_answers,
    settled_free_blocks,
    wait_for_free_blocks,
)
from tools.support.client import RequestFailed, TimedAnswer, body_of, stream
from tools.support.engine import EngineProcess
from tools.support.process import freeze

PROCESSES = ("API server", "engine core", "worker")  # each the parent of the next
# Shorter than a long stop: a client's wait ends by the metaserver's deadline, not by SIGCONT.
DEADLINES = ("--first-byte-timeout", "20", "--prefill-timeout", "20", "--idle-timeout", "20")
ENDED_S = 95.0  # 20 s of silence in a stream, then three attempts of 20 s (--attempts), and a busy machine
CLIENTS = 4
LENGTHS = (300, 40, 130, 210, 90, 170)
TOKENS = 24
PAUSE_S = 0.25  # of a client behind an error
ASKED = {"logprobs": 1}


@dataclass
class StopResult:
    """Result of one stop: answers by kind, and seconds."""

    role: str
    process: str
    seconds: float
    ended: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0  # from a request to the end of its answer
    served_s: float = 0.0  # from SIGCONT to the end of the first right answer
    clean_s: float = 0.0  # from the last client's end until all blocks are free

    def __str__(self) -> str:
        return f"{self.process} of {ROLES[self.role]} for {self.seconds:g} s"


class Streams:
    """Clients that stream until `end`, each the next prompt as soon as its answer has ended."""

    def __init__(self, url: str, prompts: Sequence[Sequence[int]]) -> None:
        self.right: list[tuple[int, TimedAnswer, float]] = []  # prompt, answer, when it ended
        self.ended: Counter[str] = Counter()
        self.broken: list[str] = []
        self.slowest_s = 0.0
        self._url, self._prompts = url + "/v1/completions", prompts
        self._next, self._stopping = itertools.count(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), name="streams")
        self._thread.start()

    def end(self) -> None:
        """Send no more, and wait for the answers that are under way."""
        self._stopping.set()
        self._thread.join(ENDED_S + LIMIT_S)
        if self._thread.is_alive():
            self.broken.append("clients wait without end")

    def until_right(self, sent_after: float, limit_s: float) -> float:
        """Wait for a right answer to what was sent after that time. Return when it ended."""
        until = time.monotonic() + limit_s
        while True:
            for _, answer, at in list(self.right):
                if answer.started > sent_after:
                    return at
            if time.monotonic() > until:
                raise PromiseBroken(f"no right answer within {limit_s:.0f} s: {dict(self.ended)}")
            time.sleep(0.02)

    async def _all(self) -> None:
        # One connection per request: the server may close a kept one just as it is used again.
        limits = httpx.Limits(max_connections=2 * CLIENTS, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=30.0), limits=limits, trust_env=False, verify=False
        ) as client:
            await asyncio.gather(*(self._client(client) for _ in range(CLIENTS)))

    async def _client(self, client: httpx.AsyncClient) -> None:
        while not self._stopping.is_set():
            which, begun = next(self._next) % len(self._prompts), time.monotonic()
            body = body_of(self._prompts[which], TOKENS, cache_salt=fresh_salt("stops"), **ASKED)
            try:
                answer = await asyncio.wait_for(stream(client, self._url, body), ENDED_S)
                self.right.append((which, answer, time.monotonic()))
                self.ended["right"] += 1
            except RequestFailed as refused:
                self.ended[self._code(refused)] += 1
                await asyncio.sleep(PAUSE_S)
            except (httpx.HTTPError, asyncio.TimeoutError) as problem:
                self.broken.append(f"after {time.monotonic() - begun:.1f} s: {problem!r}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun)

    def _code(self, refused: RequestFailed) -> str:
        try:
            said = json.loads(refused.text)
            of_event = "error" not in said  # an event has no status
            return f"error event {said['code']}" if of_event else f"{refused.status} {said['error']['code']}"
        except (ValueError, KeyError, TypeError):
            self.broken.append(f"an error without a code: {refused}")
            return "without a code"


class Stops:
    """The stops of one site, one after another, each with the same prompts under salts of their own."""

    def __init__(self, site: FaultSite) -> None:
        self._site = site
        self._engines = {"P": site.prefill, "D": site.decode}
        self._prompts = [fresh_prompt(length) for length in LENGTHS]
        self._expected = reference_answers(site.prefill, self._prompts, TOKENS, **ASKED)

    def __call__(self, role: str, process: str, seconds: float) -> StopResult:
        row, engines = StopResult(role, process, seconds), list(self._engines.values())
        free = {engine.name: settled_free_blocks(engine) for engine in engines}
        pids = {engine.name: _pids(engine) for engine in engines}
        pid = _pid(self._engines[role], process)
        streams = Streams(self._site.front.url, self._prompts)
        try:
            streams.until_right(0.0, LIMIT_S)
            freeze(pid)
            try:
                time.sleep(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
            went_on = time.monotonic()
            row.served_s = streams.until_right(went_on, LIMIT_S) - went_on
        finally:
            streams.end()
            row.ended, row.slowest_s = streams.ended, streams.slowest_s
        ended = time.monotonic()
        self._judge(row, streams)
        eventually(self._ready, "a pair that has moved KV is ready", LIMIT_S)  # so that no canary comes between
        self._site.serve(str(row), time.monotonic() + LIMIT_S)
        wait_for_free_blocks(engines, free, 2 * LIMIT_S)
        row.clean_s = time.monotonic() - ended
        if lost := {engine.name: gone for engine in engines if (gone := pids[engine.name] - _pids(engine))}:
            raise PromiseBroken(f"{row}: processes have ended: {lost}")
        return row

    def _ready(self) -> bool:
        answer = httpx.get(f"{self._site.front.url}/readiness", timeout=5.0, trust_env=False, verify=False)
        return answer.status_code == 200

    def _judge(self, row: StopResult, streams: Streams) -> None:
        if streams.broken:
            raise PromiseBroken(f"{row}: {len(streams.broken)} answers had no clear end: {streams.broken[:3]}")
        alone = [engine.url for engine in self._engines.values()]
        for which, got, _ in streams.right:
            prompt, want = self._prompts[which], self._expected[which]
            salt, chances = {"cache_salt": fresh_salt("gap")}, (want.chances, got.chances)
            self._site.tally.check(str(row), prompt, want.tokens, got.tokens, *alone, body=salt, chances=chances)


def _pid(engine: EngineProcess, process: str) -> int:
    chosen = psutil.Process(engine.process.pid)
    for _ in range(PROCESSES.index(process)):  # beside trackers of resources, which are small
        chosen = max(chosen.children(), key=lambda child: child.memory_info().rss)
    return int(chosen.pid)


def _pids(engine: EngineProcess) -> set[int]:
    return {process.pid for process in engine.process.members()}


def stop_table(rows: Sequence[StopResult]) -> list[str]:
    """Return the rows as a Markdown table."""
    lines = [
        "| process | SIGSTOP for | answers | slowest | right again after | blocks free after |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        answers = ", ".join(f"{count} {what}" for what, count in sorted(row.ended.items()))
        times = " | ".join(f"{t:.1f} s" for t in (row.slowest_s, row.served_s, row.clean_s))
        lines.append(f"| {row.process} of {ROLES[row.role]} | {row.seconds:g} s | {answers} | {times} |")
    return lines
