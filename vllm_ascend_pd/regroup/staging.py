# SPDX-License-Identifier: Apache-2.0
"""Staging slots: registered memory in which an owner assembles what it will write into one D rank.

The number and the size of the slots are fixed at start. A destination has a quota, so that one that stalls cannot take
the slots of the others; a slot whose write failed may still be read for a while and is quarantined, and a spare takes
its place. Nothing grows: without a slot the bytes are dropped, and exchanged again later.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

import torch

PATIENCE_S = 0.05  # how long an exchange waits for a slot of a destination that was not stalled before


@dataclass(slots=True, eq=False)
class StagingSlot:
    """One slot while it is taken. `memory` is a flat view of bytes."""

    number: int
    destination: Hashable
    memory: torch.Tensor
    users: int = 0  # writes that read it

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


class Staging:
    """The slots of one worker. Used by the exchange (take) and the pusher (release, quarantine)."""

    def __init__(self, memory: torch.Tensor, slot_bytes: int, quota: int, spares: int) -> None:
        count = memory.numel() // slot_bytes
        self.slot_bytes = slot_bytes
        self._memory = memory
        self._quota, self._spares = quota, spares
        self._free = list(range(count - spares))
        self._spare = list(range(count - spares, count))
        self._taken: Counter[Hashable] = Counter()
        self._quarantined: list[tuple[float, int]] = []
        self._stalled: set[Hashable] = set()
        self._changed = threading.Condition()

    @property
    def region(self) -> tuple[int, int]:
        """What the transfer engine must register."""
        return self._memory.data_ptr(), self._memory.numel()

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def taken(self) -> int:
        return sum(self._taken.values())

    def take(self, destination: Hashable, nbytes: int) -> StagingSlot | None:
        """A slot, or None when the destination's quota is out. A destination that lets us wait in vain is not waited
        for again until one of its slots comes back."""
        if nbytes > self.slot_bytes:
            return None
        with self._changed:
            if not self._available(destination) and destination not in self._stalled:
                self._changed.wait_for(lambda: self._available(destination), PATIENCE_S)
            if not self._available(destination):
                self._stalled.add(destination)
                return None
            number = self._free.pop()
            self._taken[destination] += 1
            view = self._memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]
            return StagingSlot(number, destination, view)

    def release(self, slot: StagingSlot) -> None:
        """Its writes have landed, or were never started."""
        with self._changed:
            self._return(slot)
            self._free.append(slot.number)
            self._changed.notify_all()

    def quarantine(self, slot: StagingSlot, until: float) -> None:
        """A write that read it failed and may go on reading until then; a spare takes its place."""
        with self._changed:
            self._return(slot)
            self._quarantined.append((until, slot.number))
            if self._spare:
                self._free.append(self._spare.pop())
            self._changed.notify_all()

    def has_room(self, destination: Hashable) -> bool:
        with self._changed:
            return self._available(destination)

    def _available(self, destination: Hashable) -> bool:
        now = time.monotonic()
        over = [number for until, number in self._quarantined if until <= now]
        if over:
            self._quarantined = [(until, number) for until, number in self._quarantined if until > now]
            for number in over:
                (self._spare if len(self._spare) < self._spares else self._free).append(number)
        return bool(self._free) and self._taken[destination] < self._quota

    def _return(self, slot: StagingSlot) -> None:
        self._stalled.discard(slot.destination)
        self._taken[slot.destination] -= 1
        if self._taken[slot.destination] <= 0:
            del self._taken[slot.destination]
