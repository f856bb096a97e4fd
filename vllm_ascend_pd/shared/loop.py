# SPDX-License-Identifier: Apache-2.0
"""One named thread that runs an asyncio loop: sockets, HTTP calls and timers of one process live on it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class LoopThread:
    """A loop and its thread. `stop` cancels what is left on the loop and joins the thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Run `callback` soon on the loop, from any thread. Nothing happens once the loop is stopped."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine on the loop and wait for its result; not from the loop's own thread."""
        try:
            return self.submit(coroutine).result(timeout)
        except FutureTimeout as late:  # not the built-in TimeoutError before Python 3.11
            raise TimeoutError(f"no result on {self._thread.name} within {timeout:g} s") from late

    def stop(self, timeout: float = 5.0) -> None:
        """Cancel the remaining tasks, stop the loop and join the thread. Idempotent."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._drain(), self._loop)
            self._thread.join(timeout)
        if self._thread.is_alive():
            log.error("thread %s did not end within %.1f s", self._thread.name, timeout)
        else:
            self._loop.close()

    async def _drain(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)
