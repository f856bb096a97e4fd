# SPDX-License-Identifier: Apache-2.0
"""A process at its limit of threads: those with some names cannot be started, where the system refuses all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_more_threads(*names: str) -> Iterator[list[str]]:
    """Refuse threads whose names begin so. Yield the names that were refused."""
    refused: list[str] = []
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name.startswith(names):
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        yield refused
