# SPDX-License-Identifier: Apache-2.0
"""Dialer's side of one endpoint: connect, greet, send what waited, and start over when the connection breaks."""

from __future__ import annotations

import asyncio
import enum
import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_pd.channel.connection import Connection, Ending
from vllm_ascend_pd.channel.frames import (
    CLEAR,
    FRAME_BYTES,
    OF_WORKERS,
    Goodbye,
    Guard,
    Hello,
    Leaving,
    Proof,
    Spoken,
    clear_frame,
    decode_clear,
    decode_guarded,
    guarded_frame,
)
from vllm_ascend_pd.channel.guards import candidates, check_greeting, greeting
from vllm_ascend_pd.channel.limits import ChannelLimits, RateLimitedWarnings
from vllm_ascend_pd.errors import RemoteProtocolError, one_line
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.identity import Endpoint
from vllm_ascend_pd.protocol.versions import OURS, Release
from vllm_ascend_pd.shared.backoff import Backoff
from vllm_ascend_pd.shared.resolver import Hosts, Resolver, literal, reach


@dataclass(slots=True, kw_only=True)
class Context:
    """Settings and callbacks that all links of one dialer share. Callbacks must not raise."""

    incarnation: str
    name: str
    secrets: Secrets | None
    on_message: Callable[[Endpoint, Any], None]
    on_unreachable: Callable[[Endpoint, str], None]  # for every attempt to connect that fails, with the reason
    count: Callable[[str], None]  # a fault, by reason; "unreachable" too
    limits: ChannelLimits = field(default_factory=ChannelLimits)
    jitter: Callable[[], float] = random.random
    release: Release = OURS
    accepts: tuple[type, ...] = OF_WORKERS
    resolver: Resolver = field(default_factory=Resolver)
    warn: RateLimitedWarnings | None = None


class LinkState(enum.Enum):
    DOWN = "down"
    DIALLING = "dialling"
    GREETING = "greeting"
    UP = "up"


