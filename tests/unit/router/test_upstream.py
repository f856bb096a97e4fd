# SPDX-License-Identifier: Apache-2.0
"""The HTTP client for engines, against servers that send raw bytes, valid and invalid.

What the router needs of it, whichever library sends the bytes. Some of these promises aiohttp alone does not keep:
docs/decisions/http-client.md names them.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unit.kits.raw_server import Handle, RawServer, reset, says, until
from vllm_ascend_pd.router.upstream import Origin, Reply, Upstream
from vllm_ascend_pd.shared import http_session
from vllm_ascend_pd.shared.core.failures import HttpFailure, UpstreamError
from vllm_ascend_pd.shared.core.gathered import Payload


@asynccontextmanager
async def talking(
    handle: Handle, idle_s: float = 10.0, greeting: bytes = b"", max_connecting: int = 100
) -> AsyncIterator[tuple[RawServer, Origin, Upstream]]:
    server, upstream = await RawServer(handle, greeting).start(), Upstream(2.0, idle_s)
    upstream.session = http_session.HttpSession(2.0, max_connecting=max_connecting)
    try:
        yield server, Origin("http", "127.0.0.1", server.port), upstream
    finally:
        await upstream.close()
        server.stop()


async def ask(upstream: Upstream, origin: Origin, **more: object) -> Reply:
    arguments = {"method": "POST", "path": b"/x", "headers": [], "body": b"{}", "timeout_s": 5.0, **more}
    return await upstream.ask(origin, **arguments).head()  # type: ignore[arg-type]


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Y: z\r\n\r\nhello"


async def test_a_connection_is_used_again() -> None:
    async with talking(says(LENGTH)) as (server, origin, upstream):
        for _ in range(5):
            reply = await ask(upstream, origin)
            assert reply.status == 200 and (b"x-y", b"z") in reply.headers
            assert await reply.rest(100) == b"hello"
        assert server.connections == 1 and len(server.requests) == 5


@pytest.mark.parametrize(
    ("raw", "close", "body"),
    [
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel", b"lo\r\n0\r\n\r\n"), False, b"hello"),
        ((b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo"), True, b"hello"),
        ((b"HTTP/1.0 200 OK\r\n\r\nhello",), True, b"hello"),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), False, b""),
        ((b"HTTP/1.1 100 Continue\r\n\r\n", LENGTH), False, b"hello"),
        ((LENGTH.replace(b"X-Y: z", b"Connection: close"),), True, b"hello"),
        (tuple(bytes([b]) for b in LENGTH), False, b"hello"),
    ],
)
async def test_every_form_of_a_body_is_read(raw: tuple[bytes, ...], close: bool, body: bytes) -> None:
    async with talking(says(*raw, close=close, pause_s=0.005)) as (_, origin, upstream):
        for _ in range(2):
            reply = await ask(upstream, origin)
            assert await reply.rest(100) == body


async def test_an_answer_to_head_has_no_body() -> None:
    async with talking(says(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")) as (_, origin, upstream):
        reply = await ask(upstream, origin, method="HEAD", body=b"")
        assert reply.status == 200 and await reply.rest(100) == b""


async def test_pieces_come_as_they_are_sent() -> None:
    async with talking(says(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n", b"ab", b"cd", pause_s=0.1)) as (
        _,
        origin,
        upstream,
    ):
        reply = await ask(upstream, origin)
        assert [await reply.read(), await reply.read(), await reply.read()] == [b"ab", b"cd", b""]


async def test_an_unused_port_is_a_connect_failure() -> None:
    async with talking(says()) as (server, origin, upstream):
        server.stop()
        await until(lambda: server.stopped)
        with pytest.raises(UpstreamError) as raised:
            await ask(upstream, origin)
        assert raised.value.failure is HttpFailure.CONNECT


@pytest.mark.parametrize(
    ("raw", "close"),
    [
        ((), True),
        ((b"HTTP/1.1 200 OK\r\n",), True),
        ((b"nonsense\r\n\r\n",), False),
        ((b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * 200_000 + b"\r\n\r\n",), False),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",), False),
    ],
)
async def test_what_is_no_answer_is_broken(raw: tuple[bytes, ...], close: bool) -> None:
    async with talking(says(*raw, close=close)) as (server, origin, upstream):
        with pytest.raises(UpstreamError) as raised:
            await ask(upstream, origin)
        assert raised.value.failure is HttpFailure.BROKEN
        await until(lambda: server.closed == server.connections)


async def test_a_body_that_breaks_off_is_reported_after_what_came() -> None:
    for cut in (b"content-length: 9\r\n\r\nhello", b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"):
        async with talking(says(b"HTTP/1.1 200 OK\r\n" + cut, close=True)) as (_, origin, upstream):
            reply = await ask(upstream, origin)
            with pytest.raises(UpstreamError) as raised:
                assert await reply.read() == b"hello"
                await reply.read()
            assert raised.value.failure is HttpFailure.BROKEN


async def test_a_chunk_that_cannot_be_read_breaks_its_answer_off() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"
    async with talking(says(head, b"zz\r\n", pause_s=0.05), idle_s=60.0) as (server, origin, upstream):
        reply = await ask(upstream, origin)
        assert await reply.read() == b"hello"
        with pytest.raises(UpstreamError) as raised:
            await asyncio.wait_for(reply.read(), 5)
        assert raised.value.failure is HttpFailure.BROKEN
        await until(lambda: server.closed)


@pytest.mark.parametrize("length", [b"content-length: 9\r\n", b"transfer-encoding: chunked\r\n", b""])
async def test_a_body_that_a_reset_cuts_short_is_no_answer_however_late_it_is_read(length: bytes) -> None:
    """A body without a length would end with its connection, but only with a regular end of that."""
    piece = b"5\r\nhello\r\n" if b"chunked" in length else b"hello"
    resets = asyncio.Event()

    async def handle(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n" + piece)
        await resets.wait()
        reset(writer)

    async with talking(handle) as (server, origin, upstream):
        reply = await ask(upstream, origin)
        await asyncio.sleep(0.05)  # the piece is read ahead
        resets.set()
        await until(lambda: server.closed)
        await asyncio.sleep(0.05)  # the reset too
        assert await reply.read() == b"hello"
        with pytest.raises(UpstreamError) as raised:
            await reply.read()
        assert raised.value.failure is HttpFailure.BROKEN
        reply.close()


async def test_a_change_of_the_protocol_is_no_answer() -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello"
    async with talking(says(switch)) as (_, origin, upstream):
        with pytest.raises(UpstreamError):
            await ask(upstream, origin, timeout_s=0.3)


async def test_interim_answers_put_off_no_limit() -> None:
    async def interim(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with talking(interim) as (server, origin, upstream):
        with pytest.raises(UpstreamError) as raised:
            await ask(upstream, origin, timeout_s=0.3)
        assert raised.value.failure is HttpFailure.TIMEOUT
        await until(lambda: server.closed == 1)


async def test_silence_before_and_within_an_answer_ends_it() -> None:
    async with talking(says(pause_s=0)) as (_, origin, upstream):
        with pytest.raises(UpstreamError) as raised:
            await ask(upstream, origin, timeout_s=0.2)
        assert raised.value.failure is HttpFailure.TIMEOUT
    async with talking(says(LENGTH[:-1]), idle_s=0.2) as (_, origin, upstream):
        reply = await ask(upstream, origin)
        assert await reply.read() == b"hell"
        with pytest.raises(UpstreamError) as raised:
            await reply.read()
        assert raised.value.failure is HttpFailure.TIMEOUT


async def test_pieces_put_a_silence_off_and_a_shorter_limit_counts_from_then_on() -> None:
    async with talking(says(*(LENGTH[i : i + 1] for i in range(len(LENGTH) - 1)), pause_s=0.02), idle_s=60.0) as (
        _,
        origin,
        upstream,
    ):
        reply, got = await ask(upstream, origin, timeout_s=2.0), b""
        while len(got) < 4:
            got += await reply.read(0.5)
        began = asyncio.get_running_loop().time()
        with pytest.raises(UpstreamError) as raised:
            await asyncio.wait_for(reply.read(0.2), 5)
        assert got == b"hell" and raised.value.failure is HttpFailure.TIMEOUT
        assert asyncio.get_running_loop().time() - began > 0.19


async def test_a_slow_reader_is_no_silence() -> None:
    """While data waits for the client the engine is not read, so it cannot send more."""
    size, sent = 4 << 20, 0

    async def floods(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    async with talking(floods, idle_s=0.1) as (_, origin, upstream):
        reply, got = await ask(upstream, origin), 0
        while got < size // 2:  # the last of it may come without a pause
            before = -1
            while before != sent:
                before = sent
                upstream.suspect(origin, 0.05)
                await asyncio.sleep(0.2)
            got += len(await reply.read())
        assert got + len(await reply.rest(size)) == size


async def test_a_suspected_engine_fails_its_requests_unless_something_comes() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel"
    async with talking(says(head)) as (_, origin, upstream):
        reply = await ask(upstream, origin)
        upstream.suspect(origin, 0.05)
        assert await reply.read() == b"hel"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(reply.read(), 0.3)  # what came has ended the suspicion
        upstream.suspect(origin, 60.0)
        upstream.suspect(origin, 0.05)
        with pytest.raises(UpstreamError) as raised:
            await reply.read()
        assert raised.value.failure is HttpFailure.TIMEOUT
        reply.close()
    async with talking(says()) as (server, origin, upstream):
        asking = [asyncio.create_task(ask(upstream, origin)) for _ in range(2)]
        await until(lambda: len(server.requests) == 2)
        upstream.suspect(origin._replace(port=1), 0.01)
        upstream.suspect(origin, 0.01)
        upstream.trust_again(origin)
        assert not (await asyncio.wait(asking, timeout=0.2))[0]
        upstream.suspect(origin, 0.01)
        for each in asking:
            with pytest.raises(UpstreamError) as raised:
                await each
            assert raised.value.failure is HttpFailure.TIMEOUT
        await until(lambda: server.closed == 2)


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.1", "127.0.0.2"]], ids=["one", "two"])
async def test_a_refusal_is_one_however_many_addresses_refuse(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with talking(says()) as (server, origin, upstream):
        server.stop()

        def resolved(_: str, port: int, **more: object) -> list[tuple[object, ...]]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        with pytest.raises(UpstreamError) as raised:
            await ask(upstream, origin._replace(host="engine.example"))
        assert raised.value.failure is HttpFailure.CONNECT
        assert isinstance(raised.value.__cause__, ConnectionRefusedError)
        assert all(address in raised.value.why for address in addresses)


async def test_few_connections_are_made_at_once_and_who_waits_for_a_turn_has_all_its_time() -> None:
    """A burst of connections would time out; so would requests behind an engine that is slow to connect to."""
    silent = await RawServer(says()).start()
    async with talking(says(LENGTH), max_connecting=1) as (server, origin, upstream):
        hanging = asyncio.create_task(ask(upstream, Origin("https", "127.0.0.1", silent.port)))  # a handshake
        await until(lambda: silent.connections)
        asking = [asyncio.create_task(ask(upstream, origin, timeout_s=0.3)) for _ in range(3)]
        await asyncio.sleep(0.6)
        assert not server.connections
        with pytest.raises(UpstreamError) as raised:
            await hanging
        assert raised.value.failure is HttpFailure.CONNECT
        assert [await (await each).rest(100) for each in asking] == [b"hello"] * 3
    silent.stop()


async def test_cancelling_and_closing_are_seen_by_the_engine() -> None:
    async with talking(says()) as (server, origin, upstream):
        asking = asyncio.create_task(ask(upstream, origin, timeout_s=60.0))
        await until(lambda: server.requests)
        asking.cancel()
        await until(lambda: server.closed == 1)
    async with talking(says(LENGTH[:-1])) as (server, origin, upstream):
        (await ask(upstream, origin)).close()
        await until(lambda: server.closed == 1)


async def test_a_kept_connection_that_was_closed_costs_nothing() -> None:
    async with talking(says(LENGTH, close=True)) as (server, origin, upstream):
        for _ in range(5):
            reply = await ask(upstream, origin)
            assert await reply.rest(100) == b"hello"
        assert len(server.requests) == 5


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_a_kept_connection_closed_at_the_request_is_repeated_only_where_that_is_allowed(method: str) -> None:
    asked = 0

    async def closes_every_second(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        if asked % 2:
            writer.write(LENGTH)
        else:
            writer.close()

    async with talking(closes_every_second) as (server, origin, upstream):
        assert await (await ask(upstream, origin, method=method)).rest(100) == b"hello"
        assert await (await ask(upstream, origin, method=method)).rest(100) == b"hello"
        assert server.connections == 2 and asked == 3
        with pytest.raises(UpstreamError) as raised:
            await ask(upstream, origin, method=method, repeatable=False)
        assert raised.value.failure is HttpFailure.BROKEN and asked == 4


async def test_what_an_engine_that_died_may_have_read_does_not_count_as_never_sent() -> None:
    """Else another P would be asked for the same transfer, into which the dead one may have pushed."""

    async def dies_at_the_second(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:
            writer.write(LENGTH)
        else:
            server.stop()
            writer.close()

    async with talking(dies_at_the_second) as (server, origin, upstream):
        assert await (await ask(upstream, origin)).rest(100) == b"hello"
        with pytest.raises(UpstreamError, match="closed the connection, and then") as raised:
            await ask(upstream, origin)
        assert raised.value.failure is HttpFailure.BROKEN and len(server.requests) == 2
        with pytest.raises(UpstreamError) as raised:
            await ask(upstream, origin)
        assert raised.value.failure is HttpFailure.CONNECT


async def test_a_refusal_of_the_repetition_says_nothing_of_the_first() -> None:
    """An engine that died behind a push and is back answers 503: no other P may be asked for the same transfer."""

    async def refuses_at_the_third(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 2:
            writer.close()
        else:
            refusal = LENGTH.replace(b"200 OK", b"503 Service Unavailable")
            writer.write(LENGTH if len(server.requests) == 1 else refusal)

    async with talking(refuses_at_the_third) as (server, origin, upstream):
        assert await (await ask(upstream, origin)).rest(100) == b"hello"
        with pytest.raises(UpstreamError, match="and then: 503") as raised:
            await ask(upstream, origin)
        assert raised.value.failure is HttpFailure.BROKEN and len(server.requests) == 3


async def test_a_request_that_was_repeated_and_is_not_answered_may_have_been_executed() -> None:
    async def is_silent_at_the_third(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:
            writer.write(LENGTH)
        elif len(server.requests) == 2:
            writer.close()

    async with talking(is_silent_at_the_third) as (server, origin, upstream):
        assert await (await ask(upstream, origin)).rest(100) == b"hello"
        with pytest.raises(UpstreamError) as raised:
            await ask(upstream, origin, timeout_s=0.3)
        assert raised.value.failure is HttpFailure.TIMEOUT and len(server.requests) == 3


async def test_an_idle_connection_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_session, "IDLE_S", 0.2)
    async with talking(says(LENGTH)) as (server, origin, upstream):
        await (await ask(upstream, origin)).rest(100)
        await until(lambda: server.closed == 1)


async def test_an_answer_without_a_request_ends_the_connection() -> None:
    async with talking(says(LENGTH + LENGTH)) as (server, origin, upstream):
        for _ in range(3):
            assert await (await ask(upstream, origin)).rest(100) == b"hello"
        await until(lambda: server.closed == 3)


async def test_what_comes_later_and_nothing_asked_for_ends_the_connection() -> None:
    """Else it would be taken for the next answer. Who has sent the next request first cannot tell."""
    asked_for = asyncio.Event()

    async def says_more_later(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(LENGTH)
        await asked_for.wait()
        asked_for.clear()
        writer.write(LENGTH.replace(b"hello", b"wrong"))

    async with talking(says_more_later) as (server, origin, upstream):
        for connections in range(1, 4):
            assert await (await ask(upstream, origin)).rest(100) == b"hello"
            asked_for.set()
            await until(lambda ended=connections: server.closed == ended)
            assert server.connections == connections


async def test_what_comes_before_the_first_request_ends_the_connection() -> None:
    async with talking(says(LENGTH), greeting=LENGTH) as (server, origin, _):
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: http_session.HttpWire(loop), origin.host, origin.port)
        await until(lambda: server.closed == 1)
        assert not server.requests


async def test_a_request_that_is_not_read_holds_no_connection_once_it_is_given_up() -> None:
    """Bytes that wait to be sent would hold it for as long as the engine hangs."""
    let_go = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()
        await let_go.wait()
        writer.close()

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    upstream, origin = Upstream(2.0, 10.0), Origin("http", "127.0.0.1", listening.sockets[0].getsockname()[1])
    before = open_sockets()
    with pytest.raises(UpstreamError) as raised:
        await ask(upstream, origin, body=bytes(32 << 20), timeout_s=0.3)
    assert raised.value.failure is HttpFailure.TIMEOUT
    asking = asyncio.create_task(ask(upstream, origin, body=bytes(32 << 20)))
    await until(lambda: open_sockets() == before + 3)  # the server's ends, and ours of the second
    asking.cancel()
    await until(lambda: open_sockets() == before + 2)
    let_go.set()
    await upstream.close()
    listening.close()


def open_sockets() -> int:
    return sum(fd.is_socket() for fd in Path("/proc/self/fd").iterdir())


async def test_an_answer_may_come_before_the_request_is_sent() -> None:
    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(LENGTH.replace(b"200 OK", b"413 Too Large"))
        with suppress(ConnectionError):
            while await reader.read(1 << 16):  # some of it, as a server does that closes by and by
                await asyncio.sleep(0.01)
        writer.close()

    listening = await asyncio.start_server(refuses, "127.0.0.1", 0)
    upstream, origin = Upstream(2.0, 10.0), Origin("http", "127.0.0.1", listening.sockets[0].getsockname()[1])
    for _ in range(2):
        reply = await ask(upstream, origin, body=bytes(32 << 20))
        assert (reply.status, await reply.rest(100)) == (413, b"hello")
    await upstream.close()
    listening.close()


async def test_an_answer_is_given_as_it_is() -> None:
    """It is the client's: no redirect is followed, no cookie kept, nothing decompressed."""
    body = gzip.compress(b"hello")
    head = b"HTTP/1.1 307 X\r\nLocation: /y\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Encoding: gzip\r\n"
    async with talking(says(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)) as (server, origin, upstream):
        for _ in range(2):
            reply = await ask(upstream, origin)
            assert (reply.status, await reply.rest(100)) == (307, body)
            assert [value for name, value in reply.headers if name == b"set-cookie"] == [b"a=1", b"b=2"]
        assert [request.partition(b" ")[2][:2] for request in server.requests] == [b"/x", b"/x"]
        assert not any(b"cookie" in request.lower() for request in server.requests)


