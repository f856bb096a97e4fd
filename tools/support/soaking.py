# SPDX-License-Identifier: Apache-2.0
"""A long mixed load on a pair: every answer compared with a single engine's, the servers checked for growth.

The load is a function of a seed: fresh prompts of mixed lengths, common prefixes with fresh tails, repetitions; some
clients disconnect. Ten times in a run the load pauses, and what each server holds is recorded (`ResourceSample`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import psutil

from tools.support.checks import fresh_salt, settled_free_blocks
from tools.support.client import RequestFailed, TimedAnswer, body_of, stream
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess
from tools.support.process import Child

VOCAB = 512
HEADS = 24
LEAVE = 0.02
PROGRESS_S = 15.0
FENCED_S = 90.0
BACK_S = 1.0  # wait after a 503
MAX_503 = 120
WORKER = "VLLM::Worker"  # vLLM's title of its worker processes
OPEN = "vllm:ascend_pd_reservations_open"


class SoakedServer(Protocol):
    """An engine or a metaserver."""

    @property
    def name(self) -> str: ...
    @property
    def process(self) -> Child: ...


@dataclass(frozen=True)
class Ask:
    """One client's request."""

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    leaves_after: float | None


class Mix:
    """Requests of a seed: the same index always gives the same request."""

    def __init__(self, seed: int, longest: int) -> None:
        self._seed, self._longest = seed, longest
        dice = random.Random(f"heads of {seed}")
        self._heads = [_tokens(dice, dice.randrange(32, 257)) for _ in range(HEADS)]

    def __getitem__(self, index: int) -> Ask:
        dice = random.Random(f"{self._seed}/{index}")
        kind = dice.random()
        if kind < 0.08 and index > 20:
            prompt = self[index - dice.randrange(1, 20)].prompt  # the prompt of a recent request
        elif kind < 0.40:
            prompt = dice.choice(self._heads) + _tokens(dice, dice.randrange(1, 200))
        elif kind < 0.43:
            prompt = _tokens(dice, 1)
        elif kind < 0.70:
            prompt = _tokens(dice, dice.randrange(2, 48))
        elif kind < 0.96:
            prompt = _tokens(dice, dice.randrange(48, 320))
        else:
            prompt = _tokens(dice, dice.randrange(320, self._longest))
        leaves = dice.uniform(0.01, 0.6) if dice.random() < LEAVE else None
        return Ask(index, prompt, dice.randrange(2, 11), leaves)


def _tokens(dice: random.Random, length: int) -> tuple[int, ...]:
    return tuple(dice.randrange(3, VOCAB - 1) for _ in range(length))


@dataclass(frozen=True)
class ResourceSample:
    """Resources of one server during a pause of the load."""

    done: int  # number of prompts so far
    server: str
    pid: int
    host_mib: float  # front end and scheduler, or the metaserver
    workers_mib: float
    workers: int
    threads: int
    sockets: int
    free_blocks: int | None
    open_transfers: int | None


def sample(server: SoakedServer, done: int) -> ResourceSample:
    host = workers_own = workers = threads = sockets = 0
    for process in server.process.members():
        try:
            # shared memory (queues, libraries) grows page by page as it is first used
            unshared = process.memory_full_info().uss
            if process.name().startswith(WORKER):
                workers_own, workers = workers_own + unshared, workers + 1
            else:
                host += unshared
            threads += process.num_threads()
            sockets += _sockets(process.pid)
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
    free = settled_free_blocks(server) if isinstance(server, EngineProcess) else None
    mib = (host / 2**20, workers_own / 2**20, workers)
    return ResourceSample(done, server.name, server.process.pid, *mib, threads, sockets, free, _open_transfers(server))


def _open_transfers(server: SoakedServer, *, settle: bool = False) -> int | None:
    """Return the open transfers of a D, None for other servers.

    The gauge shows the latest step; `settle` runs one more.
    """
    if isinstance(server, EngineProcess) and server.spec.role == "kv_consumer":
        if settle:
            settled_free_blocks(server)
        return round(server.metrics().get(OPEN, 0.0))
    return None


