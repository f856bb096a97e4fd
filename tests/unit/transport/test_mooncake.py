# SPDX-License-Identifier: Apache-2.0
"""The real Mooncake over TCP on loopback, with the receiver in a process of its own: Transport's guarantees without
faults."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("mooncake") is None:  # not imported here: its environment must be set first
    pytest.skip("Mooncake is not installed", allow_module_level=True)

from tools.support.fork_server import ForkServers
from unit.kits.watching import until
from unit.transport.mooncake_child import LOOPBACK, MODULE, ReceivingChild, settle, target_of, wire_from
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.wire import MooncakeWire

SIZE = 8 << 20
TASKS = Path("/proc/self/task")


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServers]:
    """Return what forks the children, which imports once for all of them."""
    with ForkServers((MODULE,), tmp_path_factory.mktemp("forks")) as forks:
        yield forks


@pytest.fixture(scope="module")
def receiver(forks: ForkServers) -> Iterator[ReceivingChild]:
    with ReceivingChild(SIZE, forks) as child:
        yield child


@pytest.fixture
def memory() -> np.ndarray:
    return np.ones(SIZE, dtype=np.uint8)


@pytest.fixture
def wire(memory: np.ndarray) -> Iterator[MooncakeWire]:
    opened = wire_from(memory)
    yield opened
    opened.close()


def test_bytes_land_where_they_were_sent(wire: MooncakeWire, receiver: ReceivingChild, memory: np.ndarray) -> None:
    receiver.ask("clear")
    handle = wire.submit(receiver.session, [memory.ctypes.data], [receiver.base + 100], [1000])
    assert settle(wire, handle) is WriteState.LANDED
    assert receiver.sum() == 1000


def test_many_more_descriptors_than_the_window_all_land(
    wire: MooncakeWire, receiver: ReceivingChild, memory: np.ndarray
) -> None:
    receiver.ask("clear")
    n = np.arange(3000) * 512  # every other 256 bytes: nothing to merge
    handle = wire.submit(receiver.session, memory.ctypes.data + n, receiver.base + n, np.full(3000, 256))
    assert settle(wire, handle) is WriteState.LANDED
    assert receiver.sum() == 3000 * 256


def test_submissions_overtake_nothing_and_lose_nothing(
    wire: MooncakeWire, receiver: ReceivingChild, memory: np.ndarray
) -> None:
    receiver.ask("clear")
    handles = []
    for batch in range(20):
        n = batch * 100_000 + np.arange(100) * 1000
        sizes = np.full(100, 500)
        handles.append(wire.submit(receiver.session, memory.ctypes.data + n, receiver.base + n, sizes))
    assert {settle(wire, handle) for handle in handles} == {WriteState.LANDED}
    assert receiver.sum() == 20 * 100 * 500


def test_submit_does_not_wait_for_the_data(wire: MooncakeWire, receiver: ReceivingChild, memory: np.ndarray) -> None:
    warm = wire.submit(receiver.session, [memory.ctypes.data], [receiver.base], [1])
    settle(wire, warm)
    receiver.stop()  # otherwise this process may be suspended until all has landed
    try:
        handle = wire.submit(receiver.session, [memory.ctypes.data], [receiver.base], [SIZE])
        assert wire.poll(handle) is WriteState.PENDING
    finally:
        receiver.wake()
    assert settle(wire, handle) is WriteState.LANDED


def test_waiting_costs_little_cpu(wire: MooncakeWire, receiver: ReceivingChild, memory: np.ndarray) -> None:
    settle(wire, wire.submit(receiver.session, [memory.ctypes.data], [receiver.base], [1]))
    receiver.stop()
    try:
        handle = wire.submit(receiver.session, [memory.ctypes.data], [receiver.base], [SIZE])
        used, begun = time.process_time(), time.monotonic()
        while time.monotonic() - begun < 1.0:
            assert wire.poll(handle) is WriteState.PENDING
            time.sleep(0.0005)
        share = (time.process_time() - used) / (time.monotonic() - begun)
    finally:
        receiver.wake()
    assert settle(wire, handle) is WriteState.LANDED
    print(f"waiting used {share:.1%} of a core")
    assert share < 0.3  # the engine's own blocking call takes 70 % and more


def test_an_empty_submission_lands(wire: MooncakeWire, receiver: ReceivingChild) -> None:
    assert settle(wire, wire.submit(receiver.session, [], [], [])) is WriteState.LANDED


@pytest.mark.parametrize("offset, size", [(-1, 10), (SIZE - 5, 10), (0, 0), (0, -4), (SIZE, 1)])
def test_a_source_outside_the_registered_memory_is_never_read(
    wire: MooncakeWire, receiver: ReceivingChild, memory: np.ndarray, offset: int, size: int
) -> None:
    receiver.ask("clear")
    good, bad = memory.ctypes.data, memory.ctypes.data + offset
    handle = wire.submit(receiver.session, [good, bad], [receiver.base, receiver.base + 50], [20, size])
    assert settle(wire, handle) is WriteState.FAILED
    assert receiver.sum() == 0


def test_a_destination_that_is_not_registered_is_refused_by_the_receiver(
    wire: MooncakeWire, receiver: ReceivingChild, memory: np.ndarray
) -> None:
    handle = wire.submit(receiver.session, [memory.ctypes.data], [receiver.base + SIZE], [4096])
    assert settle(wire, handle) is WriteState.FAILED
    handle = wire.submit(receiver.session, [memory.ctypes.data], [receiver.base], [10])
    assert settle(wire, handle) is WriteState.LANDED, "one refused write must not spoil the next"


def test_a_peer_that_never_existed_fails_at_once(wire: MooncakeWire, memory: np.ndarray) -> None:
    handle = wire.submit(f"{LOOPBACK}:1/none", [memory.ctypes.data], [4096], [10])
    assert settle(wire, handle, limit_s=2.0) is WriteState.UNISSUED, "nothing of it can land"


def test_an_engine_that_only_writes_exposes_no_memory(
    wire: MooncakeWire, receiver: ReceivingChild, memory: np.ndarray
) -> None:
    settle(wire, wire.submit(receiver.session, [memory.ctypes.data], [receiver.base], [10]))
    engine = wire.engines.current
    assert engine is not None and engine.address not in receiver.session


def test_registering_what_is_not_mapped_is_refused(wire: MooncakeWire) -> None:
    with pytest.raises(PdError, match="not mapped") as caught:
        wire.register([(4096, 4096)])
    assert caught.value.code == "PD-WIRE-002"


def test_threads_end_with_wire_and_target(receiver: ReceivingChild, memory: np.ndarray) -> None:
    before = len(list(TASKS.iterdir()))
    names = {thread.name for thread in threading.enumerate()}
    target, opened = target_of(memory), wire_from(memory)
    assert target.session
    settle(opened, opened.submit(receiver.session, [memory.ctypes.data], [receiver.base], [10]))
    for _ in range(2):
        opened.close()
        target.close()
    assert {thread.name for thread in threading.enumerate()} <= names
    until(lambda: len(list(TASKS.iterdir())) <= before)  # the kernel lists a joined thread a little longer
    assert (
        opened.poll(opened.submit(receiver.session, [memory.ctypes.data], [receiver.base], [10])) is WriteState.FAILED
    )


def test_blocking_writes_deliver_too(receiver: ReceivingChild, memory: np.ndarray) -> None:
    """The path for Ascend, over TCP: one blocking call per batch, on threads of the wire's own."""
    receiver.ask("clear")
    attached: list[str] = []
    forced = os.environ.pop("MC_FORCE_TCP", None)
    try:
        opened = wire_from(memory, "ascend", attach_thread=lambda: attached.append(threading.current_thread().name))
        n = np.arange(250) * 1000
        handles = [
            opened.submit(receiver.session, memory.ctypes.data + n, receiver.base + n + k * 250_000, np.full(250, 500))
            for k in range(4)
        ]
        assert {settle(opened, handle) for handle in handles} == {WriteState.LANDED}
        wrong = opened.submit(receiver.session, [memory.ctypes.data], [receiver.base + SIZE], [4096])
        assert settle(opened, wrong) is WriteState.FAILED
        opened.close()
    finally:
        if forced is not None:
            os.environ["MC_FORCE_TCP"] = forced
    assert receiver.sum() == 4 * 250 * 500
    assert attached and all(name.startswith("pd-wire-") for name in attached)
