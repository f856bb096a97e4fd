# SPDX-License-Identifier: Apache-2.0
"""Long work in small steps on the loop: one step to a turn, whoever's it is, so that nothing else waits for more than that."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from vllm_ascend_pd.metaserver.outline import Steps

T = TypeVar("T")


class Turns:
    """What takes more than one step waits for what came before it: many at once would make a turn as long as all their steps."""

    def __init__(self) -> None:
        self._lane = asyncio.Lock()

    async def take(self, steps: Steps[T]) -> T:
        """The result of `steps`, and whatever they raise."""
        try:
            next(steps)
            async with self._lane:
                while True:
                    await asyncio.sleep(0)
                    next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
