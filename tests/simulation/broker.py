# SPDX-License-Identifier: Apache-2.0
"""The metaserver and the HTTP calls around it: chosen by the production rule; answers are lost, late, or errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.world import Process
from vllm_ascend_pd.metaserver.decisions import Candidate, choose
from vllm_ascend_pd.protocol.auth import Secrets, seal, unseal
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.messages import Reservation

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.decode import DecodeEngine, Request
    from simulation.prefill_engine import PrefillEngine

READ_TIMEOUT_S = 6.0  # three heartbeats
SECRETS = Secrets(b"the secret of the simulated cluster", b"the secret that it had a while before")


@dataclass(slots=True, eq=False)
class Call:
    """One POST of a D engine, open until its outcome."""

    decode: DecodeEngine
    incarnation: str
    request: Request
    reservation: Reservation
    sealed: bytes
    prefill: PrefillEngine | None = None
    prefill_incarnation: str = ""
    mute: bool = False  # the answer will be lost
    tried: int = 0


class Broker:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.process = Process(cluster.world, "M")
        self.calls: dict[TransferId, Call] = {}

    def reserve(self, decode: DecodeEngine, request: Request, reservation: Reservation) -> None:
        """D's client posts. Exactly one outcome comes back, unless it hangs up."""
        world = self.cluster.world
        call = Call(decode, decode.incarnation, request, reservation, seal(reservation, SECRETS))
        self.calls[reservation.transfer] = call
        delay = world.rng.uniform(0.0005, 0.005)
        if world.chance(self.cluster.settings.faults.http):
            kind = world.rng.choice(("5xx", "late", "answer lost", "repeated"))
            world.fault(f"http {kind}")
            if kind == "5xx":
                world.after(delay, self._outcome, reservation.transfer, "500")
                return
            call.mute = kind == "answer lost"
            delay += {"late": world.rng.uniform(0.5, 8.0), "repeated": 0.3}.get(kind, 0.0)
        world.after(delay, self._dispatch, reservation.transfer)

    def hung_up(self, transfer: TransferId) -> None:
        """D has closed its connection: it has what it wanted, or wants it no more, or is dead."""
        call = self.calls.pop(transfer, None)
        if call is not None:
            self._cancel_leg(call)

    def kill(self) -> None:
        """All its calls break, in both directions."""
        self.process.kill()
        self.process = Process(self.cluster.world, "M")
        for transfer in list(self.calls):
            self.cluster.world.after(
                self.cluster.world.rng.uniform(0.001, 0.1), self._outcome, transfer, "connection lost"
            )

    def prefill_ended(self, engine: PrefillEngine, transfer: TransferId, kind: str) -> None:
        """P has answered its request."""
        self.cluster.world.after(self.cluster.world.rng.uniform(0.0005, 0.01), self._leg_ended, engine, transfer, kind)

    def prefill_died(self, engine: PrefillEngine) -> None:
        for transfer, call in list(self.calls.items()):
            if call.prefill is engine:
                delay = self.cluster.world.rng.uniform(0.001, 0.3)
                self.cluster.world.after(delay, self._leg_ended, engine, transfer, "prefill died")

    def _dispatch(self, transfer: TransferId) -> None:
        """Choose a P by load and send it the request."""
        call = self.calls.get(transfer)
        if call is None:
            return
        world = self.cluster.world
        candidates = [Candidate(str(e.index), float(e.load())) for e in self.cluster.prefill if e.alive]
        chosen = choose(candidates, float(call.request.tokens), world.rng.random())
        call.tried += 1
        if chosen is None:
            self._outcome(transfer, "no prefill")
            return
        call.prefill = engine = self.cluster.prefill[int(chosen)]
        call.prefill_incarnation = engine.scheduler.incarnation
        reservation = unseal(call.sealed, SECRETS)
        engine.scheduler.post(world.rng.uniform(0.0005, 0.01), engine.accept, reservation, call.request.content)
        if call.mute:
            world.after(READ_TIMEOUT_S, self._outcome, transfer, "read timeout")
        if world.chance(self.cluster.settings.faults.double_dispatch) and call.tried < 2:
            world.fault("dispatched twice")
            world.after(world.rng.choice((0.0, 0.01, 2.0)), self._dispatch, transfer)

    def _leg_ended(self, engine: PrefillEngine, transfer: TransferId, kind: str) -> None:
        call = self.calls.get(transfer)
        if call is None or call.prefill is not engine or call.mute:
            return
        if kind == "prefill died" and call.tried < 2 and self.cluster.world.rng.random() < 0.5:
            self._dispatch(transfer)  # another P, within the same POST
        else:
            self._outcome(transfer, kind)

    def _outcome(self, transfer: TransferId, kind: str) -> None:
        call = self.calls.pop(transfer, None)
        if call is None:
            return
        if kind != "prefilled":
            self._cancel_leg(call)
        if call.decode.incarnation == call.incarnation:
            delay = self.cluster.world.rng.uniform(0.0005, 0.01)
            call.decode.scheduler.post(delay, call.decode.outcome, transfer, kind)

    def _cancel_leg(self, call: Call) -> None:
        engine = call.prefill
        if engine is not None and engine.scheduler.incarnation == call.prefill_incarnation:
            delay = self.cluster.world.rng.choice((0.001, 0.05, 2.0))
            engine.scheduler.post(delay, engine.abort, call.reservation.transfer)
