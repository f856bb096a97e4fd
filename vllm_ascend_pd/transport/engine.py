# SPDX-License-Identifier: Apache-2.0
"""One open TransferEngine. `OpenEngine` holds the only reference to it, so that closing it destroys it.

Most methods of a TransferEngine segfault before `initialize`, and `transfer_check_status` does for an unknown id.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from typing import Protocol

from vllm_ascend_pd.errors import LocalProtocolError, PdError
from vllm_ascend_pd.transport.mooncake_sockets import host_and_port, shorten_accept

log = logging.getLogger(__name__)

ACCEPT_S = 0.05  # how long closing waits for the engine's control thread, from a second after its opening on
CONNECT_S = 1.0
OPENINGS = 5  # attempts, each with another port

PENDING, LANDED = 0, 1  # results of `check`; anything below 0 is a failure
_half_open: list[RawEngine] = []  # kept until the process ends, because it is not known what their destructor does
_REFUSED = frozenset((0, -1, 2**32 - 1, 2**64 - 1))  # what a refused submission returns, as any integer type


class RawEngine(Protocol):
    """Methods of mooncake.engine.TransferEngine that this package uses."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def batch_register_memory(self, addresses: list[int], lengths: list[int], /) -> int: ...
    def send_probe(self, session: str, /) -> int: ...
    def transfer_submit_write(self, session: str, src: int, dst: int, size: int, /) -> int: ...
    def transfer_check_status(self, transfer: int, /) -> int: ...
    def batch_transfer_sync_write(self, session: str, src: list[int], dst: list[int], size: list[int], /) -> int: ...


class OpenEngine:
    """Not thread-safe, except for `write` and `answers`."""

    closed = False  # True also while `close` fails: no thread may enter it

    def __init__(self, kind: type[RawEngine], host: str, protocol: str) -> None:
        self._raw: RawEngine | None = _opened(kind, host, protocol)
        port = self._raw.get_rpc_port()
        self.address = f"{host}:{port}"
        if not shorten_accept(port, ACCEPT_S):
            log.debug("the engine's listener on port %d was not found: closing will take up to a second", port)

    def register(self, regions: Sequence[tuple[int, int]]) -> None:
        for address, length in regions:
            rc = self._open().batch_register_memory([address], [length])  # this form releases the GIL
            if rc != 0:
                raise PdError("PD-WIRE-002", rc=rc, length=length, address=address)

    def answers(self, address: str) -> bool:
        """Return whether the engine at `address` answers now. Blocks while the peer accepts and stays silent.

        An engine without a probe only shows that something listens there: see `can_ask`.
        """
        raw = self._open()
        if can_ask(type(raw)):
            return raw.send_probe(address) == 0
        try:
            socket.create_connection(host_and_port(address), CONNECT_S).close()
        except OSError:
            return False
        return True

    def submit(self, address: str, src: int, dst: int, size: int) -> int | None:
        """Start one write. Return its id, or None if the engine refuses. `check` the id until the write has ended."""
        transfer = self._open().transfer_submit_write(address, src, dst, size)
        return None if transfer in _REFUSED else transfer

    def check(self, transfer: int) -> int:
        """Return PENDING, LANDED, or a negative number if the write failed.

        LANDED and -1 free the id: do not use it again. -2 does not.
        """
        return self._open().transfer_check_status(transfer)

    def write(self, address: str, src: list[int], dst: list[int], size: list[int]) -> bool:
        """Write a batch and wait for it. The call spins, but other threads run meanwhile. Return whether it landed."""
        return self._open().batch_transfer_sync_write(address, src, dst, size) == 0

    def close(self) -> None:
        """Close the engine. Idempotent. After it no byte leaves or arrives through this engine.

        Raise LocalProtocolError while another thread is in it: bytes may still arrive until a later call succeeds.
        """
        self.closed = True
        if self._raw is not None and sys.getrefcount(self._raw) > 2:  # the attribute and the argument
            raise LocalProtocolError(f"the engine at {self.address} is closed while another thread is in it")
        self._raw = None

    def _open(self) -> RawEngine:
        if self.closed or self._raw is None:
            raise LocalProtocolError(f"the engine at {self.address} is closed")
        return self._raw


def can_ask(kind: type[RawEngine]) -> bool:
    """Return whether engines of this kind can probe another engine. Older ones can only connect to it."""
    return hasattr(kind, "send_probe")


def _opened(kind: type[RawEngine], host: str, protocol: str) -> RawEngine:
    """Open an engine. Try again if it lost its port.

    It looks for a free port, releases it and binds it again. If another process took it meanwhile, the engine raises.
    It raises the same for a thread or a descriptor that it cannot have.
    """
    why, raw = "", None
    for _ in range(OPENINGS):
        try:
            raw = kind()
            rc = raw.initialize(host, "P2PHANDSHAKE", protocol, "")
        except RuntimeError as problem:
            if raw is not None:
                _half_open.append(raw)
            why, raw = str(problem), None
            log.warning(
                "a transfer engine cannot be opened, perhaps its port was taken (%s): another one is tried", why
            )
            continue
        if rc != 0:
            raise PdError("PD-WIRE-001", why=f"the engine's initialize({host!r}, {protocol!r}) returned {rc}")
        return raw
    raise PdError("PD-WIRE-001", why=f"the engine's initialize({host!r}, {protocol!r}): {why}")
