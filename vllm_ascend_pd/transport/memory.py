# SPDX-License-Identifier: Apache-2.0
"""A transfer engine inside one process: sessions are looked up in a table and bytes are copied by memmove.

For tests and for pairs in one process. `land` decides how a write ends and may be overridden.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_ascend_pd.errors import PdError, one_line
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.spans import Bounds, Ints, as_spans, merge_regions, merge_runs

log = logging.getLogger(__name__)

_lock = threading.Lock()
_numbers = itertools.count(1)
_sessions: dict[str, MemoryTransport] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """One submission. The bounds of its source are checked, and its spans merged."""

    session: str
    src: Ints
    dst: Ints
    size: Ints


class MemoryTransport:
    """Target and wire in one. A write lands when it is polled, so a submission does no work of earlier ones."""

    def __init__(self) -> None:
        self._regions: list[tuple[int, int]] = []
        self._bounds = Bounds((), "source")
        self._writes: dict[int, Write | None] = {}  # None: refused
        self._handles = itertools.count(1)
        self._session = ""
        self._open()

    @property
    def session(self) -> str:
        return self._session

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        with _lock:
            self._regions = merge_regions([*self._regions, *regions])
            self._bounds = Bounds(self._regions, "source")

    def listen(self, last_message_at: Callable[[str], float | None]) -> None:
        """Do nothing: there is no first contact here."""

    def submit(self, session: str, src: Sequence[int], dst: Sequence[int], size: Sequence[int]) -> int:
        at, to, length = as_spans(src, dst, size)
        handle = next(self._handles)
        try:
            self._bounds.check(at, length)
            self._writes[handle] = Write(session, *merge_runs(at, to, length))
        except PdError as error:
            log.error("write to %s refused: %s", one_line(session), error)
            self._writes[handle] = None
        return handle

    def poll(self, handle: int) -> WriteState:
        write = self._writes[handle]
        state = WriteState.FAILED if write is None else self.land(write)
        if state is not WriteState.PENDING:
            del self._writes[handle]
        return state

    def land(self, write: Write) -> WriteState:
        """Copy the bytes if the session exists and has registered their destination. The lock makes `revoke` wait."""
        with _lock:
            target = _sessions.get(write.session)
            if target is None:
                return WriteState.FAILED
            try:
                Bounds(target._regions, "destination").check(write.dst, write.size)
            except PdError:
                return WriteState.FAILED
            for src, dst, size in zip(write.src.tolist(), write.dst.tolist(), write.size.tolist(), strict=True):
                ctypes.memmove(dst, src, size)
        return WriteState.LANDED

    def revoke(self) -> str:
        self._shut()
        self._open()
        return self._session

    def close(self) -> None:
        self._shut()

    def _open(self) -> None:
        with _lock:
            self._session = f"memory:{next(_numbers)}"
            _sessions[self._session] = self

    def _shut(self) -> None:
        with _lock:
            _sessions.pop(self._session, None)
        self._writes = dict.fromkeys(self._writes)
