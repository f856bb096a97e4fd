# SPDX-License-Identifier: Apache-2.0
"""First contact: who is known to the engine that writes, and whether a stranger may be met now.

* First contact with a peer happens under a mutex that all writes need, for up to 60 s if the peer accepts and stays
  silent. So a peer is asked for an answer first, on another thread, and what it is to get waits for that. An older engine
  cannot ask: there the peer's side channel must have been heard within the last second.
* A peer restarted on the same port is not reachable through an engine that knew its predecessor. So sessions carry a
  tag, and a new tag at a known address asks for a new engine.

Only the writer thread calls this; `probe` runs on threads of the introducer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_pd.transport.engine import Engine
from vllm_ascend_pd.transport.introducer import Answer, Introducer

INTRODUCE_S = 2.0  # a peer that does not answer for so long fails the write, of which nothing was issued
HEARD_S = 1.0  # how fresh a peer's word on the side channel must be, where the engine cannot ask for one


@dataclass(slots=True, eq=False)
class Meeting:
    """What one write waits for: the answer of a peer that the engine does not know yet."""

    session: str
    end: float
    asked_until: float | None = None  # while the peer is being asked


@dataclass(slots=True)
class _Peer:
    tag: str
    answers: bool  # the last write to it succeeded, or is under way: no introduction needed


def parted(session: str) -> tuple[str, str]:
    """Address and tag."""
    address, _, tag = session.partition("/")
    return address, tag


class Contacts:
    def __init__(self, probe: Callable[[str], bool], can_ask: bool, clock: Callable[[], float]) -> None:
        self._can_ask, self._clock = can_ask, clock
        self._introducer = Introducer(probe, INTRODUCE_S, clock)
        self._heard: Callable[[str], float | None] | None = None
        self._engine: Engine | None = None  # whose peers these are
        self._peers: dict[str, _Peer] = {}  # by address

    def listen(self, heard: Callable[[str], float | None]) -> None:
        self._heard = heard

    def known(self, engine: Engine | None, session: str) -> bool:
        """Whether this engine may write to it without asking first."""
        address, tag = parted(session)
        peer = self._of(engine).get(address)
        return peer is not None and peer.answers and peer.tag == tag

    def replaced(self, engine: Engine | None, session: str) -> bool:
        """Whether this engine met another process at the address: it cannot reach the new one."""
        address, tag = parted(session)
        peer = self._of(engine).get(address)
        return peer is not None and peer.tag != tag

    def met(self, engine: Engine, session: str, answers: bool) -> None:
        address, tag = parted(session)
        self._of(engine)[address] = _Peer(tag, answers)

    def lost(self, address: str) -> None:
        """A write to it failed: it is asked again before the next one."""
        if address in self._peers:
            self._peers[address].answers = False

    def ask(self, meeting: Meeting, another: bool) -> Answer:
        """What the peer says to being asked, as far as can be told without waiting. `another`: the engine is busy meeting
        somebody else."""
        now = self._clock()
        if now >= meeting.end:
            return Answer.NO
        if another or not self._vouched(meeting.session):
            meeting.asked_until = None  # an answer would be old before it was of use
            return Answer.ASKING
        if meeting.asked_until is None:
            meeting.asked_until = now + INTRODUCE_S
        answer = self._introducer.ask(meeting.session)
        return Answer.NO if answer is Answer.ASKING and now >= meeting.asked_until else answer

    def forget(self, session: str) -> None:
        """Nobody waits for this answer any more."""
        self._introducer.forget(session)

    def close(self) -> bool:
        """Whether nobody is in a probe any more."""
        return self._introducer.close()

    def _of(self, engine: Engine | None) -> dict[str, _Peer]:
        """An engine that takes another's place knows nobody."""
        if engine is not self._engine:
            self._engine, self._peers = engine, {}
        return self._peers

    def _vouched(self, session: str) -> bool:
        """A connection alone is no answer: the kernel of a stopped process accepts it."""
        if self._can_ask or self._heard is None:
            return True
        heard = self._heard(session)
        return heard is not None and self._clock() - heard <= HEARD_S
