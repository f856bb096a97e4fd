# SPDX-License-Identifier: Apache-2.0
"""One TCP connection of the side channel, for both ends: frames in, frames out, and how it ended.

How a connection ended is evidence for the fence of docs/protocol.md, so it is kept exactly: PEER only when the peer's
kernel sent FIN or RST. A connection that we closed ourselves, or that merely timed out, proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
from collections.abc import Callable
from typing import Protocol, cast

from vllm_ascend_pd.channel.frames import GREETING_BYTES, Splitter
from vllm_ascend_pd.errors import RemoteProtocolError

KEEPALIVE_IDLE_S = 15
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3
UNACKNOWLEDGED_MS = 20_000  # data that the peer's kernel does not acknowledge for so long breaks the connection


class Ending(enum.Enum):
    PEER = "peer"  # the peer's kernel closed or reset it
    OURS = "ours"  # we closed it
    LOST = "lost"  # no answer: the network, or a host that is down


class Owner(Protocol):
    """Receiver of a connection's events. All methods are called on the loop thread."""

    def connected(self, connection: Connection) -> None: ...

    def frame(self, connection: Connection, kind: int, payload: memoryview) -> None:
        """Handle a frame. May raise RemoteProtocolError, which then goes to `offended`."""

    def offended(self, connection: Connection, error: RemoteProtocolError) -> None: ...

    def ended(self, connection: Connection, ending: Ending, detail: str) -> None:
        """Handle the end: called exactly once for every connection that was `connected`."""


class Connection(asyncio.Protocol):
    """A connection, bounded both ways: `send` refuses when the peer does not read, too long frames are offences."""

    def __init__(self, owner: Owner, clock: Callable[[], float], send_buffer_bytes: int) -> None:
        self._owner = owner
        self._clock = clock
        self._send_buffer_bytes = send_buffer_bytes
        self._splitter = Splitter(GREETING_BYTES)
        self.transport: asyncio.Transport | None = None
        self._ending: Ending | None = None  # how the end began
        self.opened = 0.0
        self.ending_since = 0.0
        self.partial_since = 0.0  # when the frame that is not complete yet began; 0: none
        self.host = ""  # of the peer, as a number
        self.address = ""

    @property
    def ending(self) -> bool:
        return self._ending is not None

    def allow(self, frame_bytes: int) -> None:
        """Accept larger frames: the peer has proven itself."""
        self._splitter.limit = frame_bytes

    def send(self, frame: bytes) -> bool:
        """Send a frame. Return False if not sent: the connection is closing, or the peer has too much left to read."""
        if self._ending is not None or self.transport is None or self.transport.is_closing():
            return False
        if self.transport.get_write_buffer_size() + len(frame) > self._send_buffer_bytes:
            return False
        self.transport.write(frame)
        return True

    def close(self, farewell: bytes = b"") -> None:
        """Close from this side, which is no evidence for the fence.

        The farewell is sent if the peer still reads. `abort` ends a close that takes too long.
        """
        if self._ending is not None or self.transport is None:
            return
        if farewell:
            self.send(farewell)
        self._begin_end(Ending.OURS)
        self.transport.close()

    def abort(self) -> None:
        self._begin_end(Ending.OURS)
        if self.transport is not None:
            self.transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.opened = self._clock()
        peer = transport.get_extra_info("peername")
        self.host = peer[0] if peer else ""
        self.address = f"{peer[0]}:{peer[1]}" if peer else "?"
        tune(transport.get_extra_info("socket"))
        self._owner.connected(self)

    def data_received(self, data: bytes) -> None:
        if self._ending is not None:
            return
        try:
            for kind, payload in self._splitter.feed(data):
                self.partial_since = 0.0
                self._owner.frame(self, kind, payload)
                if self.ending:
                    return
        except RemoteProtocolError as error:
            self._owner.offended(self, error)
            return
        if not self._splitter.partial:
            self.partial_since = 0.0
        elif not self.partial_since:
            self.partial_since = self._clock()

    def eof_received(self) -> bool:
        self._begin_end(Ending.PEER)
        return False  # close our half too

    def connection_lost(self, exc: Exception | None) -> None:
        # ECONNRESET, and EPIPE after it, come from the peer's kernel; a timeout does not.
        said_so = isinstance(exc, ConnectionResetError | BrokenPipeError)
        self._begin_end(Ending.PEER if said_so else Ending.LOST)
        self.transport = None
        self._owner.ended(self, self._ending or Ending.LOST, str(exc) if exc else "closed")

    def _begin_end(self, ending: Ending) -> None:
        """Record how the end began. The first cause counts: a reset that answers our own closing is no evidence."""
        if self._ending is None:
            self._ending = ending
            self.ending_since = self._clock()


def tune(sock: socket.socket) -> None:
    """Set socket options: send small frames without delay, notice within half a minute that a peer's host vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
    ):
        if hasattr(socket, option):
            with contextlib.suppress(OSError):  # without an option that this kernel lacks, detection is only slower
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