class Link:
    """Owner of at most one connection at a time."""

    def __init__(self, endpoint: Endpoint, context: Context) -> None:
        self._endpoint = endpoint
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._state = LinkState.DOWN
        self._queue: deque[tuple[float, Spoken]] = deque()
        self._backoff = Backoff(context.limits.backoff_first_s, context.limits.backoff_max_s, floor=0.5)
        self._failures = 0  # in a row
        self._not_before = 0.0
        self._asked = self._loop.time()
        self._up_since = 0.0
        self._dial: asyncio.Task[None] | None = None
        self._doubting: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self.connection: Connection | None = None
        self._hello: Hello | None = None
        self._guard: Guard | None = None
        self._secret = 0  # index of the accepted secret to use, modulo their number
        self._refusal = ""
        self._lost: asyncio.Event = asyncio.Event()
        self._reconnects = False
        self._closed = False

    @property
    def up(self) -> bool:
        return self._state is LinkState.UP

    def send(self, message: Spoken) -> bool:
        self._asked = self._loop.time()
        if self._state is LinkState.UP:
            return self._write(message)
        if len(self._queue) >= self._context.limits.max_queued:
            self._queue.popleft()  # the oldest is the least useful: what matters is repeated
            self._context.count("dropped_queue_full")
        self._queue.append((self._asked, message))
        self._wake()
        return True

    def doubt(self) -> None:
        """Dial anew if the peer's name leads elsewhere by now: the process at the other end is not the one meant."""
        free = self._state is LinkState.UP and self._doubting is None and not self._closed
        if free and literal(self._endpoint.host) is None:
            self._doubting = self._loop.create_task(self._check_name(self.connection))

    async def _check_name(self, connection: Connection | None) -> None:
        try:
            known = {host for _, host in await self._looked_up()}
        except OSError:
            return  # there is no better address
        finally:
            self._doubting = None
        if connection is not None and connection is self.connection and self._guard and connection.host not in known:
            self._context.count("elsewhere")
            connection.close(guarded_frame(self._guard, Leaving(False)))

    def sweep(self, now: float) -> None:
        limits = self._context.limits
        while self._queue and now - self._queue[0][0] > limits.message_ttl_s:
            self._queue.popleft()
            self._context.count("dropped_expired")
        connection = self.connection
        if connection is None:
            return
        if self._state is LinkState.GREETING and now - connection.opened > limits.greeting_s:
            self._refusal = f"no answer to the greeting within {limits.greeting_s:g} s"
            connection.abort()
        elif connection.partial_since and now - connection.partial_since > limits.frame_s:
            self._refusal = f"a frame took more than {limits.frame_s:g} s"
            connection.abort()
        elif connection.ending and now - connection.ending_since > limits.linger_s:
            connection.abort()

    def forgettable(self, now: float) -> bool:
        at_rest = self._state is LinkState.DOWN and not self._queue and self._retry is None
        return at_rest and now - self._asked > self._context.limits.idle_link_s

    async def close(self, quiet: bool) -> None:
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        for task in (self._dial, self._doubting):
            if task is not None:
                task.cancel()
        if self.connection is None:
            return
        farewell = guarded_frame(self._guard, Leaving(quiet)) if self._guard and self.up else b""
        self.connection.close(farewell)
        try:
            await asyncio.wait_for(self._lost.wait(), self._context.limits.linger_s)
        except asyncio.TimeoutError:
            self.connection.abort()

    # -- connecting

    def _wake(self) -> None:
        """Dial now, or when the back-off is over."""
        if self._closed or self._state is not LinkState.DOWN or self._retry is not None:
            return
        wait = self._not_before - self._loop.time()
        if wait > 0:
            self._retry = self._loop.call_later(wait, self._wake_after_wait)
        else:
            self._state = LinkState.DIALLING
            self._reconnects = False
            self._dial = self._loop.create_task(self._connect())

    def _wake_after_wait(self) -> None:
        self._retry = None
        if self._queue or self._reconnects:
            self._wake()

    async def _connect(self) -> None:
        limits = self._context.limits
        try:
            await asyncio.wait_for(self._reach(), limits.greeting_s)
        except asyncio.TimeoutError:
            if self.connection is None:  # else it was made at the same moment; the greeting has its own limit
                self._failed(f"no connection within {limits.greeting_s:g} s")
        except (OSError, RuntimeError) as error:  # no thread, where an address has a scope to be looked up
            self._failed(_reason(error))

    async def _reach(self) -> None:
        loop, size = self._loop, self._context.limits.send_buffer_bytes

        async def connect(host: str) -> None:
            await loop.create_connection(lambda: Connection(self, loop.time, size), host, self._endpoint.port)

        await reach(await self._looked_up(), connect)

    async def _looked_up(self) -> Hosts:
        try:
            return await self._context.resolver.newest(self._endpoint.host, self._context.limits.name_s)
        except OSError as unknown:
            raise OSError(unknown.strerror or str(unknown)) from unknown  # the reason is a look-up's own text

    def _wait_s(self) -> float:
        """Count one more failure, and return how long to wait."""
        self._failures += 1
        return self._backoff.delay(self._failures, self._context.jitter())

    def _failed(self, detail: str) -> None:
        """Handle a failed attempt: back off, dial again if messages wait, and report."""
        self._state = LinkState.DOWN
        self._not_before = self._loop.time() + self._wait_s()
        self._context.count("unreachable")
        if self._closed:
            return
        if self._queue:
            self._wake()
        self._context.on_unreachable(self._endpoint, detail)

    # -- Owner of the connection

    def connected(self, connection: Connection) -> None:
        self.connection = connection
        self._lost.clear()
        self._guard = None
        self._state = LinkState.GREETING
        context = self._context
        self._refusal = ""
        self._hello = greeting(context.incarnation, context.secrets, context.name, context.release)
        connection.send(clear_frame(self._hello))
        if self._closed:
            connection.abort()

    def frame(self, connection: Connection, kind: int, payload: memoryview) -> None:
        if kind == CLEAR:
            self._clear(connection, payload)
        elif self._guard is None:
            raise RemoteProtocolError("PD-CTRL-002", why="a guarded frame before the greeting")
        else:
            message = decode_guarded(self._guard.open(payload))
            if isinstance(message, Proof | Leaving):
                self._proven(message)
                return
            if self._state is not LinkState.UP:
                raise RemoteProtocolError("PD-CTRL-002", why="a message before the proof")
            if not isinstance(message, self._context.accepts):
                self._context.count("dropped_not_for_us")
                return
            self._context.on_message(self._endpoint, message)

    def offended(self, connection: Connection, error: RemoteProtocolError) -> None:
        self._context.count(error.code)
        self._refusal = self._refusal or str(error)
        if self._context.warn is not None:
            self._context.warn(error.code, "side channel: closing %s: %s", self._endpoint, error)
        connection.close()

    def ended(self, connection: Connection, ending: Ending, detail: str) -> None:
        was_up = self._state is LinkState.UP
        self.connection = None
        self._lost.set()
        if was_up and self._loop.time() - self._up_since > self._context.limits.backoff_max_s:
            self._failures = 0  # a connection that broke soon is no success
        if was_up and not self._refusal:
            self._state = LinkState.DOWN  # perhaps only the connection broke: the next attempt shows
            self._not_before = self._loop.time() + self._wait_s()
            if not self._closed:
                self._context.count("reconnects")
                self._reconnects = True  # even with an empty queue: D's fence watches this connection
                self._wake()
        else:
            self._failed(self._refusal or f"the connection ended during the greeting ({detail})")

    # -- the greeting

    def _clear(self, connection: Connection, payload: memoryview) -> None:
        message = decode_clear(payload)
        if isinstance(message, Goodbye):
            self._refusal = one_line(f"{message.code}: {message.detail}")
            self._context.count("refused")
            if message.code == "PD-SEC-003":
                self._secret += 1  # try another: the listener may lack the new secret still, or the old one already
            connection.close()
            return
        if self._state is not LinkState.GREETING or self._hello is None or self._guard:
            raise RemoteProtocolError("PD-CTRL-002", why="a second greeting")
        check_greeting(message, guarded=self._context.secrets is not None, ours=self._context.release)
        guards = candidates(self._context.secrets, self._hello, message, as_dialer=True)
        self._guard = guards[self._secret % len(guards)]
        connection.send(guarded_frame(self._guard, Proof()))

    def _proven(self, message: Proof | Leaving) -> None:
        connection = self.connection
        if self._state is not LinkState.GREETING or connection is None or not isinstance(message, Proof):
            raise RemoteProtocolError("PD-CTRL-002", why=f"an unexpected {type(message).__name__}")
        connection.allow(FRAME_BYTES)
        self._state = LinkState.UP
        self._up_since = self._loop.time()
        waiting, self._queue = self._queue, deque()
        for _, queued in waiting:
            self._write(queued)

    def _write(self, message: Spoken) -> bool:
        connection, guard = self.connection, self._guard
        if connection is None or guard is None:
            return False
        frame = guarded_frame(guard, message)
        if not connection.send(frame):
            self._context.count("dropped_buffer_full")
            return False
        return True


def _reason(error: OSError | RuntimeError) -> str:
    """Return the system's text for an error, in place of asyncio's text, which contains the address."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    return os.strerror(error.errno)
