# SPDX-License-Identifier: Apache-2.0
"""The wire over Mooncake: it checks bounds, probes unknown peers, then gives the spans to the engine of the link.

Mooncake's engine does not validate addresses, and reports success for a zero length: both are refused here.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_ascend_pd.errors import PdError, one_line
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.contact import Contacts, FirstContact, parted
from vllm_ascend_pd.transport.engine import OpenEngine
from vllm_ascend_pd.transport.peer_probes import ProbeAnswer
from vllm_ascend_pd.transport.spans import Bounds, SpanArrays, as_spans, merge_regions, merge_runs

log = logging.getLogger(__name__)

OPEN_S = 0.8  # then a first contact of the writer is cut off, because other writes wait for it


class TransferEngines(Protocol):
    """The part that depends on the link: the engine that writes, and the state of writes in flight."""

    @property
    def current(self) -> OpenEngine | None:
        """Engine that writes, if one is open. A new engine does not know its predecessor's peers."""

    def register(self, regions: Sequence[tuple[int, int]]) -> None: ...

    def need(self) -> OpenEngine:
        """Return `current`, opened if necessary."""

    def replace(self, why: str) -> None:
        """Start no more writes with `current`."""

    def probe(self, address: str) -> bool:
        """Return whether the engine at `address` answers. Called on any thread."""

    def submit(
        self, engine: OpenEngine, address: str, spans: SpanArrays, issue_by: float, first_s: float | None
    ) -> int:
        """Start a write. `first_s`: if it may be first contact, it is cut off after so many seconds."""

    def poll(self, handle: int) -> WriteState: ...

    def alive(self, handle: int) -> bool:
        """Return whether the write has not failed."""

    def in_first_contact(self) -> bool:
        """Return whether a first contact is in progress or queued: another one would wait for it in the engine."""

    def run_due(self) -> None:
        """Do what is due, such as closing engines. Called with every poll."""

    def close(self, *, probed: bool) -> None:
        """`probed`: no thread is in a probe any more."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A write to a peer that the engine does not know yet. Nothing of it is issued."""

    contact: FirstContact
    spans: SpanArrays

    @property
    def session(self) -> str:
        return self.contact.session


class MooncakeWire:
    def __init__(
        self, engines: TransferEngines, *, can_ask: bool, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`wait_s`: how long after `submit` a write may still be issued; at least FIRST_CONTACT_S (config.py).

        Authority lasts no longer than a lease. After it, D still waits `wait_s` and the time of a transfer.
        """
        self.engines, self._clock, self._wait_s = engines, clock, wait_s
        self._contacts = Contacts(engines.probe, can_ask, clock)
        self._regions: list[tuple[int, int]] = []
        self._bounds = Bounds((), "source")
        self._handles = itertools.count(1)
        self._waiting: dict[int, _Waiting | None] = {}  # None: refused
        self._inner: dict[int, tuple[int, str]] = {}  # handle → the engines' handle, and the session
        self._closed = False

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        merged = merge_regions(regions)
        self.engines.register(merged)
        self._regions += merged
        self._bounds = Bounds(self._regions, "source")

    def listen(self, last_message_at: Callable[[str], float | None]) -> None:
        self._contacts.listen(last_message_at)

    def submit(self, session: str, src: Sequence[int], dst: Sequence[int], size: Sequence[int]) -> int:
        handle = next(self._handles)
        at, to, length = as_spans(src, dst, size)
        try:
            self._bounds.check(at, length)
        except PdError as error:
            log.error("write to %s refused: %s", one_line(session), error)
            self._waiting[handle] = None
            return handle
        spans, issue_by = merge_runs(at, to, length), self._clock() + self._wait_s
        engine = self.engines.current
        if engine is not None and self._contacts.known(engine, session):
            address = self._contacts.at(session)
            self._inner[handle] = self.engines.submit(engine, address, spans, issue_by, None), session
        else:
            self._waiting[handle] = None if self._closed else _Waiting(FirstContact(session, issue_by), spans)
        return handle

    def poll(self, handle: int) -> WriteState:
        self.engines.run_due()
        if handle in self._waiting:
            return self._poll_waiting(handle)
        inner, session = self._inner[handle]
        state = self.engines.poll(inner)
        if state is not WriteState.PENDING:
            del self._inner[handle]
        if state in (WriteState.FAILED, WriteState.UNISSUED):
            self._contacts.lost(session)
        return state

    def close(self) -> None:
        self._closed = True
        probed = self._contacts.close()
        self._waiting = dict.fromkeys(self._waiting)
        self.engines.close(probed=probed)

    def _poll_waiting(self, handle: int) -> WriteState:
        """Issue a waiting write once the peer has answered. Give it up, unissued, if the peer does not answer."""
        write = self._waiting[handle]
        if write is None:
            del self._waiting[handle]
            return WriteState.FAILED
        known = self._contacts.known(self.engines.current, write.session)
        answer = ProbeAnswer.YES if known else self._contacts.ask(write.contact, self.engines.in_first_contact())
        if answer is ProbeAnswer.ASKING:
            return WriteState.PENDING
        del self._waiting[handle]
        if answer is not ProbeAnswer.YES:
            log.warning("the transfer engine at %s does not answer", one_line(parted(write.session)[0]))
        elif self._first_submit(handle, write, known=known):
            return WriteState.PENDING
        if not any(other is not None and other.session == write.session for other in self._waiting.values()):
            self._contacts.forget(write.session)
        return WriteState.UNISSUED

    def _first_submit(self, handle: int, write: _Waiting, *, known: bool) -> bool:
        """Issue a write that may be first contact. Return False if no engine can be opened: only the write fails then.

        In first contact the engine opens the peer's segment while other writes wait, so it is cut off if it takes long.
        """
        if self._contacts.replaced(self.engines.current, write.session):
            self.engines.replace("another process is at the address of a known peer")
        elif self._contacts.crowded(self.engines.current):
            self.engines.replace("it may keep connections to peers that have ended")
        try:
            engine = self.engines.need()
        except PdError as error:
            log.error("nothing can be written: %s", error)
            return False
        address = self._contacts.at(write.session)
        inner = self.engines.submit(engine, address, write.spans, write.contact.end, None if known else OPEN_S)
        self._inner[handle] = inner, write.session
        self._contacts.met(engine, write.session, self.engines.alive(inner))
        return True
