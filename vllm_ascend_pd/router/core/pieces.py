# SPDX-License-Identifier: Apache-2.0
"""Searches in long texts piece by piece: one search of all would keep the interpreter from every other thread."""

from __future__ import annotations

from collections.abc import Callable

PIECE = 64 << 10  # bytes that any search takes a few milliseconds for at most
_OVERLAP = 128

Buffer = bytes | memoryview


def holds(text: Buffer, says: Callable[[bytes], object]) -> bool:
    """Return whether `says` is true of some part. It must look for less than the `_OVERLAP` bytes that parts share."""
    return any(says(bytes(text[at : at + PIECE + _OVERLAP])) for at in range(0, len(text), PIECE))


def count(text: Buffer, byte: bytes) -> int:
    return sum(bytes(text[at : at + PIECE]).count(byte) for at in range(0, len(text), PIECE))
