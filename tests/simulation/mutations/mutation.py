# SPDX-License-Identifier: Apache-2.0
"""One rule of the protocol that is removed: what the simulator takes in place of the package's part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from simulation.prefill import SimulatedWriter
from simulation.settings import SimulationSettings, draw
from vllm_ascend_pd.decode.scheduler.core.first_tokens import TokenBook
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.worker.core.claiming import PushClaims
from vllm_ascend_pd.prefill.worker.core.closing import PushClosings
from vllm_ascend_pd.prefill.worker.core.offering import PushOffers
from vllm_ascend_pd.prefill.worker.core.planning import PushPlans
from vllm_ascend_pd.prefill.worker.core.pushes import Pushes
from vllm_ascend_pd.prefill.worker.steps import Steps
from vllm_ascend_pd.protocol.push import Sender
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.protocol.states import Cell


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mutation of the protocol. `Mutation()` changes nothing."""

    name: str = ""
    receiver: Callable[..., Receiver] = Receiver
    sender: Callable[..., Sender] = Sender
    book: Callable[..., PushBook] = PushBook
    loads: Callable[..., TokenBook] = TokenBook
    hasty_release: bool = False  # P frees a finished request's blocks at once
    blunt_revocation: bool = False  # D continues under the session that it has revoked
    core: type[Pushes] = Pushes
    plans: type[PushPlans] = PushPlans
    offers: type[PushOffers] = PushOffers
    claims: type[PushClaims] = PushClaims
    closings: type[PushClosings] = PushClosings
    writer: Callable[..., SimulatedWriter] = SimulatedWriter
    steps: Callable[..., Steps] = Steps
    # a world that needs the rule often enough
    world: Callable[[SimulationSettings], SimulationSettings] = lambda settings: settings
    divided: bool = False  # a world with context parallelism, which the others remove

    def pushes(self) -> type[Pushes]:
        """Return the core of P's workers with these parts."""

        class MutatedPushes(self.core):  # type: ignore[misc, name-defined]
            sender_type = self.sender
            plans_type = self.plans
            offers_type = self.offers
            claims_type = self.claims
            closings_type = self.closings

        return MutatedPushes

    def settings(self, seed: int) -> SimulationSettings:
        drawn = draw(seed)
        if self.name:
            drawn = drawn.settled() if self.divided else drawn.settled().undivided()
        return self.world(drawn)


def with_methods_of(machine: type[Any], table: Mapping[Any, Mapping[Any, Cell[Any]]]) -> Any:
    """Return the table with the methods of `machine` in place of the package's."""
    return {
        state: {event: replace(cell, effect=getattr(machine, cell.effect.__name__)) for event, cell in cells.items()}
        for state, cells in table.items()
    }
