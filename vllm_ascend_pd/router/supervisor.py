# SPDX-License-Identifier: Apache-2.0
"""Supervisor of several workers on one port: starts them, restarts them when they die, and passes on their messages.

All workers accept on one inherited socket. Each also listens on a port of its own, which its requests carry, so that
D's posts reach the process that holds the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import multiprocess

from vllm_ascend_pd.router import admin
from vllm_ascend_pd.router.hub import MAX_LINE_BYTES
from vllm_ascend_pd.router.instances_file import Members, configured
from vllm_ascend_pd.router.server import listen
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.shared.settings import impossible

log = logging.getLogger(__name__)
_RESTART_S = 1.0  # between a worker's death and its restart
_OVERTIME_S = 10.0  # beyond the grace, before a worker that does not end is killed
_METRICS_BYTES = 1 << 20  # room for one worker's metrics
_MORE_ROOM = "Free some there, or set TMPDIR to another folder."


@dataclass(slots=True)
class SupervisedWorker:
    """A worker's number and its own socket, which outlive the process."""

    number: int
    private: socket.socket
    process: asyncio.subprocess.Process | None = None
    writer: asyncio.StreamWriter | None = None


class Supervisor:
    def __init__(self, settings: Settings, command: Sequence[str]) -> None:
        self._metrics_dir = _metrics_folder(settings.workers)
        self._settings = settings
        self._command = list(command)
        self._members = Members(settings.circuit)
        self._sources = configured(settings, self._members)
        self._public = listen(settings.host, settings.port)
        first = settings.worker_port or self._public.getsockname()[1] + 1
        self._workers = [SupervisedWorker(i, listen(settings.host, first + i)) for i in range(settings.workers)]
        self._ending = False
        self._dead: set[int] = set()  # processes whose metrics are still there

    def run(self) -> int:
        try:
            return asyncio.run(self._run())
        finally:
            shutil.rmtree(self._metrics_dir, ignore_errors=True)

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sig, self._end, sig)
        keeping = asyncio.gather(*(self._keep(worker) for worker in self._workers))
        under_way: set[asyncio.Future[Any]] = {keeping}
        for source in self._sources:
            under_way.add(asyncio.create_task(source.watch(self._tell_members), name=source.source))
        ended, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        for one in ended:
            one.result()  # watching the file ends by failure only
        return max(keeping.result())

    async def _keep(self, worker: SupervisedWorker) -> int:
        """Run one process of this worker after another, until the end. If the first has no usable settings, all end."""
        lives = 0
        while True:
            try:
                process, reader = await self._start(worker)
            except (OSError, RuntimeError) as problem:  # no descriptor, process or thread is left, or the disk fails
                log.error("worker %d cannot be started, again in %g s: %s", worker.number, _RESTART_S, problem)
            else:
                code = await self._live(worker, process, reader)
                if self._ending:
                    return 0
                lives += 1
                why = f" (SIGBUS: no room for its metrics in {self._metrics_dir}. {_MORE_ROOM})"
                why = why if code == -signal.SIGBUS else ""
                log.error("worker %d ended with %d%s and is started again", worker.number, code, why)
                if code == 2 and lives == 1:
                    self._end(signal.SIGTERM)  # an unusable configuration: no second try makes it better
                    return code
            await asyncio.sleep(_RESTART_S)
            if self._ending:
                return 0

    async def _start(self, worker: SupervisedWorker) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
        """Start a process of this worker. Raise OSError or RuntimeError if the system has nothing left for it.

        A process that nothing waits for, as without a thread to do so, ends by itself when its line does.
        """
        Path(self._metrics_dir).mkdir(mode=0o700, exist_ok=True)  # what cleans temporary files may have removed it
        self._forget_dead()
        _check_room(self._metrics_dir, 1)
        mine, theirs = socket.socketpair()
        with mine, theirs, tempfile.TemporaryFile(dir=self._metrics_dir) as members:
            members.write(msgspec.json.encode(self._members.snapshot()))  # later changes wait in the line
            members.seek(0)
            reader, worker.writer = await asyncio.open_connection(sock=mine.dup(), limit=MAX_LINE_BYTES)
            fds = (self._public.fileno(), worker.private.fileno(), theirs.fileno(), members.fileno())
            try:
                worker.process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--as-worker",
                    ":".join(map(str, (worker.number, *fds))),
                    pass_fds=fds,
                    start_new_session=True,  # the supervisor passes ctrl-C on
                    env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._metrics_dir},
                )
            except BaseException:
                self._hang_up(worker)
                raise
        return worker.process, reader

    async def _live(
        self, worker: SupervisedWorker, process: asyncio.subprocess.Process, reader: asyncio.StreamReader
    ) -> int:
        """Pass on a worker's messages until its process ends. Return its exit code."""
        listening = asyncio.create_task(self._listen(reader), name=f"news of worker {worker.number}")
        code = await process.wait()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        self._hang_up(worker)
        self._dead.add(process.pid)
        with contextlib.suppress(OSError):  # tried again at the next start
            self._forget_dead()
        self._tell_all({"gone": worker.number})
        return code

    @staticmethod
    def _hang_up(worker: SupervisedWorker) -> None:
        if worker.writer is not None:
            worker.writer.close()
            worker.writer = None

    def _forget_dead(self) -> None:
        """Remove what processes that have ended left of their metrics. Raise OSError if that is not possible."""
        for pid in tuple(self._dead):
            multiprocess.mark_process_dead(pid, self._metrics_dir)  # type: ignore[no-untyped-call]
            self._dead.discard(pid)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                message = msgspec.json.decode(line)
                if "operation" in message:
                    with contextlib.suppress(ValueError):  # the workers refuse it too, and say so
                        admin.apply(self._members, message["operation"])
                self._tell_all(message)

    def _tell_members(self) -> None:
        self._tell_all({"operation": self._members.snapshot()})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for worker in self._workers:
            _write(worker, message)

    def _end(self, sig: int) -> None:
        """Drain the workers at the first call. Kill them after the grace period, or at the second call."""
        kill_in_s = 0.0 if self._ending else self._settings.grace_s + _OVERTIME_S
        if not self._ending:
            self._signal(signal.SIGTERM)
        self._ending = True
        asyncio.get_running_loop().call_later(kill_in_s, self._signal, signal.SIGKILL)

    def _signal(self, sig: int) -> None:
        for worker in self._workers:
            if worker.process is not None and worker.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(sig)


