# SPDX-License-Identifier: Apache-2.0
"""A log that nobody reads: the process goes on, what waits is bounded, and a line says what was dropped."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from tools.support.process import free_port
from unit.kits.refusing import no_more_threads
from unit.router.cluster import until
from unit.router.command import COMMAND, ROOT
from vllm_ascend_pd.observe import log_thread
from vllm_ascend_pd.observe.log_thread import LogThread

FILLER = b"x" * 4096


@pytest.fixture
def full() -> Iterator[tuple[int, int]]:
    """Return a pipe that takes nothing more."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    try:
        while True:
            os.write(writes, FILLER)
    except BlockingIOError:
        os.set_blocking(writes, True)
    yield reads, writes
    os.close(reads)
    os.close(writes)


def read_until(reads: int, last: bytes) -> list[str]:
    """Return the lines from now on, up to one that ends so."""
    said = b""
    while not said.endswith(last + b"\n"):
        said += os.read(reads, 1 << 16)
    return said.replace(b"x", b"").decode().splitlines()


def test_a_log_that_nobody_reads_holds_nobody_up(full: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_thread, "MAX_WAITING", 3)
    handler = LogThread(full[1], logging.Formatter("%(levelname)s %(message)s"))

    def say(word: str) -> None:
        handler.handle(logging.LogRecord("a", logging.INFO, __file__, 1, "%s", (word,), None))

    say("first")
    until(handler.lines.empty)  # the thread has it, and hangs
    for number in range(8):
        say(f"line {number}")
    assert read_until(full[0], b"line 2") == ["INFO first", "INFO line 0", "INFO line 1", "INFO line 2"]
    say("last")
    assert read_until(full[0], b"last") == ["WARNING 5 lines were dropped, which nobody took", "INFO last"]
    say("one more")
    assert read_until(full[0], b"more") == ["INFO one more"]
    handler.end()


def test_without_a_thread_lines_are_written_at_once() -> None:
    reads, writes = os.pipe()
    with no_more_threads("pd-log"):
        handler = LogThread(writes, logging.Formatter("%(message)s"))
    for number in range(3):
        handler.handle(logging.LogRecord("a", logging.INFO, __file__, 1, "line %d", (number,), None))
        assert os.read(reads, 100) == b"line %d\n" % number
    os.close(reads)
    os.close(writes)


def test_a_metaserver_whose_log_nobody_reads_serves_and_ends(full: tuple[int, int]) -> None:
    port = free_port()
    words = [*COMMAND, "--port", str(port), "--prefill", "127.0.0.1:1", "--decode", "127.0.0.1:2"]
    with subprocess.Popen(words, cwd=ROOT, stderr=full[1]) as process:

        def serves() -> bool:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        try:
            until(serves, 60)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
