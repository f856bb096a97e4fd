# SPDX-License-Identifier: Apache-2.0
"""Prefill ranks in processes of their own, in one gloo group.

`python -m unit.regroup.worker <port> <count>` imports everything once, forks and connects every child to the
parent (the class `ChildProcesses`), which opens worlds of any size among them and drives the workers step by step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.support.process import free_port
from unit.regroup.common import LOOPBACK, EngineCache, SharedTransport, config
from unit.regroup.prefill import ComputedTokens, RegroupPrefillRank, RegroupPrefillSite, WorkerReport
from unit.regroup.runner import AscendRank
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.metadata import PrefillStep
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.regroup.resources import allocate

KEY = b"the fleet of the tests"
ANSWER_S = 60.0


@dataclass(frozen=True)
class GlooWorld:
    """One engine's gloo world."""

    port: int
    size: int
    rank: int


class WorkerCommands:
    """Commands of a child process. Collectives are counted where they are really called."""

    def __init__(self) -> None:
        self._rank: RegroupPrefillRank | None = None
        self._exchanges: list[tuple[int, int, int]] = []
        self._called = self._bad = 0
        original = dist.all_to_all_single

        def counting(*arguments: Any, **keys: Any) -> Any:
            self._called += 1
            if self._called == self._bad:
                raise RuntimeError("injected")
            return original(*arguments, **keys)

        dist.all_to_all_single = counting

    def enter(self, world: GlooWorld) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{LOOPBACK}:{world.port}",
            world_size=world.size,
            rank=world.rank,
            timeout=timedelta(seconds=ANSWER_S),
        )

    def leave(self) -> None:
        dist.destroy_process_group()

    def open(self, cache: EngineCache, blocks: int, kind: str, keys: dict[str, Any]) -> CacheGeometry:
        self._exchanges.clear()
        self._called = 0
        place = Contributor(dist.get_rank() // cache.tp, dist.get_rank() % cache.tp)
        made = AscendRank if kind == "ascend" else RegroupPrefillRank
        facts: dict[str, Any] = {"blocks": blocks, "push": config(**keys), "inline": kind == "inline"}
        self._rank = made(cache, place, allocate, transport=SharedTransport(), **facts)
        return self._rank.geometry

    def step(
        self, step: PrefillStep, shares: Sequence[ComputedTokens], hook: str, ended: Sequence[str]
    ) -> WorkerReport:
        return self._open_rank.run(step, shares, hook, ended)

    def break_collective(self, number: int) -> None:
        """Make this call of a collective, counted from 1, raise here without reaching other ranks."""
        self._bad = number

    def dummy_run(self) -> None:
        assert isinstance(self._open_rank, AscendRank)
        self._open_rank.dummy_run()

    def stats(self) -> dict[str, int]:
        return self._open_rank.stats()

    def exchanges(self) -> tuple[list[tuple[int, int, int]], int]:
        """Return (step, layer, sub-step) of every exchange in order, and how many collectives were called."""
        return list(self._exchanges), self._called

    def close(self) -> None:
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.close()

    @property
    def _open_rank(self) -> RegroupPrefillRank:
        assert self._rank is not None, "no engine is open"
        return self._rank

    def seen(self, stage: str, facts: Any) -> None:
        if stage == "exchanged":
            self._exchanges.append((facts["step"], facts["layer"], facts["sub_step"]))

    def serve(self, connection: Connection) -> None:
        trace.subscribe(self.seen)
        with suppress(EOFError):
            while True:
                name, arguments = connection.recv()
                try:
                    connection.send((True, getattr(self, name)(*arguments)))
                except Exception as error:
                    connection.send((False, f"{type(error).__name__}: {error}"))
                    raise
        self.close()


class Member:
    """The parent's end of one child."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self._connection, self.pid = connection, pid

    def send(self, name: str, *arguments: Any) -> None:
        self._connection.send((name, arguments))

    def receive(self, seconds: float = ANSWER_S) -> Any:
        assert self._connection.poll(seconds), f"worker {self.pid} did not answer within {seconds:g} s"
        ok, answer = self._connection.recv()
        assert ok, f"worker {self.pid}: {answer}"
        return answer

    def ask(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self.receive()

    def hang_up(self) -> None:
        self._connection.close()


class ChildProcessWorker:
    """A worker of an engine in another process (see prefill.Handle)."""

    def __init__(self, member: Member, geometry: CacheGeometry) -> None:
        self.member, self.geometry = member, geometry

    def begin(self, step: PrefillStep, shares: Sequence[ComputedTokens], hook: str, ended: Sequence[str]) -> None:
        self.member.send("step", step, shares, hook, ended)

    def answer(self) -> WorkerReport:
        answer: WorkerReport = self.member.receive()
        return answer

    def stats(self) -> dict[str, int]:
        stats: dict[str, int] = self.member.ask("stats")
        return stats

    def exchanges(self) -> tuple[list[tuple[int, int, int]], int]:
        exchanges: tuple[list[tuple[int, int, int]], int] = self.member.ask("exchanges")
        return exchanges

    def close(self) -> None:
        self.member.send("close")


class ChildProcesses:
    """Children for all tests of a module. `enter` makes the first ones a gloo world."""

    def __init__(self, count: int) -> None:
        root = Path(__file__).resolve().parents[3]
        paths = [str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
        with Listener((LOOPBACK, 0), backlog=count, authkey=KEY) as listener:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "unit.regroup.worker", str(listener.address[1]), str(count)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            )
            self.members = []
            for _ in range(count):
                connection = listener.accept()
                self.members.append(Member(connection, connection.recv()))
        self._size = 0

    def enter(self, size: int) -> None:
        if size == self._size:
            return
        self.leave()
        port = free_port()
        for rank, member in enumerate(self.members[:size]):
            member.send("enter", GlooWorld(port, size, rank))
        for member in self.members[:size]:
            member.receive()
        self._size = size

    def leave(self) -> None:
        for member in self.members[: self._size]:
            member.send("leave")
        for member in self.members[: self._size]:
            member.receive()
        self._size = 0

    def engine(self, cache: EngineCache, blocks: int = 160, kind: str = "plain", **keys: Any) -> RegroupPrefillSite:
        """Open an engine. `kind`: plain, inline (exchanges in the layer's hook) or ascend (driven as vllm-ascend
        drives it)."""
        self.enter(cache.tp * cache.pp)
        members = self.members[: cache.tp * cache.pp]
        for member in members:
            member.send("open", cache, blocks, kind, keys)
        return RegroupPrefillSite(
            cache, [ChildProcessWorker(member, member.receive()) for member in members], blocks=blocks
        )

    def shut(self, site: RegroupPrefillSite) -> None:
        """Close an engine's workers, all at once."""
        site.close()
        for worker in site.workers:
            assert isinstance(worker, ChildProcessWorker)
            worker.member.receive()

    def abandon(self) -> None:
        """End all children of a broken world."""
        self._nursery.send_signal(signal.SIGTERM)
        self._nursery.wait(20)
        for member in self.members:
            member.hang_up()

    def close(self) -> None:
        for member in self.members:
            member.hang_up()
        try:
            self._nursery.wait(20)
        except subprocess.TimeoutExpired:
            self._nursery.send_signal(signal.SIGTERM)
            self._nursery.wait(20)


def main() -> None:
    port, count = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            with Client((LOOPBACK, port), authkey=KEY) as connection:
                connection.send(os.getpid())
                WorkerCommands().serve(connection)
            os._exit(0)
        children.append(child)

    def end(number: int, frame: Any) -> None:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    for child in list(children):
        os.waitpid(child, 0)
        children.remove(child)  # the kernel may reuse its number


if __name__ == "__main__":
    main()