def _metrics_folder(workers: int) -> str:
    """Make a folder for the metrics. Raise ConfigError if there is no room for them."""
    folder = ""
    try:
        folder = tempfile.mkdtemp(prefix="ascend-pd-metaserver-")
        _check_room(folder, workers)
    except OSError as problem:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        why = f"there is no room for the metrics of {workers} workers ({problem})"
        impossible("TMPDIR", tempfile.tempdir or os.environ.get("TMPDIR", ""), why, _MORE_ROOM)
    return folder


def _check_room(folder: str, workers: int) -> None:
    """Raise OSError if the folder has no room for the metrics of so many workers.

    Their files are sparse and mapped: a worker that writes where the disk has no room dies of SIGBUS.
    """
    with tempfile.TemporaryFile(dir=folder) as trial:
        try:
            os.posix_fallocate(trial.fileno(), 0, workers * _METRICS_BYTES)
        except OSError as problem:
            raise OSError(problem.errno, problem.strerror, folder) from problem


def _write(worker: SupervisedWorker, message: dict[str, Any]) -> None:
    """Send a message to a worker, unless it has not read for long: then it is stuck or ending."""
    if worker.writer is not None and worker.writer.transport.get_write_buffer_size() < 2 * MAX_LINE_BYTES:
        worker.writer.write(msgspec.json.encode(message) + b"\n")


def worker_command(argv: Sequence[str]) -> list[str]:
    """Return this command again, for a worker."""
    return [sys.executable, "-m", "vllm_ascend_pd.cli", *argv]
