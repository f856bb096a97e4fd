# SPDX-License-Identifier: Apache-2.0
"""Mooncake's TransferEngine as our Transport. What it does unexpectedly, and what we do about it:

* -1 is not the end: bytes of a failed write may still land. FAILED means just that, and ids live until they have ended.
* Opening a peer's segment holds the engine's mutex, up to 60 s when the peer accepts and stays silent. `introduce` asks
  the peer for an answer first, without that mutex and on any thread; `submit` after it opens an answering peer.
* A peer restarted on the same port is unreachable through an engine that knew its predecessor, so sessions carry a
  tag, and a new tag at a known address gets an engine of its own.
* Addresses are not validated by the engine, so they are here. A zero length is "success", so it is refused here.
* Closing an engine takes about a second and holds the interpreter. Only `revoke` and `close` do it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from vllm_ascend_pd.errors import PdError
from vllm_ascend_pd.transport.base import WriteState
from vllm_ascend_pd.transport.engine import Engine, load, open_engine, prepare_environment, process_environment
from vllm_ascend_pd.transport.flights import Flights
from vllm_ascend_pd.transport.lanes import Lanes
from vllm_ascend_pd.transport.maps import check_mapped
from vllm_ascend_pd.transport.spans import Bounds, as_spans, merge_regions, merge_runs

log = logging.getLogger(__name__)

Region: TypeAlias = tuple[int, int]


class MooncakeTransport:
    """The writer thread calls everything but `introduce` (any thread) and `session`."""

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
        prepare_environment(process_environment(), protocol, transfer_timeout_s)
        self._host, self._protocol, self._quiet_s = host, protocol, quiet_s
        self._kind = load(protocol)
        self._regions: list[Region] = []
        self._bounds = Bounds((), "source")
        self._open_lock = threading.Lock()  # guards _engine against `introduce` on another thread
        self._engine: Engine | None = None
        self._session = ""
        self._extra: dict[str, Engine] = {}  # by session: peers restarted at an address that _engine knew
        self._tags: dict[str, str] = {}  # address → tag of the peer that _engine knows there
        self._writes: Flights | Lanes = (
            # One call carries a whole batch over Ascend's links, and only the blocking form of it has been proven there.
            Lanes(max_descriptors, transfer_timeout_s, attach_thread, clock)
            if protocol == "ascend"
            else Flights(max_descriptors, transfer_timeout_s, clock)
        )
        self._open()

    @property
    def session(self) -> str:
        return self._session

    @property
    def quiet_s(self) -> float:
        return self._quiet_s

    def register(self, regions: Sequence[Region]) -> None:
        """Merged with what is registered already only where nothing changes for the engine: give all regions at once."""
        merged = merge_regions(regions)
        if self._protocol != "ascend":
            check_mapped(merged)
        self._register(self._need_engine(), merged)
        self._regions += merged
        self._bounds = Bounds(self._regions, "source")

    def introduce(self, session: str) -> bool:
        """Whether the peer's engine answers. Waits up to 60 s for one that accepts and stays silent, up to
        CONNECT_TIMEOUT_S for one that does not accept; other writes go on meanwhile. Any thread."""
        with self._open_lock:
            engine = self._engine
        return engine is not None and engine.send_probe(_address(session)) == 0

    def submit(self, session: str, src: Sequence[int], dst: Sequence[int], size: Sequence[int]) -> int:
        """As the contract says; on first contact with a peer it waits for that peer's answer (see `introduce`)."""
        at, to, length = as_spans(src, dst, size)
        try:
            self._bounds.check(at, length)
        except PdError as error:
            log.error("write to %s refused: %s", session, error)
            return self._writes.refused()
        engine = self._engine_for(session)
        if engine is None:
            return self._writes.refused()
        return self._writes.submit(engine, _address(session), *merge_runs(at, to, length))

    def poll(self, handle: int) -> WriteState:
        return self._writes.poll(handle)

    def lingering(self) -> int:
        """Descriptors of failed writes that the engine still works on. Zero is what quiet looks like."""
        return self._writes.lingering()

    def revoke(self) -> str:
        """Our own writes fail; peers' writes under the old session cannot land any more when this returns."""
        self._shut()
        self._open()
        self._register(self._need_engine(), self._regions)
        return self._session

    def close(self) -> None:
        self._writes.close()
        self._shut()

    def _open(self) -> None:
        engine = open_engine(self._kind, self._host, self._protocol)
        with self._open_lock:
            self._engine = engine
            self._session = f"{self._host}:{engine.get_rpc_port()}/{os.urandom(4).hex()}"

    def _shut(self) -> None:
        """Drop every reference: the engine's destructor closes its sockets and joins its threads."""
        self._writes.fail_all()
        self._extra.clear()
        self._tags.clear()
        with self._open_lock:
            self._engine = None

    def _register(self, engine: Engine, regions: Sequence[Region]) -> None:
        for address, length in regions:
            rc = engine.batch_register_memory([address], [length])  # the batch form gives the interpreter up
            if rc != 0:
                raise PdError("PD-WIRE-002", rc=rc, length=length, address=address)

    def _need_engine(self) -> Engine:
        if self._engine is None:
            raise PdError("PD-WIRE-001", why="the engine is closed")
        return self._engine

    def _engine_for(self, session: str) -> Engine | None:
        """The engine that may speak to this very incarnation of the peer."""
        if self._engine is None:
            return None
        address, _, tag = session.partition("/")
        if self._tags.setdefault(address, tag) == tag:
            return self._engine
        if session not in self._extra:
            log.info("peer %s is a new one at a known address: it gets an engine of its own", session)
            engine = open_engine(self._kind, self._host, self._protocol)
            self._register(engine, self._regions)
            self._extra[session] = engine
        return self._extra[session]


def _address(session: str) -> str:
    return session.partition("/")[0]
