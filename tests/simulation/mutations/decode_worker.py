# SPDX-License-Identifier: Apache-2.0
"""D's workers without a rule: reservations, fences, revocations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from simulation.mutations import worlds
from simulation.mutations.mutation import Mutation, with_methods_of
from vllm_ascend_pd.protocol.actions import Action, Send
from vllm_ascend_pd.protocol.compose import ready
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.fence import Fence
from vllm_ascend_pd.protocol.guards import ReservationGuards
from vllm_ascend_pd.protocol.identity import Contributor
from vllm_ascend_pd.protocol.messages import Begin, Done, Failed, Message
from vllm_ascend_pd.protocol.push import Sender
from vllm_ascend_pd.protocol.reservation import Receiver
from vllm_ascend_pd.protocol.reservation_rules import ReservationMachine
from vllm_ascend_pd.protocol.states import Cell, Incoming, ReservationEvent, ReservationState, WriterState
from vllm_ascend_pd.protocol.tables import RESERVATION_TABLE
from vllm_ascend_pd.protocol.timing import OBSERVED_GAP_S, RunningClock
from vllm_ascend_pd.protocol.transfer import Transfer, WriterRecord


class FreeBeforeFence(Receiver):
    """D reports a failure without waiting for any writer."""

    class UnfencedReservations(ReservationMachine):
        def fence(self, now: float, record: Transfer, failure: Failure) -> None:
            for writer in record.leased():
                writer.state = WriterState.QUIET
            super().fence(now, record, failure)

    machine, table = UnfencedReservations, with_methods_of(UnfencedReservations, RESERVATION_TABLE)


class ReadyBeforeBind(Receiver):
    """D grants authority before the blocks' earlier use has ended."""

    class EagerReservations(ReservationMachine):
        def park(self, now: float, record: Transfer, received: Incoming[Any]) -> None:
            if isinstance(received.message, Begin):
                granted = ready(received.message, self._timers.lease_s, self.memory, self.addresses)
                self.actions.append(Send(received.peer, granted))
            super().park(now, record, received)

    machine, table = EagerReservations, with_methods_of(EagerReservations, RESERVATION_TABLE)


def _conclude(machine: Any, now: float, record: Transfer) -> None:
    """Conclude as if the last contributor had said DONE."""
    record.state = ReservationState.VERIFYING if machine.guards.verify else ReservationState.CLOSED_OK
    (machine.compare if machine.guards.verify else machine.report)(now, record, None)


class DoneCountedTwice(Receiver):
    """D counts messages instead of contributors."""

    class CountingReservations(ReservationMachine):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._dones: Counter[Any] = Counter()

        def receive(self, now: float, record: Transfer, received: Incoming[Any]) -> None:
            self._dones[record.transfer] += record.state is ReservationState.OPEN and isinstance(received.message, Done)
            super().receive(now, record, received)
            if record.state is ReservationState.OPEN and self._dones[record.transfer] >= len(record.writers) > 0:
                _conclude(self, now, record)

    machine = CountingReservations  # type: ignore[assignment]


class AnyIncarnationReceiver(Receiver):
    """D accepts messages of any incarnation at the address."""

    class AnyProcess(ReservationGuards):
        def same_process(self, writer: WriterRecord, p_incarnation: str) -> bool:
            return True

    guards = AnyProcess


class AnyIncarnationSender(Sender):
    """P answers for earlier incarnations at its address."""

    def message(self, now: float, peer: Any, message: Message) -> list[Action]:
        mine = msgspec.structs.replace(message, p_incarnation=self._messages.incarnation)
        return super().message(now, peer, mine)


class SuccessInSpiteOfFailed(Receiver):
    """D treats FAILED like any other end."""

    class ForgivingReservations(ReservationMachine):
        def end(self, now: float, record: Transfer, received: Incoming[Failed]) -> None:
            self.acknowledge(now, record, received)
            if record.bound and received.message.quiescent:
                record.author(received.message).state = WriterState.DONE
                if all(writer.state is WriterState.DONE for writer in record.writers.values()):
                    _conclude(self, now, record)

    machine = ForgivingReservations
    table = {  # noqa: RUF012 - like its base
        **RESERVATION_TABLE,
        ReservationState.OPEN: {
            **RESERVATION_TABLE[ReservationState.OPEN],
            ReservationEvent.FAILED: Cell(ReservationState.OPEN, ForgivingReservations.end),
            ReservationEvent.FAILED_IN_FLIGHT: Cell(ReservationState.OPEN, ForgivingReservations.end),
            ReservationEvent.EARLY_FAILED: Cell(ReservationState.OPEN, ForgivingReservations.end),
        },
    }


