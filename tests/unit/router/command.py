# SPDX-License-Identifier: Apache-2.0
"""The metaserver's command as a process for tests, with fake engines that run in the test."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tools.support.process import free_port
from unit.router.cluster import until
from unit.router.fake_engine import FakeEngine

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "vllm_ascend_pd.cli", "metaserver"]


@dataclass
class RunningMetaserver:
    process: subprocess.Popen[bytes]
    http: httpx.Client
    prefill: FakeEngine
    decode: FakeEngine

    def complete(self, prompt: str, **more: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3, **more})

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def urls(self) -> list[str]:
        """URLs of the workers, as soon as all are listed in /status."""
        count = len(self.workers()) or 1
        until(lambda: len(self._listed()) == count)
        return [worker["url"] for worker in sorted(self._listed(), key=lambda worker: int(worker["worker"]))]

    def _listed(self) -> list[dict[str, Any]]:
        return self.http.get("/status").json()["workers"]


def worker_number(worker: psutil.Process) -> int:
    """Return a worker's number, or -1 if the process has none, or has ended."""
    try:
        words: list[str] = worker.cmdline()
        *_, flag, value = ["", "", *words]
    except psutil.Error:
        return -1
    return int(value.split(":")[0]) if flag == "--as-worker" else -1


@contextmanager
def running(
    *flags: str,
    workers: int = 1,
    canary: bool = False,
    scheme: str = "http",
    verify: ssl.SSLContext | bool = False,
    python: Path | None = None,
) -> Iterator[RunningMetaserver]:
    """Run the command with engines of its own. `python`: another interpreter, with what is installed there alone."""
    port = free_port(count=workers + 1)
    urls = tuple(f"{scheme}://127.0.0.1:{port + i}" for i in range(workers + 1))
    with ExitStack() as stack:
        prefill, decode = FakeEngine("p"), FakeEngine("d", metaservers=urls)
        stack.callback(decode.stop)
        stack.callback(prefill.stop)
        more = ["--workers", str(workers), *([] if canary else ["--no-canary"]), *flags]
        yield stack.enter_context(metaserver(urls[0], prefill, decode, *more, verify=verify, python=python))


@contextmanager
def metaserver(
    url: str,
    prefill: FakeEngine,
    decode: FakeEngine,
    *flags: str,
    verify: ssl.SSLContext | bool = False,
    python: Path | None = None,
) -> Iterator[RunningMetaserver]:
    """Start the command, with its workers if any; yield when it is ready, and end it."""
    engines = ["--prefill", prefill.served.url, "--decode", decode.served.url, "--probe-every", "0.2"]
    listening = ["--port", str(httpx.URL(url).port)]
    said = tempfile.TemporaryFile()  # noqa: SIM115  # a process with much output would block on a pipe that is not read
    command, where, env = COMMAND, ROOT, dict(os.environ)
    if python is not None:
        command, where = [str(python), *COMMAND[1:]], python.parent
        env.pop("PYTHONPATH", None)
    process = subprocess.Popen([*command, *listening, *engines, *flags], cwd=where, env=env, stderr=said)
    http = httpx.Client(base_url=url, timeout=None, trust_env=False, verify=verify)
    family: list[psutil.Process] = []
    try:
        until(lambda: process.poll() is not None or _ready(http))
        assert process.poll() is None, "it ended before it was ready"
        family = psutil.Process(process.pid).children()
        yield RunningMetaserver(process, http, prefill, decode)
    finally:
        http.close()
        for worker in family if process.poll() is not None else ():
            with suppress(psutil.NoSuchProcess):  # the supervisor has ended: kill workers that it left
                worker.kill()
        try:
            process.terminate()
            process.wait()
        finally:
            process.kill()  # in case the test's timeout ended the wait
            said.seek(0)
            text = said.read().decode()
            said.close()
            print(text)  # pytest shows it with a failure
        assert "Traceback" not in text, text


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readiness").status_code == 200
    except httpx.TransportError:
        return False
