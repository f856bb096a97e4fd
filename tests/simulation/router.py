# SPDX-License-Identifier: Apache-2.0
"""Routers that do not send to D first: P's answer takes its source to D, or both get the request at once.

Both then have one name for it. Routers lose answers, come late, send to a side twice, or never. They never repeat a
request to an engine: a request without KV is computed where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.memory import Content
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.meeting import SourceId

if TYPE_CHECKING:
    from simulation.cluster import SimulatedCluster
    from simulation.decode import DecodeEngine, DecodeRequest
    from simulation.prefill_engine import PrefillEngine


@dataclass(slots=True, eq=False)
class Leg:
    """P's part of one client's request."""

    name: str
    seed: int
    tokens: int
    content: Content
    listener: Endpoint
    decode: DecodeEngine | None = None  # the D that gets it after P; None: it has it already, or never will
    request: DecodeRequest | None = None


class SimulatedRouter:
    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.legs: dict[Leg, PrefillEngine] = {}  # not answered by P yet

    def takes(self, request: DecodeRequest) -> bool:
        s, rng = self.cluster.settings, self.cluster.world.rng
        return bool(s.p_first or s.at_once) and rng.random() < s.p_first + (1 - s.p_first) * s.at_once

    def send(self, decode: DecodeEngine, request: DecodeRequest) -> None:
        s, world = self.cluster.settings, self.cluster.world
        prefill = world.rng.choice(self.cluster.prefill)
        leg = Leg(request.name, request.seed, request.tokens, request.content, Endpoint(f"P{prefill.index}", 1))
        first = world.rng.random() < s.p_first / (s.p_first + (1 - s.p_first) * s.at_once)
        world.stats["P first" if first else "at once"] += 1
        if first:
            leg.decode, leg.request = decode, request
            self._to_prefill(prefill, leg)
            return
        request.leg = leg
        late_p, late_d = (world.rng.choice((0.0, 0.001, 0.1)) for _ in range(2))
        strays = world.chance(s.faults.astray)
        how = (
            world.rng.choice(("source late", "source twice", "source never", "target late", "target never"))
            if strays
            else ""
        )
        if how:
            world.fault(how)
        if how.endswith("late"):
            late = world.rng.choice((0.5, s.timers.meet_s, s.timers.hold_s)) * world.rng.uniform(0.8, 1.3)
            late_p, late_d = (late, 0.0) if how == "source late" else (0.0, late)
        for _ in range({"source never": 0, "source twice": 2}.get(how, 1)):
            world.after(late_p, self._to_prefill, prefill, leg)
        if how != "target never":
            world.after(late_d, self._to_decode, decode, request)

    def _to_prefill(self, engine: PrefillEngine, leg: Leg) -> None:
        if not engine.alive:
            self._pass_on(leg, None)
            return
        self.legs[leg] = engine
        engine.scheduler.post(self.cluster.world.rng.uniform(0.0005, 0.01), engine.collect, leg)

    def _to_decode(self, engine: DecodeEngine, request: DecodeRequest) -> None:
        request.arrived = self.cluster.world.now
        if engine.alive:
            self.cluster.arrive(engine, request)
        else:
            self.cluster.world.stats["requests refused"] += 1

    def answered(self, engine: PrefillEngine, leg: Leg, source: SourceId | None) -> None:
        """Handle P's answer; without a source it has ended, or P does not hold it any more."""
        if self.legs.pop(leg, None) is not None:
            self.cluster.world.after(self.cluster.world.rng.uniform(0.0005, 0.01), self._pass_on, leg, source)

    def prefill_died(self, engine: PrefillEngine) -> None:
        for leg in [leg for leg, where in self.legs.items() if where is engine]:
            del self.legs[leg]
            self.cluster.world.after(0.01, self._pass_on, leg, None)

    def _pass_on(self, leg: Leg, source: SourceId | None) -> None:
        """Pass the source on to D, in the serial order."""
        s, world, request = self.cluster.settings, self.cluster.world, leg.request
        if leg.decode is None or request is None:
            return
        if world.chance(s.faults.http):
            world.fault("http source lost")
            source = None
        if source is not None:
            request.leg, request.source = leg, source
        delay, strays = 0.001, world.chance(s.faults.astray)
        how = world.rng.choice(("target late", "target twice", "target never")) if strays else ""
        if how:
            world.fault(how)
        if how == "target late":
            delay = world.rng.choice((0.5, s.timers.hold_s)) * world.rng.uniform(0.8, 1.3)
        if how == "target twice":
            duplicate = self._copy(request)
            world.after(
                world.rng.choice((0.0, 0.1, 5.0)), self._to_decode, world.rng.choice(self.cluster.decode), duplicate
            )
        if how != "target never":
            world.after(delay, self._to_decode, leg.decode, request)

    def _copy(self, request: DecodeRequest) -> DecodeRequest:
        duplicate = type(request)(self.cluster.world.name("request"), request.seed, request.tokens, request.content)
        duplicate.leg, duplicate.source = request.leg, request.source
        return duplicate
