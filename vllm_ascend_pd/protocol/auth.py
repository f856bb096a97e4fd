# SPDX-License-Identifier: Apache-2.0
"""Authentication: signed sessions, sealed envelopes, and decoders that trust no input.

Every connection has keys of its own, one per direction, derived from the shared secret and both sides' greetings. A
frame carries a counter, and an HMAC-SHA256 over counter and payload. A counter is accepted once, inside a sliding
window, so a recorded frame cannot be replayed, neither on its own connection nor on another. A reservation passes
through third parties and is sealed as a whole with the secret itself.

Without a secret nothing is signed, and an envelope that is signed is refused. Nonces come from the caller. No function
here prints a key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from vllm_ascend_pd.errors import ConfigError, RemoteProtocolError
from vllm_ascend_pd.protocol.first import MAX_FIRST_BYTES, FirstToken
from vllm_ascend_pd.protocol.meeting import Source
from vllm_ascend_pd.protocol.messages import MAX_MESSAGE_BYTES, Message, Reservation, Versioned
from vllm_ascend_pd.protocol.reservation_format import SentReservation, as_sent, reservation_of
from vllm_ascend_pd.protocol.versions import OURS

_T = TypeVar("_T")

MIN_SECRET_BYTES = 32
MIN_NONCE_BYTES = 16
MAC_BYTES = 32
COUNTER_BYTES = 8
WINDOW = 1024  # counters: an older frame is accepted if it is less than this behind the newest

_SEALED_PLAIN = b"PDR\x00"
_SEALED_SIGNED = b"PDR\x01"
_SEAL_CONTEXT = b"vllm-ascend-pd reservation 1"
_SOURCE_CONTEXT = b"vllm-ascend-pd source 1"  # one context per type: no envelope passes for one of another type
_FIRST_CONTEXT = b"vllm-ascend-pd first token 1"
_SESSION_CONTEXT = b"vllm-ascend-pd session 1"

_encoder = msgspec.msgpack.Encoder()
_version_decoder = msgspec.msgpack.Decoder(Versioned)
_first_decoder = msgspec.msgpack.Decoder(FirstToken)
_reservation_decoder: msgspec.msgpack.Decoder[SentReservation] = msgspec.msgpack.Decoder(SentReservation)
_source_decoder: msgspec.msgpack.Decoder[Source] = msgspec.msgpack.Decoder(Source)


class Secrets:
    """Secret that signs, and a previous one that is accepted too while secrets are rotated. Never in a repr."""

    def __init__(self, current: bytes, previous: bytes | None = None) -> None:
        self._accepted: tuple[bytes, ...] = (current,) if previous is None else (current, previous)
        for secret in self._accepted:
            if len(secret) < MIN_SECRET_BYTES:
                raise ConfigError("PD-SEC-001", path="secret_file", why=f"it has {len(secret)} bytes")

    @property
    def accepted(self) -> tuple[bytes, ...]:
        return self._accepted

    @property
    def current(self) -> bytes:
        return self.accepted[0]


@dataclass(frozen=True, slots=True)
class Greeting:
    """Parts of one side's greeting from which the keys of a connection are derived."""

    nonce: bytes
    incarnation: str


@dataclass(frozen=True, slots=True)
class SessionKey:
    """The two keys of one connection under one secret."""

    to_listener: bytes = field(repr=False)
    to_dialer: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes, dialer: Greeting, listener: Greeting) -> SessionKey:
        """Derive the keys. Both sides get the same; another nonce, incarnation or secret on a side changes them."""
        for side in (dialer, listener):
            if len(side.nonce) < MIN_NONCE_BYTES:
                raise RemoteProtocolError("PD-SEC-003", why=f"a nonce of {len(side.nonce)} bytes")
        parts = (dialer.nonce, dialer.incarnation.encode(), listener.nonce, listener.incarnation.encode())
        spoken = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return cls(
            to_listener=_mac(secret, _SESSION_CONTEXT, b" to listener", spoken),
            to_dialer=_mac(secret, _SESSION_CONTEXT, b" to dialer", spoken),
        )


