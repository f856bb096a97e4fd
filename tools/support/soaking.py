# SPDX-License-Identifier: Apache-2.0
"""A long mixed load on a pair: every answer compared with a single engine's, the servers checked for growth.

The load is a function of a seed: fresh prompts of mixed lengths, common prefixes with fresh tails, repetitions; some
clients disconnect. Ten times in a run the load pauses, and what each server holds is recorded (`ResourceSample`).
Engines may be killed beside the load. What a run has found so far is kept at each pause, so that one that was ended
goes on there.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
import numpy as np
import psutil

from tools.support.checks import fresh_salt, settled_free_blocks
from tools.support.client import RequestFailed, TimedAnswer, body_of, stream
from tools.support.compare import AnswerTally
from tools.support.engine import EngineProcess
from tools.support.process import Child
from tools.support.processor_time import WORKER

VOCAB = 512
HEADS = 24
LEAVE = 0.02
PROGRESS_S = 15.0
FENCED_S = 90.0
BACK_S = 1.0  # wait after a 503
MAX_503 = 120
OPEN = "vllm:ascend_pd_reservations_open"
COLD = 2  # samples of a process that no slope is made of, at least
FREE = 3  # degrees of freedom of a slope, at least
SERVED, LOOK_S = 100, 0.1  # prompts that are answered between two kills
# Of a worker: Mooncake's four connections to each D that has ended, of which P keeps eight, and those of ten minutes.
HALF_CLOSED = 4 * (8 + 10)


class OtherSoak(RuntimeError):
    """A file is of a run with other flags, or of another state of the code."""


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
    session: int  # of the run, which may have been ended and gone on: pids may come back
    host_mib: float  # front end and scheduler, or the metaserver
    workers_mib: float
    workers: int
    threads: int
    sockets: int
    free_blocks: int | None
    open_transfers: int | None
    half_closed: int = 0  # sockets whose other end has closed; not among `sockets`


def sample(server: SoakedServer, done: int, session: int = 0) -> ResourceSample:
    host = workers_own = workers = threads = sockets = half_closed = 0
    for process in server.process.members():
        try:
            # shared memory (queues, libraries) grows page by page as it is first used
            unshared = process.memory_full_info().uss
            if process.name().startswith(WORKER):
                workers_own, workers = workers_own + unshared, workers + 1
            else:
                host += unshared
            threads += process.num_threads()
            closed = sum(one.status == psutil.CONN_CLOSE_WAIT for one in process.net_connections("tcp"))
            half_closed += closed
            sockets += _sockets(process.pid) - closed
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
    free = settled_free_blocks(server) if isinstance(server, EngineProcess) else None
    mib = (host / 2**20, workers_own / 2**20, workers)
    now_open = _open_transfers(server)
    return ResourceSample(
        done, server.name, server.process.pid, session, *mib, threads, sockets, free, now_open, half_closed
    )


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
    """One run. `servers` are sampled.

    Beside the load `half_way` is called once, in the middle, and `kill` again and again, with the number of prompts so
    far: it returns once what it has killed is back, with its name and how long that took. `kept`: file of what a run
    has found so far; `made_by`: what a run must have in common with it.
    """

    front_url: str
    reference: EngineProcess
    servers: Callable[[], Sequence[SoakedServer]]
    tally: AnswerTally
    say: Callable[[str], None]
    salted: bool  # the reference is a member of the pair, so it is asked with cache salts
    half_way: Callable[[], None] | None = None
    kill: Callable[[int], tuple[str, float]] | None = None
    kept: Path | None = None
    made_by: str = ""
    back: dict[str, list[float]] = field(default_factory=dict)  # by server: seconds from each kill until it was back
    session: int = 0
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
        done, before = self._read_kept(), self.seconds
        begun = time.monotonic() - before
        asyncio.run(self._run(prompts, done, begun))
        self.seconds = time.monotonic() - begun

    async def _run(self, prompts: int, done: int, begun: float) -> None:
        mix = Mix(self.seed, self.longest)
        part = max(1, prompts // self.rests)
        restarting: asyncio.Future[None] | None = None
        # One connection per request: the server may close a kept one just as it is used again.
        limits = httpx.Limits(max_connections=2 * self.at_once, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=30.0), limits=limits, trust_env=False
        ) as client:
            await asyncio.to_thread(self._rest, done)
            for first in range(done, prompts, part):
                if self.half_way is not None and restarting is None and first >= prompts // 2:
                    restarting = asyncio.get_running_loop().run_in_executor(None, self.half_way)
                part_ended = threading.Event()
                killing = asyncio.create_task(asyncio.to_thread(self._kills, part_ended))
                try:
                    await self._part(client, [mix[i] for i in range(first, min(first + part, prompts))], prompts, begun)
                finally:
                    part_ended.set()
                    await killing
                if restarting is not None:
                    await restarting
                await asyncio.to_thread(self._rest, min(first + part, prompts))
                self._keep(min(first + part, prompts), time.monotonic() - begun)

    def _kills(self, part_ended: threading.Event) -> None:
        """Kill one engine after another until the part is over, each once the one before is back and has served."""
        while self.kill is not None and not part_ended.is_set():
            name, seconds = self.kill(self.ended.total())
            self.back.setdefault(name, []).append(seconds)
            enough = self.ended.total() + SERVED
            while self.ended.total() < enough and not part_ended.wait(LOOK_S):
                pass

    def _keep(self, done: int, seconds: float) -> None:
        """Write down what a run with the same flags needs to go on from here."""
        if self.kept is None:
            return
        said = {"done": done, "seconds": seconds, "came_back": self.came_back, "ended": self.ended}
        said |= {"errors": self.errors, "samples": [asdict(one) for one in self.samples]}
        said |= {"made_by": self.made_by, "session": self.session, "back": self.back}
        said |= {"answers": self.tally.answers, "tokens": self.tally.tokens, "excused": self.tally.excused}
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        new = self.kept.with_suffix(".new")
        new.write_text(json.dumps(said))
        new.replace(self.kept)

    def _read_kept(self) -> int:
        """Take in what is kept of a run that was ended. Return how many prompts it had done. Raise OtherSoak."""
        if self.kept is None or not self.kept.exists():
            return 0
        said = json.loads(self.kept.read_text())
        if said["made_by"] != self.made_by:
            raise OtherSoak(f"{self.kept} is of another run ({said['made_by']}, not {self.made_by}): remove it")
        self.seconds, self.came_back, self.errors = said["seconds"], said["came_back"], said["errors"]
        self.ended, self.back, self.session = Counter(said["ended"]), said["back"], said["session"] + 1
        self.samples = [ResourceSample(**one) for one in said["samples"]]
        self.tally.answers, self.tally.tokens, self.tally.excused = said["answers"], said["tokens"], said["excused"]
        self.say(
            f"a run that was ended goes on behind its prompt {said['done']} ({self.kept}; remove it to begin anew)"
        )
        return int(said["done"])

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

    def forget_kept(self) -> None:
        """Forget what is kept of a run that is over and reported."""
        if self.kept is not None:
            self.kept.unlink(missing_ok=True)

    def _rest(self, done: int) -> None:
        """Wait for timers, then sample: a transfer whose writer is gone stays fenced for X + H."""
        end = time.monotonic() + FENCED_S
        while any(_open_transfers(server, settle=True) for server in self.servers()) and time.monotonic() < end:
            time.sleep(0.5)
        self.samples += [self.quiet_sample(server, done, end) for server in self.servers()]

    def quiet_sample(self, server: SoakedServer, done: int, end: float) -> ResourceSample:
        """Sample a server; until `end` once more if it just then has a canary, which looks like something left."""
        lives = [one.free_blocks for one in self.samples if (one.server, one.pid) == (server.name, server.process.pid)]
        while True:
            try:
                newest = sample(server, done, self.session)
            except httpx.TimeoutException:  # the whole run may have been stopped for minutes during the request
                newest = sample(server, done, self.session)
            quiet = not newest.open_transfers and newest.free_blocks in (lives[:1] or [newest.free_blocks])
            if quiet or time.monotonic() >= end:
                return newest
            time.sleep(LOOK_S)

    # -- the verdict

    def _lives(self) -> list[list[ResourceSample]]:
        """Return the samples of each process."""
        lives: dict[tuple[str, int, int], list[ResourceSample]] = {}
        for one in self.samples:
            lives.setdefault((one.server, one.pid, one.session), []).append(one)
        return list(lives.values())

    def growth(self, memory: bool = True) -> list[str]:
        """Return what has grown.

        A server starts cold, so threads and sockets are compared from the end of the second part of the load, memory
        from the end of the third.

        Workers differ: a model on a CPU allocates memory for every new number of tokens in a step, until its caches are
        full. The reference gets the same prompts without a connector, so since the pause before the first prompt a
        worker of the pair may grow as much as one of the reference at the same age.
        """
        findings: list[str] = []
        for samples in self._lives():
            name, session = samples[0].server, samples[0].session
            control = [s for s in self.samples if (s.server, s.session) == (self.reference.name, session) and s.workers]
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
            if last.half_closed > HALF_CLOSED * max(1, last.workers):
                findings.append(f"{name}: half-closed sockets {[s.half_closed for s in samples]}")
            if memory and last.host_mib > warm.host_mib * 1.03 + 8:
                findings.append(f"{name}: MiB of its front end and scheduler {[round(s.host_mib) for s in samples]}")
            if memory and last.workers and name != self.reference.name:
                same_age = control[min(len(samples), len(control)) - 1].workers_mib - control[0].workers_mib
                grown, each = last.workers_mib - first.workers_mib, first.workers_mib / last.workers
                if grown / last.workers > same_age + each * 0.03 + 8:
                    findings.append(f"{name}: MiB of its workers {[round(s.workers_mib) for s in samples]}")
        return findings

    def slopes(self) -> list[str]:
        """Return how much memory each server's processes gain with the run's prompts, and the error of that.

        By least squares over the samples of all its lives, each with a level of its own, without the first ones. Beside
        a worker's stands what the reference's gained at the same age.
        """
        lines = []
        for name in dict.fromkeys(one.server for one in self.samples):
            lives = [life for life in self._lives() if life[0].server == name]
            lines += _fit(f"{name}, front end and scheduler", [settled(_host(life)) for life in lives])
            if not any(one.workers for life in lives for one in life):
                continue
            lines += _fit(f"{name}, each worker", [settled(_worker(life)) for life in lives])
            if name != self.reference.name:
                control = [one for one in self.samples if one.server == self.reference.name]
                same_age = [
                    settled(_worker([one for one in control if one.session == life[0].session][: len(life)]))
                    for life in lives
                ]
                lines += _fit(f"{self.reference.name}, each worker, as old as those of {name}", same_age)
        return lines

    def report(self) -> list[str]:
        """Return Markdown: the samples, then the results of the prompts."""
        lines = [
            "| prompts | server | pid | front end and scheduler, MiB | workers, MiB | threads | sockets | half closed | free blocks | open transfers |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for s in self.samples:
            blocks = "" if s.free_blocks is None else s.free_blocks
            workers = f"{s.workers} × {s.workers_mib / s.workers:.0f}" if s.workers else ""
            transfers = "" if s.open_transfers is None else s.open_transfers
            lines.append(
                f"| {s.done} | {s.server} | {s.pid} | {s.host_mib:.0f} | {workers} | {s.threads} | {s.sockets} | {s.half_closed} | {blocks} | {transfers} |"
            )
        ended = ", ".join(f"{count} {what}" for what, count in self.ended.items() if count)
        lines += [
            "",
            f"{sum(self.ended.values())} prompts in {self.seconds:.0f} s: {ended}; {self.tally.summary()}; 503 said {self.came_back} times",
        ]
        return lines


Life = list[tuple[float, float]]  # of a process: thousands of prompts, and MiB


def _host(life: Sequence[ResourceSample]) -> Life:
    return [(one.done / 1000, one.host_mib) for one in life]


def _worker(life: Sequence[ResourceSample]) -> Life:
    return [(one.done / 1000, one.workers_mib / one.workers) for one in life if one.workers]


def settled(life: Life) -> Life:
    """Return the second half of a life if that says something, else all but its first samples: a server starts cold."""
    half = len(life) // 2
    return life[half:] if len(life) - half >= FREE + 2 else life[COLD:]


def _fit(what: str, lives: Sequence[Life]) -> list[str]:
    used = [life for life in lives if len(life) > 1]
    if (fitted := slope(used)) is None:
        return [f"{what}: its processes were too young for a slope"]
    said = f"{fitted[0]:+.2f} ± {fitted[1]:.2f} MiB in 1,000 prompts of the run"
    return [f"{what}: {said} ({sum(map(len, used))} samples of {len(used)} processes)"]


def slope(lives: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float] | None:
    """Return the slope that all lives' points have in common, and its standard error.

    None: there are too few for an error that says anything.
    """
    free = sum(map(len, lives)) - len(lives) - 1
    if free < FREE:
        return None
    x, y = np.concatenate([np.array(life) - np.mean(life, axis=0) for life in lives]).T
    gain = float(x @ y / (x @ x))
    return gain, float(np.sqrt(np.sum((y - gain * x) ** 2) / free / (x @ x)))
