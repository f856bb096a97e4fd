# SPDX-License-Identifier: Apache-2.0
"""A clock that only the test moves."""

from __future__ import annotations


class ManualClock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