class Signer:
    """Signer of one direction of a connection. A repeated message gets a new counter, and so a new signature."""

    def __init__(self, key: bytes) -> None:
        self._hmac = hmac.new(key, digestmod=hashlib.sha256)
        self._counter = 0

    def sign(self, payload: bytes) -> bytes:
        self._counter += 1
        counter = self._counter.to_bytes(COUNTER_BYTES, "big")
        signed = self._hmac.copy()
        signed.update(counter)
        signed.update(payload)
        return b"".join((counter, signed.digest(), payload))


class Verifier:
    """Verifier of one direction of a connection: checks signatures in constant time, accepts each counter once."""

    def __init__(self, key: bytes, window: int = WINDOW) -> None:
        self._hmac = hmac.new(key, digestmod=hashlib.sha256)
        self._window = window
        self._newest = 0
        self._seen = 0  # bit i: counter newest - i has been accepted

    def verify(self, frame: bytes | memoryview) -> memoryview:
        """Return the payload, or raise RemoteProtocolError. A refused frame changes nothing."""
        view = memoryview(frame)
        if not COUNTER_BYTES + MAC_BYTES <= len(view) <= COUNTER_BYTES + MAC_BYTES + MAX_MESSAGE_BYTES:
            raise RemoteProtocolError("PD-SEC-003", why=f"a frame of {len(view)} bytes")
        signed = self._hmac.copy()
        signed.update(view[:COUNTER_BYTES])
        signed.update(view[COUNTER_BYTES + MAC_BYTES :])
        if not hmac.compare_digest(signed.digest(), view[COUNTER_BYTES : COUNTER_BYTES + MAC_BYTES]):
            raise RemoteProtocolError("PD-SEC-003", why="the signature does not fit")
        self._accept_once(int.from_bytes(view[:COUNTER_BYTES], "big"))
        return view[COUNTER_BYTES + MAC_BYTES :]

    def _accept_once(self, counter: int) -> None:
        behind = self._newest - counter
        if counter < 1 or behind >= self._window or (behind >= 0 and self._seen >> behind & 1):
            raise RemoteProtocolError("PD-SEC-003", why="the frame was seen before")
        if behind < 0:
            # A peer chooses the counter, so the shift may be huge: shift only if it stays inside the window.
            self._seen = 1 if -behind >= self._window else (self._seen << -behind | 1) & ((1 << self._window) - 1)
            self._newest = counter
        else:
            self._seen |= 1 << behind


class Session:
    """One side of a connection under one secret: signs what is sent, checks what is received."""

    def __init__(self, key: SessionKey, *, as_dialer: bool) -> None:
        self._signer = Signer(key.to_listener if as_dialer else key.to_dialer)
        self._verifier = Verifier(key.to_dialer if as_dialer else key.to_listener)

    def protect(self, payload: bytes) -> bytes:
        return self._signer.sign(payload)

    def open(self, body: bytes | memoryview) -> memoryview:
        return self._verifier.verify(body)


def sessions(secrets: Secrets, dialer: Greeting, listener: Greeting, *, as_dialer: bool) -> list[Session]:
    """Return one session per accepted secret, the current one first.

    The dialer uses the current one, and the next if the listener refuses it. The listener keeps the first session that
    opens the dialer's first frame, and answers under it.
    """
    keys = [SessionKey.derive(secret, dialer, listener) for secret in secrets.accepted]
    return [Session(key, as_dialer=as_dialer) for key in keys]


# -- reservations


def seal(reservation: Reservation, secrets: Secrets | None) -> bytes:
    """Return the envelope in which a reservation travels, signed if there is a secret."""
    return _enveloped(_encoder.encode(as_sent(reservation)), secrets, _SEAL_CONTEXT)


def unseal(sealed: bytes, secrets: Secrets | None) -> Reservation:
    """Return the reservation in an envelope.

    Raise RemoteProtocolError: PD-SEC-003 for the signature, PD-CTRL-002 for bytes that are no reservation, PD-CTRL-003
    and PD-CTRL-004 for one that this release does not understand.
    """
    return decode_reservation(_opened(sealed, secrets, _SEAL_CONTEXT, "reservation"))


