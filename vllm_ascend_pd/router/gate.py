# SPDX-License-Identifier: Apache-2.0
"""Callers' connections from their accept to their end: how many there may be, and which one makes room for another.

A connection costs a socket and nothing else until its first byte comes, also where TLS is spoken: the handshake, which
costs tens of kilobytes, begins then, and only so many are under way at a time. When all places are taken, a new
connection gets the place of the one that is quiet for longest: first of those that have said nothing, then of those
within a handshake, then of those that are idle between requests. A caller with more than its share of all connections
makes room among its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum

log = logging.getLogger(__name__)

CONNECTIONS = 8192  # at most; fewer where the process may open few files
FIRST_BYTE_S = 20.0  # from the accept to the first byte, and from there to the end of a TLS handshake
HANDSHAKES = 1024  # under way, some 50 MB; a further one ends the oldest of them, which is no client's by then
_SHARE = 4  # one caller may have a quarter of all connections once all places are taken
_ACCEPTS = 64  # in one turn of the loop
_SAID_S = 10.0  # at least between two lines of the log about that
_NO_FILES_S = 1.0  # until the next accept when this process has no file handle left, and none to give up
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def max_connections() -> int:
    """Return how many callers may connect: half of the files that may be open, as engines, logs and lines need some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if soft == resource.RLIM_INFINITY else max(16, min(CONNECTIONS, soft // 2))


class Activity(Enum):
    """Activity of a connection. One of the first three may be closed for another one, in this order."""

    SILENT = "nothing has come yet"
    HANDSHAKE = "its TLS handshake is under way"
    IDLE = "between two requests"
    BUSY = "it sends a request, or gets an answer"


class Place:
    """One caller's connection. `close` ends it at once; `served`: the HTTP server has it."""

    __slots__ = ("activity", "close", "peer", "served")

    def __init__(self, peer: str, close: Callable[[], None]) -> None:
        self.peer, self.close = peer, close
        self.activity, self.served = Activity.BUSY, False


class _Group:
    """Connections, and which of them may be closed for another one: of each activity the longest quiet first."""

    def __init__(self) -> None:
        self.all: set[Place] = set()
        self.quiet: dict[Activity, OrderedDict[Place, None]] = {
            activity: OrderedDict() for activity in (Activity.SILENT, Activity.HANDSHAKE, Activity.IDLE)
        }

    def enter(self, connection: Place) -> None:
        self.all.add(connection)
        if (quiet := self.quiet.get(connection.activity)) is not None:
            quiet[connection] = None

    def leave(self, connection: Place) -> None:
        self.all.discard(connection)
        if (quiet := self.quiet.get(connection.activity)) is not None:
            quiet.pop(connection, None)

    def longest(self) -> Place | None:
        return next((connection for quiet in self.quiet.values() for connection in quiet), None)


class Places:
    """All connections of this process, and the rule by which one gives its place to another."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._everyone = _Group()
        self._of: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._everyone.all)

    def everyone(self) -> Iterable[Place]:
        return self._everyone.all

    def enter(self, connection: Place, activity: Activity) -> None:
        """Give a new connection a place; another one may be closed for it."""
        while len(self) >= self.most and (longest := self._gives_way(connection.peer)) is not None:
            self.end(longest)
        connection.activity = activity
        for group in (self._everyone, self._of.setdefault(connection.peer, _Group())):
            group.enter(connection)

    def turn(self, connection: Place, activity: Activity) -> None:
        """Note what a connection does from now on."""
        if connection not in self._everyone.all:
            return  # it was closed for another one
        groups = (self._everyone, self._of[connection.peer])
        for group in groups:
            group.leave(connection)
        connection.activity = activity
        for group in groups:
            group.enter(connection)

    def leave(self, connection: Place) -> None:
        """Note that a connection has ended. Idempotent."""
        if connection in self._everyone.all:
            of_caller = self._of[connection.peer]
            for group in (self._everyone, of_caller):
                group.leave(connection)
            if not of_caller.all:
                del self._of[connection.peer]

    def end(self, connection: Place) -> None:
        self.leave(connection)
        connection.close()

    def give_up_one(self) -> bool:
        """Close the connection that is quiet for longest. Return False if none is."""
        if (longest := self._everyone.longest()) is None:
            return False
        self.end(longest)
        return True

    def in_handshake(self) -> OrderedDict[Place, None]:
        """Return the connections within their TLS handshake, the oldest first."""
        return self._everyone.quiet[Activity.HANDSHAKE]

    def _gives_way(self, peer: str) -> Place | None:
        """Return the connection that makes room for one of this caller's."""
        group = self._of.get(peer)
        if group is not None and len(group.all) * _SHARE > self.most and (longest := group.longest()) is not None:
            return longest
        return self._everyone.longest()


class ConnectionGate:
    """Accepts connections and hands them to the HTTP server. `serve` makes its protocol for a connection."""

    def __init__(
        self,
        serve: Callable[[Place], asyncio.Protocol],
        places: Places,
        tls: ssl.SSLContext | None = None,
        first_byte_s: float = FIRST_BYTE_S,
        handshakes: int = HANDSHAKES,
    ) -> None:
        self.places = places
        self._serve, self._tls, self._first_byte_s = serve, tls, first_byte_s
        self._loop = asyncio.get_running_loop()
        self._listening: dict[socket.socket, asyncio.TimerHandle | None] = {}  # the timer: accepts pause until then
        self._silent: OrderedDict[Place, tuple[socket.socket, float]] = OrderedDict()  # until when
        self._sweep: asyncio.TimerHandle | None = None
        self._handshakes = handshakes
        self._say_at = 0.0
        self._starting: dict[asyncio.Task[None], Place] = {}

    def open(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._listening[listening] = None
        self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Accept no more, and end what has said nothing yet. What the server has, or is being given, is its own to end.

        uvloop closes a connection below its protocol where the task that hands it over is cancelled: a request that has
        come by it could not be answered. So only TLS handshakes are broken off; all else is handed over at once.
        """
        for listening, timer in self._listening.items():
            self._loop.remove_reader(listening)
            if timer is not None:
                timer.cancel()
        self._listening.clear()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self._silent):
            self.places.end(connection)
        for task, connection in self._starting.items():
            if self._tls is not None and not connection.served:
                task.cancel()

    async def handed_over(self) -> None:
        """Wait until the server has each connection that it was being given. No peer is waited for."""
        if self._starting:
            await asyncio.wait(self._starting, timeout=self._first_byte_s)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:
                if problem.errno not in _OURS:
                    raise
                gave = self.places.give_up_one()
                if self._loop.time() >= self._say_at:
                    self._say_at = self._loop.time() + _SAID_S
                    ended = "idle connections are ended for new ones" if gave else "no connection can be accepted"
                    log.warning("%s: %s (%d callers; raise ulimit -n)", ended, problem, len(self.places))
                if not gave:
                    self._loop.remove_reader(listening)
                    self._listening[listening] = self._loop.call_later(_NO_FILES_S, self.open, listening)
                return  # a closed socket's handle is free in the next turn
            accepted.setblocking(False)
            self._wait(accepted, caller_of(address[0]))

    def _wait(self, accepted: socket.socket, peer: str) -> None:
        """Wait for a connection's first byte."""
        connection = Place(peer, lambda: self._drop(connection))
        self._silent[connection] = (accepted, self._loop.time() + self._first_byte_s)
        self.places.enter(connection, Activity.SILENT)
        self._loop.add_reader(accepted, self._begin, connection)
        if self._sweep is None:
            self._end_silent()

    def _drop(self, connection: Place) -> None:
        accepted, _ = self._silent.pop(connection)
        self._loop.remove_reader(accepted)
        accepted.close()

    def _end_silent(self) -> None:
        """End the connections that have said nothing for too long; one timer for all, for the oldest of the rest."""
        self._sweep = None
        while self._silent:
            connection, (_, until) = next(iter(self._silent.items()))
            if (left := until - self._loop.time()) > 0:
                self._sweep = self._loop.call_later(left, self._end_silent)
                return
            self.places.end(connection)

    def _begin(self, connection: Place) -> None:
        """Hand a connection to the server: its first byte is there to be read."""
        accepted, _ = self._silent.pop(connection)
        self._loop.remove_reader(accepted)
        if self._tls is None:
            self.places.turn(connection, Activity.BUSY)
        else:
            if len(shaking := self.places.in_handshake()) >= self._handshakes:
                self.places.end(next(iter(shaking)))
            self.places.turn(connection, Activity.HANDSHAKE)
        task = self._loop.create_task(self._hand_over(connection, accepted), name="connection")
        connection.close = lambda: _cancel(task)
        self._starting[task] = connection
        task.add_done_callback(lambda task: self._handed_over(task, connection, accepted))

    async def _hand_over(self, connection: Place, accepted: socket.socket) -> None:
        limit = None if self._tls is None else self._first_byte_s
        await self._loop.connect_accepted_socket(
            lambda: self._serve(connection), accepted, ssl=self._tls, ssl_handshake_timeout=limit
        )

    def _handed_over(self, task: asyncio.Task[None], connection: Place, accepted: socket.socket) -> None:
        self._starting.pop(task)
        if not task.cancelled() and task.exception() is None:
            return
        self.places.leave(connection)
        accepted.close()
        if not task.cancelled():
            log.debug("a connection from %s ended before its first request: %s", connection.peer, task.exception())


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def caller_of(host: str) -> str:
    """Return what counts as one caller: an address; of version 6 its network, which one caller has to itself."""
    with contextlib.suppress(ValueError):
        if (address := ipaddress.ip_address(host.split("%")[0])).version == 6:
            mapped = address.ipv4_mapped
            return str(mapped or ipaddress.ip_network((int(address), 64), strict=False))
    return host
