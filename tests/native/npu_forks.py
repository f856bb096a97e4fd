# SPDX-License-Identifier: Apache-2.0
"""Processes over the stand-ins without an import of torch_npu each, and the lines of the package that they run.

A process that has used an NPU cannot be forked. So one is forked before (`Nursery`), uses none, and forks the ranks.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

SETTINGS = "PD_COUNT_LINES"  # coverage's file of settings
ENDED_S = 700.0
_fork = multiprocessing.get_context("fork")


@contextmanager
def counted() -> Iterator[None]:
    """Count the lines that this process runs from here on, if it is asked to: none of its imports'."""
    if SETTINGS not in os.environ:
        yield
        return
    import coverage

    counting = coverage.Coverage(config_file=os.environ[SETTINGS], data_suffix=True)
    counting.start()
    try:
        yield
    finally:
        counting.stop()
        counting.save()


class Nursery:
    """A process that forks others, each of which runs one function. They end with `close` at the latest."""

    def __init__(self) -> None:
        self._connection, theirs = _fork.Pipe()
        self._process = _fork.Process(target=self._serve, args=(theirs,), name="nursery")
        self._process.start()
        theirs.close()

    def start(self, function: Callable[..., object], *arguments: Any) -> int:
        return int(self._ask(function, arguments))

    def wait(self, pid: int) -> int | None:
        """Return how the process ended; None if it has not ended in time."""
        code: int | None = self._ask(None, (pid,))
        return code

    def close(self) -> None:
        self._connection.close()
        self._process.join(ENDED_S)

    def _ask(self, *request: Any) -> Any:
        self._connection.send(request)
        if not self._connection.poll(ENDED_S + 30.0):
            raise SystemExit(f"the process that forks others did not answer {request}")
        return self._connection.recv()

    def _serve(self, connection: Connection) -> None:
        self._connection.close()
        children: dict[int | None, multiprocessing.process.BaseProcess] = {}
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:
                break
            if function is None:
                child = children[arguments[0]]
                child.join(ENDED_S)
                connection.send(child.exitcode)
            else:
                child = _fork.Process(target=_run, args=(connection, function, *arguments))
                child.start()
                children[child.pid] = child
                connection.send(child.pid)
        for child in children.values():
            child.kill()


def _run(connection: Connection, function: Callable[..., object], *arguments: Any) -> None:
    connection.close()
    with counted():
        function(*arguments)
