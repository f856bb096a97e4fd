# SPDX-License-Identifier: Apache-2.0
"""A worker's line to its supervisor: its reports go up, the others' reports and the admin API's operations come down.

An operation goes up first and is applied when it comes down, so that all workers apply all operations in one order.
A single worker has no line and applies an operation at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from vllm_ascend_pd.router import admin
from vllm_ascend_pd.router.core.decisions import PairProof, ProcessHistory
from vllm_ascend_pd.router.faults import known
from vllm_ascend_pd.router.instances_file import Members
from vllm_ascend_pd.router.intake import NotTaken

log = logging.getLogger(__name__)
CANARY_WORKER = 0  # one worker's canaries prove pairs; all workers share the proofs
REPORT_EVERY_S = 0.25
MAX_LINE_BYTES = 16 << 20
_ECHO_S = 5.0
_WATCH_S = 5.0


class Hub:
    def __init__(self, worker: int, line: socket.socket | None = None) -> None:
        self.worker = worker
        self._line = line
        self._others: dict[int, dict[str, Any]] = {}
        self._echoes: dict[str, asyncio.Future[None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._watched_until = 0.0

    def attach(self, fleet: Members, report: Callable[[bool], dict[str, Any]]) -> None:
        """Connect the hub to its worker. `report(details)` returns the worker's own report."""
        self._fleet, self._report = fleet, report

    def others(self) -> list[dict[str, Any]]:
        """Return the others' last reports, and ask the others to report details for a while."""
        self._write({"watch": True})
        return list(self._others.values())

    async def perform(self, operation: admin.Operation) -> None:
        """Apply an operation in all workers; return when this one has applied it."""
        if self._writer is None:
            admin.apply(self._fleet, operation)
            return
        mark = uuid.uuid4().hex
        echo = self._echoes[mark] = asyncio.get_running_loop().create_future()
        self._write({"operation": {**operation, "mark": mark}})
        try:
            await asyncio.wait_for(echo, _ECHO_S)
        except asyncio.TimeoutError as problem:
            raise NotTaken(known(503, "PD-META-021")) from problem
        finally:
            del self._echoes[mark]

    async def run(self) -> None:
        if self._line is None:
            return
        reader, self._writer = await asyncio.open_connection(sock=self._line, limit=MAX_LINE_BYTES)
        reporting = asyncio.create_task(self._report_up(), name="worker reports")
        try:
            with contextlib.suppress(ConnectionError):  # a supervisor killed with unread data: a reset, no end of file
                while line := await reader.readline():
                    self._receive(msgspec.json.decode(line))
            log.error("the supervisor is gone: this worker ends")
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            reporting.cancel()
            self._writer.close()

    async def _report_up(self) -> None:
        while self._writer is not None:
            self._write({"report": self._report(time.monotonic() < self._watched_until)})
            with contextlib.suppress(ConnectionError):  # `run` sees the end of the line and acts on it
                await self._writer.drain()
            await asyncio.sleep(REPORT_EVERY_S)

    def _write(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(msgspec.json.encode({"worker": self.worker, **message}) + b"\n")

    def _receive(self, message: dict[str, Any]) -> None:
        if "operation" in message:
            operation = message["operation"]
            try:
                admin.apply(self._fleet, operation)
            except ValueError as problem:  # meanwhile the instances file has it in the other role
                log.error("an operation of the admin API is not applied: %s", problem)
            echo = self._echoes.get(operation.get("mark", ""))
            if echo is not None and not echo.done():
                echo.set_result(None)
        elif "watch" in message:
            self._watched_until = time.monotonic() + _WATCH_S
        elif "gone" in message:
            self._others.pop(message["gone"], None)
            self._count()
        elif message["worker"] != self.worker:
            report = self._others[message["worker"]] = message["report"]
            self._count()
            histories = {name: ProcessHistory.of(*words) for name, words in report["histories"].items()}
            self._fleet.merge(histories, (PairProof(*proof) for proof in report["proofs"]))

    def _count(self) -> None:
        """Take in the others' load."""
        load: dict[str, float] = {}
        for report in self._others.values():
            for facts in report["instances"]:
                load[facts["name"]] = load.get(facts["name"], 0.0) + facts["tokens_in_flight"]
        for instance in self._fleet:
            instance.load_elsewhere = load.get(instance.name, 0.0)
