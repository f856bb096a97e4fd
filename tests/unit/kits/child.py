# SPDX-License-Identifier: Apache-2.0
"""A process of a test that answers lines, and that the test stops, wakes and kills.

torch takes 12 s of a processor to import, which beside other tests is minutes. So a child is forked from a process that
has imported it (tools/support/fork_server.py), and waits for its answers leave out the time in which it had no
processor.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from tools.support.fork_server import Forked, ForkServers
from tools.support.process import freeze
from unit.kits.watching import without_processor

ROOT = Path(__file__).parents[3]
ANSWER_S = 30.0  # of the child's own time
LOOK_S = 1.0
ENDED_S = 60.0
TEST = "PD_CHILD_TEST"  # where the test listens
Self = TypeVar("Self", bound="AnsweringChild")


def take_connection() -> None:
    """In a child: read commands from the test, and write answers to it alone. What else is written is in the log."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[TEST])
        for standard in (0, 1):
            os.dup2(connection.fileno(), standard)


class AnsweringChild:
    """Handle for the test. A context manager, which ends the process."""

    def __init__(
        self,
        *words: str,
        forks: ForkServers,
        environment: Mapping[str, str] | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Start `python -m` with these words, forked if its environment is that of the forking process."""
        self._folder = Path(tempfile.mkdtemp(prefix="pd-child-"))
        self._log, at = self._folder / "log", self._folder / "test"
        path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        # A process with one thread can be forked: the libraries start theirs when they are used.
        one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        env = {**os.environ, "PYTHONPATH": path, "MC_LOG_LEVEL": "ERROR", **one, TEST: str(at), **(environment or {})}
        command = [sys.executable, "-m", *words]
        with self._log.open("wb") as out, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(at))
            listener.listen()
            server = forks.fitting(command, env, ROOT)
            self.process: Forked | subprocess.Popen[bytes] = (
                server.start(command, env, out, new_session=False)
                if server
                else subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=ROOT)
            )
            self._answer_s = answer_s
            self._hear(listener)
            self._connection, _ = listener.accept()
        self._lines = self._connection.makefile("r")

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._lines.close()
        self._connection.close()
        shutil.rmtree(self._folder)

    def say(self, *words: object) -> None:
        self._connection.sendall((" ".join(map(str, words)) + "\n").encode())

    def ask(self, *words: object) -> str:
        self.say(*words)
        return self.line()

    def line(self) -> str:
        self._hear(self._connection)
        line = self._lines.readline().strip()
        assert line, f"the child ended; its log: {self._log.read_text()[-2000:]}"
        return line

    def _hear(self, readable: socket.socket) -> None:
        self.wait(lambda: select.select([readable], [], [], LOOK_S)[0], "the child says nothing")

    def wait(self, reached: Callable[[], object], what: str) -> None:
        """Wait until `reached` holds, up to a limit of the child's own time: that without a processor is left out."""
        began, waited = time.monotonic(), without_processor(self.process.pid)
        while not reached():
            spent = time.monotonic() - began - (without_processor(self.process.pid) - waited)
            going_on = spent < self._answer_s and self.process.poll() is None
            assert going_on, f"{what}; its log: {self._log.read_text()[-2000:]}"

    def stop(self) -> None:
        freeze(self.process.pid)

    def wake(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(ENDED_S)
