# SPDX-License-Identifier: Apache-2.0
"""A process of a test that answers lines, and that the test stops, wakes and kills."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from tools.support.process import freeze

ROOT = Path(__file__).parents[3]
ANSWER_S = 120.0  # it imports torch first, perhaps on a loaded machine
Self = TypeVar("Self", bound="AnsweringChild")


class AnsweringChild:
    """Handle for the test. A context manager, which ends the process."""

    def __init__(self, *words: str, environment: Mapping[str, str] | None = None, answer_s: float = ANSWER_S) -> None:
        """Start `python -m` with these words."""
        path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
        self._answer_s = answer_s
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "MC_LOG_LEVEL": "ERROR", **(environment or {})},
            cwd=ROOT,
        )

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def say(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def ask(self, *words: object) -> str:
        self.say(*words)
        return self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], self._answer_s)[0], "the child says nothing"
        line = self.process.stdout.readline().strip()
        assert line, "the child ended"
        return line

    def stop(self) -> None:
        freeze(self.process.pid)

    def wake(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
