# SPDX-License-Identifier: Apache-2.0
"""All pushes of one P worker as one machine: events in, effects out.

`now` is an argument; the caller holds its own lock, takes the effects, and acts on them once the lock is free. Nothing
here waits. In the order of what happens to a push: planning.py, offering.py, claiming.py, closing.py.
register.py has the records that these change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.geometry.regroup import Room
from vllm_ascend_pd.prefill.worker.core.batches import Bases
from vllm_ascend_pd.prefill.worker.core.claiming import PushClaims
from vllm_ascend_pd.prefill.worker.core.closing import PushClosings
from vllm_ascend_pd.prefill.worker.core.exchanges import Exchanges
from vllm_ascend_pd.prefill.worker.core.offering import PushOffers
from vllm_ascend_pd.prefill.worker.core.planning import PushPlans
from vllm_ascend_pd.prefill.worker.core.push import Push
from vllm_ascend_pd.prefill.worker.core.register import PushRegister, PushSite, Writable
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.messages import Message
from vllm_ascend_pd.protocol.push import Sender
from vllm_ascend_pd.regroup.core.staging import Staging


class Pushes(PushRegister):
    """Pushes of one worker. `staging` and `room` are for exchanges, else None."""

    # The simulator replaces these to run without one of the rules.
    sender_type = Sender
    plans_type = PushPlans
    offers_type = PushOffers
    claims_type = PushClaims
    closings_type = PushClosings

    def __init__(
        self,
        config: PushConfig,
        site: PushSite,
        cache: CacheGeometry,
        bases: Bases,
        staging: Staging | None = None,
        room: Room | None = None,
        tracing: Callable[[], bool] = lambda: True,
    ) -> None:
        timers = config.timers
        sender = self.sender_type(
            incarnation=site.incarnation, contributor=site.contributor, timers=timers, quiet_s=config.quiet_s
        )
        super().__init__(site, sender, staging, tracing)
        self.closings = self.closings_type(self.records)
        self.plans = self.plans_type(self, config.regroup, cache, room)
        self.offers = self.offers_type(self)
        self.claims = self.claims_type(self, config.wire.fuse_layers, bases)
        self._drain_s = timers.preempt_drain_s
        self._preempted: list[str] = []  # pushes that are being drained
        self._drained_by = 0.0  # at the latest

    @property
    def making(self) -> Exchanges:
        """Exchanges of an engine that makes some."""
        if self.exchanges is None:
            raise LocalProtocolError("an exchange is made before the first step, or without memory for it")
        return self.exchanges

    # -- preemption

    def preempt(self, now: float, names: Iterable[str]) -> None:
        """Submit nothing more of these pushes until they start over: their blocks will be overwritten."""
        self._preempted, self._drained_by = list(names), now + self._drain_s
        for push in self.unclosed(self._preempted):
            push.paused = True

    def drain(self, now: float) -> float:
        """Return for how many seconds to wait, at most, for writes that read preempted blocks; then call again.

        At 0 the pushes have been restarted or failed, and their blocks may be overwritten.
        """
        left = self._drained_by - now
        if left > 0 and any(push.out for push in self.unclosed(self._preempted)):
            return left
        names, self._preempted = self._preempted, []
        for push in self.named(names):
            self._start_over(now, push)
        return 0.0

    def _start_over(self, now: float, push: Push) -> None:
        """Restart a push whose blocks are lost now. One with writes in flight fails instead."""
        push.paused = False
        self.let_go(push)
        push.forget()  # also if it has closed here: it still takes part in plans
        if push.out:
            self.abort(now, push.name, Failure("PD-XFER-001", "writes did not return before preemption"))
        elif not push.closed:
            self.do(now, self.sender.restart(now, push))

    # -- the side channel and time

    def message(self, now: float, peer: Endpoint, message: Message) -> None:
        self.do(now, self.sender.message(now, peer, message))
        if self.sender.anything_claimable:  # READY may have granted authority
            self.effects.append(Writable())

    def unreachable(self, now: float, peer: Endpoint, detail: str) -> None:
        self.do(now, self.sender.unreachable(now, peer, detail))

    def tick(self, now: float) -> None:
        self.do(now, self.sender.tick(now))

    def next_wake(self) -> float | None:
        """Return when `tick` must be called at the latest."""
        return self.sender.next_wake()
