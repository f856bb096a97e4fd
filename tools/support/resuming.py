# SPDX-License-Identifier: Apache-2.0
"""Streams of all kinds through several D's, one of which is killed in each round and whose blocks run out.

In a round many streams run at once. After a random number of tokens one D is killed (SIGKILL to all its processes), and
every stream must end as if nothing had happened: a greedy one as one engine's, a sampled one as its kind checks it. Of
kinds that do not go on only the beginning must be right. The killed D is started again at the beginning of the next
round, which continues as soon as two D's are ready.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from tools.support.checks import front_counter
from tools.support.cluster import Cluster, Metaserver
from tools.support.engine import EngineProcess
from tools.support.models import ensure
from tools.support.spec import EngineSpec
from tools.support.speech import KINDS, PARSERS, PLUGIN, Spoken, StreamKind, read, speaking

MAX_AT_ONCE = 90  # the metaserver's status page shows the last hundred requests
BACK_S = 600.0
SILENT_S = 240.0
TOKENS = 48  # of most answers
MIXED = [kind for kind in KINDS if kind.parsers == "plain"]
LACKING, NOT_CONTINUED = "PD-META-022", "PD-META-024"  # its D dropped it, for lack of blocks; another cannot go on
FEW_BYTES = 12 << 20  # of a D's cache: about half of what its streams need
DELTA = PLUGIN.parent / "delta"  # Gated DeltaNet in float32


MakeSpecs = Callable[[Cluster, str], list[EngineSpec]]  # of a P and some D's, whose metaserver has this URL


def spoken(spec: EngineSpec, cluster: Cluster, plugins: Sequence[Path] = ()) -> EngineSpec:
    """Return an engine with what the kinds of streams need: letters as tokens, parsers, and scripts."""
    tokenizer = str(speaking(cluster.directory / "words"))
    words = ("--tokenizer", tokenizer, "--enable-auto-tool-choice", *PARSERS["plain"])
    return replace(spec, arguments=(*spec.arguments, *words), plugins=(*spec.plugins, PLUGIN, *plugins), max_seqs=128)


def vllm_on_cpu(decodes: int = 2, model: str = "gqa", d_tp: Sequence[int] = (1,)) -> MakeSpecs:
    """Return what makes specifications of vLLM's own engines on a CPU."""

    def make(cluster: Cluster, url: str) -> list[EngineSpec]:
        path, quiet = ensure(model), {"verify": "off", "trace_dir": ""}
        plugins = (DELTA,) if model.startswith("qwen3next") else ()
        p = EngineSpec("resume-p", path, role="kv_producer", extra=cluster.push_config(**quiet), kv_bytes=256 << 20)
        extra = cluster.push_config(url, **quiet)
        d = EngineSpec("resume-d", path, role="kv_consumer", extra=extra, kv_bytes=FEW_BYTES)
        ds = (replace(d, name=f"resume-d{i}", tp=d_tp[i % len(d_tp)]) for i in range(decodes))
        return [spoken(spec, cluster, plugins) for spec in (p, *ds)]

    return make


