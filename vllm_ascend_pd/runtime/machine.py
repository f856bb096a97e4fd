# SPDX-License-Identifier: Apache-2.0
"""P's Sender machine behind one lock, the pushes it knows, and the side channel it speaks through.

Every thread decides in `deciding()`: the lock is held while the machine is asked, and what it wants done is done once the
lock is free.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_ascend_pd.channel.dialer import Dialer
from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.errors import LocalProtocolError, PdError, one_line
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.protocol import actions as act
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.messages import Endpoint, Message
from vllm_ascend_pd.protocol.push import PushOrder, Sender
from vllm_ascend_pd.runtime.loop import LoopThread
from vllm_ascend_pd.runtime.work import PushWork

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushSite:
    """Who this worker is."""

    incarnation: str
    contributor: Contributor
    model: str


@dataclass(slots=True)
class Deciding:
    """The machine, held; `actions` are performed once it is let go."""

    sender: Sender
    actions: list[act.Action]


class PushMachine:
    """Owns the loop thread and the dialer."""

    def __init__(self, site: PushSite, timers: Timers, quiet_s: float, secrets: Secrets | None) -> None:
        self._site, self._timers, self._quiet_s = site, timers, quiet_s
        self._on_closed: Callable[[str], None] = lambda push: None
        self._on_news: Callable[[], None] = lambda: None
        self.lock = threading.Lock()
        self.returned = threading.Condition(self.lock)  # a write came home
        self.works: dict[str, PushWork] = {}  # open pushes; guarded by the lock
        self.tally = Tally()
        self.leads = site.contributor == Contributor(0, 0)  # who tells the times of a push
        self.dead: Exception | None = None  # why nothing can be written any more
        self._push_of: dict[str, str] = {}  # request id → push
        self._closed: set[str] = set()  # pushes closed, not reported yet
        self._ended: set[str] = set()  # requests that vLLM has finished, not reported yet
        self._failures: list[tuple[str, str]] = []  # transfer and code, not told to the scheduler yet
        self._sender: Sender | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._armed = float("inf")
        self._loop = LoopThread(f"pd-push-{site.contributor}")
        self._dialer = Dialer(
            incarnation=site.incarnation,
            name=str(site.contributor),
            secrets=secrets,
            on_message=self._on_message,
            on_unreachable=self._on_unreachable,
        )

    def attend(self, *, on_closed: Callable[[str], None], on_news: Callable[[], None]) -> None:
        """Before the first step. `on_closed` is told under the lock, `on_news` without it."""
        self._on_closed, self._on_news = on_closed, on_news

    def check(self) -> None:
        """Raise PD-XFER-007 once a dead pusher has left nothing open: blocks are free, and nothing can be pushed again."""
        if self.dead is not None and not self.works:
            raise PdError("PD-XFER-007", why=self.dead)

    @property
    def started(self) -> bool:
        return self._sender is not None

    def start(self, engine: CacheGeometry) -> None:
        """The engine's geometry is known with its first step."""
        self._sender = Sender(
            incarnation=self._site.incarnation,
            contributor=self._site.contributor,
            model=self._site.model,
            geometry=engine,
            timers=self._timers,
            quiet_s=self._quiet_s,
        )

    def close(self, timeout: float, *, quiet: bool) -> None:
        """Idempotent. `quiet`: nothing of ours lands any more, so D need not revoke to be sure of it."""
        if self._loop.alive:
            try:
                self._loop.call(self._dialer.close(quiet=quiet), timeout=timeout)
            except TimeoutError:
                log.error("the side channel did not close within %.0f s", timeout)
        self._loop.stop(timeout)

    # -- pushes

    def open(self, work: PushWork, order: PushOrder) -> None:
        work.opened = time.monotonic()
        with self.deciding() as deciding:
            self.works[work.push] = work
            self._push_of[work.request_id] = work.push
            deciding.actions += deciding.sender.open(time.monotonic(), order)
        if self.dead is not None:
            self.abort(work.push, "PD-XFER-003", f"the pusher died: {self.dead}")

    def abort(self, push: str, code: str, detail: str) -> None:
        if push in self.works:
            with self.deciding() as deciding:
                deciding.actions += deciding.sender.abort(time.monotonic(), push, code, detail)

    def abort_all(self, code: str, detail: str) -> None:
        for push in list(self.works):
            self.abort(push, code, detail)

    def take_finished(self, ended: Iterable[str]) -> set[str]:
        """Requests whose pushes are closed, each once; `ended` are requests that vLLM has finished."""
        with self.lock:
            self._ended.update(request for request in ended if request in self._push_of)
            ready = {request for request in self._ended if self._push_of[request] in self._closed}
            self._ended -= ready
            for request in ready:
                self._closed.discard(self._push_of.pop(request))
        return ready

    def take_failures(self) -> list[tuple[str, str]]:
        """Transfers whose push failed here, with the code, since the last call."""
        with self.lock:
            failures, self._failures = self._failures, []
        return failures

    # -- deciding under the lock, acting after it

    @contextmanager
    def deciding(self) -> Iterator[Deciding]:
        """Hold the lock while the machine decides; perform the actions it asks for once the lock is free.

        What was decided before something raised holds as well: a push that has closed must be reported.
        """
        decided: list[act.Action] = []
        wake: float | None = None
        try:
            with self.lock:
                sender = self._sender
                if sender is None:
                    raise LocalProtocolError("the machine is asked before its first step")
                try:
                    yield Deciding(sender, decided)
                finally:
                    wake = self._settle(sender, decided)
        finally:
            for action in decided:
                if isinstance(action, act.Send):
                    self._loop.post(self._dialer.send, action.peer, action.message)
                elif isinstance(action, act.Note):
                    self._note(action)
            if wake is not None:
                self._loop.post(self._arm, wake)

    def _settle(self, sender: Sender, decided: list[act.Action]) -> float | None:
        """Under the lock. When to wake, if that is earlier than the timer is armed for."""
        for action in decided:
            if isinstance(action, act.Closed):
                self._close_push(action)
        wake = sender.next_wake()
        if wake is None or wake >= self._armed - 0.001:
            return None
        self._armed = wake
        return wake

    def _note(self, note: act.Note) -> None:
        trace.emit(note.stage, **note.facts)
        if self.leads and note.stage == "ready" and isinstance(waited := note.facts.get("waited"), float):
            self.tally.time("ready_wait_seconds", waited)

    def _close_push(self, action: act.Closed) -> None:
        work = self.works.pop(action.push, None)
        if work is None:
            return
        self._closed.add(action.push)
        self._on_closed(action.push)
        transfer = str(work.reservation.transfer)
        why = action.failure or Failure("")
        trace.emit("push_closed", transfer=transfer, ok=action.ok, code=why.code, detail=why.detail)
        now = time.monotonic()
        if action.ok and self.leads:
            self.tally.time("xfer_time_seconds", now - work.opened)
            self.tally.time("exposed_time_seconds", max(0.0, now - work.sealed) if work.sealed else 0.0)
        if not action.ok:
            self._failures.append((transfer, why.code))
            log.warning("push of transfer %s", one_line(f"{transfer} failed: {why}"))

    # -- the loop thread

    def _on_message(self, endpoint: Endpoint, message: Message) -> None:
        with self.deciding() as deciding:
            deciding.actions += deciding.sender.message(time.monotonic(), endpoint, message)
        self._on_news()

    def _on_unreachable(self, endpoint: Endpoint, detail: str) -> None:
        with self.deciding() as deciding:
            deciding.actions += deciding.sender.unreachable(time.monotonic(), endpoint, detail)

    def _tick(self) -> None:
        self._timer, self._armed = None, float("inf")
        with self.deciding() as deciding:
            deciding.actions += deciding.sender.tick(time.monotonic())
        self._on_news()

    def _arm(self, wake: float) -> None:
        """Only ever earlier: two threads that decide one after the other may post in the other order."""
        loop = self._loop.loop
        at = loop.time() + max(0.0, wake - time.monotonic())
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._tick)
