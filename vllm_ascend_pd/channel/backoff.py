# SPDX-License-Identifier: Apache-2.0
"""Waits between dialling attempts: doubling, and each shortened at random, so that a fleet does not return in step."""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """Each wait lies between half and the whole of first·2ⁿ, bounded by `most`. `jitter` returns numbers in [0, 1)."""

    def __init__(self, first: float, most: float, jitter: Callable[[], float]) -> None:
        self._first, self._most, self._jitter = first, most, jitter
        self._failures = 0

    @property
    def failures(self) -> int:
        return self._failures

    def failed(self) -> float:
        """Count one more failure, and return how long to wait."""
        whole = min(self._most, self._first * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return whole * (0.5 + 0.5 * self._jitter())

    def succeeded(self) -> None:
        self._failures = 0
