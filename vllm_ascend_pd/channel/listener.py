# SPDX-License-Identifier: Apache-2.0
"""Listening end of the side channel: a D worker listens, P workers dial; P's scheduler listens, D's schedulers dial.

A peer is identified by its incarnation, so an answer takes whichever connection that process has now. Everything here
runs on the loop thread.

The listener also provides evidence for the fence. When the *peer's kernel* has closed the last connection of an
incarnation, `on_gone` is called once. If the same incarnation connects again, `on_back` is called.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_pd.channel.connection import Connection, Ending
from vllm_ascend_pd.channel.frames import (
    CLEAR,
    FRAME_BYTES,
    OF_WORKERS,
    Goodbye,
    Guard,
    Guarded,
    Hello,
    Leaving,
    Proof,
    Spoken,
    clear_frame,
    decode_clear,
    decode_guarded,
    dialer_of,
    guarded_frame,
)
from vllm_ascend_pd.channel.guards import candidates, check_greeting, greeting
from vllm_ascend_pd.channel.limits import ChannelLimits, RateLimitedWarnings
from vllm_ascend_pd.errors import PdError, RemoteProtocolError, one_line
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.versions import OURS, Release

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Caller:
    """State of one connection's other end."""

    hello: Hello | None = None
    guards: list[Guard] = field(default_factory=list)  # candidates until proven, then the one
    proven: bool = False
    leaving: bool = False  # has announced a closing that proves nothing