@dataclass
class Stream:
    """One answer as its client sees it."""

    kind: StreamKind
    body: dict[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    times: list[float] = field(default_factory=list)
    answer: bytes = b""
    said: Spoken = field(default_factory=Spoken)

    @property
    def gap(self) -> float:
        """Return the longest time without a new chunk after the first one."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


@dataclass
class ResumeReport:
    streams: int = 0
    tokens: int = 0
    kills: int = 0
    resumed: list[float] = field(default_factory=list)  # the longest gaps of resumed streams
    wrong: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    ended: int = 0  # of kinds that do not go on, with an error in the middle
    refused: int = 0  # before their first token, as each D that was asked lacked blocks
    lacking: int = 0  # these, and those that ended for lack of blocks
    preempted: int = 0  # by D's that were not killed
    dropped: int = 0  # times that one went on because its D had dropped it

    @property
    def problems(self) -> list[str]:
        """Return what must not be: also an end for lack of blocks, where no D drops requests."""
        odd = [f"{self.lacking} ended for lack of blocks, and no D drops requests"]
        return [*self.wrong, *self.broken, *(odd if self.lacking and not self.dropped else [])]

    def __str__(self) -> str:
        said = f"{self.streams} streams, {self.tokens} tokens, {self.kills} times a D killed: {len(self.resumed)} streams resumed"
        said += f", {len(self.wrong)} different, {len(self.broken)} broken, {self.ended} of kinds that do not go on"
        said += f"; {self.preempted} preemptions, {self.dropped} dropped, {self.refused} refused"
        if self.resumed:
            gaps = sorted(self.resumed)
            p50, p99 = gaps[len(gaps) // 2], gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))]
            said += f"; the gap that a client saw: p50 {p50:.2f} s, p99 {p99:.2f} s, longest {gaps[-1]:.2f} s"
        return said


class Resuming:
    """A P, several D's and a metaserver. P, asked directly, is the single engine of the comparison."""

    def __init__(
        self, cluster: Cluster, seed: int, progress: Callable[[str], None], make: MakeSpecs, length: int = 150
    ) -> None:
        self.cluster, self.progress, self.dice = cluster, progress, random.Random(seed)
        self._length = length  # of a prompt
        port = cluster.port()
        p, *ds = cluster.start(*make(cluster, f"http://127.0.0.1:{port}"))
        self._dead: list[EngineProcess] = []
        self._starting: dict[str, Future[EngineProcess]] = {}
        self._starters = ThreadPoolExecutor(len(ds), thread_name_prefix="starts a D")
        self.prefill, self.decodes = p, ds
        self.front: Metaserver = cluster.metaserver([p], ds, port)
        self.report = ResumeReport()

    def round(self, count: int) -> None:
        """Run `count` streams and kill one D. The next round starts it again."""
        self._wait_for_two()
        asked = [self._stream() for _ in range(count)]
        right = [Stream(one.kind, self._salted(one)) for one in asked]
        asyncio.run(self._ask(self.prefill.url, right))
        least, most = count * TOKENS // 8, count * TOKENS // 2
        victim = asyncio.run(self._ask(self.front.url, asked, self.dice.randrange(least, most)))
        self._judge(asked, right)
        self.report.preempted += round(
            sum(d.metrics()["vllm:num_preemptions_total"] for d in self.decodes if d is not victim)
        )
        self.report.dropped = round(front_counter(self.front.url, "resumes", 'cause="dropped"'))
        self.progress(str(self.report))
        if victim is not None:
            self.decodes.remove(victim)
            self._dead.append(victim)

    def close(self) -> None:
        """Stop all processes."""
        self._starters.shutdown()
        self.decodes += [start.result() for start in self._starting.values()]
        self.cluster.stop(self.front, *self.decodes, *self._dead, self.prefill)

    def _wait_for_two(self) -> None:
        end = time.monotonic() + BACK_S
        for victim in self._dead:
            self._starting[victim.name] = self._starters.submit(self._restart, victim)
        self._dead = []
        while True:
            for name in [name for name, start in self._starting.items() if start.done()]:
                self.decodes.append(self._starting.pop(name).result())
            ready = {i["name"] for i in self._instances() if i["state"] == "ready"}
            self.ready = [d for d in self.decodes if d.url.removeprefix("http://") in ready]
            if len(self.ready) > 1:
                return
            if time.monotonic() > end:
                raise TimeoutError("there are no two D's")
            time.sleep(0.2)

    def _stream(self) -> Stream:
        kind = self.dice.choice(MIXED)
        return Stream(kind, kind.body(self.dice.randrange(1 << 30), self._length))

    def _salted(self, one: Stream) -> dict[str, Any]:
        return {**one.body, "cache_salt": f"right-{one.id}"}

    async def _ask(self, url: str, streams: list[Stream], kill_after: int = 0) -> EngineProcess | None:
        """Send all requests at once. After `kill_after` tokens kill one D, and return it."""
        # found beforehand: the search takes time
        members = {engine.name: engine.process.members() for engine in self.ready}
        tasks = [asyncio.create_task(_follow(url, one)) for one in streams]
        victim: EngineProcess | None = None
        while kill_after and victim is None and not all(task.done() for task in tasks):
            await asyncio.sleep(0.01)
            if sum(len(one.times) for one in streams) >= kill_after:
                victim = self._kill(members)
        await asyncio.gather(*tasks)
        for one in streams:
            _understand(one)
        return victim

    def _kill(self, members: dict[str, list[psutil.Process]]) -> EngineProcess:
        """Kill one D without asking the engines first: their answer would be late."""
        victim = self.dice.choice(self.ready)
        for process in members[victim.name]:
            process.kill()
        self.report.kills += 1
        self.progress(f"  killed {victim.name}")
        return victim

    def _judge(self, asked: list[Stream], right: list[Stream]) -> None:
        resumed = self._resumed()
        for one, want in zip(asked, right, strict=True):
            self.report.streams += 1
            self.report.tokens += len(one.times)
            if want.said.problem:
                raise RuntimeError(f"the single engine failed: {want.said.problem}")
            name, got = f"{one.kind.route}, {one.kind.name}", one.said
            self.report.lacking += LACKING in got.problem
            if not one.kind.goes_on and (LACKING in got.problem or NOT_CONTINUED in got.problem):
                self.report.ended += 1
                right_so_far = want.said.text.startswith(got.text)
            elif got.problem.startswith("503: ") and LACKING in got.problem:
                self.report.refused += 1
                continue
            elif got.problem:
                self.report.broken.append(f"{name}: {got.problem}")
                continue
            else:
                right_so_far = one.kind.takes(got) if one.kind.sampled else got.same() == want.said.same()
            if not right_so_far or len(got.names) > 1:
                how = "went on" if one.id in resumed else "in one piece"
                self.report.wrong.append(f"{name} ({how}): {got} for {want.said}")
            if one.id in resumed:
                self.report.resumed.append(one.gap)

    def _resumed(self) -> set[str]:
        """Return the ids of the latest requests that were resumed, from the metaserver's status page."""
        last = httpx.get(f"{self.front.url}/status", timeout=30.0, trust_env=False, verify=False).json()["last"]
        return {request["id"] for request in last if any(stage["stage"] == "resume" for stage in request["stages"])}

    def _restart(self, victim: EngineProcess) -> EngineProcess:
        stuck = victim.process.kill()
        if stuck:
            raise RuntimeError(str(stuck))
        self.cluster.stop(victim)
        (started,) = self.cluster.start(victim.spec)
        return started

    def _instances(self) -> list[dict[str, Any]]:
        instances: list[dict[str, Any]] = httpx.get(
            f"{self.front.url}/instances", trust_env=False, verify=False
        ).json()["instances"]
        return instances


def run_all(
    cluster: Cluster,
    seed: int,
    progress: Callable[[str], None],
    make: MakeSpecs,
    streams: int,
    at_once: int,
    length: int = 150,
) -> ResumeReport:
    """Run so many streams in rounds, with prompts of so many tokens, and stop all."""
    resuming = Resuming(cluster, seed, progress, make, length)
    try:
        while (left := streams - resuming.report.streams) > 0:
            resuming.round(min(at_once, MAX_AT_ONCE, left))
    finally:
        resuming.close()
    progress(f"resume: {'bad' if resuming.report.problems else 'good'}, {resuming.report}")
    return resuming.report


async def _follow(url: str, one: Stream) -> None:
    """Read the answer, to be parsed after its end: a slow client would measure times of its own."""
    address = urlsplit(url)
    body = json.dumps(one.body).encode()
    head = f"POST {one.kind.route} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\nx-request-id: {one.id}\r\n"
    pieces: list[bytes] = []
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        while piece := await asyncio.wait_for(reader.read(1 << 16), SILENT_S):
            pieces.append(piece)
            one.times += [time.monotonic()] * piece.count(b"data: {")
        writer.close()
    except (OSError, asyncio.TimeoutError) as problem:
        one.said.problem = f"{type(problem).__name__}: {problem}"
        return
    one.answer = b"".join(pieces)


def _understand(one: Stream) -> None:
    if one.said.problem:
        return
    response = HTTPResponse(_Read(one.answer))  # type: ignore[arg-type]  # only makefile() is used
    response.begin()
    stream = response.read()
    one.said = read(stream) if response.status == 200 else Spoken(problem=f"{response.status}: {stream[:300]!r}")
    if not (one.said.end or one.said.problem):
        one.said.problem = "no end"


class _Read:
    """A socket's interface over the bytes of an answer."""

    def __init__(self, said: bytes) -> None:
        self._said = said

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._said)
