# SPDX-License-Identifier: Apache-2.0
"""First contact: the peers that the writing engine knows, and probes of those that it does not know yet.

* First contact with a peer happens under a mutex that all writes need. It takes up to 60 s if the peer accepts the
  connection and stays silent. So a peer is probed first, on another thread, and writes to it wait for its answer. Older
  engines have no probe: there the peer must have sent something on its side channel within the last second.
* A peer restarted on the same port cannot be reached through an engine that knew its predecessor. So sessions carry a
  tag. A new tag at a known address needs a new engine.
* An engine keeps its connection to a peer that has ended until it writes to it again. So one that knows many peers that
  nothing was written to for long is replaced before the next first contact.

Only the writer thread calls this; `probe` runs on threads of the probes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_ascend_pd.config import FIRST_CONTACT_S
from vllm_ascend_pd.transport.engine import OpenEngine
from vllm_ascend_pd.transport.peer_probes import PeerProbes, ProbeAnswer

IDLE_S = 600.0
MAX_IDLE = 8  # peers not written to for IDLE_S that an engine may know
HEARD_S = 1.0  # largest age of a peer's last message on the side channel, where the engine has no probe


@dataclass(slots=True, eq=False)
class FirstContact:
    """First contact that one write waits for: the answer of a peer that the engine does not know yet."""

    session: str
    end: float
    asked_until: float | None = None  # end of the wait for the answer; None: not probed


@dataclass(slots=True)
class _Peer:
    tag: str
    answers: bool  # the last write to it succeeded or is in flight: no probe needed
    used: float  # time of the last write


def parted(session: str) -> tuple[str, str]:
    """Return address and tag of a session."""
    address, _, tag = session.partition("/")
    return address, tag


class Contacts:
    def __init__(self, probe: Callable[[str], bool], can_ask: bool, clock: Callable[[], float]) -> None:
        self._can_ask, self._clock = can_ask, clock
        self._probes = PeerProbes(probe, FIRST_CONTACT_S, clock)
        self._last_message_at: Callable[[str], float | None] | None = None
        self._engine: OpenEngine | None = None  # the engine that knows `_peers`
        self._peers: dict[str, _Peer] = {}  # by address

    def listen(self, last_message_at: Callable[[str], float | None]) -> None:
        self._last_message_at = last_message_at

    def known(self, engine: OpenEngine | None, session: str) -> bool:
        """Return whether this engine may write to the session without a probe."""
        address, tag = parted(session)
        peer = self._of(engine).get(address)
        return peer is not None and peer.answers and peer.tag == tag

    def replaced(self, engine: OpenEngine | None, session: str) -> bool:
        """Return whether this engine knows an earlier process at the address, so that it cannot reach the new one."""
        address, tag = parted(session)
        peer = self._of(engine).get(address)
        return peer is not None and peer.tag != tag

    def met(self, engine: OpenEngine, session: str, answers: bool) -> None:
        address, tag = parted(session)
        self._of(engine)[address] = _Peer(tag, answers, self._clock())

    def crowded(self, engine: OpenEngine | None) -> bool:
        """Return whether this engine may keep the connections of many peers that have ended."""
        since = self._clock() - IDLE_S
        return sum(peer.used < since for peer in self._of(engine).values()) > MAX_IDLE

    def at(self, session: str) -> str:
        """Return where to write now: the numeric address at which the peer has answered.

        The engine would look a name up under its mutex.
        """
        address, _ = parted(session)
        if address in self._peers:
            self._peers[address].used = self._clock()
        return self._probes.at(address)

    def lost(self, session: str) -> None:
        """Note a failed write: the peer is probed again before the next one."""
        address, _ = parted(session)
        if address in self._peers:
            self._peers[address].answers = False

    def ask(self, contact: FirstContact, another: bool) -> ProbeAnswer:
        """Probe the peer and return its answer, without waiting. `another`: the engine is in another first contact."""
        now = self._clock()
        if now >= contact.end:
            return ProbeAnswer.NO
        if another or not self._vouched(contact.session):
            contact.asked_until = None  # an answer would be too old by the time it is needed
            return ProbeAnswer.ASKING
        if contact.asked_until is None:
            contact.asked_until = now + FIRST_CONTACT_S
        answer = self._probes.ask(contact.session)
        return ProbeAnswer.NO if answer is ProbeAnswer.ASKING and now >= contact.asked_until else answer

    def forget(self, session: str) -> None:
        """Drop the probe of a session: no write waits for its answer any more."""
        self._probes.forget(session)

    def close(self) -> bool:
        """End all probes. Return whether no thread is in one any more."""
        return self._probes.close()

    def _of(self, engine: OpenEngine | None) -> dict[str, _Peer]:
        """Return the peers that the engine knows. A new engine knows none."""
        if engine is not self._engine:
            self._engine, self._peers = engine, {}
        return self._peers

    def _vouched(self, session: str) -> bool:
        """Return whether the peer's answer can be trusted.

        An engine without a probe can only connect, and the kernel accepts connections even for a stopped process. So
        there the peer must have sent a message lately, if `last_message_at` is known.
        """
        if self._can_ask or self._last_message_at is None:
            return True
        at = self._last_message_at(session)
        return at is not None and self._clock() - at <= HEARD_S
