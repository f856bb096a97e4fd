# SPDX-License-Identifier: Apache-2.0
"""A log that a thread of its own writes: whoever reads it, or its disk, may hang, and the process goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
from collections.abc import Iterator

from vllm_ascend_pd.shared.threads import started

MAX_WAITING = 1 << 12  # records that have not been written; further ones are dropped
CLOSE_S = 2.0


class LogThread(logging.Handler):
    """Handler that gives lines to a thread. It writes to a descriptor: a stream's lock would hold up the exit too."""

    def __init__(self, fd: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._fd, self._dropped = fd, 0
        self.lines: queue.Queue[str] = queue.Queue(MAX_WAITING)  # "": the end
        self._thread = started("pd-log", self._run)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.lines.put_nowait(f"{self._lost()}{self.format(record)}\n")
            self._dropped = 0
        except queue.Full:
            self._dropped += 1
        if self._thread is None:  # the system refuses one
            self.end()
            self._run()

    def _lost(self) -> str:
        """Return the line that says how many are missing here; "" if none is."""
        if not self._dropped:
            return ""
        words = "%d lines were dropped, which nobody took"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, words, (self._dropped,), None)
        return f"{self.format(record)}\n"

    def _run(self) -> None:
        while left := self.lines.get().encode(errors="backslashreplace"):
            with contextlib.suppress(OSError):  # a full disk, or a pipe that has been closed
                while left:
                    left = left[os.write(self._fd, left) :]

    def end(self) -> None:
        """Write what is left, as far as it is taken."""
        with contextlib.suppress(queue.Full):
            self.lines.put_nowait("")
        if self._thread is not None:
            self._thread.join(CLOSE_S)


@contextlib.contextmanager
def logged(fd: int, formatter: logging.Formatter, level: str) -> Iterator[None]:
    """Let every logger write to a descriptor by a thread that ends with this."""
    handler = LogThread(fd, formatter)
    logging.basicConfig(level=level, handlers=[handler])
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.end()
