# SPDX-License-Identifier: Apache-2.0
"""D's offers to P's schedulers, which take the place of calls to a metaserver.

Each offer ends in one outcome, `prefilled` or `failed`. An OFFER is repeated until it is answered, and then every third
of a lease as long as P computes: P's answers serve as heartbeats. A P that is silent for a lease, or whose address
refuses connections, counts as gone. `now` is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from vllm_ascend_pd.config import Timers
from vllm_ascend_pd.decode.scheduler.core.answers import Outcome
from vllm_ascend_pd.errors import CATALOGUE, PdError
from vllm_ascend_pd.protocol.failure import Failure
from vllm_ascend_pd.protocol.first import FirstToken
from vllm_ascend_pd.protocol.identity import Endpoint, TransferId, pushed_by
from vllm_ascend_pd.protocol.meeting import Bound, Gone, Meeting, Offer, Unwanted, Waits
from vllm_ascend_pd.protocol.timing import Agenda, Repetition


@dataclass(frozen=True, slots=True)
class SendMessage:
    """A message to hand to the channel, which may lose it."""

    to: Endpoint
    message: Meeting


@dataclass(frozen=True, slots=True)
class Answered:
    """P's answer to an offer. Nothing follows once it is final."""

    transfer: TransferId
    outcome: Outcome


OfferEffect: TypeAlias = SendMessage | Answered


@dataclass(slots=True)
class _Open:
    offer: Offer
    listener: Endpoint
    began: float
    resend: Repetition
    lost_at: float
    push: str = ""  # once bound

    @property
    def wakes_at(self) -> float:
        return min(self.lost_at, self.resend.at)


class Offers:
    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._open: dict[TransferId, _Open] = {}
        self._agenda: Agenda[TransferId] = Agenda()
        self._effects: list[OfferEffect] = []

    def take_effects(self) -> list[OfferEffect]:
        """Return the effects, in order, each once."""
        effects, self._effects = self._effects, []
        return effects

    def offer(self, now: float, listener: Endpoint, offer: Offer) -> None:
        t = self._timers
        backoff = Repetition(now, t.resend_first_s, t.resend_max_s)
        entry = self._open[offer.transfer] = _Open(offer, listener, now, backoff, now + t.lease_s)
        self._agenda.set(offer.transfer, entry.wakes_at)
        self._effects.append(SendMessage(listener, offer))

    def forget(self, transfer: TransferId) -> None:
        """Drop the offer of a load that is over, or not wanted any more.

        P is notified once. If the message is lost, P's part ends by itself.
        """
        entry = self._close(transfer)
        if entry is not None:
            failure = Failure("PD-XFER-002", "the request ended on decode")
            self._effects.append(SendMessage(entry.listener, Gone(transfer, failure)))

    def send_unwanted(self, listener: Endpoint, unwanted: Unwanted) -> None:
        """Notify a P that no offer will follow: it need not hold anything."""
        self._effects.append(SendMessage(listener, unwanted))

    def message(self, now: float, listener: Endpoint, message: Meeting) -> None:
        """Handle P's answer. It counts only from the address that the offer went to."""
        if isinstance(message, Offer | Unwanted):
            return
        entry = self._open.get(message.transfer)
        if entry is None or entry.listener != listener:
            return
        if isinstance(message, Gone):
            self._end(now, message.transfer, message.failure)
        elif isinstance(message, Waits):
            self._rest(now, entry)
        else:
            self._bound(now, entry, message)

    def unreachable(self, now: float, listener: Endpoint, detail: str) -> None:
        for transfer, entry in list(self._open.items()):
            if entry.listener == listener:
                self._end(now, transfer, _gone(f"{listener} ({detail})"))

    def tick(self, now: float) -> None:
        for transfer in self._agenda.due(now):
            entry = self._open[transfer]
            if now >= entry.lost_at:
                why = f"{entry.listener}, which has not answered for {self._timers.lease_s:g} s,"
                self._end(now, transfer, _gone(why))
            else:
                entry.resend.sent(now)
                self._agenda.set(transfer, entry.wakes_at)
                self._effects.append(SendMessage(entry.listener, entry.offer))

    def next_wake(self) -> float | None:
        return self._agenda.next()

    def open_count(self) -> int:
        return len(self._open)

    def _rest(self, now: float, entry: _Open) -> None:
        entry.lost_at = now + self._timers.lease_s
        entry.resend.rest(now + self._timers.lease_s / 3)
        self._agenda.set(entry.offer.transfer, entry.wakes_at)

    def _bound(self, now: float, entry: _Open, bound: Bound) -> None:
        if not entry.push:
            entry.push = bound.push
            self._answer(now, entry, "accepted")
        if bound.ended:
            self._close(bound.transfer)
            self._answer(now, entry, "prefilled", first=bound.first)
        else:
            self._rest(now, entry)

    def _answer(
        self, now: float, entry: _Open, kind: str, failure: Failure | None = None, first: FirstToken | None = None
    ) -> None:
        outcome = Outcome(kind, failure, pushed_by(entry.push), now - entry.began, first)
        self._effects.append(Answered(entry.offer.transfer, outcome))

    def _close(self, transfer: TransferId) -> _Open | None:
        self._agenda.set(transfer, None)
        return self._open.pop(transfer, None)

    def _end(self, now: float, transfer: TransferId, failure: Failure) -> None:
        entry = self._open[transfer]
        self._close(transfer)
        known = failure if failure.code in CATALOGUE else Failure("PD-META-006", failure.detail)
        self._answer(now, entry, "failed", known)


def _gone(peer: str) -> Failure:
    return Failure.of(PdError("PD-XFER-004", peer=peer))
