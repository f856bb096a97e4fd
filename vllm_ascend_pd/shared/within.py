# SPDX-License-Identifier: Apache-2.0
"""A time limit that never loses a cancellation.

Before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes at the moment when the work is done. A loop
that was to end then goes on for ever, and a request whose client has left is still served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Coroutine[Any, Any, T], abandoned: Callable[[T], object] | None = None) -> T:
    """Return the result of `work` or raise asyncio.TimeoutError. A result that comes too late goes to `abandoned`."""
    task = asyncio.get_running_loop().create_task(work)
    taken = False
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        taken = True
        return task.result()
    finally:
        if not taken:
            task.add_done_callback(lambda done: _abandon(done, abandoned))
            task.cancel()


async def ended(task: asyncio.Task[Any]) -> None:
    """Wait until a task has ended, in whatever way. It does less for that than `asyncio.wait`."""
    if not task.done():
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task.add_done_callback(lambda _: None if waiter.done() else waiter.set_result(None))
        await waiter


def _abandon(task: asyncio.Task[T], abandoned: Callable[[T], object] | None) -> None:
    if task.cancelled() or task.exception() is not None:
        return
    if abandoned is not None:
        abandoned(task.result())