class _CountsAll(RunningClock):
    def observe(self, now: float) -> bool:
        before = self._last
        stopped = super().observe(now)
        if before is not None and now > before:
            self.seconds += now - before - min(now - before, OBSERVED_GAP_S)
        return stopped


class StageNotAwaited(Receiver):
    """D waits for one stage of P, although others have layers for it, too."""

    class OneStage(ReservationGuards):
        def contributors(self, begin: Begin) -> tuple[Contributor, ...]:
            return tuple(one for one in super().contributors(begin) if one.stage == begin.contributor.stage)

    guards = OneStage


@dataclass(slots=True)
class _StopsCounted(Fence):
    clock: RunningClock = field(default_factory=_CountsAll)


class LandedWhileStopped(Receiver):
    """D's timer H goes on while D is stopped."""

    fence_type = _StopsCounted


class _Trusting(Fence):
    def observe(self, now: float) -> None:
        self.clock.observe(now)


class AnswerBelievedAfterStop(Receiver):
    """D believes FAILED(quiescent) at once, although its own buffers may still hold earlier writes."""

    fence_type = _Trusting


class _LandedOnly(Fence):
    def proven_at(self, writer: WriterRecord) -> float | None:
        if writer.state is not WriterState.ANSWERED and self.is_gone(writer.p_incarnation):
            return writer.landed_at
        return super().proven_at(writer)


class GoneIsQuiet(Receiver):
    """D only waits for H once a writer's process is gone, even if it has just ended."""

    fence_type = _LandedOnly


class TimeAloneFrees(Receiver):
    """D takes the end of H for a proof."""

    class Impatient(Fence):
        def proven_at(self, writer: WriterRecord) -> float | None:
            return super().proven_at(writer) or writer.landed_at

    fence_type = Impatient


class RevokedOnce(Receiver):
    """D does not try again to revoke access after that has failed."""

    def not_revoked(self, now: float) -> list[Action]:
        return []


class RevokedAnyhow(Receiver):
    """D takes a revocation that has failed for one that has cut the peers off."""

    def not_revoked(self, now: float) -> list[Action]:
        return self.revoked(now, self._machine.addresses)


class RestartIsTheEnd(Receiver):
    """D takes a peer's next incarnation at the same address for the end of the one before."""

    def message(self, now: float, peer: Any, message: Message) -> list[Action]:
        for record in self._transfers.values():
            for writer in record.leased():
                if writer.peer == peer and writer.p_incarnation != message.p_incarnation:
                    writer.state = WriterState.QUIET
        return super().message(now, peer, message)


MUTATIONS = (
    Mutation("free before fence", receiver=FreeBeforeFence),
    Mutation("READY before bind", receiver=ReadyBeforeBind),
    Mutation("DONE counted twice", receiver=DoneCountedTwice),
    Mutation("no incarnation check", receiver=AnyIncarnationReceiver, sender=AnyIncarnationSender),
    Mutation("success in spite of one FAILED", receiver=SuccessInSpiteOfFailed),
    Mutation("hold runs while D is stopped", receiver=LandedWhileStopped, world=worlds.stopped_and_killed),
    Mutation("answer believed right after a stop", receiver=AnswerBelievedAfterStop),
    Mutation("gone is quiet", receiver=GoneIsQuiet, world=worlds.killed_after_a_stop),
    Mutation("time alone frees", receiver=TimeAloneFrees),
    Mutation("a stage of P is not waited for", receiver=StageNotAwaited, world=worlds.stages),
    Mutation("revocation keeps the session", blunt_revocation=True),
    Mutation("a failed revocation is not tried again", receiver=RevokedOnce, world=worlds.revoked_in_vain),
    Mutation("a failed revocation has cut the peers off", receiver=RevokedAnyhow, world=worlds.revoked_in_vain),
    Mutation("a restart is the end of what was before", receiver=RestartIsTheEnd, world=worlds.orphans),
)
