# SPDX-License-Identifier: Apache-2.0
"""launch_1p1d.sh with stand-in servers: waits for all three, creates the secret, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.support.process import free_port

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts/launch_1p1d.sh"
DEADLINE = 60

# Stands in for `python -m vllm… --port N`: a worker process of its own, and /health after a moment.
SERVER = """
import http.server, os, signal, subprocess, sys, threading
mode = open(os.environ["STAND_IN"] + "/mode." + ("metaserver" if "vllm_ascend_pd.cli" in sys.argv else
    "decode" if "kv_consumer" in " ".join(sys.argv) else "prefill")).read()
if mode == "dies":
    sys.exit("the stand-in could not start: no such model")
worker = subprocess.Popen([sys.executable, "-c", "import time\\nwhile True: time.sleep(60)", os.environ["STAND_IN"]])
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (worker.terminate(), worker.wait(), os._exit(0)))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        unready = self.path == "/readiness" and os.path.exists(os.environ["STAND_IN"] + "/no-block-moves")
        self.send_response(503 if mode == "never" or unready else 200)
        self.end_headers()
        if unready:
            self.wfile.write(b'{"ready":false,"proven_pairs":[],"last_error":"p to d: no KV came"}')
    def log_message(self, *_): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Health)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True: signal.pause()
"""

# The scripts query the interpreter for vLLM's needs on a CPU; everything else that it runs is a server.
INTERPRETER = """#!/bin/sh
case "$2 $3" in
  "tools.support.on_cpu "*) exec {python} "$@" ;;
  "vllm_ascend_pd.cli doctor") exit 0 ;;
  *) exec {python} {folder}/server.py "$@" ;;
