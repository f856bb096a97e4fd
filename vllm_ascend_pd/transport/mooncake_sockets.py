# SPDX-License-Identifier: Apache-2.0
"""Access to the sockets that Mooncake opens in this process, through Linux's /proc, to shorten two waits.

Closing an engine waits for its control thread, which is in accept() for up to a second, and holds the GIL meanwhile.
First contact reads from a silent peer for up to 60 s. Mooncake has no call to end either wait. A shorter timeout of
accept() and a shutdown of the connection do. Without /proc nothing breaks, only the waits stay long.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

_FDS = Path("/proc/self/fd")


def shorten_accept(port: int, seconds: float) -> bool:
    """Let accept() of the listener on `port` time out after so many seconds. Return whether it was found."""
    timeout = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    is_there = False
    for sock in _own_sockets():
        with contextlib.suppress(OSError):
            if _is_listener(sock, port):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
                is_there = True
    return is_there


def host_and_port(address: str) -> tuple[str, int]:
    """Return host and port of "host:port".

    The text comes from a peer: if it is no address, raise OSError, as for an address that cannot be reached.
    """
    host, _, port = address.rpartition(":")
    try:
        host.encode("idna")  # every look-up does this; its error is no OSError
        if 0 < (number := int(port)) < 1 << 16:
            return host, number
    except ValueError:
        pass
    raise OSError(f"not an address: {address!r}")


def numeric(address: str) -> list[str]:
    """Look up the host of "host:port". Return the port with each of its numeric addresses. Raise OSError without one.

    A silent name server takes ten seconds or more: this is not for a thread that others wait for.
    """
    host, port = host_and_port(address)
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(f"{entry[4][0]}:{port}" for entry in addresses))


def shut_connections(address: str) -> int:
    """Shut down this process's connections to a numeric host:port, so that reads from them end. Return their number."""
    cut = 0
    for sock in _own_sockets():
        with contextlib.suppress(OSError):
            peer = sock.getpeername()
            if f"{peer[0].removeprefix('::ffff:')}:{peer[1]}" == address:
                sock.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def _is_listener(sock: socket.socket, port: int) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and sock.getsockname()[1] == port


def _own_sockets() -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP sockets. Each is closed when the next one is asked for."""
    try:
        names = os.listdir(_FDS)  # noqa: PTH208  names, while descriptors come and go
    except OSError:  # there is no /proc, or no free descriptor
        return
    for name in names:
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
            with sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    yield sock
