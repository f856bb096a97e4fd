# SPDX-License-Identifier: Apache-2.0
"""What prefill writes with: bounds are checked, strangers are met, then the engine of the link is given the spans.

Addresses are not validated by Mooncake's engine, and a zero length is a success: both are refused here.
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
from vllm_ascend_pd.transport.contact import INTRODUCE_S, Contacts, Meeting, parted
from vllm_ascend_pd.transport.engine import Engine
from vllm_ascend_pd.transport.introducer import Answer
from vllm_ascend_pd.transport.spans import Bounds, Spans, as_spans, merge_regions, merge_runs

log = logging.getLogger(__name__)

OPEN_S = 0.8  # then the writer's own first contact is hung up on: the others wait for it


class Engines(Protocol):
    """What differs from link to link: which engine writes, and how writes in flight are followed."""

    @property
    def current(self) -> Engine | None:
        """The engine that writes, if one is open. Another one knows no peer of its predecessor's."""

    def register(self, regions: Sequence[tuple[int, int]]) -> None: ...

    def need(self) -> Engine:
        """`current`, opened if it must be."""

    def replace(self, why: str) -> None:
        """Nothing new is written with `current`."""

    def probe(self, address: str) -> bool:
        """Whether the engine there answers; on any thread."""

    def submit(self, engine: Engine, address: str, spans: Spans, issue_by: float, first_s: float | None) -> int:
        """`first_s`: it may be first contact, which is hung up on after so long."""

    def poll(self, handle: int) -> WriteState: ...

    def alive(self, handle: int) -> bool:
        """Whether it has not failed already."""

    def meeting(self) -> bool:
        """A first contact is under way, or about to be: another one would wait for it in the engine."""

    def tend(self) -> None:
        """Called often."""

    def close(self, *, probed: bool) -> None:
        """`probed`: nobody is in a probe any more."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A write to a peer that the engine does not know yet. Nothing of it is issued."""

    meeting: Meeting
    spans: Spans

    @property
    def session(self) -> str:
        return self.meeting.session


class MooncakeWire:
    def __init__(
        self, engines: Engines, *, can_ask: bool, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`wait_s`: how long after `submit` a write may still be issued. Authority lasts no longer than a lease, and D waits
        that long and the time of a transfer for what was written under it."""
        self._engines, self._clock, self._wait_s = engines, clock, max(INTRODUCE_S, wait_s)
        self._contacts = Contacts(engines.probe, can_ask, clock)
        self._regions: list[tuple[int, int]] = []
        self._bounds = Bounds((), "source")
        self._handles = itertools.count(1)
        self._waiting: dict[int, _Waiting | None] = {}  # None: refused
        self._inner: dict[int, tuple[int, str]] = {}  # our handle → that of the engines, and the address
        self._closed = False

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        merged = merge_regions(regions)
        self._engines.register(merged)
        self._regions += merged
        self._bounds = Bounds(self._regions, "source")

    def listen(self, heard: Callable[[str], float | None]) -> None:
        self._contacts.listen(heard)

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
        engine = self._engines.current
        if engine is not None and self._contacts.known(engine, session):
            address, _ = parted(session)
            self._inner[handle] = self._engines.submit(engine, address, spans, issue_by, None), address
        else:
            self._waiting[handle] = None if self._closed else _Waiting(Meeting(session, issue_by), spans)
        return handle

    def poll(self, handle: int) -> WriteState:
        self._engines.tend()
        if handle in self._waiting:
            return self._poll_waiting(handle)
        inner, address = self._inner[handle]
        state = self._engines.poll(inner)
        if state is not WriteState.PENDING:
            del self._inner[handle]
        if state in (WriteState.FAILED, WriteState.UNISSUED):
            self._contacts.lost(address)
        return state

    def close(self) -> None:
        self._closed = True
        probed = self._contacts.close()
        self._waiting = dict.fromkeys(self._waiting)
        self._engines.close(probed=probed)

    def _poll_waiting(self, handle: int) -> WriteState:
        """Issue it once the peer has answered; give it up, nothing having been issued, when the peer does not."""
        write = self._waiting[handle]
        if write is None:
            del self._waiting[handle]
            return WriteState.FAILED
        known = self._contacts.known(self._engines.current, write.session)
        answer = Answer.YES if known else self._contacts.ask(write.meeting, self._engines.meeting())
        if answer is Answer.ASKING:
            return WriteState.PENDING
        del self._waiting[handle]
        if answer is not Answer.YES:
            log.warning("the transfer engine at %s does not answer", one_line(parted(write.session)[0]))
        elif self._first_submit(handle, write, known=known):
            return WriteState.PENDING
        if not any(other is not None and other.session == write.session for other in self._waiting.values()):
            self._contacts.forget(write.session)
        return WriteState.UNISSUED

    def _first_submit(self, handle: int, write: _Waiting, *, known: bool) -> bool:
        """In first contact the engine opens the peer's segment, while others wait: it is hung up on if that drags. An engine
        that cannot be opened now fails the write, not the thread."""
        if self._contacts.replaced(self._engines.current, write.session):
            self._engines.replace("another process is at the address of a known peer")
        try:
            engine = self._engines.need()
        except PdError as error:
            log.error("nothing can be written: %s", error)
            return False
        address, _ = parted(write.session)
        inner = self._engines.submit(engine, address, write.spans, write.meeting.end, None if known else OPEN_S)
        self._inner[handle] = inner, address
        self._contacts.met(engine, write.session, self._engines.alive(inner))
        return True
