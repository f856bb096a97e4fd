# SPDX-License-Identifier: Apache-2.0
"""tools/support/fork_server.py: a forked child is what its command would have started, and its end is seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools.support.checks import eventually
from tools.support.fork_server import Forked, ForkServers
from tools.support.models import ROOT
from tools.support.process import Child

PROGRAM = """
import json, os, pathlib, signal, sys, time
import pd_forked_sets
if __name__ == "__main__":
    print(json.dumps({
        "argv": sys.argv[1:], "name": __name__, "file": __file__, "folder": os.getcwd(), "environment": dict(os.environ),
        "path": sys.path, "leads its session": os.getsid(0) == os.getpid(),
        "handlers": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)],
        "open": sorted(os.readlink(f"/proc/self/fd/{f.name}").split(":")[0] for f in pathlib.Path("/proc/self/fd").iterdir()
                       if os.path.exists(f)),
    }), flush=True)
    if sys.argv[1] == "wait":
        time.sleep(600)
    if sys.argv[1] == "raise":
        raise ValueError("said in the log")
    sys.exit(int(sys.argv[1]))
"""
SETS = "import os; os.environ.setdefault('PD_SET_BY_AN_IMPORT', 'once')"
BROKEN = "raise ImportError('one library is missing')"
THREADED = "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    for name, text in {"program": PROGRAM, "sets": SETS, "broken": BROKEN, "threaded": THREADED}.items():
        (tmp_path / f"pd_forked_{name}.py").write_text(text)
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}


@pytest.fixture(autouse=True)
def on_interrupt(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have children begin with this answer to SIGINT, whatever the shell of this run has chosen."""
    before = signal.signal(signal.SIGINT, getattr(request, "param", signal.default_int_handler))
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[ForkServers]:
    with ForkServers(["pd_forked_program", "decimal"], tmp_path) as forks:
        yield forks


def command(*words: str, module: str = "pd_forked_program") -> list[str]:
    return [sys.executable, "-m", module, *words]


def child(forks: ForkServers | None, env: dict[str, str], log: Path, *words: str) -> Child:
    return Child("child", command(*words), log, env, ROOT, forks)


def ended(child: Child) -> int:
    return child.wait(60.0)


@pytest.mark.parametrize(
    "on_interrupt",
    [signal.SIG_IGN, signal.default_int_handler],
    indirect=True,
    ids=["as in the background", "as in a terminal"],
)
def test_a_child_is_what_its_command_would_have_started(
    forks: ForkServers, env: dict[str, str], tmp_path: Path
) -> None:
    ended(child(forks, env, tmp_path / "first", "0"))
    other = {**env, "PYTHONPATH": f"{ROOT}:{tmp_path}:/nowhere", "PD_OF_THIS_CHILD": "1"}
    seen: list[dict[str, Any]] = []
    for by in (forks, None):
        run = child(by, other, tmp_path / "log", "3", "-x")
        assert isinstance(run._popen, Forked) is (by is not None)
        assert ended(run) == run.returncode == 3 and not run.alive
        seen.append(json.loads(run.log.read_text()))
        run.log.unlink()
    assert seen[0] == seen[1]
    assert seen[0]["environment"]["PD_SET_BY_AN_IMPORT"] == "once"
    assert seen[0]["leads its session"] and "/nowhere" in seen[0]["path"]


def test_what_was_asked_to_be_imported_is_there(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "pd_forked_lists.py").write_text(
        "import sys; print(__name__ == '__main__' and 'decimal' in sys.modules)"
    )
    with ForkServers(["pd_forked_lists", "decimal"], tmp_path) as forks:
        run = Child("child", command(module="pd_forked_lists"), tmp_path / "log", env, ROOT, forks)
        assert ended(run) == 0
    assert run.log.read_text() == "True\n"


@pytest.mark.parametrize(("word", "code"), [("0", 0), ("7", 7), ("raise", 1)])
def test_its_return_code(forks: ForkServers, env: dict[str, str], tmp_path: Path, word: str, code: int) -> None:
    run = child(forks, env, tmp_path / "log", word)
    assert ended(run) == code
    assert ("ValueError: said in the log" in run.log.read_text()) is (word == "raise")


