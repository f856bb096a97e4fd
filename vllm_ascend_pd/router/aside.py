# SPDX-License-Identifier: Apache-2.0
"""Long texts are read aside, on a thread of their own: the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vllm_ascend_pd.router.core.pieces import Buffer
from vllm_ascend_pd.shared.threads import aside

T = TypeVar("T")
AT_ONCE = 1 << 20  # bytes of the longest text that is read on the loop: some milliseconds


class Aside:
    """The thread, which reads one text at a time: the shortest of those that wait. It begins with the first of them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "long texts")
        self.waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: by length, then by arrival
        self._numbers = itertools.count()
        self._busy = False

    async def run(self, read: Callable[[Buffer], T], text: Buffer) -> T:
        """Return `read(text)`. A caller that is cancelled goes when the thread has done with its text."""
        if len(text) <= AT_ONCE:
            return read(text)
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self.waiting, (len(text), next(self._numbers), turn))
        self._pass()
        try:
            await turn
            reading = asyncio.create_task(aside(read, text, executor=self._thread))
            try:
                return await asyncio.shield(reading)
            finally:
                await asyncio.wait((reading,))  # until then the text is in memory, and counts
        finally:
            if turn.done() and not turn.cancelled():
                self._busy = False
                self._pass()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _pass(self) -> None:
        """Give the turn to the first that waits and whose caller has not left."""
        while self.waiting and not self._busy:
            turn = heapq.heappop(self.waiting)[2]
            if not turn.done():
                self._busy = True
                turn.set_result(None)
