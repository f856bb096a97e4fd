# SPDX-License-Identifier: Apache-2.0
"""What both cores know of a device."""

from __future__ import annotations

from typing import Protocol


class Event(Protocol):
    """A point on the compute stream."""

    def done(self) -> bool:
        """Non-blocking: everything enqueued before the event has finished."""
