# SPDX-License-Identifier: Apache-2.0
"""P's worker at run time: the core (core/pushes.py) behind one lock, and the threads around it.

The engine's thread plans steps and announces layers (steps.py), the writer's thread writes (writer.py), the exchange's
thread exchanges (exchanger.py), the loop thread talks to D's workers and keeps the timers. Each calls the core within
`deciding()`: the lock is held meanwhile, and the core's effects are carried out once it is free. The engine's thread
waits only in `preempt`, for a bounded time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_ascend_pd.channel.dialer import Dialer
from vllm_ascend_pd.channel.link import Context
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.prefill.worker.core.pushes import Pushes
from vllm_ascend_pd.prefill.worker.core.register import Effect, MetricValue, PushSite, Writable
from vllm_ascend_pd.prefill.worker.exchanger import Exchanger
from vllm_ascend_pd.prefill.worker.steps import Steps
from vllm_ascend_pd.prefill.worker.sums import PushSums
from vllm_ascend_pd.prefill.worker.writer import Writer, WriterThread
from vllm_ascend_pd.protocol import actions as act
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.compose import not_meant
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.messages import Message
from vllm_ascend_pd.regroup.resources import RegroupResources
from vllm_ascend_pd.roles import WorkerNews
from vllm_ascend_pd.shared.loop import LoopThread
from vllm_ascend_pd.transport.base import Wire

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
CLOSED = "push_closed"


class PushRuntime:
    """Owner of the core, its lock, all threads of one P worker, and the transfer engine."""

    def __init__(
        self,
        config: PushConfig,
        site: PushSite,
        caches: Caches,
        device: Device,
        wire: Wire,
        secrets: Secrets | None,
        regroup: RegroupResources | None = None,
    ) -> None:
        self._config, self.wire = config, wire
        self.tally = Tally()
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)  # a write has ended, or a slot is free
        self.timer: asyncio.TimerHandle | None = None
        self._armed = float("inf")
        staging = regroup.staging if regroup is not None else None
        wire.register([*caches.storages, *([staging.region] if staging is not None else [])])
        push_sums = PushSums(caches, device, site.contributor.rank) if config.wire.verify == "full" else None
        self.core = Pushes(
            config,
            site,
            caches.geometry,
            caches.bases,
            staging,
            regroup.room if regroup is not None else None,
            tracing=trace.enabled,
        )
        self.loop = LoopThread(f"pd-push-{site.contributor}")
        dialing = Context(
            incarnation=site.incarnation,
            name=str(site.contributor),
            secrets=secrets,
            on_message=self._on_message,
            on_unreachable=self._on_unreachable,
            count=lambda reason: self.tally.count("num_side_channel_faults", reason),
        )
        self._dialer = Dialer(dialing)
        self.writer = Writer(self.deciding, wire, time.monotonic, push_sums)
        wire.listen(self._last_message_at)
        self.writing = WriterThread(f"pd-writer-{site.contributor}", self.writer, device)
        self.exchanger: Exchanger | None = None
        if regroup is not None:
            name = f"pd-regroup-{site.contributor.rank}"
            waits = self.deciding, time.monotonic, self._changed.wait
            self.exchanger = Exchanger(name, *waits, regroup.exchange, regroup.staging, device, self.writing.put)
        g, put = caches.geometry, self.writing.put
        asked = self.deciding, device.record, put, time.monotonic
        self.steps = Steps(g.layers, *asked, self.exchanger, drafts=g.drafts, states=g.states, titles=g.layer_labels)

    # -- the engine's thread

    def stats(self) -> dict[str, Any] | None:
        self.tally.totals("num_protocol_events", self.core.sender.counters)
        return self.tally.take()

    def preempt(self, pushes: Collection[str]) -> None:
        """Wait a bounded time for writes that read preempted blocks; then the pushes start over or fail."""
        with self.deciding() as core:
            core.preempt(time.monotonic(), pushes)
            while (left := core.drain(time.monotonic())) > 0:
                self._changed.wait(left)

    def take_news(self) -> WorkerNews:
        """Return exchanges that this worker wants to be made again, and pushes that failed here since the last call."""
        with self.lock:
            return WorkerNews(frozenset(self.core.plans.take_missed()), frozenset(self.core.closings.take_failures()))

    def check(self) -> None:
        """Raise PdError if this worker can never push again and has nothing left to end."""
        with self.lock:
            self.core.check()

    def take_finished(self, ended: Iterable[str]) -> set[str]:
        """Return requests whose blocks may be freed, each once; `ended` are requests that vLLM has finished."""
        with self.lock:
            return self.core.closings.take_finished(ended)

    def close(self) -> None:
        """Notify peers of what is cut off, stop the threads, and close the transfer engine. Idempotent."""
        with self.deciding() as core:
            core.abort_all(time.monotonic(), Failure("PD-XFER-004", "the prefill engine shuts down"))
        if self.exchanger is not None:
            self.exchanger.close(CLOSE_GRACE_S)
        # Once the thread has ended, no write of this worker lands any more: D need not revoke access to be sure.
        quiet = self.writing.stop(CLOSE_GRACE_S)
        self.wire.close()
        if self.loop.alive:
            try:
                self.loop.call(self._dialer.close(quiet=quiet), timeout=CLOSE_GRACE_S)
            except TimeoutError:
                log.error("the side channel did not close within %.0f s", CLOSE_GRACE_S)
        self.loop.stop(CLOSE_GRACE_S)

    # -- deciding under the lock, acting after it

    @contextmanager
    def deciding(self) -> Iterator[Pushes]:
        """Hold the lock while the core decides; carry out its effects once the lock is free.

        Effects that were decided before an exception are carried out too: a push that has closed must be reported.
        """
        effects: list[Effect] = []
        wake: float | None = None
        try:
            with self.lock:
                try:
                    yield self.core
                finally:
                    effects = self.core.take_effects()
                    self._account(effects)
                    wake = self._earlier()
                    self._changed.notify_all()
        finally:
            for effect in effects:
                self._act(effect)
            if wake is not None:
                self.loop.post(self.arm, wake)

    def _account(self, effects: list[Effect]) -> None:
        """Trace and count effects under the lock: a push's end must be visible before its blocks are reported free."""
        for effect in effects:
            if isinstance(effect, MetricValue):
                self.tally.record(effect.metric, effect.value)
            elif isinstance(effect, act.Note) and effect.stage == CLOSED:
                trace.emit(CLOSED, **effect.facts)
                if not effect.facts["ok"]:
                    words = "{transfer} failed: {code} {detail}".format(**effect.facts)
                    log.warning("push of transfer %s", one_line(words))

    def _earlier(self) -> float | None:
        """Return when to wake if that is earlier than the timer is set for. Called under the lock."""
        wake = self.core.next_wake()
        if wake is None or wake >= self._armed - 0.001:
            return None
        self._armed = wake
        return wake

    def _act(self, effect: Effect) -> None:
        if isinstance(effect, act.Send):
            self.loop.post(self._dialer.send, effect.peer, effect.message)
        elif isinstance(effect, Writable):
            self.writing.nudge()
        elif isinstance(effect, act.Note) and effect.stage != CLOSED:
            trace.emit(effect.stage, **effect.facts)

    # -- the loop thread

    def _on_message(self, endpoint: Endpoint, message: Message) -> None:
        if not_meant(message):
            self._dialer.doubt(endpoint)
        with self.deciding() as core:
            core.message(time.monotonic(), endpoint, message)

    def _on_unreachable(self, endpoint: Endpoint, detail: str) -> None:
        with self.deciding() as core:
            core.unreachable(time.monotonic(), endpoint, detail)

    def _tick(self) -> None:
        self.timer, self._armed = None, float("inf")
        with self.deciding() as core:
            core.tick(time.monotonic())

    def arm(self, wake: float) -> None:
        """Set the timer, but never to a later time: threads may post in another order than they have decided."""
        loop = self.loop.loop
        at = loop.time() + max(0.0, wake - time.monotonic())
        if self.timer is not None:
            if self.timer.when() <= at:
                return
            self.timer.cancel()
        self.timer = loop.call_at(at, self._tick)

    # -- the writer's thread

    def _last_message_at(self, session: str) -> float | None:
        """Return, for the transport, when the D rank behind a session last sent anything."""
        peer = next((batch.peer for batch in self.writer.in_flight if batch.session == session), None)
        if peer is None:
            return None
        with self.lock:
            return self.core.sender.last_message_at(peer)