esac
"""


class Launch:
    """One run of the launcher, its output so far, and the processes that carry its mark."""

    def __init__(self, folder: Path, *flags: str, **modes: str) -> None:
        self.mark = str(folder)
        self.log_dir = folder / "logs"
        (folder / "server.py").write_text(SERVER)
        for role in ("metaserver", "prefill", "decode"):
            (folder / f"mode.{role}").write_text(modes.get(role, "good"))
        python = folder / "python"
        python.write_text(INTERPRETER.format(python=sys.executable, folder=folder))
        python.chmod(0o755)
        env = {k: v for k, v in os.environ.items() if not k.startswith("PD_")}
        env |= {"PD_PYTHON": str(python), "PD_DEVICE": "cpu", "STAND_IN": str(folder)}
        self.base = free_port(count=3)
        self.output = folder / "output"
        words = [
            # A shell cannot trap signals that are ignored when it starts, as SIGINT is in a background job.
            *("env", "--default-signal=INT", SCRIPT, "--model", "m", "--port-base", str(self.base)),
            *("--log-dir", self.log_dir, "--grace", "10", *flags),
        ]
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def text(self) -> str:
        return self.output.read_text()

    def until(self, words: str) -> None:
        end = time.monotonic() + DEADLINE
        while words not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, self.text()
            time.sleep(0.05)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> int:
        return self.process.wait(DEADLINE)

    def left(self) -> list[int]:
        return marked(self.mark)

    def clear(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Return processes whose command line has the mark: those that this test started."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "cmdline").read_bytes():
                pids.append(int(folder.name))
    return pids


Start = Callable[..., Launch]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Start]:
    started: list[Launch] = []

    def start(*flags: str, **modes: str) -> Launch:
        started.append(Launch(tmp_path, *flags, **modes))
        return started[-1]

    yield start
    for one in started:
        one.clear()


def test_ctrl_c_stops_all_three_and_their_workers_and_nothing_else(
    launch: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bystander_folder = str(tmp_path_factory.mktemp("bystander"))
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()", "vllm.entrypoints.openai.api_server", bystander_folder]
    )
    try:
        run = launch()
        run.until("all ready")
        assert len(run.left()) >= 6, "three servers with a worker each"
        run.interrupt()
        assert run.process.returncode == 0, run.text()
        assert run.left() == []
        assert "stopped" in run.text()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait(DEADLINE)


def test_the_address_is_printed_only_when_all_three_answer(launch: Start) -> None:
    run = launch("--timeout", "10", decode="never")
    assert run.end() == 1
    text = run.text()
    assert "prefill answers" in text
    assert "not ready after 10 s: decode" in text
    assert "all ready" not in text
    assert run.left() == []


def test_three_servers_that_answer_are_not_ready_before_a_block_has_moved(launch: Start, tmp_path: Path) -> None:
    still = tmp_path / "no-block-moves"
    still.touch()
    run = launch("--timeout", "60")
    run.until("waiting for the first block to move: p to d: no KV came")
    assert "all ready" not in run.text()
    still.unlink()
    run.until("all ready")
    run.interrupt()


def test_a_pair_over_which_nothing_moves_ends_the_launch_with_the_reason(launch: Start, tmp_path: Path) -> None:
    (tmp_path / "no-block-moves").touch()
    run = launch("--timeout", "10")
    assert run.end() == 1
    assert "no KV has come from prefill to decode after 10 s: p to d: no KV came" in run.text()
    assert "all ready" not in run.text() and run.left() == []


def test_the_secret_is_made_readable_by_its_owner_alone(launch: Start) -> None:
    run = launch()
    run.until("all ready")
    secret = run.log_dir / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert len(secret.read_bytes()) >= 32
    assert secret.read_text() not in run.text()
    run.interrupt()


def test_a_secret_that_others_can_read_is_refused_before_anything_starts(launch: Start, tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.write_text("x" * 64)
    loose.chmod(0o644)
    run = launch("--secret-file", str(loose))
    assert run.end() != 0
    assert f"{loose} exists with mode 644: chmod 600 it" in run.text()
    assert "started" not in run.text()


def test_an_engine_that_dies_at_the_start_ends_the_launch_with_its_last_words(launch: Start) -> None:
    run = launch(prefill="dies")
    assert run.end() == 1
    assert "no such model" in run.text()
    assert "prefill has ended by itself" in run.text()
    assert run.left() == []


def test_a_process_that_ignores_the_stop_is_killed_after_the_grace_time_and_named(launch: Start) -> None:
    run = launch("--grace", "1", prefill="stubborn")
    run.until("all ready")
    assert run.interrupt() != 0
    assert "prefill or a process of it did not stop within 1 s" in run.text()
    assert run.left() == []


def test_a_port_that_is_in_use_is_named_and_nothing_starts(launch: Start) -> None:
    first = launch()
    first.until("all ready")
    second = subprocess.run(
        [SCRIPT, "--model", "m", "--port-base", str(first.base), "--log-dir", first.log_dir / "again"],
        env=os.environ | {"PD_PYTHON": str(first.output.parent / "python"), "PD_DEVICE": "cpu"},
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert second.returncode == 1
    assert f"port {first.base} is already served" in second.stdout
    assert "started" not in second.stdout
    first.interrupt()


def dry(device: str, *flags: str | Path) -> list[str]:
    """Return the three commands that the script prints."""
    words, env = [SCRIPT, "--model", "m", *flags, "--dry-run"], {"PD_PYTHON": "/some/python", "PD_DEVICE": device}
    return subprocess.check_output(words, env=os.environ | env, text=True, timeout=DEADLINE).splitlines()


def test_dry_run_prints_three_commands_and_writes_nothing(tmp_path: Path) -> None:
    metaserver, prefill, decode = dry("cpu", "--p-tp", "2", "--log-dir", tmp_path / "logs")
    assert "--prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002" in metaserver
    assert "--tensor-parallel-size 2" in prefill
    assert "kv_consumer" in decode
    assert '"metaserver_urls": ["http://127.0.0.1:8000"]' in decode
    assert list(tmp_path.iterdir()) == []


def test_npu_engines_get_devices_of_their_own() -> None:
    _, prefill, decode = dry("npu", "--p-tp", "4", "--d-tp", "2")
    assert "ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 " in prefill
    assert "ASCEND_RT_VISIBLE_DEVICES=4,5 " in decode


def test_graphs_and_drafts_reach_the_engine_that_they_are_for() -> None:
    draft = '{"method": "mtp", "num_speculative_tokens": 2}'
    graphs = ["--p-graph-mode", "PIECEWISE", "--d-graph-mode", "FULL_DECODE_ONLY"]
    _, prefill, decode = map(shlex.split, dry("npu", *graphs, "--d-speculative", draft, "--d-pp", "2"))
    assert '{"cudagraph_mode": "PIECEWISE"}' in prefill and "--speculative-config" not in prefill
    assert '{"cudagraph_mode": "FULL_DECODE_ONLY"}' in decode
    assert decode[decode.index("--speculative-config") + 1] == draft
    assert decode[decode.index("--pipeline-parallel-size") + 1] == "2" and "ASCEND_RT_VISIBLE_DEVICES=1,2" in decode
