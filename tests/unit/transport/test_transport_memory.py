# SPDX-License-Identifier: Apache-2.0
"""The in-process transport follows the same contract as a real one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from vllm_ascend_pd.config import WireConfig
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.create import create_target
from vllm_ascend_pd.transport.memory import MemoryTransport, Write

SIZE = 1 << 16


class MemorySide:
    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.bytes = np.zeros(SIZE, dtype=np.uint8)
        self.at = self.bytes.ctypes.data
        transport.register([(self.at, SIZE // 2), (self.at + SIZE // 2, SIZE // 2)])


@pytest.fixture
def pair() -> Iterator[tuple[MemorySide, MemorySide]]:
    p, d = MemorySide(create_target(WireConfig(transport="memory"), "ignored")), MemorySide(MemoryTransport())
    p.bytes[:] = 7
    yield p, d
    p.transport.close()
    d.transport.close()


def test_bytes_land(pair: tuple[MemorySide, MemorySide]) -> None:
    p, d = pair
    handle = p.transport.submit(d.transport.session, [p.at, p.at + 500], [d.at + 10, d.at + 200], [20, 30])
    assert p.transport.poll(handle) is WriteState.LANDED
    assert d.bytes.sum() == 7 * 50 and (d.bytes[10:30] == 7).all() and (d.bytes[200:230] == 7).all()


def test_a_span_may_cross_registered_neighbours(pair: tuple[MemorySide, MemorySide]) -> None:
    p, d = pair
    handle = p.transport.submit(d.transport.session, [p.at], [d.at], [SIZE])
    assert p.transport.poll(handle) is WriteState.LANDED


@pytest.mark.parametrize("src, dst, size", [(-1, 0, 4), (0, -1, 4), (0, SIZE - 2, 4), (SIZE - 2, 0, 4), (0, 0, 0)])
def test_nothing_outside_is_touched(pair: tuple[MemorySide, MemorySide], src: int, dst: int, size: int) -> None:
    p, d = pair
    handle = p.transport.submit(d.transport.session, [p.at, p.at + src], [d.at + 100, d.at + dst], [10, size])
    assert p.transport.poll(handle) is WriteState.FAILED
    assert not d.bytes.any()


def test_a_handle_is_forgotten_once_it_has_ended(pair: tuple[MemorySide, MemorySide]) -> None:
    p, d = pair
    handle = p.transport.submit(d.transport.session, [p.at], [d.at], [1])
    p.transport.poll(handle)
    with pytest.raises(KeyError):
        p.transport.poll(handle)


def test_revoke_cuts_off_what_was_submitted_and_what_comes_later(pair: tuple[MemorySide, MemorySide]) -> None:
    p, d = pair
    old = d.transport.session
    before = p.transport.submit(old, [p.at], [d.at], [100])
    new = d.transport.revoke()
    assert new != old and d.transport.session == new
    after = p.transport.submit(old, [p.at], [d.at], [100])
    assert {p.transport.poll(before), p.transport.poll(after)} == {WriteState.FAILED}
    assert not d.bytes.any()
    assert p.transport.poll(p.transport.submit(new, [p.at], [d.at], [100])) is WriteState.LANDED


def test_a_closed_side_neither_sends_nor_receives(pair: tuple[MemorySide, MemorySide]) -> None:
    p, d = pair
    pending = p.transport.submit(d.transport.session, [p.at], [d.at], [1])
    p.transport.close()
    p.transport.close()
    assert p.transport.poll(pending) is WriteState.FAILED
    session = d.transport.session
    d.transport.close()
    other = MemorySide(MemoryTransport())
    assert other.transport.poll(other.transport.submit(session, [other.at], [d.at], [1])) is WriteState.FAILED
    other.transport.close()
    assert not d.bytes.any()


def test_a_subclass_decides_when_and_whether_a_write_lands(pair: tuple[MemorySide, MemorySide]) -> None:
    _, d = pair
    fates = [WriteState.PENDING, WriteState.FAILED]

    class LateTransport(MemoryTransport):
        def land(self, write: Write) -> WriteState:
            return fates.pop(0) if fates else super().land(write)

    p = MemorySide(LateTransport())
    p.bytes[:] = 1
    handle = p.transport.submit(d.transport.session, [p.at], [d.at], [5])
    assert p.transport.poll(handle) is WriteState.PENDING
    assert p.transport.poll(handle) is WriteState.FAILED
    assert not d.bytes.any()
    retry = p.transport.submit(d.transport.session, [p.at], [d.at], [5])
    assert p.transport.poll(retry) is WriteState.LANDED
    p.transport.close()


def test_no_byte_lands_after_revoke_returned_whatever_the_other_thread_does(
    pair: tuple[MemorySide, MemorySide],
) -> None:
    p, d = pair
    session, stop = d.transport.session, threading.Event()

    def write() -> None:
        while not stop.is_set():
            p.transport.poll(p.transport.submit(session, [p.at], [d.at], [SIZE]))

    writer = threading.Thread(target=write, name="writer")
    writer.start()
    for _ in range(50):
        d.transport.revoke()
        d.bytes[:] = 0
        assert not d.bytes.any()
        session = d.transport.session
    d.transport.revoke()
    d.bytes[:] = 0
    stop.set()
    writer.join()
    assert not d.bytes.any()
