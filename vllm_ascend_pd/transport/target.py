# SPDX-License-Identifier: Apache-2.0
"""Memory that peers write to, registered with an engine that can be replaced: revocation closes the engine.

Any process that reaches the engine's ports can write to registered memory. So no engine is opened over TCP or RDMA
until `session` is used. Over Ascend's links one engine serves a whole process, for reading too: a wire in this process
shares it (`engine`), and must be out of it while it is replaced (`share`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from vllm_ascend_pd.errors import ConfigError, PdError
from vllm_ascend_pd.transport.engine import OpenEngine, RawEngine
from vllm_ascend_pd.transport.maps import check_mapped
from vllm_ascend_pd.transport.spans import merge_regions

MAX_REGISTERED = 256  # per process: HCCL's limit, which vllm-ascend's connectors also keep


class MooncakeTarget:
    def __init__(
        self, kind: type[RawEngine], host: str, protocol: str, attach_thread: Callable[[], None] = lambda: None
    ) -> None:
        self._kind, self._host, self._protocol = kind, host, protocol
        self._attach_thread, self._at_once = attach_thread, protocol == "ascend"
        self._lock = threading.Lock()
        self._regions: list[tuple[int, int]] = []
        self._engine: OpenEngine | None = None
        self._session = ""
        self._closed = False
        self._exclusive: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def session(self) -> str:
        with self._lock:
            self._opened()
            return self._session

    @property
    def opened(self) -> OpenEngine | None:
        return self._engine

    def engine(self) -> OpenEngine:
        """Return the open engine, opened if necessary. A later call may return another one."""
        with self._lock:
            return self._opened()

    def share(self, exclusive: Callable[[], AbstractContextManager[None]]) -> None:
        """Share `engine` with a wire: from now on it is closed only inside the context `exclusive`."""
        self._exclusive = exclusive

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        merged = merge_regions(regions)
        if not self._at_once:
            check_mapped(merged)
        with self._lock:
            new = [region for region in merged if not self._registered(*region)]
            if self._at_once and (count := len(self._regions) + len(new)) > MAX_REGISTERED:
                raise ConfigError("PD-WIRE-006", count=count, max=MAX_REGISTERED)
            if self._engine is not None:
                self._engine.register(new)
            self._regions += new
            if self._at_once:
                self._opened()

    def revoke(self) -> str:
        """Close the engine, which holds the GIL for about 0.05 s, and register everything with a new one.

        If it raises, call it again.
        """
        self._attach_thread()  # a new engine takes the device of the thread that opens it
        with self._exclusive(), self._lock:
            self._shut()
            self._opened()
            return self._session

    def close(self) -> None:
        with self._exclusive(), self._lock:
            self._closed = True
            self._shut()

    def _registered(self, address: int, length: int) -> bool:
        """Return whether the range is registered. A wire that shares the engine registers the same cache."""
        return any(at <= address and address + length <= at + size for at, size in self._regions)

    def _shut(self) -> None:
        if self._engine is not None:
            self._engine.close()  # if it raises, peers still write to this engine
            self._engine = None

    def _opened(self) -> OpenEngine:
        if self._engine is None:
            if self._closed:
                raise PdError("PD-WIRE-001", why="the transport is closed")
            engine = OpenEngine(self._kind, self._host, self._protocol)
            engine.register(self._regions)
            self._engine, self._session = engine, f"{engine.address}/{os.urandom(4).hex()}"
        return self._engine
