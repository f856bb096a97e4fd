# SPDX-License-Identifier: Apache-2.0
"""Staging slots: registered memory in which an owner assembles what it will write into one D rank.

The number and the size of the slots are fixed at start. Each destination has a quota, so that a stalled one cannot
take the slots of the others. A slot is free again as soon as its writes are over. That includes failed writes, which
may still be reading it: such bytes land in blocks that D still keeps for the failed transfer
(docs/decisions/slots-of-failed-writes.md). If there is no slot the bytes are dropped, and exchanged again later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_ascend_pd.config import RegroupConfig
from vllm_ascend_pd.errors import LocalProtocolError
from vllm_ascend_pd.geometry.layout import FRACTAL_PACKING, CacheGeometry

SLOT_TIMEOUT_S = 0.05  # the longest that one step's exchanges wait for slots of one destination, in all


def exchanges_possible(config: RegroupConfig, geometry: CacheGeometry, tp_size: int) -> bool:
    """Return whether ranks can ever have to exchange.

    They never have to with TP 1, one KV head for all ranks, tokens divided among ranks, or `regroup: never`. What is
    made of P's cache on the way is made in exchanges, also of one rank alone.
    """
    if geometry.packing == FRACTAL_PACKING:
        return True
    split = any(kind.kv_heads > 1 and not kind.group.stateful for kind in geometry.kinds)
    return tp_size > 1 and geometry.ranks.world == 1 and split and config.regroup != "never"


class FlatMemory(Protocol):
    """Flat bytes of a device; each slot is a slice of them."""

    def numel(self) -> int: ...
    def data_ptr(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Any: ...


@dataclass(slots=True, eq=False, repr=False)
class StagingSlot:
    """One slot while it is taken. `memory` is a flat view of bytes."""

    number: int
    destination: Hashable
    memory: Any
    users: int = 0  # shares that lie in it

    def __repr__(self) -> str:
        """<StagingSlot 3 for d0:4711, 1024 bytes at 0x7f00, read by 2>"""
        where = f"{self.memory.numel()} bytes at {self.address:#x}"
        return f"<StagingSlot {self.number} for {self.destination}, {where}, read by {self.users}>"

    @property
    def address(self) -> int:
        return int(self.memory.data_ptr())


class Staging:
    """The slots of one worker.

    `slot_bytes` is the size that a step may plan with; `stride` is the size of a slot, if that is larger. With `waits`
    false no exchange waits for a slot: the engine's own thread launches the exchanges.
    """

    def __init__(self, memory: FlatMemory, slot_bytes: int, quota: int, *, stride: int = 0, waits: bool = True) -> None:
        self.slot_bytes, self.stride, self.waits = slot_bytes, stride or slot_bytes, waits
        self.count = memory.numel() // self.stride  # constant
        self._memory, self._quota = memory, quota
        self._free = list(range(self.count))
        self._taken: Counter[Hashable] = Counter()  # by destination
        self._wait_left: dict[Hashable, float] = {}  # time left to wait in this step, by destination
        self._until: dict[Hashable, float] = {}  # end of the wait, by destination that is being waited for
        self._stalled: set[Hashable] = set()  # waited for in vain, and no slot came back since

    @property
    def region(self) -> tuple[int, int]:
        """Address and length that the transfer engine must register."""
        return self._memory.data_ptr(), self._memory.numel()

    @property
    def sample(self) -> Any:
        """Memory of the size and device of any slot, to prepare tables with."""
        return self._memory[: self.stride]

    @property
    def taken(self) -> int:
        return self.count - len(self._free)

    def new_step(self) -> None:
        """Start a step: exchanges may wait for slots again, except for destinations that are stalled."""
        self._stalled = {destination for destination in self._stalled if self._taken[destination]}
        self._wait_left = dict.fromkeys(self._stalled, 0.0)
        self._until.clear()

    def wait_left(self, now: float, destination: Hashable) -> float:
        """Return how many seconds to wait for a slot before `take`. Call it again after each wait.

        All exchanges of a step together wait for a destination at most SLOT_TIMEOUT_S.
        """
        waited_until = self._until.pop(destination, None)
        left = self._wait_left.get(destination, SLOT_TIMEOUT_S if self.waits else 0.0)
        room = self.room(destination) > 0
        if waited_until is not None:
            left = self._wait_left[destination] = max(0.0, waited_until - now)
            if not left and not room:
                self._stalled.add(destination)
        if room or not left:
            return 0.0
        self._until[destination] = now + left
        return left

    def take(self, destination: Hashable, nbytes: int) -> StagingSlot | None:
        """Take a slot. Return None if there is none for this destination."""
        if nbytes > self.slot_bytes:
            raise LocalProtocolError(f"{nbytes} bytes are staged in slots of {self.slot_bytes}")
        if not self.room(destination):
            return None
        number = self._free.pop()
        self._taken[destination] += 1
        return StagingSlot(number, destination, self._memory[number * self.stride : (number + 1) * self.stride])

    def release(self, slot: StagingSlot) -> None:
        """Take back a slot whose writes are over, or were never started."""
        self._free.append(slot.number)
        self._taken[slot.destination] -= 1
        self._stalled.discard(slot.destination)
        if self._taken[slot.destination] <= 0:
            del self._taken[slot.destination]

    def room(self, destination: Hashable) -> int:
        """Return how many slots this destination could take now."""
        return max(0, min(len(self._free), self._quota - self._taken[destination]))
