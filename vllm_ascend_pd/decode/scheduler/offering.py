# SPDX-License-Identifier: Apache-2.0
"""D's scheduler on the side channel: connections to P's schedulers, and the timer and outcomes of core/offers.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from vllm_ascend_pd.channel.dialer import Dialer
from vllm_ascend_pd.channel.frames import OF_SCHEDULERS
from vllm_ascend_pd.channel.link import Context
from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.decode.scheduler.core.answers import Outcome
from vllm_ascend_pd.decode.scheduler.core.offers import Offers, SendMessage
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId
from vllm_ascend_pd.protocol.meeting import Gone, Meeting, Offer, Unwanted
from vllm_ascend_pd.shared.loop import LoopThread


class Offering:
    """Offers of one scheduler. `offer`, `forget` and `send_unwanted` may be called from any thread.

    Outcomes come on the loop thread, like those of a metaserver.
    """

    def __init__(
        self,
        timers: Timers,
        incarnation: str,
        secrets: Secrets | None,
        loop: LoopThread,
        on_outcome: Callable[[Hashable, Outcome], None],
        count: Callable[[str], None],
    ) -> None:
        self._loop, self._on_outcome = loop, on_outcome
        self._offers = Offers(timers)
        self._timer: asyncio.TimerHandle | None = None
        dialing = Context(
            incarnation=incarnation,
            name="decode scheduler",
            secrets=secrets,
            on_message=self._on_message,
            on_unreachable=self._on_unreachable,
            count=count,
            accepts=OF_SCHEDULERS,
        )
        self._dialer = Dialer(dialing)

    def offer(self, listener: Endpoint, offer: Offer) -> None:
        """Offer a reservation to a P, until an outcome ends the offer."""
        self._loop.post(self._decide, lambda now: self._offers.offer(now, listener, offer))

    def forget(self, transfer: TransferId) -> None:
        """Drop an offer. Nothing is reported of it any more, except an outcome already under way."""
        self._loop.post(self._decide, lambda _: self._offers.forget(transfer))

    def send_unwanted(self, listener: Endpoint, unwanted: Unwanted) -> None:
        """Notify a P that no offer will follow."""
        self._loop.post(self._decide, lambda _: self._offers.send_unwanted(listener, unwanted))

    # -- the loop thread

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._dialer.close()

    def _on_message(self, listener: Endpoint, message: Meeting) -> None:
        if isinstance(message, Gone):  # perhaps the name led to another process than that with the source
            self._dialer.doubt(listener)
        self._decide(lambda now: self._offers.message(now, listener, message))

    def _on_unreachable(self, listener: Endpoint, detail: str) -> None:
        self._decide(lambda now: self._offers.unreachable(now, listener, detail))

    def _decide(self, event: Callable[[float], None]) -> None:
        """Have the offers decide about an event, which takes the time, then do what they want done."""
        event(self._loop.loop.time())
        for effect in self._offers.take_effects():
            if isinstance(effect, SendMessage):
                self._dialer.send(effect.to, effect.message)
            else:
                self._on_outcome(effect.transfer, effect.outcome)
        if self._timer is not None:
            self._timer.cancel()
        wake = self._offers.next_wake()
        self._timer = None if wake is None else self._loop.loop.call_at(wake, self._decide, self._offers.tick)