def _sockets(pid: int) -> int:
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += str(entry.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    return count


@dataclass
class Soak:
    """One run. `servers` are sampled; `half_way` is called once in the middle, beside the load."""

    front_url: str
    reference: EngineProcess
    servers: Callable[[], Sequence[SoakedServer]]
    tally: AnswerTally
    say: Callable[[str], None]
    salted: bool  # the reference is a member of the pair, so it is asked with cache salts
    half_way: Callable[[], None] | None = None
    at_once: int = 16
    longest: int = 1200
    rests: int = 10
    seed: int = 1
    samples: list[ResourceSample] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    came_back: int = 0  # repetitions after a 503
    seconds: float = 0.0
    _shown: float = 0.0

    def run(self, prompts: int) -> None:
        begun = time.monotonic()
        asyncio.run(self._run(prompts, begun))
        self.seconds = time.monotonic() - begun

    async def _run(self, prompts: int, begun: float) -> None:
        mix = Mix(self.seed, self.longest)
        part = max(1, prompts // self.rests)
        restarting: asyncio.Future[None] | None = None
        # One connection per request: the server may close a kept one just as it is used again.
        limits = httpx.Limits(max_connections=2 * self.at_once, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=30.0), limits=limits, trust_env=False
        ) as client:
            await asyncio.to_thread(self._rest, 0)
            for first in range(0, prompts, part):
                if self.half_way is not None and restarting is None and first >= prompts // 2:
                    restarting = asyncio.get_running_loop().run_in_executor(None, self.half_way)
                await self._part(client, [mix[i] for i in range(first, min(first + part, prompts))], prompts, begun)
                if restarting is not None:
                    await restarting
                await asyncio.to_thread(self._rest, min(first + part, prompts))

    async def _part(self, client: httpx.AsyncClient, asks: Sequence[Ask], prompts: int, begun: float) -> None:
        waiting = iter(asks)

        async def work() -> None:
            for ask in waiting:
                await self._one(client, ask)
                now, done = time.monotonic(), sum(self.ended.values())
                if now - self._shown > PROGRESS_S:
                    self._shown = now
                    rate = done / (now - begun)
                    self.say(
                        f"  [{now - begun:5.0f} s] {done} of {prompts} prompts, {rate:.1f}/s, {len(self.errors)} wrong"
                    )

        await asyncio.gather(*(work() for _ in range(self.at_once)))

    async def _one(self, client: httpx.AsyncClient, ask: Ask) -> None:
        body = body_of(ask.prompt, ask.max_tokens)
        try:
            if ask.leaves_after is not None:
                try:
                    await asyncio.wait_for(self._asked(client, self.front_url, body), ask.leaves_after)
                    self.ended["answered before the client could leave"] += 1
                except asyncio.TimeoutError:
                    self.ended["client left"] += 1
                return
            salt = {"cache_salt": fresh_salt("soak")} if self.salted else {}
            got, want = await asyncio.gather(
                self._asked(client, self.front_url, body),
                self._asked(client, self.reference.url, {**body, **salt}),
            )
            self.tally.check(f"prompt {ask.index}", ask.prompt, want.tokens, got.tokens, self.reference.url, body=salt)
            self.ended["right"] += 1
        except (RequestFailed, httpx.HTTPError, AssertionError) as wrong:
            self.ended["WRONG"] += 1
            self.errors.append(f"prompt {ask.index} ({len(ask.prompt)} tokens): {wrong!r}")
            self.say(f"  {self.errors[-1]}")

    async def _asked(self, client: httpx.AsyncClient, base: str, body: dict[str, object]) -> TimedAnswer:
        """Send a request, and repeat it after each 503."""
        for _ in range(MAX_503):
            try:
                return await stream(client, base + "/v1/completions", body)
            except RequestFailed as refused:
                if refused.status != 503:
                    raise
            self.came_back += 1
            await asyncio.sleep(BACK_S)
        raise RequestFailed(503, "for two minutes")

    def _rest(self, done: int) -> None:
        """Wait for timers, then sample: a transfer whose writer is gone stays fenced for X + H."""
        end = time.monotonic() + FENCED_S
        while any(_open_transfers(server, settle=True) for server in self.servers()) and time.monotonic() < end:
            time.sleep(0.5)
        for server in self.servers():
            try:
                newest = sample(server, done)
            except httpx.TimeoutException:  # the whole run may have been stopped for minutes during the request
                newest = sample(server, done)
            self.samples.append(newest)

    # -- the verdict

    def growth(self, memory: bool = True) -> list[str]:
        """Return what has grown.

        A server starts cold, so threads and sockets are compared from the end of the second part of the load, memory
        from the end of the third.

        Workers differ: a model on a CPU allocates memory for every new number of tokens in a step, until its caches are
        full. The reference gets the same prompts without a connector, so since the pause before the first prompt a
        worker of the pair may grow as much as one of the reference at the same age.
        """
        findings: list[str] = []
        control = [s for s in self.samples if s.server == self.reference.name and s.workers]
        for name, pid in dict.fromkeys((s.server, s.pid) for s in self.samples):
            samples = [s for s in self.samples if (s.server, s.pid) == (name, pid)]
            first, last = samples[0], samples[-1]
            base, warm = samples[min(2, len(samples) - 1)], samples[min(3, len(samples) - 1)]
            if any(s.free_blocks != first.free_blocks for s in samples):
                findings.append(f"{name}: free blocks {[s.free_blocks for s in samples]}")
            if any(s.open_transfers for s in samples):
                findings.append(f"{name}: open transfers {[s.open_transfers for s in samples]}")
            if last.threads > base.threads + 4:
                findings.append(f"{name}: threads {[s.threads for s in samples]}")
            if last.sockets > base.sockets + 16:
                findings.append(f"{name}: sockets {[s.sockets for s in samples]}")
            if memory and last.host_mib > warm.host_mib * 1.03 + 8:
                findings.append(f"{name}: MiB of its front end and scheduler {[round(s.host_mib) for s in samples]}")
            if memory and last.workers and name != self.reference.name:
                same_age = control[min(len(samples), len(control)) - 1].workers_mib - control[0].workers_mib
                grown, each = last.workers_mib - first.workers_mib, first.workers_mib / last.workers
                if grown / last.workers > same_age + each * 0.03 + 8:
                    findings.append(f"{name}: MiB of its workers {[round(s.workers_mib) for s in samples]}")
        return findings

    def report(self) -> list[str]:
        """Return Markdown: the samples, then the results of the prompts."""
        lines = [
            "| prompts | server | pid | front end and scheduler, MiB | workers, MiB | threads | sockets | free blocks | open transfers |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for s in self.samples:
            blocks = "" if s.free_blocks is None else s.free_blocks
            workers = f"{s.workers} × {s.workers_mib / s.workers:.0f}" if s.workers else ""
            transfers = "" if s.open_transfers is None else s.open_transfers
            lines.append(
                f"| {s.done} | {s.server} | {s.pid} | {s.host_mib:.0f} | {workers} | {s.threads} | {s.sockets} | {blocks} | {transfers} |"
            )
        ended = ", ".join(f"{count} {what}" for what, count in self.ended.items() if count)
        lines += [
            "",
            f"{sum(self.ended.values())} prompts in {self.seconds:.0f} s: {ended}; {self.tally.summary()}; 503 said {self.came_back} times",
        ]
        return lines
