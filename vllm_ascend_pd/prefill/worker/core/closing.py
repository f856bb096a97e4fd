# SPDX-License-Identifier: Apache-2.0
"""Ends of pushes: from their close on this worker until vLLM may free their blocks, and the scheduler forgets them."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_ascend_pd.prefill.worker.core.push import Push
from vllm_ascend_pd.protocol.failure import Failure


class PushClosings:
    """Pushes whose end is still to be reported. `records`: all by name; one leaves once it has closed and retired."""

    def __init__(self, records: dict[str, Push]) -> None:
        self._records = records
        self.reported_to: dict[str, Push] = {}  # by request, until the request and the push have both ended
        self._ended: set[str] = set()  # requests that vLLM has finished, not reported yet
        self._freed: set[str] = set()  # requests that were held and never pushed, not reported yet
        self._failures: list[tuple[str, Failure]] = []  # by transfer, not reported to the scheduler yet

    def add(self, push: Push, *, request_ended: bool) -> None:
        self.reported_to[push.request_id] = push
        if request_ended:
            self._ended.add(push.request_id)

    def close(self, push: Push, failure: Failure | None) -> None:
        self._forget_if_done(push)
        if failure is not None:
            self._failures.append((str(push.transfer), failure))

    def retire(self, names: Iterable[str], freed: Iterable[str]) -> list[Push]:
        """Take in what the scheduler is done with, and return these pushes.

        Their requests hold no blocks (any more): vLLM would stop the engine over a report of them.
        """
        self._freed.update(freed)
        retired = [push for name in names if (push := self._records.get(name)) is not None]
        for push in retired:
            push.retired = True
            self._stop_reporting(push)
            self._forget_if_done(push)
        return retired

    def _stop_reporting(self, push: Push) -> None:
        self.reported_to.pop(push.request_id, None)
        self._ended.discard(push.request_id)

    def _forget_if_done(self, push: Push) -> None:
        if push.closed and push.retired:
            self._records.pop(push.name, None)

    def take_finished(self, ended: Iterable[str]) -> set[str]:
        """Return requests whose blocks may be freed, each once; `ended` are requests that vLLM has finished.

        Their pushes have closed here, or they were held and never pushed.
        """
        self._ended.update(request for request in ended if request in self.reported_to)
        ready = {request for request in self._ended if self.reported_to[request].closed}
        self._ended -= ready
        for request in ready:
            del self.reported_to[request]
        freed, self._freed = self._freed, set()
        return ready | freed

    def take_failures(self) -> list[tuple[str, Failure]]:
        """Return transfers whose push failed here since the last call, and why."""
        failures, self._failures = self._failures, []
        return failures
