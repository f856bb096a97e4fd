# SPDX-License-Identifier: Apache-2.0
"""Faulty transfer engines for the tests of the runtimes: the in-process one, each with one fault."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence

from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.memory import MemoryTransport, Write


class SlowWire(MemoryTransport):
    """Wire whose writes land when the test sets `open`."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.asked = threading.Event()

    def land(self, write: Write) -> WriteState:
        self.asked.set()
        return super().land(write) if self.open.is_set() else WriteState.PENDING


class LossyWire(MemoryTransport):
    """Wire that reports a failed write while the bytes may still land, like Mooncake. `lost`: times on the test's
    clock."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[float] = []

    def land(self, write: Write) -> WriteState:
        super().land(write)
        self.lost.append(time.monotonic())
        return WriteState.FAILED


class FlippingWire(MemoryTransport):
    """Wire that flips one bit of every write into one address range."""

    def __init__(self, spoiled: range) -> None:
        super().__init__()
        self.spoiled = spoiled

    def land(self, write: Write) -> WriteState:
        state = super().land(write)
        for at in write.dst.tolist():
            if at in self.spoiled:
                byte = ctypes.c_uint8.from_address(at)
                byte.value ^= 1
        return state


class DyingWire(MemoryTransport):
    """Wire whose engine raises in the writer's calls."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at, self._polls = at, 0

    def submit(self, session: str, src: Sequence[int], dst: Sequence[int], size: Sequence[int]) -> int:
        if self._at == "submit":
            raise OSError("the engine broke in submit")
        return super().submit(session, src, dst, size)

    def poll(self, handle: int) -> WriteState:
        self._polls += 1
        if self._at == "poll" and self._polls == 2:
            raise OSError("the engine broke in poll")
        return super().poll(handle)