async def test_a_request_has_the_callers_headers_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with talking(says(LENGTH)) as (server, origin, upstream):
        given = [(b"x-a", b"1"), (b"x-a", b"2"), (b"x-name", "hä".encode())]
        await (await ask(upstream, origin, headers=given)).rest(100)
        await (await ask(upstream, origin, method="GET", body=b"")).rest(100)
        host = b"host: 127.0.0.1:%d" % origin.port
        first, second = ([line.lower() for line in request.split(b"\r\n")[1:] if line] for request in server.requests)
        assert sorted(first) == sorted([host, b"x-a: 1", b"x-a: 2", "x-name: hä".encode(), b"content-length: 2", b"{}"])
        assert second == [host]


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        (b"/v1/models/a%2Fb?x=a%20b&&y=%C3%A4+", b"/v1/models/a%2Fb?x=a%20b&&y=%C3%A4+"),
        (b"/v1/x?a=/?:@!$'()*,;[]{}|", b"/v1/x?a=/?:@!$'()*,;[]{}|"),
        (b"/v1/%7Euser/;a=b//c", b"/v1/%7Euser/;a=b//c"),
        ("/v1/ä?ö".encode(), b"/v1/%C3%A4?%C3%B6"),
        (b"/v1/\xff", b"/v1/%FF"),
    ],
)
async def test_a_target_is_sent_as_it_came(target: bytes, sent: bytes) -> None:
    async with talking(says(LENGTH)) as (server, origin, upstream):
        await (await ask(upstream, origin, path=target)).rest(100)
        assert server.requests[0].split(b" ")[1] == sent