class Listener:
    """Server of the side channel: `start` binds; after `close` no peer can connect. Callbacks must not raise.

    `count` is called with the reason of whatever goes wrong: what is dropped, refused, broken off or too slow.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        incarnation: str,
        secrets: Secrets | None,
        on_message: Callable[[Hashable, Any], None],
        on_gone: Callable[[str], None],
        on_back: Callable[[str], None],
        count: Callable[[str], None],
        limits: ChannelLimits | None = None,
        release: Release = OURS,
        accepts: tuple[type, ...] = OF_WORKERS,
    ) -> None:
        self._host, self._port = host, port
        self._accepts = accepts
        self._release = release
        self._incarnation = incarnation
        self._secrets = secrets
        self._on_message, self._on_gone, self._on_back = on_message, on_gone, on_back
        self._limits = limits or ChannelLimits()
        self.callers: dict[Connection, _Caller] = {}
        self.unproven: dict[Connection, None] = {}  # the oldest first
        self._by_incarnation: dict[str, list[Connection]] = {}  # the newest last
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._count = count  # a fault, by reason
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self) -> Endpoint:
        """Bind and listen. Return the endpoint, with the port that was chosen. Raise PD-CTRL-001 if that fails."""
        self._loop = asyncio.get_running_loop()
        self._warn = RateLimitedWarnings(self._loop.time)
        try:
            self._server = await self._loop.create_server(self._accept, self._host, self._port, backlog=1024)
        except OSError as error:
            raise PdError("PD-CTRL-001", address=f"{self._host}:{self._port}", why=error.strerror or error) from error
        port = int(self._server.sockets[0].getsockname()[1])
        self._sweeper = self._loop.call_later(self._limits.sweep_s, self._sweep)
        return Endpoint(self._host, port)

    def send(self, peer: Hashable, message: Spoken) -> bool:
        """Send a message. Return False if not sent: the peer is unknown, or does not read. The protocol repeats."""
        connections = self._by_incarnation.get(str(peer))
        if not connections:
            self._count("dropped_unknown_peer")
            return False
        connection = connections[-1]
        frame = guarded_frame(self.callers[connection].guards[0], message)
        if not connection.send(frame):
            self._count("dropped_buffer_full")
            return False
        return True

    async def close(self) -> None:
        """Close the server and all connections. Idempotent. No peer is reported gone: this closing proves nothing."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for connection in list(self.callers):
            connection.close()
        deadline = self._loop.time() + self._limits.linger_s
        while self.callers and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self.callers):
            connection.abort()
        await server.wait_closed()

    # -- Owner of the connections

    def _accept(self) -> Connection:
        return Connection(self, self._loop.time, self._limits.send_buffer_bytes)

    def connected(self, connection: Connection) -> None:
        full = len(self.callers) >= self._limits.max_connections
        crowded = len(self.unproven) >= self._limits.max_unproven
        self.callers[connection] = _Caller()
        self.unproven[connection] = None
        if full or crowded:
            # If too many are unproven, drop the one that connected first: a real peer proves itself in a round trip.
            gone = connection if full else next(iter(self.unproven))
            del self.unproven[gone]
            self._count("refused_full")
            self._warn("full", "side channel: too many connections, refused %s", gone.address)
            gone.abort()

    def frame(self, connection: Connection, kind: int, payload: memoryview) -> None:
        caller = self.callers[connection]
        if caller.hello is None:
            self._greet(connection, caller, kind, payload)
        elif kind == CLEAR:
            raise RemoteProtocolError("PD-CTRL-002", why="an unguarded frame after the greeting")
        elif not caller.proven:
            self._prove(connection, caller, caller.hello, payload)
        else:
            self._take(caller, caller.hello, decode_guarded(caller.guards[0].open(payload)))

    def offended(self, connection: Connection, error: RemoteProtocolError) -> None:
        self._count(error.code)
        self._warn(error.code, "side channel: closing %s: %s", connection.address, error)
        detail = f"{error.sentence} {error.remedy}"[:1024]
        connection.close(clear_frame(Goodbye(error.code, detail)))

    def ended(self, connection: Connection, ending: Ending, detail: str) -> None:
        caller = self.callers.pop(connection)
        self.unproven.pop(connection, None)
        if not caller.proven or caller.hello is None:
            return
        incarnation = caller.hello.incarnation
        connections = self._by_incarnation[incarnation]
        connections.remove(connection)
        if connections:
            return
        del self._by_incarnation[incarnation]
        if ending is Ending.PEER and not caller.leaving and self._server is not None:
            self._report_gone(incarnation)

    # -- the greeting

    def _greet(self, connection: Connection, caller: _Caller, kind: int, payload: memoryview) -> None:
        hello = decode_clear(payload) if kind == CLEAR else None
        if not isinstance(hello, Hello):
            raise RemoteProtocolError("PD-CTRL-002", why="the first frame is not a greeting")
        check_greeting(hello, guarded=self._secrets is not None, ours=self._release)
        mine = greeting(self._incarnation, self._secrets, ours=self._release)
        caller.guards = candidates(self._secrets, hello, mine, as_dialer=False)
        caller.hello = hello
        connection.send(clear_frame(mine))

    def _prove(self, connection: Connection, caller: _Caller, hello: Hello, payload: memoryview) -> None:
        caller.guards = [_first_that_opens(caller.guards, payload)]
        caller.proven = True
        connection.send(guarded_frame(caller.guards[0], Proof()))
        connection.allow(FRAME_BYTES)
        self.unproven.pop(connection, None)
        log.debug("side channel: %s is %s", connection.address, one_line(f"{hello.name} ({hello.incarnation})"))
        connections = self._by_incarnation.setdefault(hello.incarnation, [])
        connections.append(connection)
        if len(connections) > self._limits.max_per_incarnation:
            self._count("closed_surplus")
            connections[0].abort()
        if self._gone.pop(hello.incarnation, hello) is None:
            self._on_back(hello.incarnation)

    def _take(self, caller: _Caller, hello: Hello, message: Guarded) -> None:
        if isinstance(message, Leaving):
            caller.leaving = not message.quiet
        elif isinstance(message, Proof):
            raise RemoteProtocolError("PD-CTRL-002", why="a second proof")
        elif not isinstance(message, self._accepts):
            self._count("dropped_not_for_us")
        elif dialer_of(message) != hello.incarnation:
            # A process may speak for itself only: the end of its connection is evidence about no other process.
            self._count("dropped_foreign_incarnation")
        else:
            self._on_message(hello.incarnation, message)

    # -- housekeeping

    def _report_gone(self, incarnation: str) -> None:
        self._count("gone")
        self._gone[incarnation] = None
        if len(self._gone) > self._limits.remembered_gone:
            self._gone.popitem(last=False)
        self._on_gone(incarnation)

    def _sweep(self) -> None:
        """Abort connections on which a greeting, a frame or the reading of a farewell takes too long."""
        now, limits = self._loop.time(), self._limits
        for connection, caller in list(self.callers.items()):
            if connection.ending:
                if now - connection.ending_since > limits.linger_s:
                    connection.abort()
            elif not caller.proven:
                if now - connection.opened > limits.greeting_s:
                    self._count("timeout_greeting")
                    connection.abort()
            elif connection.partial_since and now - connection.partial_since > limits.frame_s:
                self._count("timeout_frame")
                connection.abort()
        self._sweeper = self._loop.call_later(limits.sweep_s, self._sweep)


def _first_that_opens(guards: list[Guard], payload: memoryview) -> Guard:
    """Return the guard under which the proof opens. Raise the last guard's error if none does."""
    for n, guard in enumerate(guards):
        try:
            opened = guard.open(payload)
        except RemoteProtocolError:
            if n == len(guards) - 1:
                raise
            continue
        if not isinstance(decode_guarded(opened), Proof):
            raise RemoteProtocolError("PD-CTRL-002", why="the first guarded frame is not a proof")
        return guard
    raise RemoteProtocolError("PD-SEC-003", why="there is no secret to check it with")
