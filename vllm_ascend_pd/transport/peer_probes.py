# SPDX-License-Identifier: Apache-2.0
"""Probes of peers' engines, away from the writer thread.

Mooncake opens a peer's segment under a mutex that every write needs, and waits up to 60 s for an answer. So each peer
is probed before that, on a thread of its own, which first looks its name up. The connection to a peer that does not
answer in time is shut down, and the answer is NO.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm_ascend_pd.errors import one_line
from vllm_ascend_pd.shared.threads import started
from vllm_ascend_pd.transport.mooncake_sockets import numeric, shut_connections

log = logging.getLogger(__name__)

MAX_AT_ONCE = 64
MAX_NAMES = 4096
JOIN_S = 1.0
FRESH_S = 0.5  # older answers do not count; below `wire.OPEN_S`, so two slow first contacts never add up
AGAIN_S = 0.1  # until the next shutdown of connections, because an engine may connect once more


class ProbeAnswer(enum.Enum):
    ASKING = "asking"
    YES = "yes"
    NO = "no"


@dataclass(slots=True, eq=False)
class _AskedPeer:
    address: str  # as the peer gives it: perhaps with a name
    cut_at: float  # when its connections are shut down next
    tried: str = ""  # the numeric address that is probed, or was last
    ended: bool = False  # no other address is tried
    answered: float = 0.0
    answer: ProbeAnswer = ProbeAnswer.ASKING
    thread: threading.Thread = field(init=False)


class PeerProbes:
    """Runner of probes. Only the writer thread calls it. `probe(address)` blocks and returns whether the peer answered.

    A session is "address/tag". The answer of one process says nothing about another one at its address.
    """

    def __init__(self, probe: Callable[[str], bool], timeout_s: float, clock: Callable[[], float]) -> None:
        self._probe, self._timeout_s, self._clock = probe, timeout_s, clock
        self._asked: dict[str, _AskedPeer] = {}  # by session
        self._numeric: dict[str, str] = {}  # by the peer's address: the numeric one at which it answered last
        self._forgotten: list[_AskedPeer] = []  # no write waits for these any more; their threads are about to end

    def ask(self, session: str) -> ProbeAnswer:
        """Return the answer, or ASKING. Start a probe unless one is running.

        An answer is returned once, and only within FRESH_S of its arrival. It is NO with too many probes running, or
        without a thread for another one.
        """
        asked = self._asked.get(session)
        if asked is not None and asked.answer is not ProbeAnswer.ASKING:
            del self._asked[session]
            asked.thread.join(JOIN_S)
            if self._clock() - asked.answered <= FRESH_S:
                if asked.answer is ProbeAnswer.YES:
                    self._note(asked)
                return asked.answer
            asked = None
        if asked is None:
            self._make_room()
            if len(self._asked) + len(self._forgotten) >= MAX_AT_ONCE or not self._start(session):
                return ProbeAnswer.NO
        elif (now := self._clock()) > asked.cut_at:
            asked.cut_at = now + AGAIN_S  # a look at all descriptors takes the writer's time
            self._cut(asked)  # the thread then ends, with NO
        return ProbeAnswer.ASKING

    def at(self, address: str) -> str:
        """Return the numeric form of an address that has answered. Its name is not looked up again."""
        return self._numeric.get(address, address)

    def forget(self, session: str) -> None:
        """End the probe of a session: no write waits for its answer any more."""
        asked = self._asked.pop(session, None)
        if asked is not None and asked.answer is ProbeAnswer.ASKING:
            self._cut(asked)
            self._forgotten.append(asked)

    def close(self) -> bool:
        """End all probes. Return whether every thread has ended. Idempotent."""
        left = 0
        for asked in (*self._asked.values(), *self._forgotten):
            if asked.answer is ProbeAnswer.ASKING:
                self._cut(asked)
            asked.thread.join(JOIN_S)
            if asked.thread.is_alive():
                left += 1
                log.error("thread %s did not end within %.0f s", asked.thread.name, JOIN_S)
        self._asked.clear()
        self._forgotten.clear()
        return not left

    def _start(self, session: str) -> bool:
        address = session.partition("/")[0]
        asked = _AskedPeer(address, self._clock() + self._timeout_s)
        thread = started(f"pd-probe-{address}", self._run, asked)
        if thread is None:
            return False
        asked.thread = thread
        self._asked[session] = asked
        return True

    def _run(self, asked: _AskedPeer) -> None:
        answered = False
        try:
            for address in numeric(asked.address):
                asked.tried = address
                answered = not asked.ended and self._probe(address)
                if answered:
                    break
        except OSError as unknown:
            log.warning("%s cannot be looked up: %s", one_line(asked.address), unknown)
        finally:
            asked.answered = self._clock()
            asked.answer = ProbeAnswer.YES if answered else ProbeAnswer.NO

    def _cut(self, asked: _AskedPeer) -> None:
        asked.ended = True
        if asked.tried:  # else its name is still looked up
            shut_connections(asked.tried)

    def _note(self, asked: _AskedPeer) -> None:
        self._numeric[asked.address] = asked.tried
        if len(self._numeric) > MAX_NAMES:
            del self._numeric[next(iter(self._numeric))]

    def _make_room(self) -> None:
        self._forgotten = [asked for asked in self._forgotten if asked.thread.is_alive()]
        if len(self._asked) + len(self._forgotten) >= MAX_AT_ONCE:
            for session, asked in list(self._asked.items()):
                if asked.answer is not ProbeAnswer.ASKING:
                    del self._asked[session]


@contextlib.contextmanager
def watched(address: str, timeout_s: float | None) -> Iterator[bool]:
    """Limit a first contact with a numeric address, made inside this context on the same thread.

    Other writes wait while it opens a segment.
    After `timeout_s` its connections are shut down, again and again until the call is over. None: no first contact.
    Yield whether the contact may be made: not without a thread that can end it.
    """
    if timeout_s is None:
        yield True
        return
    ended = threading.Event()

    def watch() -> None:
        left = timeout_s
        while not ended.wait(left):
            shut_connections(address)
            left = AGAIN_S

    thread = started(f"pd-watch-{address}", watch)
    try:
        yield thread is not None
    finally:
        ended.set()
        if thread is not None:
            thread.join(JOIN_S)
