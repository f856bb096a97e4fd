# SPDX-License-Identifier: Apache-2.0
"""Engines that write over TCP or RDMA: polled, apart from the target's, and replaced if they keep failed writes.

A failed write goes on: its bytes still land. FAILED is reported only when the engine has ended the write. An engine
that does not end it (the peer is stopped) is closed, and another one takes its place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from vllm_ascend_pd.errors import LocalProtocolError, PdError
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.engine import OpenEngine
from vllm_ascend_pd.transport.flights import Flights
from vllm_ascend_pd.transport.maps import check_mapped
from vllm_ascend_pd.transport.spans import SpanArrays

log = logging.getLogger(__name__)

TEND_S = 0.1


class PolledEngines:
    def __init__(
        self, open_engine: Callable[[], OpenEngine], flights: Flights, *, registers: bool, clock: Callable[[], float]
    ) -> None:
        """`registers`: register memory with the engine. Links other than TCP read only registered memory."""
        self._open_engine, self._flights, self._registers, self._clock = open_engine, flights, registers, clock
        self._regions: list[tuple[int, int]] = []
        self._engine: OpenEngine | None = None
        self._retired: list[OpenEngine] = []
        self._scout: OpenEngine | None = (
            None  # makes the probes, so that the engine that writes can be closed at any time
        )
        self._scout_lock = threading.Lock()
        self._tended = 0.0
        self._closed = False

    @property
    def current(self) -> OpenEngine | None:
        return self._engine

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        check_mapped(regions)
        self._regions += regions

    def need(self) -> OpenEngine:
        if self._closed:
            raise PdError("PD-WIRE-001", why="the transport is closed")
        if self._engine is None:
            engine = self._open_engine()
            if self._registers:
                engine.register(self._regions)
            self._engine = engine
        return self._engine

    def replace(self, why: str) -> None:
        if self._engine is None:
            return
        log.warning("the transfer engine that writes is replaced: %s", why)
        self._retired.append(self._engine)
        self._engine = None

    def probe(self, address: str) -> bool:
        with self._scout_lock:
            if self._closed:
                return False
            if self._scout is None:
                self._scout = self._open_engine()
            scout = self._scout
        return scout.answers(address)

    def submit(
        self, engine: OpenEngine, address: str, spans: SpanArrays, issue_by: float, first_s: float | None
    ) -> int:
        return self._flights.submit(engine, address, *spans, first_s=first_s)

    def poll(self, handle: int) -> WriteState:
        return self._flights.poll(handle)

    def alive(self, handle: int) -> bool:
        return self._flights.alive(handle)

    def in_first_contact(self) -> bool:
        """Return False: first contact is over when `submit` returns."""
        return False

    def run_due(self) -> None:
        now = self._clock()
        if now - self._tended < TEND_S:
            return
        self._tended = now
        if self._engine is not None and self._engine in self._flights.stuck():
            self.replace("it holds on to writes that have failed")
        for engine in [engine for engine in self._retired if not self._flights.busy(engine)]:
            self._retired.remove(engine)
            self._flights.drop(engine)
            engine.close()

    def close(self, *, probed: bool) -> None:
        """`probed`: no thread is in a probe any more. Else the probing engine stays open until the process ends."""
        with self._scout_lock:
            self._closed = True
            scout, self._scout = self._scout, None
        writing, self._retired, self._engine = [*self._retired, self._engine], [], None
        for engine in writing:
            if engine is not None:
                self._flights.drop(engine)
                _close(engine)
        if scout is not None and probed:
            _close(scout)


def _close(engine: OpenEngine) -> None:
    try:
        engine.close()
    except LocalProtocolError as error:  # the engine ends with the process
        log.error("shutting down: %s", error)
