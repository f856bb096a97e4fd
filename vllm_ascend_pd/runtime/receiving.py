# SPDX-License-Identifier: Apache-2.0
"""D's worker at run time: the Receiver machine, its listener, gates and timers, all on one loop thread.

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
from typing import ClassVar

from vllm_ascend_pd.channel.listener import Listener
from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.decode.decisions import Bind, DecodeStep
from vllm_ascend_pd.device.base import Device, Event
from vllm_ascend_pd.device.caches import Caches
from vllm_ascend_pd.errors import LocalProtocolError, PdError, one_line
from vllm_ascend_pd.observe import trace
from vllm_ascend_pd.protocol import actions as act
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.messages import Endpoint, LayerAddresses, Message
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.protocol.states import ReservationState
from vllm_ascend_pd.runtime.loop import LoopThread
from vllm_ascend_pd.runtime.verify import Verifier
from vllm_ascend_pd.runtime.wake import Ringer
from vllm_ascend_pd.transport.base import Transport

log = logging.getLogger(__name__)

GATE_POLL_S = 0.001
START_S = 10.0
CLOSE_GRACE_S = 5.0
REVOKE_AGAIN_S = 1.0
UNKNOWN = (ReservationState.UNBOUND, ReservationState.OVER)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A transfer that ended on this rank."""

    request_id: str
    ok: bool
    code: str
    detail: str
    blocks: tuple[int, ...]  # what it loaded into, named only if it failed
    push: str


@dataclass(frozen=True, slots=True)
class Site:
    """Who and where this worker is."""

    incarnation: str
    rank: int
    model: str
    host: str
    port: int
    advertise_host: str


