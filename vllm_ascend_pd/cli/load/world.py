# SPDX-License-Identifier: Apache-2.0
"""Requests of a load through the router's own decisions, to simulated engines, on a virtual clock.

The router's are: admission, the choice of D and P with its estimates of load and prefix caches, circuits with probes,
retries and their budget. Simulated here is what they decide about: HTTP and the transfer take a fixed time for each
request, and no canaries are sent.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_ascend_pd.cli.load.arrivals import Arrival, beginnings
from vllm_ascend_pd.cli.load.engine import EngineSizes, SimulatedEngine, VirtualTime
from vllm_ascend_pd.cli.load.lines import StepLines
from vllm_ascend_pd.router.core.decisions import Admission, Evidence, Gatekeeper, RetryBudget, Role
from vllm_ascend_pd.router.core.prefixes import Mark, Marks
from vllm_ascend_pd.router.fleet import Fleet, Instance, LegInFlight, Spec
from vllm_ascend_pd.router.settings import Settings
from vllm_ascend_pd.shared.core.failures import HttpFailure
from vllm_ascend_pd.shared.http_session import Origin

MODEL = "model"


@dataclass(frozen=True, slots=True)
class LoadedFleet:
    """The engines that are simulated, equal ones. Without P each D computes prompts, too."""

    prefills: int
    decodes: int
    lines: StepLines
    sizes: EngineSizes
    pair_s: float  # that a pair adds to a request
    metaservers: int = 1  # each knows the engines, and of their load and caches what it has sent itself
    sticky: bool = False  # prompts that begin alike take the same one, else each request takes one at random


@dataclass(frozen=True, slots=True)
class Loss:
    """An engine that ends, and is back after a while."""

    role: Role
    at: float
    back_s: float


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """A request, and what its client saw of it."""

    arrival: Arrival
    chain: list[int]
    marks: Marks
    first: float = 0.0  # seconds after it came
    last: float = 0.0
    came: int = 0  # tokens
    failed: bool = False
    attempts: int = 0  # since its last token
    tried: set[str] = field(default_factory=set)
    bad: set[str] = field(default_factory=set)

    @property
    def left(self) -> int:
        return self.arrival.answer - self.came


@dataclass(eq=False, slots=True)
class SimulatedAttempt:
    """One try to serve a request."""

    request: SimulatedRequest
    decode: Instance
    leg: LegInFlight
    prefill: Instance | None = None
    prefill_leg: LegInFlight | None = None
    has_ended: bool = False


class LoadedWorld:
    """One run."""

    def __init__(self, fleet: LoadedFleet, arrivals: Sequence[Arrival], loss: Loss | None = None) -> None:
        self.time, self.dice, self.shape, self.open = VirtualTime(), random.Random("plan"), fleet, len(arrivals)
        roles = [Role.PREFILL] * fleet.prefills + [Role.DECODE] * fleet.decodes
        self.specs = [Spec(role, Origin("http", f"{role.value}-{place}", 80)) for place, role in enumerate(roles)]
        names = [spec.name for spec in self.specs]
        self.engines = {name: SimulatedEngine(name, self.time, fleet.lines, fleet.sizes) for name in names}
        self.requests: list[SimulatedRequest] = []
        self._routers = [LoadedRouter(self) for _ in range(fleet.metaservers)]
        routes = random.Random("metaservers")
        for arrival in arrivals:
            chain = beginnings(arrival.chunks)
            self.requests.append(SimulatedRequest(arrival, chain, self._marks(arrival, chain)))
            route = sum(chain[:1]) if fleet.sticky else routes.randrange(1 << 30)
            self.time.at(arrival.at, self._routers[route % fleet.metaservers].come, self.requests[-1])
        if loss is not None:
            self.time.at(loss.at, self._kill, loss)

    def run(self) -> None:
        """Run until each request has ended."""
        self.time.run(lambda: self.open > 0)

    def _marks(self, arrival: Arrival, chain: Sequence[int]) -> Marks:
        size = self.shape.sizes.chunk
        chunks = chain[: arrival.prompt // size]
        return tuple(Mark(one.to_bytes(8, "big", signed=True), size * (place + 1)) for place, one in enumerate(chunks))

    def _kill(self, loss: Loss) -> None:
        engine = self.engines[next(spec.name for spec in self.specs if spec.role is loss.role)]
        engine.kill()
        self.time.after(loss.back_s, engine.restart)
        for router in self._routers:
            router.lost(engine.name)


class LoadedRouter:
    """One metaserver."""

    def __init__(self, world: LoadedWorld) -> None:
        self._world, self._time, self._engines, self._dice = world, world.time, world.engines, world.dice
        self._settings = Settings()
        self._retry = self._settings.retry
        self._fleet = Fleet(
            self._settings.circuit,
            prefix_tokens=self._settings.prefix_tokens,
            clock=lambda: self._time.now,
            dice=self._dice.random,
        )
        self._keeper, self._budget = Gatekeeper(self._settings.max_running, self._settings.max_waiting), RetryBudget()
        self._queue: deque[SimulatedRequest] = deque()
        self._under_way: dict[str, dict[SimulatedAttempt, None]] = {}
        for spec in world.specs:
            instance = self._fleet.add(spec, "plan")
            self._under_way[instance.name] = {}
            self._probe(instance)

    def come(self, served: SimulatedRequest) -> None:
        said = self._keeper.ask()
        if said is Admission.NOW:
            self._begin(served)
        elif said is Admission.QUEUE:
            self._queue.append(served)
            self._time.after(self._settings.max_wait_s, self._give_up, served)
        else:
            self._refuse(served)

    def _give_up(self, served: SimulatedRequest) -> None:
        if served in self._queue:
            self._queue.remove(served)
            self._keeper.give_up()
            self._refuse(served)

    def _refuse(self, served: SimulatedRequest) -> None:
        served.failed = True
        self._world.open -= 1

    def _begin(self, served: SimulatedRequest) -> None:
        self._budget.request()
        self._attempt(served)

    def _finish(self, served: SimulatedRequest, failed: bool) -> None:
        served.failed = failed
        self._world.open -= 1
        if self._keeper.leave():
            self._begin(self._queue.popleft())

    def _attempt(self, served: SimulatedRequest) -> None:
        served.attempts += 1
        tokens = float(served.arrival.prompt + served.came)
        expected = self._fleet.expected(MODEL, True, served.left)
        decode = self._fleet.choose_decode(
            tokens + expected, frozenset(served.tried), marks=served.marks, bad_prefills=frozenset(served.bad)
        )
        if decode is None:
            self._finish(served, failed=True)
            return
        attempt = SimulatedAttempt(served, decode, self._fleet.leg(decode, tokens, expected, served.left).__enter__())
        if not self._engines[decode.name].alive:
            self._broke(attempt, decode, HttpFailure.CONNECT)
            return
        decode.sent(served.marks)
        self._under_way[decode.name][attempt] = None
        room, engine = served.arrival.prompt + served.arrival.answer, self._engines[decode.name]
        engine.enter(attempt, room, lambda: engine.between_steps(lambda: self._prefill(attempt, 1)))

    def _prefill(self, attempt: SimulatedAttempt, number: int) -> None:
        """Let a P compute the prompt, or D itself where no P takes requests."""
        if attempt.has_ended:
            return
        served, tokens = attempt.request, attempt.request.arrival.prompt + attempt.request.came
        if not self._fleet.usable(Role.PREFILL):
            engine = self._engines[attempt.decode.name]
            engine.prefill(attempt, tokens, served.chain, lambda: self._first(attempt))
            return
        cost = float(tokens)
        prefill = self._fleet.choose_prefill(attempt.decode, cost, marks=served.marks, bad=served.bad)
        if prefill is None:
            self._broke(attempt, None, HttpFailure.PREFILL)
            return
        there = prefill.sent(served.marks)
        leg = self._fleet.leg(prefill, max(1.0, cost - there)).__enter__()
        engine = self._engines[prefill.name]
        if not engine.alive:
            leg.__exit__()
            served.bad.add(prefill.name)
            self._fleet.failed(prefill, HttpFailure.CONNECT, "no connection")
            delay = self._retry.retry_delay(HttpFailure.CONNECT, number, False, self._budget, self._dice.random())
            if delay is None:
                self._broke(attempt, None, HttpFailure.PREFILL)
            else:
                self._time.after(delay, self._prefill, attempt, number + 1)
            return
        attempt.prefill, attempt.prefill_leg = prefill, leg
        self._under_way[prefill.name][attempt] = None

        def computed() -> None:
            self._leave_prefill(attempt, served=True)
            decode = self._engines[attempt.decode.name]
            self._time.after(self._world.shape.pair_s, decode.between_steps, lambda: self._first(attempt))

        engine.enter(attempt, tokens, lambda: engine.prefill(attempt, tokens, served.chain, computed))

    def _leave_prefill(self, attempt: SimulatedAttempt, *, served: bool) -> None:
        prefill, leg = attempt.prefill, attempt.prefill_leg
        if prefill is None or leg is None:
            return
        attempt.prefill = attempt.prefill_leg = None
        self._under_way[prefill.name].pop(attempt, None)
        self._engines[prefill.name].leave(attempt)
        leg.__exit__()
        if served:
            self._fleet.record(prefill, Evidence.SERVED)

    def _first(self, attempt: SimulatedAttempt) -> None:
        """D starts with the first token."""
        if not attempt.has_ended:
            self._token(attempt)
            if not attempt.has_ended:
                self._engines[attempt.decode.name].decode(attempt, lambda: self._token(attempt))

    def _token(self, attempt: SimulatedAttempt) -> None:
        served = attempt.request
        served.came += 1
        served.last = self._time.now - served.arrival.at
        served.first = served.first or served.last
        attempt.leg.take(1)
        if not served.left:
            self._leave(attempt)
            self._fleet.record(attempt.decode, Evidence.SERVED)
            self._fleet.answered(MODEL, True, served.arrival.answer, served.arrival.answer)
            self._finish(served, failed=False)

    def _leave(self, attempt: SimulatedAttempt) -> None:
        attempt.has_ended = True
        self._leave_prefill(attempt, served=False)
        self._under_way[attempt.decode.name].pop(attempt, None)
        self._engines[attempt.decode.name].leave(attempt)
        attempt.leg.__exit__()

    def _broke(self, attempt: SimulatedAttempt, blamed: Instance | None, failure: HttpFailure) -> None:
        """Try again after a failure, or tell the client. A stream that had begun goes on at once."""
        served, streaming = attempt.request, failure is HttpFailure.BROKEN and attempt.request.came > 0
        self._leave(attempt)
        if blamed is not None:
            self._fleet.failed(blamed, failure, "the connection broke")
        if streaming:
            served.attempts = 0
            served.tried = {attempt.decode.name}
            self._time.after(0.0, self._attempt, served)
            return
        if failure is not HttpFailure.PREFILL:
            served.tried.add(attempt.decode.name)
        delay = self._retry.retry_delay(failure, served.attempts, True, self._budget, self._dice.random())
        if delay is None:
            self._finish(served, failed=True)
        else:
            self._time.after(delay, self._attempt, served)

    def _probe(self, instance: Instance) -> None:
        alive = self._engines[instance.name].alive
        self._fleet.record(
            instance, Evidence.PROBE_OK if alive else Evidence.PROBE_FAILED, "" if alive else "it is gone"
        )
        self._time.after(self._settings.probe_every_s, self._probe, instance)

    def lost(self, name: str) -> None:
        """Break what is under way at an engine that has just ended."""
        (instance,) = (one for role in Role for one in self._fleet.of(role) if one.name == name)
        instance.history = instance.history.refuses(self._time.now)
        for attempt in list(self._under_way[name]):
            if instance.role is Role.DECODE:
                self._broke(attempt, instance, HttpFailure.BROKEN)
            else:
                attempt.request.bad.add(instance.name)
                self._fleet.failed(instance, HttpFailure.BROKEN, "the connection broke")
                self._broke(attempt, None, HttpFailure.PREFILL)
