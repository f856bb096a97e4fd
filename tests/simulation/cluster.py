# SPDX-License-Identifier: Apache-2.0
"""One seed's cluster: engines, broker, network and wire; its load and faults; and the promises checked at the end."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from simulation.broker import URL, Broker
from simulation.decode import DecodeEngine, DecodeRank, DecodeRequest
from simulation.memory import Content
from simulation.mutations import Mutation
from simulation.network import Network
from simulation.prefill_engine import PrefillEngine, Prompt
from simulation.router import SimulatedRouter
from simulation.settings import FIRST_WAIT_S, SimulationSettings
from simulation.tables import pool
from simulation.wire import SimulatedWire
from simulation.world import Process, Violation, World
from vllm_ascend_pd.decode.scheduler.core.load import LoadState, Start
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId
from vllm_ascend_pd.protocol.meeting import Bound, Meeting
from vllm_ascend_pd.protocol.messages import Message, message_name
from vllm_ascend_pd.protocol.timing import landed_s

if TYPE_CHECKING:
    from simulation.prefill import PrefillRank

IDLE_S = 1.0  # within which a load ends that failed before any P began to push
SLACK_S = 10.0  # for times outside the protocol: steps, delivery, one revocation


class SimulatedCluster:
    def __init__(self, seed: int, settings: SimulationSettings, mutation: Mutation, *, tracing: bool = False) -> None:
        self.settings = settings
        self.mutation = mutation
        self.world = World(seed, tracing=tracing)
        faults, timers = settings.faults, settings.timers
        self.network = Network(self.world, faults)
        self.wire = SimulatedWire(
            self.world, faults, settings.transfer_timeout_s, settings.quiet_s, timers.margin_s, self._stop_inside
        )
        self.landed_s = landed_s(timers.lease_s, settings.quiet_s, timers.margin_s)
        self.transfers = 0
        self._telling = self.world.dice("telling")
        self._alike = self.world.dice("alike")
        self._texts: deque[Content] = deque(maxlen=4)  # the last ones
        self._sampled: list[str] = []  # by number: the push of each first token
        self.requests: list[DecodeRequest] = []
        self._serials: dict[TransferId, int] = {}
        self._bound: dict[object, object] = {}  # source by target, and target by source
        self.broker = Broker(self)
        self.router = SimulatedRouter(self)
        self.prefill = [PrefillEngine(self, i, shape) for i, shape in enumerate(settings.prefill)]
        self.decode = [DecodeEngine(self, i, shape) for i, shape in enumerate(settings.decode)]

    # -- addresses

    def decode_rank(self, endpoint: Endpoint, incarnation: str = "", session: str = "") -> DecodeRank:
        """Return the rank that is meant, if it lives; else the one that has its address now."""
        engine, worker = self.decode[int(endpoint.host[1:])], endpoint.port - 1
        orphans = (rank for rank in engine.orphans if rank.index == worker and rank.process.alive)
        meant = (rank for rank in orphans if incarnation == rank.incarnation or session == rank.session)
        return next(meant, engine.ranks[worker])

    def to_decode(self, sender: PrefillRank, endpoint: Endpoint, message: Message) -> None:
        meant = message.transfer.incarnation
        self.world.log(sender.process.name, f"-> {endpoint.host}.{endpoint.port - 1}", _as_text(self.world, message))
        if not self.decode_rank(endpoint, meant).process.alive and self.world.rng.random() < 0.5:
            sender.process.post(0.001, sender.unreachable, endpoint)
        peer = (sender.engine.index, sender.index)

        def receiver() -> Process | None:
            process = self.decode_rank(endpoint, meant).process
            return process if process.alive else None

        def deliver(arrived: Message) -> None:
            self.decode_rank(endpoint, meant).deliver(peer, arrived)

        self.network.send(sender.process, receiver, deliver, message)

    def to_prefill(self, sender: Process, peer: object, message: Message) -> None:
        index, worker = peer if isinstance(peer, tuple) else (0, 0)
        engine = self.prefill[index]
        self.world.log(sender.name, f"-> P{index}/{worker}", _as_text(self.world, message))
        endpoint = Endpoint(sender.name.split(".")[0], 1 + message.d_rank)

        def rank() -> PrefillRank:
            orphans = (rank for rank in engine.orphans if rank.process.alive)
            meant = (rank for rank in orphans if rank.process.incarnation == message.p_incarnation)
            return next(meant, engine.ranks[worker])

        def receiver() -> Process | None:
            process = rank().process
            return process if process.alive else None

        def deliver(arrived: Message) -> None:
            rank().deliver(endpoint, arrived)

        self.network.send(sender, receiver, deliver, message)

    # -- schedulers' channel: D dials, P listens

    def to_listener(self, sender: DecodeEngine, endpoint: Endpoint, message: Meeting) -> None:
        engine, peer = self.prefill[int(endpoint.host[1:])], sender.incarnation
        self.world.log(sender.scheduler.name, f"-> {endpoint.host}.s", message)
        if not engine.alive and self.world.rng.random() < 0.5:
            sender.scheduler.post(0.001, sender.unreachable, endpoint)

        def receiver() -> Process | None:
            return engine.scheduler if engine.alive else None

        def deliver(arrived: Meeting) -> None:
            engine.message(peer, arrived)

        self.network.send(sender.scheduler, receiver, deliver, message)

    def to_offering(self, sender: PrefillEngine, peer: str, message: Meeting) -> None:
        engine = next((d for d in self.decode if d.alive and d.incarnation == peer), None)
        self.world.log(sender.scheduler.name, f"-> {peer}", message)
        if engine is None:
            return
        endpoint = Endpoint(f"P{sender.index}", 1)

        def receiver() -> Process | None:
            return engine.scheduler if engine.alive and engine.incarnation == peer else None

        def deliver(arrived: Meeting) -> None:
            engine.message(endpoint, arrived)

        self.network.send(sender.scheduler, receiver, deliver, message)

    def offering_died(self, incarnation: str) -> None:
        """End its connections, which P's kernels notice, unless a host has died silently."""
        met = bool(self.settings.p_first or self.settings.at_once)
        if not met or self.world.chance(self.settings.faults.silent_death):
            return
        for engine in self.prefill:
            if engine.alive:
                engine.scheduler.post(self.world.rng.uniform(0.0005, 0.3), engine.decode_gone, incarnation)

    # -- names of transfers

    def new_transfer(self, transfer: TransferId) -> int:
        """Return a number for every transfer of the cluster: small, so that an array can hold it."""
        self.transfers += 1
        self._serials[transfer] = self.transfers
        return self.transfers

    def serial_of(self, transfer: TransferId) -> int:
        return self._serials[transfer]

    # -- load and faults

    def load(self) -> float:
        """Schedule all arrivals. Return the time of the last."""
        rng, s, at = self.world.rng, self.settings, 0.0
        for number in range(s.requests):
            if number % s.burst == 0:
                at += rng.expovariate(1 / s.gap_s)
            self.world.at(at + rng.uniform(0, 0.01), self._arrive, number)
        return at

    def _arrive(self, number: int) -> None:
        rng, s = self.world.rng, self.settings
        engine = rng.choice(self.decode)
        self._mischief()
        if not engine.alive:
            self.world.stats["requests refused"] += 1
            return
        request = DecodeRequest(self.world.name("request"), number, rng.randint(1, s.tokens), self._text(number))
        request.arrived = self.world.now
        if self.router.takes(request):
            self.router.send(engine, request)
            return
        request.params = {"do_remote_prefill": True, "metaserver": URL, "ticket": request.name}
        request.params["first_token"] = self._telling.random() < 0.8
        if self.world.chance(s.faults.forged):
            self.world.fault("forged parameters")
            request.params["metaserver"] = rng.choice(("http://metaserver:8001", "https://metaserver:8000", 7))
        self.arrive(engine, request)

    def _text(self, number: int) -> Content:
        """Return a new text, or one of the last: such prompts are alike as far as the shorter one goes."""
        if self._alike.random() >= self.settings.shared or not self._texts:
            self._texts.append(Content(number))
            return self._texts[-1]
        return self._alike.choice(self._texts)

    def arrive(self, engine: DecodeEngine, request: DecodeRequest) -> None:
        """Add a request to D, as its API server does."""
        rng, s = self.world.rng, self.settings
        self.requests.append(request)
        engine.arrive(request)
        if self.world.chance(s.faults.leave):
            self.world.fault("client left")
            engine.scheduler.post(rng.choice((0.001, 0.02, 0.2, 5.0, 30.0)), engine.leave, request)

    def _mischief(self) -> None:
        """Schedule at random a fault during this request, or during the fencing after an earlier fault."""
        f, rng = self.settings.faults, self.world.rng
        kinds = (
            (f.stop_prefill, self._stop_prefill),
            (f.stop_decode, self._stop_decode),
            (f.kill_prefill, self._kill_prefill),
            (f.kill_decode, self._kill_decode),
            (f.kill_metaserver, self._kill_metaserver),
            (f.flap, self._flap),
            (f.partition, self._partition),
        )
        for rate, fault in kinds:
            if self.world.chance(rate):
                self.world.after(
                    rng.choice((rng.uniform(0, 0.1), rng.uniform(0, 2), rng.uniform(0, self.landed_s))), fault
                )

    def _span(self) -> float:
        """Return a critical duration: short, about a lease, about H, longer, or unbounded."""
        rng, t = self.world.rng, self.settings.timers
        if rng.random() < 0.05:
            self.world.fault("stopped for ten H or more")
            return self.landed_s * rng.uniform(10, 30)
        return rng.choice(
            (
                rng.uniform(0.01, 1.0),
                t.lease_s + rng.uniform(-1, 1),
                t.lease_s + t.margin_s + rng.uniform(-1, 1),
                self.landed_s + rng.uniform(-2, 2),
                self.landed_s * rng.uniform(1, 4),
            )
        )

    def stall(self, rank: PrefillRank) -> None:
        """Stop a writer just before it submits; at random, kill it while its later submissions are in flight."""
        if rank.process.partitioned_until < self.world.now:
            self.world.fault("writer stopped before its submission")
            self._pause(rank, 0.5)
            return

    def _stop_inside(self, rank: PrefillRank) -> None:
        if rank.process.partitioned_until < self.world.now:
            self._pause(rank, 0.2)

    def _pause(self, rank: PrefillRank, deadly: float) -> None:
        """At random, kill it while it is stopped, or while what it submits afterwards is in flight."""
        span = self._span()
        rank.process.pause(span)
        if self.world.chance(self.settings.faults.cut_stopped):
            self.world.fault("side channel of a stopped writer cut")
            self._end_connections(rank.process, span)
        if self.settings.faults.kill_prefill and self.world.rng.random() < deadly:
            if self.world.rng.random() < 0.3:
                self.world.after(span * self.world.rng.random(), self._kill_prefill, rank.engine)
            else:
                self.world.after(span + self.world.rng.expovariate(1 / 0.002), self._kill_prefill, rank.engine)

    def _stop_prefill(self) -> None:
        rank = self.world.rng.choice(self.world.rng.choice(self.prefill).ranks)
        process = self.world.rng.choice((rank.process, rank.process, rank.engine.scheduler))
        if process.partitioned_until < self.world.now and process.alive:
            self.world.fault("prefill stopped")
            span = self._span()
            process.pause(span)
            if self.world.rng.random() < 0.3:
                self.world.after(span + self.world.rng.uniform(0, 1), self._kill_prefill, rank.engine)

    def _stop_decode(self) -> None:
        engine = self.world.rng.choice(self.decode)
        process = self.world.rng.choice((engine.scheduler, *(rank.process for rank in engine.ranks)))
        if process.alive and self.world.now - process.disturbed > self.landed_s / 2:
            self.world.fault("decode stopped")
            process.pause(self._span())

    def _kill_prefill(self, engine: PrefillEngine | None = None) -> None:
        engine = engine or self.world.rng.choice(self.prefill)
        if not engine.alive:
            return
        self.world.fault("prefill killed")
        self._end_prefill(engine)

    def prefill_ended_itself(self, rank: PrefillRank) -> None:
        """Restart an engine that has reported that it cannot push any more, as a supervisor does."""
        if rank.scheduler.alive:
            self.world.fault("prefill ended over a dead writer")
            self._end_prefill(rank.engine)

    def outlives(self, dice: random.Random) -> tuple[float, ...] | None:
        """Return for how long the ranks of a dead scheduler may live on; None: they die with it."""
        if dice.random() >= self.settings.faults.orphans:
            return None
        self.world.fault("ranks outlived their scheduler")
        t = self.settings.timers
        return (0.01, 1.0, t.lease_s, self.landed_s, 2 * self.landed_s)

    def orphan_died(self, rank: PrefillRank) -> None:
        rank.process.kill()
        self.wire.source_died(rank)
        self._say_died(rank)

    def _say_died(self, rank: PrefillRank) -> None:
        self.network.died(rank.process, [r for d in self.decode for r in (*d.ranks, *d.orphans)])

    def _end_prefill(self, engine: PrefillEngine) -> None:
        engine.kill()
        for rank in engine.ranks:
            if not rank.process.alive:
                self._say_died(rank)
        self.world.after(self.world.rng.choice((0.01, 1.0, 30.0)), engine.boot)
        if self.settings.faults.stop_decode and self.world.rng.random() < 0.5:
            # While writes of the dead processes are still in flight.
            self.world.after(self.world.rng.uniform(0.2, 2.0), self._stop_decode)

    def _kill_decode(self) -> None:
        engine = self.world.rng.choice(self.decode)
        if not engine.alive:
            return
        self.world.fault("decode killed")
        engine.kill()
        self.world.after(self.world.rng.choice((0.01, 1.0, 30.0)), engine.boot)

    def _kill_metaserver(self) -> None:
        self.world.fault("metaserver killed")
        self.broker.kill()

    def _flap(self) -> None:
        rank = self.world.rng.choice(self.world.rng.choice(self.prefill).ranks)
        if rank.process.alive:
            self.world.fault("connection flapped")
            self.network.flap(
                rank.process, [r for d in self.decode for r in d.ranks], self.world.rng.choice((0.01, 1.0))
            )

    def _partition(self) -> None:
        self._cut_off(self.world.rng.choice(self.world.rng.choice(self.prefill).ranks))

    def cut_off_perhaps(self, rank: PrefillRank) -> None:
        """At random, cut a rank off in the middle of a prompt; its engine continues after the lease or H."""
        if self.world.chance(self.settings.faults.partition) and self._cut_off(rank):
            rank.scheduler.pause(self._span())

    def _cut_off(self, rank: PrefillRank) -> bool:
        """Cut the side channel of one P worker; its peers' kernels notice, and the data path works on.

        Not together with a stop: no lease can bound a writer that is stopped, cut off, and considered dead. The fault
        `cut_stopped` does that, in a world of its own.
        """
        process = rank.process
        if not process.alive or process.paused or self.world.now - process.disturbed < 2 * self.landed_s:
            return False
        self.world.fault("side channel cut")
        self._end_connections(process, self._span())
        return True

    def _end_connections(self, process: Process, duration: float) -> None:
        process.partitioned_until = self.world.now + duration
        process.disturbed = process.partitioned_until
        self.network.flap(process, [r for d in self.decode for r in d.ranks], duration)

    # -- promises

    def check_duration(self, engine: DecodeEngine, request: DecodeRequest) -> None:
        """Check promise 4 on D: X + H, plus T if a writer died late.

        The time during which D itself was stopped does not count.
        """
        t = self.settings.timers
        stopped = engine.stopped_s() - request.stopped_before
        bound = t.recv_deadline_s + self.landed_s + self.settings.quiet_s + SLACK_S
        took = self.world.now - request.started
        self.world.stats["longest ms"] = max(self.world.stats["longest ms"], int(1000 * (took - stopped)))
        if request.hopeless is not None and self.world.now - request.hopeless - stopped > IDLE_S:
            raise Violation(f"promise 4: {request.name} waited, though it knew that no KV would come")
        if took - stopped > bound:
            raise Violation(
                f"promise 4: {request.name} took {took:.1f} s ({stopped:.1f} stopped), allowed are {bound:.1f}"
            )

    def sampled(self, prompt: Prompt) -> int:
        """Return a new token for each of P's samples, so that it identifies its sample."""
        self._sampled.append(prompt.push)
        return len(self._sampled)

    def check_first(self, engine: DecodeEngine, request: DecodeRequest, start: Start) -> None:
        """Check promise 6: a held request continues in time; with a token of P's only if its KV is of the same push."""
        waited = self.world.now - request.held_since - (engine.stopped_s() - request.stopped_before)
        if waited > (self.settings.timers.lease_s if request.whole else FIRST_WAIT_S) + 0.1:
            raise Violation(f"promise 6: {request.name} waited {waited:.1f} s for its first token")
        if start.first is not None and self._sampled[start.first.token - 1] != request.push:
            raise Violation(f"promise 6: {request.name} starts with a token that is not of its own push")

    def check_hold(self, engine: PrefillEngine, prompt: Prompt) -> None:
        """Check promise 4 on P: finished blocks wait until the deadline at most, plus pending writes."""
        t, s = self.settings.timers, self.settings
        stopped = engine.stopped_s() - prompt.stopped_before
        bound = t.recv_deadline_s + s.transfer_timeout_s + s.quiet_s + SLACK_S
        bound += t.hold_s if prompt.leg is not None else 0.0
        took = self.world.now - (prompt.ended or self.world.now)
        if took - stopped > bound:
            raise Violation(
                f"promise 4: {prompt.name} was held {took:.1f} s ({stopped:.1f} stopped), allowed {bound:.1f}"
            )

    def check_bound(self, engine: PrefillEngine, message: Meeting) -> None:
        """Check that each source is bound to one target at most, and each target to one source."""
        if not isinstance(message, Bound):
            return
        for one, other in ((message.push, message.transfer), (message.transfer, message.push)):
            if self._bound.setdefault(one, other) != other:
                raise Violation(f"promise 3: P{engine.index} binds {one} to {other}, and before to {self._bound[one]}")

    def check_revocation(self, rank: DecodeRank) -> None:
        """Check promise 4: access is revoked only if some awaited writer really cannot answer."""
        if self.settings.faults.drop + self.settings.faults.late > 0.02:
            return  # then a series of lost answers is an excuse
        since = self.world.now - 2 * (self.landed_s + self.settings.quiet_s + self.settings.transfer_timeout_s)
        workers = {worker.process.incarnation: worker for engine in self.prefill for worker in engine.ranks}
        silent = [workers.get(name) for name in rank.waits_for()]
        for worker in silent:
            if worker is None or worker.process.paused or max(worker.process.disturbed, worker.trouble) > since:
                return
        if rank.process.disturbed < since:
            raise Violation(f"promise 4: {rank.process.name} revokes although every writer could have answered")

    def check_end(self) -> None:
        """Check promise 5, and that everything has ended once no event is left."""
        for engine in self.decode:
            left = {
                "waiting requests": len(engine.waiting),
                "held requests": len(engine.held_requests),
                "loads": len(engine.loading) + engine.book.count(*LoadState),
                "offers": engine.offers.open_count(),
                "blocks": len(pool(engine.geometry, engine.shape.blocks)) - len(engine.free),
                "records": sum(rank.core.record_count() for rank in engine.ranks),
                "parked": sum(rank.core.parked_count() for rank in engine.ranks),
                "binds": sum(len(rank.core.binds) + len(rank.core.gates) for rank in engine.ranks),
                "timers": sum(rank.core.next_wake() is not None for rank in engine.ranks),
                "reserved blocks": sum(int((rank.owner != 0).sum()) for rank in engine.ranks),
            }
            _nothing(f"D{engine.index}", left)
        for prefill in self.prefill:
            left = {
                "prompts": len(prefill.waiting) + len(prefill.running) + len(prefill.holding),
                "pushes": prefill.book.open_count(),
                "reports": len(prefill.reports),
                **prefill.book.counts(),
                "blocks": len(pool(prefill.geometry, prefill.shape.blocks)) - len(prefill.free),
            }
            _nothing(f"P{prefill.index}", left)
            for worker in prefill.ranks:
                _nothing(worker.process.name, worker.left())
        _nothing("M", {"calls": len(self.broker.calls)})
        if self.settings.kind and self.world.stats["transfers ok"] < self.transfers:
            raise Violation(f"promise 3: of {self.transfers} transfers some failed, though nothing has gone wrong")
        for request in self.requests:
            if request.state in ("waiting", "loading", "held", "decoding"):
                raise Violation(f"promise 4: {request.name} never ended: {request.state}")


def _nothing(owner: str, left: dict[str, int]) -> None:
    leftovers = {what: count for what, count in left.items() if count}
    if leftovers:
        raise Violation(f"promise 5: {owner} has left {leftovers}")


def _as_text(world: World, message: Message) -> str:
    if not world.tracing:
        return ""
    facts = {"transfer": message.transfer.n, "push": message.push, "by": str(message.contributor), "seq": message.seq}
    for field in ("code", "detail", "cause", "quiescent", "kind"):
        if hasattr(message, field):
            facts[field] = getattr(message, field)
    return message_name(message).upper() + " " + " ".join(f"{k}={v}" for k, v in facts.items())
