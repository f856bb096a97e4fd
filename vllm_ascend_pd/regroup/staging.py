# SPDX-License-Identifier: Apache-2.0
"""Staging slots: registered memory in which an owner assembles what it will write into one D rank.

The number and the size of the slots are fixed at start. A destination has a quota, so that one that stalls cannot take
the slots of the others. A slot whose write failed may still be read for a while: it is quarantined, and a spare takes
its place; without a spare it goes on counting against the destination that spoiled it. Nothing grows: without a slot
the bytes are dropped, and exchanged again later.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from vllm_ascend_pd.errors import LocalProtocolError

PATIENCE_S = 0.05  # how long one step's exchanges may wait for the slots of one destination


@dataclass(slots=True, eq=False, repr=False)
class StagingSlot:
    """One slot while it is taken. `memory` is a flat view of bytes."""

    number: int
    destination: Hashable
    memory: torch.Tensor
    users: int = 0  # writes that read it

    def __repr__(self) -> str:
        """<StagingSlot 3 for d0:4711, 1024 bytes at 0x7f00, read by 2>"""
        where = f"{self.memory.numel()} bytes at {self.address:#x}"
        return f"<StagingSlot {self.number} for {self.destination}, {where}, read by {self.users}>"

    @property
    def address(self) -> int:
        return self.memory.data_ptr()


@dataclass(frozen=True, slots=True)
class _Spoiled:
    until: float
    number: int
    destination: Hashable
    replaced: bool  # by a spare


class Staging:
    """The slots of one worker. Used by the exchange (take) and the pusher (release, quarantine).

    `slot_bytes` is what a step may plan for a slot; `stride`, where it is larger, what a slot has. With `waits` false
    nobody ever waits for a slot: where exchanges are launched by the engine's own thread.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        slot_bytes: int,
        quota: int,
        spares: int,
        *,
        stride: int = 0,
        waits: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slot_bytes, self.stride = slot_bytes, stride or slot_bytes
        count = memory.numel() // self.stride
        if not 0 <= spares < count:
            raise LocalProtocolError(f"{spares} spares of {count} slots")
        self._memory, self._clock = memory, clock
        self._quota, self._spares, self._waits = quota, spares, waits
        self._free = list(range(count - spares))
        self._spare = list(range(count - spares, count))
        self._held: Counter[Hashable] = Counter()  # taken, or spoiled and not replaced, by destination
        self._taken = 0
        self._spoiled: list[_Spoiled] = []
        self._patience: dict[Hashable, float] = {}  # what is left of it in this step
        self._stalled: set[Hashable] = set()  # let us wait in vain and have returned nothing since
        self._changed = threading.Condition()

    @property
    def region(self) -> tuple[int, int]:
        """What the transfer engine must register."""
        return self._memory.data_ptr(), self._memory.numel()

    @property
    def sample(self) -> torch.Tensor:
        """Memory like every slot's, for what depends on its size and device."""
        return self._memory[: self.stride]

    @property
    def count(self) -> int:
        """All slots, spares included: it never changes."""
        return self._memory.numel() // self.stride

    @property
    def taken(self) -> int:
        with self._changed:
            return self._taken

    @property
    def quarantined(self) -> int:
        with self._changed:
            self._pardon()
            return len(self._spoiled)

    def take(self, destination: Hashable, nbytes: int) -> StagingSlot | None:
        """A slot, or None when there is none for this destination.

        A destination that is short of slots is waited for, in all exchanges of a step together PATIENCE_S at most.
        """
        if nbytes > self.slot_bytes:
            raise LocalProtocolError(f"{nbytes} bytes are staged in slots of {self.slot_bytes}")
        with self._changed:
            if not self._room(destination) and not self._wait(destination):
                return None
            number = self._free.pop()
            self._held[destination] += 1
            self._taken += 1
            view = self._memory[number * self.stride : (number + 1) * self.stride]
            return StagingSlot(number, destination, view)

    def new_step(self) -> None:
        """Patience is there again, but not for destinations that are stalled."""
        with self._changed:
            self._stalled = {destination for destination in self._stalled if self._held[destination]}
            self._patience = dict.fromkeys(self._stalled, 0.0)

    def release(self, slot: StagingSlot) -> None:
        """Its writes have landed, or were never started."""
        with self._changed:
            self._taken -= 1
            self._let_go(slot.destination)
            self._free.append(slot.number)
            self._changed.notify_all()

    def quarantine(self, slot: StagingSlot, until: float) -> None:
        """A write that read it failed and may go on reading until then; a spare takes its place."""
        with self._changed:
            self._taken -= 1
            replaced = bool(self._spare)
            if replaced:
                self._let_go(slot.destination)
                self._free.append(self._spare.pop())
            self._spoiled.append(_Spoiled(until, slot.number, slot.destination, replaced))
            self._changed.notify_all()

    def room(self, destination: Hashable) -> int:
        """How many slots this destination would get now."""
        with self._changed:
            return self._room(destination)

    def _wait(self, destination: Hashable) -> bool:
        left = self._patience.get(destination, PATIENCE_S if self._waits else 0.0)
        if left <= 0.0:
            return False
        since = self._clock()
        found = self._changed.wait_for(lambda: self._room(destination) > 0, left)
        self._patience[destination] = left - (self._clock() - since) if found else 0.0
        if not found:
            self._stalled.add(destination)
        return found

    def _room(self, destination: Hashable) -> int:
        self._pardon()
        return max(0, min(len(self._free), self._quota - self._held[destination]))

    def _pardon(self) -> None:
        """Quarantine ends by time alone: slots come back as what they were."""
        now = self._clock()
        if not any(spoiled.until <= now for spoiled in self._spoiled):
            return
        for spoiled in [spoiled for spoiled in self._spoiled if spoiled.until <= now]:
            self._spoiled.remove(spoiled)
            if spoiled.replaced:
                self._spare.append(spoiled.number)
            else:
                self._let_go(spoiled.destination)
                self._free.append(spoiled.number)

    def _let_go(self, destination: Hashable) -> None:
        self._held[destination] -= 1
        self._stalled.discard(destination)
        if self._held[destination] <= 0:
            del self._held[destination]
