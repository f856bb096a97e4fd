# SPDX-License-Identifier: Apache-2.0
"""Long bodies that arrive in pieces: gathered without blocking the event loop, and cut again for sending.

A growing buffer is copied as it grows, and joining the pieces copies all of them at once: some 100 ms for 57 MiB. So a
long body goes into a mapping of the largest permitted size, of which the system allocates only the written pages.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

_JOINED = 1 << 20  # bytes that are joined in about a millisecond
_CUT = 256 << 10

Payload = bytes | memoryview | list[bytes | memoryview]


class Gathered:
    """A body of at most `max_bytes`, gathered from pieces."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._place: mmap.mmap | None = None
        self.size = 0

    def add(self, piece: bytes) -> None:
        """Take a piece. Raise OSError if there is no memory, ValueError beyond `max_bytes`."""
        if self.size + len(piece) > self._max_bytes:
            raise ValueError("more than was to come")
        self._pieces.append(piece)
        self.size += len(piece)
        if self.size <= _JOINED:
            return
        if self._place is None:
            self._place = mmap.mmap(-1, self._max_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for waiting in self._pieces:
            self._place.write(waiting)
        self._pieces = []

    def whole(self) -> bytes | memoryview:
        return b"".join(self._pieces) if self._place is None else memoryview(self._place)[: self.size].toreadonly()


def length(payload: Payload) -> int:
    return sum(map(len, payload)) if isinstance(payload, list) else len(payload)


def cut(payload: Payload) -> Iterator[bytes | memoryview]:
    """Yield pieces that are short enough to be written in one turn of the event loop. Nothing is copied."""
    for piece in payload if isinstance(payload, list) else (payload,):
        if len(piece) <= _CUT:
            yield piece
            continue
        for at in range(0, len(piece), _CUT):
            yield memoryview(piece)[at : at + _CUT]
