# SPDX-License-Identifier: Apache-2.0
"""Plug-in of vLLM for tests and benchmarks on a CPU: no process spins while it waits for another one.

vLLM's shared-memory queue calls sched_yield for a second after every message. Where the cores are the device, that
takes the cores which the model needs.
"""

from __future__ import annotations

import functools
import time
from typing import Any

POLL_MS = 1


def install() -> None:
    """Replace the spin by short waits for the queue's own notification, where this vLLM has it. Idempotent."""
    from vllm.distributed.device_communicators import shm_broadcast

    condition = getattr(shm_broadcast, "SpinCondition", None)
    original = getattr(condition, "wait", None)
    if condition is None or original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def wait(self: Any, timeout_ms: int | None = None) -> None:
        if time.monotonic() > self.last_read + self.busy_loop_s:
            original(self, timeout_ms)
            return
        # The writer notifies after each message. A notification that was lost (the socket keeps one) costs POLL_MS.
        events = dict(self.poller.poll(timeout=POLL_MS))
        if self.local_notify_socket in events:
            self.local_notify_socket.recv(copy=False)

    condition.wait = wait