def seal_source(source: Source, secrets: Secrets | None) -> bytes:
    """Return the envelope in which P's answer carries a source, signed if there is a secret."""
    return _enveloped(_encoder.encode(source), secrets, _SOURCE_CONTEXT)


def unseal_source(sealed: bytes, secrets: Secrets | None) -> Source:
    """Return the source in an envelope. Raise as `unseal` does."""
    payload = _opened(sealed, secrets, _SOURCE_CONTEXT, "source")
    _check_version(payload)
    source = _decoded(_source_decoder, payload)
    refusal = OURS.refusal(source.version, source.needs)
    if refusal is not None:
        raise RemoteProtocolError(refusal.code, **refusal.values)
    return source


def seal_first(first: FirstToken, secrets: Secrets | None) -> bytes:
    """Return the envelope in which a first token travels, signed if there is a secret."""
    return _enveloped(_encoder.encode(first), secrets, _FIRST_CONTEXT)


def unseal_first(sealed: bytes, secrets: Secrets | None) -> FirstToken:
    """Return the first token in an envelope. Raise as `unseal` does."""
    if len(sealed) > MAX_FIRST_BYTES:
        raise RemoteProtocolError("PD-CTRL-002", why=f"a first token of {len(sealed)} bytes")
    payload = _opened(sealed, secrets, _FIRST_CONTEXT, "first token")
    _check_version(payload)
    return _decoded(_first_decoder, payload)


def _enveloped(payload: bytes, secrets: Secrets | None, context: bytes) -> bytes:
    if secrets is None:
        return _SEALED_PLAIN + payload
    return b"".join((_SEALED_SIGNED, _mac(secrets.current, context, payload), payload))


def _opened(sealed: bytes, secrets: Secrets | None, context: bytes, what: str) -> memoryview:
    head, body = sealed[:4], memoryview(sealed)[4:]
    if head not in (_SEALED_PLAIN, _SEALED_SIGNED):
        raise RemoteProtocolError("PD-CTRL-002", why=f"not a sealed {what}")
    if secrets is None:
        if head != _SEALED_PLAIN:
            raise RemoteProtocolError("PD-SEC-003", why=f"a signed {what}, but no secret_file is configured here")
        return body
    if head != _SEALED_SIGNED:
        raise RemoteProtocolError("PD-SEC-003", why=f"the {what} is not signed")
    payload = body[MAC_BYTES:]
    fits = [hmac.compare_digest(_mac(s, context, payload), body[:MAC_BYTES]) for s in secrets.accepted]
    if not any(fits):
        raise RemoteProtocolError("PD-SEC-003", why=f"the signature of the {what} does not fit")
    return payload


# -- decoders


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_reservation(payload: bytes | memoryview) -> Reservation:
    """Return the reservation inside an envelope. Raise RemoteProtocolError: nothing else, whatever the bytes are.

    The version is checked first: a reservation of another version need not have the same fields.
    """
    _check_version(payload)
    return reservation_of(_decoded(_reservation_decoder, payload))


def _check_version(payload: bytes | memoryview) -> None:
    with contextlib.suppress(msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        refusal = OURS.refusal(_version_decoder.decode(payload).version, ())
        if refusal is not None:
            raise RemoteProtocolError(refusal.code, **refusal.values)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], payload: bytes | memoryview) -> _T:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise RemoteProtocolError("PD-CTRL-002", why=f"{len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("PD-CTRL-002", why=str(error)[:200]) from None


# -- prompts


def prompt_hash(
    token_ids: Sequence[int], lora: str | None = None, cache_salt: str | None = None, mm_hashes: Sequence[str] = ()
) -> str:
    """Return the hash of everything that determines a prompt's KV, apart from the model: 64 hex digits."""
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)  # NumPy takes four times as long for a list
    parts = [tokens, _optional(lora), _optional(cache_salt), *(name.encode() for name in mm_hashes)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def _optional(text: str | None) -> bytes:
    """Return bytes that differ for None and "", which are different values."""
    return b"-" if text is None else b"+" + text.encode()


def _mac(key: bytes, *parts: bytes | memoryview) -> bytes:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(part)
    return mac.digest()
