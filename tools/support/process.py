# SPDX-License-Identifier: Apache-2.0
"""Child processes with a clean end: own session, log in a file, stopped by pid, checked for leftovers.

A server of vLLM is a tree (front end, engine core, workers), so every stop covers the whole tree: the processes seen
before the signal, and those still in the session afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import psutil

from tools.support.fork_server import Forked, ForkServers

_given: set[int] = set()
TERM = signal.SIGTERM
FROZEN_S = 60.0
ONE_GROUP = "PD_ONE_GROUP"  # "1": children stay in this process's session, so that one signal to its group reaches all


class ProcessDied(RuntimeError):
    """A child ended before it was ready, or while it was needed."""


def freeze(pid: int) -> None:
    """Stop a process (SIGSTOP), and wait until each of its threads stands still.

    The signal stops it only once one of its threads gets a processor and takes it; until then the others go on, and on
    a busy machine they still answer.
    """
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + FROZEN_S
    while not _stands_still(pid):
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} did not stop within {FROZEN_S:.0f} s")
        time.sleep(0.001)


def _stands_still(pid: int) -> bool:
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if stat.read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True


def free_port(base: int | None = None, count: int = 1) -> int:
    """Return a port that is free now, as the `count` - 1 above it are: `base` or the next such one above it.

    Without `base` it lies below the ephemeral range and away from Mooncake's ports (15000 to 17000). A returned
    port may not be bound yet: none is returned twice, not here, and not elsewhere while this process runs.
    """
    low, high = (18000, 32000) if base is None else (base, base + 2000)
    start = low if base is not None else low + (os.getpid() * 97) % (high - low)
    for first in chain(range(start, high), range(low, start)):
        ports = range(first, first + count)
        if _given.isdisjoint(ports) and all(map(is_free, ports)) and all(map(_reserve, ports)):
            _given.update(ports)
            return first
    raise RuntimeError(f"no {count} free ports in a row in {low}..{high}")


def _reserve(port: int) -> bool:
    """Take the port for this process, for as long as it runs; return whether no other process has it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        return True
    return False


@functools.cache
def _reservations() -> int:
    """Open a file of which each byte is a port: the kernel drops a process's locks on it when the process ends."""
    path = Path(tempfile.gettempdir()) / f"vllm_ascend_pd-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a listener can be bound there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class Child:
    """One child process and all its descendants."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        cwd: Path,
        forks: ForkServers | None = None,
    ) -> None:
        """Start it, by `forks` if that makes the same."""
        self.name = name
        self.command = tuple(command)
        self.log = log
        self.started = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        new_session = os.environ.get(ONE_GROUP) != "1"
        self._popen: subprocess.Popen[bytes] | Forked
        with log.open("ab") as out:
            if forks is not None and (server := forks.fitting(self.command, env, cwd)):
                self._popen = server.start(self.command, env, out, new_session=new_session)
            else:
                self._popen = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    cwd=cwd,
                    start_new_session=new_session,
                )
        self.pid = self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def wait(self, timeout: float) -> int:
        return self._popen.wait(timeout)

    def members(self) -> list[psutil.Process]:
        """Return the running processes of the tree and of the session."""
        by_pid: dict[int, psutil.Process] = {}
        if self.alive:
            root = psutil.Process(self.pid)
            for process in (root, *root.children(recursive=True)):
                by_pid[process.pid] = process
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.pid:
                    by_pid[process.pid] = process
            except (ProcessLookupError, PermissionError):
                continue
        return [p for p in by_pid.values() if _runs(p)]

    def cpu_seconds(self) -> float:
        """Return the user and system time of the running processes of the tree."""
        total = 0.0
        for process in self.members():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def tail(self, lines: int = 30) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def signal(self, number: int) -> None:
        """Send a signal to the front process only, as an operator or Kubernetes would."""
        if self.alive:
            os.kill(self.pid, number)

    def pause(self) -> None:
        """Stop every process, each with all its threads."""
        for process in self.members():
            with contextlib.suppress(ProcessLookupError):
                freeze(process.pid)

    def resume(self) -> None:
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def stop(self, grace_s: float = 30.0, number: int = TERM) -> list[str]:
        """End the tree. Never raises.

        Returns a line for each process that had to be killed; none after a clean stop.
        """
        known = self.members()
        self.signal(number)
        self.resume()  # a stopped process does not handle SIGTERM
        with contextlib.suppress(subprocess.TimeoutExpired):  # the line returned below names it
            self._popen.wait(grace_s)
        # Workers end by themselves when their parent has ended, a moment later.
        psutil.wait_procs([p for p in known if p.pid != self.pid], timeout=10.0)
        left = {p.pid: p for p in (*known, *self.members()) if _runs(p)}
        lines = [f"{self.name}: pid {pid} ({_title(p)}) did not end by itself" for pid, p in left.items()]
        return lines + self._kill(list(left.values()))

    def kill(self) -> list[str]:
        """Send SIGKILL to every process at once, as in a crash. Return a line for each that is still there."""
        return self._kill(self.members())

    def _kill(self, processes: list[psutil.Process]) -> list[str]:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs([p for p in processes if p.pid != self.pid], timeout=30.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(30.0)
        stuck = [p.pid for p in alive] + ([self.pid] if self.alive else [])
        return [f"{self.name}: pid {pid} is still there after SIGKILL" for pid in stuck]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80] or process.name()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "gone"
