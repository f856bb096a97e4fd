# SPDX-License-Identifier: Apache-2.0
"""Listener of P's scheduler for offers of D's schedulers, in front of its book (core/book.py).

The scheduler's thread and the loop thread decide under one lock; messages are sent and the timer is set once it is
free. An engine that only holds blocks naps between empty steps (patience.py): `news` of a binding ends the nap, and the
next step carries it to every worker.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from vllm_ascend_pd.channel.frames import OF_SCHEDULERS
from vllm_ascend_pd.channel.listener import Listener
from vllm_ascend_pd.engine import Engine
from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.prefill.scheduler.bootstrap import Bootstrap
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.fitting import opened
from vllm_ascend_pd.protocol.auth import unseal
from vllm_ascend_pd.protocol.identity import Endpoint, dp_rank_of
from vllm_ascend_pd.protocol.meeting import Bound, Gone, Meeting, Offer
from vllm_ascend_pd.shared.loop import LoopThread

log = logging.getLogger(__name__)

START_S = 10.0
CLOSE_GRACE_S = 5.0


class Reception:
    """Listener of P's scheduler. `news` is called from any thread, `count` with each fault of the channel.

    The constructor raises PD-CTRL-001 if it cannot listen.
    """

    def __init__(self, engine: Engine, book: PushBook, news: Callable[[], None], count: Callable[[str], None]) -> None:
        self._engine, self._book, self._news = engine, book, news
        self._lock = threading.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._wake: float | None = None  # the time for which it is set, or will be
        self._loop = LoopThread("pd-reception")
        self.bootstrap: Bootstrap | None = None
        self._listener = Listener(
            host=engine.host,
            port=engine.listening_port,
            incarnation=engine.incarnation,
            secrets=engine.secrets,
            on_message=self._on_message,
            on_gone=self._gone,
            on_back=lambda incarnation: None,
            count=count,
            accepts=OF_SCHEDULERS,
        )
        try:
            self.endpoint = self._loop.call(self._start(), START_S)
        except (PdError, TimeoutError):
            self._loop.stop(CLOSE_GRACE_S)
            raise
        log.info("prefill takes offers of decode engines on %s", self.endpoint)

    async def _start(self) -> Endpoint:
        bound = await self._listener.start()
        endpoint = Endpoint(self._engine.known_as, bound.port)
        port = self._engine.config.meet.bootstrap_port
        if port and not dp_rank_of(self._engine.incarnation):
            self.bootstrap = Bootstrap(self._engine.host, port, self._engine.listeners(bound.port))
            try:
                await self.bootstrap.start()
            except PdError:
                await self._listener.close()
                raise
        return endpoint

    async def _stop(self) -> None:
        if self.bootstrap is not None:
            await self.bootstrap.close()
        await self._listener.close()

    @contextmanager
    def deciding(self) -> Iterator[float]:
        """Hold the lock while the book decides, and yield the time. Its messages are sent once the lock is free."""
        with self._lock:
            yield time.monotonic()
            said, wake, must_step = self._book.take_messages(), self._book.next_wake(), self._book.must_step()
            moved, self._wake = wake != self._wake, wake
        for peer, message in said:
            if isinstance(message, Bound | Gone):
                facts = {"ended": message.ended} if isinstance(message, Bound) else {"code": message.failure.code}
                trace.emit(type(message).__name__.lower(), transfer=str(message.transfer), **facts)
            self._loop.post(self._listener.send, peer, message)
        if moved:
            self._loop.post(self._arm)
        if must_step:
            self._news()

    def close(self) -> None:
        """Stop listening, and end the loop thread. Idempotent."""
        if self._loop.alive:
            try:
                self._loop.call(self._stop(), CLOSE_GRACE_S)
            except TimeoutError:
                log.error("the side channel did not close within %.0f s", CLOSE_GRACE_S)
        self._loop.stop(CLOSE_GRACE_S)

    # -- the loop thread

    def _on_message(self, peer: Hashable, message: Meeting) -> None:
        reservation = None
        if isinstance(message, Offer):
            offered = opened(message, lambda sealed: unseal(sealed, self._engine.secrets))
            if isinstance(offered, Gone):
                self._listener.send(peer, offered)
                return
            reservation = offered
        with self.deciding() as now:
            self._book.message(now, peer, message, reservation)

    def _gone(self, incarnation: str) -> None:
        with self.deciding():
            self._book.gone(incarnation)

    def _tick(self) -> None:
        with self.deciding() as now:
            self._wake = None  # it has fired: whatever is next, it must be set again
            self._book.tick(now)

    def _arm(self) -> None:
        """Set the timer as it was decided last: threads may post in another order than they have decided."""
        with self._lock:
            wake = self._wake
        if self._timer is not None:
            self._timer.cancel()
        loop = self._loop.loop
        delay = None if wake is None else max(0.0, wake - time.monotonic())
        self._timer = None if delay is None else loop.call_later(delay, self._tick)
