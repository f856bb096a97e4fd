# SPDX-License-Identifier: Apache-2.0
"""Writes between memories: they land late, partly, over a time, after an error, after their writer's death or stop.

A write into a dead session does not land.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from simulation.exchange import STAGING
from simulation.memory import BASE
from simulation.world import Violation, World
from vllm_ascend_pd.transport.base import WriteState

if TYPE_CHECKING:
    from simulation.decode import DecodeRank
    from simulation.prefill import PrefillRank
    from simulation.settings import Faults
    from vllm_ascend_pd.prefill.worker.core.batches import Triples
    from vllm_ascend_pd.protocol.identity import Endpoint
    from vllm_ascend_pd.protocol.push import Claim

UNHURRIED_S = 0.5  # longest time in which a process that was stopped reads what waited for it


class Flight:
    """One batch in flight. It reads its source when it lands."""

    __slots__ = (
        "begun",
        "claims",
        "landed",
        "lost",
        "outcome",
        "peer",
        "session",
        "source",
        "submitted",
        "target",
        "writes",
    )

    def __init__(self, source: PrefillRank, target: DecodeRank, peer: Endpoint, session: str) -> None:
        self.source = source
        self.target = target
        self.peer = peer
        self.session = session
        self.claims: list[Claim] = []
        self.writes: list[tuple[str, int, Triples]] = []  # push, serial of the transfer, spans
        self.submitted = source.process.ran_s()
        self.begun = False  # the first of its spans have landed
        self.landed = False
        self.outcome = WriteState.PENDING
        self.lost: bytes | None = None  # contents of its staging slots when its source gave it up

    def staged(self) -> bytes:
        """Return the present contents of its staging slots."""
        memory, base = self.source.readable(True)
        slots = [spans for _, _, spans in self.writes if int(spans.src[0]) >= STAGING]
        return b"".join(
            memory[at : at + size].tobytes()
            for spans in slots
            for at, size in zip((spans.src - base).tolist(), spans.size.tolist(), strict=True)
        )


class SimulatedWire:
    """The data path of the whole cluster."""

    def __init__(
        self,
        world: World,
        faults: Faults,
        timeout_s: float,
        quiet_s: float,
        margin_s: float,
        stop: Callable[[PrefillRank], None],
    ) -> None:
        self._world = world
        self._stop = stop
        self._timeout_s = timeout_s
        # T is the transport's timeout and the tail after it: nothing of a write lands later than that after its
        # submission, counted while both sides run. Its writer's death adds nothing: an early one leaves only the tail.
        # M covers stops.
        self._physical_s = quiet_s - margin_s
        self._error = faults.write_error
        self._slow = faults.write_slow
        self._stopped = faults.write_stop
        self._spread, self._dice = faults.write_spread, world.dice("spread")
        self.spoiled: set[int] = set()  # transfers that received bytes of others from a reused slot

    def fly(self, flight: Flight) -> None:
        """Submit. The source gets the outcome by `returned(flight, ok)`."""
        world, rng = self._world, self._world.rng
        flight.source.flights[flight] = None
        duration = rng.expovariate(1 / 0.003)
        if world.chance(self._slow):
            world.fault("write slow")
            duration = rng.uniform(0, self._timeout_s * 1.2)
        if world.chance(self._stopped):
            world.after(duration * rng.random(), self._stop_inside, flight)
        if self._spread and self._dice.random() < self._spread:
            flight.source.process.post(min(duration, self._timeout_s) * self._dice.random(), self._begin, flight)
        if flight.session != flight.target.session or not flight.target.process.alive:
            flight.landed = True  # no destination exists
            flight.source.process.post(rng.uniform(0.0001, 0.5), self._back, flight, False)
        elif world.chance(self._error):
            self._fail(flight, min(duration, self._timeout_s))
        elif duration >= self._timeout_s:
            self._fail(flight, self._timeout_s)
        else:
            flight.source.process.post(duration, self._arrive, flight, world.now)

    def _begin(self, flight: Flight) -> None:
        """Land the first spans, long before the last."""
        target = flight.target
        if (
            not flight.landed
            and flight.session == target.session
            and target.process.alive
            and not target.process.paused
        ):
            self._world.fault("write landed over a time")
            self._copy(flight, True)
            flight.begun = True

    def _stop_inside(self, flight: Flight) -> None:
        if not flight.landed and flight.source.process.alive and not flight.source.process.paused:
            self._world.fault("writer stopped inside a write")
            self._stop(flight.source)

    def _arrive(self, flight: Flight, submitted: float) -> None:
        """Send the last byte, in the source's process."""
        target = flight.target.process
        if target.paused:
            # The source gives up at its timeout; the bytes wait in the target's buffers.
            self._world.fault("write to a stopped decode")
            left = max(0.0, submitted + self._timeout_s - self._world.now)
            flight.source.process.post(left, self._back, flight, False)
            self._reach(flight, False)
            return
        self.land(flight)
        ok = flight.session == flight.target.session and target.alive
        flight.source.process.post(self._world.rng.uniform(0.00005, 0.002), self._back, flight, ok)

    def _reach(self, flight: Flight, partly: bool) -> None:
        """Deliver the bytes to the target's machine. A stopped process reads them some time after it continues."""
        target = flight.target.process
        if target.paused:
            target.post(0.0, self._read_late, flight, partly)
        else:
            target.run(self.land, flight, partly)

    def _fail(self, flight: Flight, after: float) -> None:
        """Report -1 after `after`; the bytes land then, or partly, or never."""
        world, rng = self._world, self._world.rng
        flight.source.process.post(after, self._back, flight, False)
        kind = rng.choice(("lands later", "lands partly", "never lands"))
        world.fault(f"write failed, {kind}")
        if kind == "never lands":
            flight.landed = True
            return
        last = max(after, self._physical_s)
        when = rng.choice((rng.uniform(after, last), after + 0.001, last))
        flight.source.process.post(when, self._reach, flight, kind == "lands partly")

    def _read_late(self, flight: Flight, partly: bool) -> None:
        flight.target.process.post(self._world.rng.uniform(0, UNHURRIED_S), self.land, flight, partly)

    def source_died(self, source: PrefillRank) -> None:
        """Let the dead writer's bytes in flight arrive within their remaining time, or not at all."""
        rng = self._world.rng
        for flight in source.flights:
            if not flight.landed and rng.random() < 0.5:
                self._world.fault("write lands after its writer's death")
                left = max(0.001, flight.submitted + self._physical_s - source.process.ran_s())
                after = rng.choice((0.001, rng.uniform(0, left), left))
                self._world.after(after, self._reach, flight, rng.random() < 0.3)
        source.flights.clear()

    def land(self, flight: Flight, partly: bool = False) -> None:
        """Write the bytes into the target's memory, unless its session has ended."""
        target = flight.target
        flight.source.flights.pop(flight, None)
        if flight.landed or flight.session != target.session:
            return
        flight.landed = True
        if flight.lost is not None and flight.lost != flight.staged():
            self._world.fault("failed write read its slot's next bytes")
            self.spoiled |= {serial for _, serial, _ in flight.writes}
        self._world.log(target.process.name, "LANDED", f"from {flight.source.process.name} partly={partly}")
        self._copy(flight, partly)
        self._world.stats["writes landed"] += 1

    def _copy(self, flight: Flight, partly: bool) -> None:
        """Copy the spans that have not landed yet; `partly`: the first half of all."""
        for _, serial, spans in flight.writes:
            half = max(1, len(spans.src) // 2)
            some = slice(half if flight.begun else 0, half if partly else None)
            src, dst, size = spans.src[some], spans.dst[some] - BASE, spans.size[some]
            if not len(src):
                continue
            self._check(flight, serial, dst, size)
            read, base = flight.source.readable(int(src[0]) >= STAGING)
            src, write = src - base, flight.target.memory.bytes
            for a, b, n in zip(src.tolist(), dst.tolist(), size.tolist(), strict=True):
                write[b : b + n] = read[a : a + n]

    def _check(self, flight: Flight, serial: int, dst: np.ndarray, size: np.ndarray) -> None:
        """Check promise 1: a write lands only in blocks reserved for its transfer on this rank at this moment."""
        memory, owner = flight.target.memory, flight.target.owner
        first, last = memory.block_of(dst), memory.block_of(dst + size - 1)
        for b in range(int((last - first).max()) + 1):
            wrong = owner[np.minimum(first + b, last)] != serial
            if wrong.any():
                block = int(np.minimum(first + b, last)[int(wrong.argmax())])
                raise Violation(
                    f"promise 1: a write of transfer {serial} by {flight.source.process.name} landed in block {block} of "
                    f"{flight.target.process.name}, which is reserved for {int(owner[block]) or 'no transfer'}"
                )

    def _back(self, flight: Flight, ok: bool) -> None:
        """Report the outcome to the transport, in the source's process."""
        if flight.outcome is WriteState.PENDING:
            if flight.landed:
                flight.source.flights.pop(flight, None)
            elif not ok:
                flight.lost = flight.staged()
            flight.source.returned(flight, WriteState.LANDED if ok else WriteState.FAILED)
