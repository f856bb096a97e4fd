# SPDX-License-Identifier: Apache-2.0
"""Layers of shares for which a worker had no staging slot, until another exchange finds one for them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from vllm_ascend_pd.prefill.worker.core.push import Share, Unit


@dataclass(slots=True)
class Missed:
    _waiting: dict[Hashable, dict[tuple[Share, int], None]] = field(
        default_factory=dict
    )  # by destination, oldest first
    _asked: set[Unit] = field(default_factory=set)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def miss(self, share: Share, layer: int) -> None:
        """Record that there was no slot, for the first time or again."""
        self._waiting.setdefault(share.destinations[layer], {})[share, layer] = None

    def drop(self, share: Share, layer: int) -> None:
        """Remove a layer for which a slot was found, or that no push wants any more."""
        destination = share.destinations[layer]
        waiting = self._waiting.get(destination)
        if waiting is not None:
            waiting.pop((share, layer), None)
            if not waiting:
                del self._waiting[destination]

    def wanted(self, room: Callable[[Hashable], int], max_units: int) -> list[Unit]:
        """Return exchanges to ask for: of each destination with room the oldest, up to `max_units`, each once."""
        found: dict[Unit, None] = {}
        for destination, waiting in self._waiting.items():
            left = room(destination)
            oldest = (share.unit(layer) for (share, layer), _ in zip(waiting, range(2 * max_units), strict=False))
            for unit in dict.fromkeys(oldest):
                if left <= 0 or len(found) >= max_units:
                    break
                left -= 1
                if unit not in self._asked:
                    found[unit] = None
        self._asked.update(found)
        return list(found)

    def made(self, unit: Unit) -> None:
        """Record that an exchange was made: what was missed again may be asked for again."""
        self._asked.discard(unit)

    def forget_step(self, step: int) -> None:
        self._asked = {unit for unit in self._asked if unit.step != step}
