# SPDX-License-Identifier: Apache-2.0
"""Requests that try to make an HTTP server and a proxy in front of it disagree about where a request ends.

Each hides a second request, for another prompt. If it is taken for a request of its own, the connection has one answer
too many, and a proxy gives that to whoever uses the connection next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

COMPLETIONS = "/v1/completions"
# What a JDK's HttpClient sends with each POST in clear text: an offer to go on in HTTP/2, which no server need take.
JDK_OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUser-Agent: Java-http-client/17.0.21\r\n"
)
_UPGRADES = (
    JDK_OFFER,
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"Connection: keep-alive, Upgrade\r\nUpgrade: TLS/1.0, anything\r\n",
    b"Upgrade: websocket\r\n",
)
_FORMS = (
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding:\tchunked\r\n",
    b"Transfer-Encoding: xchunked\r\n",
    b"Transfer-Encoding: identity, chunked\r\n",
    b"Transfer-Encoding: chunked, identity\r\n",
    b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding:\r\n chunked\r\n",
    b"X: y\r\n Transfer-Encoding: chunked\r\n",
    b"X: y\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: \x0bchunked\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 4, 4\r\n",
)
_LENGTHS = (b"+5", b"-5", b"0x5", b"5 5", b"5, 6", b"05", b"", b"99999999999999999999999", b"5\x00")
_TRAILERS = (b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: y\r\n", b" folded\r\n")


class Attack(NamedTuple):
    """Bytes that are written to one connection, whole or in pieces."""

    name: str
    data: bytes
    body: int = 0  # offset of the body
    cuts: bool = True  # whether it is short enough to be cut everywhere

    def boundaries(self) -> range:
        """Return where it may be cut: in the end of its head, and before each byte of its body."""
        return range(max(1, self.body - 4), len(self.data) if self.cuts else 0)


def completion(prompt: str) -> bytes:
    return json.dumps({"model": "fake", "prompt": prompt, "max_tokens": 3}).encode()


def request(body: bytes, head: bytes = b"", length: bool = True) -> bytes:
    sized = b"Content-Length: %d\r\n" % len(body) if length else b""
    kind = b"Host: x\r\nContent-Type: application/json\r\n"
    return b"POST " + COMPLETIONS.encode() + b" HTTP/1.1\r\n" + kind + head + sized + b"\r\n" + body


def chunked(body: bytes, trailer: bytes = b"") -> bytes:
    return b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailer)


HIDDEN = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
    COMPLETIONS.encode(),
    len(completion("hidden")),
    completion("hidden"),
)


def attack(name: str, body: bytes, head: bytes, length: bool = False) -> Attack:
    data = request(body, head, length)
    return Attack(name, data, len(data) - len(body))


def attacks() -> Iterator[Attack]:
    """Return one of each kind."""
    first = completion("mine")
    for number, offer in enumerate(_UPGRADES):
        # A server that ends the request at its head, and drops what came with the head, finds these in a later read.
        name, body = f"upgrade {number}", b"\r\n" * (200_000 + 50_000 * number) + 3 * HIDDEN
        yield attack(f"{name} before empty lines", body, offer, length=True)._replace(cuts=False)
        yield attack(name, first + b"\r\n" * (number % 3) + HIDDEN, offer, length=True)
        for coding in (b"chunked", b"Chunked"):
            head = offer + b"Transfer-Encoding: %b\r\n" % coding
            yield attack(f"{name} in chunks, {coding.decode()}", chunked(first + b" " + HIDDEN), head)
    for number, form in enumerate(_FORMS):
        yield attack(f"length and chunks {number}", b"0\r\n\r\n" + HIDDEN, form, length=True)
        head = form + b"Content-Length: 4\r\n"
        yield attack(f"chunks and a short length {number}", chunked(first + HIDDEN), head)
    for number, length in enumerate(_LENGTHS):
        head = b"Content-Length: %b\r\n" % length
        yield attack(f"length {number}", b"12345" + HIDDEN, head)
        yield attack(f"two lengths {number}", b"12345" + HIDDEN, b"Content-Length: 5\r\n" + head)
    for number, trailer in enumerate(_TRAILERS):
        yield attack(f"trailer {number}", chunked(first, trailer), b"Transfer-Encoding: chunked\r\n")
    # No attack: both are requests, and this client gets both answers.
    pipelined = attack("pipelined", first, b"", length=True)
    yield pipelined._replace(data=pipelined.data + HIDDEN)
