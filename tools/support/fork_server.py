# SPDX-License-Identifier: Apache-2.0
"""Servers forked from a process that has already imported what they run, so that a start does not repeat imports.

For tests: torch and vLLM take 6 to 11 s of a processor in every server. Engines of the start scripts, the quickstart
and the benchmarks import them by themselves, and so does an engine whose environment differs in more than READ_LATE.

with ForkServers(["package.server"], logs) as forks:
    server = forks.fitting(command, environment, folder)  # (python, "-m", "package.server", …)
    if server is not None:
        popen = server.start(command, environment, out, new_session=True)  # poll() and wait() as of subprocess.Popen

A serving process needs the standard library alone, has one thread, and ends with its owner; its children go on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

FORKED_WITHIN_S = 400.0  # with the imports of the serving process, on a busy machine
LONGEST_REQUEST = 1 << 20
GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Prefixes of variables that are read when a server runs. Others could have been read by an import or by the loader.
READ_LATE = (
    *("PYTHONPATH", "VLLM_HOST_IP", "PD_", "ASCEND_", "STAND_IN_", "PYTEST_", "MC_"),
    *("VLLM_PP_LAYER_PARTITION", "VLLM_ENABLE_V1_MULTIPROCESSING"),
)


class ForkServer:
    """Owner of a serving process. Its children run the first of `modules` as __main__, as `python -m` does."""

    def __init__(self, python: str, modules: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
        self._early, self._cwd, self._log = _read_early(env), cwd, log
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST_REQUEST)
        words = [python, "-m", "tools.support.fork_server", str(theirs.fileno()), *modules]
        with theirs, log.open("ab") as out:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=dict(env),
                cwd=cwd,
                pass_fds=[theirs.fileno()],
            )

    def fits(self, env: Mapping[str, str], cwd: Path) -> bool:
        return cwd == self._cwd and _read_early(env) == self._early

    def start(self, command: Sequence[str], env: Mapping[str, str], out: IO[bytes], *, new_session: bool) -> Forked:
        """Fork a child. When this returns, it has its session, environment and log."""
        request = json.dumps({"arguments": command[3:], "environment": dict(env), "new_session": new_session})
        status, theirs = os.pipe()
        try:
            with contextlib.suppress(ConnectionError):  # then the pipe is closed without a word
                socket.send_fds(self._connection, [request.encode()], [out.fileno(), theirs])
        finally:
            os.close(theirs)
        return Forked(command, status, self._log)

    def close(self) -> None:
        self._connection.close()
        self._process.wait(FORKED_WITHIN_S)


class ForkServers:
    """Owner of a serving process for each interpreter, started with the first command that wants one."""

    def __init__(self, modules: Sequence[str], logs: Path) -> None:
        self._modules, self._logs = modules, logs
        self._by_interpreter: dict[str, ForkServer] = {}

    def __enter__(self) -> ForkServers:
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._by_interpreter.values():
            server.close()
        self._by_interpreter.clear()

    def fitting(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> ForkServer | None:
        """Return the server whose child is what this command starts in this environment, if there is one."""
        python = command[0]
        if tuple(command[1:3]) != ("-m", self._modules[0]):
            return None
        if python not in self._by_interpreter:
            log = self._logs / f"fork-server-{len(self._by_interpreter)}.log"
            self._by_interpreter[python] = ForkServer(python, self._modules, env, cwd, log)
        server = self._by_interpreter[python]
        return server if server.fits(env, cwd) else None


class Forked:
    """A child: what `Child` needs of subprocess.Popen."""

    def __init__(self, command: Sequence[str], status: int, log: Path) -> None:
        self._command, self._log = command, log
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = self._number(FORKED_WITHIN_S)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            self.returncode = self._number(timeout)
            self._status.close()
        return self.returncode

    def _number(self, timeout: float) -> int:
        """Return the next number in the pipe: first the child's pid, then its return code."""
        if not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self._command, timeout)
        if not (number := self._status.read(_BYTES)):
            raise RuntimeError(f"the process that forks {self._command[2]} has ended; {self._log} says why")
        return int.from_bytes(number, "big", signed=True)


