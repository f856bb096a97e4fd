# SPDX-License-Identifier: Apache-2.0
"""Interface of transfer engines: decode uses a target, prefill a wire.

A write that failed is not quiet: its bytes may still land for a while, so its blocks stay fenced that long (see
docs/protocol.md). Parts of a write may be issued after `submit` has returned: if the peer has not answered yet or the
write waits for its turn (both within seconds, or not at all), and if it exceeds the number of descriptors in flight per
peer. Nothing is issued once the write has ended.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_ascend_pd.errors import PdError


class WriteState(enum.Enum):
    PENDING = "pending"
    LANDED = "landed"  # acknowledged by the destination: the bytes are in its memory
    FAILED = "failed"  # this side issues nothing more of it; what the network holds may still land
    UNISSUED = "unissued"  # failed before any of it was given to the engine: nothing of it can land


class Target(Protocol):
    """Memory that peers write to. Only its owner's thread calls it."""

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """Register (address, length) regions once; neighbours in memory are merged."""

    @property
    def session(self) -> str:
        """Name under which peers write to this target. Changes with every `revoke`."""

    def revoke(self) -> str:
        """Cut every peer off: no write of an old session can land once this returns. Return the new session.

        It may raise anything, whether the peers are cut off or not. Then it can be called again.
        """

    def close(self) -> None:
        """Idempotent."""


class Wire(Protocol):
    """Writes into peers' memory. Only the writer thread calls `submit` and `poll`."""

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        """Register (address, length) regions to write from, once; neighbours in memory are merged."""

    def listen(self, last_message_at: Callable[[str], float | None]) -> None:
        """Set `last_message_at`, which returns when a session's process last sent a message, by time.monotonic().

        `poll` calls it before first contact if the engine cannot probe a peer. Without it a connection has to suffice.
        """

    def submit(self, session: str, src: Sequence[int], dst: Sequence[int], size: Sequence[int]) -> int:
        """Start writing and return a handle for `poll`. Never waits for the data.

        If the submission is refused, `poll` returns FAILED for its handle.
        """

    def poll(self, handle: int) -> WriteState:
        """Return the state of a write, without blocking. Any other state than PENDING forgets the handle."""

    def close(self) -> None:
        """Close the wire, after the writer thread has ended. Idempotent."""


def with_code(error: Exception) -> PdError:
    """Return an error of a transfer engine as one that has a code."""
    return error if isinstance(error, PdError) else PdError("PD-WIRE-001", why=error)
