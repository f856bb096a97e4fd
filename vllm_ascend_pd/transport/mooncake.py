# SPDX-License-Identifier: Apache-2.0
"""Mooncake's TransferEngine as our Transport. What it does unexpectedly, and what we do about it:

* A failed write goes on: its bytes still land. FAILED is said only when the engine has let go of it; an engine that does
  not let go (the peer is stopped) is closed and another one takes its place.
* First contact with a peer happens under a mutex that all writes need, for up to 60 s if the peer accepts and stays
  silent. So a peer is asked for an answer first, on another thread, and what it is to get waits for that. An older engine
  cannot ask: there the peer's side channel must have been heard within the last second.
* A peer restarted on the same port is not reachable through an engine that knew its predecessor. So sessions carry a
  tag, and a new tag at a known address gets a new engine too.
* Addresses are not validated by the engine, and a zero length is a success: both are refused here.
* What is registered can be written by anybody who reaches the engine's ports. So nothing is registered over TCP until
  somebody asks for our session; who only writes (P) never does.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_ascend_pd.errors import LocalProtocolError, PdError, one_line
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.engine import Engine, can_ask
from vllm_ascend_pd.transport.flights import Flights
from vllm_ascend_pd.transport.introducer import Answer, Introducer
from vllm_ascend_pd.transport.lanes import Lanes
from vllm_ascend_pd.transport.maps import check_mapped
from vllm_ascend_pd.transport.package import load, prepare_environment
from vllm_ascend_pd.transport.spans import Bounds, Bytes, as_spans, merge_regions, merge_runs

log = logging.getLogger(__name__)

INTRODUCE_S = 2.0  # a peer that does not answer for so long fails the write, of which nothing was issued
OPEN_S = 0.8  # then the writer's own first contact is hung up on: the others wait for it
HEARD_S = 1.0  # how fresh a peer's word on the side channel must be, where the engine cannot ask for one
TEND_S = 0.1


@dataclass(slots=True, eq=False)
class _Waiting:
    """A write to a peer that the engine does not know yet. Nothing of it is issued."""

    session: str
    spans: tuple[Bytes, Bytes, Bytes]
    issue_by: float
    asked_until: float | None = None  # while the peer is being asked


class MooncakeTransport:
    """`submit` and `poll` belong to the writer thread; `register`, `session` and `revoke` to the owner's. Neither waits
    for the other."""

    def __init__(
        self,
        host: str,
        protocol: str,
        *,
        transfer_timeout_s: float,
        max_descriptors: int,
        quiet_s: float,
        attach_thread: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        prepare_environment(os.environ, protocol, transfer_timeout_s)
        self._kind = load(protocol)
        self._host, self._protocol, self._quiet_s, self._clock = host, protocol, quiet_s, clock
        self._attach_thread = attach_thread
        self._can_ask = can_ask(self._kind)
        self._heard: Callable[[str], float | None] | None = None
        # Authority lasts no longer than a lease, and D waits that long plus T for what was written under it.
        self._wait_s = max(INTRODUCE_S, quiet_s - transfer_timeout_s)
        self._single = protocol == "ascend"  # one engine per process there, and what it reads must be registered
        self._regions: list[tuple[int, int]] = []
        self._bounds = Bounds((), "source")
        self._home: Engine | None = None  # where peers write to
        self._session = ""
        self._home_lock = threading.Lock()
        self._writer: Engine | None = None
        self._scout: Engine | None = None  # asks for answers, so that a writer can be closed at any time
        self._retired: list[Engine] = []
        self._tags: dict[str, str] = {}  # whom the writer has met: address → tag
        self._known: set[str] = set()  # of these, who answers: no introduction needed
        self._writes: Flights | Lanes = (
            # One call carries a whole batch over Ascend's links, and only its blocking form has been proven there.
            Lanes(max_descriptors, transfer_timeout_s, attach_thread, clock)
            if self._single
            else Flights(max_descriptors, transfer_timeout_s, clock)
        )
        self._introducer = Introducer(self._probe, INTRODUCE_S, clock)
        self._handles = itertools.count(1)
        self._waiting: dict[int, _Waiting | None] = {}  # None: refused
        self._inner: dict[int, tuple[int, str]] = {}  # our handle → that of `_writes`, and the address
        self._tended = 0.0
        self._closed = False

    # -- the owner's side: memory that peers write to

    @property
    def session(self) -> str:
        with self._home_lock:
            self._open_home()
            return self._session

    @property
    def quiet_s(self) -> float:
        return self._quiet_s

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        merged = merge_regions(regions)
        if not self._single:
            check_mapped(merged)
        with self._home_lock:
            if self._home is not None:
                self._home.register(merged)
            self._regions += merged
            self._bounds = Bounds(self._regions, "source")
            if self._single:
                self._open_home()

    def revoke(self) -> str:
        """Closes the engine, which holds the interpreter for about 0.05 s, and registers everything with a new one."""
        self._attach_thread()  # a new engine takes the device of the thread that opens it
        if isinstance(self._writes, Lanes):
            self._writes.drop_all()
            self._writer = self._scout = None
            self._known.clear()
        with self._home_lock:
            if self._home is not None:
                self._home.close()
                self._home = None
            self._open_home()
            return self._session

    def close(self) -> None:
        """Idempotent; after the writer thread has ended."""
        self._closed = True
        if not self._introducer.close():
            self._scout = None  # somebody is in it: it ends with the process
        self._waiting = dict.fromkeys(self._waiting)
        self._writes.close()
        with self._home_lock:
            engines = [*self._retired, self._writer, self._scout, self._home]
            self._retired, self._writer, self._scout, self._home = [], None, None, None
        for engine in engines:
            if engine is None:
                continue
            if isinstance(self._writes, Flights):
                self._writes.drop(engine)
            try:
                engine.close()
            except LocalProtocolError as error:  # it ends with the process
                log.error("shutting down: %s", error)

    # -- the writer thread's side

    def listen(self, heard: Callable[[str], float | None]) -> None:
        self._heard = heard

    def submit(self, session: str, src: Sequence[int], dst: Sequence[int], size: Sequence[int]) -> int:
        handle = next(self._handles)
        at, to, length = as_spans(src, dst, size)
        try:
            self._bounds.check(at, length)
        except PdError as error:
            log.error("write to %s refused: %s", one_line(session), error)
            self._waiting[handle] = None
            return handle
        spans = merge_runs(at, to, length)
        address, _, tag = session.partition("/")
        issue_by = self._clock() + self._wait_s
        if self._writer is not None and address in self._known and self._tags[address] == tag:
            self._inner[handle] = self._issue(self._writer, address, spans, issue_by, None), address
        else:
            self._waiting[handle] = None if self._closed else _Waiting(session, spans, issue_by)
        return handle

    def poll(self, handle: int) -> WriteState:
        self._tend()
        if handle in self._waiting:
            return self._poll_waiting(handle)
        inner, address = self._inner[handle]
        state = self._writes.poll(inner)
        if state is not WriteState.PENDING:
            del self._inner[handle]
        if state in (WriteState.FAILED, WriteState.UNISSUED):
            self._known.discard(address)
        return state

    def _poll_waiting(self, handle: int) -> WriteState:
        """Issue it once the peer has answered; give it up, nothing having been issued, when the peer does not."""
        write = self._waiting[handle]
        if write is None:
            del self._waiting[handle]
            return WriteState.FAILED
        address, _, tag = write.session.partition("/")
        known = address in self._known and self._tags[address] == tag
        answer = Answer.YES if known else self._answer(write)
        if answer is Answer.ASKING:
            return WriteState.PENDING
        del self._waiting[handle]
        if answer is Answer.YES and self._can_write(address, tag):
            self._inner[handle] = self._first_issue(address, tag, write, known=known), address
            return WriteState.PENDING
        if answer is not Answer.YES:
            log.warning("the transfer engine at %s does not answer", one_line(address))
        if not any(other is not None and other.session == write.session for other in self._waiting.values()):
            self._introducer.forget(write.session)
        return WriteState.UNISSUED

    def _answer(self, write: _Waiting) -> Answer:
        """What the peer says to being asked, as far as can be told without waiting."""
        now = self._clock()
        if now >= write.issue_by:
            return Answer.NO
        if self._writes.meeting() or not self._vouched(write.session):
            write.asked_until = None  # an answer would be old before it was of use
            return Answer.ASKING
        if write.asked_until is None:
            write.asked_until = now + INTRODUCE_S
        answer = self._introducer.ask(write.session)
        return Answer.NO if answer is Answer.ASKING and now >= write.asked_until else answer

    def _vouched(self, session: str) -> bool:
        """A connection alone is no answer: the kernel of a stopped process accepts it."""
        if self._can_ask or self._heard is None:
            return True
        heard = self._heard(session)
        return heard is not None and self._clock() - heard <= HEARD_S

    def _can_write(self, address: str, tag: str) -> bool:
        """Have the engine that may meet this peer. One that cannot be opened now fails the write, not the thread."""
        if self._tags.get(address, tag) != tag:
            self._retire("another process is at the address of a known peer")
        try:
            self._need_writer()
        except PdError as error:
            log.error("nothing can be written: %s", error)
            return False
        return True

    def _first_issue(self, address: str, tag: str, write: _Waiting, *, known: bool) -> int:
        """In first contact the engine opens the peer's segment, while others wait: it is hung up on if that drags."""
        first_s = None if known else OPEN_S
        inner = self._issue(self._need_writer(), address, write.spans, write.issue_by, first_s)
        self._tags[address] = tag
        if self._writes.alive(inner):
            self._known.add(address)
        return inner

    def _issue(
        self, engine: Engine, address: str, spans: tuple[Bytes, Bytes, Bytes], issue_by: float, first_s: float | None
    ) -> int:
        if isinstance(self._writes, Lanes):
            return self._writes.submit(engine, address, *spans, issue_by=issue_by, first_s=first_s)
        return self._writes.submit(engine, address, *spans, first_s=first_s)

    def _tend(self) -> None:
        """Replace a writer that holds on to what has failed; close replaced ones when their last write has ended."""
        now = self._clock()
        if now - self._tended < TEND_S or not isinstance(self._writes, Flights):
            return
        self._tended = now
        if self._writer is not None and self._writer in self._writes.stuck():
            self._retire("it holds on to writes that have failed")
        for engine in [engine for engine in self._retired if not self._writes.busy(engine)]:
            self._retired.remove(engine)
            self._writes.drop(engine)
            engine.close()

    def _retire(self, why: str) -> None:
        if self._writer is None or self._single:
            return
        log.warning("the transfer engine that writes is replaced: %s", why)
        self._retired.append(self._writer)
        self._writer = None
        self._tags.clear()
        self._known.clear()

    # -- engines

    def _open_home(self) -> Engine:
        if self._home is None:
            if self._closed:
                raise PdError("PD-WIRE-001", why="the transport is closed")
            self._home = Engine(self._kind, self._host, self._protocol)
            self._home.register(self._regions)
            self._session = f"{self._home.address}/{os.urandom(4).hex()}"
        return self._home

    def _need_writer(self) -> Engine:
        if self._single:
            with self._home_lock:
                self._writer = self._open_home()
        elif self._writer is None:
            self._writer = Engine(self._kind, self._host, self._protocol)
            if self._protocol != "tcp":
                self._writer.register(self._regions)
        return self._writer

    def _probe(self, address: str) -> bool:
        """On an introducer's thread."""
        with self._home_lock:
            if self._closed:
                return False
            if self._scout is None:
                self._scout = self._open_home() if self._single else Engine(self._kind, self._host, self._protocol)
            scout = self._scout
        return scout.answers(address)
