# SPDX-License-Identifier: Apache-2.0
"""What a worker missed: shares of exchanges for which it had no staging slot, until they have been exchanged again.

A share is one slot of one exchange. It is missed when there is no slot, asked for, coming once a later exchange has
found a slot for it, and gone when its bytes were offered or nobody wants them any more. Each push knows what it is
owed, so that nothing here costs more than what it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from vllm_ascend_pd.prefill.core.push import Share, Unit


class Creditor(Protocol):
    """A push: `owed` is kept here."""

    @property
    def owed(self) -> set[Share]: ...


@dataclass(slots=True)
class _Missed:
    destination: Hashable
    pushes: list[Creditor]
    coming: bool = False


@dataclass(slots=True)
class Missed:
    total: int = 0  # ever missed
    _shares: dict[Share, _Missed] = field(default_factory=dict)
    _waiting: dict[Hashable, dict[Share, None]] = field(default_factory=dict)  # by destination, oldest first
    _asked: set[Unit] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._shares)

    def __contains__(self, share: Share) -> bool:
        return share in self._shares

    def miss(self, share: Share, destination: Hashable, pushes: Iterable[Creditor]) -> None:
        """There was no slot. Also when the exchange is made again and there is none once more."""
        self.total += 1
        missed = self._shares.setdefault(share, _Missed(destination, list(pushes)))
        missed.coming = False
        self._waiting.setdefault(destination, {})[share] = None
        for push in missed.pushes:
            push.owed.add(share)

    def waits(self, share: Share) -> bool:
        """Whether this share is still to be fetched: it is not coming already, and somebody wants it."""
        missed = self._shares.get(share)
        return missed is not None and not missed.coming

    def coming(self, share: Share) -> None:
        """An exchange has found a slot for it."""
        missed = self._shares.get(share)
        if missed is not None:
            missed.coming = True
            self._no_longer_waits(share, missed)

    def made_again(self, unit: Unit) -> None:
        """The exchange was made once more: what was missed again may be asked for again."""
        self._asked.discard(unit)

    def arrived(self, share: Share) -> None:
        """Its bytes were offered, or nobody wants them."""
        missed = self._shares.pop(share, None)
        if missed is not None:
            self._no_longer_waits(share, missed)
            for push in missed.pushes:
                push.owed.discard(share)

    def wanted(self, room: Callable[[Hashable], int], most: int) -> list[Unit]:
        """Exchanges to ask for: of each destination that has room the oldest, `most` at a time; each is asked once."""
        found: dict[Unit, None] = {}
        for destination, waiting in self._waiting.items():
            shares = [share for share, _ in zip(waiting, range(2 * most), strict=False)]
            left = room(destination) if shares else 0
            for unit in dict.fromkeys(unit for unit, _ in shares):
                if left <= 0 or len(found) >= most:
                    break
                left -= 1
                if unit not in self._asked:
                    found[unit] = None
        self._asked.update(found)
        return list(found)

    def forget(self, push: Creditor) -> None:
        """Nothing of it is wanted any more: it has closed, or it starts over."""
        for share in list(push.owed):
            missed = self._shares[share]
            missed.pushes.remove(push)
            if not missed.pushes:
                self.arrived(share)
        push.owed.clear()

    def forget_step(self, step: int) -> None:
        for share in [share for share in self._shares if share[0].step == step]:
            self.arrived(share)
        self._asked = {unit for unit in self._asked if unit.step != step}

    def _no_longer_waits(self, share: Share, missed: _Missed) -> None:
        shares = self._waiting.get(missed.destination)
        if shares is not None:
            shares.pop(share, None)
            if not shares:
                del self._waiting[missed.destination]
