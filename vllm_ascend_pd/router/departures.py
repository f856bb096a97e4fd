# SPDX-License-Identifier: Apache-2.0
"""Callers that have closed although their connection is still open on this side, by one epoll for all of them.

asyncio reads no more from a connection whose other side sends no more, so it would not see that one break.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable


class Departures:
    """A watch for connections that break."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._gone: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, gone: Callable[[], None]) -> None:
        """Call `gone` when the connection breaks: epoll reports that of each descriptor, whatever it is asked for."""
        if not self._gone:
            asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._look)
        self._gone[fd] = gone
        self._epoll.register(fd, 0)

    def forget(self, fd: int) -> None:
        if self._gone.pop(fd, None) is not None:
            with contextlib.suppress(OSError):  # closed already
                self._epoll.unregister(fd)
            if not self._gone:
                asyncio.get_running_loop().remove_reader(self._epoll.fileno())

    def _look(self) -> None:
        for fd, _ in self._epoll.poll(0):
            gone = self._gone.get(fd)
            self.forget(fd)
            if gone is not None:
                gone()
