# SPDX-License-Identifier: Apache-2.0
"""Simulated metaserver and the HTTP calls around it: any P is chosen, answers are lost, late, or errors.

The package decides when a POST may be repeated and a leg tried again; its choice and judgement of P's are simulated in
front/.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from simulation.settings import VOCABULARY, FirstFaults
from simulation.world import Process
from vllm_ascend_pd.protocol.auth import Secrets, seal, unseal
from vllm_ascend_pd.protocol.first import FirstToken
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.messages import Reservation
from vllm_ascend_pd.router.core.decisions import RetryBudget, RetryPolicy
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.core.failures import HttpFailure, post_again

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster
    from simulation.decode import DecodeEngine, DecodeRequest
    from simulation.prefill_engine import PrefillEngine

URL = "http://metaserver:8000"
READ_TIMEOUT_S = 6.0  # three heartbeats
RETRIES_TIMEOUT_S = 10.0  # of D's client with a metaserver that refuses
BACKOFF = Backoff(first_s=0.1, longest_s=2.0)
SECRETS = Secrets(b"the secret of the simulated cluster", b"the secret that it had a while before")
OLDER = Secrets(b"the secret that it had a while before")  # of a D that has not been restarted since


@dataclass(slots=True, eq=False)
class OpenPost:
    """One POST of a D engine, open until its outcome."""

    decode: DecodeEngine
    incarnation: str
    request: DecodeRequest
    reservation: Reservation
    sealed: bytes
    started: float
    posts: int = 0
    prefill: PrefillEngine | None = None
    prefill_incarnation: str = ""
    mute: bool = False  # the answer will be lost
    tried: int = 0  # number of prefill legs
    bad: set[int] = field(default_factory=set)  # P's that failed this call


class Broker:
    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.process = Process(cluster.world, "M")
        self.calls: dict[TransferId, OpenPost] = {}
        self.retry = RetryPolicy()
        self.budget = RetryBudget()
        self._dice = cluster.world.dice("first tokens")
        self._last: FirstToken | None = None  # the last first token that passed here
        self._forgotten = -1.0  # earlier requests are forgotten

    # -- D's client

    def reserve(self, decode: DecodeEngine, request: DecodeRequest, reservation: Reservation) -> None:
        """Post a reservation as D's client. Exactly one outcome is returned, unless it hangs up."""
        world = self.cluster.world
        sealed = seal(reservation, world.rng.choice((SECRETS, OLDER)))
        call = OpenPost(decode, decode.incarnation, request, reservation, sealed, world.now)
        self.calls[reservation.transfer] = call
        self._post(reservation.transfer)

    def _post(self, transfer: TransferId) -> None:
        call = self.calls.get(transfer)
        if call is None:
            return
        world = self.cluster.world
        call.posts += 1
        delay = world.rng.uniform(0.0005, 0.005)
        kind = ""
        if world.chance(self.cluster.settings.faults.http):
            kind = world.rng.choice(("no connection", "4xx", "5xx", "503", "late", "answer lost"))
            world.fault(f"http {kind}")
        if kind in _FAILURES:
            world.after(delay, self._failed, transfer, _FAILURES[kind], kind)
            return
        call.mute = kind == "answer lost"
        world.after(delay + (world.rng.uniform(0.5, 8.0) if kind == "late" else 0.0), self._posted, transfer)

    def _posted(self, transfer: TransferId) -> None:
        """Handle the POST's arrival."""
        call = self.calls.get(transfer)
        if call is None:
            return
        if not self.process.alive:
            self.cluster.world.fault("http no metaserver")
            self._failed(transfer, HttpFailure.CONNECT, "no metaserver")
        elif call.request.arrived < self._forgotten:
            self.cluster.world.fault("http unknown ticket")
            self._failed(transfer, HttpFailure.SERVER, "404")
        else:
            self._dispatch(transfer)

    def _failed(self, transfer: TransferId, failure: HttpFailure, why: str) -> None:
        call = self.calls.get(transfer)
        if call is None:
            return
        world = self.cluster.world
        left = RETRIES_TIMEOUT_S - (world.now - call.started)
        retry_after = world.rng.choice((None, 0.5, 30.0)) if failure is HttpFailure.REFUSED else None
        delay = post_again(failure, call.posts, left, retry_after, world.rng.random(), BACKOFF)
        if delay is None:
            self._outcome(transfer, why)
        else:
            world.stats["POSTs repeated"] += 1
            world.after(delay, self._post, transfer)

    def hung_up(self, transfer: TransferId) -> None:
        """Handle the end of D's connection: D has its result, has no more use for it, or is dead."""
        call = self.calls.pop(transfer, None)
        if call is not None:
            self._cancel_leg(call)

    def decode_died(self, engine: DecodeEngine) -> None:
        """Close all connections of the engine."""
        for transfer in [t for t, call in self.calls.items() if call.decode is engine]:
            self.hung_up(transfer)

    # -- the metaserver

    def kill(self) -> None:
        """Break all calls in both directions, and lose all state."""
        world = self.cluster.world
        if not self.process.alive:
            return
        self.process.kill()
        for transfer in list(self.calls):
            world.after(world.rng.uniform(0.001, 0.1), self._outcome, transfer, "connection lost")
        for engine in self.cluster.decode:
            for request in list(engine.loading.values()) if engine.alive else ():
                if world.rng.random() < 0.5:  # its client's connection ran through the metaserver
                    engine.scheduler.post(world.rng.uniform(0.001, 0.1), engine.leave, request)
        world.after(world.rng.choice((0.01, 1.0, 20.0)), self._boot)

    def _boot(self) -> None:
        self.process = Process(self.cluster.world, "M")
        self._forgotten = self.cluster.world.now

    def prefill_ended(
        self, engine: PrefillEngine, transfer: TransferId, kind: str, first: FirstToken | None = None
    ) -> None:
        """Handle P's answer."""
        world = self.cluster.world
        if world.chance(self.cluster.settings.faults.http):
            world.fault("http prefill's answer lost")
            kind = "prefill broke"
        world.after(world.rng.uniform(0.0005, 0.01), self._leg_ended, engine, transfer, kind, first)

    def prefill_died(self, engine: PrefillEngine) -> None:
        for transfer, call in list(self.calls.items()):
            if call.prefill is engine:
                delay = self.cluster.world.rng.uniform(0.001, 0.3)
                self.cluster.world.after(delay, self._leg_ended, engine, transfer, "prefill died")

    def _dispatch(self, transfer: TransferId) -> None:
        """Send the request to a P that has not failed it; one time in ten a dead P may be chosen."""
        call = self.calls.get(transfer)
        if call is None or not self.process.alive:
            return
        world = self.cluster.world
        others = [engine for engine in self.cluster.prefill if engine.index not in call.bad] or self.cluster.prefill
        living = [engine for engine in others if engine.alive]
        engine = world.rng.choice(living if living and world.rng.random() < 0.9 else others)
        call.tried += 1
        call.prefill, call.prefill_incarnation = engine, engine.scheduler.incarnation
        if not engine.alive or world.chance(self.cluster.settings.faults.http / 2):
            failure = HttpFailure.REFUSED if engine.alive else HttpFailure.CONNECT
            world.fault("http prefill refuses" if engine.alive else "http prefill unreachable")
            self._try_another(call, engine, failure)
            return
        reservation = unseal(call.sealed, SECRETS)
        engine.scheduler.post(world.rng.uniform(0.0005, 0.01), engine.accept, reservation, call.request.content)
        if call.mute:
            world.after(READ_TIMEOUT_S, self._outcome, transfer, "read timeout")
        if world.chance(self.cluster.settings.faults.double_dispatch) and call.tried < 2:
            world.fault("dispatched twice")  # by another router
            world.after(world.rng.choice((0.0, 0.01, 2.0)), self._dispatch, transfer)

    def _try_another(self, call: OpenPost, engine: PrefillEngine, failure: HttpFailure) -> None:
        world, transfer = self.cluster.world, call.reservation.transfer
        call.bad.add(engine.index)
        delay = self.retry.retry_delay(failure, call.tried, False, self.budget, world.rng.random())
        if delay is not None:
            world.after(delay, self._dispatch, transfer)
        else:
            self._outcome(transfer, "no prefill")

    def _leg_ended(
        self, engine: PrefillEngine, transfer: TransferId, kind: str, first: FirstToken | None = None
    ) -> None:
        call = self.calls.get(transfer)
        if call is None or call.prefill is not engine or call.mute:
            return
        if kind == "prefill died" and call.tried < 2 and self.cluster.settings.faults.double_dispatch:
            self.cluster.world.fault("dispatched again after a death")  # by another router
            self._dispatch(transfer)
        else:
            self._outcome(transfer, kind, first)

    def _outcome(self, transfer: TransferId, kind: str, first: FirstToken | None = None) -> None:
        call = self.calls.pop(transfer, None)
        if call is None:
            return
        if kind != "prefilled":
            self._cancel_leg(call)
        if call.decode.incarnation == call.incarnation:
            delay = self.cluster.world.rng.uniform(0.0005, 0.01)
            if kind == "prefilled" and first is not None:
                self._carry(call, first, delay)
            else:
                call.decode.scheduler.post(delay, call.decode.outcome, transfer, kind)

    def _carry(self, call: OpenPost, first: FirstToken, delay: float) -> None:
        """Carry P's first token to D, with a random stream of its own, so that other worlds stay unchanged."""
        world, faults, dice = self.cluster.world, self.cluster.settings.first_faults, self._dice
        transfer, carried, last = call.reservation.transfer, first, self._last
        self._last = first
        chances = {name: dice.random() < getattr(faults, name) for name in FirstFaults.__dataclass_fields__}
        for name in (name for name, happens in chances.items() if happens):
            world.fault(f"first token {name}")
        if chances["mixed_up"] and last is not None:
            carried = last
        if chances["forged"]:
            carried = msgspec.structs.replace(carried, token=dice.choice((VOCABULARY, 1 << 61)))
        if chances["late"]:
            delay += dice.choice((0.1, 0.5, 5.0))
        post, outcome = call.decode.scheduler.post, call.decode.outcome
        post(delay, outcome, transfer, "prefilled", None if chances["lost"] else carried)
        if chances["twice"]:
            post(delay + dice.choice((0.0, 0.01, 1.0)), outcome, transfer, "again", first)

    def _cancel_leg(self, call: OpenPost) -> None:
        engine = call.prefill
        if engine is not None and engine.scheduler.incarnation == call.prefill_incarnation:
            delay = self.cluster.world.rng.choice((0.001, 0.05, 2.0))
            engine.scheduler.post(delay, engine.abort, call.reservation.transfer)


_FAILURES = {
    "no connection": HttpFailure.CONNECT,
    "4xx": HttpFailure.SERVER,
    "5xx": HttpFailure.SERVER,
    "503": HttpFailure.REFUSED,
}
