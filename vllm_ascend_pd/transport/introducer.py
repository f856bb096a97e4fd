# SPDX-License-Identifier: Apache-2.0
"""First contact with a peer's engine, away from the writer thread.

Mooncake opens a peer's segment under a mutex that every write needs, and waits up to 60 s for an answer. So a peer is
asked for an answer before, on a thread of its own; who does not answer in time is hung up on, and counts as silent.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_pd.transport.sockets import hang_up

log = logging.getLogger(__name__)

MAX_AT_ONCE = 64
JOIN_S = 1.0


class Answer(enum.Enum):
    ASKING = "asking"
    YES = "yes"
    NO = "no"


@dataclass(slots=True, eq=False)
class _Asked:
    thread: threading.Thread
    since: float
    answer: Answer = Answer.ASKING


class Introducer:
    """`probe(address)` blocks and tells whether the peer answered. The writer thread calls everything here."""

    def __init__(self, probe: Callable[[str], bool], patience_s: float, clock: Callable[[], float]) -> None:
        self._probe, self._patience_s, self._clock = probe, patience_s, clock
        self._asked: dict[str, _Asked] = {}

    def ask(self, address: str) -> Answer:
        """Start asking unless it is being asked already; an answer is given once and then forgotten."""
        asked = self._asked.get(address)
        if asked is None:
            if len(self._asked) >= MAX_AT_ONCE:
                self._forget_finished()
            if len(self._asked) >= MAX_AT_ONCE:
                return Answer.NO
            self._start(address)
            return Answer.ASKING
        if asked.answer is not Answer.ASKING:
            del self._asked[address]
            asked.thread.join(JOIN_S)
        elif self._clock() - asked.since > self._patience_s:
            host, _, port = address.rpartition(":")
            hang_up(host, int(port))  # the thread then ends, with NO
        return asked.answer

    def close(self) -> bool:
        """Idempotent. Hangs up on everybody; whether every thread has ended."""
        left = 0
        for address, asked in self._asked.items():
            if asked.answer is Answer.ASKING:
                host, _, port = address.rpartition(":")
                hang_up(host, int(port))
            asked.thread.join(JOIN_S)
            if asked.thread.is_alive():
                left += 1
                log.error("thread %s did not end within %.0f s", asked.thread.name, JOIN_S)
        self._asked.clear()
        return not left

    def _start(self, address: str) -> None:
        thread = threading.Thread(target=self._run, args=(address,), name=f"pd-introduce-{address}", daemon=True)
        self._asked[address] = _Asked(thread, self._clock())
        thread.start()

    def _run(self, address: str) -> None:
        asked = self._asked[address]
        answered = False
        try:
            answered = self._probe(address)
        finally:
            asked.answer = Answer.YES if answered else Answer.NO

    def _forget_finished(self) -> None:
        for address, asked in list(self._asked.items()):
            if asked.answer is not Answer.ASKING:
                del self._asked[address]
