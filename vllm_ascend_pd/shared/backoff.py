# SPDX-License-Identifier: Apache-2.0
"""Delay between repetitions: doubling, bounded, and shortened at random, so that a fleet does not return in step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Bounds of the delay. `floor` is the share of it that chance cannot take away."""

    first_s: float
    longest_s: float
    floor: float = 0.0

    def delay(self, failures: int, rand: float) -> float:
        """Return the delay after `failures` failures in a row (1, 2, …); `rand` in [0, 1)."""
        bound = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return bound * (self.floor + (1.0 - self.floor) * rand)