_BYTES = 4


def _read_early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(READ_LATE)}


@dataclass(frozen=True)
class _Request:
    arguments: list[str]
    environment: dict[str, str]
    new_session: bool
    out: int
    status: int


class _Serving:
    """The serving process. A child is one in which `next_child` returns."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._ended, self._wake = socket.socketpair()
        self._running: dict[int, int] = {}  # pid -> pipe for its return code
        self._reported: dict[int, int] = {}  # pipe -> pid
        self._poll = select.poll()
        for end in (self._ended, self._wake):
            end.setblocking(False)
        for end in (connection, self._ended):
            self._poll.register(end, select.POLLIN)
        # What ends the whole group: the owner ends the children, which needs this process, and then it ends too.
        self._handlers = {number: signal.signal(number, signal.SIG_IGN) for number in GROUP}
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake.fileno())

    def next_child(self) -> _Request | None:
        """Fork children until the owner closes the connection. Return None then, and in each child its request."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._ended.fileno():
                    self._report()
                elif fd != self._connection.fileno():
                    self._reap(fd)
                elif (request := self._receive()) is None:
                    return None
                elif (pid := os.fork()) == 0:
                    self._leave()
                    return request
                else:
                    os.close(request.out)
                    self._running[pid] = request.status

    def _receive(self) -> _Request | None:
        text, fds, _, _ = socket.recv_fds(self._connection, LONGEST_REQUEST, 2)
        return _Request(**json.loads(text), out=fds[0], status=fds[1]) if text else None

    def _report(self) -> None:
        self._ended.recv(4096)
        for pid in list(self._running):
            how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if how is not None:
                status = self._running.pop(pid)
                _write(status, how.si_status if how.si_code == os.CLD_EXITED else -how.si_status)
                self._reported[status] = pid
                self._poll.register(status, 0)

    def _reap(self, status: int) -> None:
        """Let a pid go when its owner, who closes the pipe then, knows that it has ended: never before."""
        self._poll.unregister(status)
        os.close(status)
        os.waitpid(self._reported.pop(status), 0)

    def _leave(self) -> None:
        """Give up, in a child, what belongs to the serving process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for channel in (self._connection, self._ended, self._wake):
            channel.close()
        for status in (*self._running.values(), *self._reported):
            os.close(status)


def _write(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the owner no longer looks
        os.write(status, number.to_bytes(_BYTES, "big", signed=True))


def _become(request: _Request, imported: Mapping[str, str]) -> None:
    """Take the session, output, environment and import path of the child that was asked for.

    `imported`: variables that the imports have set, as they would in a process of its own.
    """
    if request.new_session:
        os.setsid()
    for standard in (1, 2):
        os.dup2(request.out, standard)
    os.close(request.out)
    before = _folders(os.environ)
    os.environ.clear()
    os.environ.update({**imported, **request.environment})
    sys.path[1:] = [*_folders(os.environ), *(folder for folder in sys.path[1:] if folder not in before)]
    _write(request.status, os.getpid())
    os.close(request.status)


def _folders(env: Mapping[str, str]) -> list[str]:
    return [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def main(connection: str, module: str, *more: str) -> None:
    """Import all modules, then serve; in a child, run the first."""
    given = dict(os.environ)
    for name in (module, *more):
        importlib.import_module(name)
    imported = {name: value for name, value in os.environ.items() if name not in given}
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise SystemExit(f"{module} has {threads} threads when it is imported: a forked child would have one of them")
    serving = _Serving(socket.socket(fileno=int(connection)))
    sys.stdout.flush()
    gc.collect()
    gc.freeze()  # no child looks through what was imported, which would also copy it
    request = serving.next_child()
    if request is not None:
        _become(request, imported)
        sys.argv[1:] = request.arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
