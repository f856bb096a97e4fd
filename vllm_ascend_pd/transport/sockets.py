# SPDX-License-Identifier: Apache-2.0
"""Reaching the sockets that Mooncake opens inside this process, through Linux' /proc, for two things it has no call for.

Closing an engine waits for its control thread, which sits in accept() for up to a second with the interpreter held; and
first contact reads from a silent peer for up to 60 s. A shorter accept timeout and a hang-up end both. Where /proc is
missing nothing breaks, only these waits stay as long as Mooncake makes them.
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
    """Make the listener on `port` look up from accept() this often. True if it was found."""
    timeout = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    found = False
    for sock in _own_sockets():
        with contextlib.suppress(OSError):
            if _is_listener(sock, port):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
                found = True
    return found


def parted(address: str) -> tuple[str, int]:
    """Host and port of "host:port". A peer says it: what is no such thing is an OSError, as what cannot be reached is."""
    host, _, port = address.rpartition(":")
    try:
        host.encode("idna")  # as every look-up does, and raises no OSError
        if 0 < (number := int(port)) < 1 << 16:
            return host, number
    except ValueError:
        pass
    raise OSError(f"not an address: {address!r}")


def hang_up(address: str) -> int:
    """Shut down this process's connections to host:port, so that whoever reads from them gets an answer: the end.
    Returns how many there were."""
    try:
        host, port = parted(address)
        wanted = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return 0
    cut = 0
    for sock in _own_sockets():
        with contextlib.suppress(OSError):
            peer = sock.getpeername()
            if peer[1] == port and peer[0].removeprefix("::ffff:") in wanted:
                sock.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def _is_listener(sock: socket.socket, port: int) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and sock.getsockname()[1] == port


def _own_sockets() -> Iterator[socket.socket]:
    """TCP sockets of this process as duplicates, each closed after its turn."""
    if not _FDS.is_dir():
        return
    for name in os.listdir(_FDS):  # noqa: PTH208  names, while descriptors come and go
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
            with sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    yield sock
