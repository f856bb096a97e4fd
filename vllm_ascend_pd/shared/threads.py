# SPDX-License-Identifier: Apache-2.0
"""Threads that are started while an engine works. What needs one must do without it if the system refuses it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


def started(name: str, target: Callable[..., None], *arguments: object) -> threading.Thread | None:
    """Start a daemon thread. Return None if that is not possible: at the limit of processes, or without memory."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as refused:
        log.error("thread %s cannot be started (%s): see the limits of processes and of memory", name, refused)
        return None
    return thread


async def aside(work: Callable[..., T], *arguments: object, executor: Executor | None = None) -> T:
    """Run `work` in a thread beside the loop, `executor`'s if given. Where none can be started it holds the loop up."""
    try:
        running = asyncio.get_running_loop().run_in_executor(executor, partial(work, *arguments))
    except RuntimeError as refused:
        name = getattr(getattr(work, "func", work), "__name__", "work")  # without what is given: texts and secrets
        log.error("no thread for %s (%s): see the limit of processes", name, refused)
        return work(*arguments)
    return await running
