# SPDX-License-Identifier: Apache-2.0
"""The HTTP client for engines, against servers that send raw bytes, valid and invalid."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.http import http1 as module
from vllm_ascend_pd.http.core.failures import HttpFailure
from vllm_ascend_pd.http.http1 import Origin, Reply, Upstream, UpstreamError

Handle = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawServer:
    """Read a request and call `handle`, which writes the answer. Count connections and requests."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.connections = 0
        self.requests: list[bytes] = []
        self.closed = 0

    async def start(self) -> Origin:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return Origin("http", "127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [h for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                self.requests.append(head + body)
                await self._handle(head + body, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()

    def stop(self) -> None:
        self._server.close()


@asynccontextmanager
async def talking(handle: Handle, idle_s: float = 10.0) -> AsyncIterator[tuple[RawServer, Origin, Upstream]]:
    server, upstream = RawServer(handle), Upstream(2.0, idle_s)
    origin = await server.start()
    try:
        yield server, origin, upstream
    finally:
        await upstream.close()
        server.stop()


def says(*pieces: bytes, pause_s: float = 0.0, close: bool = False) -> Handle:
    async def handle(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if close:
            writer.close()

    return handle


async def ask(upstream: Upstream, origin: Origin, **more: object) -> Reply:
    arguments = {"method": "POST", "path": b"/x", "headers": [], "body": b"{}", "timeout_s": 5.0, **more}
    return await upstream.send(origin, **arguments)  # type: ignore[arg-type]


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Y: z\r\n\r\nhello"


async def until(promise: Callable[[], object]) -> None:
    end = asyncio.get_running_loop().time() + 10
    while not promise():
        assert asyncio.get_running_loop().time() < end, "it did not come true"
        await asyncio.sleep(0.01)


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
        await until(lambda: not server._server.is_serving())
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


async def test_a_slow_reader_is_no_silence() -> None:
    """While data waits for the client the engine is not read, so it cannot send more."""
    size = 8 << 20
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    async with talking(says(head + b"x" * size)) as (_, origin, upstream):
        reply, got = await ask(upstream, origin), 0
        (pool,) = upstream._pools.values()
        while got < size - (1 << 20):  # the last of it may come without a pause
            await until(lambda: all(connection._paused for connection in pool.busy))
            upstream.suspect(origin, -1.0)  # the limit has passed when reading goes on
            pool.sweep(asyncio.get_running_loop().time() + 3600.0)
            got += len(await reply.read())
            pool.sweep(asyncio.get_running_loop().time())
        assert got + len(await reply.rest(size)) == size


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


async def test_an_engine_that_is_not_asked_any_more_leaves_nothing() -> None:
    async with talking(says(LENGTH)) as (_, origin, upstream):
        for _ in range(2):
            await (await ask(upstream, origin)).rest(100)
            upstream.sweep(asyncio.get_running_loop().time())
            assert upstream._pools, "its connection is kept"
            upstream.sweep(asyncio.get_running_loop().time() + 3600.0)
            assert not upstream._pools


async def test_time_limits_hold_on_a_connection_whose_making_was_swept_over() -> None:
    async with talking(says()) as (server, origin, upstream):
        upstream._connecting = asyncio.Semaphore(1)
        async with upstream._connecting:  # so that it has to wait for its turn
            asking = asyncio.create_task(ask(upstream, origin, timeout_s=0.2))
            await until(lambda: upstream._pools)
            upstream.sweep(asyncio.get_running_loop().time() + 3600.0)
            assert upstream._pools and not server.connections
        with pytest.raises(UpstreamError) as raised:
            await asyncio.wait_for(asking, 30)
        assert raised.value.failure is HttpFailure.TIMEOUT


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


async def test_a_kept_connection_closed_at_the_request_is_repeated_only_where_that_is_allowed() -> None:
    asked = 0

    async def closes_every_second(_: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        if asked % 2:
            writer.write(LENGTH)
        else:
            writer.close()

    async with talking(closes_every_second) as (server, origin, upstream):
        assert await (await ask(upstream, origin)).rest(100) == b"hello"
        assert await (await ask(upstream, origin)).rest(100) == b"hello"
        assert server.connections == 2 and asked == 3
        with pytest.raises(UpstreamError) as raised:
            await ask(upstream, origin, repeatable=False)
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


async def test_an_idle_connection_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.2)
    async with talking(says(LENGTH)) as (server, origin, upstream):
        await (await ask(upstream, origin)).rest(100)
        await until(lambda: server.closed == 1)


async def test_an_answer_without_a_request_ends_the_connection() -> None:
    async with talking(says(LENGTH + LENGTH)) as (server, origin, upstream):
        for _ in range(3):
            assert await (await ask(upstream, origin)).rest(100) == b"hello"
        await until(lambda: server.closed == 3)


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


async def test_a_large_request_arrives_whole() -> None:
    body = bytes(range(256)) * 40_000
    async with talking(says(LENGTH)) as (server, origin, upstream):
        await (await ask(upstream, origin, body=body)).rest(100)
        assert server.requests[0].endswith(body)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_no_bytes_leave_anything_hanging_or_open(raw: bytes) -> None:
    async def run() -> None:
        async with talking(says(raw, close=True)) as (server, origin, upstream):
            with suppress(UpstreamError):
                await asyncio.wait_for((await ask(upstream, origin, timeout_s=2.0)).rest(1 << 20, 2.0), 5)
            await until(lambda: server.closed == server.connections)

    asyncio.run(run())
