# SPDX-License-Identifier: Apache-2.0
"""Opening a transfer engine whose port another process has taken.

Found by the fault matrix: two ranks of a prefill engine opened theirs in the same moment, one raised, and its writer
thread ended for good.
"""

from __future__ import annotations

import importlib.util
import time

import numpy as np
import pytest

from unit.kits.watching import listening
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.engine import OPENINGS, OpenEngine
from vllm_ascend_pd.transport.flights import Flights
from vllm_ascend_pd.transport.tcp import PolledEngines


def losing(times: int) -> type:
    """An engine that raises like Mooncake's, so many times."""

    class PortLosingEngine:
        made = 0

        def __init__(self) -> None:
            type(self).made += 1
            self.number = type(self).made

        def initialize(self, *_: str) -> int:
            if self.number <= times:
                raise RuntimeError("bind: Address already in use")
            return 0

        def get_rpc_port(self) -> int:
            return 1

    return PortLosingEngine


def test_an_engine_is_opened_without_waiting_for_an_answer_of_itself() -> None:
    """It cannot answer while this process has no descriptor for the connection: Mooncake would wait for a minute."""
    with listening() as listener:

        class SilentEngine(losing(0)):  # type: ignore[misc]
            probed = False

            def get_rpc_port(self) -> int:
                return int(listener.getsockname()[1])

            def send_probe(self, _: str) -> int:
                type(self).probed = True
                return 0

        engine = OpenEngine(SilentEngine, "127.0.0.1", "tcp")
        assert not SilentEngine.probed
        engine.close()


def test_a_lost_port_costs_another_opening() -> None:
    kind = losing(2)
    engine = OpenEngine(kind, "127.0.0.1", "tcp")
    assert kind.made == 3 and not engine.closed
    engine.close()


def test_a_writing_engine_whose_registration_failed_is_not_used() -> None:
    refusals = [-1]

    class RegisteringEngine(losing(0)):  # type: ignore[misc]
        def batch_register_memory(self, *_: object) -> int:
            return refusals.pop() if refusals else 0

    flights = Flights(10, 5.0, time.monotonic)
    engines = PolledEngines(
        lambda: OpenEngine(RegisteringEngine, "127.0.0.1", "rdma"), flights, registers=True, clock=time.monotonic
    )
    memory = np.ones(64, dtype=np.uint8)
    engines.register([(memory.ctypes.data, 64)])
    with pytest.raises(PdError, match="PD-WIRE-002"):
        engines.need()
    assert engines.current is None and engines.need() is engines.current
    assert RegisteringEngine.made == 2
    engines.close(probed=True)


def test_a_host_without_threads_is_an_error_with_a_code() -> None:
    class Threadless(losing(0)):  # type: ignore[misc]
        def __init__(self) -> None:
            raise RuntimeError("Resource temporarily unavailable")

    with pytest.raises(PdError, match=r"PD-WIRE-001.*Resource temporarily unavailable"):
        OpenEngine(Threadless, "127.0.0.1", "tcp")


def test_a_host_without_ports_is_an_error_with_a_code() -> None:
    kind = losing(OPENINGS)
    with pytest.raises(PdError, match=r"PD-WIRE-001.*Address already in use"):
        OpenEngine(kind, "127.0.0.1", "tcp")
    assert kind.made == OPENINGS


@pytest.mark.parametrize(("returned", "kept"), [(0, None), (-1, None), (2**32 - 1, None), (2**64 - 1, None), (1, 1)])
def test_a_refused_write_has_no_id_whatever_integer_the_engine_returns(returned: int, kept: int | None) -> None:
    class AnsweringEngine(losing(0)):  # type: ignore[misc]
        def transfer_submit_write(self, *_: object) -> int:
            return returned

    engine = OpenEngine(AnsweringEngine, "127.0.0.1", "tcp")
    assert engine.submit("a", 1, 2, 3) == kept
    engine.close()


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="Mooncake is not installed")
def test_a_writer_that_cannot_be_opened_fails_the_write_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from unit.transport.mooncake_child import settle, target_of, wire_from

    source, target = np.ones(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    receiving, sending = target_of(target), wire_from(source)
    engines = sending.engines

    def write() -> WriteState:
        pieces = [source.ctypes.data], [target.ctypes.data], [64]
        return settle(sending, sending.submit(receiving.session, *pieces))

    try:
        engines.probe(receiving.session.partition("/")[0])  # the engine for probes is already open
        with monkeypatch.context() as patch:
            opens = OpenEngine.__init__
            patch.setattr(OpenEngine, "__init__", lambda engine, _, *link: opens(engine, losing(99), *link))
            assert write() is WriteState.UNISSUED
        assert write() is WriteState.LANDED
        assert target.all()
    finally:
        sending.close()
        receiving.close()


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="Mooncake is not installed")
def test_a_closed_wire_opens_no_engine() -> None:
    from unit.transport.mooncake_child import wire_from

    sending = wire_from(np.ones(64, dtype=np.uint8))
    sending.close()
    with pytest.raises(PdError, match=r"PD-WIRE-001.*the transport is closed"):
        sending.engines.need()
