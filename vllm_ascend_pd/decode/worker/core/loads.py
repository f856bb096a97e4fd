# SPDX-License-Identifier: Apache-2.0
"""All loads of one D worker as one machine: events in, effects out.

It takes in the scheduler's steps in their order, opens gates once the device has finished with the earlier use of a
block, and calls the protocol's machine. `now` is an argument. An error with one request fails that request only: the
rest of the step and the other gates go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from vllm_ascend_pd.config import PushConfig
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import CacheGeometry
from vllm_ascend_pd.metadata import Bind, DecodeStep, LoadEnd
from vllm_ascend_pd.protocol import actions as act
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.identity import TransferId
from vllm_ascend_pd.protocol.messages import Memory, Message
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.protocol.states import ReservationState
from vllm_ascend_pd.shared.event import Event

log = logging.getLogger(__name__)

UNKNOWN = (ReservationState.UNBOUND, ReservationState.OVER)


class Loads:
    """Loads of one worker.

    `geometry` is that of this worker's stage; the scheduler's first step brings that of the whole engine. `addresses`
    is called when the machine starts; after a revocation `revoked` brings new ones.
    """

    receiver_type = Receiver

    def __init__(
        self,
        config: PushConfig,
        stage: int,
        rank: int,
        model: str,
        geometry: CacheGeometry,
        addresses: Callable[[], Memory],
        *,
        verify: bool,
    ) -> None:
        self._config, self._model, self._geometry = config, model, geometry
        self._stage, self._rank = stage, rank
        self._addresses, self._verify = addresses, verify
        self._receiver: Receiver | None = None
        self._effects: list[act.Action] = []
        self._reports: list[LoadEnd] = []
        self.binds: dict[TransferId, Bind] = {}
        self.gates: dict[TransferId, Event] = {}

    def take_effects(self) -> list[act.Action]:
        """Return the effects, in order, each once."""
        effects, self._effects = self._effects, []
        return effects

    def take_reports(self) -> list[LoadEnd]:
        reports, self._reports = self._reports, []
        return reports

    # -- the scheduler's steps

    def step(self, now: float, step: DecodeStep, gate: Event | None) -> None:
        """Handle a step. `gate` comes after everything that may still use the blocks of the step's binds."""
        for bind in step.binds:
            with self._alone(now, bind.transfer):
                self._bind(now, step, bind, gate)
        for cancel in step.cancels:
            if cancel.transfer in self.binds:  # else it was given up at its bind
                with self._alone(now, cancel.transfer):
                    self._do(self._machine.cancel(now, cancel.transfer, cancel.failure))
        for transfer in step.settles:
            if transfer in self.binds:
                with self._alone(now, transfer):
                    self._do(self._machine.settle(now, transfer))
        for transfer in step.overs:
            self.gates.pop(transfer, None)  # it may have been cancelled before its gate opened
            if self.binds.pop(transfer, None) is not None:
                with self._alone(now, transfer):
                    self._do(self._machine.load_over(now, transfer))
        self.look(now)

    def look(self, now: float) -> None:
        """Open the gates that the device has passed."""
        for transfer, event in list(self.gates.items()):
            with self._alone(now, transfer):
                if event.done():
                    del self.gates[transfer]
                    self._effects.append(act.Note("gate_open", {"transfer": str(transfer)}))
                    self._do(self._machine.gate_open(now, transfer))

    @property
    def counters(self) -> Mapping[str, int]:
        """Irregular events of the protocol, by name."""
        return self._receiver.counters if self._receiver is not None else {}

    # -- the side channel, time, and the runtime's answers

    def message(self, now: float, peer: Hashable, message: Message) -> None:
        """Handle a message of P. Before the scheduler's first step it is dropped; P repeats it."""
        if self._receiver is not None:
            self._do(self._receiver.message(now, peer, message))

    def peer_gone(self, now: float, incarnation: str) -> None:
        if self._receiver is not None:
            self._do(self._receiver.peer_gone(now, incarnation))

    def peer_back(self, now: float, incarnation: str) -> None:
        if self._receiver is not None:
            self._do(self._receiver.peer_back(now, incarnation))

    def tick(self, now: float) -> None:
        if self._receiver is not None:
            self._do(self._receiver.tick(now))

    def next_wake(self) -> float | None:
        """Return when `tick` must be called at the latest."""
        return self._receiver.next_wake() if self._receiver is not None else None

    def verified(self, now: float, transfer: TransferId, wrong: str | None) -> None:
        """Handle the answer to `Verify`: the layer that differs, or None."""
        self._do(self._machine.verified(now, transfer, wrong))

    def revoked(self, now: float, addresses: Memory) -> None:
        """Handle the answer to `Revoke`: the addresses of the memory from now on."""
        self._do(self._machine.revoked(now, addresses))

    def not_revoked(self, now: float) -> None:
        """Handle the other answer to `Revoke`: it failed, and is asked for again."""
        self._do(self._machine.not_revoked(now))

    # -- what is held, for metrics and tests

    def record_count(self) -> int:
        return self._receiver.record_count() if self._receiver is not None else 0

    def parked_count(self) -> int:
        return self._receiver.parked_count() if self._receiver is not None else 0

    # -- one transfer at a time

    @property
    def _machine(self) -> Receiver:
        if self._receiver is None:
            raise LocalProtocolError("the machine is asked before the scheduler's first step")
        return self._receiver

    def _bind(self, now: float, step: DecodeStep, bind: Bind, gate: Event | None) -> None:
        self.binds[bind.transfer] = bind
        receiver = self._receiver or self._start(step)
        facts = {"transfer": str(bind.transfer), "first": bind.first, "end": bind.end}
        self._effects.append(act.Note("bound", facts))
        self._do(receiver.bind(now, bind.transfer, bind.first, bind.end, bind.deadline_s))
        if gate is not None:
            self.gates[bind.transfer] = gate

    def _start(self, step: DecodeStep) -> Receiver:
        """Start the machine with the scheduler's first step: it has the incarnation served, and all stages' layers."""
        geometry = step.geometry
        if geometry is None or geometry.stages[self._stage : self._stage + 1] != self._geometry.stages:
            raise LocalProtocolError(
                f"the engine does not know the layers of stage {self._stage} by its worker's names"
            )
        self._receiver = self.receiver_type(
            incarnation=step.incarnation,
            rank=geometry.worker(self._stage, self._rank),
            model=self._model,
            geometry=geometry,
            addresses=self._addresses(),
            timers=self._config.timers,
            quiet_s=self._config.quiet_s,
            verify=self._verify,
        )
        return self._receiver

    @contextmanager
    def _alone(self, now: float, transfer: TransferId) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.exception("transfer %s is given up: this worker failed", transfer)
            self._give_up(now, transfer, Failure("PD-XFER-002", f"this decode worker failed: {error}"))

    def _give_up(self, now: float, transfer: TransferId, failure: Failure) -> None:
        """Give up a transfer. If the machine knows it, a P may too: it is fenced first. Else it is reported at once."""
        self.gates.pop(transfer, None)
        if self._receiver is None or self._receiver.state(transfer) in UNKNOWN:
            self._do([act.Report(transfer, failure)])
            self.binds.pop(transfer, None)
            return
        try:
            self._do(self._receiver.cancel(now, transfer, failure))
        except LocalProtocolError:
            log.exception("transfer %s cannot be given up: its blocks stay held", transfer)

    def _do(self, actions: Iterable[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Report):
                self._report(action)  # first: its end must be in the trace before it is reported
            self._effects.append(action)

    def _report(self, report: act.Report) -> None:
        why = report.failure or Failure("")
        facts = {"transfer": str(report.transfer), "ok": report.ok, "code": why.code, "detail": why.detail}
        self._effects.append(act.Note("closed", facts))
        bind = self.binds.get(report.transfer)
        if bind is not None:
            blocks = () if report.ok else tuple(block for ids in bind.blocks for block in ids.tolist())
            self._reports.append(LoadEnd(bind.request_id, report.failure, report.push, report.cached, blocks))
