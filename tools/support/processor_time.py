# SPDX-License-Identifier: Apache-2.0
"""Processor time of an engine's processes, and of waits for a processor, as the kernel counts them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tools.support.engine import EngineProcess

WORKER = "VLLM::Worker"  # vLLM's title of its worker processes
CORE = "VLLM::Engine"  # of its engine cores


class Scheduled(NamedTuple):
    """Sums over threads."""

    ran: float = 0.0  # seconds on a processor
    ready: float = 0.0  # seconds without one, although it had work
    times: int = 0  # it was put on one

    def since(self, before: Scheduled) -> Scheduled:
        return Scheduled(self.ran - before.ran, self.ready - before.ready, self.times - before.times)


def parts(engine: EngineProcess) -> dict[str, list[int]]:
    """Return an engine's processes by what they do: worker (the model), core (vLLM's scheduler) and server (HTTP)."""
    found: dict[str, list[int]] = {"worker": [], "core": [], "server": []}
    for process in engine.process.members():
        title = process.name()
        part = "worker" if title.startswith(WORKER) else "core" if title.startswith(CORE) else "server"
        found[part].append(process.pid)
    return found


def scheduled(pids: Iterable[int], *, first: bool = False) -> Scheduled:
    """Return what the kernel has counted of all threads that these processes have, or of the first one of each."""
    ran = ready = times = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob(f"{pid if first else '*'}/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                counts = [int(word) for word in task.read_text().split()]
                ran, ready, times = ran + counts[0], ready + counts[1], times + counts[2]
    return Scheduled(ran / 1e9, ready / 1e9, times)
