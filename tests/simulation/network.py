# SPDX-License-Identifier: Apache-2.0
"""The side channel under the protocol's assumptions: messages are lost, doubled, reordered, and late across restarts.

The end of a connection may or may not be noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from simulation.world import Process, World
from vllm_ascend_pd.protocol.meeting import Meeting
from vllm_ascend_pd.protocol.messages import Message

if TYPE_CHECKING:
    from simulation.decode import DecodeRank
    from simulation.settings import Faults

M = TypeVar("M", Message, Meeting)


class Network:
    def __init__(self, world: World, faults: Faults) -> None:
        self._world = world
        self._faults = faults

    def send(
        self,
        sender: Process,
        receiver: Callable[[], Process | None],
        deliver: Callable[[M], None],
        message: M,
    ) -> None:
        """Send a message.

        `receiver` and `deliver` are called on arrival, when another incarnation may have that address.
        """
        world, faults, rng = self._world, self._faults, self._world.rng
        if sender.partitioned_until > world.now:
            return
        if world.chance(faults.drop):
            world.fault("message dropped")
            return
        copies = 1
        if world.chance(faults.double):
            world.fault("message doubled")
            copies = 2
        meant = receiver()
        for _ in range(copies):
            delay = rng.uniform(0.0001, 0.003)
            if world.chance(faults.late):
                world.fault("message late")
                delay = rng.choice((rng.uniform(0.1, 3.0), rng.uniform(3.0, 30.0), rng.uniform(30.0, 300.0)))
            world.after(delay, self._arrive, meant, receiver, deliver, message)

    def _arrive(
        self,
        meant: Process | None,
        receiver: Callable[[], Process | None],
        deliver: Callable[[M], None],
        message: M,
    ) -> None:
        process = receiver()
        if meant is not None and process is not meant and process is not None:
            self._world.fault("message across a restart")
        if process is not None and process.partitioned_until <= self._world.now:
            process.run(deliver, message)

    def died(self, process: Process, ranks: list[DecodeRank]) -> None:
        """Close the connections of a process that died, as the kernel does; connected peers notice it."""
        if self._world.chance(self._faults.silent_death):
            self._world.fault("death that is not reported")
            return
        for rank in ranks:
            rank.process.post(self._world.rng.uniform(0.0005, 0.3), rank.connection_ended, process.incarnation)

    def flap(self, process: Process, ranks: list[DecodeRank], back_after: float) -> None:
        """End the connection of a process that lives, and connect again."""
        for rank in ranks:
            rank.process.post(0.001, rank.connection_ended, process.incarnation)
            rank.process.post(0.001 + back_after, rank.connection_back, process.incarnation)
