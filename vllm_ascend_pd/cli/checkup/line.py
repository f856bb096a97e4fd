# SPDX-License-Identifier: Apache-2.0
"""A conversation between two doctors: the side channel's own greeting, then messages of the doctor.

The greeting is that of the engines, byte for byte: what is refused here would be refused there. So a doctor can also
call an engine, which answers the greeting. Sockets are blocking; every wait has a deadline.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from vllm_ascend_pd.channel.frames import (
    CLEAR,
    FRAME_BYTES,
    GUARDED,
    Clear,
    Goodbye,
    Guard,
    Hello,
    Proof,
    Splitter,
    clear_frame,
    decode_clear,
    decoded,
    guarded_frame,
)
from vllm_ascend_pd.channel.guards import candidates, check_greeting, greeting
from vllm_ascend_pd.errors import PdError, RemoteProtocolError
from vllm_ascend_pd.protocol.auth import Secrets
from vllm_ascend_pd.protocol.versions import OURS

DOCTOR = "vllm-ascend-pd doctor"  # the name in the greeting, by which one doctor knows another
GREETING_S = 5.0
M = TypeVar("M")


class Broken(Exception):
    """Error that ends the conversation: what happened, and what to do."""

    def __init__(self, says: str, remedy: str) -> None:
        super().__init__(says)
        self.says, self.remedy = says, remedy


class Line:
    """One connection. `peer` is the other side's greeting, once both have greeted."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._splitter = Splitter(FRAME_BYTES)
        self._frames: Iterator[tuple[int, memoryview]] = iter(())
        self._guard: Guard | None = None
        self.peer: Hello | None = None

    @property
    def own_host(self) -> str:
        """This side's address, as the other side can reach it."""
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        self._sock.close()

    # -- the greeting

    def greet_as_dialer(self, secrets: Secrets | None) -> None:
        """Greet, and take in the other side's greeting. Raise Broken if that fails."""
        hello = _hello(secrets)
        self._sock.sendall(clear_frame(hello))
        theirs = self._clear()
        _accept(theirs, secrets)
        self._guard = candidates(secrets, hello, theirs, as_dialer=True)[0]
        self._sock.sendall(guarded_frame(self._guard, Proof()))
        kind, payload = self._frame(GREETING_S)
        if kind == CLEAR:
            _refused(_read(payload))
        self._open(payload)
        self.peer = theirs

    def greet_as_listener(self, secrets: Secrets | None) -> None:
        """Answer the other side's greeting. Raise Broken if it is refused, after sending the reason."""
        theirs, mine = self._clear(), _hello(secrets)
        try:
            _accept(theirs, secrets)
            guards = candidates(secrets, theirs, mine, as_dialer=False)
            self._sock.sendall(clear_frame(mine))
            _, payload = self._frame(GREETING_S)
            self._guard = _first(guards, payload)
        except Broken as problem:
            code = "PD-CTRL-003" if not OURS.speaks_with(theirs.release) else "PD-SEC-003"
            self._sock.sendall(clear_frame(Goodbye(code, f"{problem.says} {problem.remedy}"[:1024])))
            raise
        self._sock.sendall(guarded_frame(self._guard, Proof()))
        self.peer = theirs

    # -- afterwards

    def say(self, message: msgspec.Struct) -> None:
        if self._guard is None:
            raise Broken("nothing can be said before the greeting", "This is a bug: report it.")
        body = bytes((GUARDED,)) + self._guard.protect(msgspec.msgpack.encode(message))
        self._sock.sendall(len(body).to_bytes(4, "big") + body)

    def receive(self, kind: type[M], within_s: float) -> M:
        """Return the next message. Raise Broken if none comes in time, or it is of another kind."""
        _, payload = self._frame(within_s)
        try:
            return decoded(msgspec.msgpack.Decoder(kind), self._open(payload))
        except RemoteProtocolError as problem:
            raise Broken(f"it is not understood: {problem}", "Install the same version on both hosts.") from problem

    def _open(self, payload: memoryview) -> bytes | memoryview:
        if self._guard is None:
            raise Broken("a signed frame before the greeting", "Install the same version on both hosts.")
        try:
            return self._guard.open(payload)
        except RemoteProtocolError as error:
            raise Broken(error.sentence, error.remedy) from error

    def _clear(self) -> Hello:
        kind, payload = self._frame(GREETING_S)
        if kind != CLEAR:
            raise Broken("its first frame is no greeting", "Is that the side channel's port?")
        said = _read(payload)
        return said if isinstance(said, Hello) else _refused(said)

    def _frame(self, within_s: float) -> tuple[int, memoryview]:
        end = time.monotonic() + within_s
        while True:
            try:
                frame = next(self._frames, None)
                if frame is not None:
                    return frame
                self._sock.settimeout(max(0.001, end - time.monotonic()))
                data = self._sock.recv(1 << 16)
            except RemoteProtocolError as error:
                raise Broken(
                    f"it does not speak the protocol: {error.sentence}", "Is that the side channel's port?"
                ) from error
            except TimeoutError as late:
                raise Broken(f"no answer within {within_s:g} s", "Is that the side channel's port?") from late
            except OSError as problem:
                raise Broken(f"the connection broke: {problem.strerror}", "See the other side's output.") from problem
            if not data:
                raise Broken(
                    "it closed the connection", "See the other side's output; is that the side channel's port?"
                )
            self._frames = self._splitter.feed(data)


def dial(host: str, port: int, within_s: float = GREETING_S) -> Line:
    """Connect to a doctor or an engine. Raise Broken if that fails."""
    try:
        return Line(socket.create_connection((host, port), within_s))
    except OSError as problem:
        why = problem.strerror or str(problem) or "no answer"
        remedy = "Start `vllm-ascend-pd doctor --listen` there (or the decode engine), and look at firewalls between."
        raise Broken(f"{host}:{port} cannot be reached: {why}", remedy) from problem


def _hello(secrets: Secrets | None) -> Hello:
    return greeting(os.urandom(8).hex(), secrets, DOCTOR)


def _accept(theirs: Hello, secrets: Secrets | None) -> None:
    try:
        check_greeting(theirs, guarded=secrets is not None)
    except PdError as error:
        raise Broken(f"{error.code}: {error.sentence}", error.remedy) from error


def _read(payload: memoryview) -> Clear:
    try:
        return decode_clear(payload)
    except RemoteProtocolError as error:
        says = f"its greeting is not understood: {error.sentence}"
        raise Broken(says, "Is that the side channel's port?") from error


def _refused(said: Clear) -> Any:
    words = f"{said.code}: {said.detail}" if isinstance(said, Goodbye) else "it greeted twice"
    raise Broken(words, "Make version and secret_file the same on both hosts.")


def _first(guards: list[Guard], payload: memoryview) -> Guard:
    for guard in guards:
        try:
            guard.open(payload)
        except RemoteProtocolError:
            continue
        return guard
    raise Broken("the two sides have different secrets", "Check that both engines use the same secret_file.")