class ReceiveRuntime:
    """Owns the loop thread, the listener and the transfer engine of one D worker."""

    def __init__(
        self,
        config: PushConfig,
        site: Site,
        caches: Caches,
        device: Device,
        transport: Transport,
        secrets: Secrets | None,
    ) -> None:
        self._caches, self._device, self._transport = caches, device, transport
        self._binds: dict[TransferId, Bind] = {}
        self._gates: dict[TransferId, Event] = {}
        self._reports: deque[Loaded] = deque()
        self._ringer = Ringer()
        self._timer: asyncio.TimerHandle | None = None
        self._gate_timer: asyncio.TimerHandle | None = None
        self._verifier = Verifier(caches, device, site.rank) if config.wire.verify == "full" else None
        transport.register(caches.storages)
        self._config, self._site = config, site
        self._machine: Receiver | None = None
        self._loop = LoopThread(f"pd-receive-{site.rank}")
        self._listener = Listener(
            host=site.host,
            port=site.port,
            incarnation=site.incarnation,
            secrets=secrets,
            on_message=self._on_message,
            on_gone=self._on_gone,
            on_back=self._on_back,
        )
        self._loop.post(device.attach_thread)  # gates are looked at and transfer engines opened there
        try:
            bound = self._loop.call(self._listener.start(), timeout=START_S)
        except (PdError, TimeoutError):
            self._loop.stop(CLOSE_GRACE_S)
            transport.close()
            raise
        self.endpoint = Endpoint(site.advertise_host or bound.host, bound.port)

    # -- the engine's thread

    def step(self, step: DecodeStep) -> None:
        """A step's metadata was bound: everything it says happens on the loop thread, in this order."""
        if step.empty:
            return
        gate = self._device.record() if step.binds else None
        self._loop.post(self._apply, step, gate)

    def take_reports(self) -> list[Loaded]:
        """Transfers that ended since the last call."""
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def close(self) -> None:
        """Idempotent. Stops listening, then closes the transfer engine: nothing lands after that."""
        if self._loop.alive:
            try:
                self._loop.call(self._listener.close(), timeout=CLOSE_GRACE_S)
            except TimeoutError:
                log.error("the side channel did not close within %.0f s", CLOSE_GRACE_S)
        self._loop.stop(CLOSE_GRACE_S)
        self._ringer.close()
        self._transport.close()

    # -- the loop thread

    def _apply(self, step: DecodeStep, gate: Event | None) -> None:
        now = time.monotonic()
        self._ringer.aim(step.wake)
        for bind in step.binds:
            with self._alone(bind.transfer):
                self._bind(now, step.incarnation, bind, gate)
        for cancel in step.cancels:
            if cancel.transfer in self._binds:  # else it was given up at its bind
                with self._alone(cancel.transfer):
                    self._do(self._receiver.cancel(now, cancel.transfer, cancel.code, cancel.detail))
        for transfer in step.settles:
            if transfer in self._binds:
                with self._alone(transfer):
                    self._do(self._receiver.settle(now, transfer))
        for transfer in step.overs:
            self._gates.pop(transfer, None)  # it may have been cancelled before its gate opened
            if self._verifier is not None:
                self._verifier.forget(transfer)
            if self._binds.pop(transfer, None) is not None:
                with self._alone(transfer):
                    self._do(self._receiver.over(now, transfer))
        self._poll_gates()

    @contextmanager
    def _alone(self, transfer: TransferId) -> Iterator[None]:
        """Whatever goes wrong with one request is that request's: the rest of the step and the other gates go on."""
        try:
            yield
        except Exception as error:
            log.exception("transfer %s is given up: this worker failed", transfer)
            self._give_up(transfer, f"this decode worker failed: {error}")

    def _give_up(self, transfer: TransferId, why: str) -> None:
        """Fence what writers may know of. What the machine does not know no writer does: that is reported at once."""
        self._gates.pop(transfer, None)
        if self._machine is None or self._machine.state(transfer) in UNKNOWN:
            self._report(act.Report(transfer, Failure("PD-XFER-002", why)))
            self._binds.pop(transfer, None)
            return
        try:
            self._do(self._machine.cancel(time.monotonic(), transfer, "PD-XFER-002", why))
        except LocalProtocolError:
            log.exception("transfer %s cannot be given up: its blocks stay held", transfer)

    def _start_machine(self, incarnation: str) -> Receiver:
        """The scheduler's first step names the incarnation that we serve; a BEGIN before that is lost and repeated."""
        self._machine = Receiver(
            incarnation=incarnation,
            rank=self._site.rank,
            model=self._site.model,
            geometry=self._caches.geometry,
            addresses=self._addresses(),
            timers=self._config.timers,
            quiet_s=self._config.quiet_s,
            verify=self._verifier is not None,
        )
        return self._machine

    @property
    def _receiver(self) -> Receiver:
        if self._machine is None:
            raise LocalProtocolError("the machine is asked before the scheduler's first step")
        return self._machine

    def _bind(self, now: float, incarnation: str, bind: Bind, gate: Event | None) -> None:
        self._binds[bind.transfer] = bind
        receiver = self._machine or self._start_machine(incarnation)
        if self._verifier is not None:
            self._verifier.expect(bind)
        trace.emit("bound", transfer=str(bind.transfer), first=bind.first, end=bind.end)
        self._do(receiver.bind(now, bind.transfer, bind.first, bind.end, bind.deadline_s))
        if gate is not None:
            self._gates[bind.transfer] = gate

    def _poll_gates(self) -> None:
        for transfer, event in list(self._gates.items()):
            with self._alone(transfer):
                if event.done():
                    del self._gates[transfer]
                    trace.emit("gate_open", transfer=str(transfer))
                    self._do(self._receiver.gate_open(time.monotonic(), transfer))
        if self._gate_timer is not None:
            self._gate_timer.cancel()
        self._gate_timer = self._loop.loop.call_later(GATE_POLL_S, self._poll_gates) if self._gates else None

    def _on_message(self, peer: Hashable, message: Message) -> None:
        if self._machine is not None:
            self._do(self._machine.message(time.monotonic(), peer, message))

    def _on_gone(self, incarnation: str) -> None:
        if self._machine is not None:
            self._do(self._machine.peer_gone(time.monotonic(), incarnation))

    def _on_back(self, incarnation: str) -> None:
        if self._machine is not None:
            self._do(self._machine.peer_back(time.monotonic(), incarnation))

    def _tick(self) -> None:
        self._timer = None
        self._do(self._receiver.tick(time.monotonic()))

    def _do(self, actions: list[act.Action]) -> None:
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            handler = self._handlers.get(type(action))
            try:
                todo.extend((handler(self, action) if handler is not None else None) or ())
            except Exception:  # what else was decided still happens, and the timer is set
                log.exception("not done: %s", type(action).__name__)
        self._arm()

    def _arm(self) -> None:
        wake = self._receiver.next_wake()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake is not None:
            self._timer = self._loop.loop.call_later(max(0.0, wake - time.monotonic()), self._tick)

    def _send(self, action: act.Send) -> None:
        self._listener.send(action.peer, action.message)

    def _report(self, action: act.Report) -> None:
        bind = self._binds.get(action.transfer)
        why = action.failure or Failure("")
        trace.emit("closed", transfer=str(action.transfer), ok=action.ok, code=why.code, detail=why.detail)
        if not action.ok:
            log.warning("transfer %s failed: %s", action.transfer, one_line(str(why)))
        if bind is not None:
            blocks = () if action.ok else tuple(bind.blocks.tolist())
            self._reports.append(Loaded(bind.request_id, action.ok, why.code, why.detail, blocks, action.push))
            self._ringer.ring()

    def _verify(self, action: act.Verify) -> list[act.Action]:
        if self._verifier is None:
            return []
        try:
            wrong = self._verifier.first_difference(action.transfer, action.sums)
        except Exception as error:  # else the transfer would wait for its deadline
            log.exception("transfer %s cannot be compared with its checksums", action.transfer)
            wrong = f"unknown (this worker cannot read its cache: {error})"
        return self._receiver.verified(time.monotonic(), action.transfer, wrong)

    def _revoke(self, action: act.Revoke) -> list[act.Action]:
        log.warning("access to this rank's KV cache is revoked: a prefill worker did not answer its cancellation")
        try:
            self._transport.revoke()
        except PdError as error:  # the old engine is closed, so nothing lands; but there is no other one yet
            log.error("%s", error)
            self._loop.loop.call_later(REVOKE_AGAIN_S, lambda: self._do([action]))
            return []
        return self._receiver.revoked(time.monotonic(), self._addresses())

    def _note(self, action: act.Note) -> None:
        trace.emit(action.stage, **action.facts)

    _handlers: ClassVar[dict[type, Callable[..., list[act.Action] | None]]] = {
        act.Send: _send,
        act.Report: _report,
        act.Verify: _verify,
        act.Revoke: _revoke,
        act.Note: _note,
    }

    def _addresses(self) -> LayerAddresses:
        return LayerAddresses(self._transport.session, self._caches.num_blocks, self._caches.bases)
