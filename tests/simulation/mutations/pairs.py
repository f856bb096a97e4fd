# SPDX-License-Identifier: Apache-2.0
"""P's side of the pairs with D's ranks without a rule: leases, cancels, lost writes."""

from __future__ import annotations

from typing import Any

from simulation.mutations import worlds
from simulation.mutations.mutation import Mutation, with_methods_of
from vllm_ascend_pd.prefill.scheduler.core.book import PushBook
from vllm_ascend_pd.prefill.scheduler.core.request import RequestState
from vllm_ascend_pd.protocol.actions import Action, Send
from vllm_ascend_pd.protocol.guards import PairGuards
from vllm_ascend_pd.protocol.messages import Cancel, Done, Failed, Message
from vllm_ascend_pd.protocol.pair import Claim, PairRecord, PushRecord
from vllm_ascend_pd.protocol.push import Sender
from vllm_ascend_pd.protocol.push_rules import PairMachine
from vllm_ascend_pd.protocol.states import Incoming
from vllm_ascend_pd.protocol.tables import PAIR_TABLE


class LeaseNotChecked(Sender):
    """P writes without a time limit once it was allowed to."""

    class UnlimitedPairs(PairMachine):
        def extend(self, now: float, pair: PairRecord, received: Incoming[Any]) -> None:
            super().extend(now, pair, received)
            pair.authority = now + 1e6

    machine, table = UnlimitedPairs, with_methods_of(UnlimitedPairs, PAIR_TABLE)


class CancelNotAcknowledged(Sender):
    """P stops on request without acknowledging it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._cancelled: set[str] = set()

    def message(self, now: float, peer: Any, message: Message) -> list[Action]:
        if isinstance(message, Cancel):
            self._cancelled.add(message.push)
        return [action for action in super().message(now, peer, message) if not self._silenced(action)]

    def tick(self, now: float) -> list[Action]:
        return [action for action in super().tick(now) if not self._silenced(action)]

    def wrote(self, now: float, claim: Claim, ok: bool) -> list[Action]:
        return [action for action in super().wrote(now, claim, ok) if not self._silenced(action)]

    def _silenced(self, action: Action) -> bool:
        return (
            isinstance(action, Send)
            and isinstance(action.message, Done | Failed)
            and action.message.push in self._cancelled
        )


class CancelAnsweredAtOnce(Sender):
    """P reports that it is quiet as soon as it is asked, despite pending writes."""

    def message(self, now: float, peer: Any, message: Message) -> list[Action]:
        actions = super().message(now, peer, message)
        if isinstance(message, Cancel) and message.p_incarnation == self._messages.incarnation:
            actions.append(Send(peer, self._messages.push_over(message)))
        return actions


class QuarantineSkipped(Sender):
    """P counts as quiet as soon as the transport has given up."""

    class GivenUpIsSettled(PairGuards):
        def settled(self, pair: PairRecord) -> bool:
            return not pair.coverage.out

    guards = GivenUpIsSettled


class LostForgiven(Sender):
    """P counts a failed write as landed, and says DONE."""

    class ForgivingPairs(PairMachine):
        def fail_lost(self, now: float, pair: PairRecord, claim: Claim) -> None:
            self.cover(now, pair, claim)

        lose = fail_lost

    machine, table = ForgivingPairs, with_methods_of(ForgivingPairs, PAIR_TABLE)


class DoneFromLostSource(Sender):
    """P says DONE although its blocks were overwritten during the writes, or a unit was never offered."""

    class CompleteIsDelivered(PairGuards):
        def delivered(self, pair: PairRecord) -> bool:
            return pair.complete and pair.authority is not None

    guards = CompleteIsDelivered


class SealedPushRestarted(Sender):
    """P restarts a push although some ranks may have said DONE."""

    def restart(self, now: float, push: PushRecord) -> list[Action]:
        push.sealed = push.sealed and push.out > 0
        return super().restart(now, push)


class SealedPushOrderedAgain(PushBook):
    """P's scheduler orders that restart, too."""

    def preempted(self, request_id: str) -> None:
        record = self.find(request_id)
        if record is not None and record.state is RequestState.SEALED:
            record.state = RequestState.PUSHING
        super().preempted(request_id)


MUTATIONS = (
    Mutation("lease not checked before a write", sender=LeaseNotChecked, world=worlds.cut_off),
    Mutation("cancel not acknowledged", sender=CancelNotAcknowledged),
    Mutation("quarantine skipped", sender=QuarantineSkipped),
    Mutation("cancel answered at once", sender=CancelAnsweredAtOnce),
    Mutation("a failed write counts as landed", sender=LostForgiven, world=worlds.slots_read_late),
    Mutation("quiet at once, slots used again", sender=QuarantineSkipped, world=worlds.slots_read_late),
    Mutation("DONE from a lost source", sender=DoneFromLostSource, world=worlds.preempted),
    Mutation("sealed push restarted", sender=SealedPushRestarted, book=SealedPushOrderedAgain),
)
