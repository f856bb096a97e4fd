# SPDX-License-Identifier: Apache-2.0
"""Long computations on the event loop, in steps: other work waits for one step of one of them only."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from vllm_ascend_pd.metaserver.outline import Scan

T = TypeVar("T")


class Turns:
    """Queue of computations: one runs at a time, since steps of several would make the wait as long as their sum."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, steps: Scan[T]) -> T:
        """Run `steps`; return their result and raise their errors."""
        try:
            next(steps)
            async with self._lock:
                while True:
                    await asyncio.sleep(0)
                    next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
