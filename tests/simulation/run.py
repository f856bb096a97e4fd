# SPDX-License-Identifier: Apache-2.0
"""Run seeds, one after the other: `run_seed` for tests, `main` for scripts/simulate.sh."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simulation.cluster import Cluster
from simulation.mutations import Mutation
from simulation.settings import Settings, draw
from simulation.world import Violation
from vllm_ascend_pd.errors import LocalProtocolError


@dataclass(slots=True)
class Result:
    seed: int
    transfers: int
    violation: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    stats: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)


def run_seed(
    seed: int, mutation: Mutation | None = None, settings: Settings | None = None, *, tracing: bool = False
) -> Result:
    """One cluster from start to silence."""
    cluster = Cluster(seed, settings or draw(seed), mutation or Mutation(), tracing=tracing)
    world = cluster.world
    violation = ""
    try:
        last = cluster.load()
        t = cluster.settings.timers
        world.run(last + 20 * (cluster.hold_s + t.recv_deadline_s) + 3000)
        if not world.idle:
            raise Violation("promise 4: it never becomes quiet")
        cluster.check_end()
    except (Violation, LocalProtocolError) as found:
        violation = f"{type(found).__name__}: {found}"
        world.log("", "VIOLATION", violation)
    return Result(seed, cluster.transfers, violation, world.faults, world.stats, world.trace)
