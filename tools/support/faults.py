# SPDX-License-Identifier: Apache-2.0
"""Orders to the fault plug-in (tests/integration/plugins/faults)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tools.support.models import ROOT

PLUGIN = ROOT / "tests" / "integration" / "plugins" / "faults"
VARIABLE = "PD_TEST_FAULTS"
DOOR = ("--middleware", "pd_test_faults.Door")
MODULE = "pd_test_faults"
DROP_WRITES = "drop writes"  # P's transfer engine reports every write as done, and writes nothing
LOOK_S = 0.01


class Orders:
    """Orders to one server. `environment` belongs in its specification."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> Mapping[str, str]:
        return {VARIABLE: str(self.directory)}

    def clear(self) -> None:
        for path in self.directory.iterdir():
            path.unlink(missing_ok=True)

    def stop_at(self, stage: str) -> None:
        self._write("stop-at", stage)

    def refuse(self, name: str) -> None:
        self._write("refuse", name)

    def comply(self) -> None:
        """Withdraw the order to refuse."""
        (self.directory / "refuse").unlink(missing_ok=True)

    @property
    def refused(self) -> bool:
        return (self.directory / "refused").exists()

    def wait_refused(self, limit_s: float) -> None:
        self._wait(lambda: self.refused, limit_s, "nothing was refused")

    def stopped(self, limit_s: float) -> int:
        """Wait for the process that stops itself at the stage, and return its pid."""
        self._wait(lambda: any(self.directory.glob("stopped-*")), limit_s, "the stage was not reached")
        pid = int(next(self.directory.glob("stopped-*")).name.partition("-")[2])
        until = time.monotonic() + limit_s
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED and time.monotonic() < until:
            time.sleep(LOOK_S)
        return pid

    def _write(self, name: str, text: str) -> None:
        scratch = self.directory / f".{name}"
        scratch.write_text(text)
        scratch.rename(self.directory / name)  # atomic: a reader sees all of it or nothing

    def _wait(self, reached: Callable[[], bool], limit_s: float, why: str) -> None:
        until = time.monotonic() + limit_s
        while not reached():
            if time.monotonic() > until:
                raise TimeoutError(f"{self.directory.name}: {why} within {limit_s:.0f} s")
            time.sleep(LOOK_S)


def wake_pid(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
