# SPDX-License-Identifier: Apache-2.0
"""Orders of P's scheduler for its workers, which go out with the next step.

They are incremental: new blocks and a token range, never the whole list again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.metadata import MissedExchange, PrefillStep, PushAbort, PushSlice, PushStart

FORCED_STEPS = 8  # empty steps forced after a catch-up: what is missed still is ordered without waiting for requests


@dataclass(slots=True)
class StepOrders:
    """Orders of one step."""

    starts: list[PushStart] = field(default_factory=list)
    slices: list[PushSlice] = field(default_factory=list)
    aborts: list[PushAbort] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    catch_ups: set[MissedExchange] = field(default_factory=set)
    computed: list[PushSlice] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)

    @property
    def urgent(self) -> bool:
        """True if the workers wait for them, although no request may be scheduled."""
        return bool(self.catch_ups or self.computed or self.freed)

    def begins(self, push: str) -> bool:
        return any(start.push == push for start in self.starts)

    def withdraw(self, push: str) -> None:
        """Take back the begin of a push."""
        self.starts = [start for start in self.starts if start.push != push]
        self.computed = [push_slice for push_slice in self.computed if push_slice.push != push]

    def end(self, push: str) -> None:
        """Say with the begin of a push that its request has ended: vLLM may report that before the step is sent."""
        self.starts = [replace(start, ended=True) if start.push == push else start for start in self.starts]

    def step(self, number: int, geometry: CacheGeometry | None) -> PrefillStep:
        """Return the step's metadata. With `computed` it has two numbers, of which `number` is the second."""
        return PrefillStep(
            number=number,
            geometry=geometry if self.starts else None,
            starts=tuple(self.starts),
            slices=tuple(self.slices),
            aborts=tuple(self.aborts),
            preempted=tuple(self.preempted),
            ended=tuple(self.ended),
            catch_ups=tuple(sorted(self.catch_ups)),
            computed=tuple(self.computed),
            before=number - 1 if self.computed else 0,
            freed=tuple(self.freed),
        )
