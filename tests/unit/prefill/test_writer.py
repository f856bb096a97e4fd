# SPDX-License-Identifier: Apache-2.0
"""The writer's thread alone: it submits all that may be written before it waits for events."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from unit.kits.watching import until
from vllm_ascend_pd.device.cpu import CpuDevice
from vllm_ascend_pd.prefill.worker import writer as writer_module
from vllm_ascend_pd.prefill.worker.core.batches import Batch
from vllm_ascend_pd.prefill.worker.core.claiming import IN_FLIGHT
from vllm_ascend_pd.prefill.worker.writer import Writer, WriterThread
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.transport.base import WriteState

PEER = Endpoint("127.0.0.1", 1)


class LandingWire:
    """Wire whose writes land when the test sets `landing`, all in one poll of the loop."""

    def __init__(self) -> None:
        self.handles = itertools.count(1)
        self.landing = threading.Event()

    def submit(self, *_: object) -> int:
        return next(self.handles)

    def poll(self, handle: int) -> WriteState:
        return WriteState.LANDED if self.landing.is_set() else WriteState.PENDING


class ClaimableCore:
    """`claimable` batches, of which a peer takes no more at once than with the real core."""

    def __init__(self, claimable: int) -> None:
        self.claimable = claimable
        self.submitted_count = self.finished_count = 0

    @contextmanager
    def deciding(self) -> Iterator[Any]:
        yield self

    @property
    def claims(self) -> ClaimableCore:
        return self

    def claim(self, now: float, in_flight: Sequence[Batch]) -> list[Batch]:
        room = min(IN_FLIGHT - len(in_flight), self.claimable)
        self.claimable -= room
        return [Batch(PEER, "session", [], [], [0], [0], [1]) for _ in range(room)]

    def submitted(self, now: float, batch: Batch) -> None:
        self.submitted_count += 1

    def finished(self, now: float, batch: Batch, state: WriteState) -> None:
        self.finished_count += 1

    def died(self, now: float, why: str) -> None:
        raise AssertionError(why)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the loop's wait longer than any test."""
    monkeypatch.setattr(writer_module, "IDLE_S", 3600.0)
    yield


@pytest.mark.parametrize("claimable", [IN_FLIGHT + 1, 5 * IN_FLIGHT, 5 * IN_FLIGHT + 1])
def test_what_was_held_back_goes_when_all_that_was_out_lands_in_one_look(patient: None, claimable: int) -> None:
    wire, core = LandingWire(), ClaimableCore(claimable)
    thread = WriterThread("pd-writer-test", Writer(core.deciding, wire, lambda: 0.0), CpuDevice())
    try:
        thread.nudge()
        until(lambda: core.submitted_count == IN_FLIGHT, "the first batches")
        wire.landing.set()
        until(lambda: core.finished_count == claimable, "all batches, without any further news")
    finally:
        assert thread.stop(10)
