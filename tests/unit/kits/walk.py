# SPDX-License-Identifier: Apache-2.0
"""Count of the package's functions that something passes."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import vllm_ascend_pd

PACKAGE = str(Path(vllm_ascend_pd.__file__).parent) + "/"


class Walk:
    """Functions of the package that are called while `on`, in this thread and in those that start within `with`."""

    def __init__(self) -> None:
        self.begin()
        self.on = False

    def begin(self) -> None:
        self.calls, self.threads, self.on = Counter[tuple[str, int, str]](), set[str](), True

    def __enter__(self) -> Walk:
        self.begin()
        threading.setprofile(self.called)
        sys.setprofile(self.called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def called(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            self.calls[code.co_filename.removeprefix(PACKAGE), code.co_firstlineno, code.co_name] += 1
            self.threads.add(threading.current_thread().name)

    @property
    def files(self) -> set[str]:
        return {file for file, _, _ in self.calls}

    def __str__(self) -> str:
        threads = f"{len(self.threads)} threads"
        return f"{len(self.calls)} functions in {len(self.files)} files, {self.calls.total()} calls, {threads}"


def show(figures: str, calls: Mapping[tuple[str, int, str], int]) -> None:
    print(figures)
    if "--functions" in sys.argv:
        for (file, line, name), times in sorted(calls.items()):
            print(f"{times:5} {file}:{line} {name}")
