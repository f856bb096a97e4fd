# SPDX-License-Identifier: Apache-2.0
"""One open TransferEngine, behind the only reference to it: closing must mean that it is gone.

Most of its methods segfault before `initialize`, and `transfer_check_status` does for an id that it does not know.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from typing import Protocol

from vllm_ascend_pd.errors import LocalProtocolError, PdError
from vllm_ascend_pd.transport.sockets import parted, shorten_accept

log = logging.getLogger(__name__)

ACCEPT_S = 0.05  # how long closing waits for the engine's control thread
CONNECT_S = 1.0
OPENINGS = 5  # each with another port

PENDING, LANDED = 0, 1  # of `check`; anything below 0 is a failure
_half_open: list[RawEngine] = []  # what their destructor does is not known: they end with the process
_REFUSED = frozenset((0, -1, 2**32 - 1, 2**64 - 1))  # what a refused submission returns, as any integer type


class RawEngine(Protocol):
    """What we use of mooncake.engine.TransferEngine."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def batch_register_memory(self, addresses: list[int], lengths: list[int], /) -> int: ...
    def send_probe(self, session: str, /) -> int: ...
    def transfer_submit_write(self, session: str, src: int, dst: int, size: int, /) -> int: ...
    def transfer_check_status(self, transfer: int, /) -> int: ...
    def batch_transfer_sync_write(self, session: str, src: list[int], dst: list[int], size: list[int], /) -> int: ...


class Engine:
    """Not for two threads at once, except `write` and `answers`."""

    def __init__(self, kind: type[RawEngine], host: str, protocol: str) -> None:
        self._raw: RawEngine | None = _opened(kind, host, protocol)
        port = self._raw.get_rpc_port()
        self.address = f"{host}:{port}"
        if shorten_accept(port, ACCEPT_S):
            self.answers(f"127.0.0.1:{port}")  # ends the accept that began with the old timeout; it binds all addresses
        else:
            log.debug("the engine's listener on port %d was not found: closing will take up to a second", port)

    @property
    def closed(self) -> bool:
        return self._raw is None

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        for address, length in regions:
            rc = self._open().batch_register_memory([address], [length])  # this form gives the interpreter up
            if rc != 0:
                raise PdError("PD-WIRE-002", rc=rc, length=length, address=address)

    def answers(self, address: str) -> bool:
        """Whether the engine at `address` answers now. Blocks as long as it accepts and stays silent.

        An engine without a probe tells only that something listens there: see `can_ask`.
        """
        raw = self._open()
        if can_ask(type(raw)):
            return raw.send_probe(address) == 0
        try:
            socket.create_connection(parted(address), CONNECT_S).close()
        except OSError:
            return False
        return True

    def submit(self, address: str, src: int, dst: int, size: int) -> int | None:
        """Start one write; None if the engine refuses. The id must be given to `check` until that says an end."""
        transfer = self._open().transfer_submit_write(address, src, dst, size)
        return None if transfer in _REFUSED else transfer

    def check(self, transfer: int) -> int:
        """PENDING, or the id's end: LANDED, or -1. After an end the id is freed and must not be used again.
        -2 is a failure that does not free the id."""
        return self._open().transfer_check_status(transfer)

    def write(self, address: str, src: list[int], dst: list[int], size: list[int]) -> bool:
        """Write a batch and wait for it, spinning; other threads run meanwhile."""
        return self._open().batch_transfer_sync_write(address, src, dst, size) == 0

    def close(self) -> None:
        """Idempotent. When it returns no byte leaves or arrives through this engine any more."""
        raw, self._raw = self._raw, None
        if raw is not None and sys.getrefcount(raw) > 2:  # `raw` and the argument
            raise LocalProtocolError(f"the engine at {self.address} is closed while another thread is in it")
        del raw

    def _open(self) -> RawEngine:
        if self._raw is None:
            raise LocalProtocolError(f"the engine at {self.address} is closed")
        return self._raw


def can_ask(kind: type[RawEngine]) -> bool:
    """Whether engines of this kind can ask another one for an answer; older ones can only connect to it."""
    return hasattr(kind, "send_probe")


def _opened(kind: type[RawEngine], host: str, protocol: str) -> RawEngine:
    """The engine looks for a free port, lets it go and binds it again: when somebody else was faster it throws."""
    why = ""
    for _ in range(OPENINGS):
        raw = kind()
        try:
            rc = raw.initialize(host, "P2PHANDSHAKE", protocol, "")
        except RuntimeError as problem:
            _half_open.append(raw)
            why = str(problem)
            log.warning("a transfer engine lost its port to somebody else (%s): another one is opened", why)
            continue
        if rc != 0:
            raise PdError("PD-WIRE-001", why=f"the engine's initialize({host!r}, {protocol!r}) returned {rc}")
        return raw
    raise PdError("PD-WIRE-001", why=f"the engine's initialize({host!r}, {protocol!r}): {why}")
