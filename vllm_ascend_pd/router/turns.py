# SPDX-License-Identifier: Apache-2.0
"""Long computations on the event loop, in steps: other work waits for one step of one of them only."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import TypeVar

from vllm_ascend_pd.router.core.outline import Scan

T = TypeVar("T")


class Turns:
    """Queue of computations. One step runs in each turn of the loop: of the computation that has scanned least so far.

    So a short text is done before long ones that came earlier, and a long one goes on when no shorter one waits.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: bytes scanned, then by arrival
        self._numbers = itertools.count()
        self._next: asyncio.Handle | None = None

    async def run(self, steps: Scan[T]) -> T:
        """Run `steps`, which yield the bytes of each; return their result and raise their errors."""
        scanned = 0
        try:
            while True:
                scanned += next(steps)
                await self._turn(scanned)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _turn(self, scanned: int) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        heapq.heappush(self._waiting, (scanned, next(self._numbers), turn))
        self._next = self._next or loop.call_soon(self._pass)
        await turn

    def _pass(self) -> None:
        """Give the turn to the first that waits and whose caller has not left; then look again."""
        self._next = None
        while self._waiting and self._next is None:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                self._next = turn.get_loop().call_soon(self._pass)
