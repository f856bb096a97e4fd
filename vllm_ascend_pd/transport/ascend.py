# SPDX-License-Identifier: Apache-2.0
"""The engine that writes over Ascend's links.

A process has only one such engine. Peers write to it, and it reads only registered memory, so the wire uses the
target's engine; a revocation replaces it while the wire is in use. One call carries a whole batch. Only the blocking
form of that call has been proven there: see blocking_writes.py.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence

from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.blocking_writes import BlockingWrites
from vllm_ascend_pd.transport.engine import OpenEngine
from vllm_ascend_pd.transport.mooncake_sockets import shut_connections
from vllm_ascend_pd.transport.peer_probes import AGAIN_S
from vllm_ascend_pd.transport.spans import SpanArrays
from vllm_ascend_pd.transport.target import MooncakeTarget

log = logging.getLogger(__name__)

LEAVE_S = 5.0


class AscendEngine:
    def __init__(self, target: MooncakeTarget, writes: BlockingWrites) -> None:
        self._target, self._writes = target, writes
        self._probed: list[str] = []  # addresses that threads of the probes are probing
        self._shut = False  # no probe may begin
        self._changed = threading.Condition()
        target.share(self._exclusive)

    @property
    def current(self) -> OpenEngine | None:
        return self._target.opened

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        self._target.register(regions)

    def need(self) -> OpenEngine:
        return self._target.engine()

    def replace(self, why: str) -> None:
        """Do nothing: only a revocation replaces this engine."""

    def probe(self, address: str) -> bool:
        with self._changed:
            if self._shut:
                return False
            self._probed.append(address)
        try:
            return self._target.engine().answers(address)
        finally:
            with self._changed:
                self._probed.remove(address)
                self._changed.notify_all()

    def submit(
        self, engine: OpenEngine, address: str, spans: SpanArrays, issue_by: float, first_s: float | None
    ) -> int:
        return self._writes.submit(engine, address, *spans, issue_by=issue_by, first_s=first_s)

    def poll(self, handle: int) -> WriteState:
        return self._writes.poll(handle)

    def alive(self, handle: int) -> bool:
        return self._writes.alive(handle)

    def in_first_contact(self) -> bool:
        return self._writes.in_first_contact()

    def run_due(self) -> None:
        """Do nothing: only a revocation opens and closes engines."""

    def close(self, *, probed: bool) -> None:
        self._writes.close()
        try:
            self._target.close()
        except LocalProtocolError as error:  # the engine ends with the process
            log.error("shutting down: %s", error)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep this package's threads out of the engine. Writes that still wait for it fail without being issued."""
        with self._changed:
            self._shut = True
            end = time.monotonic() + LEAVE_S
            while self._probed and time.monotonic() < end:
                for address in self._probed:
                    shut_connections(address)
                self._changed.wait(AGAIN_S)
        try:
            with self._writes.exclusive():
                yield
        finally:
            with self._changed:
                self._shut = False