async def test_a_slow_client_slows_the_engine() -> None:
    sent = 0

    async def floods(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(1024):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    async with talking(floods) as (_, origin, upstream):
        reply = await ask(upstream, origin)
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 32 << 20  # the rest is still at the engine
        assert len(await reply.rest(1 << 30)) == 64 << 20


async def test_an_answer_larger_than_allowed_is_refused() -> None:
    async with talking(says(LENGTH)) as (_, origin, upstream):
        with pytest.raises(UpstreamError):
            await (await ask(upstream, origin)).rest(3)


LARGE = bytes(range(256)) * 40_000


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        (b"", b""),
        (LARGE[:100_000], LARGE[:100_000]),
        (LARGE, LARGE),
        (memoryview(LARGE), LARGE),
        ([b"{", memoryview(LARGE), b"}"], b"{" + LARGE + b"}"),
        ([], b""),
    ],
    ids=["none", "short", "long", "a view", "pieces", "no pieces"],
)
async def test_every_form_of_a_request_arrives_whole(body: Payload, whole: bytes) -> None:
    async with talking(says(LENGTH)) as (server, origin, upstream):
        for _ in range(2):
            await (await ask(upstream, origin, body=body)).rest(100)
        assert [request.partition(b"\r\n\r\n")[2] for request in server.requests] == [whole] * 2
        assert all(b"content-length: %d\r\n" % len(whole) in request.lower() for request in server.requests)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_no_bytes_leave_anything_hanging_or_open(raw: bytes) -> None:
    async def run() -> None:
        async with talking(says(raw, close=True)) as (server, origin, upstream):
            with suppress(UpstreamError):
                await asyncio.wait_for((await ask(upstream, origin, timeout_s=2.0)).rest(1 << 20, 2.0), 5)
            await until(lambda: server.closed == server.connections)

    asyncio.run(run())
