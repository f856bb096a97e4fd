# SPDX-License-Identifier: Apache-2.0
"""The examples where a CPU can run them: check.sh against a real pair that is there already, and 1p1d as it is written
(slow: three servers of its own)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from scripts.support.cells import Site
from scripts.support.models import ensure

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
READY_S, STOP_S = 500.0, 90.0
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def check(url: str, model: str, tries: int = 60) -> subprocess.CompletedProcess[str]:
    """examples/check.sh, as an operator runs it."""
    environment = os.environ | {"CHECK_TRIES": str(tries), "no_proxy": "127.0.0.1"}
    return subprocess.run(
        [EXAMPLES / "check.sh", url, model], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def prefilled(url: str) -> float:
    """Prefills that D had done elsewhere, by the metaserver's own count."""
    page = httpx.get(url + "/metrics", trust_env=False).text
    name = 'ascend_pd_metaserver_reservations_total{end="prefilled"}'
    return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)), 0.0)


def free_base() -> int:
    """The first of three neighbouring ports that are free."""
    for base in range(28100, 32000, 10):
        with ExitStack() as held:
            try:
                for port in (base, base + 1, base + 2):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return base
    raise RuntimeError("no three neighbouring ports are free")


@contextmanager
def running(script: Path, *words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A script with default signals, whatever this run was started with; interrupted at the end if it still runs."""
    with log.open("wb") as out:
        command = ["env", "--default-signal=INT", script, *words]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(STOP_S)


def test_check_sh_calls_a_pair_good_and_its_prompt_was_prefilled_elsewhere(faulty: Site) -> None:
    before = prefilled(faulty.front.url)
    done = check(faulty.front.url, "model")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] >= 1 and answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert prefilled(faulty.front.url) > before


def test_check_sh_fails_for_another_model_and_where_nobody_is(faulty: Site) -> None:
    assert check(faulty.front.url, "another-model").returncode != 0
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        done = check("http://{}:{}".format(*nobody.getsockname()), "model", tries=1)
    assert done.returncode == 1 and "not ready" in done.stderr


@pytest.mark.slow
def test_1p1d_runs_as_it_is_written(tmp_path: Path) -> None:
    model, base, log = str(ensure("gqa")), free_base(), tmp_path / "run.log"
    words = ("--model", model, "--port-base", str(base), "--log-dir", str(tmp_path / "logs"), "--timeout", "480")
    with running(EXAMPLES / "1p1d" / "run.sh", *words, log=log) as process:
        end = time.monotonic() + READY_S
        while "all ready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        url = f"http://127.0.0.1:{base}"
        done = check(url, model, tries=120)
        assert done.returncode == 0, done.stderr + log.read_text()
        assert json.loads(done.stdout)["usage"]["completion_tokens"] >= 1
        assert prefilled(url) >= 1
    assert "stopped" in log.read_text() and "killed" not in log.read_text()
    with socket.create_server(("127.0.0.1", base)):
        pass  # nobody has the port any more
