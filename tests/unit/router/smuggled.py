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


class Attack(NamedTuple):
    """Pieces that are written to one connection, one after the other."""

    name: str
    pieces: tuple[bytes, ...]


def completion(prompt: str) -> bytes:
    return json.dumps({"model": "fake", "prompt": prompt, "max_tokens": 3}).encode()


def request(body: bytes, head: bytes = b"", length: bool = True) -> bytes:
    sized = b"Content-Length: %d\r\n" % len(body) if length else b""
    kind = b"Host: x\r\nContent-Type: application/json\r\n"
    return b"POST " + COMPLETIONS.encode() + b" HTTP/1.1\r\n" + kind + head + sized + b"\r\n" + body


def chunked(body: bytes, trailer: bytes = b"") -> bytes:
    return b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailer)


def hidden(tag: str) -> bytes:
    """Return a request that a right server sees as a part of another one's body."""
    return request(completion(f"hidden behind {tag}"))


def cut(data: bytes, at: int) -> tuple[bytes, ...]:
    return (data[:at], data[at:]) if 0 < at < len(data) else (data,)


def attacks() -> Iterator[Attack]:
    """Return every kind, 200 of them."""
    count = 0
    for number, offer in enumerate(_UPGRADES):
        # A server that ends the request at its head, and drops what came with the head, finds these in a later read.
        name = f"upgrade {number} before empty lines"
        yield Attack(name, (request(b"\r\n" * (200_000 + 50_000 * number) + 3 * hidden(name), offer),))
        count += 1
        for at in range(11):  # the body in two pieces, cut in its own part, at the hidden request and in it
            name = f"upgrade {number} cut {at}"
            first = completion(name)
            body = first + b"\r\n" * (at % 3) + hidden(name)
            whole = request(body, offer)
            begins = len(whole) - len(body)
            where = (begins, begins + 1, begins + len(first), begins + len(first) + 2 * (at % 3), len(whole) - 7)
            yield Attack(name, cut(whole, where[at % 5]))
            count += 1
        for coded in (b"chunked", b"Chunked"):
            name = f"upgrade {number} in chunks, {coded.decode()}"
            head = offer + b"Transfer-Encoding: %b\r\n" % coded
            yield Attack(name, (request(b"", head, length=False), chunked(completion(name) + b" " + hidden(name))))
            count += 1
    forms = (
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
    for number, form in enumerate(forms):
        for at in range(4):
            name = f"length and chunks {number} cut {at}"
            whole = request(b"0\r\n\r\n" + hidden(name), form)
            yield Attack(name, cut(whole, len(whole) - (0, 1, 30, 150)[at]))
            name = f"chunks and a short length {number} cut {at}"
            short = form + b"Content-Length: 4\r\n"
            whole = request(chunked(completion(name) + hidden(name)), short, length=False)
            yield Attack(name, cut(whole, len(whole) - (0, 1, 30, 150)[at]))
            count += 2
    lengths = (b"+5", b"-5", b"0x5", b"5 5", b"5, 6", b"05", b"", b"99999999999999999999999", b"5\x00")
    for number, length in enumerate(lengths):
        name = f"length {number}"
        yield Attack(name, (request(b"12345" + hidden(name), b"Content-Length: %b\r\n" % length, length=False),))
        name = f"two lengths {number}"
        head = b"Content-Length: 5\r\nContent-Length: %b\r\n" % length
        yield Attack(name, (request(b"12345" + hidden(name), head, length=False),))
        count += 2
    trailers = (b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: y\r\n", b" folded\r\n")
    for number, trailer in enumerate(trailers):
        name = f"trailer {number}"
        body = chunked(completion(name), trailer)
        yield Attack(name, (request(body, b"Transfer-Encoding: chunked\r\n", length=False),))
        count += 1
    for number in range(200 - count):
        name = f"pipelined {number}"  # no attack: both are requests, and this client gets both answers
        yield Attack(name, cut(request(completion(name)) + hidden(name), 40 * (number + 1)))
