# SPDX-License-Identifier: Apache-2.0
"""Requests of other routers than our metaserver (docs/routers.md lists them).

Such a router passes on what D posts (`PassingRouter`), or it names a P that waits for D's offer (`Meet`): connections
to P's schedulers, and the timer and outcomes of core/offers.py, are here too. The scheduler makes this with the first
request of such a router.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Collection, Hashable
from typing import Any

from vllm_ascend_pd.channel.dialer import Dialer
from vllm_ascend_pd.channel.frames import OF_SCHEDULERS
from vllm_ascend_pd.channel.link import Context
from vllm_ascend_pd.decode.scheduler.core.answers import Outcome
from vllm_ascend_pd.decode.scheduler.core.offers import Offers, SendMessage
from vllm_ascend_pd.decode.scheduler.core.routes import KvRoute
from vllm_ascend_pd.decode.scheduler.metaserver import MetaserverClient
from vllm_ascend_pd.engine import Engine, request_hash
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.protocol.dialects import Meet, PassingRouter, read_meet, read_passing_router
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId
from vllm_ascend_pd.protocol.meeting import OFFER_ROOM, Gone, Meeting, Offer, Unwanted
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES
from vllm_ascend_pd.shared.loop import LoopThread


def read_route(engine: Engine, request: Any, routers: Collection[str]) -> KvRoute | PdError | None:
    """Return what another router says of a request's KV, or why it is refused; None if no router says anything."""
    params, request_id = request.kv_transfer_params, request.request_id
    if "metaserver" in params:
        return read_passing_router(params, request_id, routers)
    prompt = request.num_prompt_tokens, request_hash(request)
    return read_meet(params, request_id, prompt, engine.config.meet.prefill_listeners, engine.secrets)


class ForeignRouters:
    """Orders for their requests, from any thread. Outcomes come on the loop thread, like a metaserver's."""

    def __init__(
        self,
        engine: Engine,
        client: MetaserverClient,
        loop: LoopThread,
        on_outcome: Callable[[Hashable, Outcome], None],
        count: Callable[[str], None],
    ) -> None:
        self._engine, self._client, self._loop, self._on_outcome = engine, client, loop, on_outcome
        self._offers = Offers(engine.config.timers)
        self._timer: asyncio.TimerHandle | None = None
        dialing = Context(
            incarnation=engine.incarnation,
            name="decode scheduler",
            secrets=engine.secrets,
            on_message=self._on_message,
            on_unreachable=self._on_unreachable,
            count=count,
            accepts=OF_SCHEDULERS,
        )
        self._dialer = Dialer(dialing)

    def reserve(self, route: KvRoute, transfer: TransferId, sealed: Callable[[], bytes]) -> None:
        """Post a sealed reservation, or offer it until an outcome ends the offer."""
        if isinstance(route, PassingRouter):
            deadline = self._engine.config.timers.recv_deadline_s

            def body() -> dict[str, Any]:
                return route.body(base64.b64encode(sealed()).decode())

            self._client.reserve(transfer, route.router, body, deadline, query=route.query, silent_s=deadline)
        elif isinstance(route, Meet):
            self._offer(route, transfer, sealed())

    def _offer(self, route: Meet, transfer: TransferId, sealed: bytes) -> None:
        if len(sealed) <= MAX_MESSAGE_BYTES - OFFER_ROOM:
            listener, offer = route.listener, Offer(transfer, sealed, route.source, route.name)
            self._loop.post(self._decide, lambda now: self._offers.offer(now, listener, offer))
        else:
            error = PdError("PD-CTRL-002", why=f"a reservation of {len(sealed)} bytes does not fit an offer")
            self._on_outcome(transfer, Outcome("failed", Failure.of(error)))

    def forget(self, transfer: TransferId) -> None:
        """Drop an offer. Nothing is reported of it any more, except an outcome already under way."""
        self._loop.post(self._decide, lambda _: self._offers.forget(transfer))

    def not_fetched(self, route: KvRoute) -> None:
        """Notify a P that no offer will follow."""
        if isinstance(route, Meet):
            listener, unwanted = route.listener, Unwanted(self._engine.incarnation, route.source, route.name)
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
