# SPDX-License-Identifier: Apache-2.0
"""Interface of a device event, for the cores of both roles."""

from __future__ import annotations

from typing import Protocol


class Event(Protocol):
    """A point on the compute stream."""

    def done(self) -> bool:
        """Return, without blocking, whether everything enqueued before the event has finished."""
