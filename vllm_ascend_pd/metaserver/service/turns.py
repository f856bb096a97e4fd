# SPDX-License-Identifier: Apache-2.0
"""Long work in small steps on the event loop: one step of all work in a turn, so that all else waits no longer."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from vllm_ascend_pd.metaserver.outline import Steps

T = TypeVar("T")


class Turns:
    """Queue of work with more than one step: one runs at a time, as several would make a turn as long as their sum."""

    def __init__(self) -> None:
        self._lane = asyncio.Lock()

    async def take(self, steps: Steps[T]) -> T:
        """Run `steps`; return their result and raise their errors."""
        try:
            next(steps)
            async with self._lane:
                while True:
                    await asyncio.sleep(0)
                    next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
