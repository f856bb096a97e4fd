# SPDX-License-Identifier: Apache-2.0
"""The pushes of one P worker on record: what the protocol's machine asks for them, and what they hold.

The other parts of the core (planning.py, offering.py, claiming.py) change the same records through `do` and `abort`;
closing.py has their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from vllm_ascend_pd.errors import LocalProtocolError, PdError
from vllm_ascend_pd.prefill.worker.core.closing import PushClosings
from vllm_ascend_pd.prefill.worker.core.exchanges import Exchanges
from vllm_ascend_pd.prefill.worker.core.push import Push, Unit
from vllm_ascend_pd.protocol import actions as act
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.push import Sender
from vllm_ascend_pd.regroup.core.staging import Staging


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A value for the metric of that name."""

    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class Writable:
    """Request that the writer looks again: something may have become writable."""


Effect: TypeAlias = act.Action | MetricValue | Writable


@dataclass(frozen=True, slots=True)
class PushSite:
    """Identity of this worker."""

    incarnation: str
    contributor: Contributor
    model: str

    @property
    def leads(self) -> bool:
        """True for the one worker that reports the times of a push for all."""
        return self.contributor == Contributor(0, 0)


class PushRegister:
    """Pushes of one worker, from their start until they have closed here and the scheduler is done with them."""

    closings: PushClosings

    def __init__(self, site: PushSite, sender: Sender, staging: Staging | None, tracing: Callable[[], bool]) -> None:
        self.site, self.sender, self.staging = site, sender, staging
        self._tracing = tracing  # whether the notes that cost time are read
        self.records: dict[str, Push] = {}  # by name
        self.effects: list[Effect] = []  # taken by `take_effects`
        self.exchanges: Exchanges | None = None  # from the first step on, in an engine that can make some
        self.dead = ""  # why nothing can be written any more

    def named(self, names: Iterable[str]) -> list[Push]:
        return [push for name in names if (push := self.records.get(name)) is not None]

    def unclosed(self, names: Iterable[str]) -> list[Push]:
        return [push for push in self.named(names) if not push.closed]

    # -- effects

    def take_effects(self) -> list[Effect]:
        """Return the effects, in order, each once."""
        effects, self.effects = self.effects, []
        return effects

    def measure(self, metric: str, value: float) -> None:
        self.effects.append(MetricValue(metric, value))

    def note(self, stage: str, facts: Callable[[], Mapping[str, object]]) -> None:
        if self._tracing():
            self.effects.append(act.Note(stage, facts()))

    def do(self, now: float, actions: Iterable[act.Action]) -> None:
        """Add the protocol's actions to the effects; apply at once what they change in this worker's own records."""
        for action in actions:
            self.effects.append(action)
            if isinstance(action, act.Note):
                self._apply_note(action)
            elif isinstance(action, act.Closed):
                self._close(now, action)

    def _apply_note(self, note: act.Note) -> None:
        if note.stage == "drain":
            self.let_go(self.records[str(note.facts["push"])])
        elif note.stage == "ready" and self.site.leads and isinstance(waited := note.facts.get("waited"), float):
            self.measure("ready_wait_seconds", waited)

    # -- the start and the end of a push

    def add(self, push: Push, *, request_ended: bool) -> None:
        self.records[push.name] = push
        self.closings.add(push, request_ended=request_ended)

    def abort(self, now: float, name: str, failure: Failure) -> None:
        for push in self.unclosed([name]):
            self.do(now, self.sender.abort(now, push, failure))

    def abort_all(self, now: float, failure: Failure) -> None:
        for push in self.unclosed(list(self.records)):
            self.abort(now, push.name, failure)

    def died(self, now: float, why: str) -> None:
        """Fail every push, and every later one: the writer has ended with an error."""
        self.dead = why
        self.measure("writers_dead", 1)
        self.abort_all(now, Failure("PD-XFER-003", f"the writer died: {why}"))

    def check(self) -> None:
        """Raise PD-XFER-007 if the writer is dead and all pushes have closed: nothing can be pushed any more."""
        if self.dead and all(push.closed for push in self.records.values()):
            raise PdError("PD-XFER-007", why=self.dead)

    def _close(self, now: float, closed: act.Closed) -> None:
        push = self.records.get(closed.push)
        if push is None:
            raise LocalProtocolError(f"push {closed.push} closed, but was never opened")
        push.sealing = False
        push.plans.clear()
        self.let_go(push)
        self.closings.close(push, closed.failure)
        why = closed.failure or Failure("")
        facts = {"transfer": str(push.transfer), "ok": closed.ok, "code": why.code, "detail": why.detail}
        self.effects.append(act.Note("push_closed", facts))
        if closed.ok and self.site.leads:
            self.measure("xfer_time_seconds", now - push.opened)
            self.measure("exposed_time_seconds", max(0.0, now - push.sealed_at) if push.sealed_at else 0.0)

    # -- staging slots: one goes back when the last share of it is written or dropped

    def drop(self, push: Push, worker: int, unit: Unit) -> None:
        slot_share = push.slot_shares.pop((worker, unit), None)
        if slot_share is not None and self.staging is not None:
            slot_share.slot.users -= 1
            if not slot_share.slot.users:
                self.staging.release(slot_share.slot)

    def let_go(self, push: Push) -> None:
        """Stop exchanges for a push, and drop what is staged for it, except what is being written."""
        if self.exchanges is not None:
            self.exchanges.forget(push)
        for worker, unit in list(push.slot_shares):
            if unit not in push.pairs[worker].coverage.out:
                self.drop(push, worker, unit)
