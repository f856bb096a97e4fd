# SPDX-License-Identifier: Apache-2.0
"""What a worker missed: shares of exchanges for which it had no staging slot, until they have been exchanged again.

A share is one slot of one exchange. It is missed by the exchange's thread, asked for on the engine's thread, coming
once a later exchange has found a slot for it, and gone when its bytes were offered or nobody wants them any more. Each
push knows what it is owed, so that nothing here costs more than what it touches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from vllm_ascend_pd.runtime.work import Unit

Share = tuple[Unit, int]  # an exchange, and the slot's index in its plan


@dataclass(slots=True)
class _Missed:
    destination: Hashable
    pushes: set[str]
    coming: bool = False


@dataclass(slots=True)
class Missed:
    """Thread-safe; takes no other lock inside its own."""

    total: int = 0  # ever missed
    _shares: dict[Share, _Missed] = field(default_factory=dict)
    _waiting: dict[Hashable, dict[Share, None]] = field(default_factory=dict)  # by destination, oldest first
    _owed: dict[str, set[Share]] = field(default_factory=dict)  # by push
    _asked: set[Unit] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._shares)

    def miss(self, unit: Unit, slot: int, destination: Hashable, pushes: Iterable[str]) -> None:
        """There was no slot. Also when the exchange is made again and there is none once more."""
        with self._lock:
            self.total += 1
            share = (unit, slot)
            missed = self._shares.setdefault(share, _Missed(destination, set(pushes)))
            missed.coming = False
            self._waiting.setdefault(destination, {})[share] = None
            for push in missed.pushes:
                self._owed.setdefault(push, set()).add(share)

    def waits(self, unit: Unit, slot: int) -> bool:
        """Whether this share is still to be fetched: it is not coming already, and somebody wants it."""
        with self._lock:
            missed = self._shares.get((unit, slot))
            return missed is not None and not missed.coming

    def coming(self, unit: Unit, slot: int) -> None:
        """An exchange has found a slot for it."""
        with self._lock:
            missed = self._shares.get((unit, slot))
            if missed is not None:
                missed.coming = True
                self._no_longer_waits((unit, slot), missed)

    def made_again(self, unit: Unit) -> None:
        """The exchange was made once more: what was missed again may be asked for again."""
        with self._lock:
            self._asked.discard(unit)

    def arrived(self, unit: Unit, slot: int) -> None:
        """Its bytes were offered, or nobody wants them."""
        with self._lock:
            self._drop((unit, slot))

    def owes(self, push: str) -> bool:
        with self._lock:
            return push in self._owed

    def wanted(self, room: Callable[[Hashable], int], most: int) -> list[Unit]:
        """Exchanges to ask for: of each destination that has room the oldest, `most` at a time; each is asked once."""
        with self._lock:
            waiting = {destination: list(shares)[: 2 * most] for destination, shares in self._waiting.items()}
            asked = set(self._asked)
        found: dict[Unit, None] = {}
        for destination, shares in waiting.items():
            left = room(destination) if shares else 0
            for unit in dict.fromkeys(unit for unit, _ in shares):
                if left <= 0 or len(found) >= most:
                    break
                left -= 1
                if unit not in asked:
                    found[unit] = None
        with self._lock:
            self._asked.update(found)
        return list(found)

    def forget_push(self, push: str) -> None:
        """Nothing of it is wanted any more: it has closed, or it starts over."""
        with self._lock:
            for share in self._owed.pop(push, ()):
                missed = self._shares[share]
                missed.pushes.discard(push)
                if not missed.pushes:
                    self._drop(share)

    def forget_step(self, step: int) -> None:
        with self._lock:
            for share in [share for share in self._shares if share[0].step == step]:
                self._drop(share)
            self._asked = {unit for unit in self._asked if unit.step != step}

    def _drop(self, share: Share) -> None:
        missed = self._shares.pop(share, None)
        if missed is None:
            return
        self._no_longer_waits(share, missed)
        for push in missed.pushes:
            owed = self._owed.get(push)
            if owed is not None:
                owed.discard(share)
                if not owed:
                    del self._owed[push]

    def _no_longer_waits(self, share: Share, missed: _Missed) -> None:
        shares = self._waiting.get(missed.destination)
        if shares is not None:
            shares.pop(share, None)
            if not shares:
                del self._waiting[missed.destination]
