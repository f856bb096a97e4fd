# SPDX-License-Identifier: Apache-2.0
"""D: messages that arrived too early, kept until the transfer is bound and its gate is open.

Only the latest message of each contributor is kept. Time, number and size are bounded: P repeats a message until it is
answered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from vllm_ascend_pd.protocol.identity import Contributor, TransferId
from vllm_ascend_pd.protocol.messages import Begin, Failed
from vllm_ascend_pd.protocol.timing import Agenda

MAX_PARKED = 4096
MAX_PARKED_BYTES = 64 << 20  # approximate; a BEGIN of an ordinary model has some KiB


@dataclass(frozen=True, slots=True)
class Parked:
    peer: Hashable
    message: Begin | Failed
    until: float
    size: int


class Parking:
    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._waiting: dict[TransferId, dict[Contributor, Parked]] = {}
        self._agenda: Agenda[TransferId] = Agenda()
        self.count = 0
        self._bytes = 0

    def keep(self, now: float, peer: Hashable, message: Begin | Failed) -> str:
        """Keep a message. Return "" if it is kept, else the reason why not, for the counters."""
        waiting = self._waiting.get(message.transfer, {})
        before = waiting.get(message.contributor)
        if before is not None and before.message.push == message.push and before.message.seq >= message.seq:
            return "parked_late"
        size = _size(message)
        more = size - (before.size if before is not None else 0)
        if (before is None and self.count >= MAX_PARKED) or self._bytes + more > MAX_PARKED_BYTES:
            return "parked_full"
        self._waiting.setdefault(message.transfer, waiting)
        waiting[message.contributor] = Parked(peer, message, now + self._keep_s, size)
        self.count += before is None
        self._bytes += more
        self._reschedule(message.transfer)
        return ""

    def take(self, transfer: TransferId) -> list[Parked]:
        """Remove and return all messages of this transfer, in the order of their contributors' first arrival."""
        waiting = self._waiting.pop(transfer, {})
        self.count -= len(waiting)
        self._bytes -= sum(parked.size for parked in waiting.values())
        self._reschedule(transfer)
        return list(waiting.values())

    def failed(self, transfer: TransferId) -> Parked | None:
        """Return a parked FAILED of this transfer, which stays parked; None if there is none."""
        waiting = self._waiting.get(transfer, {})
        return next((parked for parked in waiting.values() if isinstance(parked.message, Failed)), None)

    def transfers(self) -> tuple[TransferId, ...]:
        return tuple(self._waiting)

    def forget_process(self, p_incarnation: str) -> None:
        """Drop the BEGINs of a process that is gone, which cannot use an answer. A FAILED stays."""
        self._drop(lambda parked: isinstance(parked.message, Begin) and parked.message.p_incarnation == p_incarnation)

    def expire(self, now: float) -> int:
        before = self.count
        if self._agenda.due(now):
            self._drop(lambda parked: now >= parked.until)
        return before - self.count

    def next(self) -> float | None:
        return self._agenda.next()

    def _drop(self, unwanted: Callable[[Parked], bool]) -> None:
        for transfer, waiting in list(self._waiting.items()):
            for contributor, parked in list(waiting.items()):
                if unwanted(parked):
                    del waiting[contributor]
                    self.count -= 1
                    self._bytes -= parked.size
            if not waiting:
                del self._waiting[transfer]
            self._reschedule(transfer)

    def _reschedule(self, transfer: TransferId) -> None:
        waiting = self._waiting.get(transfer)
        self._agenda.set(transfer, min(parked.until for parked in waiting.values()) if waiting else None)


def _size(message: Begin | Failed) -> int:
    """Return roughly the bytes that a kept message takes: a peer may send messages of 4 MiB."""
    size = len(message.transfer.incarnation) + len(message.transfer.uuid) + 1024
    return size + (len(message.layout_bytes) if isinstance(message, Begin) else 0)
