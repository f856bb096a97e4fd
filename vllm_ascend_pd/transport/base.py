# SPDX-License-Identifier: Apache-2.0
"""What the rest of the package asks of a transfer engine: decode of a target, prefill of a wire.

A write that failed is not quiet: its bytes may still land for a while, so its blocks stay fenced that long (see
docs/protocol.md). What may be issued later than `submit` returned: a write to a peer that has not answered yet, one that
waits for its turn (both within seconds, or not at all), and what exceeds the number of descriptors in flight per peer.
Nothing is issued any more once the write has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol


class WriteState(enum.Enum):
    PENDING = "pending"
    LANDED = "landed"  # acknowledged by the destination: the bytes are in its memory
    FAILED = "failed"  # this side issues nothing more of it; what the network holds may still land
    UNISSUED = "unissued"  # failed before the engine was given any of it: nothing of it can land


class Target(Protocol):
    """Memory that peers write to. Only its owner's thread calls it."""

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """Register (address, length) regions once; neighbours in memory are merged."""

    @property
    def session(self) -> str:
        """The name under which peers write to us. Changes with every `revoke`."""

    def revoke(self) -> str:
        """Cut every peer off: no write of an old session can land once this returns. Returns the new session."""

    def close(self) -> None:
        """Idempotent."""


class Wire(Protocol):
    """Writes into peers' memory. Only the writer thread calls `submit` and `poll`."""

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """What may be written from: (address, length) regions, once; neighbours in memory are merged."""

    def listen(self, heard: Callable[[str], float | None]) -> None:
        """`heard` tells when the process behind a session last said anything to us, by time.monotonic(). Asked by `poll`
        before first contact where the engine itself cannot ask; without it a connection must do."""

    def submit(self, session: str, src: Sequence[int], dst: Sequence[int], size: Sequence[int]) -> int:
        """Start writing; returns a handle for `poll`. Never waits for the data. A submission that the
        engine refuses outright returns a handle that polls FAILED."""

    def poll(self, handle: int) -> WriteState:
        """Non-blocking; a handle that is not PENDING any more is forgotten by this call."""

    def close(self) -> None:
        """Idempotent; after the writer thread has ended."""
