# SPDX-License-Identifier: Apache-2.0
"""The writer's thread alone: whatever may be written is submitted before it waits for news."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import pytest
from watching import until

from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.protocol.messages import Endpoint
from vllm_ascend_pd.runtime import pusher as pusher_module
from vllm_ascend_pd.runtime.batches import Batch
from vllm_ascend_pd.runtime.pusher import IN_FLIGHT, Computed, Pusher, Sealed
from vllm_ascend_pd.transport.base import WriteState

PEER = Endpoint("127.0.0.1", 1)


class Wire:
    """Writes land when the test says so, all that are out in one poll of the loop."""

    def __init__(self) -> None:
        self.handles = itertools.count(1)
        self.landing = threading.Event()

    def listen(self, heard: Callable[[str], float | None]) -> None: ...

    def submit(self, session: str, src: Sequence[int], dst: Sequence[int], size: Sequence[int]) -> int:
        return next(self.handles)

    def poll(self, handle: int) -> WriteState:
        return WriteState.LANDED if self.landing.is_set() else WriteState.PENDING


class Work:
    """`claimable` batches, of which a peer takes no more at once than the real work allows."""

    def __init__(self, claimable: int) -> None:
        self.claimable = claimable
        self.submitted_count = self.finished_count = 0

    def computed(self, item: Computed) -> None: ...
    def staged(self, item: Any) -> None: ...
    def sealed(self, item: Sealed) -> None: ...

    def next_batches(self, busy: dict[Hashable, int]) -> list[Batch]:
        room = min(IN_FLIGHT - busy.get(PEER, 0), self.claimable)
        self.claimable -= room
        return [Batch(PEER, "session", [], [], [0], [0], [1]) for _ in range(room)]

    def submitted(self, batch: Batch) -> None:
        self.submitted_count += 1

    def finished(self, batch: Batch, state: WriteState) -> None:
        self.finished_count += 1

    def heard(self, peer: Endpoint) -> float | None:
        return None

    def died(self, error: Exception) -> None:
        raise AssertionError(error)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without news the loop would wait longer than any test does."""
    monkeypatch.setattr(pusher_module, "IDLE_S", 3600.0)
    yield


@pytest.mark.parametrize("claimable", [IN_FLIGHT + 1, 5 * IN_FLIGHT, 5 * IN_FLIGHT + 1])
def test_what_was_held_back_goes_when_all_that_was_out_lands_in_one_look(patient: None, claimable: int) -> None:
    wire, work = Wire(), Work(claimable)
    pusher = Pusher("pd-writer-test", work, wire, CpuDevice())  # type: ignore[arg-type]
    try:
        pusher.nudge()
        until(lambda: work.submitted_count == IN_FLIGHT, "the first batches")
        wire.landing.set()
        until(lambda: work.finished_count == claimable, "all batches, without any further news")
    finally:
        assert pusher.stop(10)
