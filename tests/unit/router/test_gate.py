# SPDX-License-Identifier: Apache-2.0
"""Callers' connections: silent ones cost little, and never keep others out."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from unit.kits.certificates import certificate, server_context
from vllm_ascend_pd.router.connection import CallerConnection, FrontDoor
from vllm_ascend_pd.router.exchange import AsgiSend
from vllm_ascend_pd.router.gate import Activity, ConnectionGate, Place, Places, caller_of
from vllm_ascend_pd.router.intake import CallerRequest

LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("certificates"), "gate", LOOPBACK)


class Echo(asyncio.Protocol):
    """A server of one line a connection: idle from its answer on."""

    def __init__(self, connections: Places, connection: Place) -> None:
        self._connections, self._connection = connections, connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connection.close = transport.abort
        self._connections.turn(self._connection, Activity.BUSY)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)
        self._connections.turn(self._connection, Activity.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self._connection)


@asynccontextmanager
async def gate(
    most: int, tls: ssl.SSLContext | None = None, *, first_byte_s: float = 600.0, handshakes: int = 100
) -> AsyncIterator[tuple[ConnectionGate, int]]:
    connections = Places(most)
    opened = ConnectionGate(
        lambda connection: Echo(connections, connection), connections, tls, first_byte_s, handshakes
    )
    with socket.create_server((LOOPBACK, 0), backlog=1024) as listening:
        opened.open(listening)
        try:
            yield opened, listening.getsockname()[1]
        finally:
            opened.close()
            for connection in tuple(connections.everyone()):
                connections.end(connection)
            await asyncio.sleep(0)  # what was handed over meanwhile sees its end
    assert len(connections) == 0


Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(port: int, host: str = LOOPBACK, tls: ssl.SSLContext | None = None) -> Line:
    name = LOOPBACK if tls is not None else None
    return await asyncio.open_connection(LOOPBACK, port, local_addr=(host, 0), ssl=tls, server_hostname=name)


async def says(line: Line, word: bytes = b"hello") -> bytes:
    """Send a word; return what comes back, empty if the connection was closed."""
    reader, writer = line
    try:
        writer.write(word)
        return await reader.read(100)
    except ConnectionError:
        return b""


async def closed(line: Line) -> bool:
    try:
        return await line[0].read(1) == b""
    except ConnectionError:
        return True


async def until_there(connections: Places, count: int) -> None:
    while len(connections) != count:
        await asyncio.sleep(0)


async def test_silent_connections_keep_no_client_out() -> None:
    async with gate(most=8) as (opened, port):
        silent = [await connect(port) for _ in range(30)]
        assert await says(await connect(port)) == b"hello"
        assert len(opened.places) == 8
        assert all([await closed(line) for line in silent[:23]])


async def test_silent_connections_keep_no_client_out_where_tls_is_spoken(files: tuple[Path, Path]) -> None:
    async with gate(most=8, tls=server_context(files)) as (opened, port):
        silent = [await connect(port) for _ in range(30)]
        assert not opened.places.in_handshake()  # which would cost memory
        assert await says(await connect(port, tls=ssl.create_default_context(cafile=str(files[0])))) == b"hello"
        assert len(opened.places) == 8
        for _, writer in silent:
            writer.close()


async def test_a_handshake_that_does_not_go_on_gives_way(files: tuple[Path, Path]) -> None:
    async with gate(most=100, tls=server_context(files), handshakes=4) as (opened, port):
        begun = [await connect(port) for _ in range(12)]
        for _, writer in begun:
            writer.write(b"\x16")
        assert all([await closed(line) for line in begun[:8]])
        assert len(opened.places.in_handshake()) == 4
        assert await says(await connect(port, tls=ssl.create_default_context(cafile=str(files[0])))) == b"hello"


async def test_a_silent_connection_ends_after_a_while() -> None:
    async with gate(most=100, first_byte_s=0.01) as (opened, port):
        assert await closed(await connect(port))
        await until_there(opened.places, 0)


async def test_a_handshake_ends_after_a_while(files: tuple[Path, Path]) -> None:
    async with gate(most=100, tls=server_context(files), first_byte_s=0.5) as (opened, port):
        line = await connect(port)
        line[1].write(b"\x16")
        assert await asyncio.wait_for(closed(line), 30)  # asyncio itself would end it after 60 s
        await until_there(opened.places, 0)


async def test_who_has_more_than_a_share_makes_room_among_its_own() -> None:
    async with gate(most=8) as (_, port):
        first = await connect(port)
        assert await says(first) == b"hello"  # and is idle for longest from now on
        others = []  # kept open: each wants a place
        for _ in range(30):
            others.append(await connect(port, "127.0.0.2"))
            assert await says(others[-1]) == b"hello"
        assert await says(first) == b"hello"
        assert await closed(others[0])


async def test_of_one_callers_connections_the_one_that_is_idle_for_longest_goes() -> None:
    async with gate(most=4) as (_, port):
        lines = [await connect(port) for _ in range(4)]
        for line in (*lines, lines[0]):
            assert await says(line) == b"hello"
        assert await says(await connect(port)) == b"hello"
        assert await closed(lines[1])
        assert await says(lines[0]) == b"hello"


class ListenerWithoutFiles(socket.socket):
    """A listening socket in a process without a free file handle, once."""

    refused = False

    def accept(self) -> tuple[socket.socket, object]:
        if not self.refused:
            self.refused = True
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_without_a_free_file_handle_the_longest_idle_connection_goes(caplog: pytest.LogCaptureFixture) -> None:
    async with gate(most=100) as (opened, port):
        idle = await connect(port)
        assert await says(idle) == b"hello"
        with ListenerWithoutFiles(socket.AF_INET, socket.SOCK_STREAM) as listening:
            listening.bind((LOOPBACK, 0))
            listening.listen()
            opened.open(listening)
            assert await says(await connect(listening.getsockname()[1])) == b"hello"
            assert await closed(idle)
            assert caplog.text.count("idle connections are ended for new ones: [Errno 24]") == 1
            listening.refused = False
            assert await says(await connect(listening.getsockname()[1])) == b"hello"
            assert listening.refused and caplog.text.count("[Errno 24]") == 1, "a storm is one line"


@given(st.lists(st.tuples(st.sampled_from(["enter", "turn", "leave"]), st.integers(0, 9), st.sampled_from(Activity))))
def test_only_the_quiet_give_way_and_only_where_there_is_no_place(steps: list[tuple[str, int, Activity]]) -> None:
    connections = Places(4)
    here: list[Place] = []

    def close(connection: Place) -> None:
        assert connection.activity is not Activity.BUSY and len(here) >= 4
        here.remove(connection)

    for what, which, activity in steps:
        if what == "enter":
            made = Place(f"peer {which % 3}", lambda: None)
            made.close = partial(close, made)
            connections.enter(made, activity)
            here.append(made)
        elif here and what == "turn":
            connections.turn(here[which % len(here)], activity)
        elif here:
            connections.leave(here.pop(which % len(here)))
        assert set(here) == set(connections.everyone()) and len(connections) == len(here)
        if what == "enter":
            assert len(here) <= 4 or all(one.activity is Activity.BUSY for one in here[:-1])


@pytest.mark.parametrize("activity", [Activity.IDLE, Activity.BUSY])
def test_what_a_connection_more_costs_does_not_grow_with_those_that_are_there(activity: Activity) -> None:
    """Looks at connections are counted: each has a hash, which a set or a dictionary asks for, and an activity."""

    class Counted(Place):
        __slots__ = ()
        looks = 0

        def __hash__(self) -> int:
            Counted.looks += 1
            return id(self)

        def __getattribute__(self, name: str) -> Any:
            Counted.looks += 1
            return super().__getattribute__(name)

    looks = []
    for most in (32, 1024):
        connections = Places(most)
        for number in range(most):
            connections.enter(Counted(f"peer {number % 8}", lambda: None), activity)
        Counted.looks = 0
        connections.enter(Counted("peer 0", lambda: None), Activity.IDLE)
        looks.append(Counted.looks)
    assert looks[0] == looks[1]


@pytest.mark.parametrize(
    ("host", "caller"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:1:2::3", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a name", "a name"),
    ],
)
def test_one_caller_has_one_address_or_network(host: str, caller: str) -> None:
    assert caller_of(host) == caller


async def ok(asked: CallerRequest, send: AsgiSend) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@LOOPS
def test_what_comes_between_an_answer_and_the_next_request_is_not_lost(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Complete heads, more of them than is kept: the next request begins only after that moment."""
    head = b"GET / HTTP/1.1\r\nhost: a\r\nx-padding: " + b"a" * 200_000 + b"\r\n\r\n"

    class Flooded(CallerConnection):
        flooded = False

        def end(self) -> None:
            super().end()
            if not self.flooded:
                self.flooded = True
                self.data_received(head * 12)

    async def asks() -> int:
        door = FrontDoor(ok, Places(8))
        opened = ConnectionGate(
            lambda place: Flooded(door, place, max_line_size=1 << 18, max_field_size=1 << 18), door.places
        )
        with socket.create_server((LOOPBACK, 0)) as listening:
            opened.open(listening)
            reader, writer = await connect(listening.getsockname()[1])
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            said = b""
            async with asyncio.timeout(30):
                while said.count(b"HTTP/1.1 200") < 13 and (more := await reader.read(1 << 16)):
                    said += more
            writer.close()
            opened.close()
            door.pre_shutdown()
            await door.shutdown(1.0)
            return said.count(b"HTTP/1.1 200")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(asks()) == 13


