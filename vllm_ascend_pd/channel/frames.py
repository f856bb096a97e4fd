# SPDX-License-Identifier: Apache-2.0
"""Wire format of a side-channel connection: length-prefixed frames, and the few messages of the channel itself.

A frame is four bytes of length (big-endian) and a body; the body's first byte says whether the rest is CLEAR
(greeting and refusal, which need no key) or GUARDED (everything else; signed when a secret is configured).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Protocol, TypeAlias, TypeVar, get_args

import msgspec

from vllm_ascend_pd.errors import LocalProtocolError, RemoteProtocolError
from vllm_ascend_pd.geometry.layout import Name
from vllm_ascend_pd.protocol.failure import Text
from vllm_ascend_pd.protocol.identity import Token
from vllm_ascend_pd.protocol.meeting import Meeting, Unwanted
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES, Message
from vllm_ascend_pd.protocol.versions import Release

CLEAR = 0x01
GUARDED = 0x02

GREETING_BYTES = 4096  # before a peer has proven itself it may not send more than this in one frame
FRAME_BYTES = MAX_MESSAGE_BYTES + 4096
NONCE_BYTES = 32

_LENGTH = struct.Struct(">I")
Features: TypeAlias = Annotated[tuple[Token, ...], msgspec.Meta(max_length=64)]
Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first frame of either side. Its format is the same in every version, so that any version is recognised."""

    version: int  # the newest that this side speaks
    incarnation: Token
    nonce: Nonce
    guarded: bool  # whether this side has a secret
    name: Name = ""
    oldest: int = 0  # the oldest that this side speaks; version 1 does not send it
    features: Features = ()

    @property
    def release(self) -> Release:
        return Release(self.version, self.oldest or self.version, self.features)


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """Listener → dialer: the connection is refused, or closed for an error. `detail` is text for humans."""

    code: Token
    detail: Text


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The first guarded frame of either side. It proves that its sender holds the key of this connection.

    The dialer sends its own first.
    """


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """Dialer → listener: the dialer closes this connection on purpose.

    Without `quiet` the closing proves nothing about the process and its writes. With it the dialer vouches that its
    transfer engine is closed, so nothing of it can land any more.
    """

    quiet: bool


T = TypeVar("T")
Clear: TypeAlias = Hello | Goodbye
Spoken: TypeAlias = Message | Meeting
Guarded: TypeAlias = Spoken | Proof | Leaving

_encoder = msgspec.msgpack.Encoder()
_clear: msgspec.msgpack.Decoder[Clear] = msgspec.msgpack.Decoder(Clear)
_guarded: msgspec.msgpack.Decoder[Guarded] = msgspec.msgpack.Decoder(Guarded)


OF_WORKERS: tuple[type, ...] = get_args(Message)  # messages between workers
OF_SCHEDULERS: tuple[type, ...] = get_args(Meeting)


def dialer_of(message: Spoken) -> str:
    """Return the incarnation that a message of a dialer names as its sender."""
    if isinstance(message, Message):
        return message.p_incarnation
    return message.d_incarnation if isinstance(message, Unwanted) else message.transfer.incarnation


class Guard(Protocol):
    """Protection of one connection: signs what is sent, checks what is received."""

    def protect(self, payload: bytes) -> bytes: ...

    def open(self, body: memoryview) -> bytes | memoryview:
        """Return the payload. Raise RemoteProtocolError if the body is not the peer's, or was seen before."""


class Unguarded:
    """Guard without a secret: every peer that can connect is trusted."""

    def protect(self, payload: bytes) -> bytes:
        return payload

    def open(self, body: memoryview) -> memoryview:
        return body


def clear_frame(message: Clear) -> bytes:
    return _frame(CLEAR, _encoder.encode(message))


def guarded_frame(guard: Guard, message: Guarded) -> bytes:
    payload = _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise LocalProtocolError(f"{type(message).__name__} of {len(payload)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return _frame(GUARDED, guard.protect(payload))


def decode_clear(payload: memoryview) -> Clear:
    return decoded(_clear, payload)


def decode_guarded(payload: bytes | memoryview) -> Guarded:
    return decoded(_guarded, payload)


def _frame(kind: int, body: bytes) -> bytes:
    return b"".join((_LENGTH.pack(len(body) + 1), bytes((kind,)), body))


def decoded(decoder: msgspec.msgpack.Decoder[T], payload: bytes | memoryview) -> T:
    """Decode a payload. Raise RemoteProtocolError if it is invalid: no other exception, whatever the bytes are."""
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("PD-CTRL-002", why=str(error)[:200]) from None


class Splitter:
    """Splitter of a byte stream into frames. It never holds more than `limit` bytes and what one read brought."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """True if a frame has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[tuple[int, memoryview]]:
        """Yield (kind, payload) for every complete frame. Raise RemoteProtocolError on an impossible length."""
        self._buffer += data
        done = 0
        try:
            while (end := self._next_end(done)) is not None:
                body = bytes(memoryview(self._buffer)[done + 4 : end])
                done = end
                yield body[0], memoryview(body)[1:]
        finally:
            del self._buffer[:done]

    def _next_end(self, start: int) -> int | None:
        if len(self._buffer) - start < 4:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, start)
        if not 1 <= length <= self.limit:
            raise RemoteProtocolError("PD-CTRL-002", why=f"a frame of {length} bytes; at most {self.limit} are allowed")
        end = start + 4 + int(length)
        return end if end <= len(self._buffer) else None
