# SPDX-License-Identifier: Apache-2.0
"""First contact with a peer's engine, away from the writer thread.

Mooncake opens a peer's segment under a mutex that every write needs, and waits up to 60 s for an answer. So a peer is
asked for an answer before, on a thread of its own; who does not answer in time is hung up on, and counts as silent.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm_ascend_pd.transport.sockets import hang_up

log = logging.getLogger(__name__)

MAX_AT_ONCE = 64
JOIN_S = 1.0
FRESH_S = 0.5  # an answer older than this proves nothing: shorter than one first contact that drags, so no two add up
AGAIN_S = 0.1  # an engine that was hung up on may try once more


class Answer(enum.Enum):
    ASKING = "asking"
    YES = "yes"
    NO = "no"


@dataclass(slots=True, eq=False)
class _Asked:
    address: str
    since: float
    answered: float = 0.0
    answer: Answer = Answer.ASKING
    thread: threading.Thread = field(init=False)


class Introducer:
    """`probe(address)` blocks and tells whether the peer answered. The writer thread calls everything here.

    A session is "address/tag". What one process answered says nothing of another one at its address.
    """

    def __init__(self, probe: Callable[[str], bool], patience_s: float, clock: Callable[[], float]) -> None:
        self._probe, self._patience_s, self._clock = probe, patience_s, clock
        self._asked: dict[str, _Asked] = {}  # by session
        self._forgotten: list[_Asked] = []  # nobody waits for these any more; their threads are about to end

    def ask(self, session: str) -> Answer:
        """Start asking unless it is being asked already; an answer is given once, soon after it came, or not at all."""
        asked = self._asked.get(session)
        if asked is not None and asked.answer is not Answer.ASKING:
            del self._asked[session]
            asked.thread.join(JOIN_S)
            if self._clock() - asked.answered <= FRESH_S:
                return asked.answer
            asked = None
        if asked is None:
            self._make_room()
            if len(self._asked) + len(self._forgotten) >= MAX_AT_ONCE:
                return Answer.NO
            self._start(session)
        elif self._clock() - asked.since > self._patience_s:
            hang_up(asked.address)  # the thread then ends, with NO
        return Answer.ASKING

    def forget(self, session: str) -> None:
        """Nobody waits for this answer any more."""
        asked = self._asked.pop(session, None)
        if asked is not None and asked.answer is Answer.ASKING:
            hang_up(asked.address)
            self._forgotten.append(asked)

    def close(self) -> bool:
        """Idempotent. Hangs up on everybody; whether every thread has ended."""
        left = 0
        for asked in (*self._asked.values(), *self._forgotten):
            if asked.answer is Answer.ASKING:
                hang_up(asked.address)
            asked.thread.join(JOIN_S)
            if asked.thread.is_alive():
                left += 1
                log.error("thread %s did not end within %.0f s", asked.thread.name, JOIN_S)
        self._asked.clear()
        self._forgotten.clear()
        return not left

    def _start(self, session: str) -> None:
        address = session.partition("/")[0]
        asked = _Asked(address, self._clock())
        asked.thread = threading.Thread(target=self._run, args=(asked,), name=f"pd-introduce-{address}", daemon=True)
        self._asked[session] = asked
        asked.thread.start()

    def _run(self, asked: _Asked) -> None:
        answered = False
        try:
            answered = self._probe(asked.address)
        finally:
            asked.answered = self._clock()
            asked.answer = Answer.YES if answered else Answer.NO

    def _make_room(self) -> None:
        self._forgotten = [asked for asked in self._forgotten if asked.thread.is_alive()]
        if len(self._asked) + len(self._forgotten) >= MAX_AT_ONCE:
            for session, asked in list(self._asked.items()):
                if asked.answer is not Answer.ASKING:
                    del self._asked[session]


@contextlib.contextmanager
def watched(address: str, patience_s: float | None) -> Iterator[None]:
    """Around a first contact, on the thread that makes it: other writes wait while the engine opens the peer's segment,
    so it is hung up on once that has taken so long, again and again until the call is over. None: no first contact."""
    if patience_s is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        left = patience_s
        while not over.wait(left):
            hang_up(address)
            left = AGAIN_S

    thread = threading.Thread(target=watch, name=f"pd-watch-{address}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(JOIN_S)