@LOOPS
@pytest.mark.parametrize("early", [True, False], ids=["before it is made", "once it is made"])
def test_a_request_of_the_moment_in_which_no_more_are_accepted_is_answered(
    new_loop: Callable[[], asyncio.AbstractEventLoop], early: bool
) -> None:
    """Its connection is the server's, although the task that hands it over has not returned yet."""

    class Last(CallerConnection):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            if early:
                asyncio.get_running_loop().call_soon(opened.close)

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            if not early:
                asyncio.get_running_loop().call_soon(opened.close)
            super().connection_made(transport)

    async def asks() -> bytes:
        nonlocal opened
        door = FrontDoor(ok, Places(8))
        opened = ConnectionGate(lambda place: Last(door, place), door.places)
        with socket.create_server((LOOPBACK, 0)) as listening:
            opened.open(listening)
            said = await says(await connect(listening.getsockname()[1]), b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            door.pre_shutdown()
            await door.shutdown(1.0)
            return said

    opened: ConnectionGate
    with asyncio.Runner(loop_factory=new_loop) as runner:
        said = runner.run(asks())
    assert said.startswith(b"HTTP/1.1 200") and said.endswith(b"ok")


@LOOPS
def test_with_tls_the_end_of_what_a_caller_sends_is_the_end_of_its_connection(
    new_loop: Callable[[], asyncio.AbstractEventLoop], files: tuple[Path, Path]
) -> None:
    """TLS itself knows the end of one direction. These loops answer it by that of the other, whatever we return."""

    async def hold(asked: CallerRequest, send: AsgiSend) -> None:
        asked.connection.watch(gone.set)
        coming.set()
        await gone.wait()
        await ok(asked, send)

    class Keeping(CallerConnection):
        def eof_received(self) -> bool:
            super().eof_received()
            return True

    async def asks() -> bytes:
        nonlocal coming, gone
        coming, gone = asyncio.Event(), asyncio.Event()
        door = FrontDoor(hold, Places(8))
        opened = ConnectionGate(lambda place: Keeping(door, place), door.places, server_context(files))
        with socket.create_server((LOOPBACK, 0)) as listening:
            opened.open(listening)
            client = ssl.create_default_context(cafile=str(files[0])).wrap_bio(
                came := ssl.MemoryBIO(), goes := ssl.MemoryBIO(), server_hostname=LOOPBACK
            )
            reader, writer = await connect(listening.getsockname()[1])

            async def until_done(step: Callable[[], object]) -> None:
                while True:
                    try:
                        step()
                        return
                    except ssl.SSLWantReadError:
                        writer.write(goes.read())
                        came.write(await reader.read(1 << 16))

            await until_done(client.do_handshake)
            client.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            writer.write(goes.read())
            await coming.wait()
            await until_done(client.unwrap)  # says that it ends, and waits for the same word
            await gone.wait()
            opened.close()
            door.pre_shutdown()
            await door.shutdown(1.0)
            writer.close()
            return came.read()

    coming: asyncio.Event
    gone: asyncio.Event
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(asks()) == b""
