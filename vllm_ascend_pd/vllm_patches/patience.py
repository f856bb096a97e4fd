# SPDX-License-Identifier: Apache-2.0
"""Waiting without spinning. Only this file changes how vLLM itself waits.

A request in WAITING_FOR_REMOTE_KVS keeps the engine core stepping once a millisecond. `install_nap` lets the core sleep
on its own input queue instead while remote loads are all that is pending; a new request, an abort or news of a transfer
wakes it at once. Switch: `patient` in kv_connector_extra_config. Where vLLM has no such internals (checked by
attribute) nothing is changed.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

from vllm_ascend_pd.vllm_patches.wrapping import wrap

log = logging.getLogger(__name__)

NAP_S = 0.25  # the longest: news wakes it, and of news on its way between two hosts a datagram may be lost
_STEP = "_process_engine_step"


class Patience:
    """Naps of an engine core: when it may nap, and what wakes it. `news` may be called from any thread.

    `budget` counts the requests for which the core may nap, None if it must not; `due_s` returns the time until the
    scheduler must look without news.
    """

    def __init__(self, budget: Callable[[], int | None], due_s: Callable[[], float] = lambda: math.inf) -> None:
        self._budget, self._due_s = budget, due_s
        self._news = threading.Event()
        self._queue: queue.Queue[Any] | None = None
        self._steps_before_nap = 0  # in-flight batches whose results are of before the news

    def news(self) -> None:
        self._news.set()
        waiting = self._queue
        if waiting is not None:
            with waiting.not_empty:
                waiting.not_empty.notify_all()

    def nap(self, inbox: queue.Queue[Any], waiting_requests: int, in_flight: int = 0) -> None:
        """Sleep until there is news or input, if remote loads are all that the engine waits for.

        With (empty) batches in flight the next step brings a result from before the news. As many more steps are needed
        until the result that reports the news.
        """
        budget = self._budget()
        if budget is None or waiting_requests > budget:
            return
        if self._steps_before_nap > 0:
            self._steps_before_nap -= 1
            return
        self._queue = inbox
        with inbox.not_empty:
            if not self._news.is_set() and not inbox.queue:
                inbox.not_empty.wait(max(0.0, min(NAP_S, self._due_s())))
        if self._news.is_set():
            self._steps_before_nap = in_flight
        self._news.clear()


def install_nap() -> bool:
    """Let an engine core with our connector nap between empty steps. Idempotent."""
    from vllm.v1.engine.core import EngineCoreProc

    if not hasattr(EngineCoreProc, _STEP):
        log.warning("this vLLM's engine core steps differently: it keeps stepping while it waits for remote KV")
        return False
    wrap(EngineCoreProc, _STEP, _then_nap)
    return True


def _then_nap(original: Any) -> Any:
    def step_then_nap(self: Any) -> bool:
        executed = original(self)
        # With asynchronous scheduling, or a pipeline, a step leaves a batch in flight: here one without tokens.
        in_flight = self.batch_queue or ()
        if not executed and not any(output.total_num_scheduled_tokens for _, output, *_ in in_flight):
            connector = self.scheduler.get_kv_connector()
            patience = getattr(connector, "patience", None)
            if isinstance(patience, Patience) and self.scheduler.has_requests():
                running, waiting = self.scheduler.get_request_counts()
                if not running:
                    patience.nap(self.input_queue, waiting, len(in_flight))
        return bool(executed)

    return step_then_nap
