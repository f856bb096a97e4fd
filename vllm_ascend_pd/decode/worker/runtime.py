# SPDX-License-Identifier: Apache-2.0
"""D's worker at run time: the core (core/loads.py), its listener, gates and timers, all on one loop thread.

The engine's thread only posts to the loop and collects reports; leases and fences go on while the engine does not step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm_ascend_pd.channel.listener import Listener
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.decode.worker.core.loads import Loads
from vllm_ascend_pd.decode.worker.verifier import MemoryVerifier
from vllm_ascend_pd.device.base import Device
from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.device.tails import BlockTails
from vllm_ascend_pd.errors import PdError, one_line
from vllm_ascend_pd.metadata import DecodeStep, LoadEnd
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.observe.tally import Tally
from vllm_ascend_pd.protocol import actions as act
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.messages import Memory, Message
from vllm_ascend_pd.shared.event import Event
from vllm_ascend_pd.shared.loop import LoopThread
from vllm_ascend_pd.shared.wake import Ringer
from vllm_ascend_pd.transport.base import Target, with_code

log = logging.getLogger(__name__)

GATE_POLL_S = 0.001
START_S = 10.0
CLOSE_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Site:
    """Identity and address of this worker."""

    incarnation: str
    stage: int
    rank: int  # within its stage
    model: str
    host: str
    port: int
    advertise_host: str


class ReceiveRuntime:
    """Owner of the core, the loop thread, the listener and the transfer engine of one D worker."""

    def __init__(
        self,
        config: PushConfig,
        site: Site,
        caches: Caches,
        device: Device,
        target: Target,
        secrets: Secrets | None,
    ) -> None:
        self._caches, self._device, self.target = caches, device, target
        self._tails = BlockTails(caches, site.rank)
        self._reports: deque[LoadEnd] = deque()
        self._undrafted = ""  # the last P that was logged for lacking the draft model
        self._revoking_since: float | None = None
        self.tally = Tally()
        self._ringer = Ringer()
        self.timer: asyncio.TimerHandle | None = None
        self._gate_timer: asyncio.TimerHandle | None = None
        self.verifier = MemoryVerifier(caches, device, site.rank) if config.wire.verify == "full" else None
        self.core = Loads(
            config,
            site.stage,
            site.rank,
            site.model,
            caches.geometry,
            self.addresses,
            verify=self.verifier is not None,
        )
        target.register(caches.storages)
        self.loop = LoopThread(f"pd-receive-{site.stage}.{site.rank}")
        self._listener = Listener(
            host=site.host,
            port=site.port,
            incarnation=site.incarnation,
            secrets=secrets,
            on_message=self._on_message,
            on_gone=self._on_gone,
            on_back=self._on_back,
            count=lambda reason: self.tally.count("num_side_channel_faults", reason),
        )
        self.loop.post(device.attach_thread)  # gates are polled and transfer engines opened there
        try:
            bound = self.loop.call(self._listener.start(), timeout=START_S)
        except (PdError, TimeoutError):
            self.loop.stop(CLOSE_GRACE_S)
            target.close()
            raise
        self.endpoint = Endpoint(site.advertise_host or bound.host, bound.port)

    # -- the engine's thread

    def stats(self) -> dict[str, Any] | None:
        self.tally.totals("num_protocol_events", self.core.counters)
        since = self._revoking_since
        self.tally.level("revoking_seconds", int(time.monotonic() - since) if since is not None else 0)
        return self.tally.take()

    def step(self, step: DecodeStep) -> None:
        """Apply a step's metadata on the loop thread, in the order of the calls."""
        if step.empty:
            return
        for bind in step.binds:
            self._tails.clear(bind)
        # A step that is still in flight may write into these blocks: the next token of a request that has stopped.
        gate = self._device.record() if step.binds else None
        self.loop.post(self._apply, step, gate)

    def take_reports(self) -> list[LoadEnd]:
        """Return transfers that ended since the last call."""
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def close(self) -> None:
        """Stop listening, then close the transfer engine: nothing lands after that. Idempotent."""
        if self.loop.alive:
            try:
                self.loop.call(self._listener.close(), timeout=CLOSE_GRACE_S)
            except TimeoutError:
                log.error("the side channel did not close within %.0f s", CLOSE_GRACE_S)
        self.loop.stop(CLOSE_GRACE_S)
        self._ringer.close()
        self.target.close()

    # -- the loop thread

    def _apply(self, step: DecodeStep, gate: Event | None) -> None:
        self._ringer.aim(step.wake)
        with self._deciding():
            self.core.step(time.monotonic(), step, gate)
        self._look_again()

    def _look(self) -> None:
        with self._deciding():
            self.core.look(time.monotonic())
        self._look_again()

    def _look_again(self) -> None:
        if self._gate_timer is not None:
            self._gate_timer.cancel()
        self._gate_timer = self.loop.loop.call_later(GATE_POLL_S, self._look) if self.core.gates else None

    def _on_message(self, peer: Hashable, message: Message) -> None:
        with self._deciding():
            self.core.message(time.monotonic(), peer, message)

    def _on_gone(self, incarnation: str) -> None:
        with self._deciding():
            self.core.peer_gone(time.monotonic(), incarnation)

    def _on_back(self, incarnation: str) -> None:
        with self._deciding():
            self.core.peer_back(time.monotonic(), incarnation)

    def _tick(self) -> None:
        self.timer = None
        with self._deciding():
            self.core.tick(time.monotonic())

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Carry out the core's effects once it has decided, also those that follow from them; then set the timer."""
        try:
            yield
        finally:
            while effects := self.core.take_effects():
                for effect in effects:
                    try:
                        self._handlers[type(effect)](self, effect)
                    except Exception:  # what else was decided still happens, and the timer is set
                        log.exception("not done: %s", type(effect).__name__)
            self.arm()

    def arm(self) -> None:
        wake = self.core.next_wake()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if wake is not None:
            self.timer = self.loop.loop.call_later(max(0.0, wake - time.monotonic()), self._tick)

    def _send(self, action: act.Send) -> None:
        self._listener.send(action.peer, action.message)

    def _report(self, action: act.Report) -> None:
        if not action.ok:
            log.warning("transfer %s failed: %s", action.transfer, one_line(str(action.failure)))
        reports = self.core.take_reports()
        self._reports.extend(reports)
        if reports:
            self._ringer.ring()

    def _verify(self, action: act.Verify) -> None:
        if self.verifier is None:
            return
        try:
            wrong = self.verifier.first_difference(self.core.binds[action.transfer], action.sums, action.pushed)
        except Exception as error:  # else the transfer would wait for its deadline
            log.exception("transfer %s cannot be compared with its checksums", action.transfer)
            wrong = f"unknown (this worker cannot read its cache: {error})"
        self.core.verified(time.monotonic(), action.transfer, wrong)

    def _revoke(self, action: act.Revoke) -> None:
        if first := self._revoking_since is None:
            self._revoking_since = time.monotonic()
            log.warning("access to this rank's KV cache is revoked: a prefill worker did not answer its cancellation")
        try:
            self.target.revoke()
            addresses = self.addresses()
        except Exception as error:  # whatever it is, this rank serves no P before a revocation has succeeded
            known = with_code(error)
            log.error("access is not revoked yet: %s", known, exc_info=first and known is not error)
            self.core.not_revoked(time.monotonic())
            return
        self._revoking_since = None
        self.core.revoked(time.monotonic(), addresses)

    def _note(self, action: act.Note) -> None:
        trace.emit(action.stage, **action.facts)
        if action.stage == "undrafted" and action.facts["prefill"] != self._undrafted:
            self._undrafted = str(action.facts["prefill"])
            log.warning("prefill %s has no such draft model: drafts begin without the prompt's KV", self._undrafted)

    _handlers: ClassVar[dict[type, Callable[..., None]]] = {
        act.Send: _send,
        act.Report: _report,
        act.Verify: _verify,
        act.Revoke: _revoke,
        act.Note: _note,
    }

    def addresses(self) -> Memory:
        return Memory(self.target.session, self._caches.blocks, self._caches.bases)