def test_each_of_several_ends_by_its_own_signal(forks: ForkServers, env: dict[str, str], tmp_path: Path) -> None:
    runs = [child(forks, env, tmp_path / str(i), "wait") for i in range(3)]
    assert all(run.alive for run in runs)
    with pytest.raises(subprocess.TimeoutExpired):
        runs[0].wait(0.01)
    for run, number in zip(runs, (signal.SIGKILL, signal.SIGTERM, signal.SIGINT), strict=True):
        os.kill(run.pid, number)
        assert ended(run) == -number
    assert "KeyboardInterrupt" in runs[2].log.read_text()


def test_its_pid_is_its_own_until_its_end_was_seen(forks: ForkServers, env: dict[str, str], tmp_path: Path) -> None:
    run = child(forks, env, tmp_path / "log", "0")
    process = psutil.Process(run.pid)
    eventually(lambda: process.status() == psutil.STATUS_ZOMBIE, "it has ended")
    os.kill(run.pid, signal.SIGTERM)
    assert ended(run) == 0
    eventually(lambda: not psutil.pid_exists(run.pid), "it is gone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_whole_group_leaves_the_child_to_its_owner(
    forks: ForkServers, env: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    run = child(forks, env, tmp_path / "log", "wait")
    serving = psutil.Process(run.pid).parent()
    assert serving is not None
    os.kill(serving.pid, number)
    assert ended(child(forks, env, tmp_path / "other", "5")) == 5
    assert run.alive and run.stop() == [] and run.returncode == -signal.SIGTERM


def test_stop_ends_it_and_finds_nothing_left(forks: ForkServers, env: dict[str, str], tmp_path: Path) -> None:
    run = child(forks, env, tmp_path / "log", "wait")
    assert [p.pid for p in run.members()] == [run.pid]
    os.kill(run.pid, signal.SIGSTOP)
    assert run.stop() == [] and run.returncode == -signal.SIGTERM
    eventually(lambda: not psutil.pid_exists(run.pid), "it is gone")


@pytest.mark.parametrize(
    ("words", "differing", "folder"),
    [
        (["-m", "json.tool"], {}, ROOT),
        (["-c", "pass"], {}, ROOT),
        (["-m", "pd_forked_program"], {"OMP_NUM_THREADS": "17"}, ROOT),
        (["-m", "pd_forked_program"], {"LD_PRELOAD": ""}, ROOT),
        (["-m", "pd_forked_program"], {}, ROOT.parent),
    ],
)
def test_what_would_differ_is_not_forked(
    forks: ForkServers, env: dict[str, str], words: list[str], differing: dict[str, str], folder: Path
) -> None:
    assert forks.fitting(command("0"), env, ROOT) is not None
    assert forks.fitting([sys.executable, *words], env | differing, folder) is None


@pytest.mark.parametrize(
    ("module", "reason"),
    [("pd_forked_broken", "one library is missing"), ("pd_forked_threaded", "has 2 threads when it is imported")],
)
def test_imports_that_cannot_be_forked_say_why(env: dict[str, str], tmp_path: Path, module: str, reason: str) -> None:
    with ForkServers([module], tmp_path) as forks:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"fork-server-0\.log says why"):
                Child("child", command(module=module), tmp_path / "log", env, ROOT, forks)
    assert reason in (tmp_path / "fork-server-0.log").read_text()


def test_the_serving_process_ends_with_its_owner_and_children_go_on(env: dict[str, str], tmp_path: Path) -> None:
    with ForkServers(["pd_forked_program"], tmp_path) as forks:
        run = child(forks, env, tmp_path / "log", "wait")
        serving = psutil.Process(run.pid).parent()
        assert serving is not None and serving.ppid() == os.getpid()
    assert not serving.is_running() and psutil.pid_exists(run.pid)
    psutil.Process(run.pid).kill()
