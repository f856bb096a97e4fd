# SPDX-License-Identifier: Apache-2.0
"""Engines and metaservers with one owner: started together, awaited with a deadline, all stopped at the end.

with Cluster(directory) as cluster:
    prefill, decode = cluster.start(spec_p, spec_d)
    front = cluster.metaserver([prefill], [decode])
    ...
# leaving the block stops everything; cluster.leaks names the processes that did not end by themselves
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from tools.support.engine import EngineProcess, RunningServer
from tools.support.fork_server import ForkServers
from tools.support.models import ROOT
from tools.support.process import Child, ProcessDied, free_port
from tools.support.spec import EngineSpec, MetaserverSpec, child_environment, metaserver_command

Progress = Callable[[str], None]
STRICT = ("--no-canary", "--without-prefill", "refuse")  # only requests of the test move KV; D never prefills by itself
LONGEST_LOOK_S = 15.0
START_DEADLINE_S = 400.0  # six workers on two busy cores have taken five minutes


def say(line: str) -> None:
    print(line, flush=True)


def say_leaks(leaks: Sequence[str]) -> int:
    """Say what a cluster has left behind. Return the exit code of a run that is good otherwise."""
    for line in leaks:
        say(f"left behind: {line}")
    return 3 if leaks else 0


KEPT = 3  # directories of runs that have ended


def fresh_directory(name: str) -> Path:
    """Return out/<name>/<pid>, empty, so that two runs of one clone do not disturb each other.

    Of the runs that have ended the last KEPT keep theirs: a failure is looked into after the next run has begun.
    """
    parent = ROOT / "out" / name
    ended = [old for old in parent.glob("*") if not (old.name.isdigit() and psutil.pid_exists(int(old.name)))]
    for old in sorted(ended, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    directory = parent / str(os.getpid())
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


class Metaserver:
    """A started metaserver process."""

    def __init__(self, port: int, prefill: list[str], decode: list[str], logs: Path, how: MetaserverSpec) -> None:
        self.url = f"http://127.0.0.1:{port}"
        name = f"metaserver-{port}"
        command = metaserver_command(port, prefill, decode, how.options, how.module, sidecar=how.sidecar)
        environment = {**child_environment(how.plugins), **how.environment}
        self.process = Child(name, command, logs / f"{name}.log", environment, ROOT)
        # Not /health: readiness means that a pair can serve and, without --no-canary, that it has moved a block.
        self._asked = "/readiness" if prefill or how.sidecar else "/serving"

    name = "metaserver"

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}{self._asked}", timeout=2.0, trust_env=False, verify=False).status_code == 200
        except httpx.HTTPError:
            return False

    def stage(self) -> str:
        return "waiting for a pair"


class Cluster:
    """Owner of the processes that it starts. `directory` holds logs, traces and the secret."""

    def __init__(
        self,
        directory: Path,
        progress: Progress = say,
        port_base: int | None = None,
        plugins: tuple[Path, ...] = (),
        forks: ForkServers | None = None,
    ) -> None:
        """Make directories and secret. `plugins` apply to every engine on a CPU that runs in this interpreter.

        `forks` starts the engines that it can start.
        """
        self.directory = directory
        self.logs = directory / "logs"
        self.traces = directory / "traces"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.traces.mkdir(parents=True, exist_ok=True)
        self.secret_file = self._write_secret()
        self.progress = progress
        self.leaks: list[str] = []
        self.starts = 0
        self._next_device = 0
        self._port_base = port_base
        self._plugins = plugins
        self._forks = forks
        self._running: list[EngineProcess | Metaserver] = []
        self._before: Any = None  # the handler of SIGTERM before

    def __enter__(self) -> Cluster:
        if threading.current_thread() is threading.main_thread():
            # On SIGTERM (timeout, a cancelled CI job) the children are ended, too.
            self._before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _write_secret(self) -> Path:
        path = self.directory / "secret"
        if not path.exists():
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as out:
                out.write(secrets.token_hex(32))
        return path

    def port(self) -> int:
        return self.ports(1)

    def ports(self, count: int) -> int:
        """Return the first of `count` consecutive free ports."""
        first = free_port(self._port_base, count)
        if self._port_base is not None:
            self._port_base = first + count
        return first

    def push_config(self, *metaservers: str, **more: Any) -> dict[str, Any]:
        """Return kv_connector_extra_config for an engine of this cluster: signed, traced, every block checked."""
        config: dict[str, Any] = {
            "verify": "full",
            "trace_dir": str(self.traces),
            "secret_file": str(self.secret_file),
            "first_token_wait_s": 10.0,  # every first token in time, also on a busy machine
        }
        if metaservers:
            config["metaserver_urls"] = list(metaservers)
        return {**config, **more}

    def start(self, *specs: EngineSpec) -> list[EngineProcess]:
        """Start engines side by side and wait until all answer.

        On failure stop them and raise with the end of the log.
        """
        begun = time.monotonic()
        engines: list[EngineProcess] = []
        for spec in specs:
            engine = EngineProcess(self._placed(spec), self.logs, self._forks)
            self.starts += 1
            self._running.append(engine)
            engines.append(engine)
            self.progress(f"  starting {spec.describe()}, log {engine.process.log}")
        try:
            self._wait(engines, begun)
        except BaseException:
            self.stop(*engines)
            raise
        return engines

    def _placed(self, spec: EngineSpec) -> EngineSpec:
        """Return the specification with a port, and on an NPU host with the next devices."""
        devices = ""
        if spec.npu and not spec.devices:
            count = spec.tp * spec.pp * spec.pcp * spec.ranks
            devices = ",".join(str(self._next_device + i) for i in range(count))
            self._next_device += count
        if not spec.npu and spec.python == sys.executable:
            spec = dataclasses.replace(spec, plugins=(*spec.plugins, *self._plugins))
        return spec.at(spec.port or self.port(), devices)

    def metaserver(
        self,
        prefill: Sequence[RunningServer],
        decode: Sequence[RunningServer],
        port: int = 0,
        how: MetaserverSpec | tuple[str, ...] = (),
    ) -> Metaserver:
        """Start a metaserver and wait until it is ready. `how` is a whole specification, or only the options."""
        begun = time.monotonic()
        urls = ([engine.url for engine in prefill], [engine.url for engine in decode])
        spec = how if isinstance(how, MetaserverSpec) else MetaserverSpec(how)
        server = Metaserver(port or self.port(), *urls, self.logs, spec)
        self._running.append(server)
        try:
            self._wait([server], begun, deadline_s=90.0)
        except BaseException:
            self.stop(server)
            raise
        return server

    def _wait(
        self, waiting: Sequence[EngineProcess | Metaserver], begun: float, deadline_s: float = START_DEADLINE_S
    ) -> None:
        pending = list(waiting)
        shown = looked = begun
        waited = 0.0  # without the time in which this whole process group may have been stopped
        while pending:
            for server in list(pending):
                if not server.process.alive:
                    raise ProcessDied(
                        f"{server.name} ended with code {server.process.returncode} before it was ready; "
                        f"the end of {server.process.log}:\n{server.process.tail()}"
                    )
                if server.ready():
                    pending.remove(server)
                    self.progress(f"  [{time.monotonic() - begun:4.0f} s] {server.name} is ready at {server.url}")
            now = time.monotonic()
            waited, looked = waited + min(now - looked, LONGEST_LOOK_S), now
            if pending and waited > deadline_s:
                slow = pending[0]
                raise TimeoutError(
                    f"{slow.name} was not ready after {deadline_s:.0f} s; the end of {slow.process.log}:\n"
                    f"{slow.process.tail()}"
                )
            if pending and now - shown > 8.0:
                shown = now
                states = ", ".join(f"{server.name}: {server.stage()}" for server in pending)
                self.progress(f"  [{now - begun:4.0f} s] {states}")
            if pending:
                time.sleep(0.3)

    def stop(self, *servers: RunningServer | Metaserver) -> None:
        """Stop those servers that were started here, and add what did not end by itself to `leaks`."""
        for server in servers:
            if isinstance(server, EngineProcess | Metaserver) and server in self._running:
                self._running.remove(server)
                self.leaks += server.process.stop()

    def close(self) -> None:
        # In reverse order of their starts: D before P, so that D cancels what it waits for and P sees an orderly end.
        for server in list(reversed(self._running)):
            self.stop(server)
